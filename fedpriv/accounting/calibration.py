"""Calibration: the noise for a given epsilon, by the mechanisms' formulas (nominal) or by a search (proven).

The search bisects on the figure of :func:`fedpriv.accounting.guarantees.guarantee` itself, so what is calibrated is
what will be reported, whatever theorem gives it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import scipy

from fedpriv.accounting.ceiling import ceilings, check_baseline, membership_bound, quick_ceiling
from fedpriv.accounting.gaussian import check_epsilon
from fedpriv.accounting.guarantees import proven_epsilon, running_epsilon
from fedpriv.accounting.release import LARGEST_DIMENSION, NoiseParameter, Release, release_with
from fedpriv.core.errors import InputError
from fedpriv.core.names import CalibrationName, SamplingName
from fedpriv.core.registry import MECHANISMS

_TOLERANCE = 5e-4  # on epsilon, relative
_HALVINGS = 200
_NEARLY_STRAIGHT = 100.0  # epsilons within this factor of each other
_FIRST_STEP = 0.02  # of the logarithm of the noise parameter


class OutOfReachError(InputError):
    """No noise in range reaches the target: it is too small for the most noise, or too large for the least."""


def nominal_noise(
    epsilon: float,
    delta: float,
    *,
    mechanism: str,
    calibration: CalibrationName = "analytic",
    sensitivity: float = 2.0,
) -> float:
    """Return the noise for which the mechanism's paper states this epsilon.

    Args:
        epsilon: above 0.
        delta: in (0, 1).
        mechanism: its name, as in the settings.
        calibration: of normal noise: analytic (Balle and Wang 2018), extended (Phan et al. 2019) or classic (Dwork and
            Roth 2014), which is proven for epsilon <= 1 only.
        sensitivity: of normal noise, over clip_norm: 2 under replace-one, 1 under zero-out.

    Returns:
        The mechanism's noise parameter: sigma, scale or kappa.

    Raises:
        InputError: an argument out of range, or the mechanism has no nominal epsilon.
    """
    _parameter(mechanism)
    check_epsilon(epsilon)
    return float(MECHANISMS[mechanism].proof().nominal_noise(epsilon, delta, calibration, sensitivity))


def calibrate(target_epsilon: float, release: Release) -> float:
    """Return the least noise with which the releases are (target_epsilon, delta)-private.

    Args:
        target_epsilon: of the whole run, above 0, under the release's adjacency.
        release: of a mechanism with noise, at least one participation; its ``noise`` is ignored.

    Returns:
        The mechanism's noise parameter: the smallest sigma or scale, the largest kappa. The ledger's epsilon for it is
        at most the target, and within 0.1 % of it unless the ledger's figure jumps there (Renyi accounting reports 0
        for a divergence below about delta^2).

    Raises:
        OutOfReachError: no noise parameter in range fits.
        InputError: the target is out of range, or there is nothing to calibrate.
    """
    _parameter(release.mechanism)
    check_epsilon(target_epsilon)
    return _least_noise(release, "epsilon", target_epsilon, target_epsilon, proven_epsilon, running_epsilon)


def calibrate_ceiling(target: float, k0: float, release: Release) -> float:
    """Return the least noise for which :func:`ceilings` proves that no attack succeeds more often than ``target``.

    Args:
        target: probability of success, above ``k0`` and below 1.
        k0: of a guess without any upload, in (0, 1).
        release: of a mechanism with a ceiling, at least one participation; its ``noise`` is ignored.

    Returns:
        The mechanism's noise parameter. Its ceiling is at most the target; the distance of their normal quantiles from
        the guess's agrees within 0.1 %.

    Raises:
        OutOfReachError: no noise parameter in range fits.
        InputError: the target is out of range, the mechanism has no ceiling, or there is nothing to calibrate.
    """
    check_baseline(k0, "guess")
    if not k0 < target < 1:
        raise InputError(key="ceiling", given=target, allowed=f"allowed is above the guess, {k0:g}, and below 1")

    def beyond(gamma: float) -> float:
        # Normal quantiles grow with the noise about as epsilon does.
        return float(scipy.special.ndtri(gamma) - scipy.special.ndtri(k0))

    def reached(noisy: Release) -> float:
        (ceiling,) = ceilings(noisy, [k0])
        if ceiling.gamma is None:
            reason = f"{release.mechanism}: {ceiling.theorem}; allowed: {', '.join(proving('ceiling'))}"
            raise InputError(key="ceiling", given=target, allowed=reason)
        return beyond(ceiling.gamma)

    goal = beyond(target)
    return _least_noise(release, "ceiling", target, goal, reached, lambda noisy: beyond(quick_ceiling(noisy, k0)))


def proving(what: str) -> list[str]:
    """Return the mechanisms that are calibrated for a proven epsilon, or ceiling, of uploads."""
    uploads = {name: kind for name, kind in MECHANISMS.items() if kind.noise_at == "clients"}
    return [name for name, kind in uploads.items() if f"target_{what}" in getattr(kind, "noise_keys", tuple)()]


def calibrate_membership(target: float, release: Release, fpr: float | None = None) -> float:
    """Return the least noise with which no membership test is better than ``target``.

    Args:
        target: the largest true minus false positive rate; with ``fpr`` the true positive rate at it.
        release: of a mechanism with a dominating pair, at least one participation; its ``noise`` is ignored.
        fpr: a false positive rate, in (0, 1), below the target.

    Returns:
        The mechanism's noise parameter. Its :func:`membership_bound` is at most the target, and within 0.1 % of it,
        measured as the distance of two normal distributions that a test distinguishes equally well.

    Raises:
        OutOfReachError: no noise parameter in range fits.
        InputError: a rate out of range, no dominating pair is known, or there is nothing to calibrate.
    """
    key, least = ("advantage", 0.0) if fpr is None else ("tpr", fpr)
    if not least < target < 1:
        raise InputError(key=key, given=target, allowed=f"allowed is above {least:g} and below 1")

    def distance(power: float) -> float:
        if fpr is None:
            return 2 * float(scipy.special.ndtri((1 + power) / 2))
        return float(scipy.special.ndtri(power) - scipy.special.ndtri(fpr))

    def reached(noisy: Release) -> float:
        found = membership_bound(noisy, () if fpr is None else (fpr,))
        return distance(found.advantage if fpr is None else found.rates[0][1])

    return _least_noise(release, key, target, distance(target), reached)


def _least_noise(
    release: Release,
    key: str,
    target: float,
    goal: float,
    reached: Callable[[Release], float],
    quick: Callable[[Release], float] | None = None,
) -> float:
    """The least noise with which a figure, which grows as noise gets less, is at most the goal; quick: never below."""
    noise = _parameter(release.mechanism)
    if release.participations == 0:
        raise InputError(key="participations", given=0, allowed="without a participation there is nothing to calibrate")

    def with_noise(figure: Callable[[Release], float]) -> Callable[[float], float]:
        return lambda log_noise: figure(replace(release, noise=noise.at(log_noise)))

    exposed, private, final = math.log(noise.least), math.log(noise.most), with_noise(reached)
    large, where = ("large", f"at delta = {release.delta:g} ") if key == "epsilon" else ("high", "")
    if final(exposed) <= goal:
        least = f"so {large} that it needs less noise than the least allowed ({noise.name} = {noise.least:g})"
        raise OutOfReachError(key=key, given=target, allowed=least)
    # First with the quick figure, then with the final one from there on.
    if quick is not None and with_noise(quick)(private) <= goal:
        private = _search(with_noise(quick), goal, private, exposed)
    elif final(private) > goal:
        between = f"from {min(noise.least, noise.most):g} to {noise.ceiling:g}"
        raise OutOfReachError(key=key, given=target, allowed=f"{where}no {noise.name} {between} reaches it")
    return noise.at(_search(final, goal, private, exposed))


def _search(epsilon: Callable[[float], float], target: float, private: float, exposed: float) -> float:
    """Return a point whose epsilon is at most the target, and within the tolerance of it or next to a jump."""
    reached, step, limit = epsilon(private), _FIRST_STEP, exposed
    aim = target * (1 - _TOLERANCE / 2)
    # Outwards until the target lies between: epsilon goes about with the reciprocal of the noise, or its square.
    while reached < target * (1 - _TOLERANCE):
        step = max(_FIRST_STEP, math.log(aim / reached)) if reached > 0 else 2 * step
        point = private + math.copysign(min(step, abs(limit - private)), limit - private)
        figure = epsilon(point)
        if point == limit or figure > target:
            exposed, refused = point, figure
            break
        private, reached = point, figure
    else:
        return private
    for attempt in range(_HALVINGS):
        middle = (private + exposed) / 2
        if reached >= target * (1 - _TOLERANCE) or middle in (private, exposed):
            break
        if attempt % 4 != 3 and reached > 0 and refused < _NEARLY_STRAIGHT * reached:
            # log epsilon against log noise is nearly straight
            share = math.log(aim / reached) / math.log(refused / reached)
            middle = private + share * (exposed - private)
        figure = epsilon(middle)
        if figure <= target:
            private, reached = middle, figure
        else:
            exposed, refused = middle, figure
    return private


def _parameter(mechanism: str) -> NoiseParameter:
    """What says how much noise the mechanism makes; others are refused."""
    parameter: NoiseParameter | None = MECHANISMS[mechanism].proof().parameter
    if parameter is None:
        noisy = [name for name, each in MECHANISMS.items() if each.proof().parameter is not None]
        why = "nothing is proven about it" if MECHANISMS[mechanism].on_gradients else "its amount is an epsilon already"
        raise InputError(key="mechanism", given=mechanism, allowed=f"{why}; allowed is {', '.join(noisy)}")
    return parameter


# Mechanisms on one scale: the noise-to-signal ratio of the mean of B gradients at the same proven (epsilon, delta).
#
# The root mean square length of the noise over the length of what is released without it, if all B gradients point the
# same way, are as long as clipping allows or longer, and, for L1, have |g|_1 = sqrt(2 K / pi) |g|_2. It does not count
# what clipping distorts, nor blocks of equal length, nor that the size of a Poisson batch varies.


_MOST_BLOCKS = 10_000_000
_MOST_BLOCKS_COMPARED = 1_000_000  # here calibration asks for each figure dozens of times
_MOST_BATCH_SIZE = 10**12
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Contender:
    """A mechanism in a comparison."""

    label: str  # its name in tables and plots
    mechanism: str  # as in the settings
    dimensions: tuple[int, ...]  # K of each block
    sampling: SamplingName = "full"  # full, fixed (batches of a fixed size) or poisson


@dataclass(frozen=True)
class Point:
    """One contender at one epsilon."""

    epsilon: float  # proven for the whole run
    noise: float | None  # the least noise parameter with this proof; None if none in range has it
    ratio: float | None  # the noise-to-signal ratio with this noise; None without one
    refusal: str = ""  # why there is no noise; empty if there is


@dataclass(frozen=True)
class Comparison:
    """Every contender at every epsilon, all under replace-one."""

    delta: float  # of every (epsilon, delta) statement
    rate: float | None  # q = B / n; None: no sampling
    participations: int  # how often an example is used
    batch_size: int  # B, gradients in a mean
    dimension: int  # K, numbers in a gradient
    # each contender with its points, in the order of the given epsilons
    curves: tuple[tuple[Contender, tuple[Point, ...]], ...]


def equal_blocks(dimension: int, blocks: int) -> tuple[int, ...]:
    """Return the sizes of m blocks of K coordinates; they differ by 1 at most, the larger ones first.

    Args:
        dimension: K, from 1 to 1e12.
        blocks: m, from 1 to K and to 1e7.

    Raises:
        InputError: an argument out of range.
    """
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise InputError(key="dimension", given=dimension, allowed=f"allowed is from 1 to {LARGEST_DIMENSION:,}")
    if not 1 <= blocks <= dimension:
        raise InputError(
            key="blocks", given=blocks, allowed=f"allowed is from 1 to the {dimension:,} coordinates that there are"
        )
    if blocks > _MOST_BLOCKS:
        raise InputError(key="blocks", given=blocks, allowed=f"allowed is up to {_MOST_BLOCKS:,}")
    size, larger = divmod(dimension, blocks)
    return (size + 1,) * larger + (size,) * (blocks - larger)


def noise_to_signal(contender: Contender, noise: float, batch_size: int) -> float:
    """Return the noise-to-signal ratio of the mean of B gradients.

    It is the root mean square length of the noise over the length of the release without noise, for B gradients that
    have the same direction and at least the clipping length; for L1 noise also |g|_1 = sqrt(2 K / pi) |g|_2.

    Args:
        contender: the mechanism.
        noise: its noise parameter, above 0.
        batch_size: B, at least 1.

    Raises:
        InputError: no ratio of this mechanism is known.
    """
    proof = MECHANISMS[contender.mechanism].proof()
    return float(proof.noise_to_signal(contender.dimensions, noise, batch_size))


def compare_mechanisms(
    epsilons: Sequence[float],
    delta: float,
    *,
    dimension: int,
    batch_size: int,
    participations: int,
    rate: float | None = None,
    block_size: int | None = None,
) -> Comparison:
    """Calibrate every mechanism to the same proven epsilons and compare their noise-to-signal ratios.

    Args:
        epsilons: of the whole run, above 0.
        delta: in (0, 1).
        dimension: K, at least 1.
        batch_size: B, from 1 to 1e12.
        participations: how often an example is used, at least 1.
        rate: q = B / n, for batches of a fixed size, and for Poisson batches where they amplify best; None: no
            sampling.
        block_size: approximate number of coordinates of a small block; None: 16, or as many as there are.

    Raises:
        InputError: an argument out of range.
    """
    if not 1 <= batch_size <= _MOST_BATCH_SIZE:
        raise InputError(key="batch_size", given=batch_size, allowed=f"allowed is from 1 to {_MOST_BATCH_SIZE:,}")
    whole = equal_blocks(dimension, 1)
    small = _small_blocks(dimension, min(_BLOCK_SIZE, dimension) if block_size is None else block_size)
    sampling: SamplingName = "full" if rate is None else "fixed"
    contenders = [
        Contender(label, name, dimensions, sampling)
        for name, kind in MECHANISMS.items()
        for label, dimensions in kind.contenders(whole, small)
    ]
    if rate is not None:
        contenders += [
            Contender(f"{each.label}, Poisson", each.mechanism, each.dimensions, "poisson")
            for each in contenders
            if MECHANISMS[each.mechanism].proof().amplifying[:1] == ("poisson",)
        ]

    def point(contender: Contender, epsilon: float) -> Point:
        release = release_with(
            1.0,
            delta,
            mechanism=contender.mechanism,
            sampling=contender.sampling,
            rate=1.0 if rate is None else rate,
            participations=participations,
            dimensions=contender.dimensions,
        )
        try:
            noise = calibrate(epsilon, release)
        except OutOfReachError as error:
            return Point(epsilon, None, None, str(error))
        return Point(epsilon, noise, noise_to_signal(contender, noise, batch_size))

    curves = tuple((contender, tuple(point(contender, epsilon) for epsilon in epsilons)) for contender in contenders)
    return Comparison(delta, rate, participations, batch_size, dimension, curves)


def _small_blocks(dimension: int, block_size: int) -> tuple[int, ...]:
    if not 1 <= block_size <= dimension:
        raise InputError(
            key="block_size",
            given=block_size,
            allowed=f"allowed is from 1 to the {dimension:,} coordinates that there are",
        )
    blocks = -(-dimension // block_size)
    if blocks > _MOST_BLOCKS_COMPARED:
        least = -(-dimension // _MOST_BLOCKS_COMPARED)
        raise InputError(
            key="block_size",
            given=block_size,
            allowed=f"cuts {dimension:,} coordinates in {blocks:,} blocks; allowed is from {least:,}",
        )
    return equal_blocks(dimension, blocks)
