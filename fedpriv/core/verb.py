"""Commands of ``fedpriv``: cli.py of a capability lists its own in ``VERBS``, and imports lazily."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from fedpriv.core.registry import OPTIONS, capabilities

if TYPE_CHECKING:
    import typer


@dataclass(frozen=True)
class Verb:
    """One command, or a group of commands."""

    name: str  # as it is typed
    command: "Callable[..., Any] | typer.Typer"  # a function whose parameters are the command's, or a group
    place: int  # help lists commands in ascending order, groups after them
    epilog: str = ""  # examples; of a function only
    group: str = ""  # the group that it belongs to; empty: it is one of `fedpriv` itself


def verbs() -> list[Verb]:
    """Return the commands of all capabilities."""
    return [verb for module in capabilities("cli") for verb in getattr(module, "VERBS", ())]


class Options:
    """What a capability adds to a command: a frozen dataclass in its cli.py, whose fields are options."""

    name: ClassVar[str]
    verb: ClassVar[str]  # the command, with its group before it
    rank: ClassVar[int] = 100  # in the order of these numbers they are listed by --help


def with_options(verb: Verb) -> "Callable[..., Any]":
    """Return a verb's function with the options of capabilities: it gets them as its argument ``options``."""
    command: Any = verb.command
    own = inspect.signature(command, eval_str=True).parameters
    if "options" not in own:
        return verb.command
    kinds = [kind for kind in OPTIONS.values() if kind.verb == f"{verb.group} {verb.name}".strip()]
    shown: dict[str, inspect.Parameter] = {}
    for name, parameter in own.items():
        added = [each for kind in kinds for each in options_of(kind)] if name == "options" else [parameter]
        shown |= {each.name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in added}

    def called(**given: Any) -> None:
        made = tuple(kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for kind in kinds)
        command(**given, options=made)

    called.__doc__ = command.__doc__
    sign(called, list(shown.values()))
    return called


def sign(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the signature that Typer reads options from."""
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)


def options_of(kind: type[Any]) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters of a command."""
    hints, keyword = get_type_hints(kind, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
        for each in fields(kind)
    ]
