"""What is proven about distributed noise: of the sum of updates that were rounded and got shares of Skellam noise.

Agarwal, Kairouz and Liu 2021 ("The Skellam Mechanism for Differentially Private Federated Learning", arXiv 2110.04995),
the bound for vectors: the sum of whole vectors with Skellam noise of variance mu on each coordinate has, at a whole
order a above 1, the Renyi privacy

    a s2^2 / (2 mu) + min{ ((2 a - 1) s2^2 + 6 s1) / (4 mu^2), 3 s1 / (2 mu) }

with the sensitivities s1 (L1) and s2 (Euclidean) of the rounded vectors.
"""

import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.proofs import RENYI_TO_EPSILON, Claim, Proof
from fedpriv.accounting.release import NoiseParameter
from fedpriv.accounting.renyi import rdp_to_epsilon

LEVELS = 1 << 16
"""Whole numbers that the bound of an update's norm is scaled to."""

SHARED_SIGMA = NoiseParameter("sigma", "standard deviation of the noise on the sum, over clip_norm", 1e-2, 1024.0, 1e-2)
"""The most noise stays far below 2^31 in a sum with shares of 1,000 clients."""

DELTA_PART = 1e-6
"""The part of delta that is left to clients whose noisy numbers may be clipped (:mod:`fedpriv.flower.secure_sum`)."""

_RETRY = 1e-4  # beta: the chance that an update is rounded anew, at most
_ORDERS = np.array([*range(2, 257), *(2**k for k in range(9, 21))], dtype=np.float64)

_TRUSTED = (
    "The claim holds against a server that passes on the clients' own keys: under secure aggregation it sees the sum "
    "alone. Nothing proves whose these keys are: with keys of its own making a server reads single uploads, which have "
    "only a share of the noise. The clients of a sum must follow the protocol; shares that some leave out, or tell the "
    "server, are missing in the noise."
)
_DROPOUTS = (
    "Each share is such that mechanism.survivors clients have the noise together (by default as many as secure "
    "aggregation needs): with more of them there is more noise, and no sum of fewer is unmasked."
)


def padded(dimension: int) -> int:
    """Return the length of a flattened update of ``dimension`` coordinates: the next power of two."""
    return 1 << max(0, dimension - 1).bit_length()


def rounded_norm(dimension: int) -> float:
    """Return the largest norm of a rounded update, in levels, to which rounding is repeated (Kairouz et al. 2021)."""
    root, scale = math.sqrt(dimension), float(LEVELS)
    likely = scale**2 + dimension / 4 + math.sqrt(2 * math.log(1 / _RETRY)) * (scale + root / 2)
    return math.sqrt(min(likely, (scale + root) ** 2))


def skellam_rdp(orders: NDArray[np.float64], variance: float, l1: float, l2: float) -> NDArray[np.float64]:
    """Return the Renyi privacy of whole vectors with Skellam noise."""
    if np.any(orders < 2) or np.any(orders != np.rint(orders)):
        raise ValueError("the bound for Skellam noise holds at whole orders from 2")
    extra = np.minimum(((2 * orders - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
    return orders * l2**2 / (2 * variance) + extra


class SkellamProof(Proof):
    """Updates clipped to clip_norm and rounded; shares of Skellam noise of variance (sigma LEVELS)^2 on the sum."""

    parameter: ClassVar[NoiseParameter] = SHARED_SIGMA
    zero_out: ClassVar[bool] = True
    whole_clients: ClassVar[bool] = True
    ratio: ClassVar[str] = "sigma sqrt(K) / B"

    no_reference: ClassVar[str] = "a single upload is masked, and no ceiling for Skellam noise on the sum is known here"

    @override
    def pure(self) -> Claim:
        return Claim(math.inf, "no finite figure: the ratio of two Skellam probabilities is unbounded")

    @override
    def cheap_claims(self) -> list[Claim]:
        dimension = padded(sum(self.release.dimensions))
        updates = 1 if self.release.adjacency == "zero-out" else 2
        l2 = updates * rounded_norm(dimension)
        # A whole number is at most its square.
        l1 = min(math.sqrt(dimension) * l2, l2**2)
        rdp = int(self.release.participations) * skellam_rdp(_ORDERS, (self.noise * LEVELS) ** 2, l1, l2)
        theorem = (
            f"Skellam noise on the sum of rounded updates (Agarwal, Kairouz and Liu 2021), Euclidean "
            f"sensitivity {l2 / LEVELS:.6g} clip_norm after conditional rounding (Kairouz, Liu and Steinke 2021), "
            f"Renyi accounting{RENYI_TO_EPSILON}"
        )
        delta = (1 - DELTA_PART) * float(self.release.delta)
        return [Claim(rdp_to_epsilon(_ORDERS, rdp, delta), theorem)]

    @override
    def notes(self) -> tuple[str, ...]:
        return (_TRUSTED, _DROPOUTS)
