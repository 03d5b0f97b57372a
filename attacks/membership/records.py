"""membership.json: the results of membership inference on a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedpriv.core.figure import CONFIDENCE, EpsilonBound, Figure
from fedpriv.core.reading import FileRecord, Record


@dataclass(frozen=True)
class Curve(Record):
    """Points of a receiver operating characteristic, for logarithmic axes, both rates ascending."""

    false_positive_rate: tuple[float, ...] = ()
    true_positive_rate: tuple[float, ...] = ()


@dataclass(frozen=True)
class MembershipAttack(Record):
    """What an attack on membership achieves on a set of members and non-members."""

    attack: str  # its name in the table
    members: int  # how many of the candidates are members
    non_members: int  # how many are not
    auc: float  # area under the curve, from 0 to 1; 0.5: a guess
    tpr_at_1_percent: float  # true positive rate at a false positive rate of 1 % at most
    tpr_at_01_percent: float  # the same at 0.1 %
    # the largest true minus false positive rate; of the same scores that it is chosen on, so that it is above 0 for
    # guesses, too
    advantage: float
    # figure -> low and high end: `auc` after DeLong, the others by bootstrap
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confidence: float = CONFIDENCE  # nominal coverage of the intervals
    curve: Curve = field(default_factory=Curve)  # for a plot


class Membership(FileRecord):
    """membership.json: the results of membership inference."""

    path: ClassVar[str] = "membership.json"

    game: str = ""  # how members and non-members were drawn
    references: int = 0  # the number of reference models
    rounds: tuple[int, ...] = ()  # the rounds after which the adversary knew the model
    attacks: tuple[MembershipAttack, ...]  # in the audit's order
    epsilon_bound: EpsilonBound  # the empirical lower bound on epsilon
    proven_epsilon: float | None = None  # the ledger's, under the bound's adjacency; `None`: it has nothing comparable
    proven_adjacency: str | None = None  # the ledger's; `None`: it proves nothing

    @property
    def figure(self) -> Figure:
        """The bound, between 0 and the ledger's epsilon."""
        return self.epsilon_bound.against(self.proven_epsilon, self.epsilon_bound.delta)

    @property
    def strongest(self) -> MembershipAttack | None:
        """The attack with the largest area under the curve, if any of those that give candidates different scores."""
        same = (0.5, 0.5)  # the interval of one score for all, which looks certain
        telling = [attack for attack in self.attacks if tuple(attack.intervals["auc"]) != same]
        return max(telling or self.attacks, key=lambda attack: attack.auc, default=None)
