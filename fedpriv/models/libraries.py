"""Networks that torchvision, timm or transformers has under a name; a library is imported when one of its is built."""

import sys
import warnings
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.names import END, PAD
from fedpriv.core.registry import MODELS, suggestion
from fedpriv.core.settings import Table, absent
from fedpriv.models.machinery.settings import OpenModelSettings, SequenceShape, Shape
from fedpriv.models.machinery.weights import another_network, read_weights, unwrapped, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel


_MOST_SUGGESTED = 3  # names
_CHANNELS = 3  # of images that networks of torchvision take, and that weights of timm were made with
_OF_TASK = ("num_labels", "pad_token_id")  # what the data decide where weights decide all sizes
_FETCHING = {"pretrained", "weights", "checkpoint_path", "trust_remote_code"}


class LibraryModelSettings(OpenModelSettings):
    """The section of a network that a library has under a name."""

    library: ClassVar[str]

    version: str = Field("", description="of the library; a run writes the installed one down, and no other is taken")

    @model_validator(mode="before")
    @classmethod
    def _has_a_version(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or tree.get("version"):
            return tree
        try:
            return {**tree, "version": _installed(cls.library, tree.get("peft") is not None)}
        except PackageNotFoundError:
            return tree

    @property
    def architecture(self) -> str:
        """The name in the library."""
        return self.name.partition(":")[2]

    @property
    @override
    def module(self) -> str:
        return self.library

    @property
    def keywords(self) -> dict[str, Any]:
        """What is given to the library as it is, but for what would have it fetch weights."""
        given = {} if self.arguments is None else self.arguments.plain()
        for key in sorted(_FETCHING & given.keys()):
            raise InputError(key=f"model.arguments.{key}", given=given[key], allowed="nothing is fetched",
                             hint="model.pretrained names a local file or folder")  # fmt: skip
        return given

    def check_library(self) -> None:
        """Refuse a library that is not installed, or that is not the one of the run."""
        try:
            installed = _installed(self.library, self.peft is not None)
        except PackageNotFoundError as error:
            raise self.refusal(f"needs {error.name}: pip install 'fedpriv[zoo]'") from None
        if self.version not in ("", installed):
            raise InputError(
                key="model.version", given=self.version, allowed=f"{self.library} {installed} is installed",
                hint="install the other one, or leave the key out: the network may be another one",
            )  # fmt: skip

    def check_memory(self, parameters: int) -> None:
        """Refuse a network that does not fit into memory with its gradient, before it is built."""
        import psutil

        needed, free = 8 * parameters, psutil.virtual_memory().available
        if needed > free:
            size = f"{parameters / 1e9:.1f} billion parameters and their gradient take {needed / 2**30:.0f} GiB"
            raise self.refusal(f"{size}, and {free / 2**30:.0f} GiB are free; name a smaller one by model.config")

    def check_name(self, known: "Sequence[str]") -> None:
        """Refuse a name that the library does not have."""
        if self.architecture not in known:
            close = suggestion(self.architecture, known, else_known=False, most=_MOST_SUGGESTED)
            raise self.refusal(f"{self.library} {version(self.library)} has no such network{close}")

    @staticmethod
    def sized(build: "Callable[..., Any]", sizes: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """Build a network with the argument of its size; what takes none of these takes several sizes."""
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # other weights at first, in time
            for name, size in sizes.items():
                if name not in keywords:
                    try:
                        return build(*arguments, **{name: size}, **keywords)
                    except TypeError as error:
                        if f"'{name}'" not in str(error):
                            raise
            return build(*arguments, **keywords)

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from fedpriv.models.machinery.adapt import NotTakenError, taken_side

        try:
            return super().network(shape, classes)
        except Exception as error:
            is_told = isinstance(error, InputError) and not isinstance(error, NotTakenError)
            side = None if is_told or isinstance(error, TypeError) else taken_side(self, shape, classes)
            if side is None:
                raise
            why = error.allowed if isinstance(error, InputError) else reason_of(error)
            images = f"does not take images of {shape[2]}x{shape[1]}, and takes {side}x{side}"
            raise self.refusal(f"{images} ({why})") from error

    @override
    def text_built(self, sequences: SequenceShape) -> Any:
        raise self.refusal(f"networks of {self.library} take images, and the data are {sequences.task}")


def _installed(library: str, has_adapters: bool) -> str:
    """The version that is installed, and that of peft where the network has adapters of it."""
    return f"{version(library)}, peft {version('peft')}" if has_adapters else version(library)


@MODELS.register
class TorchvisionSettings(LibraryModelSettings):
    """A network for classes of torchvision; with one channel its first convolution has one."""

    library = "torchvision"

    name: str = Field("torchvision:NAME", pattern="^torchvision:", description="network of torchvision")

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        self.check_library()
        from torchvision import models

        self.check_name(models.list_models(module=models))
        sizes = {"image_size": shape[1], "input_size": shape[1:]}
        network = self.sized(models.get_model, sizes, self.architecture, num_classes=classes, **self.keywords)
        self.load(network, classes)
        if shape[0] != _CHANNELS:
            from fedpriv.models.machinery.adapt import take_channels

            take_channels(network, shape[0])
        return network


@MODELS.register
class TimmSettings(LibraryModelSettings):
    """A network of timm, which has arguments for the number of channels and, where it matters, the size."""

    library = "timm"

    name: str = Field("timm:NAME", pattern="^timm:", description="network of timm")

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        self.check_library()
        import timm

        self.check_name([*timm.list_models(), *timm.list_pretrained()])
        keywords = {"num_classes": classes, "in_chans": shape[0], **self.keywords}
        network = self.sized(timm.create_model, {"img_size": shape[1:]}, self.architecture, **keywords)
        self.load(network, classes)
        return network

    @override
    def converted(self, network: Any, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Other names and sizes of positions by timm's own rules, which most of its modules have; and channels."""
        from timm.models import adapt_input_conv

        change = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
        tensors = dict(tensors if change is None else change(tensors, network))
        first = network.pretrained_cfg.get("first_conv") or ()
        for name in (first,) if isinstance(first, str) else first:
            wanted, given = network.get_submodule(name).weight, tensors.get(f"{name}.weight")
            if given is not None and given.ndim == 4 and given.shape[1] == _CHANNELS != wanted.shape[1]:
                tensors[f"{name}.weight"] = adapt_input_conv(wanted.shape[1], given)
        return tensors


@MODELS.register
class TransformersSettings(LibraryModelSettings):
    """A network of transformers, from a local folder or of a type with a configuration."""

    library = "transformers"

    name: str = Field(
        "transformers:FOLDER", pattern="^transformers:", description="network of transformers: its folder or its type"
    )
    config: Table | None = Field(
        None, exclude_if=absent, description="keys of its configuration; sizes of the data are added"
    )

    @property
    def folder(self) -> Path | None:
        """The folder that is named; ``None``: a type is."""
        path = Path(self.architecture)
        return path if path.is_dir() else None

    @property
    def weights(self) -> Path | None:
        """The file or folder with weights; ``None``: they are drawn."""
        if self.pretrained is not None:
            return Path(self.pretrained)
        return self.folder if self.folder is not None and weight_files(self.folder) else None

    @override
    def files(self, folder: Path) -> tuple[Path, ...]:
        named = (self.folder,) if self.folder is not None else ()
        configurations = (path for each in named for path in sorted(each.glob("*.json")))
        own = weight_files(self.weights) if self.pretrained is None and self.weights is not None else ()
        return (*super().files(folder), *configurations, *own)

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        side = shape[1] if shape[1] == shape[2] else list(shape[1:])
        network = self._built("ImageClassification", {"num_channels": shape[0], "image_size": side}, classes)
        if getattr(network.config, "num_channels", shape[0]) != shape[0]:  # weights are for others
            from fedpriv.models.machinery.adapt import take_channels

            take_channels(network, shape[0])
            network.config.num_channels = shape[0]
        return network

    @override
    def text_built(self, sequences: SequenceShape) -> Any:
        task = "CausalLM" if sequences.is_next else "SequenceClassification"
        network = self._built(task, {"vocab_size": sequences.vocabulary, "pad_token_id": PAD}, sequences.classes)
        context = getattr(network.config, "max_position_embeddings", -1)  # XLNet says -1: any number of tokens
        self.check_fits(sequences, context if context > 0 else None)
        if getattr(network.config, "vocab_size", sequences.vocabulary) != sequences.vocabulary:  # CANINE has none
            self._take_tokens(network, sequences)
        return network

    def _built(self, task: str, sizes: dict[str, Any], classes: int) -> "PreTrainedModel":
        self.check_library()
        import torch
        import transformers

        with _quiet():
            config = self._configuration(transformers, {**sizes, "num_labels": classes})
            config.architectures = config.architectures or []  # of None the library tries to choose one
            kind = getattr(transformers, f"AutoModelFor{task}")
            if type(config) not in kind._model_mapping:
                raise self.refusal(f"transformers has no {config.model_type} for {task}")
            with torch.device("meta"):
                outline = kind.from_config(config, trust_remote_code=False)
            self.check_memory(sum(value.numel() for value in outline.parameters()))
            if self.weights is None:
                return kind.from_config(config, dtype=torch.float32, trust_remote_code=False, **self.keywords)
            is_folder = self.weights.is_dir()
            network, told = type(outline).from_pretrained(
                str(self.weights) if is_folder else None,
                state_dict=None if is_folder else unwrapped(read_weights(self.weights), outline.state_dict()),
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **self.keywords,
            )
        self._check_weights(network, told, classes)
        return network

    def _configuration(self, transformers: Any, sizes: dict[str, Any]) -> Any:
        """Return the configuration of the folder or type, with the sizes of the data where no weights decide them."""
        given = {} if self.config is None else self.config.plain()
        if self.folder is not None:
            closed = {"local_files_only": True, "trust_remote_code": False}  # code in the folder is not run
            load = partial(transformers.AutoConfig.from_pretrained, str(self.folder), **closed)
        else:
            if "/" in self.architecture:
                raise self.refusal("no such folder")
            self.check_name(list(transformers.CONFIG_MAPPING))
            load = partial(transformers.AutoConfig.for_model, self.architecture)
        usual = load()
        for key in given:
            if not hasattr(usual, key):
                close = suggestion(
                    key, [name for name in vars(usual) if not name.startswith("_")], most=_MOST_SUGGESTED
                )
                raise InputError(f"model.config: {self.architecture} has no key {key}{close}")
        free = _OF_TASK if self.folder is not None and self.weights is not None else sizes.keys()
        decided = {key: value for key, value in sizes.items() if key in free and hasattr(usual, key)}
        return load(**{**decided, **_implied(usual, given), **given})

    def _check_weights(self, network: "PreTrainedModel", told: Any, classes: int) -> None:
        """Refuse weights of another network: its last layers alone may be missing, or be for other classes."""
        path, body = str(self.weights), f"{network.base_model_prefix}."
        for name, given, wanted in told["mismatched_keys"]:
            if wanted[0] != classes or given[1:] != wanted[1:]:
                raise another_network(path, f"{name} has shape {tuple(given)}, and in the network {tuple(wanted)}")
        for verb, names in {"lacks": told["missing_keys"], "has": told["unexpected_keys"]}.items():
            inside = sorted(name for name in names if name.startswith(body) and "pooler" not in name)
            if inside:
                raise another_network(path, f"{verb} {inside[0]}")

    def _take_tokens(self, network: "PreTrainedModel", sequences: SequenceShape) -> None:
        """Have the network know the data's tokens: its own first ones, or those behind nothing, beginning and end."""
        import torch

        from fedpriv.models.machinery.adapters import OwnTokens

        known, first = network.config.vocab_size, END + 1 if sequences.tokenizer == "bpe" else 0
        if known < sequences.vocabulary - first:
            raise self.refusal(f"it knows {known} tokens; the data have {sequences.vocabulary - first}")
        given = [getattr(network.config, f"{name}_token_id", None) or 0 for name in ("pad", "bos", "eos")][:first]
        marks = [number[0] if isinstance(number, list) else number for number in given]  # a text may end in several
        rows = torch.tensor([*marks, *range(sequences.vocabulary - first)])
        tables = (network.get_input_embeddings(), network.get_output_embeddings())
        own = {id(part) for table in tables if table is not None for part in table.parameters(recurse=False)}
        unknown = {
            name: value.detach()[sequences.vocabulary - first :].clone()
            for name, value in network.named_parameters(remove_duplicate=False)
            if id(value) in own
        }
        OwnTokens(rows, known, first, unknown).hold(network)
        values = [[part[rows].clone() for part in _rows(table)] for table in tables]
        with _quiet():
            network.resize_token_embeddings(sequences.vocabulary, mean_resizing=False)
        tables = (network.get_input_embeddings(), network.get_output_embeddings())
        for table, kept in zip(tables, values, strict=True):
            for part, value in zip(_rows(table), kept, strict=True):
                part.copy_(value)


def _implied(usual: Any, given: "Mapping[str, Any]") -> dict[str, Any]:
    """Return keys of a configuration that follow from others: as many heads of keys as of queries, where the usual
    number does not fit; and RWKV neither scales weights back and forth nor writes a cache in place: same logits.
    """
    implied = {"rescale_every": 0, "use_cache": False} if hasattr(usual, "rescale_every") else {}
    heads, keys = given.get("num_attention_heads"), getattr(usual, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        implied["num_key_value_heads"] = heads
    return implied


def _rows(table: Any) -> "list[Tensor]":
    """The tensors of a table of tokens, or of the layer of their logits, with a row for each."""
    return [] if table is None else [value.detach() for value in table.parameters(recurse=False)]


@contextmanager
def _quiet() -> "Iterator[None]":
    """Inside the block transformers prints neither a bar nor a table of what it loads."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
