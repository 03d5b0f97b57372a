"""Membership inference in reports and tables of sweeps: its section, key figure and columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field, field_validator
from typing_extensions import override

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.figure import CONFIDENCE, EpsilonBound, Figure, Interval
from fedpriv.core.finding import Column, Columns, Part, RecordFinding, RunView, Section, Tile, chosen_attack
from fedpriv.core.numbers import decimal, figure, percent
from fedpriv.core.progress import Silent
from fedpriv.core.reading import FileRecord, Record
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder
from fedpriv.core.settings import Count, Settings

if TYPE_CHECKING:
    from fedpriv.core.report.drawing import Plot


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


class AuditConfig(Settings):
    """Membership inference on every trial, as ``fedpriv audit`` does it."""

    references: Count = Field(32, description="reference models to train for each trial; an even number from 6")
    pairs: Count = Field(1000, ge=2, description="members, and as many non-members, to tell apart; at least 2")

    @field_validator("references")
    @classmethod
    def _in_twos(cls, references: int) -> int:
        if references < 6 or references % 2:
            raise InputError("expected an even number from 6")
        return references


# The area under the curve of guesses.
GUESS = 0.5

_BOUND = (
    "A lower bound by canaries, with 95 % confidence for each trial alone. Above the proven figure it would be an "
    "error."
)
_AREA = "the same attack for all trials. A guess has an AUC of 0.5; if the attack fails, that is no proof of privacy."
# Three inks and as many kinds of line tell nine curves apart.
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.2)))


class MembershipFigures(Part):
    """How well one attack tells members of the training data from others."""

    head: ClassVar[str] = "membership"
    keys: ClassVar[tuple[str, ...]] = ("attack",)
    titles: ClassVar[Mapping[str, tuple[str, int]]] = {
        "auc": ("AUC", 3),
        "tpr_at_1_percent": ("TPR at FPR 1 %", 3),
        "tpr_at_01_percent": ("at 0.1 %", 4),
    }

    attack: str = Field(description="name of the attack")
    auc: float = Field(description="area under the curve; 0.5: a guess")
    auc_low: float | None = Field(None, description="low end of its 95 % interval (DeLong)")
    auc_high: float | None = Field(None, description="high end of the same")
    tpr_at_1_percent: float = Field(description="true positive rate at a false positive rate of 1 % at most")
    tpr_at_01_percent: float = Field(description="the same at 0.1 %")


class MembershipColumns(Columns):
    """What an audit adds to the record of a trial."""

    memberships: tuple[MembershipFigures, ...] = Field((), description="one for each attack of the audit")
    epsilon_bound: float | None = Field(None, description="measured: epsilon is at least this, by canaries")
    bound_confidence: float | None = Field(None, description="with this confidence")
    refuted: bool = Field(False, description="whether that bound is above the proven figure: an error")

    @property
    @override
    def alarm(self) -> str:
        if not self.refuted or self.epsilon_bound is None or self.bound_confidence is None:
            return ""
        return f"ε of at least {figure(self.epsilon_bound)} with confidence {percent(self.bound_confidence, 0)}"


@FINDINGS.register
class MembershipFinding(RecordFinding[Membership]):
    """What an audit of a run found."""

    name: ClassVar[str] = "membership"
    rank: ClassVar[int] = 10
    folders: ClassVar[tuple[str, ...]] = ("membership",)
    record: ClassVar[type[Membership]] = Membership
    columns: ClassVar[type[Columns] | None] = MembershipColumns
    audit: ClassVar[type[BaseModel] | None] = AuditConfig

    @override
    def audit_trial(self, folder: RunFolder, settings: AuditConfig) -> None:
        from fedpriv.attacks.membership.audit import audit_run

        try:
            audit_run(folder, settings.references, settings.pairs, Silent())
        except RunFailedError:
            # A refuted ledger is a result, which the record shows as one; it is written before it is told.
            if folder.read(Membership) is None:
                raise

    @override
    def figures(self, found: Membership) -> tuple[Figure, ...]:
        return (found.figure, *(_area(attack) for attack in found.attacks))

    @override
    def section(self, found: Membership, view: RunView) -> Section:
        columns = [("auc", 3), ("tpr_at_1_percent", 3), ("tpr_at_01_percent", 4), ("advantage", 3)]
        values = {
            "membership": found,
            "proven": _proven(found, view),
            "columns": columns,
            "roc": roc_plot(found.attacks),
        }
        return Section("membership", "Membership", values)

    @override
    def tiles(self, found: Membership | None, view: RunView) -> tuple[Tile, ...]:
        strongest = found.strongest if found else None
        if found is None or strongest is None:
            return ()
        area = _area(strongest)
        conditions = [("attack", strongest.attack)]
        if area.measured.ends:
            conditions.append(("95 %", " to ".join(map(decimal, area.measured.ends))))
        conditions += [
            ("TPR", f"{percent(strongest.tpr_at_1_percent)} at a false positive rate of 1 %"),
            ("measured", f"ε is at least {figure(found.epsilon_bound.epsilon, 3)}"),
        ]
        remark = "A guess has 0.5. The best of several attacks, which is slightly optimistic for it."
        if found.figure.exceeded:
            remark = "The measured ε exceeds the ε that the ledger claims to be proven: see below."
        leaks = area.measured.low is not None and area.measured.low > GUESS
        return (
            Tile(
                "Membership inference: AUC", decimal(strongest.auc), conditions=tuple(conditions), remark=remark,
                alarm=leaks or found.figure.exceeded, place=20,
            ),
        )  # fmt: skip

    @override
    def trial(self, found: Membership) -> Mapping[str, Any]:
        return {
            "memberships": tuple(_member(attack) for attack in found.attacks),
            "epsilon_bound": found.epsilon_bound.epsilon,
            "bound_confidence": found.epsilon_bound.confidence,
            "refuted": found.figure.exceeded,
        }

    @override
    def choose(self, trials: Sequence[MembershipColumns], asked: str = "") -> str:
        areas = [{each.attack: each.auc for each in trial.memberships} for trial in trials]
        return chosen_attack(areas, "membership attack", asked)

    @override
    def table(self, trials: Sequence[MembershipColumns], chosen: str) -> tuple[Column, ...]:
        bounds = [trial.epsilon_bound for trial in trials]
        areas = [[each.auc for each in trial.memberships] for trial in trials]
        bound = Column(
            "ε ≥",
            "Measured: ε at least",
            "figure",
            tuple(None if value is None else Interval(value, None, None) for value in bounds),
            tuple("" if value is None else f"{value:.3g}" for value in bounds),
            alarms=tuple(trial.refuted for trial in trials),
            largest=True,
            meaning=("Measured: ε at least", _BOUND),
        )
        area = Column(
            "AUC",
            "AUC",
            "decimal",
            tuple(_area_of(trial, chosen) for trial in trials),
            tuple(f"{max(own):.3f}" if own else "" for own in areas),
            most=1.0,
            meaning=("Membership", f"The plots show {chosen}, {_AREA}" if chosen else "No trial was audited."),
            axis="AUC of membership inference (0.5: a guess)",
            guess=GUESS,
            name="Accuracy and membership inference",
        )
        return bound, area


def _member(attack: MembershipAttack) -> MembershipFigures:
    low, high = attack.intervals.get("auc", (None, None))
    return MembershipFigures(
        attack=attack.attack,
        auc=attack.auc,
        auc_low=low,
        auc_high=high,
        tpr_at_1_percent=attack.tpr_at_1_percent,
        tpr_at_01_percent=attack.tpr_at_01_percent,
    )


def _area_of(trial: MembershipColumns, attack: str) -> Interval | None:
    found = (each for each in trial.memberships if each.attack == attack)
    return next((Interval(each.auc, each.auc_low, each.auc_high) for each in found), None)


def _area(attack: MembershipAttack) -> Figure:
    low, high = attack.intervals.get("auc", (None, None))
    return Figure(f"area under the curve of {attack.attack}", Interval(attack.auc, low, high), GUESS, unit="number")


def _proven(found: Membership, view: RunView) -> str:
    if found.proven_epsilon is not None:
        return f"ε is at most {figure(found.proven_epsilon)}"
    if not view.experiment.protects:
        return "nothing: there is no mechanism"
    return f"nothing comparable: {found.proven_adjacency or 'no adjacency is named'}"


def roc_plot(attacks: Sequence[MembershipAttack]) -> "Plot | None":
    """Draw the curves of attacks on membership on logarithmic axes; ``None`` where there is no point to draw."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from fedpriv.core.report.drawing import LIGHT, panel, plot, styled

    drawn = [attack for attack in attacks if attack.curve.false_positive_rate]
    if not drawn:
        return None
    least = min(min(*attack.curve.false_positive_rate, *attack.curve.true_positive_rate) for attack in drawn)

    with styled():
        drawing, axes = panel((6.2, 4.4))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.plot([least, 1], [least, 1], color=LIGHT.muted, linewidth=1, linestyle=(0, (1, 2)), label="a guess")
        for number, attack in enumerate(drawn):
            axes.plot(
                attack.curve.false_positive_rate, attack.curve.true_positive_rate, label=attack.attack, linewidth=1.6,
                color=(LIGHT.line, LIGHT.alarm, LIGHT.text)[number % 3], linestyle=_DASHES[number // 3 % len(_DASHES)],
            )  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("false positive rate", color=LIGHT.muted)
        axes.set_ylabel("true positive rate", color=LIGHT.muted)
        drawing.legend(loc="outside right upper", frameon=False, fontsize=8.5, labelcolor=LIGHT.text, handlelength=2.6)

    names = ", ".join(f"{attack.attack} {decimal(attack.auc)}" for attack in drawn)
    return plot(drawing, f"True against false positive rate of membership inference, logarithmic; areas: {names}.")
