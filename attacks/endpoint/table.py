"""The base of all attacks on the finished model or its answers; they are registered in ``PROBES``."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from fedpriv.attacks.access import Access
from fedpriv.attacks.endpoint.records import ProbeResult
from fedpriv.core.settings import Section

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.endpoint.scene import Referee, Scene


@dataclass(frozen=True, eq=False)
class ProbeOutcome:
    """What one attack in one variant found."""

    result: ProbeResult  # the figures
    pictures: "Mapping[str, Tensor]" = field(default_factory=dict)  # name of a file -> image (C, H, W) on [0, 1]


class EndpointAttack(Section):
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
    def run(self, scene: "Scene", referee: "Referee") -> tuple[ProbeOutcome, ...]:
        """Attack, and have the referee score what came of it, in all variants.

        Args:
            scene: all that the adversary has.
            referee: scores; nothing that it says goes back into the attack.

        Raises:
            InputError: the run or the policy is none for this attack.
        """

    def refusal(self, scene: "Scene") -> str | None:
        """Say why it cannot be made on this model or its answers, or return ``None``; nothing is asked."""
        return None
