"""What ``fedpriv audit`` and ``fedpriv probe`` do to a finished run: capabilities register theirs in their cli.py."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fedpriv.core.errors import InputError
from fedpriv.core.verb import Options

if TYPE_CHECKING:
    from fedpriv.core.figure import Figure
    from fedpriv.core.progress import Progress
    from fedpriv.core.records import GrowingRecord
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

    @abstractmethod
    def show(self, found: R) -> None:
        """Print what was found."""

    def figures(self, found: R) -> "tuple[Figure, ...]":
        """Return what must not exceed what is claimed."""
        return ()


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

    @classmethod
    @abstractmethod
    def attacks(cls) -> Mapping[str, type[Any]]:
        """Return its attacks by name."""

    @classmethod
    def has(cls, name: str) -> bool:
        """Whether it has an attack, or a variant of one, of this name."""
        return name in cls.attacks()

    @classmethod
    @abstractmethod
    def about(cls, attack: type[Any]) -> dict[str, Any]:
        """Return what is said of an attack in JSON."""

    @classmethod
    @abstractmethod
    def lines(cls, attack: type[Any]) -> list[Any]:
        """Return the lines below an attack's name and title."""

    @abstractmethod
    def misplaced(self, adversary: str | None) -> str:
        """Return what its options are for, if some are given; else nothing."""

    @abstractmethod
    def ready(self, run: "RunFolder", names: tuple[str, ...], adversary: str | None) -> ReadyProbe[R]:
        """Check options and attacks, all that there are where none is named."""

    def figures(self, found: R) -> "tuple[Figure, ...]":
        """Return what must not exceed what is claimed."""
        return ()
