"""The ledger's description of one client's releases: parameters and counts, never data or gradients."""

import math
import numbers
from dataclasses import dataclass
from typing import get_args

from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, SamplingName, UnitName
from fedpriv.core.registry import MECHANISMS

SMALLEST_RATE = 1e-12
LARGEST_PARTICIPATIONS = 10**15
LARGEST_DIMENSION = 10**12
LARGEST_ROUNDS = 10**7  # over which noise is correlated


@dataclass(frozen=True)
class NoiseParameter:
    """The parameter that sets a mechanism's noise, and the range that calibration searches."""

    name: str  # as in the settings
    meaning: str  # in words
    least: float  # the value with the least noise
    most: float  # the value with the most noise
    floor: float  # the smallest value that is accounted for

    @property
    def ceiling(self) -> float:
        """The largest value that is accounted for."""
        return max(self.least, self.most)

    def at(self, log_noise: float) -> float:
        """Return the value with this logarithm; exp(log(x)) may lie a rounding beyond x."""
        return min(max(math.exp(log_noise), min(self.least, self.most)), self.ceiling)


SIGMA = NoiseParameter("sigma", "standard deviation of the noise on the sum, over clip_norm", 1e-9, 1e12, 1e-9)
SCALE = NoiseParameter("scale", "scale of the Laplace noise on the sum, over clip_norm", 1e-9, 1e12, 1e-9)
KAPPA = NoiseParameter("kappa", "concentration of each draw: the smaller, the more noise", 1e7, 1e-12, 0.0)


@dataclass(frozen=True)
class Correlation:
    """Over which rounds noise is correlated, and in which of them one unit may be."""

    band: int  # of how many rounds one release has noise, from 1 (independent noise) to ``rounds``
    separation: int  # a unit is in at most one of so many rounds in a row
    participations: int  # a unit is in so many rounds at most
    rounds: int  # of the whole run

    def __post_init__(self) -> None:
        largest = {"rounds": LARGEST_ROUNDS, "band": self.rounds, "separation": self.rounds}
        for name, most in largest.items():
            given = getattr(self, name)
            _check(_is_count(given, 1, most), name, given, f"a whole number from 1 to {most:,}")

    def most(self, rounds: int) -> int:
        """In how many of the first rounds a unit is at most."""
        return min(self.participations, -(-rounds // self.separation))


@dataclass(frozen=True)
class Release:
    """One client's releases over a run.

    Raises:
        InputError: a field out of range, with what was given and what is allowed.
    """

    mechanism: str  # as in the settings; what it does to the sum its proof says (:meth:`MechanismSettings.proof`)
    unit: UnitName  # what is protected: one example of the client, or the client's whole update
    # shuffled: disjoint batches of a pass; fixed: B of n without replacement; poisson: each example with probability
    # rate; balls-in-bins: each example in one of 1 / rate steps of a pass; full: no sampling (always so for unit =
    # update, unless the proof is about the sum of whole clients' updates, of which fixed and poisson then draw)
    sampling: SamplingName
    rate: float  # q = B / n from 1e-12 to 1; not read for shuffled and full
    # the most often one unit may have been used: passes (shuffled, balls-in-bins), steps (fixed, poisson, full), or
    # uploads (unit = update). From 0 to 1e15.
    participations: int
    dimensions: tuple[int, ...]  # K of each block, from 1 to 1e12 each; read where each block has a draw of its own
    # the mechanism's own parameter (sigma in [1e-9, 1e12], scale in [1e-9, 1e12], kappa in [0, 1e7], or the epsilon of
    # a release), ``None`` where there is none. No figure depends on clip_norm, because sigma and scale are in its unit.
    noise: float | None
    delta: float  # of the (epsilon, delta) statement, in (0, 1)
    # which two data sets must look alike. replace-one: one unit is replaced by any other. zero-out: one example is
    # replaced by one that adds zero (with vmf, a uniform direction), the number of examples being public; only with
    # balls-in-bins, with poisson, or for clients' updates in a sum, where it is proven.
    adjacency: AdjacencyName = "replace-one"
    law: str | None = None  # of the noise, for mechanisms that have several
    # of the noise of several rounds; only where the mechanism has one, and there always
    correlation: Correlation | None = None

    @property
    def slots(self) -> int:
        """The steps of a pass, for balls-in-bins."""
        return max(1, math.floor(1 / self.rate + 1e-6))

    def __post_init__(self) -> None:
        _check_choice("mechanism", self.mechanism, tuple(MECHANISMS))
        _check_choice("unit", self.unit, get_args(UnitName))
        _check_choice("sampling", self.sampling, get_args(SamplingName))
        _check_choice("adjacency", self.adjacency, get_args(AdjacencyName))
        proof = MECHANISMS[self.mechanism].proof()
        if self.unit == "update" and self.sampling != "full" and not proof.whole_clients:
            raise InputError(
                key="sampling",
                given=self.sampling,
                allowed="with unit = 'update' allowed is full, the update is not sampled",
            )
        if proof.whole_clients and self.unit != "update":
            raise InputError(
                key="unit",
                given=self.unit,
                allowed=f"with mechanism = {self.mechanism!r} allowed is update, a client's whole data",
            )
        if proof.correlates != (self.correlation is not None):
            wanted = "over how many rounds its noise is correlated" if proof.correlates else "none: its noise is not"
            raise InputError(key="correlation", given=self.correlation, allowed=wanted)
        at_server = proof.whole_clients or proof.correlates
        summed = self.sampling == "poisson" or (at_server and self.sampling == "full")
        allocated = self.sampling == "balls-in-bins" and "balls-in-bins" in proof.amplifying
        if self.adjacency == "zero-out" and not (allocated or (proof.zero_out and summed)):
            proven = " and ".join(name for name, kind in MECHANISMS.items() if kind.proof().zero_out)
            raise InputError(
                key="adjacency",
                given=self.adjacency,
                allowed=f"with mechanism = {self.mechanism!r} and sampling = {self.sampling!r} allowed is replace-one; "
                f"zero-out is for {proven} with poisson, and for batches by balls-in-bins",
            )
        _check_range("rate", self.rate, SMALLEST_RATE, 1.0)
        _check(
            _is_count(self.participations, 0, LARGEST_PARTICIPATIONS),
            "participations",
            self.participations,
            "a whole number from 0 to 1e15",
        )
        _check(_is_number(self.delta) and 0 < self.delta < 1, "delta", self.delta, "between 0 and 1, both excluded")
        if proof.parameter is not None:
            _check_range(proof.parameter.name, self.noise, proof.parameter.floor, proof.parameter.ceiling)
        # A set, because there may be millions of blocks of one size.
        sizes = set(self.dimensions)
        fine = len(sizes) > 0 and all(_is_count(size, 1, LARGEST_DIMENSION) for size in sizes)
        _check(fine, "dimensions", self.dimensions, "at least one block, of whole numbers from 1 to 1e12")


def release_with(
    noise: float,
    delta: float,
    *,
    mechanism: str,
    sampling: SamplingName,
    rate: float,
    participations: int,
    dimensions: tuple[int, ...] = (1,),
    unit: UnitName = "example",
    adjacency: AdjacencyName = "replace-one",
    correlation: Correlation | None = None,
) -> Release:
    """Return the :class:`Release` with these fields; by default of examples, and of one number.

    Always give ``dimensions`` for ``vmf``, whose epsilon falls with them, and ``distributed``, whose epsilon grows.

    Raises:
        InputError: an argument out of range.
    """
    return Release(
        mechanism, unit, sampling, rate, participations, dimensions, noise, delta, adjacency, correlation=correlation
    )


def _check_choice(name: str, given: object, allowed: tuple[str, ...]) -> None:
    _check(given in allowed, name, given, ", ".join(allowed))


def _check_range(name: str, given: float | None, least: float, most: float) -> None:
    fine = given is not None and _is_number(given) and least <= given <= most
    _check(fine, name, given, f"from {least:g} to {most:g}")


def _check(fine: bool, name: str, given: object, allowed: str) -> None:
    if not fine:
        raise InputError(key=name, given=given, allowed=f"allowed is {allowed}")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def _is_count(value: object, least: int, most: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and least <= int(value) <= most
