"""What is proven about the Gaussian mechanism, and so about the heterogeneous one."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.amplification import amplified_rdp
from fedpriv.accounting.gaussian import gaussian_epsilon, poisson_pld_epsilon, poisson_rdp_epsilon
from fedpriv.accounting.pairs import GaussianPair, Pair
from fedpriv.accounting.proofs import COMPOSED_NUMERICALLY, NO_NOMINAL, RENYI_TO_EPSILON, SAMPLED_RDP, Claim, Proof
from fedpriv.accounting.renyi import ORDERS, gaussian_rdp, rdp_to_epsilon

__all__ = ["GaussianProof", "HeterogeneousGaussianProof"]

Array = NDArray[np.float64]

_ADD_OR_REMOVE = (
    "add-or-remove-one, equivalently zero-out: one example of this client is added, removed, "
    "or replaced by one that adds zero"
)


class GaussianProof(Proof):
    """Mechanism gaussian: replace-one with sensitivity 2 clip_norm, under Poisson sampling add-or-remove-one with 1."""

    mechanism = "Gaussian mechanism"
    norm = "clip_norm"

    @property
    def adjacency(self) -> str:  # noqa: D102
        return _ADD_OR_REMOVE if self._poisson else super().adjacency

    def nominal(self) -> Claim:  # noqa: D102
        return Claim(math.inf, NO_NOMINAL)

    def pure(self) -> Claim:  # noqa: D102
        return Claim(math.inf, "no finite figure: the ratio of two Gaussian densities is unbounded")

    def cheap_claims(self) -> list[Claim]:  # noqa: D102
        if self.release.rate == 1 or self.release.sampling in ("shuffled", "full"):
            return [self._unsampled()]
        return [self._unsampled(), self._poisson_renyi() if self._poisson else self._fixed_renyi()]

    def dominating_pairs(self) -> tuple[tuple[Pair, int], ...]:  # noqa: D102
        # Without sampling the closed form is exact.
        return ((GaussianPair(2 / self._sigma), 1),) if self.is_sampled else ()

    @property
    def pair_theorem(self) -> str:  # noqa: D102
        return f"{self.mechanism} with sensitivity 2 {self.norm}"

    def numerical_claims(self, known: float) -> list[Claim]:  # noqa: D102
        release = self.release
        if release.rate == 1 or not self._poisson:
            return super().numerical_claims(known)
        exact = poisson_pld_epsilon(
            self._sigma, float(release.rate), int(release.participations), float(release.delta), known
        )
        theorem = f"Poisson-sampled {self.mechanism} with sensitivity {self.norm}{COMPOSED_NUMERICALLY}"
        return [] if exact is None else [Claim(exact, theorem)]

    def notes(self) -> tuple[str, ...]:  # noqa: D102
        if not self._poisson:
            return super().notes()
        return (
            *super().notes(),
            "Not comparable with replace-one figures: under replace-one this is at most "
            "(2 epsilon, (1 + exp(epsilon)) delta).",
            "Where the number of examples of the client is sent or fixes the rate, read the adjacency as zero-out.",
            "Privacy-loss distributions serve from a delta of about 1e-9 up and for an epsilon below 1e6; Renyi "
            "accounting elsewhere.",
        )

    @property
    def _poisson(self) -> bool:
        return self.release.sampling == "poisson"

    @property
    def _sigma(self) -> float:
        if self.release.sigma is None:
            raise ValueError(f"a release by {self.release.mechanism} without sigma")
        return float(self.release.sigma)

    def _unsampled(self) -> Claim:
        # In units of clip_norm: one clipped gradient comes or goes (add-or-remove) or turns round (replace).
        sensitivity = 1 if self._poisson else 2
        mu = sensitivity * math.sqrt(self.release.participations) / self._sigma
        theorem = (
            f"{self.mechanism} with sensitivity {sensitivity} {self.norm}, T releases as one of "
            f"mu = {sensitivity} sqrt(T) / sigma (Dong, Roth and Su 2022, Cor. 3.3), converted exactly "
            "(Balle and Wang 2018, Thm 8); no amplification used"
        )
        return Claim(gaussian_epsilon(float(self.release.delta), mu), theorem)

    def _fixed_renyi(self) -> Claim:
        rdp = int(self.release.participations) * _fixed_step_rdp(self._sigma, float(self.release.rate))
        theorem = f"{self.mechanism} with sensitivity 2 {self.norm}, Renyi accounting{SAMPLED_RDP}{RENYI_TO_EPSILON}"
        return Claim(rdp_to_epsilon(ORDERS, rdp, float(self.release.delta)), theorem)

    def _poisson_renyi(self) -> Claim:
        release = self.release
        epsilon = poisson_rdp_epsilon(
            self._sigma, float(release.rate), int(release.participations), float(release.delta)
        )
        theorem = (
            f"Poisson-sampled {self.mechanism} with sensitivity {self.norm}, Renyi accounting (Mironov, Talwar and "
            f"Zhang 2019){RENYI_TO_EPSILON}"
        )
        return Claim(epsilon, theorem)


class HeterogeneousGaussianProof(GaussianProof):
    """Mechanism hgm: the Gaussian mechanism on x / sqrt(K r), which is a public, invertible map of x."""

    mechanism = "heterogeneous Gaussian mechanism (Phan et al. 2019, Thm 3: the Gaussian one on x / sqrt(K r))"
    norm = "clip_norm in the norm |x / sqrt(K r)|"

    def notes(self) -> tuple[str, ...]:  # noqa: D102
        return (
            *super().notes(),
            "r, the shares of the noise, must be public: chosen without looking at the data that is protected.",
        )


@lru_cache(maxsize=256)
def _fixed_step_rdp(sigma: float, rate: float) -> Array:
    """Renyi privacy of one step; kept, because a run asks again after each round."""

    def base(orders: Array) -> Array:
        return gaussian_rdp(orders, sigma / 2)

    step = amplified_rdp(ORDERS, base, math.inf, rate)
    step.setflags(write=False)
    return step
