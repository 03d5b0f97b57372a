"""What an endpoint answers, by policy: what it shows of the scores, and what is proven; imported lazily.

The noise of answers is a function of a secret, or comes from OpenDP's exact samplers, which nothing repeats.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypeAliasType, override

from fedpriv.attacks.questions import Answers
from fedpriv.core.errors import InputError, one_line
from fedpriv.core.names import Adjacency
from fedpriv.core.registry import Registry
from fedpriv.core.settings import Epsilon, Positive, Real, Settings
from fedpriv.mechanisms.model_noise import spread_noise

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedpriv.accounting.convex_models import ClaimedSensitivity
    from fedpriv.core.records import Guarantee, Ledger
    from fedpriv.service.proof import AnswerRelease, Law

POLICIES = Registry(
    "answer policy", "fedpriv.service.policies", "fedpriv.answers", "fedpriv.service.policies:AnswerPolicy"
)

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
    claimed: "ClaimedSensitivity | None" = None
    # what is proven of the other run whose network gives the features; `None`: they are public
    learnt: "Guarantee | None" = None


@dataclass(frozen=True)
class Draws:
    """What noise some answers take."""

    scale: float = 0.0  # of the noise; what it is the scale of is the policy's business
    generators: "Sequence[np.random.Generator]" = ()  # one an image
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

    def named(self, scores: Scores) -> "NDArray[np.int64]":
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
    def named(self, scores: Scores) -> "NDArray[np.int64]":
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


def one_a_row(shares: Scores, generators: "Sequence[np.random.Generator]") -> "NDArray[np.int64]":
    """Draw a class for each row of probabilities (n, classes), each from a generator of its own; returns (n,)."""
    import numpy as np

    uniform = np.array([generator.random() for generator in generators])
    bounds = shares.cumsum(axis=1)
    return (uniform[:, None] * bounds[:, -1:] >= bounds[:, :-1]).sum(axis=1)


def softmax(logits: Scores) -> Scores:
    """Return the probabilities of logits (n, classes)."""
    from scipy import special

    return special.softmax(logits, axis=1)


def on_grid(noisy: Array, scale: float) -> Array:
    """Round what has noise on it to multiples of a power of two, about a millionth of the noise's scale.

    Noise in floating point is no normal or Laplace noise to its last bits, and these tell which number it was added to
    (Mironov 2012). Rounding afterwards is post-processing: no figure changes, and those bits are gone.
    """
    import numpy as np

    step = 2.0 ** (math.floor(math.log2(scale)) - _GRID)
    return np.round(noisy / step) * step


class AnswerPolicy(Settings):
    """The keys of ``[service]`` that one policy reads; a subclass with a name, entered in ``POLICIES``, is one."""

    name: ClassVar[str]  # as in `service.method`
    title: ClassVar[str]  # what it is called
    reference: ClassVar[str] = ""  # the paper
    # the key that stands behind a colon in the short form, such as `rounded:2`; empty: there is none
    argument: ClassVar[str] = ""
    # what it answers from: the run's network, the certified convex head, or votes of separate models
    source: ClassVar[Literal["network", "head", "votes"]] = "network"
    draws: ClassVar[bool] = False  # whether each answer takes fresh noise
    labels_only: ClassVar[bool] = False  # whether it never names a probability

    @abstractmethod
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        """Return what leaves the endpoint for scores (n, classes), with draws of noise, if the policy has any."""

    def noiseless(self, scores: Scores) -> Answers:
        """Return what leaves the endpoint without noise, for a policy that draws none."""
        return self.answer(scores, Draws())

    def check(self, ledger: "Ledger") -> None:
        """Refuse a run, by its ledger, whose answers could not be what the policy says they are."""

    def scale(self, facts: Facts, answers: int, delta: float) -> float:
        """Return the scale of the noise with which so many answers keep to the settings; 0: there is none."""
        return 0.0

    @property
    def repeats_noise(self) -> bool:
        """Whether its noise is a function of a secret."""
        return True

    def draws_of(self, scale: float, generators: "Sequence[np.random.Generator]", facts: Facts) -> Draws:
        """Return the noise of an endpoint's answers: one of generators for each, which may not be asked."""
        return Draws(scale, generators, facts)

    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        """Return what is proven about so many answers together; nothing, unless a policy says otherwise."""
        from fedpriv.accounting.proofs import Claim, stated

        nothing = Claim(math.inf, "no theorem stands for this heuristic")
        note = "heuristic: what these answers leak is what attacks find, at least"
        return stated(facts.adjacency, answers, delta, nothing, nothing, nothing, (note,))


REGULARISATION: Any = Field(1e-3, description="head, paper: lambda, of lambda/2 |W|^2 in the objective")
DISTRIBUTION: Any = Field(
    "gaussian", description="noise; laplace: pure epsilon (for labels and votes the exponential mechanism)"
)
Distribution = Literal["gaussian", "laplace"]


class NoisyPolicy(AnswerPolicy):
    """A policy whose noise is proven to protect; the level of one release is ``unit / scale``."""

    once: ClassVar[bool] = False  # whether all answers come from one release

    target_epsilon: Epsilon | None = Field(
        None, description="proven methods: epsilon of all answers together, at delta; or noise"
    )
    noise: Annotated[Real, Field(ge=1e-9, le=1e9)] | None = Field(
        None,
        description="proven methods: scale of the noise on weights, logits or votes; for labels the temperature",
    )
    delta: Annotated[Real, Field(ge=0, lt=1)] | None = Field(
        None, description="proven methods: of the statement; 0: pure epsilon; unset: mechanism.delta"
    )

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        if (self.target_epsilon is None) == (self.noise is None):
            raise InputError(f"method = {self.name!r} needs either target_epsilon or noise")
        if self.delta == 0 and self.law == "gaussian":
            raise InputError("normal noise proves nothing at delta = 0; use distribution = 'laplace'")
        return self

    @property
    @abstractmethod
    def law(self) -> "Law":
        """What one release is; see :mod:`fedpriv.service.proof`."""

    @abstractmethod
    def unit(self, facts: Facts) -> float:
        """Return the level of one release with noise of scale 1: what moves, at most."""

    @abstractmethod
    def theorem(self) -> str:
        """Return what the level rests on."""

    def release(self, facts: Facts, answers: int, delta: float, level: float) -> "AnswerRelease":
        """Return so many answers at a level, for the accounting."""
        from fedpriv.service.proof import AnswerRelease

        count = min(answers, 1) if self.once else answers
        return AnswerRelease(self.law, level, count, delta, facts.adjacency, self.theorem())

    @override
    def scale(self, facts: Facts, answers: int, delta: float) -> float:
        from fedpriv.service.proof import calibrated_level

        if self.noise is not None:
            return self.noise
        if self.target_epsilon is None:
            raise InputError("neither noise nor target_epsilon")
        return self.unit(facts) / calibrated_level(self.release(facts, answers, delta, 0.0), self.target_epsilon)

    @override
    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        from fedpriv.service.proof import answer_guarantee

        level = self.unit(facts) / self.scale(facts, answers, delta)
        return answer_guarantee(self.release(facts, answers, delta, level))


class DrawnPolicy(NoisyPolicy):
    """A proven policy that takes its noise through the methods of :class:`Draws` alone."""

    randomness: Literal["seeded", "opendp"] = Field(
        "seeded",
        description="proven methods: what draws noise. seeded: the run's secret, or its seed with noise = "
        "'reproducible'; opendp: OpenDP's exact samplers, which nothing repeats (pip install 'fedpriv[opendp]')",
    )

    @property
    @override
    def repeats_noise(self) -> bool:
        return self.randomness == "seeded"

    @override
    def check(self, ledger: "Ledger") -> None:
        super().check(ledger)
        self.draws_of(1.0, (), Facts(2))  # says now whether there is something that draws

    @override
    def draws_of(self, scale: float, generators: "Sequence[np.random.Generator]", facts: Facts) -> Draws:
        if self.repeats_noise:
            return super().draws_of(scale, generators, facts)
        opendp()
        return ExactDraws(scale, facts=facts)


_FEATURES = r"^(pixels|pooled:[1-9][0-9]{0,3}|run:.+)$"


def _known_features(features: str) -> str:
    if re.fullmatch(_FEATURES, features) is None:
        raise InputError("allowed are pixels, pooled:K with K from 1 to 9999, and run:DIR")
    return features


class HeadKeys(Settings):
    """The keys of convex heads."""

    features: Annotated[str, AfterValidator(_known_features)] = Field(
        "pixels",
        json_schema_extra={"pattern": _FEATURES},
        description="head: features of an image. pooled:14: averaged to 14 x 14; run:DIR: the input of the last layer "
        "in the network of that finished, private run, whose ledger is added to what is proven",
    )
    feature_norm: Annotated[Real, Field(ge=1e-3, le=1e3)] = Field(
        1.0, description="head: R, the length that features are scaled to"
    )
    regularisation: Positive = REGULARISATION
    tolerance: Annotated[Real, Field(ge=1e-12, le=1)] = Field(
        1e-8, description="head: tau, the largest norm of the gradient at the end of training"
    )

    @property
    def pooled(self) -> int | None:
        """The sides of averaged images; ``None``: they are not averaged."""
        return int(self.features.partition(":")[2]) if self.features.startswith("pooled:") else None

    @property
    def learnt(self) -> str:
        """The folder of the run whose network gives the features; empty: they are public."""
        return self.features.removeprefix("run:") if self.features.startswith("run:") else ""


class HeadPolicy(HeadKeys, NoisyPolicy):
    """A proven policy that answers from the certified convex head."""

    source: ClassVar[Literal["network", "head", "votes"]] = "head"

    def released(self, weights: Scores, draws: Draws) -> Scores:
        """Return the weights (classes, d) that answers are computed from, with noise for one release if it adds any."""
        return weights


class VectorPolicy(DrawnPolicy, HeadPolicy):
    """A policy of the convex head whose noise is a vector: normal, or of density falling with its length."""

    distribution: Distribution = DISTRIBUTION

    @model_validator(mode="after")
    def _is_drawn(self) -> Self:
        if self.distribution == "laplace" and not self.repeats_noise:
            raise InputError(
                f"method = {self.name!r} with distribution = 'laplace' takes noise whose density falls "
                "with a vector's length, which OpenDP does not draw; use randomness = 'seeded'"
            )
        return self

    @property
    @override
    def law(self) -> "Law":
        return "gaussian" if self.distribution == "gaussian" else "pure"


def rivals(policy: NoisyPolicy, epsilon: float, delta: float) -> Iterator[NoisyPolicy]:
    """Every proven policy that answers from the same model, seeded, with an epsilon's noise (pure, if delta is 0)."""
    known: dict[str, Any] = {**policy.model_dump(), "target_epsilon": epsilon, "noise": None, "randomness": "seeded"}
    if delta == 0:
        known["distribution"] = "laplace"
    for kind in POLICIES.values():
        if issubclass(kind, NoisyPolicy) and kind.source == policy.source:
            yield kind.model_validate({key: value for key, value in known.items() if key in kind.model_fields})
