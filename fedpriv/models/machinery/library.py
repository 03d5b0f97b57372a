"""What the sections of networks share that a library has under a name; it is imported when one of its is built."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion
from fedpriv.models.machinery.settings import OpenModelSettings, SequenceShape

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_SUGGESTED = 3  # names


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
            return {**tree, "version": version(cls.library)}
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
        """What is given to the library as it is."""
        return {} if self.arguments is None else self.arguments.plain()

    def check_library(self) -> None:
        """Refuse a library that is not installed, or that is not the one of the run."""
        try:
            installed = version(self.library)
        except PackageNotFoundError:
            raise self.refusal(f"needs {self.library}: pip install 'fedpriv[zoo]'") from None
        if self.version not in ("", installed):
            raise InputError(
                key="model.version", given=self.version, allowed=f"{self.library} {installed} is installed",
                hint="install the other one, or leave the key out: the network may be another one",
            )  # fmt: skip

    def check_name(self, known: "Sequence[str]") -> None:
        """Refuse a name that the library does not have."""
        if self.architecture not in known:
            close = suggestion(self.architecture, known, else_known=False, most=MOST_SUGGESTED)
            raise self.refusal(f"{self.library} {version(self.library)} has no such network{close}")

    @override
    def text_built(self, sequences: SequenceShape) -> Any:
        raise self.refusal(f"networks of {self.library} take images, and the data are texts")
