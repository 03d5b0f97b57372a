"""Noise that is correlated over rounds: the banded inverse square root, its sensitivity, and what is proven with it.

Round t releases x_t + sum over j < p of s_j z_(t-j): x = (x_1, ..., x_n) the sums of clipped updates, z_t independent
normal noise, s the first p coefficients of sqrt(1 - u), p the band. With S the lower triangular Toeplitz matrix of s
and C its inverse, the releases are S (C x + z): a public, invertible map of C x + z, the Gaussian mechanism on C x.
That holds for x that follow from earlier releases, too, as C is lower triangular (Denisov et al. 2022, Theorem 2.1).

A unit is in the rounds R, at most k, any two at least b apart, with vectors v_i of norm 1 or less. It moves C x by the
sum over R of C_i v_i^T, C_i the columns. Its squared norm is the sum over i, j in R of <C_i, C_j> <v_i, v_j>. Let c be
the first column, so that <C_i, C_j> is the sum over m <= n - max(i, j) of c_m c_(m + |i - j|).

1. c is positive: its generating function is 1 / S(u), and S(u) is 1 less positive multiples of powers of u. It does not
   increase: (1 - u) / S(u) = 1 / G(u), where G(u) = S(u) / (1 - u) has the coefficients g_k = binom(2 k, k) / 4^k up to
   k = p - 1, and g_(p-1) from there on. These are log-convex (g_k^2 <= g_(k-1) g_(k+1)), so that by Kaluza's theorem
   1 / G(u) has no positive coefficient but the first: c_k - c_(k-1) <= 0.
2. So <C_i, C_j> is not negative, and equal v are the worst. It does not increase with max(i, j), nor with |i - j|. The
   l-th round of R is 1 + (l - 1) b or later, and the l-th and m-th are |l - m| b apart or more: the rounds 1, 1 + b,
   ..., 1 + (k - 1) b are the worst (as in Kalinin and Lampert 2024, Theorem 2).

The sensitivity is the norm of the sum of these columns, times 2 clip_norm under replace-one and clip_norm under
zero-out.
"""

from functools import lru_cache
from typing import ClassVar

import numpy as np
import scipy
from typing_extensions import override

from fedpriv.accounting.gaussian import gaussian_epsilon
from fedpriv.accounting.gaussian_proof import CentralProof
from fedpriv.accounting.pairs import GaussianPair
from fedpriv.accounting.proofs import Claim, Run
from fedpriv.accounting.release import Correlation
from fedpriv.core.names import SamplingName


def noise_factors(band: int) -> tuple[float, ...]:
    """Return s_0 = 1, s_1, ...: what the noise of a round and of those before it is multiplied with in its release."""
    steps = np.arange(1, band)
    return (1.0, *np.cumprod((steps - 1.5) / steps).tolist())


@lru_cache(maxsize=4096)
def sensitivity(correlation: Correlation, participations: int) -> float:
    """Return how far a unit of norm 1 moves C x at most, from so many rounds."""
    times = np.zeros(correlation.rounds)
    times[:: correlation.separation][:participations] = 1.0
    column = _first_column(correlation.band, correlation.rounds)
    return float(np.linalg.norm(scipy.signal.convolve(times, column)[: correlation.rounds]))


def _first_column(band: int, rounds: int) -> np.ndarray:
    """The coefficients of 1 / S(u), twice as many in each step of Newton's method: a recursion takes minutes."""
    series, column = np.zeros(rounds), np.zeros(rounds)
    series[:band] = noise_factors(band)[:rounds]
    column[0], known = 1.0, 1
    while known < rounds:
        size = min(2 * known, rounds)
        square = scipy.signal.convolve(column[:known], column[:known])
        column[known:size] = -scipy.signal.convolve(square, series[:size])[known:size]
        known = size
    return column


class CorrelatedProof(CentralProof):
    """Noise of a trusted server on the sums of all rounds, which cancels in part from one round to the next."""

    whole_clients: ClassVar[bool] = False
    correlates: ClassVar[bool] = True
    amplifying: ClassVar[tuple[SamplingName, ...]] = ()
    ratio: ClassVar[str] = ""

    @property
    def _correlation(self) -> Correlation:
        if self.release.correlation is None:
            raise ValueError("a release of correlated noise without its correlation")
        return self.release.correlation

    @property
    @override
    def _distance(self) -> float:
        return self._sensitivity * sensitivity(self._correlation, int(self.release.participations)) / self.noise

    @override
    def group(self, units: int, examples: int | None = None) -> tuple[Run, ...]:
        # Each moves C x so far at most, in whichever rounds it is.
        return (((GaussianPair(units * self._distance), 1),),)

    @override
    def _unsampled(self) -> Claim:
        moved = sensitivity(self._correlation, int(self.release.participations))
        theorem = (
            f"Gaussian mechanism on C x, x the sums of all rounds (Denisov et al. 2022, Thm 2.1), C the inverse of the "
            f"banded inverse square root (Kalinin, McKenna, Upadhyay and Lampert 2025), band {self._correlation.band}; "
            f"sensitivity {self._sensitivity} {self.norm} times {moved:.6g}, the norm of the columns of C at the "
            "earliest rounds of the pattern (Kalinin and Lampert 2024, Thm 2), converted exactly (Balle and Wang 2018, "
            "Thm 8); no amplification used"
        )
        return Claim(gaussian_epsilon(float(self.release.delta), self._distance), theorem)

    @override
    def notes(self) -> tuple[str, ...]:
        pattern, count = self._correlation, int(self.release.participations)
        once = "once" if count == 1 else f"{count:,} times"
        return (
            *super().notes(),
            f"Participation pattern: {once} at most in {pattern.rounds:,} rounds, at most every {pattern.separation:,} "
            "rounds. The server chooses clients so, and refuses a round that would break it.",
        )
