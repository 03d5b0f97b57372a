"""What sections of an experiment are made of: the base of all settings, and numbers with their ranges."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from inspect import get_annotations
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from typing_extensions import TypeAliasType

from fedpriv.core.errors import InputError
from fedpriv.core.registry import Registry, suggestion


def absent(value: Any) -> bool:
    """For ``Field(exclude_if=...)``: a key added later, where it is unset, leaves a file its earlier bytes."""
    return value is None


class Settings(BaseModel):
    """Settings: frozen, a key that nothing reads is an error, and what is written into a file can be read back.

    Other packages have sections of their own: what their validators raise is an error of the settings, too.
    """

    # Validators are built when settings are first read: a command needs few of them, and only then other packages'
    # mechanisms and the like are imported, because they may import these modules.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _plain(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            settings = handler(given)
        except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise InputError(f"{cls.__module__}.{cls.__qualname__} raises {type(error).__name__}: {error}") from error
        for key, value in settings:
            if not _is_plain(value):
                raise InputError(
                    f"{key} = {value!r} cannot be written into a file of settings; allowed are finite "
                    "numbers, texts, paths, true, false, nothing, and tuples of these"
                )
        return settings

    def wrong(self, key: str, allowed: str, hint: str = "") -> InputError:
        """Return the error that refuses the value of a key, such as ``training.batch_size`` of an experiment."""
        return InputError(key=key, given=attrgetter(key)(self), allowed=allowed, hint=hint)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str, PurePath, Settings))


class Table(Settings):
    """A table whose keys another program knows; :meth:`plain` is what it is given."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: "dict[str, Plain]"

    def plain(self) -> dict[str, Any]:
        """Return the table as a dict, with lists in it as they are in a file."""
        return self.model_dump(mode="json")


Plain = TypeAliasType("Plain", "bool | int | float | str | tuple[Plain, ...] | Table")
"""What a table may hold."""


Chosen = TypeVar("Chosen", bound=Settings)
Many = TypeVar("Many", bound=Sequence[Any])


def _not_bool(value: Any) -> Any:
    """Refuse true and false where a number belongs, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise InputError("expected a number")
    return value


Integer = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
# The bounds are far beyond use; they keep numbers inside float32 and loops finite.
Positive = Annotated[Real, Field(gt=0, le=1e9)]
NonNegative = Annotated[Real, Field(ge=0)]
Momentum = Annotated[Real, Field(ge=0, lt=1)]
Count = Annotated[Integer, Field(ge=1, le=10_000_000)]
Class = Annotated[Integer, Field(ge=0, le=1_000_000)]
Steps = Annotated[Integer, Field(ge=0, le=10_000_000)]
LEAST_EPSILON, MOST_EPSILON = 1e-9, 1e9
Epsilon = Annotated[Real, Field(ge=LEAST_EPSILON, le=MOST_EPSILON)]


def named_once(names: Many) -> Many:
    """Refuse a list that names something twice."""
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice")
    return names


def _each_once(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Refuse groups that share a class."""
    named_once([f"class {label}" for group in groups for label in group])
    return groups


Groups = Annotated[
    tuple[Annotated[tuple[Class, ...], Field(min_length=1)], ...], Field(min_length=2), AfterValidator(_each_once)
]
"""Classes that become one, group by group."""


class Registered:
    """Marks a field that names one registered thing; or a variant of it, by the thing's name with an ending."""

    def __init__(self, registry: Registry, ending: str = "") -> None:
        self.registry, self.ending = registry, ending

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Refuse what is no such name."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The names, for editors."""
        return {**handler(schema), "enum": list(self._names())}

    def _names(self) -> tuple[str, ...]:
        variants = (f"{name}{self.ending}" for name in self.registry if self.ending)
        return (*self.registry, *variants)

    def _known(self, name: str) -> str:
        if name.removesuffix(self.ending) not in self.registry:
            known = self._names()
            raise InputError(f"allowed: {', '.join(known)}{suggestion(name, known, else_known=False)}")
        return name


class Choice(Generic[Chosen]):
    """Marks a field whose settings are those of one registered thing: which one, its key ``name`` says."""

    def __init__(self, section: str, registry: Registry, default: str, open_name: str = "") -> None:
        self.section, self.registry = section, registry
        self.default = default  # the name where none is given
        # Under which the registry has settings that take every name with a colon whose beginning has none of its own
        # ("timm:NAME" takes those that begin with "timm:"); empty: none do.
        self.open_name = open_name

    def kind(self, name: Any) -> type[Chosen] | None:
        """Return the settings' class of this name; ``None`` where there is none."""
        return self.registry[self._tag(name)] if isinstance(name, str) and self._tag(name) in self.registry else None

    def settings(self, tree: Mapping[str, Any]) -> Chosen:
        """Return the settings of what the key ``name`` says; of the default, without it."""
        name = str(tree.get("name", self.default))
        kind = self.kind(name)
        if kind is None:
            raise InputError(f"{self.section}.name: {name!r} is not known{suggestion(name, tuple(self.registry))}")
        return kind.model_validate(dict(tree))

    def recorded(self, tree: Mapping[str, Any]) -> Chosen:
        """Read settings that this program has written, say those in an observation."""
        return self.settings(self.read_keys(tree))

    def read_keys(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree without keys that only others than the named one read, which versions up to 0.2 wrote."""
        kind = self.kind(tree.get("name", self.default))
        others = {key for other in self.registry.values() for key in other.model_fields}
        unread = others - set(kind.model_fields) if kind else set()
        return {key: value for key, value in tree.items() if key not in unread}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A union whose tag is the name; written out as what it is, since pydantic would swallow Ctrl-C in _name."""
        choices = {name: handler.generate_schema(kind) for name, kind in self.registry.items()}
        as_any = core_schema.simple_ser_schema("any")
        return core_schema.tagged_union_schema(choices, discriminator=self._name, serialization=as_any)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The same for editors: of settings without a name, only those of the default are allowed."""
        union = handler(schema)
        for choice in union["oneOf"]:
            settings = handler.resolve_ref_schema(choice)
            if settings["properties"]["name"].get("const") != self.default:
                settings["required"] = sorted({*settings.get("required", ()), "name"})
        return union

    def _name(self, given: Any) -> Any:
        if isinstance(given, dict):
            return self._tag(given.get("name", self.default))
        return self._tag(getattr(given, "name", None))

    def _tag(self, name: Any) -> Any:
        if not (self.open_name and isinstance(name, str) and ":" in name):
            return name
        beginning = name[: name.index(":") + 1]
        return next((each for each in self.registry if each.startswith(beginning)), self.open_name)


class After:
    """Marks a field that a capability adds to a section: after which key it stands in a file."""

    def __init__(self, key: str) -> None:
        self.key = key


class Extensible(Settings):
    """A section that has further keys from registered things, which are imported when settings are first read."""

    @classmethod
    @abstractmethod
    def entries(cls) -> Iterator[tuple[type[Any], str, FieldInfo]]:
        """Whose each further key is, the key, and its field."""

    @classmethod
    def further(cls) -> Mapping[str, FieldInfo]:
        """The further keys."""
        own = {key for each in cls.__mro__ for key in get_annotations(each)}
        fields: dict[str, FieldInfo] = {}
        for kind, key, field in cls.entries():
            if key in own or hasattr(cls, key) or repr(fields.setdefault(key, field)) != repr(field):
                raise InputError(
                    f"{kind.__module__}:{kind.__qualname__}: its key {key!r} is taken in {cls.__name__}; choose another"
                )
        return fields

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """With the further keys: from here on they are fields like the others."""
        for key, field in cls.further().items():
            cls.model_fields.setdefault(key, field)
        for key, field in list(cls.model_fields.items()):
            before = next((mark.key for mark in field.metadata if isinstance(mark, After)), None)
            if before is not None:
                _put_after(cls.model_fields, key, before)
        return handler(source)


def wrong_value(detail: ErrorDetails, where: str = "") -> InputError:
    """What a validator refuses, as an error of ours; ``where``: the section that was validated, if it has a name."""
    return wrong_key(detail, ".".join(filter(None, (where, *map(str, detail["loc"])))))


def wrong_key(detail: ErrorDetails, key: str) -> InputError:
    """The same, under the key that people know it by."""
    cause = detail["ctx"]["error"] if detail["type"] == "value_error" else None
    if isinstance(cause, InputError) and cause.key:
        return cause.replaced(key=f"{key}.{cause.key}" if key else cause.key)
    if cause is not None and isinstance(detail["input"], dict):
        return InputError(f"{key}: {cause}" if key else str(cause))
    words = allowed_words(detail)
    given = ... if detail["type"] == "missing" else detail["input"]
    return InputError(key=key, given=given, allowed=f"{words[0].lower()}{words[1:]}")


def _put_after(fields: dict[str, FieldInfo], key: str, before: str) -> None:
    """Move a key after another one."""
    order = [each for each in fields if each != key]
    order.insert(order.index(before) + 1, key)
    known = dict(fields)
    fields.clear()
    fields.update({each: known[each] for each in order})


def allowed_words(detail: ErrorDetails) -> str:
    """What a validator's error says, in plain words: "allowed is from 1", not "Input should be greater than ..."."""
    kind, context = detail["type"], detail.get("ctx", {})
    bounds = {"greater_than_equal": "from", "greater_than": "above", "less_than_equal": "up to", "less_than": "below"}
    if kind in bounds:
        (bound,) = context.values()
        return f"allowed is {bounds[kind]} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "too_short":
        return f"expected at least {context['min_length']}"
    for start, words in _WANTED.items():
        if kind.startswith(start):
            return words
    return str(context["error"]) if kind == "value_error" else detail["msg"]


_WANTED = {
    "int_": "expected a whole number",
    "float_": "expected a number",
    "finite_number": "expected a finite number",
    "bool_": "expected true or false",
    "string_type": "expected a text",
    "tuple_type": "expected a list",
}


def enumerated(words: Sequence[str], last: str) -> str:
    """Words as a person lists them: a, b or c."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)
