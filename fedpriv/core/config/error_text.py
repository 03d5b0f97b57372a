"""What is wrong with an experiment, for people: the key, what was given, and what is allowed."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion
from fedpriv.core.settings import Choice, allowed_words, enumerated
from fedpriv.mechanisms import MECHANISM
from fedpriv.models import MODEL

Section = TypeVar("Section", bound=BaseModel)

_MEAN = "did you mean "
_LONGEST_VALUE = 200  # characters of a wrong value that an error quotes


def validated(kind: type[Section], tree: Mapping[str, Any], source: str) -> Section:
    """Make settings of one kind from nested tables.

    Args:
        kind: what is to be made, such as :class:`Experiment`.
        tree: the tables.
        source: the file, for people.

    Raises:
        InputError: a key or value is not allowed.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        every = [_explain(detail, kind) for detail in _causes(error.errors())]
        numbered = [f"({number}) {text}" for number, text in enumerate(every, start=1)]
        raise InputError(f"{source}: {every[0] if len(every) == 1 else ' '.join(numbered)}") from None


def _causes(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Without what only follows from others: a list is too short where its items were refused."""
    inside = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]


def _explain(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    location, section = _found([str(part) for part in detail["loc"]], kind)
    key = ".".join(location)
    given = detail["input"]
    if detail["type"] == "extra_forbidden":
        known = list(section.model_fields)
        close = _other(location[-1], section) or suggestion(location[-1], known)
        return f"unknown key {key}{close.replace(_MEAN, _MEAN + key.removesuffix(location[-1]))}"
    if detail["type"] == "union_tag_invalid":
        return _explain_name(detail, key)
    message = _plain_words(detail, key, section)
    if detail["type"] == "value_error" and isinstance(given, dict):
        return f"{key}: {message}" if key else message
    shown = repr(given)
    shown = shown if len(shown) <= _LONGEST_VALUE else f"{shown[: _LONGEST_VALUE - 4]} ..."
    return f"{key} = {shown} is not allowed{_joined(message)}"


def _explain_name(detail: ErrorDetails, key: str) -> str:
    context = detail.get("ctx", {})
    choices = re.findall(r"'([^']*)'", context.get("expected_tags", ""))
    close = suggestion(str(context.get("tag", "")), choices, else_known=False)
    return f"{key}.name = {context.get('tag')!r} is not allowed; allowed: {', '.join(choices)}{close}"


def _joined(message: str) -> str:
    """What is allowed, behind "is not allowed"."""
    return f"{'; ' if message.startswith('allowed') else ': '}{message[0].lower()}{message[1:]}"


def _plain_words(detail: ErrorDetails, key: str, section: type[BaseModel]) -> str:
    """What is allowed, without the validator's own terms."""
    message = allowed_words(detail)
    match detail["type"]:
        case "model_type" | "model_attributes_type" | "union_tag_not_found":
            return f"{key} is a section, such as [{key}] with keys of its own; known: {', '.join(section.model_fields)}"
        case "tuple_type":
            return f"{message}, such as {_example(detail['input'], key, section)}"
        case "string_pattern_mismatch":
            return "letters, digits, dots, hyphens and underscores are allowed, a letter or digit first"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", message)
            return f"allowed: {', '.join(choices)}{suggestion(str(detail['input']), choices, else_known=False)}"
        case _:
            return message


def _example(given: Any, key: str, section: type[BaseModel]) -> str:
    """A list that a field allows: of its default, or else of what was given."""
    field = section.model_fields.get(key.rpartition(".")[2])
    default = field.get_default(call_default_factory=False) if field else None
    return json.dumps(list(default) if isinstance(default, tuple) and default else [given])


def _found(location: list[str], kind: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The key at ``location`` as a file has it, and the section that it is in; or, for a section, itself."""
    key: list[str] = []
    section, parts = kind, iter(location)
    for part in parts:
        key.append(part)
        field = section.model_fields.get(part)
        if field is None:
            continue
        choice = next((mark for mark in field.metadata if isinstance(mark, Choice)), None)
        if choice is not None:
            # The validator names which of the choices it took; a file does not.
            section = choice.kind(next(parts, choice.default)) or section
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        section = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), section)
    return key, section


def _other(key: str, section: type[BaseModel]) -> str:
    """Whose key it is, where another mechanism or network has it."""
    kinds = next((choice.registry for choice in (MECHANISM, MODEL) if section in choice.registry.values()), None)
    if kinds is None:
        return ""
    name = section.model_fields["name"].default
    own = list(section.model_fields)
    every = {each: None for kind in kinds.values() for each in kind.model_fields}
    meant = key if key in every else next(iter(difflib.get_close_matches(key, every, n=1)), "")
    owners = [other for other, kind in kinds.items() if meant in kind.model_fields]
    if not owners or meant in own:
        return ""
    known = ", ".join(each for each in own if each != "name")
    # In quotes: a mechanism called none, and a network called mean, would read as words of the sentence.
    quoted = [f'"{owner}"' for owner in owners]
    who = f"{enumerated(quoted, 'and')} read it, but" if len(quoted) > 1 else f"{quoted[0]} reads it, but"
    if meant != key:
        return f'; did you mean {meant}? {who} "{name}" reads {known}'
    return f': {who} "{name}" reads {known}; leave it out'
