"""Proofs for Gaussian noise: on clients' gradients, heterogeneous, and central."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.amplification import amplified_rdp
from fedpriv.accounting.gaussian import CALIBRATIONS, gaussian_epsilon, poisson_rdp_epsilon
from fedpriv.accounting.pairs import (
    GaussianPair,
    PoissonGaussianPair,
    PoissonGroupPair,
    poisson_replaced_rdp,
    zero_out_pair,
)
from fedpriv.accounting.proofs import (
    COMPOSED_NUMERICALLY,
    RENYI_TO_EPSILON,
    SAMPLED_RDP,
    Claim,
    Proof,
    Run,
)
from fedpriv.accounting.references import CeilingReference, NormalReference
from fedpriv.accounting.release import SIGMA, NoiseParameter, Release
from fedpriv.accounting.renyi import ORDERS, gaussian_rdp, rdp_to_epsilon, read_only
from fedpriv.core.names import CalibrationName, SamplingName

Array = NDArray[np.float64]

_ROUNDING = (
    "Amplification by batches of varying size assumes that rounding of the other examples' gradients does not depend "
    "on that size. That holds, up to the last digits, for parameters that training leads to; a server that crafts "
    "parameters can make much of it."
)


class GaussianProof(Proof):
    """Clipped sums with normal noise sigma * clip_norm; sensitivity 2 clip_norm, under zero-out clip_norm."""

    parameter: ClassVar[NoiseParameter] = SIGMA
    amplifying: ClassVar[tuple[SamplingName, ...]] = ("poisson", "balls-in-bins", "fixed")
    zero_out: ClassVar[bool] = True
    ratio: ClassVar[str] = "sigma sqrt(K) / B"

    mechanism = "Gaussian mechanism"
    norm = "clip_norm"

    @staticmethod
    def nominal_noise(epsilon: float, delta: float, calibration: CalibrationName, sensitivity: float) -> float:
        """Return sigma with which one release alone is (epsilon, delta)-private."""
        return sensitivity * CALIBRATIONS[calibration](epsilon, delta)

    @staticmethod
    def noise_to_signal(dimensions: Sequence[int], noise: float, batch_size: int) -> float:
        """Return sigma sqrt(K) / B: noise sigma C sqrt(K) / B over the signal C; so, too, for hgm with even shares."""
        return noise * math.sqrt(sum(dimensions)) / batch_size

    @override
    def pure(self) -> Claim:
        return Claim(math.inf, "no finite figure: the ratio of two Gaussian densities is unbounded")

    @override
    def cheap_claims(self) -> list[Claim]:
        if not self.is_sampled and not self._is_poisson:
            return [self._unsampled()]
        return [self._unsampled(), self._zero_out_renyi() if self._is_zero_out else self._sampled_renyi()]

    @override
    def dominating_pairs(self) -> Run:
        if self._is_poisson:
            return ((PoissonGaussianPair(self.noise, float(self.release.rate)), 1),)
        # Without sampling the closed form is exact.
        return ((GaussianPair(2 / self.noise), 1),) if self.is_sampled else ()

    @override
    def whole_run(self) -> tuple[Run, ...]:
        if self._is_zero_out and self._is_poisson:
            goes = zero_out_pair(self.noise, float(self.release.rate))
            return tuple(((pair, int(self.release.participations)),) for pair in (goes, goes.exchanged))
        return super().whole_run() or (((GaussianPair(self._distance), 1),),)

    @override
    def step_of(self, units: int) -> Run:
        return ((GaussianPair(units * self._sensitivity / self.noise), 1),)

    @override
    def group(self, units: int, examples: int | None = None) -> tuple[Run, ...]:
        if units == 1 or not self._is_poisson:
            return super().group(units, examples)
        used, chances = self._used(units, examples)
        unused = ((0, 1 - used),) if used < 1 else ()
        law = (*unused, *((number, used * chance) for number, chance in chances))
        pair = PoissonGroupPair(self.noise, law, down=self._sensitivity - 1)
        pairs = (pair, pair.exchanged) if self._is_zero_out else (pair,)
        return tuple(((each, int(self.release.participations)),) for each in pairs)

    @override
    def split_group(self, units: int) -> tuple[Run, ...]:
        # Normal noise on a group's sum is the sum of noise on each unit, whose variances add up to it.
        noise, passes = self.noise / math.sqrt(units), units * int(self.release.participations)
        if noise < self.parameter.floor:
            return ()
        alone = type(self)(replace(self.release, noise=noise, participations=passes))
        if self._is_poisson:
            return alone.whole_run()
        return alone.allocated_runs()

    @override
    def run_rdp(self) -> Array:
        whole = gaussian_rdp(ORDERS, 1 / self._distance)
        count, rate = int(self.release.participations), float(self.release.rate)
        if self._is_zero_out and self._is_poisson:
            return np.minimum(whole, count * NormalReference(self.noise, rate).rdp(ORDERS))
        if not (self.is_sampled or self._is_poisson):
            return whole
        return np.minimum(whole, count * (_poisson_step_rdp if self._is_poisson else _fixed_step_rdp)(self.noise, rate))

    @property
    @override
    def run_theorem(self) -> str:
        if self._is_zero_out and self._is_poisson:
            return f"Poisson-sampled {self.mechanism} with sensitivity {self.norm}{COMPOSED_NUMERICALLY}"
        return super().run_theorem

    @property
    @override
    def pair_theorem(self) -> str:
        if self._is_poisson:
            return (
                f"Poisson-sampled {self.mechanism}: (1 - q) N(0) + q N(1) and (1 - q) N(0) + q N(-1) in units of "
                f"{self.norm}, which dominate (opposite gradients have the largest delta at every epsilon, by the "
                "trade-off of normal distributions: Dong, Roth and Su 2022, Section 2.2)"
            )
        return f"{self.mechanism} with sensitivity 2 {self.norm}"

    @override
    def reference(self) -> CeilingReference | None:
        if self._is_poisson:
            pair = NormalReference(self.noise, float(self.release.rate))
            theorem = (
                f"Poisson-sampled {self.mechanism}, the batch with the {self.release.unit} and without it, (1 - q) "
                f"N(0) + q N(1) and N(0) in units of {self.norm}"
            )
            return CeilingReference(((pair, 1),), theorem, is_hidden=True)
        theorem = (
            f"{self.mechanism}, the {self.release.unit}'s clipped gradient and zero in its place, which are one "
            f"{self.norm} apart at most"
        )
        return CeilingReference(((NormalReference(self.noise), 1),), theorem)

    @override
    def numerical_claims(self, known: float) -> list[Claim]:
        if self.is_allocated:
            return self.allocated_claims(known)
        if self._is_zero_out and self._is_poisson:
            return super().numerical_claims(known) or [self._sampled_renyi()]
        return [] if self._is_zero_out else super().numerical_claims(known)

    @override
    def notes(self) -> tuple[str, ...]:
        if self.is_allocated:
            return (*super().notes(), self._other_adjacency(), _ROUNDING)
        if self.release.sampling != "poisson":
            return super().notes()
        return (
            *super().notes(),
            self._other_adjacency(),
            "Privacy-loss distributions serve from a delta of 1e-20 up and for an epsilon below 1e6; Renyi accounting "
            "elsewhere.",
            *((_ROUNDING,) if self._is_poisson else ()),
        )

    def _other_adjacency(self) -> str:
        if self._is_zero_out:
            other, words = replace(self.release, adjacency="replace-one"), "replace-one (one example becomes any other)"
        else:
            other, words = replace(self.release, adjacency="zero-out"), "zero-out (one example becomes one that adds 0)"
        epsilon = _epsilon(other) if other.participations else 0.0
        return f"Under {words} epsilon is {epsilon:.4g}: another statement, not comparable with this one."

    @property
    def _is_zero_out(self) -> bool:
        return self.release.adjacency == "zero-out"

    @property
    def _is_poisson(self) -> bool:
        """Whether Poisson batches are drawn and amplify."""
        return self.release.sampling == "poisson" and self.release.rate < 1

    @property
    def _sensitivity(self) -> int:
        """In units of clip_norm: one clipped gradient goes (zero-out) or turns round (replace-one)."""
        return 1 if self._is_zero_out else 2

    @property
    def _distance(self) -> float:
        """Of the two normal laws that all releases are, without sampling."""
        return self._sensitivity * math.sqrt(self.release.participations) / self.noise

    def _unsampled(self) -> Claim:
        sensitivity = self._sensitivity
        theorem = (
            f"{self.mechanism} with sensitivity {sensitivity} {self.norm}, T releases as one of "
            f"mu = {sensitivity} sqrt(T) / sigma (Dong, Roth and Su 2022, Cor. 3.3), converted exactly "
            "(Balle and Wang 2018, Thm 8); no amplification used"
        )
        return Claim(gaussian_epsilon(float(self.release.delta), self._distance), theorem)

    def _zero_out_renyi(self) -> Claim:
        release = self.release
        epsilon = poisson_rdp_epsilon(
            self.noise, float(release.rate), int(release.participations), float(release.delta)
        )
        theorem = (
            f"Poisson-sampled {self.mechanism} with sensitivity {self.norm}, Renyi accounting (Mironov, Talwar and "
            f"Zhang 2019){RENYI_TO_EPSILON}"
        )
        return Claim(epsilon, theorem)

    def _sampled_renyi(self) -> Claim:
        """Under replace-one, which implies zero-out."""
        step = _poisson_step_rdp if self._is_poisson else _fixed_step_rdp
        rdp = int(self.release.participations) * step(self.noise, float(self.release.rate))
        how = "" if self._is_poisson else SAMPLED_RDP
        theorem = f"{self.pair_theorem}, Renyi accounting{how}{RENYI_TO_EPSILON}"
        return Claim(rdp_to_epsilon(ORDERS, rdp, float(self.release.delta)), theorem)


class HeterogeneousGaussianProof(GaussianProof):
    """The Gaussian mechanism on x / sqrt(K r), which is a public, invertible map of x.

    Each unit x is clipped to |x / sqrt(K r)| <= clip_norm, and noise of standard deviation sigma * clip_norm *
    sqrt(K r_k) is added to coordinate k of the sum, r public.
    """

    mechanism = "heterogeneous Gaussian mechanism (Phan et al. 2019, Thm 3: the Gaussian one on x / sqrt(K r))"
    norm = "clip_norm in the norm |x / sqrt(K r)|"

    @override
    def notes(self) -> tuple[str, ...]:
        return (
            *super().notes(),
            "r, the shares of the noise, must be public: chosen without looking at the data that is protected.",
        )


@lru_cache(maxsize=64)
def _epsilon(release: Release) -> float:
    """The epsilon of a Gaussian release; kept, because many clients of a run have the same, and it takes a second."""
    return GaussianProof(release).best().epsilon


# Kept, because a run asks again after each round.


@lru_cache(maxsize=256)
def _fixed_step_rdp(sigma: float, rate: float) -> Array:
    """Renyi privacy of one step with a batch of a fixed size."""

    return read_only(amplified_rdp(ORDERS, lambda orders: gaussian_rdp(orders, sigma / 2), math.inf, rate))


@lru_cache(maxsize=256)
def _poisson_step_rdp(sigma: float, rate: float) -> Array:
    """Renyi privacy of one step with a Poisson batch, replace-one.

    It is no worse than with a batch of a fixed size: delta of the pair at log(1 + q (exp(epsilon) - 1)) is q times
    that of N(1) against a mixture of N(0) and N(-1) at epsilon (Balle, Barthe and Gaboardi 2018, Theorem 2).
    """
    exact = poisson_replaced_rdp(ORDERS, sigma, rate)
    return read_only(np.where(np.isfinite(exact), exact, _fixed_step_rdp(sigma, rate)))


_UNSAMPLED = "No amplification by the sampling of clients is claimed: anyone who sees who was asked is covered, too."
_SAMPLED = (
    "Amplified by the sampling of clients: it holds only against those who do not see who was asked, and rests on the "
    "draw being secret."
)
_TRUSTED = "The server is trusted: it sees every clipped update without noise, and nothing is proven against it."


class CentralProof(GaussianProof):
    """Updates clipped to clip_norm, normal noise on a round's sum: sensitivity 2 clip_norm, or 1 under zero-out."""

    whole_clients: ClassVar[bool] = True
    mechanism = "Gaussian mechanism on the sum of clipped updates"

    @override
    def reference(self) -> CeilingReference | None:
        return None

    no_reference: ClassVar[str] = "an upload has no noise before the server adds it to the sum"

    @override
    def notes(self) -> tuple[str, ...]:
        return (_TRUSTED, _UNSAMPLED if self.release.sampling == "full" else _SAMPLED)
