"""The base of all proofs: claims, adjacencies and their wording."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import scipy
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.allocation import AllocationPair, ZeroOutAllocationPair, amplifies
from fedpriv.accounting.numerical import ComposedPair, composed_epsilon
from fedpriv.accounting.pairs import MixedPair, Pair, SampledPair, TaggedPair
from fedpriv.accounting.references import CeilingReference
from fedpriv.accounting.release import NoiseParameter, Release
from fedpriv.core.errors import InputError
from fedpriv.core.names import Adjacency, CalibrationName, SamplingName
from fedpriv.core.records import Guarantee

Array = NDArray[np.float64]
Run = tuple[tuple[Pair, int], ...]
"""Pairs that dominate a whole run together, and how many of each."""

CLIENTS = "No amplification by the sampling of clients is claimed: the server sees who uploads."
RENYI_TO_EPSILON = ", converted by Canonne, Kamath and Steinke 2020, Prop. 12"
SAMPLED_RDP = (
    ", fixed-size sampling without replacement (the smaller of Wang, Balle and Kasiviswanathan 2019, Thm 9, and the "
    "moments of Balle, Barthe and Gaboardi 2018, Thm 9)"
)
SAMPLED_DELTA = ", fixed-size sampling without replacement (Balle, Barthe and Gaboardi 2018, Thm 9)"
COMPOSED_NUMERICALLY = (
    ", privacy-loss distributions composed numerically with pessimistic rounding (Doroshenko et al. 2022)"
)

_ALLOCATED = (
    ", balls in bins: the density ratio of a pass is the mean of those of its steps, which are independent (Chua et "
    "al. 2024; Feldman and Shenfeld 2025), and in the convex order it is at least that of any two neighbours"
)
PADDING_TAIL = 1e-12
"""The probability that a step of balls-in-bins holds more examples than draws are reserved for, with ``vmf``."""
_FEW = 8  # units of a group in a step that are told apart exactly

_REPLACE_EXAMPLE = Adjacency.REPLACE_ONE.worded("one example of this client is replaced by any other")
_REPLACE_UPDATE = Adjacency.REPLACE_ONE_UPDATE.worded("this client's whole update is replaced by any other")
_ZERO_OUT_UPDATE = Adjacency.ZERO_OUT_UPDATE.worded(
    "this client's update counts as zero in every round, as if it took no part; the number that sums "
    "are divided by is public"
)
_ZERO_OUT = Adjacency.ZERO_OUT.worded(
    "one example of this client is replaced by one that adds zero (as if it were removed); the number of "
    "examples is public"
)


@dataclass(frozen=True)
class Claim:
    """An epsilon and the theorem that gives it; infinity and the reason where none does."""

    epsilon: float
    theorem: str


def finite(epsilon: float) -> float | None:
    """Return an epsilon; ``None``: nothing is proven."""
    return epsilon if math.isfinite(epsilon) else None


def smallest(claims: Sequence[Claim]) -> Claim:
    """Return the claim with the smallest epsilon, the first of equal ones."""
    return min(claims, key=lambda claim: claim.epsilon)


def stated(
    adjacency: str,
    participations: int,
    delta: float,
    pure: Claim,
    best: Claim,
    nominal: Claim,
    notes: Sequence[str] = (),
    sampling: str = "full",
) -> Guarantee:
    """Return claims as the ledger has them: pure epsilon, (epsilon, delta), and what a paper prints."""
    return Guarantee(
        adjacency=adjacency,
        sampling=sampling,
        participations=participations,
        nominal_epsilon=finite(nominal.epsilon),
        pure_epsilon=finite(pure.epsilon),
        epsilon=finite(best.epsilon),
        delta=delta,
        theorem={"nominal_epsilon": nominal.theorem, "pure_epsilon": pure.theorem, "epsilon": best.theorem},
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Proof(ABC):
    """What is known about one client's releases by one mechanism."""

    release: Release  # what the mechanism did; at least one participation

    parameter: ClassVar[NoiseParameter | None] = None  # what says how much noise there is; None: nothing does
    amplifying: ClassVar[tuple[SamplingName, ...]] = ()  # samplings with proven amplification, tightest first
    zero_out: ClassVar[bool] = False  # whether something is proven under zero-out, in Poisson batches
    whole_clients: ClassVar[bool] = False  # whether it is about sums of clients' updates, sampled as clients
    correlates: ClassVar[bool] = False  # whether it is about noise that is correlated over rounds
    ratio: ClassVar[str] = ""  # the noise-to-signal ratio in words, for fedpriv account compare

    @property
    def noise(self) -> float:
        """The noise itself; a release without any is a ``ValueError``."""
        if self.release.noise is None:
            raise ValueError(f"a release by {self.release.mechanism} without its noise")
        return float(self.release.noise)

    @staticmethod
    def nominal_noise(epsilon: float, delta: float, calibration: CalibrationName, sensitivity: float) -> float:
        """The noise for which the mechanism's paper states this epsilon (:func:`fedpriv.accounting.nominal_noise`)."""
        raise InputError("this mechanism has no nominal epsilon; give its noise, or a target epsilon")

    @staticmethod
    def noise_to_signal(dimensions: Sequence[int], noise: float, batch_size: int) -> float:
        """The noise-to-signal ratio of the mean of B gradients (:func:`fedpriv.accounting.noise_to_signal`)."""
        raise InputError("no noise-to-signal ratio of this mechanism is known")

    @property
    def adjacency(self) -> str:
        """Which two data sets must look alike, in words."""
        if self.release.adjacency == "zero-out":
            return _ZERO_OUT_UPDATE if self.release.unit == "update" else _ZERO_OUT
        return _REPLACE_UPDATE if self.release.unit == "update" else _REPLACE_EXAMPLE

    def nominal(self) -> Claim:
        """The figure as the mechanism's paper prints it."""
        return Claim(math.inf, "this mechanism's papers print no figure other than the proven one")

    @abstractmethod
    def pure(self) -> Claim:
        """Pure epsilon-DP of all releases together."""

    @abstractmethod
    def cheap_claims(self) -> list[Claim]:
        """Every (epsilon, delta) claim by closed forms and Renyi accounting; at least one, a few milliseconds."""

    def dominating_pairs(self) -> Run:
        """Pairs that dominate one participation before fixed-size sampling, and how many of each; or none."""
        return ()

    def batch_pair(self) -> Pair:
        """Return what dominates one participation as a single pair, where there are dominating pairs."""
        return _single(self.dominating_pairs())

    def run_rdp(self) -> Array | None:
        """Renyi privacy of the whole run at ORDERS; ``None``: it is not known at these."""
        return None

    def reference(self) -> CeilingReference | None:
        """What ceilings compare a run with: a law that does not depend on the secret; or None."""
        return None

    @property
    def no_reference(self) -> str:
        """Why there is none."""
        return f"mechanism {self.release.mechanism} names no law that does not depend on the secret"

    def whole_run(self) -> tuple[Run, ...]:
        """Pairs that dominate the whole run together, and how many of each; for both orders where they differ."""
        count, pairs = int(self.release.participations), self.dominating_pairs()
        if self.is_sampled and pairs:
            return (((SampledPair(self.batch_pair(), float(self.release.rate)), count),),)
        return (tuple((pair, number * count) for pair, number in pairs),) if pairs else ()

    def step_of(self, units: int) -> Run:
        """Pairs that dominate a step that uses so many units of a group, all of them replaced; or none."""
        return ()

    @property
    def is_tagged(self) -> bool:
        """Whether Poisson batches are drawn, and both neighbours may show who is in them."""
        return False

    def group(self, units: int, examples: int | None = None) -> tuple[Run, ...]:
        """Pairs that dominate the whole run where a group of units is replaced, as in :meth:`whole_run`; or none."""
        if units == 1:
            return self.whole_run()
        count = int(self.release.participations)
        if not (self.is_sampled or self.is_tagged):
            step = self.step_of(units)
            return (tuple((pair, number * count) for pair, number in step),) if step else ()
        used, chances = self._used(units, examples)
        parts = tuple((chance, _single(self.step_of(number))) for number, chance in chances)
        mixed = parts[0][1] if len(parts) == 1 else MixedPair(parts)
        thinned = SampledPair if self.is_sampled else TaggedPair
        return (((thinned(mixed, used) if used < 1 else mixed, count),),)

    def split_group(self, units: int) -> tuple[Run, ...]:
        """The same where each of a group has its own noise and steps, so that balls in bins amplify; else none."""
        return ()

    def allocated_runs(self, coarse: bool = False) -> tuple[Run, ...]:
        """Balls in bins, for both orders of the neighbours; none where they do not amplify; ``coarse``: faster."""
        reference = self.reference()
        if not self.is_allocated or reference is None or not amplifies(reference):
            return ()
        pairs = _allocation_pairs(reference, self.release.slots, self.release.adjacency == "zero-out", coarse)
        return tuple(((pair, int(self.release.participations)),) for pair in pairs)

    def tightest_runs(self) -> tuple[Run, ...]:
        """Those of :meth:`allocated_runs` where there are any, and otherwise of :meth:`whole_run`."""
        return self.allocated_runs() or self.whole_run()

    @property
    def tightest_theorem(self) -> str:
        """What figures of :meth:`tightest_runs` rest on."""
        return self._allocated_theorem if self.allocated_runs() else self.run_theorem

    def _used(self, units: int, examples: int | None) -> tuple[float, tuple[tuple[int, float], ...]]:
        """How probable it is that a step uses any of a group, and then how many, rounded up, with what probability."""
        rate = float(self.release.rate)
        if self.release.sampling == "poisson":
            law = scipy.stats.binom(units, rate)
        elif examples is None:
            allowed = "with several records of a person: full, shuffled, poisson, balls-in-bins; a run has all"
            raise InputError(key="sampling", given=self.release.sampling, allowed=allowed)
        else:
            law = scipy.stats.hypergeom(examples, units, round(rate * examples))
        likely = law.ppf(scipy.stats.norm.cdf(np.arange(-7.0, 7.5, 0.5)))
        ends = np.unique(np.concatenate([np.arange(min(units, _FEW) + 1), likely, [units]])).astype(np.int64)
        beyond = law.sf(ends)
        chances = beyond[:-1] - beyond[1:]
        kept = chances > 0
        pairs = zip(ends[1:][kept].tolist(), (chances[kept] / beyond[0]).tolist(), strict=True)
        return float(beyond[0]), tuple(pairs)

    def numerical_claims(self, known: float) -> list[Claim]:
        """Claims that take longer, and may be smaller than the finite epsilon ``known``."""
        if not self.dominating_pairs():
            return []
        epsilon = _largest_epsilon(self.whole_run(), float(self.release.delta), known)
        return [] if epsilon is None else [Claim(epsilon, self.run_theorem)]

    @property
    def is_allocated(self) -> bool:
        """Whether examples choose one of several steps of a pass, which amplifies."""
        return self.release.sampling == "balls-in-bins" and self.release.slots > 1

    @property
    def delta_of_sampling(self) -> float:
        """The part of delta that the sampling itself may cost."""
        return 0.0

    def allocated_claims(self, known: float, coarse: bool = False) -> list[Claim]:
        """What balls in bins prove, if anything; ``coarse``: faster, and no smaller than it has to be."""
        delta = float(self.release.delta) - self.delta_of_sampling
        runs = self.allocated_runs(coarse) if delta > 0 else ()
        epsilon = _allocated_epsilon(runs, delta, known) if runs else None
        return [] if epsilon is None else [Claim(epsilon, self._allocated_theorem)]

    @property
    def _allocated_theorem(self) -> str:
        reference = self.reference()
        return f"{'' if reference is None else reference.theorem}{_ALLOCATED}{COMPOSED_NUMERICALLY}"

    def best(self) -> Claim:
        """The smallest claim of all."""
        cheap = smallest(self.cheap_claims())
        if math.isinf(cheap.epsilon):
            return cheap
        # The coarser of two grids is sometimes the tighter one, and a run went by it.
        quick = self.allocated_claims(cheap.epsilon, coarse=True)
        return smallest([cheap, *self.numerical_claims(cheap.epsilon), *quick])

    def running_claims(self) -> list[Claim]:
        """Claims for a run that goes on: a few milliseconds, and never smaller than the best."""
        cheap = self.cheap_claims()
        return [*cheap, *self.allocated_claims(smallest(cheap).epsilon, coarse=True)]

    @property
    def pair_theorem(self) -> str:
        """What dominating_pairs rests on."""
        return ""

    @property
    def run_theorem(self) -> str:
        """What figures of the composed pairs of :meth:`whole_run` rest on."""
        return f"{self.pair_theorem}{SAMPLED_DELTA if self.is_sampled else ''}{COMPOSED_NUMERICALLY}"

    @property
    def is_sampled(self) -> bool:
        """Whether batches of a fixed size are drawn and amplify."""
        return self.release.sampling == "fixed" and self.release.rate < 1

    def notes(self) -> tuple[str, ...]:
        """What a reader must know besides the figures. Heuristics are labelled so."""
        shuffled = "Shuffled passes: a pass is one participation (parallel composition); no amplification is claimed."
        if self.release.sampling == "balls-in-bins":
            return (CLIENTS, self._other_samplings())
        return (CLIENTS, shuffled) if self.release.sampling == "shuffled" else (CLIENTS,)

    def _other_samplings(self) -> str:
        """The figures of the same run with batches that are drawn in other ways."""
        passes, slots = int(self.release.participations), self.release.slots
        shuffled = replace(self.release, sampling="shuffled", adjacency="replace-one")
        poisson = replace(shuffled, sampling="poisson", rate=1 / slots, participations=passes * slots)
        figures = [type(self)(each).best().epsilon if passes else 0.0 for each in (shuffled, poisson)]
        return (
            f"The same noise proves epsilon {figures[0]:.4g} for shuffled and {figures[1]:.4g} for Poisson batches, "
            "both under replace-one."
        )


def _single(run: Run) -> Pair:
    """One pair of what a step releases."""
    return run[0][0] if len(run) == run[0][1] == 1 else ComposedPair(run)


class NoProof(Proof):
    """No mechanism, or one about which no theorem is known."""

    no_reference: ClassVar[str] = (
        "nothing is proven about this mechanism; without noise an upload is a fixed function of the data that went "
        "into it"
    )

    @override
    def nominal(self) -> Claim:
        return Claim(math.inf, "none is claimed")

    @override
    def pure(self) -> Claim:
        return Claim(math.inf, self.no_reference)

    @override
    def cheap_claims(self) -> list[Claim]:
        return [self.pure()]

    @override
    def notes(self) -> tuple[str, ...]:
        return ()


def _largest_epsilon(runs: tuple[Run, ...], delta: float, known: float) -> float | None:
    """Of composed pairs for both orders of the neighbours; ``None`` where one is out of range."""
    epsilons = [composed_epsilon(parts, delta, known) for parts in runs]
    return None if None in epsilons else max(epsilon for epsilon in epsilons if epsilon is not None)


_allocated_epsilon = lru_cache(maxsize=1024)(_largest_epsilon)  # a run asks again after each round


@lru_cache(maxsize=64)
def _allocation_pairs(
    reference: CeilingReference, slots: int, zero_out: bool, coarse: bool
) -> tuple[AllocationPair, ...]:
    if not zero_out:
        return (AllocationPair(reference, slots, coarse),)
    goes = ZeroOutAllocationPair(reference, slots, coarse)
    return goes, goes.exchanged
