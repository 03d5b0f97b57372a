"""Proofs for mechanisms with pure differential privacy: directional (von Mises-Fisher) and Laplace.

Both are replace-one. Fixed-size sampling amplifies the pure figure and the Renyi divergence of a step. Poisson sampling
does it by the number of participations alone: whether a step uses an example does not depend on what the example is, so
that may be revealed. Then a step costs nothing with probability 1 - q, and delta at every epsilon above 0 is q times
that of a participation, where a pure figure stays as it is.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.amplification import amplified_pure, amplified_rdp, tagged_rdp
from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.pairs import DirectionalPair, LaplacePair, TaggedPair
from fedpriv.accounting.proofs import (
    COMPOSED_NUMERICALLY,
    PADDING_TAIL,
    RENYI_TO_EPSILON,
    SAMPLED_RDP,
    Claim,
    Proof,
    Run,
)
from fedpriv.accounting.references import CeilingReference, DirectionalReference, LaplaceReference
from fedpriv.accounting.release import KAPPA, SCALE, NoiseParameter
from fedpriv.accounting.renyi import ORDERS, laplace_rdp, pure_rdp, rdp_to_epsilon, read_only, vmf_rdp
from fedpriv.accounting.vmf_functions import mean_resultant_length
from fedpriv.core.names import CalibrationName, SamplingName

Array = NDArray[np.float64]

_TAGGED = (
    ", Poisson batches, where both neighbours draw the same participations and reveal them: T steps cost Binomial(T, q)"
)
_SAMPLED_PURE = (
    "; each step amplified by fixed-size sampling, log(1 + q (exp(epsilon) - 1)) (Balle, Barthe and "
    "Gaboardi 2018, Thm 9)"
)


class PureProof(Proof):
    """A mechanism whose participations consist of releases of the same pure epsilon."""

    amplifying: ClassVar[tuple[SamplingName, ...]] = ("fixed", "poisson", "balls-in-bins")
    renyi_theorem: ClassVar[str]  # what the Renyi privacy of a run without sampling rests on

    @property
    @abstractmethod
    def pieces(self) -> int:
        """How many releases a participation consists of."""

    @property
    @abstractmethod
    def piece_epsilon(self) -> float:
        """Pure epsilon of each of them, before sampling."""

    @property
    @abstractmethod
    def pure_theorem(self) -> str:
        """What the pure figure of a run without sampling rests on."""

    @abstractmethod
    def step_rdp(self) -> Array:
        """Renyi privacy of one participation, after sampling of a fixed size, at ORDERS."""

    def pure(self) -> Claim:
        """The figure without delta: releases add up."""
        once, count = self._pure_releases()
        return Claim(count * once, self.pure_theorem + (_SAMPLED_PURE if self.is_sampled else ""))

    def cheap_claims(self) -> list[Claim]:
        """Claims that need no numerical composition."""
        pure = self.pure()
        named = Claim(pure.epsilon, f"the pure figure, which is the smaller: {pure.theorem}")
        return [named, self._composition(), self._renyi()]

    @override
    def whole_run(self) -> tuple[Run, ...]:
        if not self.is_tagged:
            return super().whole_run()
        return (((TaggedPair(self.batch_pair(), float(self.release.rate)), int(self.release.participations)),),)

    @property
    @override
    def run_theorem(self) -> str:
        return f"{self.pair_theorem}{_TAGGED}{COMPOSED_NUMERICALLY}" if self.is_tagged else super().run_theorem

    @override
    def numerical_claims(self, known: float) -> list[Claim]:
        claims = super().numerical_claims(known)
        if not self.is_tagged:
            return [*claims, *self.allocated_claims(known)]
        # Where a grid is coarse, what holds without sampling may be smaller.
        return [*claims, type(self)(replace(self.release, sampling="full", rate=1.0)).best()]

    def notes(self) -> tuple[str, ...]:
        """Remarks on the figure, with what Poisson sampling leaves open."""
        if self.release.sampling != "poisson":
            return super().notes()
        return (
            *super().notes(),
            "Poisson batches: what counts is how many steps use an example, not that it is hidden which ones do.",
        )

    def _pure_releases(self) -> tuple[float, int]:
        """Return the pure epsilon of each of the releases that the run consists of, and their number."""
        count = int(self.release.participations)
        if not self.is_sampled:
            return self.piece_epsilon, self.pieces * count
        return amplified_pure(self.pieces * self.piece_epsilon, self._rate), count

    def _composition(self) -> Claim:
        once, count = self._pure_releases()
        theorem = (
            f"{count} releases of pure epsilon {once:.6g} each, composed optimally for this delta (Kairouz, Oh and "
            "Viswanath 2017, Thm 3.3)"
        )
        return Claim(
            pure_composition_epsilon(once, count, float(self.release.delta)),
            theorem + (_SAMPLED_PURE if self.is_sampled else ""),
        )

    @override
    def run_rdp(self) -> Array:
        step = tagged_rdp(ORDERS, self.step_rdp(), float(self.release.rate)) if self.is_tagged else self.step_rdp()
        return np.asarray(int(self.release.participations) * step)

    def _renyi(self) -> Claim:
        sampled = SAMPLED_RDP if self.is_sampled else _TAGGED if self.is_tagged else ""
        theorem = self.renyi_theorem + sampled + RENYI_TO_EPSILON
        return Claim(rdp_to_epsilon(ORDERS, self.run_rdp(), float(self.release.delta)), theorem)

    @property
    @override
    def is_tagged(self) -> bool:
        return self.release.sampling == "poisson" and self.release.rate < 1

    @property
    def _rate(self) -> float:
        return float(self.release.rate) if self.is_sampled else 1.0


class DirectionalProof(PureProof):
    """VMF draws around blocks' directions: 2 kappa a block and participation; the Renyi divergence is exact."""

    parameter: ClassVar[NoiseParameter] = KAPPA
    ratio: ClassVar[str] = (
        "sqrt((1 - A^2) / B) / A, where A is the mean cosine of a draw with its gradient, in each block"
    )

    @staticmethod
    def nominal_noise(epsilon: float, delta: float, calibration: CalibrationName, sensitivity: float) -> float:
        """Return kappa = epsilon / 2 (Faustini et al., Corollary 2)."""
        return epsilon / 2

    @staticmethod
    def noise_to_signal(dimensions: Sequence[int], noise: float, batch_size: int) -> float:
        """Return sqrt(sum (1 - A^2) / B / sum A^2), sums over blocks; for blocks of one size sqrt((1 - A^2) / B) / A.

        A draw has the mean A = A_K(kappa) along its gradient and the variance 1 - A^2.
        """
        sizes, counts = np.unique(np.array(dimensions), return_counts=True)
        signals = np.array([float(mean_resultant_length(int(size), noise)) for size in sizes]) ** 2
        return math.sqrt(float(counts @ (1 - signals)) / batch_size / float(counts @ signals))

    @override
    def nominal(self) -> Claim:
        blocks = self.pieces
        words = "nominal, the paper's figure for one pass over the data, not the run's:"
        theorem = (
            f"{words} 2 kappa (Faustini et al., Cor. 2)"
            if blocks == 1
            else f"{words} 2 kappa sqrt(m), m = {blocks} "
            "(Faustini et al., Cor. 1, whose proof does not cover independently normalised blocks)"
        )
        return Claim(2 * self.noise * math.sqrt(blocks), theorem)

    @property
    @override
    def pieces(self) -> int:
        return len(self.release.dimensions)

    @property
    @override
    def piece_epsilon(self) -> float:
        return 2 * self.noise

    @property
    @override
    def pure_theorem(self) -> str:
        return (
            f"2 kappa for each block ({self.pieces}) and participation ({int(self.release.participations)}), "
            "added: the density ratio is at most exp(kappa |x - x'|) (Weggenmann and Kerschbaum 2021), basic "
            "composition"
        )

    renyi_theorem: ClassVar[str] = (
        "Renyi accounting with the exact divergence of antipodal VMF distributions, "
        "[log M((2a - 1) kappa) - log M(kappa)] / (a - 1), added over blocks and participations"
    )

    @override
    def step_rdp(self) -> Array:
        return _directional_step_rdp(self.noise, self._sizes, self._rate)

    @override
    def dominating_pairs(self) -> Run:
        return tuple((DirectionalPair(self.noise, dimension), count) for dimension, count in self._sizes)

    @override
    def step_of(self, units: int) -> Run:
        return tuple((pair, units * number) for pair, number in self.dominating_pairs())  # each has draws of its own

    @override
    def group(self, units: int, examples: int | None = None) -> tuple[Run, ...]:
        if not self.is_tagged:
            return super().group(units, examples)
        return tuple(tuple((pair, units * number) for pair, number in run) for run in self.whole_run())

    @override
    def split_group(self, units: int) -> tuple[Run, ...]:
        passes = units * int(self.release.participations)
        return replace(self, release=replace(self.release, participations=passes)).allocated_runs()

    pair_theorem: ClassVar[str] = (
        "VMF distributions around opposite directions, which dominate (delta at every epsilon grows with the angle "
        "between the centres)"
    )

    @override
    def reference(self) -> CeilingReference:
        theorem = (
            f"VMF distributions around the directions of the {self.release.unit}'s gradient and uniform directions in "
            "their place; losses of blocks and participations are independent whatever the parameters, so that they "
            "compose exactly"
        )
        return CeilingReference(
            tuple((DirectionalReference(self.noise, dimension), count) for dimension, count in self._sizes), theorem
        )

    @property
    @override
    def delta_of_sampling(self) -> float:
        # Steps with more examples than draws are reserved for: there nothing hides who took part.
        return PADDING_TAIL * self.release.slots * float(self.release.participations)

    @cached_property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a dimension and how many blocks have it."""
        return tuple(sorted(Counter(int(dimension) for dimension in self.release.dimensions).items()))

    @override
    def notes(self) -> tuple[str, ...]:
        return (*super().notes(), self._resemblance()) if self.noise > 0 else super().notes()

    def _resemblance(self) -> str:
        scales = [math.sqrt(dimension) / self.noise for dimension in set(self.release.dimensions)]
        low, high = f"{min(scales):.3g}", f"{max(scales):.3g}"
        scale = low if low == high else f"{low} to {high} (by block)"
        return (
            "Heuristic, not a guarantee: with B units in the sum the noise resembles normalised DP-SGD with sigma "
            f"about sqrt(K) / kappa sqrt(B), here {scale} sqrt(B)."
        )


class LaplaceProof(PureProof):
    """Units clipped to clip_norm in L1, 2 clip_norm apart; noise of scale ``scale * clip_norm`` a coordinate."""

    parameter: ClassVar[NoiseParameter] = SCALE
    ratio: ClassVar[str] = (
        "2 K scale / (sqrt(pi) B), where a gradient's coordinates are spread like normal ones, so that "
        "|g|_1 = sqrt(2 K / pi) |g|_2"
    )

    @staticmethod
    def nominal_noise(epsilon: float, delta: float, calibration: CalibrationName, sensitivity: float) -> float:
        """Return scale = 1 / epsilon."""
        return 1 / epsilon

    @staticmethod
    def noise_to_signal(dimensions: Sequence[int], noise: float, batch_size: int) -> float:
        """Return 2 K scale / (sqrt(pi) B): noise scale C sqrt(2 K) / B over the signal C / sqrt(2 K / pi)."""
        return 2 * sum(dimensions) * noise / (math.sqrt(math.pi) * batch_size)

    pieces: ClassVar[int] = 1

    @override
    def nominal(self) -> Claim:
        theorem = (
            "nominal, of one participation, not the run's: clip_norm over the noise scale, for a gradient that comes "
            "or goes; a replaced one costs twice that"
        )
        return Claim(1 / self.noise, theorem)

    @property
    @override
    def piece_epsilon(self) -> float:
        return 2 / self.noise

    @property
    @override
    def pure_theorem(self) -> str:
        return (
            f"2 clip_norm over the noise scale for each participation ({int(self.release.participations)}), added: "
            "the Laplace mechanism with L1 sensitivity 2 clip_norm (Dwork et al. 2006, Prop. 1), basic composition"
        )

    renyi_theorem: ClassVar[str] = (
        "Renyi accounting of the Laplace mechanism with L1 sensitivity 2 clip_norm (Mironov 2017, Prop. 6, in one "
        "coordinate; its divergence is convex in the shift, so a shift that is split over coordinates costs no "
        "more), added over participations"
    )

    @override
    def step_rdp(self) -> Array:
        return _laplace_step_rdp(self.piece_epsilon, self._rate)

    @override
    def dominating_pairs(self) -> Run:
        return self.step_of(1)

    @override
    def step_of(self, units: int) -> Run:
        return ((LaplacePair(units * self.piece_epsilon), 1),)

    @override
    def split_group(self, units: int) -> tuple[Run, ...]:
        return self.allocated_runs() if units == 1 else ()

    @override
    def reference(self) -> CeilingReference:
        theorem = (
            f"Laplace distributions of one coordinate, the {self.release.unit}'s clipped gradient and zero in its "
            "place, which are one clip_norm apart at most in the L1 norm"
        )
        return CeilingReference(((LaplaceReference(1 / self.noise), 1),), theorem)

    pair_theorem: ClassVar[str] = (
        "Laplace distributions of one coordinate at the full L1 sensitivity 2 clip_norm, which dominate (spread "
        "over several coordinates, the same shift has no larger delta at any epsilon)"
    )


# Kept, because a run asks again after each round.


@lru_cache(maxsize=256)
def _directional_step_rdp(kappa: float, sizes: tuple[tuple[int, int], ...], rate: float) -> Array:
    """Renyi privacy of one step."""
    once = 2 * kappa * sum(count for _, count in sizes)

    def base(orders: Array) -> Array:
        total = np.zeros_like(orders)
        for dimension, count in sizes:
            total = total + count * vmf_rdp(orders, dimension, kappa)
        return np.minimum(total, pure_rdp(orders, once))

    return read_only(base(ORDERS) if rate == 1 else amplified_rdp(ORDERS, base, once, rate))


@lru_cache(maxsize=256)
def _laplace_step_rdp(shift: float, rate: float) -> Array:
    def base(orders: Array) -> Array:
        return laplace_rdp(orders, shift)

    return read_only(base(ORDERS) if rate == 1 else amplified_rdp(ORDERS, base, shift, rate))
