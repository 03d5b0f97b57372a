"""What an endpoint answers, one file a policy: what it shows of the scores, and what is proven about that.

These files are read whenever an experiment is, so they import torch and scipy where they use them.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator
from typing_extensions import override

from fedpriv.convex import softmax
from fedpriv.errors import InputError
from fedpriv.registry import POLICIES
from fedpriv.service.questions import Answers
from fedpriv.settings import Epsilon, Positive, Real, Section, allowed_words

if TYPE_CHECKING:
    from fedpriv.accounting.answers import AnswerRelease, Law
    from fedpriv.accounting.convexified import ClaimedSensitivity
    from fedpriv.records import Guarantee, Ledger

__all__ = [
    "DISTRIBUTION",
    "EXAMPLE",
    "REGULARISATION",
    "AnswerPolicy",
    "Draws",
    "Facts",
    "HeadKeys",
    "HeadPolicy",
    "NoisyPolicy",
    "Scores",
    "VectorPolicy",
    "named_policy",
    "on_grid",
    "one_a_row",
    "rivals",
    "softmax",
]

_GRID = 20  # bits of the noise's scale that an answer shows

Scores = NDArray[np.float64]
"""(n, classes): logits, or counts of votes."""

EXAMPLE = "replace-one: one example of any client is another one; the number of examples is public"


@dataclass(frozen=True)
class Facts:
    """Public sizes that a guarantee rests on.

    Attributes:
        classes: C.
        sensitivity: Delta of the convex head's weights; 0 without one.
        norm: R, the length of its features.
        features: d, how many.
        models: that vote; 0 without votes.
        adjacency: which two data sets must look alike, in words.
        claimed: what Lu et al. claim of the run's network; ``None``: their formulas are not for it.
    """

    classes: int
    sensitivity: float = 0.0
    norm: float = 0.0
    features: int = 0
    models: int = 0
    adjacency: str = EXAMPLE
    claimed: "ClaimedSensitivity | None" = None


@dataclass(frozen=True)
class Draws:
    """What noise some answers take.

    Attributes:
        scale: of the noise; what it is the scale of is the policy's business.
        generators: one an image.
        facts: public sizes, for a policy whose noise depends on them.
    """

    scale: float = 0.0
    generators: Sequence[np.random.Generator] = ()
    facts: Facts | None = None


class AnswerPolicy(Section):
    """The keys of ``[service]`` that one policy reads; a subclass with a name, entered in ``POLICIES``, is one.

    Attributes:
        name: as in ``service.method``.
        title: what it is called.
        reference: the paper.
        argument: the key that stands behind a colon in the short form, such as ``rounded:2``; empty: there is none.
        source: what it answers from: the run's network, the certified convex head, or votes of separate models.
        draws: whether each answer takes fresh noise.
        labels_only: whether it never names a probability.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    source: ClassVar[Literal["network", "head", "votes"]] = "network"
    draws: ClassVar[bool] = False
    labels_only: ClassVar[bool] = False

    @abstractmethod
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        """Return what leaves the endpoint.

        Args:
            scores: (n, classes), of n images.
            draws: the noise; none for a policy without.
        """

    def check(self, ledger: "Ledger") -> None:
        """Refuse a run whose answers could not be what the policy says they are.

        Args:
            ledger: of the run that trained the network.

        Raises:
            InputError: they could not.
        """

    def scale(self, facts: Facts, answers: int, delta: float) -> float:
        """Return the scale of the noise with which so many answers keep to the settings; 0: there is none."""
        return 0.0

    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        """Return what is proven about so many answers together; nothing, unless a policy says otherwise.

        Args:
            facts: public sizes.
            answers: how many, at least 1.
            delta: of the statement.
            ledger: of the run that trained the network.
        """
        from fedpriv.records import Guarantee

        return Guarantee(
            adjacency=facts.adjacency,
            sampling="full",
            participations=answers,
            nominal_epsilon=None,
            pure_epsilon=None,
            epsilon=None,
            delta=delta,
            theorem=dict.fromkeys(
                ("nominal_epsilon", "pure_epsilon", "epsilon"), "no theorem stands for this heuristic"
            ),
            notes=("heuristic: what these answers leak is what attacks find, at least",),
        )


REGULARISATION: Any = Field(1e-3, description="head, paper: lambda, of lambda/2 |W|^2 in the objective")
DISTRIBUTION: Any = Field(
    "gaussian", description="noise; laplace: pure epsilon (for labels and votes the exponential mechanism)"
)
Distribution = Literal["gaussian", "laplace"]


class NoisyPolicy(AnswerPolicy):
    """A policy whose noise is proven to protect; the level of one release is ``unit / scale``.

    Attributes:
        once: whether all answers come from one release.
    """

    once: ClassVar[bool] = False

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
            raise ValueError(f"method = {self.name!r} needs either target_epsilon or noise")
        if self.delta == 0 and self.law == "gaussian":
            raise ValueError("normal noise proves nothing at delta = 0; use distribution = 'laplace'")
        return self

    @property
    @abstractmethod
    def law(self) -> "Law":
        """What one release is; see :mod:`fedpriv.accounting.answers`."""

    @abstractmethod
    def unit(self, facts: Facts) -> float:
        """Return the level of one release with noise of scale 1: what moves, at most."""

    @abstractmethod
    def theorem(self) -> str:
        """Return what the level rests on."""

    def release(self, facts: Facts, answers: int, delta: float, level: float) -> "AnswerRelease":
        """Return so many answers at a level, for the accounting."""
        from fedpriv.accounting.answers import AnswerRelease

        count = min(answers, 1) if self.once else answers
        return AnswerRelease(self.law, level, count, delta, facts.adjacency, self.theorem())

    @override
    def scale(self, facts: Facts, answers: int, delta: float) -> float:
        from fedpriv.accounting.answers import calibrated_level

        if self.noise is not None:
            return self.noise
        if self.target_epsilon is None:
            raise ValueError("neither noise nor target_epsilon")
        return self.unit(facts) / calibrated_level(self.release(facts, answers, delta, 0.0), self.target_epsilon)

    @override
    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        from fedpriv.accounting.answers import answer_guarantee

        level = self.unit(facts) / self.scale(facts, answers, delta)
        return answer_guarantee(self.release(facts, answers, delta, level))


class HeadKeys(Section):
    """The keys of convex heads."""

    features: Annotated[str, Field(pattern=r"^(pixels|pooled:[1-9][0-9]{0,3})$")] = Field(
        "pixels", description="head: public features of an image; pooled:14: averaged to 14 x 14"
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
        """The sides of averaged images; ``None``: pixels as they are."""
        return None if self.features == "pixels" else int(self.features.partition(":")[2])


class HeadPolicy(HeadKeys, NoisyPolicy):
    """A proven policy that answers from the certified convex head."""

    source: ClassVar[Literal["network", "head", "votes"]] = "head"

    def released(self, weights: Scores, scale: float, generator: np.random.Generator) -> Scores:
        """Return the weights that answers are computed from: as they are, unless a policy adds its noise to them."""
        return weights


class VectorPolicy(HeadPolicy):
    """A policy of the convex head whose noise is a vector: normal, or of density falling with its length."""

    distribution: Distribution = DISTRIBUTION

    @property
    @override
    def law(self) -> "Law":
        return "gaussian" if self.distribution == "gaussian" else "pure"


def named_policy(text: str, settings: Mapping[str, Any] | None = None) -> AnswerPolicy:
    """Return a policy by its short form, such as ``none``, ``rounded:2`` or ``top:3``.

    Args:
        text: name, or name and argument.
        settings: further keys of the policy.

    Raises:
        InputError: there is none of this name, or a key is missing or out of range.
    """
    name, colon, argument = text.partition(":")
    kind: type[AnswerPolicy] = POLICIES[name]
    if colon and not kind.argument:
        raise InputError(f"answers {text!r}: {name} takes nothing behind a colon")
    try:
        return kind.model_validate({**(settings or {}), **({kind.argument: argument} if colon else {})})
    except ValidationError as error:
        first = error.errors()[0]
        keys = ".".join(str(part) for part in first["loc"])
        raise InputError(f"answers {text!r}: {keys + ': ' if keys else ''}{allowed_words(first)}") from None


def rivals(policy: NoisyPolicy, epsilon: float, delta: float) -> Iterator[NoisyPolicy]:
    """Every proven policy that answers from the same model, with as much noise as an epsilon takes.

    Args:
        policy: whose other keys they have.
        epsilon: of all answers together, at ``delta``.
        delta: 0: noise with a pure epsilon, since normal noise proves nothing then.
    """
    known: dict[str, Any] = {**policy.model_dump(), "target_epsilon": epsilon, "noise": None}
    if delta == 0:
        known["distribution"] = "laplace"
    for kind in POLICIES.values():
        if issubclass(kind, NoisyPolicy) and kind.source == policy.source:
            yield kind.model_validate({key: value for key, value in known.items() if key in kind.model_fields})


def one_a_row(shares: Scores, generators: Sequence[np.random.Generator]) -> NDArray[np.int64]:
    """Draw a class for each row of probabilities (n, classes), each from a generator of its own; returns (n,)."""
    uniform = np.array([generator.random() for generator in generators])
    bounds = shares.cumsum(axis=1)
    drawn: NDArray[np.int64] = (uniform[:, None] * bounds[:, -1:] >= bounds[:, :-1]).sum(axis=1)
    return drawn


def on_grid(noisy: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Round what has noise on it to multiples of a power of two, about a millionth of the noise's scale.

    Noise in floating point is no normal or Laplace noise to its last bits, and these tell which number it was added to
    (Mironov 2012). Rounding afterwards is post-processing: no figure changes, and those bits are gone.

    Args:
        noisy: of any shape.
        scale: of the noise, above 0.
    """
    step = 2.0 ** (math.floor(math.log2(scale)) - _GRID)
    rounded: NDArray[np.float64] = np.round(noisy / step) * step
    return rounded
