"""What the sections of networks share that a library has under a name; it is imported when one of its is built."""

import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.registry import suggestion
from fedpriv.models.machinery.settings import OpenModelSettings, SequenceShape, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

MOST_SUGGESTED = 3  # names
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
            close = suggestion(self.architecture, known, else_known=False, most=MOST_SUGGESTED)
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
        raise self.refusal(f"networks of {self.library} take images, and the data are texts")


def _installed(library: str, has_adapters: bool) -> str:
    """The version that is installed, and that of peft where the network has adapters of it."""
    return f"{version(library)}, peft {version('peft')}" if has_adapters else version(library)
