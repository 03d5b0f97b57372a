"""Certificates of a run's final model, added to its folder: what no perturbation up to a size can change of votes.

For any g with values in [0, 1] and z = h(x) + N(0, Sigma), Phi^-1(E g) changes by at most |Sigma^(-1/2) W alpha|_2 when
x moves by alpha. So with the chosen class above ``lower`` and every other below ``upper`` the vote cannot change while
that is below the margin m = (Phi^-1(lower) - Phi^-1(upper)) / 2 (Cohen et al. 2019; for ellipsoids Eiras et al. 2022).
No larger margin holds for all g. The other margins are what weaker theorems prove of the same votes.

Certificates are theorems about real numbers; networks compute in floating point (Voracek and Hein 2023).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from scipy import optimize, special, stats
from torch import Tensor

from fedpriv.accounting.gaussian import CALIBRATIONS
from fedpriv.attacks.intervals import binomial_lower, binomial_upper, rate_interval
from fedpriv.core.errors import InputError
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.robustness.build import certified_rows
from fedpriv.robustness.norms import LayerNorms
from fedpriv.robustness.records import (
    BOUNDS,
    Certificate,
    CertifiedCurve,
    Reach,
    Robustness,
    mean_radius,
    read_attempts,
    read_certificates,
    remove_certificates,
    write_certificates,
)
from fedpriv.robustness.settings import LEAST_NOISE, MOST_NOISE, CertifyConfig, RobustnessConfig
from fedpriv.robustness.smoothed import SmoothedModel, pixel_images, smoothed_model, write_noise

# Numbers to draw from which on the time is told before; about 4e7 are drawn in a second.
_MANY = 2e10
_PER_SECOND = 4e7
_AT_ONCE = 10


def certify_run(folder: RunFolder, config: CertifyConfig, afterwards: float | None, progress: Progress) -> Robustness:
    """Certify a run's final model on test images. It returns what is written to robustness.json."""
    began = time.monotonic()
    summary = completed_summary(folder)
    # Whoever has damaged ones may want to look at them first.
    read_certificates(folder)
    read_attempts(folder)
    experiment = folder.experiment()
    world = finished_world(folder, experiment)
    with cpu_threads(experiment.engine.threads):
        model = smoothed_model(folder, world, afterwards)
        there, public = len(world.dataset.y_test), RobustnessConfig.public(experiment)
        rows = certified_rows(experiment.seed, there, config.among(there - public), public)
        _tell_time(model, len(rows), config, progress)
        progress.stage(f"certifying {len(rows)} examples with {config.selection} + {config.votes} votes")
        norms = model.network.norms()
        certificates = _certificates(world, model, torch.from_numpy(rows), config, norms, progress)
        noiseless = _noiseless(world, model, torch.from_numpy(rows))
    robustness = _robustness(model, norms, config, certificates, noiseless, time.monotonic() - began)
    with writing():
        (folder.path / "robustness").mkdir(exist_ok=True)
        remove_certificates(folder)
        write_noise(folder, model)
        write_certificates(folder, robustness, certificates)
        folder.write_summary(summary.with_found({"robustness": robustness, "evasion": None}))
    return robustness


def certificate(
    image: int, label: int, chosen: int, counts: Sequence[int], config: CertifyConfig, norms: LayerNorms
) -> Certificate:
    """Return the certificate of one image."""
    bounds = vote_bounds(counts, chosen, config.alpha, config.rivals)
    proven = margins(bounds, hoeffding_bounds(counts, chosen, config.alpha))
    return Certificate(
        image=image,
        label=label,
        predicted=chosen,
        count=counts[chosen],
        votes=sum(counts),
        runner_up=max(count for number, count in enumerate(counts) if number != chosen),
        lower=bounds.lower,
        upper=bounds.upper,
        margins=proven,
        radius_l2=proven["main"] / norms.l2,
        radius_linf=proven["main"] / norms.linf,
    )


def _certificates(
    world: World, model: SmoothedModel, rows: Tensor, config: CertifyConfig, norms: LayerNorms, progress: Progress
) -> list[Certificate]:
    certificates: list[Certificate] = []
    for chunk in rows.split(_AT_ONCE):
        images, numbers = pixel_images(world, chunk), chunk.tolist()
        chosen = model.network.votes(images, config.selection, "robustness-selection", numbers).argmax(dim=1).tolist()
        counts = model.network.votes(images, config.votes, "robustness-votes", numbers).tolist()
        labels = world.dataset.y_test[chunk].tolist()
        for row, label, first, votes in zip(numbers, labels, chosen, counts, strict=True):
            certificates.append(certificate(row, label, first, votes, config, norms))
        progress.advanced("images", len(certificates), len(rows))
    return certificates


def _noiseless(world: World, model: SmoothedModel, rows: Tensor) -> int:
    """How many images the model gets right without noise."""
    right = 0
    for chunk in rows.split(_AT_ONCE):
        predictions = model.network.predictions(pixel_images(world, chunk))
        right += int((predictions == world.dataset.y_test[chunk]).sum())
    return right


def _robustness(
    model: SmoothedModel,
    norms: LayerNorms,
    config: CertifyConfig,
    certificates: Sequence[Certificate],
    noiseless: int,
    seconds: float,
) -> Robustness:
    sizes = {"l2": config.radii_l2, "linf": config.radii_linf}
    return Robustness(
        noise=model.noise,
        norms=norms,
        examples=len(certificates),
        selection=config.selection,
        votes=config.votes,
        alpha=config.alpha,
        rivals=config.rivals,
        wrong_at_most=wrong_at_most(len(certificates), config.alpha),
        voted=rate_interval(sum(each.right for each in certificates), len(certificates)),
        noiseless=rate_interval(noiseless, len(certificates)),
        abstained=sum(each.abstains for each in certificates),
        curves=tuple(_curve(certificates, norm, bound, sizes[norm]) for norm in sizes for bound in BOUNDS),
        radii=tuple(mean_radius(certificates, bound) for bound in BOUNDS),
        reach=_reach(model.network.classes, config, norms),
        seconds=seconds,
    )


def _reach(classes: int, config: CertifyConfig, norms: LayerNorms) -> Reach:
    """The radii of an image that all votes agree on."""
    best = certificate(0, 0, 0, [config.votes] + [0] * (classes - 1), config, norms)
    return Reach(best.radius_l2, best.radius_linf)


def _curve(certificates: Sequence[Certificate], norm: str, bound: str, sizes: tuple[float, ...]) -> CertifiedCurve:
    held = [sum(each.holds(norm, size, bound) for each in certificates) for size in sizes]
    return CertifiedCurve(norm, bound, sizes, tuple(rate_interval(count, len(certificates)) for count in held))


def _tell_time(model: SmoothedModel, examples: int, config: CertifyConfig, progress: Progress) -> None:
    numbers = model.noise.dimension * examples * (config.selection + config.votes)
    if numbers > _MANY:
        progress.warn(
            f"{numbers:.1g} random numbers are needed, which take {numbers / _PER_SECOND / 60:.0f} minutes or more "
            "on one core: lower --examples or --votes, or use robustness.place = 'input'"
        )


def check_noise(noise: float | None, place: str | None) -> None:
    """Refuse options of noise that is added afterwards and cannot be."""
    if noise is None and place is not None:
        raise InputError(f"--place {place} is for --noise; without it the run's own noise is certified")
    if place not in (None, "input"):
        raise InputError(
            key="--place", given=place, allowed="noise that is added afterwards goes on the input; allowed: input"
        )
    if noise is not None and not LEAST_NOISE <= noise <= MOST_NOISE:
        raise InputError(
            key="--noise",
            given=noise,
            allowed=f"expected a deviation from {LEAST_NOISE:g} to {MOST_NOISE:g}, for inputs from 0 to 1",
        )


Rivals = Literal["each", "together"]

_LARGEST_EPSILON = 50.0  # e^50 is far beyond any ratio of two probabilities that votes can show
_POINTS = 48
_LARGEST_ORDER = 1e8


@dataclass(frozen=True)
class Bounds:
    """What is known of the probabilities of the classes."""

    lower: float  # of the chosen class, from 0 to 1; it is at least that
    upper: float  # of every other class, from 0 to 1; none is more

    @property
    def decides(self) -> bool:
        """Whether the chosen class is known to be ahead."""
        return self.lower > self.upper


# ---- votes -----------------------------------------------------------------------------------------------------------


def hoeffding_deviation(trials: int, alpha: float) -> float:
    """Return by how much a mean of ``trials`` numbers from [0, 1] exceeds its expectation at most (Hoeffding 1963)."""
    return math.sqrt(math.log(1 / alpha) / (2 * trials))


def vote_bounds(counts: Sequence[int], chosen: int, alpha: float, rivals: Rivals) -> Bounds:
    """Return what the votes say of the classes; wrong with probability alpha at most; ``alpha``: in (0, 1)."""
    trials = sum(counts)
    if rivals == "together":
        lower = binomial_lower(counts[chosen], trials, alpha)
        return Bounds(lower, 1 - lower)
    share = alpha / len(counts)
    lower = binomial_lower(counts[chosen], trials, share)
    largest = max(count for number, count in enumerate(counts) if number != chosen)
    return Bounds(lower, min(binomial_upper(largest, trials, share), 1 - lower))


def hoeffding_bounds(counts: Sequence[int], chosen: int, alpha: float) -> Bounds:
    """Return the bounds of the paper's own rule, each of the C classes at alpha / C; arguments as above."""
    trials = sum(counts)
    deviation = hoeffding_deviation(trials, alpha / len(counts))
    largest = max(count for number, count in enumerate(counts) if number != chosen)
    return Bounds(max(0.0, counts[chosen] / trials - deviation), min(1.0, largest / trials + deviation))


def wrong_at_most(certificates: int, alpha: float) -> int:
    """Return how many of so many certificates may be wrong: no more are with 95 % confidence."""
    return int(stats.binom.ppf(0.95, certificates, alpha))


# ---- margins ---------------------------------------------------------------------------------------------------------


def margins(bounds: Bounds, paper: Bounds) -> dict[str, float]:
    """Return every margin of an image, 0 where nothing is proven; ``paper``: by the paper's own rule."""
    return {
        "main": main_margin(bounds),
        "renyi": renyi_margin(bounds),
        **{calibration: pixeldp_margin(bounds, calibration) for calibration in ("analytic", "classic", "extended")},
        "paper": pixeldp_margin(paper, "extended"),
    }


def main_margin(bounds: Bounds) -> float:
    """Return (Phi^-1(lower) - Phi^-1(upper)) / 2, the largest margin that holds for all networks behind the noise."""
    if not bounds.decides:
        return 0.0
    return float(special.ndtri(bounds.lower) - special.ndtri(bounds.upper)) / 2


@lru_cache(maxsize=4096)
def pixeldp_margin(bounds: Bounds, calibration: str) -> float:
    """Return what PixelDP proves with a calibration's noise (Lecuyer et al. 2019; Phan et al. 2019, Eq. 4, 11).

    That is the largest 1 / sigma(epsilon, delta) with delta = (lower - e^(2 epsilon) upper) / (1 + e^epsilon) > 0.
    Every epsilon gives a sound margin, so a search that misses the best one is sound, too.
    """
    lower, upper, sigma = bounds.lower, bounds.upper, CALIBRATIONS[calibration]
    if not bounds.decides:
        return 0.0
    most = 1.0 if calibration == "classic" else _LARGEST_EPSILON
    # Beyond half the logarithm of the ratio no delta above 0 is left.
    end = min(most, math.log(lower / upper) / 2) if upper > 0 else most

    def at(epsilon: float) -> float:
        delta = (lower - math.exp(2 * epsilon) * upper) / (1 + math.exp(epsilon))
        return 1 / sigma(epsilon, delta) if delta > 1e-300 else 0.0

    return _largest(at, end * 1e-6, end)


@lru_cache(maxsize=4096)
def renyi_margin(bounds: Bounds) -> float:
    """Return what Renyi divergences prove (Li et al. 2019, Theorem 1): the best order a > 1 of

    m^2 = -(2 / a) ln(1 - p1 - p2 + 2 (p1^(1-a) / 2 + p2^(1-a) / 2)^(1 / (1-a))),    p1 = lower, p2 = upper.
    """
    if not bounds.decides or bounds.upper <= 0:
        return 0.0
    low, high = math.log(1e-6), math.log(_LARGEST_ORDER)
    return math.sqrt(_largest(lambda log_order: _renyi_square(bounds, 1 + math.exp(log_order)), low, high))


def _renyi_square(bounds: Bounds, order: float) -> float:
    """With p1 + p2 = 2 g cosh(d), g^2 = p1 p2, so that nothing cancels where the probabilities are nearly equal."""
    half = math.log1p((bounds.lower - bounds.upper) / bounds.upper) / 2
    root = math.sqrt(bounds.lower) * math.sqrt(bounds.upper)
    below = -_log_cosh((order - 1) * half) / (order - 1)  # ln of the mean over g
    apart = 2 * root * (2 * math.sinh(half / 2) ** 2 - math.expm1(below))
    if apart < 0.5:
        return -2 / order * math.log1p(-apart)
    rest = 1 - bounds.lower - bounds.upper + 2 * root * math.exp(below)  # 1 - apart would cancel near 0
    return -2 / order * math.log(rest) if rest > 0 else 0.0


def _log_cosh(x: float) -> float:
    return math.log1p(2 * math.sinh(x / 2) ** 2) if x < 40 else x - math.log(2)


def _largest(function: Callable[[float], float], low: float, high: float) -> float:
    """The largest value on an interval: on a grid, then between the neighbours of the best point (Brent)."""
    grid = np.linspace(low, high, _POINTS)
    values = [function(float(point)) for point in grid]
    best = int(np.argmax(values))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _POINTS - 1)])
    peak = optimize.minimize_scalar(
        lambda x: -function(float(x)), bounds=ends, method="bounded", options={"xatol": 1e-7}
    )
    return max(values[best], float(-peak.fun), 0.0)
