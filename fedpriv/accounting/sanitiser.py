"""What may be shown of costs that depend on votes: the cost plus noise scaled to its smooth sensitivity.

The mechanism is that of Papernot et al. 2018 (arXiv 1802.08908, appendix B); the sensitivities are those of
:mod:`fedpriv.accounting.votes`. Its cost is the exact divergence. Their Theorem 23 states less than that once
2 order beta exceeds about 0.6.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.accounting.proofs import RENYI_TO_EPSILON, Claim
from fedpriv.accounting.renyi import ORDERS, rdp_to_epsilon
from fedpriv.core.errors import InputError

Array = NDArray[np.float64]


def gnss_rdp(order: ArrayLike, beta: float, noise: float) -> Array:
    """Return what a figure costs with normal noise scaled to its smooth sensitivity, in Renyi divergence: exactly.

    In units of one neighbour's smooth sensitivity the two laws are N(0, noise^2) and N(m, (r noise)^2) with
    exp(-beta) <= r <= exp(beta) and |m| <= min(1, r), since both smooth sensitivities bound the difference. Their
    divergence (Gil, Alajaji and Linder 2013, Table 2) grows with |m|. At |m| = min(1, r) it falls in r up to r = 1;
    from there on it falls and then grows. So it is largest at an end of the range of r, and there it is

        order m^2 / (2 noise^2 v) + log r - log(v / r^2) / (2 (order - 1)),   v = order r^2 + 1 - order.

    It is infinite where v is not positive. The other direction is the same with 1/r.
    """
    orders = np.asarray(order, np.float64)
    return np.maximum(_divergence(orders, -beta, noise), _divergence(orders, beta, noise))


def _divergence(orders: Array, log_ratio: float, noise: float) -> Array:
    """The divergence at one end of the range of r, from v / r^2 without cancellation near order 1."""
    less = -(orders - 1) * math.expm1(-2 * log_ratio)  # v / r^2 = 1 + less
    shift = min(1.0, math.exp(-log_ratio))  # |m| / r
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        means = orders * np.square(shift / noise) / (2 * (1 + less))
        found = means + log_ratio - np.log1p(less) / (2 * (orders - 1))
    return np.where(less > -1, found, np.inf)


@dataclass(frozen=True)
class Sanitiser:
    """How a data-dependent cost is made fit to be shown: settings that are fixed before any vote is seen."""

    order: float  # of the Renyi divergence, above 1
    beta: float  # how fast the sensitivity may fall with distance; order < 1 / (2 beta)
    noise: float  # deviation of the noise, in smooth sensitivities

    def __post_init__(self) -> None:
        if not (self.order > 1 and self.beta > 0 and self.noise > 0 and 2 * self.beta * self.order < 1):
            raise InputError(
                f"order = {self.order:g}, beta = {self.beta:g}, noise = {self.noise:g}: allowed are an order above 1 "
                "and below 1 / (2 beta), and noise above 0"
            )

    @property
    def cost(self) -> float:
        """What showing the figure itself costs, in Renyi divergence."""
        return float(gnss_rdp(self.order, self.beta, self.noise))

    def shown_with(self, mu: float, delta: float) -> Claim:
        """What is proven of answers that are Gaussian differential privacy of ``mu``, and the figure beside them."""
        rdp = ORDERS * mu**2 / 2 + gnss_rdp(ORDERS, self.beta, self.noise)
        theorem = (
            "normal noise on counts of votes, and a sanitised figure shown with the answers (normal noise scaled to a "
            "smooth sensitivity, Papernot et al. 2018, appendix B, by the exact Renyi divergence of two normal laws), "
            f"Renyi accounting{RENYI_TO_EPSILON}"
        )
        return Claim(rdp_to_epsilon(ORDERS, rdp, delta), theorem)

    def epsilon(self, cost: float, sensitivity: float, delta: float, normal: float) -> float:
        """Return the sanitised epsilon, its own cost included; an estimate, which may be below the true one."""
        shown = max(cost + sensitivity * self.noise * normal, 0.0) + self.cost
        return rdp_to_epsilon([self.order], [shown], delta)
