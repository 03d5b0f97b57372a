"""Attacks on the finished model or its answers: their base, which ``PROBES`` has, and what they return."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fedpriv.attacks.settings import Access
from fedpriv.core.figure import CurvePoint, Figure
from fedpriv.core.reading import Record
from fedpriv.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


@dataclass(frozen=True)
class Inverted(Record):
    """What an attack says one class looks like."""

    label: int  # the class; nobody is named
    picture: str  # its file in probe/
    confidence: float  # of the attacked model in the label
    rank: int  # the label's place among all classes, by likeness to pictures that nobody trained with; 1: told
    psnr: float  # to the mean of the class's training pictures, in dB


@dataclass(frozen=True)
class Shown(Record):
    """A picture that an attack is about: its file in probe/, what kind it is, and of what."""

    picture: str
    kind: str
    words: str


@dataclass(frozen=True)
class ProbeResult(Record):
    """One attack in one variant."""

    attack: str  # its name in the table
    variant: str  # what tells it from its others; may be empty
    surface: str  # what it needs of the threat model, in words
    queries: int  # images that the endpoint answered
    figures: tuple[Figure, ...]  # between guess and ceiling, the one that headlines are about first
    curve: tuple[CurvePoint, ...] = ()  # of the first figure against questions; may be empty
    inverted: tuple[Inverted, ...] = ()  # the classes, for attacks that make pictures
    guess_picture: str = ""  # the file of what a guess offers for every class; empty where there are no pictures
    sentences: tuple[str, ...] = ()  # what it means
    shown: tuple[Shown, ...] = ()  # further pictures; may be empty


@dataclass(frozen=True, eq=False)
class ProbeOutcome:
    """What one attack in one variant found."""

    result: ProbeResult  # the figures
    pictures: "Mapping[str, Tensor]" = field(default_factory=dict)  # name of a file -> image (C, H, W) on [0, 1]


class ModelAttack(Settings):
    """An attack and its settings; a subclass with a name, entered in ``PROBES``, is one."""

    name: ClassVar[str]  # on the command line
    title: ClassVar[str]  # what it is called
    reference: ClassVar[str]  # the paper
    needs: ClassVar[tuple[Access, ...]] = (Access.ANSWERS,)  # what the threat model must grant
    adversary: ClassVar[str] = ""  # who makes it unless somebody is named; empty: whoever gets the model of a run

    @property
    def surface(self) -> str:
        """What it needs, in words."""
        return "; ".join(need.words for need in self.needs)

    @abstractmethod
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        """Attack with what the scene has, and have the referee score what came of it, in all variants."""

    def outcome(
        self,
        asked: int,
        figures: tuple[Figure, ...],
        *sentences: str,
        variant: str = "",
        pictures: "Mapping[str, Tensor] | None" = None,
        **more: Any,
    ) -> ProbeOutcome:
        """Return what one variant found; ``more``: further fields of :class:`ProbeResult`."""
        result = ProbeResult(self.name, variant, self.surface, asked, figures, sentences=sentences, **more)
        return ProbeOutcome(result, pictures or {})

    def refusal(self, scene: "ProbeScene") -> str | None:
        """Say why it cannot be made on this model or its answers, or return ``None``; nothing is asked."""
        return None
