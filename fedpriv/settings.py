"""What sections of an experiment are made of: the base of all settings, and numbers with their ranges."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fedpriv.registry import Registry

__all__ = [
    "Choice",
    "Count",
    "Epsilon",
    "Integer",
    "Momentum",
    "NonNegative",
    "Positive",
    "Real",
    "Section",
    "enumerated",
]


class Section(BaseModel):
    """Settings: frozen, and a key that nothing reads is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _not_bool(value: Any) -> Any:
    """Python takes true for 1; a person who writes true where a number belongs does not mean that."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


Integer = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
# The bounds are far beyond use; they keep numbers inside float32 and loops finite.
Positive = Annotated[Real, Field(gt=0, le=1e9)]
NonNegative = Annotated[Real, Field(ge=0)]
Momentum = Annotated[Real, Field(ge=0, lt=1)]
Count = Annotated[Integer, Field(ge=1, le=10_000_000)]
Epsilon = Annotated[Real, Field(ge=1e-9, le=1e9)]


class Choice:
    """Marks a field whose settings are those of one registered thing: which one, its key ``name`` says.

    Attributes:
        registry: the things.
        default: the name where none is given.
    """

    def __init__(self, registry: Registry, default: str) -> None:
        self.registry, self.default = registry, default

    def kind(self, name: str) -> type[Section] | None:
        """Return the settings' class of this name; ``None`` where there is none."""
        return self.registry.get(name)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A union whose tag is the name."""
        choices = {name: handler.generate_schema(kind) for name, kind in self.registry.items()}
        return core_schema.tagged_union_schema(choices, discriminator=self._name)

    def _name(self, given: Any) -> Any:
        if isinstance(given, dict):
            return given.get("name", self.default)
        return getattr(given, "name", None)


def enumerated(words: Sequence[str], last: str) -> str:
    """Words as a person lists them: a, b or c."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
