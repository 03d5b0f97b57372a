"""Commands of ``fedpriv``: cli.py in a capability's folder lists its own in ``VERBS``.

It is imported for ``fedpriv --help``, too, so it imports what is heavy inside its functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpriv.core.registry import capabilities

if TYPE_CHECKING:
    import typer


@dataclass(frozen=True)
class Verb:
    """One command, or a group of commands.

    Attributes:
        name: as it is typed.
        command: a function whose parameters are the command's, or a group.
        place: help lists commands in ascending order, groups after them.
        epilog: examples; of a function only.
        group: the group that it belongs to; empty: it is one of ``fedpriv`` itself.
    """

    name: str
    command: "Callable[..., Any] | typer.Typer"
    place: int
    epilog: str = ""
    group: str = ""


def verbs() -> list[Verb]:
    """Return the commands of all capabilities."""
    return [verb for module in capabilities("cli") for verb in module.VERBS]
