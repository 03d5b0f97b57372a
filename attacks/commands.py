"""What ``fedpriv audit`` and ``fedpriv probe`` do to a finished run: capabilities register theirs in their cli.py."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fedpriv.core.errors import InputError
from fedpriv.core.registry import FINDINGS
from fedpriv.core.verb import Options

if TYPE_CHECKING:
    from rich.table import Table

    from fedpriv.core.figure import Figure
    from fedpriv.core.finding import Finding
    from fedpriv.core.progress import Progress
    from fedpriv.core.reading import GrowingRecord
    from fedpriv.core.runs import RunFolder

R = TypeVar("R", bound="GrowingRecord")


class Audit(Options, ABC, Generic[R]):
    """An audit of a finished run, with its options; of several that suit a run the last one is made."""

    verb: ClassVar[str] = "audit"

    @abstractmethod
    def suits(self, run: "RunFolder") -> bool:
        """Whether it is the one to make, by its options or by the run's data."""

    @abstractmethod
    def made(self, run: "RunFolder", progress: "Progress") -> R:
        """Audit the run, and write what was found."""

    def table(self, found: R) -> "Table | None":
        """Return the table of what was found; ``None``: there is none."""
        return None

    def facts(self, found: R) -> "Sequence[tuple[str, str]]":
        """Return what is printed below the table: the facts of the finding of this name."""
        return self._finding.facts(found)

    def figures(self, found: R) -> "tuple[Figure, ...]":
        """Return what must not exceed what is claimed."""
        return self._finding.figures(found)

    @property
    def _finding(self) -> "Finding[R]":
        return FINDINGS[self.name]()


def chosen_audit(run: "RunFolder", audits: "Sequence[Audit[Any]]") -> "Audit[Any]":
    """Return the audit that suits a run; an ``InputError`` where there is none."""
    chosen: Audit[Any] | None = next((each for each in reversed(audits) if each.suits(run)), None)
    if chosen is None:
        raise InputError(f"{run.path}: there is no audit for this run")
    return chosen


@dataclass(frozen=True)
class ReadyProbe(Generic[R]):
    """Attacks that are ready to be made on a finished run."""

    run: "Callable[[Progress], R]"  # make them, and write what was found
    show: Callable[[R], None]  # print it


class Probing(Options, ABC, Generic[R]):
    """One kind of attacks on a finished run, with its options; its name is the key of what was found in JSON."""

    verb: ClassVar[str] = "probe DIR"
    heading: ClassVar[str]  # over the list of its attacks
    surface: ClassVar[str]  # what they attack: inputs or answers

    @classmethod
    @abstractmethod
    def attacks(cls) -> Mapping[str, type[Any]]:
        """Return its attacks by name."""

    @classmethod
    def has(cls, name: str) -> bool:
        """Whether it has an attack, or a variant of one, of this name."""
        return name in cls.attacks()

    @classmethod
    def remarks(cls, attack: type[Any]) -> tuple[str, ...]:
        """Return what lists say of an attack besides its paper, needs and settings."""
        return ()

    @abstractmethod
    def misplaced(self, adversary: str | None) -> str:
        """Return what its options are for, if some are given; else nothing."""

    @abstractmethod
    def ready(self, run: "RunFolder", names: tuple[str, ...], adversary: str | None) -> ReadyProbe[R]:
        """Check options and attacks, all that there are where none is named."""

    def figures(self, found: R) -> "tuple[Figure, ...]":
        """Return what must not exceed what is claimed."""
        return ()
