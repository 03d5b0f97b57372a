"""What no change of an image can do to the model's vote, beside what attacks did: the words and rows of the report.

At every size: proven <= what is true <= right under every attack <= right unattacked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedpriv.core.records import BOUNDS, Attempt, Evasion, Interval, NoiseFacts, Robustness, middle
from fedpriv.core.registry import EVASIONS, NOISELESS
from fedpriv.report.numbers import count, duration, figure, percent
from fedpriv.report.view import View

NORMS: Mapping[str, str] = {"l2": "ℓ₂", "linf": "ℓ∞"}
AXES: Mapping[str, str] = {
    "l2": "Euclidean size of the change (ℓ₂), inputs from 0 to 1",
    "linf": "largest change of a value (ℓ∞), inputs from 0 to 1",
}


@dataclass(frozen=True)
class Sandwich:
    """What the plot shows: of the attacked images where there were attacks, else of the certified ones.

    Attributes:
        norm: l2 or linf.
        images: right and wrong ones.
        clean: the share that is right unattacked.
        sizes: that the tables are about, ascending.
        radii: bound -> the radius of each image that has one above 0, ascending; empty: nothing was certified.
        evasion: ``None``: nothing was attacked.
    """

    norm: str
    images: int
    clean: float
    sizes: tuple[float, ...]
    radii: Mapping[str, tuple[float, ...]]
    evasion: Evasion | None

    def proven(self, size: float, bound: str = "main") -> float:
        """The share of images whose right vote no change up to a size turns."""
        return sum(radius > size for radius in self.radii[bound]) / self.images


@dataclass(frozen=True)
class SizeRow:
    """One size of the table: what is proven, right under every attack, right under each, and certificates broken."""

    size: float
    proven: Interval | None
    least: Interval
    attacks: tuple[Interval, ...]
    broken: int


@dataclass(frozen=True)
class BoundRow:
    """One theorem of the table: the share that it proves at each size, and its mean radius, for both norms."""

    name: str
    shares: Mapping[str, tuple[Interval, ...]]
    radii: Mapping[str, float]


def sandwich(view: View) -> Sandwich | None:
    """Return what the plot shows; ``None`` where nothing was certified and nothing attacked."""
    robustness, evasion = view.robustness, view.evasion
    if evasion is not None:
        attacked = {attempt.image for attempt in view.attempts}
        norm, sizes, images, clean = evasion.norm, evasion.sizes, evasion.victims, evasion.clean.value
        own = [each for each in view.certificates if each.image in attacked]
    elif robustness is not None:
        norm, images, clean = robustness.noise.norm, robustness.examples, robustness.voted.value
        sizes, own = robustness.curve(norm).sizes, list(view.certificates)
    else:
        return None
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


def size_rows(evasion: Evasion, attempts: Sequence[Attempt]) -> list[SizeRow]:
    """Return the rows of the table by size."""
    broken = {size: {each.image for each in attempts if each.broken and each.size == size} for size in evasion.sizes}
    certified: Sequence[Interval | None] = evasion.certified or (None,) * len(evasion.sizes)
    return [
        SizeRow(
            size,
            certified[at],
            evasion.least[at],
            tuple(curve.shares[at] for curve in evasion.curves),
            len(broken[size]),
        )
        for at, size in enumerate(evasion.sizes)
    ]


def bound_rows(robustness: Robustness) -> list[BoundRow]:
    """Return the rows of the table by theorem."""
    means = {radius.bound: {"l2": radius.l2, "linf": radius.linf} for radius in robustness.radii}
    return [
        BoundRow(name, {norm: robustness.curve(norm, bound).shares for norm in NORMS}, means[bound])
        for bound, name in BOUNDS.items()
    ]


def evasion_title(name: str) -> str:
    """Return an evasion attack in words; its name where no package here has it."""
    bare = name.removesuffix(NOISELESS)
    title = EVASIONS[bare].title if bare in EVASIONS else bare
    return f"{title}, noiseless" if name.endswith(NOISELESS) else title


def _noise(noise: NoiseFacts) -> str:
    """Return how much noise there is and where."""
    where = "on the input" if noise.place == "input" else "behind the first layer"
    shared = "" if noise.redistribution == "uniform" else f", r: {noise.redistribution}"
    when = ", not there in training" if noise.afterwards else ""
    return f"σ = {figure(noise.sigma)} in {NORMS[noise.norm]}, {where}{shared}{when}"


def robustness_facts(robustness: Robustness) -> list[tuple[str, str]]:
    """Return what the certificates rest on, as (name, text)."""
    return [
        ("Noise", _noise(robustness.noise)),
        ("Examples certified", count(robustness.examples)),
        ("Right by vote", _share(robustness.voted)),
        ("Right without noise", _share(robustness.noiseless)),
        ("No class ahead", count(robustness.abstained)),
        ("Votes an example", f"{count(robustness.selection)} to choose, {count(robustness.votes)} fresh ones to prove"),
        ("Each may be wrong", f"with probability {figure(robustness.alpha)}"),
        ("Wrong in all", f"at most {count(robustness.wrong_at_most)}, with 95 % confidence"),
        ("Largest radius", ", ".join(f"{NORMS[norm]} {figure(robustness.reach.of(norm), 3)}" for norm in NORMS)),
        ("Time", duration(robustness.seconds)),
    ]


def robustness_notes(robustness: Robustness, evasion: Evasion | None) -> list[str]:
    """Return what a reader has to know beside the figures."""
    notes = []
    beyond = () if evasion is None else robustness.beyond(evasion.norm, evasion.sizes)
    if evasion is not None and beyond:
        norm = NORMS[evasion.norm]
        notes.append(
            f"No certificate reaches beyond {norm} {figure(robustness.reach.of(evasion.norm), 3)} here: that is the "
            f"radius of an example that all {count(robustness.votes)} votes agree on. At {norm} "
            f"{figure(beyond[0])} and above nothing can be proven with this noise and so many votes. "
            "Certified accuracy that is claimed at such sizes comes from a bound that does not hold."
        )
    if robustness.noise.epsilon is not None:
        notes.append(
            f"robustness.epsilon = {figure(robustness.noise.epsilon)} names a noise level, as in PixelDP. It is no "
            "privacy budget, and has nothing to do with the ε of the ledger."
        )
    notes.append(
        "The theorems are about real numbers, and the network computes with rounded ones. They also take for granted "
        "that the attacker does not know the draws of the noise."
    )
    return notes


def share_ends(share: Interval) -> str:
    """Return the interval of a share."""
    return "not known" if share.ends is None else " to ".join(map(percent, share.ends))


def _share(share: Interval) -> str:
    return f"{percent(share.value)} ({share_ends(share)})"
