"""Output perturbation: noise on a trained convex model (Chaudhuri, Monteleoni and Sarwate 2011; Wu et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms.machinery.model_noise import Fit, ModelNoiseSettings, Weights, length_of_noise, spread_noise

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.accounting.convex_models import Problem


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
