"""Objective perturbation: a random term in the objective (Chaudhuri, Monteleoni and Sarwate 2011, Algorithm 2).

Noise on the weights covers the solver's error (Iyengar et al. 2019, Algorithm 1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms.machinery.model_noise import Fit, ModelNoiseSettings, Weights, length_of_noise, spread_noise

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.accounting.convex_models import ObjectiveTerms, Problem


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
