"""Epsilon of composed releases by an integral in the complex plane: no grid of losses and no Fourier transform.

With L the loss of T releases under P and M(z)^T its moment generating function, delta(epsilon) = E (1 - exp(epsilon -
L))+ is

    (1 / 2 pi i) * integral over Re z = c of M(z)^T exp(-z epsilon) / (z (z + 1)) dz,   c > 0

(Alghamdi et al. 2023, The Saddle-Point Method in Differential Privacy). On the right line the integrand is of the size
of delta, so that epsilon is accurate at any delta, rate and number of releases; against closed forms to 1e-11.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

__all__ = [
    "Line",
    "Loss",
    "Profile",
    "contour_epsilon",
    "directional",
    "directional_delta",
    "fixed",
    "poisson_replaced",
    "poisson_zero_out",
]

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

_AT_ONCE = 2**21
_WIDEST, _FARTHEST = 2.0, 1e13  # panels of the line
_NEGLIGIBLE, _ROUNDING = 1e-9, 1e-13
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_DEGREES = np.arange(16)
_TO_LEGENDRE = ((2 * _DEGREES + 1) / 2)[:, None] * np.polynomial.legendre.legvander(_NODES, 15).T * _WEIGHTS


@dataclass(frozen=True)
class Line:
    """A pair by its losses, and their probabilities under Q."""

    losses: Array
    second: Array

    def excess(self, z: Complex) -> Complex:
        """Return M(z) - 1: the mean under Q of r^(z+1) - 1 - (z + 1) (r - 1), r = P / Q."""
        slope = float(np.expm1(self.losses) @ self.second)
        result = np.empty_like(z)
        each = max(1, _AT_ONCE // self.losses.size)
        for start in range(0, z.size, each):
            part = (z[start : start + each] + 1)[:, None] * self.losses
            small = part * (1 + part / 2 * (1 + part / 3 * (1 + part / 4)))
            terms = np.where(np.abs(part) < 1e-3, small, np.exp(part) - 1)
            result[start : start + each] = terms @ self.second - (z[start : start + each] + 1) * slope
        return result


@dataclass(frozen=True)
class Profile:
    """A symmetric pair by delta at quadrature nodes in epsilon > 0, times the weights."""

    epsilons: Array
    deltas: Array

    def excess(self, z: Complex) -> Complex:
        """Return M(z) - 1 = z (z + 1) * integral of [exp(z epsilon) + exp(-(z + 1) epsilon)] delta(epsilon)."""
        result = np.empty_like(z)
        each = max(1, _AT_ONCE // self.epsilons.size)
        for start in range(0, z.size, each):
            part = z[start : start + each, None]
            kernel = np.exp(part * self.epsilons) + np.exp(-(part + 1) * self.epsilons)
            result[start : start + each] = (part * (part + 1))[:, 0] * (kernel @ self.deltas)
        return result


Loss = Line | Profile


def contour_epsilon(losses: Sequence[tuple[Loss, int]], count: int, delta: float, tagged: float = 1.0) -> float:
    """Return the smallest epsilon, at least 0, of ``count`` releases.

    Args:
        losses: what one release consists of, and how many of each.
        count: T.
        delta: in (0, 1), from about 1e-15.
        tagged: probability with which a step makes the release, and it is seen whether it did.
    """

    def scaled(z: Complex) -> Complex:
        step = sum(number * np.log1p(loss.excess(z)) for loss, number in losses)
        return count * (step if tagged == 1 else np.log1p(tagged * np.expm1(step)))

    def chernoff(log_order: float) -> float:
        order = math.exp(log_order)
        with np.errstate(over="ignore", invalid="ignore"):
            bound = (float(scaled(np.array([order + 0j]))[0].real) - math.log(delta)) / order
        return bound if math.isfinite(bound) else 1e300

    ladder = np.linspace(math.log(1e-4), math.log(1e9), 120)
    at = int(np.argmin([chernoff(point) for point in ladder]))
    ends = ladder[max(at - 1, 0)], ladder[min(at + 1, ladder.size - 1)]
    best = scipy.optimize.minimize_scalar(chernoff, bounds=ends, method="bounded", options={"xatol": 1e-3})
    order = 0.7 * math.exp(best.x)  # to the left of it: rare large losses make M grow fast there
    before, peak, after = scaled(order * np.array([0.999, 1.0, 1.001]) + 0j).real
    width = min(_WIDEST, order * 1e-3 / math.sqrt(max(before - 2 * peak + after, 1e-300)))
    rest = math.exp(count * math.log1p(-tagged) - peak) if tagged < 1 else 0.0  # a loss of 0 adds nothing
    u, first = 0.0, 0.0
    middles, halves, coefficients = [], [], []
    while u < _FARTHEST:
        fine = 200 if delta > 1e-9 else 2000
        half = max(width, min(u / 4, _WIDEST if u < fine else math.inf)) / 2
        z = order + 1j * (u + half * (1 + _NODES))
        values = (np.exp(scaled(z) - peak) - rest) / (z * (z + 1))
        middles.append(u + half)
        halves.append(half)
        coefficients.append(_TO_LEGENDRE @ values)
        u, first = u + 2 * half, max(first, float(abs(values).max()))
        last = float(abs(values).max())
        if last * u < _NEGLIGIBLE * first * width or last < _ROUNDING * first:
            break
    middle, panel, coefficient = np.array(middles), np.array(halves), np.array(coefficients)

    def log_ratio(epsilon: float) -> float:
        # Filon's rule: each panel's polynomial times exp(-i u epsilon), exactly.
        moments = 2 * (-1j) ** _DEGREES * scipy.special.spherical_jn(_DEGREES, epsilon * panel[:, None])
        total = np.sum((panel * np.exp(-1j * middle * epsilon) * np.sum(coefficient * moments, axis=1)).real) / math.pi
        return (math.log(total) if total > 0 else -1e3) + peak - order * epsilon - math.log(delta)

    # Downwards from Chernoff's bound, because far below it rounding is larger than delta.
    high, width = float(best.fun), 2 / order
    while (low := max(0.0, high - width)) > 0 and log_ratio(low) <= 0:
        high, width = low, 2 * width
    if log_ratio(low) <= 0:
        return 0.0
    return float(scipy.optimize.brentq(log_ratio, low, high, xtol=1e-15, rtol=1e-12))


# ---- single releases ------------------------------------------------------------------------------------------------


def fixed(delta: Callable[[Array], Array], largest: float, rate: float) -> Profile:
    """A symmetric pair in a batch of a fixed size: delta at log(1 + q (exp(epsilon) - 1)) is q times delta.

    Balle, Barthe and Gaboardi 2018, Theorem 9, as for the ledger: what it proves is what is integrated.
    """
    edges = np.linspace(0.0, largest, 401)
    halves = np.diff(edges)[:, None] / 2
    nodes, weights = (edges[:-1, None] + halves * (1 + _NODES)).ravel(), (halves * _WEIGHTS).ravel()
    near = np.log1p(rate * np.expm1(np.minimum(nodes, 30.0)))
    after = np.where(nodes < 30, near, nodes + math.log(rate) + np.log1p((1 - rate) / rate * np.exp(-nodes)))
    return Profile(after, weights * rate * np.exp(nodes - after) * rate * delta(nodes))


def poisson_replaced(sigma: float, rate: float) -> Line:
    """A Poisson step of the Gaussian mechanism in which the example's gradient turns round."""
    return _mixtures(sigma, rate, 1.0, -1.0)


def poisson_zero_out(sigma: float, rate: float, comes: bool) -> Line:
    """A Poisson step of the Gaussian mechanism from which the example goes, or to which it comes."""
    return _mixtures(sigma, rate, 0.0, 1.0) if comes else _mixtures(sigma, rate, 1.0, 0.0)


def _mixtures(sigma: float, rate: float, first: float, second: float) -> Line:
    step = 0.025 * min(1.0, sigma)
    x = np.arange(-(24 if first == 0 else 12) - 1 / sigma, 24 + 1 / sigma, step)

    def log_law(mean: float) -> Array:
        plain = -x * x / 2 - 0.5 * math.log(2 * math.pi)
        if mean == 0:
            return plain
        return plain + np.logaddexp(math.log1p(-rate), math.log(rate) + mean * x / sigma - 0.5 / sigma**2)

    q = log_law(second)
    return Line(log_law(first) - q, step * np.exp(q))


def directional(kappa: float, dimension: int) -> Line:
    """VMF laws around opposite directions, by the angle, of density sin(angle)^(K - 2) exp(kappa cos(angle))."""
    deviation = 1 / math.sqrt(dimension - 1 + kappa)
    middle = math.pi / 2
    mode = math.atan2(dimension - 2, kappa) if dimension > 2 else 0.0
    offsets = np.linspace(-14, 14, 281) * deviation
    around = np.concatenate([mode + offsets, middle + offsets, math.pi - mode + offsets])
    edges = np.unique(np.clip(np.concatenate([around, [0.0, math.pi]]), 0.0, math.pi))
    halves = np.diff(edges)[:, None] / 2
    angles = (edges[:-1, None] + halves * (1 + _NODES)).ravel()
    log_density = (dimension - 2) * np.log(np.sin(angles)) - kappa * np.cos(angles)  # of Q
    masses = np.exp(log_density - log_density.max()) * (halves * _WEIGHTS).ravel()
    kept = masses > 0
    return Line(2 * kappa * np.cos(angles[kept]), masses[kept] / masses.sum())


def directional_delta(kappa: float, dimension: int) -> Callable[[Array], Array]:
    """Return delta of one such release as a function of epsilon >= 0."""
    line = directional(kappa, dimension)
    first = line.second * np.exp(line.losses)

    def delta(epsilons: Array) -> Array:
        gains = [np.sum(first * np.maximum(-np.expm1(each - line.losses), 0.0)) for each in epsilons]
        return np.array(gains)

    return delta
