"""What the ledger must know of one client's releases: parameters and counts, never data or gradients."""

import math
import numbers
from dataclasses import dataclass
from typing import get_args

from fedpriv.errors import InputError
from fedpriv.names import AdjacencyName, MechanismName, SamplingName, UnitName

__all__ = [
    "LARGEST_KAPPA",
    "LARGEST_SCALE",
    "LARGEST_SIGMA",
    "NOISE_PARAMETERS",
    "SMALLEST_SCALE",
    "SMALLEST_SIGMA",
    "Release",
    "release_with",
]

LARGEST_KAPPA = 1e7
SMALLEST_SIGMA, LARGEST_SIGMA = 1e-9, 1e12
SMALLEST_SCALE, LARGEST_SCALE = 1e-9, 1e12
SMALLEST_RATE = 1e-12
LARGEST_PARTICIPATIONS = 10**15
LARGEST_DIMENSION = 10**12

NOISE_PARAMETERS: dict[MechanismName, str] = {"gaussian": "sigma", "laplace": "scale", "vmf": "kappa", "hgm": "sigma"}
"""For each mechanism with noise the field of :class:`Release` that says how much."""


@dataclass(frozen=True)
class Release:
    """One client's releases over a run.

    Attributes:
        mechanism: none; gaussian (each unit clipped to clip_norm, noise of standard deviation sigma * clip_norm added
            to the sum, divided by a public number); laplace (each unit clipped to clip_norm in the L1 norm, Laplace
            noise of scale ``scale * clip_norm`` added to each coordinate of the sum); vmf (each unit's blocks replaced
            by VMF draws around their directions); hgm (each unit x clipped to |x / sqrt(K r)| <= clip_norm, noise of
            standard deviation sigma * clip_norm * sqrt(K r_k) added to coordinate k of the sum, r public).
        unit: what is protected: one example of the client, or the client's whole update.
        sampling: shuffled: disjoint batches of a pass; fixed: B of n without replacement; poisson: each example with
            probability rate; full: no sampling (always so for unit = update).
        rate: q = B / n from 1e-12 to 1; not read for shuffled and full.
        participations: the most often one unit may have been used: passes (shuffled), steps (fixed, poisson, full), or
            uploads (unit = update). From 0 to 1e15.
        dimensions: K of each block, from 1 to 1e12 each; read for vmf only.
        kappa: concentration of the vmf, in [0, 1e7]; read for vmf only.
        sigma: noise over clip_norm, in [1e-9, 1e12]; read for gaussian and hgm only.
        scale: noise scale over clip_norm, in [1e-9, 1e12]; read for laplace only.
        clip_norm: C, above 0. No figure depends on it, because sigma and scale are in its unit.
        delta: of the (epsilon, delta) statement, in (0, 1).
        adjacency: which two data sets must look alike. replace-one: one unit is replaced by any other. zero-out: one
            example is replaced by one that adds zero, the number of examples being public; only for gaussian and hgm
            with poisson.

    Raises:
        InputError: a field out of range, with what was given and what is allowed.
    """

    mechanism: MechanismName
    unit: UnitName
    sampling: SamplingName
    rate: float
    participations: int
    dimensions: tuple[int, ...]
    kappa: float | None
    sigma: float | None
    scale: float | None
    clip_norm: float
    delta: float
    adjacency: AdjacencyName = "replace-one"

    def __post_init__(self) -> None:
        _check_choice("mechanism", self.mechanism, get_args(MechanismName))
        _check_choice("unit", self.unit, get_args(UnitName))
        _check_choice("sampling", self.sampling, get_args(SamplingName))
        _check_choice("adjacency", self.adjacency, get_args(AdjacencyName))
        if self.unit == "update" and self.sampling != "full":
            raise InputError(
                f"sampling = {self.sampling}: with unit = update allowed is full, the update is not sampled"
            )
        if self.adjacency == "zero-out" and (self.mechanism not in ("gaussian", "hgm") or self.sampling != "poisson"):
            raise InputError(
                f"adjacency = zero-out: with mechanism = {self.mechanism} and sampling = {self.sampling} allowed is "
                "replace-one; zero-out is for gaussian and hgm with poisson"
            )
        _check_range("rate", self.rate, SMALLEST_RATE, 1.0)
        _check(
            _is_count(self.participations, 0, LARGEST_PARTICIPATIONS),
            "participations",
            self.participations,
            "a whole number from 0 to 1e15",
        )
        _check(_is_number(self.clip_norm) and self.clip_norm > 0, "clip_norm", self.clip_norm, "above 0, finite")
        _check(_is_number(self.delta) and 0 < self.delta < 1, "delta", self.delta, "between 0 and 1, both excluded")
        if self.mechanism in ("gaussian", "hgm"):
            _check_range("sigma", self.sigma, SMALLEST_SIGMA, LARGEST_SIGMA)
        if self.mechanism == "laplace":
            _check_range("scale", self.scale, SMALLEST_SCALE, LARGEST_SCALE)
        if self.mechanism == "vmf":
            self._check_vmf()

    def _check_vmf(self) -> None:
        _check_range("kappa", self.kappa, 0.0, LARGEST_KAPPA)
        # A set, because there may be millions of blocks of one size.
        sizes = set(self.dimensions)
        fine = len(sizes) > 0 and all(_is_count(size, 1, LARGEST_DIMENSION) for size in sizes)
        _check(fine, "dimensions", self.dimensions, "at least one block, of whole numbers from 1 to 1e12")


def release_with(
    noise: float,
    delta: float,
    *,
    mechanism: MechanismName,
    sampling: SamplingName,
    rate: float,
    participations: int,
    dimensions: tuple[int, ...] = (1,),
    unit: UnitName = "example",
    adjacency: AdjacencyName = "replace-one",
) -> Release:
    """Return the release of a mechanism with this sigma, scale or kappa.

    Raises:
        InputError: a mechanism without noise, or an argument out of range.
    """
    if mechanism not in NOISE_PARAMETERS:
        raise InputError(f"mechanism = {mechanism}: has no noise; allowed is {', '.join(NOISE_PARAMETERS)}")
    parameter = NOISE_PARAMETERS[mechanism]
    return Release(
        mechanism,
        unit,
        sampling,
        rate,
        participations,
        dimensions,
        kappa=noise if parameter == "kappa" else None,
        sigma=noise if parameter == "sigma" else None,
        scale=noise if parameter == "scale" else None,
        clip_norm=1.0,
        delta=delta,
        adjacency=adjacency,
    )


def _check_choice(name: str, given: object, allowed: tuple[str, ...]) -> None:
    _check(given in allowed, name, given, ", ".join(allowed))


def _check_range(name: str, given: float | None, least: float, most: float) -> None:
    fine = given is not None and _is_number(given) and least <= given <= most
    _check(fine, name, given, f"from {least:g} to {most:g}")


def _check(fine: bool, name: str, given: object, allowed: str) -> None:
    if not fine:
        raise InputError(f"{name} = {given}: allowed is {allowed}")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def _is_count(value: object, least: int, most: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and least <= int(value) <= most
