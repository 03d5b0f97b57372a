"""What is wrong with an experiment, for people: the key, what was given, and what is allowed."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion
from fedpriv.core.settings import Choice, allowed_words, enumerated, wrong_key
from fedpriv.mechanisms import MECHANISM
from fedpriv.models import MODEL

S = TypeVar("S", bound=BaseModel)


def validated(kind: type[S], tree: Mapping[str, Any], source: str) -> S:
    """Make settings of one kind from nested tables; ``source`` names the file in errors."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        every = [_explain(detail, kind) for detail in _causes(error.errors())]
        if len(every) == 1:
            raise every[0].replaced(where=source) from None
        numbered = [f"({number}) {each}" for number, each in enumerate(every, start=1)]
        raise InputError(" ".join(numbered), where=source) from None


def _causes(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Without what only follows from others: a list is too short where its items were refused."""
    inside = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]


def _explain(detail: ErrorDetails, kind: type[BaseModel]) -> InputError:
    place = _found([str(part) for part in detail["loc"]], kind)
    key, section, given = place.key, place.section, detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            name = key.rpartition(".")[2]
            head = key.removesuffix(name)
            close = _other(name, section, head) or _elsewhere(name, kind)
            close = close or suggestion(name, list(section.model_fields), section=head)
            return InputError(f"unknown key {key}{close}")
        case "union_tag_invalid":
            tag = str(detail.get("ctx", {}).get("tag"))
            return _none_of(place.names, f"{key}.name", tag)
        case "literal_error":
            return _none_of(place.names, key, given)
        case "model_type" | "model_attributes_type" | "union_tag_not_found":
            known = ", ".join(section.model_fields)
            words = f"{key} is a section, such as [{key}] with keys of its own; known: {known}"
        case "tuple_type":
            words = f"{allowed_words(detail)}, such as {_example(given, key, section)}"
        case "none_required":
            words = (place.field and place.field.description) or "not set"
            owners = _owners(key.rpartition(".")[2], _kinds(section))
            words += f"; allowed with {enumerated(owners, 'or')}" if owners else ""
        case "string_pattern_mismatch":
            words = "letters, digits, dots, hyphens and underscores are allowed, a letter or digit first"
        case _:
            return wrong_key(detail, key)
    return InputError(key=key, given=given, allowed=words)


def _none_of(allowed: Sequence[str], key: str, given: Any) -> InputError:
    close = suggestion(str(given), allowed, else_known=False) if len(allowed) > 1 else ""
    return InputError(key=key, given=given, allowed=f"allowed: {', '.join(allowed)}{close}")


def _example(given: Any, key: str, section: type[BaseModel]) -> str:
    """A list that a field allows: of its default, or else of what was given."""
    field = section.model_fields.get(key.rpartition(".")[2])
    default = field.get_default(call_default_factory=False) if field else None
    return json.dumps(list(default) if isinstance(default, tuple) and default else [given])


@dataclass(frozen=True)
class _Place:
    """Where a value is: the key as a file has it, the section that it is in, or is itself, and the field."""

    key: str
    section: type[BaseModel]
    field: FieldInfo | None

    @property
    def names(self) -> tuple[str, ...]:
        """What the field chooses from."""
        if self.field is None:
            return ()
        choice = _choice(self.field)
        return tuple(choice.registry) if choice is not None else _literals(self.field.annotation)


def _found(location: Sequence[str], kind: type[BaseModel]) -> _Place:
    key: list[str] = []
    section, last, parts = kind, None, iter(location)
    for part in parts:
        key.append(part)
        field = section.model_fields.get(part)
        if field is None:
            continue
        last, choice = field, _choice(field)
        if choice is not None:
            # The validator names which of the choices it took; a file does not.
            section = choice.kind(next(parts, choice.default)) or section
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        section = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), section)
    return _Place(".".join(key), section, last)


def _choice(field: FieldInfo) -> Choice[Any] | None:
    return next((mark for mark in field.metadata if isinstance(mark, Choice)), None)


def _literals(annotation: Any) -> tuple[str, ...]:
    """The values of the Literal in a type."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(name for part in get_args(annotation) for name in _literals(part))


def _kinds(section: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """All mechanisms, or networks, by name, where the section is one of them."""
    return next((choice.registry for choice in (MECHANISM, MODEL) if section in choice.registry.values()), {})


def _owners(key: str, kinds: Mapping[str, type[BaseModel]]) -> list[str]:
    """The names of those that have the key and do not keep it unset."""
    fields = {name: kind.model_fields.get(key) for name, kind in kinds.items()}
    return [name for name, field in fields.items() if field is not None and field.annotation is not type(None)]


def _elsewhere(name: str, kind: type[BaseModel]) -> str:
    """The sections that have a key of exactly this name."""
    sections = {head: _found([head], kind).section for head in kind.model_fields}
    own = {head: (section, *_kinds(section).values()) for head, section in sections.items()}
    keys = [f"{head}.{name}" for head, kinds in own.items() if any(name in each.model_fields for each in kinds)]
    return f"; did you mean {enumerated(keys, 'or')}?" if keys else ""


def _other(key: str, section: type[BaseModel], head: str) -> str:
    """Whose key it is, where another mechanism or network has it; ``head``: the section's name with a dot."""
    kinds = _kinds(section)
    if not kinds:
        return ""
    name = section.model_fields["name"].default
    own = list(section.model_fields)
    every = {each: None for kind in kinds.values() for each in kind.model_fields}
    meant = key if key in every else next(iter(difflib.get_close_matches(key, every, n=1)), "")
    owners = _owners(meant, kinds)
    if not owners or meant in own:
        return ""
    known = ", ".join(each for each in own if each != "name")
    # In quotes: a mechanism called none, and a network called mean, would read as words of the sentence.
    quoted = [f'"{owner}"' for owner in owners]
    who = f"{enumerated(quoted, 'and')} read it, but" if len(quoted) > 1 else f"{quoted[0]} reads it, but"
    if meant != key:
        return f'; did you mean {head}{meant}? {who} "{name}" reads {known}'
    return f': {who} "{name}" reads {known}; leave it out'
