"""The tables of docs/paper-robustness.md: ``python -m studies paper_robustness sweeps/secure-sgd-mnist-small``.

They are read from the folder of the sweep ``configs/paper/secure-sgd-mnist.toml`` or ``-cifar10.toml``: every row of
the paper with its epsilon and sigma, the paper's orderings as differences between rows, what each theorem proves of
the same votes, and what the paper's own scaling for the largest change of a pixel claims, beside what attacks do to
these claims. FEDPRIV_DATA names the data.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedpriv.core.errors import InputError
from fedpriv.core.figure import Interval
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.robustness.norms import FirstLayer, unit_images
from fedpriv.robustness.records import CertifiedCurve, Evasion, Robustness, read_attempts, read_certificates
from fedpriv.robustness.report import RobustColumns, Size, certified_at, right_at
from fedpriv.robustness.smoothed import read_smoothed
from fedpriv.sweep.comparison import Chosen, estimate, settings_of
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import TrialRecord
from studies.arguments import StudyParser
from studies.results import Table, in_percent, with_interval

# Gradient mechanism, and redistribution of the noise in the forward pass -> the paper's name of the row.
NAMES = {
    ("none", ""): "plain",
    ("gaussian", ""): "DP-SGD",
    ("none", "uniform"): "PixelDP",
    ("none", "vulnerable"): "HGM_PixelDP",
    ("gaussian", "uniform"): "Secure-SGD (AGM)",
    ("gaussian", "vulnerable"): "Secure-SGD (HGM)",
}
ON_IMAGE = "PixelDP, on image"
NOISE = ("epsilon", "sigma")  # heads of what every row has: of the noise on gradients, and in the forward pass
# First and second row of what the paper orders; it says that the first is better. It does not have the last pair.
ORDERINGS = (
    ("HGM_PixelDP", "PixelDP"),
    ("Secure-SGD (HGM)", "Secure-SGD (AGM)"),
    ("Secure-SGD (HGM)", "DP-SGD"),
    ("Secure-SGD (AGM)", "DP-SGD"),
    ("PixelDP", ON_IMAGE),
)
CERTIFIED = (Size("l2", 0.1), Size("l2", 0.25), Size("l2", 0.5))
ATTACKED = (Size("linf", 0.05), Size("linf", 0.1), Size("linf", 0.2))


@dataclass(frozen=True)
class TrialRow:
    """Trials that differ in their seed only."""

    records: tuple[TrialRecord, ...]  # the trials
    name: str  # the paper's
    target: float | None  # epsilon that the noise on gradients is calibrated for; `None`: there is none
    sigma: float  # of the noise in the forward pass; 0: there is none

    @staticmethod
    def of(records: tuple[TrialRecord, ...]) -> "TrialRow":
        """Name trials as the paper does."""
        first = records[0]
        sigma = float(first.settings["robustness.noise"])
        shares = str(first.settings.get("robustness.redistribution", "uniform")) if sigma else ""
        target = first.settings.get("mechanism.target_epsilon")
        name = ON_IMAGE if "robustness.place" in first.settings else NAMES[first.mechanism, shares]
        return TrialRow(records, name, None if target is None else float(target), sigma)

    @property
    def cells(self) -> list[str]:
        """What the first columns of each table say."""
        return [self.name, "" if self.target is None else f"{self.target:g}", f"{self.sigma:g}" if self.sigma else ""]

    def right(self) -> Interval | None:
        """Voted accuracy on the certified images; without noise, accuracy on the whole test set."""
        tested = [each.of(RobustColumns) for each in self.records]
        voted = [(each.voted, each.voted_low, each.voted_high) for each in tested]
        usual = [(each.accuracy, each.accuracy_low, each.accuracy_high) for each in self.records]
        return estimate(voted if self.sigma else usual, most=1.0)

    def certified(self, size: Size) -> Interval | None:
        """The share that is proven at a size."""
        shares = [share for each in self.records if (share := certified_at(each.of(RobustColumns)).get(size))]
        return estimate([(share.value, share.low, share.high) for share in shares], most=1.0)

    def attacked(self, size: Size) -> Interval | None:
        """The share that all attacks up to a size leave right."""
        shares = [share for each in self.records if (share := right_at(each.of(RobustColumns)).get(size))]
        return estimate([(share.value, share.low, share.high) for share in shares], most=1.0)


def main() -> None:
    """Print the tables of one sweep."""
    parser = StudyParser("studies.paper_robustness", __doc__)
    parser.add_argument("folder", type=Path)
    with parser.parsed() as asked:
        folder = asked.folder
        rows = rows_of(SweepFolder.open(folder).records())
        print(table(rows), orderings(rows), theorems(rows, folder), claims(rows, folder), sep="\n", end="")


def rows_of(records: Sequence[TrialRecord]) -> list[TrialRow]:
    """Group trials that differ in their seed only; failed ones are left out."""
    found = settings_of(records, Chosen())
    if not found or any("robustness.noise" not in setting.first.settings for setting in found):
        raise InputError("these are no finished trials of configs/paper/secure-sgd-mnist.toml or -cifar10.toml")
    return [TrialRow.of(setting.records) for setting in found]


# ---- every row, and the paper's orderings ----------------------------------------------------------------------------


def table(rows: Sequence[TrialRow]) -> Table:
    """Return in percent: what is right, what is proven, what is right under attack."""
    heads = ["right", *(f"certified, {size}" for size in CERTIFIED), *(f"attacked, {size}" for size in ATTACKED)]
    lines = []
    for row in rows:
        shares = [*map(row.certified, CERTIFIED), *map(row.attacked, ATTACKED)]
        lines.append([*row.cells, with_interval(row.right()), *map(in_percent, shares)])
    return Table(["row", *NOISE, *heads], lines)


def orderings(rows: Sequence[TrialRow]) -> Table:
    """Return in points: a row's shares minus those of the row that the paper says is worse."""
    proven, under = CERTIFIED[1], ATTACKED[1]
    figures: list[Callable[[TrialRow], Interval | None]] = [
        TrialRow.right,
        lambda row: row.certified(proven),
        lambda row: row.attacked(under),
    ]
    lines = []
    for first, second in _pairs(rows):
        shares = [with_interval(difference(figure(first), figure(second))) for figure in figures]
        lines.append([f"{first.name} - {second.name}", *first.cells[1:], *shares])
    heads = ["first minus second", *NOISE, "right", f"certified, {proven}", f"attacked, {under}"]
    return Table(heads, lines)


def _pairs(rows: Sequence[TrialRow]) -> Iterator[tuple[TrialRow, TrialRow]]:
    """Rows that the paper orders, at the same epsilon and, where both have noise in the forward pass, sigma."""
    for better, worse in ORDERINGS:
        for first in (row for row in rows if row.name == better):
            for second in (row for row in rows if row.name == worse):
                if first.target == second.target and second.sigma in (0, first.sigma):
                    yield first, second


def difference(first: Interval | None, second: Interval | None) -> Interval | None:
    """Return the difference of two shares with its interval from theirs (Newcombe 1998, method 10).

    The method is for samples that are independent. These share their images, on which good rows are right together, so
    that the interval is rather too wide than too narrow.
    """
    if first is None or second is None or first.ends is None or second.ends is None:
        return None
    value = first.value - second.value
    below = math.hypot(first.value - first.ends[0], second.ends[1] - second.value)
    above = math.hypot(first.ends[1] - first.value, second.value - second.ends[0])
    return Interval(value, value - below, value + above)


def theorems(rows: Sequence[TrialRow], folder: Path) -> Table:
    """Return in percent: what each theorem proves of the same votes at one size."""
    size = CERTIFIED[0]
    bounds = ("main", "renyi", "analytic", "classic", "extended", "paper")
    lines = []
    for row in (row for row in rows if row.sigma):
        records = [RunFolder.open(folder / record.folder).read(Robustness) for record in row.records]
        curves = [[each.curve(size.norm, bound) for each in records if each is not None] for bound in bounds]
        shares = [estimate([(share.value, share.low, share.high) for share in _at(size, each)]) for each in curves]
        lines.append([*row.cells, *map(in_percent, shares)])
    return Table([f"certified, {size}", *NOISE, *bounds], lines)


def _at(size: Size, curves: Sequence[CertifiedCurve]) -> list[Interval]:
    return [curve.shares[curve.sizes.index(size.value)] for curve in curves]


# ---- the paper's scaling for the largest change of a pixel -----------------------------------------------------------


def claims(rows: Sequence[TrialRow], folder: Path) -> Table:
    """Return certificates by the paper's scaling at each attacked size, and how many attacks broke.

    Only attacked images count; proven is the share of the same images by the sound norm, in percent.
    """
    sizes: list[float] = []
    lines = []
    for row in (row for row in rows if row.sigma):
        runs = [claims_of(RunFolder.open(folder / record.folder)) for record in row.records]
        sizes = [claim.size for claim in runs[0]]
        added = [
            [sum(numbers) for numbers in zip(*((c.claimed, c.broken, c.images) for c in column), strict=True)]
            for column in zip(*runs, strict=True)
        ]
        proven = max(claim.proven for each in runs for claim in each)
        lines.append([*row.cells, *(" / ".join(map(str, each)) for each in added), str(proven)])
    heads = ["claims / broken / images", *NOISE, *(f"linf {size:g}" for size in sizes), "proven"]
    return Table(heads, lines)


@dataclass(frozen=True)
class PixelClaim:
    """What the paper's scaling says of the attacked images at one size."""

    size: float  # largest change of a pixel
    images: int  # that were attacked, the wrong ones included
    claimed: int  # certificates of right images
    broken: int  # those whose vote an attack of this size turned
    proven: int  # certificates of right images by the sound norm


def claims_of(run: RunFolder) -> list[PixelClaim]:
    """Return the claims about a run that was certified and attacked in linf, size by size.

    A claim is the paper's margin (Theorem 2, Hoeffding) over the largest 1-norm of a row of W, in units of the noise:
    what the paper takes for the sensitivity. A sound one needs the norm from linf to l2, which is larger.
    """
    experiment = run.experiment()
    world = build_world(experiment, run.world_secret(experiment))
    model = read_smoothed(run, world)
    norm = largest_row(model.network.first, model.network.deviations)
    evasion = run.read(Evasion)
    if evasion is None or evasion.norm != "linf":
        raise InputError(f"{run.path} was not attacked in linf")
    attempts, radii = read_attempts(run), {each.image: each.margins["paper"] / norm for each in read_certificates(run)}
    proven = {each.image: each.radius("linf") for each in read_certificates(run)}
    claims = []
    for size in evasion.sizes:
        here = [each for each in attempts if each.size == size]
        claimed = {each.image for each in here if size < radii[each.image]}
        fallen = {each.image for each in here if not each.right}
        sound = {each.image for each in here if size < proven[each.image]}
        claims.append(PixelClaim(size, evasion.victims, len(claimed), len(claimed & fallen), len(sound)))
    return claims


def largest_row(first: FirstLayer, deviations: torch.Tensor) -> float:
    """Return the largest 1-norm of a row of A, W in units of the noise: the norm from linf to linf."""
    exact = first.exact()
    with torch.no_grad():
        zero = exact(exact.blank())
        sums = torch.zeros_like(zero[0])
        for images in unit_images(exact):
            sums += (exact(images) - zero).abs().sum(dim=0)
    return float((sums / deviations.to("cpu", torch.float64)).max())


if __name__ == "__main__":
    main()
