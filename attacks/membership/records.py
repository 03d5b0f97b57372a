"""membership.json: what an audit of a run found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedpriv.core.figure import CONFIDENCE, EpsilonBound, Figure
from fedpriv.core.records.reading import FileRecord, Record


@dataclass(frozen=True)
class Curve(Record):
    """Points of a receiver operating characteristic, for logarithmic axes, both rates ascending."""

    false_positive_rate: tuple[float, ...] = ()
    true_positive_rate: tuple[float, ...] = ()


@dataclass(frozen=True)
class MembershipAttack(Record):
    """What an attack on membership achieves on a set of members and non-members.

    Attributes:
        attack: its name in the table.
        members: how many of the candidates are members.
        non_members: how many are not.
        auc: area under the curve, from 0 to 1; 0.5: a guess.
        tpr_at_1_percent: true positive rate at a false positive rate of 1 % at most.
        tpr_at_01_percent: the same at 0.1 %.
        advantage: the largest true minus false positive rate; of the same scores that it is chosen on, so that it is
            above 0 for guesses, too.
        intervals: figure -> low and high end: ``auc`` after DeLong, the others by bootstrap.
        confidence: nominal coverage of the intervals.
        curve: for a plot.
    """

    attack: str
    members: int
    non_members: int
    auc: float
    tpr_at_1_percent: float
    tpr_at_01_percent: float
    advantage: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confidence: float = CONFIDENCE
    curve: Curve = field(default_factory=Curve)


class Membership(FileRecord):
    """membership.json.

    Attributes:
        game: how members and non-members were drawn.
        references: models that were trained for it.
        rounds: after which the adversary knew the model.
        attacks: in the audit's order.
        epsilon_bound: the empirical lower bound on epsilon.
        proven_epsilon: what the ledger claims under the bound's adjacency; ``None`` where it claims nothing comparable.
        proven_adjacency: the ledger's; ``None`` where it claims nothing.
    """

    path: ClassVar[str] = "membership.json"

    game: str = ""
    references: int = 0
    rounds: tuple[int, ...] = ()
    attacks: tuple[MembershipAttack, ...]
    epsilon_bound: EpsilonBound
    proven_epsilon: float | None = None
    proven_adjacency: str | None = None

    @property
    def figure(self) -> Figure:
        """The bound between 0 and what the ledger claims."""
        return self.epsilon_bound.against(self.proven_epsilon, self.epsilon_bound.delta)

    @property
    def strongest(self) -> MembershipAttack | None:
        """The attack with the largest area under the curve."""
        return max(self.attacks, key=lambda attack: attack.auc, default=None)
