"""Settings that all networks share, and settings of networks for texts: sequences in, logits out, adapters."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Choice, Integer, Positive, Settings, Table, absent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from fedpriv.core.columns import ColumnSpec

Shape = tuple[int, int, int]

# Up to version 0.2 the settings of every network had these keys. Noise is keyed by a digest of the settings.
_ONCE_OF_ALL = {"hidden": [1024, 1024], "activation": "relu"}


@dataclass(frozen=True)
class SequenceShape:
    """What a network takes and gives."""

    length: int  # T, tokens of a sequence
    vocabulary: int  # V, tokens that there are; 0 is nothing, and stands behind a text
    tokenizer: str  # its name
    classes: int  # K, logits: of a sequence, or of each token
    is_next: bool  # whether the token after each is predicted: logits (B, T, K); else (B, K)
    folder: Path = Path("data")  # of the data sets, where pretrained weights lie

    @property
    def task(self) -> str:
        """What the data are, in words."""
        if self.is_next:
            return "texts whose next token is predicted (with data.text.label = 'COLUMN', texts to classify)"
        return "texts to classify"


class ModelSettings(Settings):
    """The section ``[model]``; a network is a subclass with a default ``name``, entered in ``MODELS``."""

    # whether the network is not one of this project's, which are known to treat examples separately; others are
    # tried before they train
    is_own: ClassVar[bool] = True

    name: str = Field(description="network, or your own as 'package.module:function'")
    init: Literal["default", "uniform"] = Field(
        "default", description="uniform: every weight from U(-0.5, 0.5), as in DLG"
    )

    @abstractmethod
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        """Return a new network; its weights may come from the global generators of torch, numpy and Python alone.

        Args:
            shape: (C, H, W) of an image.
            classes: number of logits.

        Raises:
            InputError: there is no such network for these images.
        """

    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        """Return a new network for sequences of tokens, int64 (B, T); else as :meth:`network`.

        Raises:
            InputError: there is no such network for texts.
        """
        use = "gpt or llama" if sequences.is_next else "gpt, encoder or llama"
        raise self.refusal(f"takes images or rows of a table, and the data are {sequences.task}; use {use}")

    def files(self, folder: Path) -> tuple[Path, ...]:
        """Return the files with pretrained weights that the network is read from; ``folder``: of the data sets."""
        return ()

    def save(self, trained: "Callable[[], nn.Module]", folder: Path) -> None:
        """Write what a library reads of the trained network into the folder of its checkpoint, beside our own file."""

    @property
    def module(self) -> str:
        """The Python module that builds it."""
        return type(self).__module__

    def refusal(self, why: str) -> InputError:
        """Return the error of a network that cannot be used."""
        return InputError(key="model.name", given=self.name, allowed=why)

    def decisive(self) -> dict[str, Any]:
        """Return the settings for digests and observations, the same ones as up to version 0.2."""
        tree = self.model_dump(mode="json")
        return tree | {key: value for key, value in _ONCE_OF_ALL.items() if key not in tree}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the settings change of the network that is named, for people."""
        return ()

    def check_fits(self, sequences: SequenceShape, context: int | None) -> None:
        """Refuse sequences that are longer than the network takes."""
        if context is not None and sequences.length > context:
            raise self.refusal(
                f"data.text.length = {sequences.length} is longer than the {context} tokens that it reads"
            )


class OpenModelSettings(ModelSettings):
    """The section of a network that others have written: your own, or one of a library."""

    is_code: ClassVar[bool] = False  # whether it is code of one's own

    arguments: Table | None = Field(
        None, exclude_if=absent, description="keyword arguments of the function or class that builds it"
    )
    norm: Literal["group"] | None = Field(
        None, exclude_if=absent, description="group: GroupNorm in place of every BatchNorm"
    )
    pretrained: str | None = Field(
        None, exclude_if=absent, description="weights to begin with: a file of safetensors or of torch, or a folder"
    )
    freeze: tuple[str, ...] | None = Field(
        None, exclude_if=absent, description='patterns of parameters that are not trained, such as "layer1.*"'
    )
    peft: str | Table | None = Field(
        None, exclude_if=absent, description="adapters: a configuration of peft with its keys, or a folder it has saved"
    )

    @abstractmethod
    def built(self, shape: Shape, classes: int) -> Any:
        """Return the network for images; as :meth:`network`."""

    @abstractmethod
    def text_built(self, sequences: SequenceShape) -> Any:
        """Return the network for texts; as :meth:`network`."""

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from fedpriv.models.machinery.adapt import adapted

        return adapted(self, self.built(shape, classes), shape, classes)

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.adapt import adapted

        return adapted(self, self.text_built(sequences), sequences, sequences.classes)

    def load(self, network: Any, classes: int) -> None:
        """Begin with the pretrained weights."""
        from fedpriv.models.machinery.weights import fill, read_weights, unwrapped

        if self.pretrained is not None:
            tensors = unwrapped(read_weights(Path(self.pretrained)), network.state_dict())
            fill(network, self.converted(network, tensors), classes, self.pretrained)

    def converted(self, network: Any, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Return the tensors of a file for this network, as its library makes them fit."""
        return tensors

    @override
    def files(self, folder: Path) -> tuple[Path, ...]:
        from fedpriv.models.machinery.weights import weight_files

        folders = (self.peft,) if isinstance(self.peft, str) else ()
        adapters = (path for each in folders for path in sorted(Path(each).glob("adapter_*")))
        return (*(weight_files(Path(self.pretrained)) if self.pretrained else ()), *adapters)

    @override
    def save(self, trained: "Callable[[], nn.Module]", folder: Path) -> None:
        if self.peft is not None:
            from fedpriv.models.machinery.adapters import save_adapters

            save_adapters(trained(), folder / "adapter")

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        kind = self.peft if isinstance(self.peft, str) else self.peft and self.peft.plain().get("peft_type")
        said = {
            "weights of {}": self.pretrained,
            "GroupNorm in place of every BatchNorm": self.norm,
            "frozen: {}": ", ".join(self.freeze or ()),
            "adapters of peft: {}": kind,
        }
        return tuple(words.format(value) for words, value in said.items() if value)


class TableModelSettings(ModelSettings):
    """The section of a network that looks at the columns of a table, and takes no images."""

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        return self.table_network((), classes)

    @abstractmethod
    def table_network(self, columns: "Sequence[ColumnSpec]", classes: int) -> "nn.Module":
        """Return a new network for rows (B, 1, 1, features) of these columns; else as :meth:`network`."""


MODEL = Choice[ModelSettings]("model", MODELS, "lenet", open_name="package.module:function")
model_settings, recorded_model = MODEL.settings, MODEL.recorded


class TextModelSettings(ModelSettings):
    """The section of a network for sequences of tokens, int64 (B, T)."""

    lora_rank: Annotated[Integer, Field(ge=1, le=4096)] | None = Field(
        None, description="train adapters of this rank on frozen weights (LoRA) and the layer of a task's classes; "
        "unset: train all weights"
    )  # fmt: skip
    adapter: str = Field("", description="a file of the library peft, adapter_model.safetensors, to start from")
    lora_alpha: Positive = Field(16.0, description="an adapter's output is multiplied by this over its rank")
    lora_layers: tuple[str, ...] = Field(
        (), description="last names of the Linear layers that get adapters; none: queries and values"
    )

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        if self.adapter and self.lora_rank is None:
            raise InputError("adapter is a file of adapters; lora_rank says that there are any")
        if self.lora_layers and self.lora_rank is None:
            raise InputError("lora_layers says which layers get adapters; lora_rank says that there are any")
        return self

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        raise self.refusal("takes texts, and the data are images or rows of a table")

    @override
    @abstractmethod
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        """Return a new network for such sequences; else as :meth:`network`."""

    @override
    def files(self, folder: Path) -> tuple[Path, ...]:
        return (Path(self.adapter),) if self.adapter else ()

    def adapted(self, network: "nn.Module", head: str) -> "nn.Module":
        """Return the network itself, or with adapters on frozen weights where the settings ask for that."""
        if self.lora_rank is None:
            return network
        from fedpriv.models.machinery.adapters import with_lora

        layers = self.lora_layers or ("query", "value", "q_proj", "v_proj")
        return with_lora(network, self, layers, head)
