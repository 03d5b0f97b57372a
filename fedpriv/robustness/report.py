"""Certificates and evasion attacks in reports: proven <= true <= right under attack <= right unattacked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.evasion.methods import EVASIONS, NOISELESS
from fedpriv.attacks.evasion.steps import EvasionAttempt
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.finding import Column, Columns, Finding, Part, RunView, Section, Tile
from fedpriv.core.numbers import count, duration, figure, percent
from fedpriv.core.progress import Silent
from fedpriv.core.reading import GrowingRecord
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder
from fedpriv.robustness.records import (
    BOUNDS,
    Certificate,
    Evasion,
    NoiseFacts,
    Robustness,
    middle,
    read_attempts,
    read_certificates,
)
from fedpriv.robustness.settings import RobustnessConfig

if TYPE_CHECKING:
    from fedpriv.core.world import World

_CERTIFIED = (
    "The share of test examples whose right vote no perturbation of that size changes; sizes are of inputs from 0 to "
    "1, Euclidean for l2 and the largest change of a value for linf. A setting without noise in the forward pass has "
    "no certificates. This is about inputs and has nothing to do with the ledger’s ε."
)
_ATTACKED = (
    "The share that stays right under every evasion attack up to that size. It is at least what is proven at that "
    "size, and stronger attacks may find less."
)

NORMS: Mapping[str, str] = {"l2": "ℓ₂", "linf": "ℓ∞"}
AXES: Mapping[str, str] = {
    "l2": "Euclidean size of the change (ℓ₂), inputs from 0 to 1",
    "linf": "largest change of a value (ℓ∞), inputs from 0 to 1",
}


EVERY = "every"
"""What all evasion attacks up to a size are called together."""


@dataclass(frozen=True)
class Robust:
    """What certificates and evasion attacks show, all together; at least one of the two was made."""

    robustness: Robustness | None  # `None`: nothing was certified
    certificates: tuple[Certificate, ...]  # of each image; empty likewise
    evasion: Evasion | None  # `None`: nothing was attacked
    attempts: tuple[EvasionAttempt, ...]  # each attack on an image; empty likewise

    def broken(self, size: float) -> int:
        """How many images' certificates attacks of this size broke."""
        return len({each.image for each in self.attempts if each.broken and each.size == size})


@dataclass(frozen=True)
class Sandwich:
    """What the plot shows: of the attacked images where there were attacks, else of the certified ones."""

    norm: str  # l2 or linf
    images: int  # right and wrong ones
    clean: float  # the share that is right unattacked
    sizes: tuple[float, ...]  # that the tables are about, ascending
    # bound -> the radius of each image that has one above 0, ascending; empty: nothing was certified
    radii: Mapping[str, tuple[float, ...]]
    evasion: Evasion | None  # `None`: nothing was attacked

    def proven(self, size: float, bound: str = "main") -> float:
        """The share of images whose right vote no change up to a size turns."""
        return sum(radius > size for radius in self.radii[bound]) / self.images


def sandwich(found: Robust) -> Sandwich:
    """Return what the plot shows."""
    robustness, evasion = found.robustness, found.evasion
    if evasion is not None:
        attacked = {attempt.image for attempt in found.attempts}
        norm, sizes, images, clean = evasion.norm, evasion.sizes, evasion.victims, evasion.clean.value
        own = [each for each in found.certificates if each.image in attacked]
    else:
        if robustness is None:
            raise ValueError("nothing was certified, and nothing attacked")
        norm, images, clean = robustness.noise.norm, robustness.examples, robustness.voted.value
        sizes, own = robustness.curve(norm).sizes, list(found.certificates)
    proven = () if robustness is None else BOUNDS
    radii = {bound: tuple(sorted(r for each in own if (r := each.radius(norm, bound)) > 0)) for bound in proven}
    return Sandwich(norm, images, clean, sizes, radii, evasion)


def truth(evasion: Evasion) -> str:
    """Return the sentence of the middle size."""
    at = middle(evasion.sizes)
    where = f"At {NORMS[evasion.norm]} {figure(evasion.sizes[at])}"
    at_most = f"at most {percent(evasion.least[at].value)} are right under these attacks"
    if evasion.certified is None:
        return f"{where}, {at_most}. Nothing is proven: no certificates were made (fedpriv certify)."
    proven = percent(evasion.certified[at].value)
    if evasion.broken:
        return f"{where}, {proven} are claimed to be proven, and {at_most}."
    return f"{where}, {proven} are proven and {at_most}: the truth lies between."


def evasion_title(name: str) -> str:
    """Return an evasion attack in words; its name where no package here has it."""
    bare = name.removesuffix(NOISELESS)
    title = EVASIONS[bare].title if bare in EVASIONS else bare
    return f"{title}, noiseless" if name.endswith(NOISELESS) else title


def _noise(noise: NoiseFacts) -> str:
    """Return how much noise there is and where."""
    where = "on the input" if noise.place == "input" else "after the first layer"
    shared = "" if noise.redistribution == "uniform" else f", r: {noise.redistribution}"
    when = ", not used in training" if noise.afterwards else ""
    return f"σ = {figure(noise.sigma)} in {NORMS[noise.norm]}, {where}{shared}{when}"


def robustness_facts(robustness: Robustness) -> list[tuple[str, str]]:
    """Return what the certificates rest on, as (name, text)."""
    return [
        ("Noise", _noise(robustness.noise)),
        ("Examples certified", count(robustness.examples)),
        ("Right by vote", robustness.voted.in_percent),
        ("Right without noise", robustness.noiseless.in_percent),
        ("No clear majority", count(robustness.abstained)),
        (
            "Votes per example",
            f"{count(robustness.selection)} to choose, {count(robustness.votes)} fresh ones to prove",
        ),
        ("Each may be wrong", f"with probability {figure(robustness.alpha)}"),
        ("Wrong in total", f"at most {count(robustness.wrong_at_most)}, with 95 % confidence"),
        ("Largest radius", ", ".join(f"{NORMS[norm]} {figure(robustness.reach.of(norm), 3)}" for norm in NORMS)),
        ("Time", duration(robustness.seconds)),
    ]


def robustness_notes(robustness: Robustness, evasion: Evasion | None) -> list[str]:
    """Return what a reader has to know beside the figures."""
    notes = [] if evasion is None else beyond_reach(robustness, evasion)
    if robustness.noise.epsilon is not None:
        notes.append(
            f"robustness.epsilon = {figure(robustness.noise.epsilon)} sets a noise level, as in PixelDP. It is not a "
            "privacy budget, and has nothing to do with the ε of the ledger."
        )
    notes.append(
        "The theorems are about real numbers, and the network computes with rounded ones. They also assume "
        "that the attacker does not know the draws of the noise."
    )
    return notes


def beyond_reach(robustness: Robustness, evasion: Evasion) -> list[str]:
    """Return the sentence on attacked sizes that no certificate can reach; none where there are no such sizes."""
    norm, beyond = NORMS[evasion.norm], robustness.beyond(evasion.norm, evasion.sizes)
    if not beyond:
        return []
    return [
        f"No certificate reaches beyond {norm} {figure(robustness.reach.of(evasion.norm), 3)} here: that is the radius "
        f"of an example that all {count(robustness.votes)} votes agree on. At {norm} {figure(beyond[0])} and above "
        "nothing can be proven with this noise and number of votes. Claims of certified accuracy at such sizes rely on "
        "a bound that does not hold."
    ]


def share_ends(share: Interval) -> str:
    """Return the interval of a share."""
    return "not known" if share.ends is None else " to ".join(map(percent, share.ends))


def _certified(robustness: Robustness) -> list[Tile]:
    norm = robustness.noise.norm
    curve = robustness.curve(norm)
    if not curve.sizes:
        return []
    at = middle(curve.sizes)
    conditions = (
        ("95 %", share_ends(curve.shares[at])),
        ("right", f"{percent(robustness.voted.value)} by vote"),
        ("wrong", f"at most {count(robustness.wrong_at_most)} of {count(robustness.examples)} (95\u00a0%)"),
    )
    remark = "The noise was added to a model that was trained without it." if robustness.noise.afterwards else ""
    title = f"Certified at {NORMS[norm]} {figure(curve.sizes[at])}"
    return [Tile(title, percent(curve.shares[at].value), conditions=conditions, remark=remark, place=40)]


def _attacked(evasion: Evasion) -> Tile:
    at = middle(evasion.sizes)
    proven = "nothing" if evasion.certified is None else percent(evasion.certified[at].value)
    remark = "Under these attacks; a stronger one may leave less."
    if evasion.broken:
        remark = "An attack broke a certificate: see below."
    return Tile(
        f"Right under attack at {NORMS[evasion.norm]} {figure(evasion.sizes[at])}",
        percent(evasion.least[at].value),
        conditions=(
            ("95 %", share_ends(evasion.least[at])),
            ("attacks", ", ".join(curve.attack for curve in evasion.curves)),
            ("between", f"{proven} proven and {percent(evasion.clean.value)} unattacked"),
        ),
        remark=remark,
        alarm=evasion.broken > 0,
        place=40,
    )


# ---- trials of sweeps ------------------------------------------------------------------------------------------------


class CertifiedFigures(Part):
    """How much is proven about perturbations of one size."""

    head: ClassVar[str] = "certified"
    keys: ClassVar[tuple[str, ...]] = ("norm", "size")

    norm: str = Field(description="l2 or linf")
    size: float = Field(description="of perturbations, pixels from 0 to 1")
    share: float = Field(description="share of the certified images whose right class no such perturbation changes")
    low: float | None = Field(None, description="low end of its 95 % interval over images (Wilson)")
    high: float | None = Field(None, description="high end of the same")


class EvasionFigures(Part):
    """What one attack of one size left right, of all images that were chosen."""

    head: ClassVar[str] = "evasion"
    keys: ClassVar[tuple[str, ...]] = ("attack", "norm", "size")

    attack: str = Field(description="name of the attack; every: all attacks up to the size")
    norm: str = Field(description="l2 or linf")
    size: float = Field(description="of perturbations, pixels from 0 to 1")
    right: float = Field(description="share of the attacked images that is still right")
    low: float | None = Field(None, description="low end of its 95 % interval over images (Wilson)")
    high: float | None = Field(None, description="high end of the same")


class RobustColumns(Columns):
    """What certificates and evasion attacks add to the record of a trial."""

    voted: float | None = Field(None, description="share of the certified images whose votes choose the right class")
    voted_low: float | None = Field(None, description="low end of its 95 % interval over images (Wilson)")
    voted_high: float | None = Field(None, description="high end of the same")
    certified: tuple[CertifiedFigures, ...] = Field((), description="one for each norm and size; the main certificate")
    evasions: tuple[EvasionFigures, ...] = Field((), description="one for each evasion attack and size")
    broken: int | None = Field(None, description="certificates that evasion attacks broke: an error if there are any")

    @property
    @override
    def alarm(self) -> str:
        return f"attacks broke {self.broken} of them" if self.broken else ""


@FINDINGS.register
class RobustFinding(Finding[Robust]):
    """What no change of an image can do to the model's vote, and what attacks did."""

    name: ClassVar[str] = "robustness"
    rank: ClassVar[int] = 30
    folders: ClassVar[tuple[str, ...]] = ("robustness",)
    refuted: ClassVar[str] = "Certificates are broken"
    columns: ClassVar[type[Columns] | None] = RobustColumns

    @override
    def read(self, folder: RunFolder) -> Robust | None:
        robustness, evasion = folder.read(Robustness), folder.read(Evasion)
        if robustness is None and evasion is None:
            return None
        return Robust(robustness, read_certificates(folder), evasion, read_attempts(folder))

    @override
    def records(self, found: Robust) -> dict[str, GrowingRecord]:
        both = {"robustness": found.robustness, "evasion": found.evasion}
        return {key: record for key, record in both.items() if record is not None}

    @override
    def asked_of_trials(self, experiment: Experiment) -> Mapping[str, str]:
        asked = {} if RobustnessConfig.certified(experiment) is None else {"certificates": "certified"}
        return asked if RobustnessConfig.evaded(experiment) is None else {**asked, "evasion": "evaded"}

    @override
    def check_trial(self, experiment: Experiment, world: "World") -> None:
        from fedpriv.robustness.build import certified_rows

        there, public = len(world.dataset.x_test), RobustnessConfig.public(experiment)
        certify, evade = RobustnessConfig.certified(experiment), RobustnessConfig.evaded(experiment)
        # Where there are certificates, only images that have one are attacked.
        key, asked = ("certify.examples", certify) if certify is not None else ("evade.victims", evade)
        if asked is not None:
            certified_rows(experiment.seed, there, asked.among(there - public), public, f"robustness.{key}")

    @override
    def measure_trial(self, folder: RunFolder) -> None:
        from fedpriv.robustness.certify import certify_run
        from fedpriv.robustness.evade import evade_run

        experiment = folder.experiment()
        certify, evade = RobustnessConfig.certified(experiment), RobustnessConfig.evaded(experiment)
        try:
            if certify is not None:
                certify_run(folder, certify, None, Silent())
            if evade is not None:
                evade_run(folder, evade, Silent())
        except InputError as error:
            raise InputError(f"robustness: {error}") from None

    @override
    def figures(self, found: Robust) -> tuple[Figure, ...]:
        return () if found.evasion is None else found.evasion.figures

    @override
    def section(self, found: Robust, view: RunView) -> Section:
        from fedpriv.robustness.sandwich import sandwich_plot

        robustness, evasion = found.robustness, found.evasion
        values = {
            "robustness": robustness,
            "evasion": evasion,
            "truth": truth(evasion) if evasion else "",
            "norms": NORMS,
            "sandwich": sandwich_plot(sandwich(found)),
            "broken": {each.size: found.broken(each.size) for each in found.attempts},
            "bounds": BOUNDS,
            "robustness_facts": robustness_facts(robustness) if robustness else [],
            "robustness_notes": robustness_notes(robustness, evasion) if robustness else [],
            "share_ends": share_ends,
            "evasion_title": evasion_title,
        }
        return Section("robustness", "Robustness", values)

    @override
    def tiles(self, found: Robust | None, view: RunView) -> tuple[Tile, ...]:
        if found is None:
            return ()
        certified = [] if found.robustness is None else _certified(found.robustness)
        return (*certified, *([] if found.evasion is None else [_attacked(found.evasion)]))

    @override
    def trial(self, found: Robust) -> Mapping[str, Any]:
        figures: dict[str, Any] = {}
        if found.robustness is not None:
            voted, curve = found.robustness.voted, found.robustness.curve
            figures |= {"voted": voted.value, "voted_low": voted.low, "voted_high": voted.high}
            figures["certified"] = tuple(
                CertifiedFigures(norm=norm, size=size, share=share.value, low=share.low, high=share.high)
                for norm in NORMS
                for size, share in zip(curve(norm).sizes, curve(norm).shares, strict=True)
            )
        if found.evasion is not None:
            evasion = found.evasion
            shares = {EVERY: evasion.least} | {curve.attack: curve.shares for curve in evasion.curves}
            figures["evasions"] = tuple(
                EvasionFigures(
                    attack=name, norm=evasion.norm, size=size, right=share.value, low=share.low, high=share.high
                )
                for name, each in shares.items()
                for size, share in zip(evasion.sizes, each, strict=True)
            )
            figures["broken"] = None if evasion.certified is None else evasion.broken
        return figures

    @override
    def table(self, trials: Sequence[RobustColumns], chosen: str) -> tuple[Column, ...]:
        certified, right = [certified_at(trial) for trial in trials], [right_at(trial) for trial in trials]
        columns = []
        if (size := _middle(certified)) is not None:
            shares = [found.get(size) for found in certified]
            meaning = ("Certified", _CERTIFIED)
            columns.append(Column.of_shares(f"certified\n{size}", f"Certified at {size}", shares, meaning))
        if (size := _middle(right)) is not None:
            shares = [found.get(size) for found in right]
            title, meaning = f"Right under attack at {size}", ("Right under attack", _ATTACKED)
            alarms = tuple(bool(trial.broken) for trial in trials)
            columns.append(Column.of_shares(f"attacked\n{size}", title, shares, meaning, alarms))
        return tuple(columns)


class Size(NamedTuple):
    """Of perturbations."""

    norm: str  # l2 or linf
    value: float  # pixels from 0 to 1

    def __str__(self) -> str:
        return f"{self.norm} {self.value:g}"


def certified_at(trial: RobustColumns) -> dict[Size, Interval]:
    """What is proven in a trial, by size: Euclidean ones first."""
    return {Size(each.norm, each.size): Interval(each.share, each.low, each.high) for each in trial.certified}


def right_at(trial: RobustColumns) -> dict[Size, Interval]:
    """What all attacks up to a size left right in a trial."""
    every = (each for each in trial.evasions if each.attack == EVERY)
    return {Size(each.norm, each.size): Interval(each.right, each.low, each.high) for each in every}


def _middle(found: Sequence[Mapping[Size, Interval]]) -> Size | None:
    """The middle size, in the first norm, of the first trial that has any; ``None``: none has."""
    sizes = [*next(filter(None, found), ())]
    own = [size for size in sizes if size.norm == sizes[0].norm]
    return own[len(own) // 2] if own else None
