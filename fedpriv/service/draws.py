"""The noise of answers: a function of a secret, or from OpenDP's exact samplers, which nothing repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeAliasType, override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.names import Adjacency
from fedpriv.mechanisms.machinery.model_noise import spread_noise
from fedpriv.models.machinery.convex import softmax

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedpriv.accounting.convex_models import ClaimedSensitivity
    from fedpriv.core.records import Guarantee

_GRID = 20  # bits of the noise's scale that an answer shows

Array = TypeAliasType("Array", "NDArray[np.float64]")

Scores = TypeAliasType("Scores", "NDArray[np.float64]")
"""(n, classes): logits, or counts of votes."""

EXAMPLE = Adjacency.REPLACE_ONE.worded("one example of any client is another one; the number of examples is public")


@dataclass(frozen=True)
class Facts:
    """Public sizes that a guarantee rests on."""

    classes: int  # C
    sensitivity: float = 0.0  # Delta of the convex head's weights; 0 without one
    norm: float = 0.0  # R, the length of its features
    features: int = 0  # d, how many
    models: int = 0  # that vote; 0 without votes
    adjacency: str = EXAMPLE  # which two data sets must look alike, in words
    # what Lu et al. claim of the run's network; `None`: their formulas are not for it.
    claimed: ClaimedSensitivity | None = None
    # what is proven of the other run whose network gives the features; `None`: they are public
    learnt: Guarantee | None = None


@dataclass(frozen=True)
class Draws:
    """What noise some answers take."""

    scale: float = 0.0  # of the noise; what it is the scale of is the policy's business
    generators: Sequence[np.random.Generator] = ()  # one an image
    facts: Facts | None = None  # public sizes, for a policy whose noise depends on them

    def spread(self, distribution: str, values: Array) -> Array:
        """Return arrays (n, ...) with noise on each."""
        import numpy as np

        shape = values.shape[1:]
        return values + np.stack([spread_noise(distribution, self.scale, shape, each) for each in self.generators])

    def laplace(self, values: Array) -> Array:
        """Return numbers (n,) with Laplace noise on each."""
        import numpy as np

        noise = np.array([generator.laplace(scale=self.scale) for generator in self.generators])
        return values + noise

    def named(self, scores: Scores) -> NDArray[np.int64]:
        """Return a class for each row (n, classes): v with probability proportional to exp(score_v / scale)."""
        return one_a_row(softmax(scores / self.scale), self.generators)


@dataclass(frozen=True)
class ExactDraws(Draws):
    """Noise by OpenDP's samplers, from the operating system's randomness; there are no generators.

    Normal and Laplace noise are discrete, on the multiples of 2^-1074, which all float64 are; what was added up exactly
    is rounded to float64 once (OpenDP's proofs of make_gaussian and make_laplace). A class is that of the largest score
    with Gumbel noise, compared in as many digits as it takes, which is the exponential mechanism.
    """

    @override
    def spread(self, distribution: str, values: Array) -> Array:
        """Return arrays with normal noise; see :meth:`Draws.spread`."""
        import numpy as np

        if distribution != "gaussian":
            raise ValueError("OpenDP draws no noise whose density falls with a vector's length")
        dp = opendp()
        noisy = self._measured(dp.m.make_gaussian, dp.l2_distance(T=float))
        return np.array([noisy(row.ravel().tolist()) for row in values]).reshape(values.shape)

    @override
    def laplace(self, values: Array) -> Array:
        import numpy as np

        dp = opendp()
        return np.array(self._measured(dp.m.make_laplace, dp.l1_distance(T=float))(values.tolist()))

    @override
    def named(self, scores: Scores) -> NDArray[np.int64]:
        import numpy as np

        dp = opendp()
        largest = self._measured(dp.m.make_noisy_max, dp.linf_distance(T=float), dp.zero_concentrated_divergence())
        return np.array([largest(row) for row in scores.tolist()], dtype=np.int64)

    def _measured(self, make: Callable[..., Any], *space: Any) -> Callable[[list[float]], Any]:
        dp = opendp()
        return make(dp.vector_domain(dp.atom_domain(T=float, nan=False)), *space, scale=self.scale)


@cache
def opendp() -> Any:
    """Return OpenDP, with what it calls contributed: proofs of its noise that were not all vetted yet."""
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise InputError(
            f"service.randomness = 'opendp' needs OpenDP ({one_line(error)}); pip install 'fedpriv[opendp]'"
        ) from None
    dp.enable_features("contrib")
    return dp


def one_a_row(shares: Scores, generators: Sequence[np.random.Generator]) -> NDArray[np.int64]:
    """Draw a class for each row of probabilities (n, classes), each from a generator of its own; returns (n,)."""
    import numpy as np

    uniform = np.array([generator.random() for generator in generators])
    bounds = shares.cumsum(axis=1)
    return (uniform[:, None] * bounds[:, -1:] >= bounds[:, :-1]).sum(axis=1)


def on_grid(noisy: Array, scale: float) -> Array:
    """Round what has noise on it to multiples of a power of two, about a millionth of the noise's scale.

    Noise in floating point is no normal or Laplace noise to its last bits, and these tell which number it was added to
    (Mironov 2012). Rounding afterwards is post-processing: no figure changes, and those bits are gone.
    """
    import numpy as np

    step = 2.0 ** (math.floor(math.log2(scale)) - _GRID)
    return np.round(noisy / step) * step
