"""The formulas of Lu et al. 2022, which prove nothing: reproduced for comparison with what is measured and proven.

Lu, Asghar, Kaafar, Webb and Dickinson: A Differentially Private Framework for Deep Learning with Convexified Loss
Functions, IEEE TIFS 2022 (arXiv 2204.01049). The figures are functions of public sizes alone and are no bounds: a
network with the "convexified" loss is not convex, and where the loss is convex one example may weigh more than 1/n.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ClaimedSensitivity:
    """What the paper claims of a network with one hidden layer of tanh units, without biases."""

    inputs: int  # m, features of an example
    hidden: int  # h, hidden units
    classes: int  # C
    examples: int  # n
    regularisation: float  # lambda

    @property
    def weights(self) -> int:
        """|W| = m h + h C."""
        return self.hidden * (self.inputs + self.classes)

    @property
    def lipschitz(self) -> float:
        """rho of Proposition 1, with the largest neuron 1: (C - 1) sqrt(m h) / (C h)."""
        return (self.classes - 1) * math.sqrt(self.inputs * self.hidden) / (self.classes * self.hidden)

    @property
    def weight(self) -> float:
        """Delta omega of Eq. 18: 2 rho / (lambda n sqrt(|W|))."""
        return 2 * self.lipschitz / (self.regularisation * self.examples * math.sqrt(self.weights))

    @property
    def model(self) -> float:
        """The claimed distance of two models, Theorem 4: 2 rho / (lambda n)."""
        return 2 * self.lipschitz / (self.regularisation * self.examples)

    @property
    def logit(self) -> float:
        """Delta z of Corollary 1: h Delta omega."""
        return self.hidden * self.weight

    @property
    def probability(self) -> float:
        """Delta p of Corollary 2: exp(2 Delta z) - 1, at most 1."""
        return min(math.expm1(2 * self.logit), 1.0)
