"""How much noise an epsilon needs: the mechanisms' own formulas for nominal ones, a search for proven ones.

The search bisects on the figure of :func:`fedpriv.accounting.guarantees.guarantee` itself, so what is calibrated is
what will be reported, whatever theorem gives it.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from fedpriv.accounting.guarantees import proven_epsilon, running_epsilon
from fedpriv.accounting.proofs import Proof
from fedpriv.accounting.release import NoiseParameter, Release
from fedpriv.core.errors import InputError
from fedpriv.core.names import CalibrationName
from fedpriv.core.registry import MECHANISMS

_TOLERANCE = 5e-4  # on epsilon, relative
_HALVINGS = 200
_NEARLY_STRAIGHT = 100.0  # epsilons within this factor of each other
_FIRST_STEP = 0.02  # of the logarithm of the noise parameter


class OutOfReachError(InputError):
    """A target that no noise in range reaches exactly: too small for the most, or too large for the least."""


def nominal_noise(
    epsilon: float,
    delta: float,
    *,
    mechanism: str,
    calibration: CalibrationName = "analytic",
    sensitivity: float = 2.0,
) -> float:
    """Return the noise with which a mechanism's paper prints this epsilon; arguments as for its proof's method."""
    kind = _proof(mechanism)
    _check_epsilon(epsilon)
    return kind.nominal_noise(epsilon, delta, calibration, sensitivity)


def calibrate(target_epsilon: float, release: Release) -> float:
    """Return the least noise with which such releases are (target_epsilon, delta)-private.

    Args:
        target_epsilon: of the whole run, above 0, under the release's adjacency.
        release: of a mechanism with noise, at least one participation; its own amount of noise has no effect.

    Returns:
        The mechanism's noise parameter: the smallest sigma or scale, the largest kappa. The ledger's epsilon for it is
        at most the target, and within 0.1 % of it unless the ledger's figure jumps there (Renyi accounting reports 0
        for a divergence below about delta^2).

    Raises:
        OutOfReachError: no noise parameter in range fits.
        InputError: the target is out of range, or there is nothing to calibrate.
    """
    noise = _parameter(_proof(release.mechanism))
    _check_epsilon(target_epsilon)
    if release.participations == 0:
        raise InputError(key="participations", given=0, allowed="without a participation there is nothing to calibrate")

    def value(log_noise: float) -> float:
        # exp(log(x)) may lie a rounding beyond x.
        return min(max(math.exp(log_noise), min(noise.least, noise.most)), noise.ceiling)

    def running(log_noise: float) -> float:
        return running_epsilon(replace(release, noise=value(log_noise)))

    def final(log_noise: float) -> float:
        return proven_epsilon(replace(release, noise=value(log_noise)))

    exposed, private = math.log(noise.least), math.log(noise.most)
    if final(exposed) <= target_epsilon:
        raise OutOfReachError(
            key="epsilon",
            given=target_epsilon,
            allowed=f"so large that it needs less noise than the least allowed ({noise.name} = {noise.least:g})",
        )
    if final(private) > target_epsilon:
        raise OutOfReachError(
            key="epsilon",
            given=target_epsilon,
            allowed=f"at delta = {release.delta:g} no {noise.name} from {min(noise.least, noise.most):g} to "
            f"{noise.ceiling:g} reaches it",
        )
    # First with the cheap figure, which is never below the final one, then with that from there on.
    if running(private) <= target_epsilon:
        private = _search(running, target_epsilon, private, exposed)
    return value(_search(final, target_epsilon, private, exposed))


def _search(epsilon: Callable[[float], float], target: float, private: float, exposed: float) -> float:
    """Return a point whose epsilon is at most the target, and within the tolerance of it or next to a jump."""
    reached, step, limit = epsilon(private), _FIRST_STEP, exposed
    # Outwards until the target lies between: epsilon goes about with the reciprocal of the noise, or its square.
    while True:
        step = max(_FIRST_STEP, math.log(target / reached)) if reached > 0 else 2 * step
        point = private + math.copysign(min(step, abs(limit - private)), limit - private)
        figure = epsilon(point)
        if point == limit or figure > target:
            exposed, refused = point, figure
            break
        private, reached = point, figure
    for attempt in range(_HALVINGS):
        middle = (private + exposed) / 2
        if reached >= target * (1 - _TOLERANCE) or middle in (private, exposed):
            break
        if attempt % 3 != 2 and reached > 0 and refused < _NEARLY_STRAIGHT * reached:
            # log epsilon against log noise is nearly straight: aim a little below the target
            share = math.log(target * (1 - _TOLERANCE / 2) / reached) / math.log(refused / reached)
            middle = private + share * (exposed - private)
        figure = epsilon(middle)
        if figure <= target:
            private, reached = middle, figure
        else:
            exposed, refused = middle, figure
    return private


def _proof(mechanism: str) -> type[Proof]:
    kind: type[Proof] = MECHANISMS[mechanism].proof()
    if kind.parameter is None:
        noisy = [name for name, each in MECHANISMS.items() if each.proof().parameter is not None]
        why = "nothing is proven about it" if MECHANISMS[mechanism].on_gradients else "its amount is an epsilon already"
        raise InputError(key="mechanism", given=mechanism, allowed=f"{why}; allowed is {', '.join(noisy)}")
    return kind


def _parameter(kind: type[Proof]) -> NoiseParameter:
    if kind.parameter is None:
        raise ValueError(f"{kind.__name__} names no noise")
    return kind.parameter


def _check_epsilon(epsilon: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(key="epsilon", given=epsilon, allowed="allowed is above 0, finite")
