"""What the settings of every network have in common, and what all others ask of a network through them."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Choice, Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fedpriv.core.columns import Column

Shape = tuple[int, int, int]

# Up to version 0.2 the settings of every network had these keys. Noise is keyed by a digest of the settings.
_ONCE_OF_ALL = {"hidden": [1024, 1024], "activation": "relu"}


@dataclass(frozen=True)
class SequenceShape:
    """What a network takes and gives.

    Attributes:
        length: T, tokens of a sequence.
        vocabulary: V, tokens that there are; 0 is nothing, and stands behind a text.
        tokenizer: its name.
        classes: K, logits: of a sequence, or of each token.
        is_next: whether the token after each is predicted: logits (B, T, K); else (B, K).
        folder: of the data sets, where pretrained weights lie.
    """

    length: int
    vocabulary: int
    tokenizer: str
    classes: int
    is_next: bool
    folder: Path = Path("data")


class ModelSettings(Section):
    """The section ``[model]``; a network is a subclass with a default ``name``, entered in ``MODELS``.

    Attributes:
        is_own: whether the network is not one of this project's, which are known to treat examples separately; others
            are tried before they train.
    """

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
        raise self.refusal("takes images or rows of a table, and the data are texts; use gpt, encoder or llama")

    def files(self, folder: Path) -> tuple[Path, ...]:
        """Return the files with pretrained weights that the network is read from; ``folder``: of the data sets."""
        return ()

    @property
    def module(self) -> str:
        """The Python module that builds it."""
        return type(self).__module__

    def refusal(self, why: str) -> InputError:
        """Return the error of a network that cannot be used."""
        return InputError(f"model.name = {self.name!r}: {why}")

    def decisive(self) -> dict[str, Any]:
        """Return the settings for digests and observations, the same ones as up to version 0.2."""
        tree = self.model_dump(mode="json")
        return tree | {key: value for key, value in _ONCE_OF_ALL.items() if key not in tree}


class TableModelSettings(ModelSettings):
    """The section of a network that looks at the columns of a table, and takes no images."""

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        return self.table_network((), classes)

    @abstractmethod
    def table_network(self, columns: "Sequence[Column]", classes: int) -> "nn.Module":
        """Return a new network for rows (B, 1, 1, features) of these columns; else as :meth:`network`."""


MODEL = Choice[ModelSettings]("model", MODELS, "lenet", open_name="package.module:function")
model_settings, recorded_model = MODEL.settings, MODEL.recorded
