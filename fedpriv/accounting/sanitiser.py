"""What may be shown of costs that depend on votes: the cost plus noise scaled to its smooth sensitivity.

Papernot et al. 2018 (arXiv 1802.08908), theorem 23; the sensitivities are those of :mod:`fedpriv.accounting.votes`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.accounting.proofs import RENYI_TO_EPSILON, Claim
from fedpriv.accounting.renyi import ORDERS, rdp_to_epsilon
from fedpriv.errors import InputError

__all__ = ["Sanitiser", "gnss_rdp"]

Array = NDArray[np.float64]


def gnss_rdp(order: ArrayLike, beta: float, noise: float) -> Array:
    """Return what a figure costs with normal noise scaled to its smooth sensitivity (2018, Thm 23).

    Args:
        order: above 1 and below 1 / (2 beta).
        beta: smoothness of the sensitivity, above 0.
        noise: deviation of the noise, in smooth sensitivities, above 0.
    """
    orders = np.asarray(order, np.float64)
    spread = orders * math.exp(2 * beta) / noise**2
    cost: Array = spread + (beta * orders - 0.5 * np.log1p(-2 * orders * beta)) / (orders - 1)
    return cost


@dataclass(frozen=True)
class Sanitiser:
    """How a data-dependent cost is made fit to be shown: settings that are fixed before any vote is seen.

    Attributes:
        order: of the Renyi divergence, above 1.
        beta: how fast the sensitivity may fall with distance; order < 1 / (2 beta).
        noise: deviation of the noise, in smooth sensitivities.

    Raises:
        InputError: one of them is out of range.
    """

    order: float
    beta: float
    noise: float

    def __post_init__(self) -> None:
        if not (self.order > 1 and self.beta > 0 and self.noise > 0 and 2 * self.beta * self.order < 1):
            raise InputError(
                f"order = {self.order:g}, beta = {self.beta:g}, noise = {self.noise:g}: allowed are an order above 1 "
                "and below 1 / (2 beta), and noise above 0"
            )

    @property
    def cost(self) -> float:
        """What showing the figure itself costs, in Renyi divergence (2018, Thm 23)."""
        return float(gnss_rdp(self.order, self.beta, self.noise))

    def shown_with(self, mu: float, delta: float) -> Claim:
        """What is proven of answers that are Gaussian differential privacy of ``mu``, and the figure beside them."""
        orders = ORDERS[2 * self.beta * ORDERS < 1]
        rdp = orders * mu**2 / 2 + gnss_rdp(orders, self.beta, self.noise)
        theorem = (
            "normal noise on counts of votes, and a sanitised figure shown beside the answers (Papernot et al. 2018, "
            f"Thm 23), Renyi accounting{RENYI_TO_EPSILON}"
        )
        return Claim(rdp_to_epsilon(orders, rdp, delta), theorem)

    def epsilon(self, cost: float, sensitivity: float, delta: float, normal: float) -> float:
        """Return the sanitised epsilon, its own cost included; an estimate, which is above the true one or below it.

        Args:
            cost: data-dependent Renyi cost of all answers, at this order.
            sensitivity: its smooth sensitivity.
            delta: in (0, 1).
            normal: a standard normal number, drawn for this and for nothing else.
        """
        shown = max(cost + sensitivity * self.noise * normal, 0.0) + self.cost
        return rdp_to_epsilon([self.order], [shown], delta)
