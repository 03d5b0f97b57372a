"""Noise on a trained convex model, which is released once, and no gradients.

Output perturbation adds it to the weights (Chaudhuri, Monteleoni and Sarwate 2011; Wu et al. 2017). Objective
perturbation is a random term in the objective (Chaudhuri et al. 2011, Algorithm 2), with noise on the weights that
covers the solver's error (Iyengar et al. 2019, Algorithm 1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import TypeAliasType, override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Epsilon
from fedpriv.mechanisms.machinery.base import Mechanism, MechanismSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedpriv.accounting.convex_models import ObjectiveTerms, Problem
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


Weights = TypeAliasType("Weights", "NDArray[np.float64]")
"""(rows, d): one row for two classes, else one a class."""

Fit = Callable[[float, "Weights | None"], "Weights"]
"""From lambda, and a vector v of a term <v, w> in the objective or ``None``, to the minimum."""


class ModelNoiseSettings(MechanismSettings):
    """Settings of noise on a convex model, by the epsilon that it proves; :meth:`scale` is it in numbers."""

    on_gradients: ClassVar[bool] = False

    unit: Literal["example"] = Field("example", description="what is protected: one example")
    target_epsilon: Epsilon = Field(description="of the one model that a client releases")

    @property
    @override
    def noise(self) -> float:
        return self.target_epsilon

    @override
    def with_noise(self, noise: float) -> Self:
        return self.model_copy(update={"target_epsilon": noise})

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        raise InputError(key="mechanism.name", given=self.name, allowed="noise on a model and releases no gradients")

    @abstractmethod
    def released(self, problem: Problem, fit: Fit, generator: np.random.Generator) -> Weights:
        """Return the weights that may leave the client."""

    @abstractmethod
    def scale(self, problem: Problem) -> float:
        """Return the scale of the noise."""

    def solved(self, problem: Problem) -> tuple[Problem, float]:
        """Return what the solver is given: the problem, and the longest term of noise in it, but for 1e-30 of them."""
        return problem, 0.0

    @abstractmethod
    def shift(self, problem: Problem, tail: float) -> float:
        """Return a length by which noise moves the weights, exceeded with probability ``tail`` at most."""

    @abstractmethod
    def longest(self, problem: Problem, tail: float) -> float:
        """Return a length that the weights exceed with probability ``tail`` at most."""


def spread_noise(distribution: str, scale: float, shape: tuple[int, ...], generator: np.random.Generator) -> Weights:
    """Return noise for a vector that moves by a length: normal, or of density proportional to exp(-length / scale)."""
    import numpy as np

    normal = generator.standard_normal(shape)
    if distribution == "gaussian":
        return scale * normal
    return generator.gamma(normal.size, scale) * normal / np.sqrt((normal**2).sum())


def length_of_noise(distribution: str, scale: float, dimension: int, tail: float) -> float:
    """Return a length that :func:`spread_noise` exceeds with probability ``tail`` at most."""
    from scipy.special import gammainccinv

    from fedpriv.mechanisms.machinery.clipping import normal_norm

    unit = normal_norm(dimension, 1.0, tail) if distribution == "gaussian" else float(gammainccinv(dimension, tail))
    return scale * unit


@MECHANISMS.register
class OutputSettings(ModelNoiseSettings):
    """Train, then add noise to the weights."""

    title: ClassVar[str] = "output perturbation"
    label: ClassVar[str] = "output perturbation"
    colours: ClassVar[tuple[str, str]] = ("#8C564B", "#C49C94")
    marker: ClassVar[str] = "v"
    proven_by: ClassVar[str] = "fedpriv.accounting.convex_models:OutputProof"

    name: Literal["output"] = Field("output", description="privacy mechanism")
    distribution: Literal["gaussian", "laplace"] = Field(
        "gaussian", description="noise; laplace: of a density that falls with its length, for pure epsilon"
    )

    @property
    @override
    def law(self) -> str:
        return self.distribution

    @override
    def scale(self, problem: Problem) -> float:
        from fedpriv.accounting.convex_models import output_scale

        return output_scale(problem, self.target_epsilon, self.distribution, self.delta)

    @override
    def released(self, problem: Problem, fit: Fit, generator: np.random.Generator) -> Weights:
        shape = problem.rows, problem.features
        return fit(problem.regularisation, None) + spread_noise(
            self.distribution, self.scale(problem), shape, generator
        )

    @override
    def shift(self, problem: Problem, tail: float) -> float:
        return length_of_noise(self.distribution, self.scale(problem), problem.dimension, tail)

    @override
    def longest(self, problem: Problem, tail: float) -> float:
        return problem.longest + self.shift(problem, tail)


@MECHANISMS.register
class ObjectiveSettings(ModelNoiseSettings):
    """Train on an objective that has noise in it; two classes."""

    title: ClassVar[str] = "objective perturbation"
    label: ClassVar[str] = "objective perturbation"
    colours: ClassVar[tuple[str, str]] = ("#7F7F00", "#BCBD22")
    marker: ClassVar[str] = "^"
    proven_by: ClassVar[str] = "fedpriv.accounting.convex_models:ObjectiveProof"

    name: Literal["objective"] = Field("objective", description="privacy mechanism")

    @override
    def scale(self, problem: Problem) -> float:
        return self._terms(problem).scale

    @override
    def released(self, problem: Problem, fit: Fit, generator: np.random.Generator) -> Weights:
        terms = self._terms(problem)
        shape = problem.rows, problem.features
        tilt = spread_noise("laplace", terms.scale, shape, generator)
        weights = fit(terms.regularisation, tilt / problem.examples)
        return weights + spread_noise("laplace", terms.cover, shape, generator)

    @override
    def solved(self, problem: Problem) -> tuple[Problem, float]:
        from fedpriv.accounting.convex_models import SOLVER_TAIL

        terms = self._terms(problem)
        length = length_of_noise("laplace", terms.scale, problem.dimension, SOLVER_TAIL)
        return replace(problem, regularisation=terms.regularisation), length / problem.examples

    @override
    def shift(self, problem: Problem, tail: float) -> float:
        # The gradient changes by b / n everywhere, and the objective is strongly convex.
        terms = self._terms(problem)
        length = length_of_noise("laplace", terms.scale, problem.dimension, tail / 2)
        cover = length_of_noise("laplace", terms.cover, problem.dimension, tail / 2)
        return length / (problem.examples * terms.regularisation) + cover

    @override
    def longest(self, problem: Problem, tail: float) -> float:
        # More regularisation than lambda makes the minimum without noise no longer.
        return problem.longest + self.shift(problem, tail) + problem.tolerance / problem.regularisation

    def _terms(self, problem: Problem) -> ObjectiveTerms:
        from fedpriv.accounting.convex_models import objective_terms

        return objective_terms(problem, self.target_epsilon)
