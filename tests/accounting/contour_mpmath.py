"""Epsilon of composed Poisson steps in 30 digits: :mod:`tests.accounting.contour`'s integral by mpmath, in a few lines.

Trapezoids converge like exp(-2 pi distance / step) where the integrand is analytic up to that distance, so that some
hundred nodes along the losses, and as many along the line, give 20 digits.
"""

from functools import cache

import mpmath

DIGITS = 30
_FARTHEST, _STEP = 15, mpmath.mpf("0.2")  # of the noise, in its standard deviations


@cache
def exact_epsilon(sigma: float, rate: float, steps: int, delta: float, means: tuple[int, int]) -> float:
    """Return the smallest epsilon, at least 0, of Poisson steps of the Gaussian mechanism.

    Args:
        sigma: noise over the clipping norm.
        rate: with which the example is in a batch.
        steps: T.
        delta: in (0, 1).
        means: what the example adds in the first data set and in the second one, in clipping norms.
    """
    with mpmath.workdps(DIGITS):
        line = _line(sigma, rate, steps, means)
        if line.delta(mpmath.mpf(0)) <= delta:
            return 0.0

        def log_ratio(epsilon: mpmath.mpf) -> mpmath.mpf:
            return mpmath.log(max(line.delta(epsilon) / delta, mpmath.mpf("1e-9")))

        highest = (line.peak - mpmath.log(delta)) / line.order  # Chernoff's bound
        return float(mpmath.findroot(log_ratio, (mpmath.mpf(0), highest), solver="anderson", tol=1e-20))


class _Line:
    """Moments M(z)^T along Re z = order."""

    def __init__(self, losses: list[tuple[mpmath.mpf, mpmath.mpf]], steps: int) -> None:
        def log_moment(z: mpmath.mpc) -> mpmath.mpc:
            return steps * mpmath.log(mpmath.fsum(mass * mpmath.exp(z * loss) for loss, mass in losses))

        ladder = [mpmath.mpf(2) ** power for power in range(-6, 16)]
        saddle = min(ladder, key=lambda order: (log_moment(order) + 14) / order)  # for delta of about 1e-6
        self.order = saddle / 2  # to the left of it: rare large losses make M grow fast there
        self.peak = log_moment(self.order)
        self._step = self.order / 32  # its copies lie 200 / order apart
        self._nodes: list[tuple[mpmath.mpc, mpmath.mpc]] = []
        while not self._nodes or abs(self._nodes[-1][1]) > 1e-22:
            z = self.order + 1j * self._step * len(self._nodes)
            self._nodes.append((z, mpmath.exp(log_moment(z) - self.peak) / (z * (z + 1))))

    def delta(self, epsilon: mpmath.mpf) -> mpmath.mpf:
        """E (1 - exp(epsilon - L))+."""
        terms = [(value * mpmath.exp(-z * epsilon)).real for z, value in self._nodes]
        return mpmath.exp(self.peak) * self._step / mpmath.pi * (mpmath.fsum(terms) - terms[0] / 2)


@cache
def _line(sigma: float, rate: float, steps: int, means: tuple[int, int]) -> _Line:
    reach = _FARTHEST + 2 / mpmath.mpf(sigma)
    losses = []
    for place in mpmath.arange(-reach, reach + _FARTHEST, _STEP):
        first, second = (
            (1 - mpmath.mpf(rate)) * mpmath.npdf(place) + rate * mpmath.npdf(place - mean / mpmath.mpf(sigma))
            for mean in means
        )
        losses.append((mpmath.log(first / second), first * _STEP))
    return _Line(losses, steps)
