"""The base of mechanisms that release a trained convex model once, and no gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import TypeAliasType, override

from fedpriv.core.errors import InputError
from fedpriv.core.settings import Epsilon
from fedpriv.mechanisms.machinery.base import Mechanism, MechanismSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedpriv.accounting.convex_models import Problem
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
