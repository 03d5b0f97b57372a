"""The base of all mechanisms: their settings, and the release of a batch's gradients as one noisy vector."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, CalibrationName, UnitName
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Choice, Epsilon, Integer, Real, Settings, absent, enumerated

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedpriv.accounting.proofs import Proof
    from fedpriv.accounting.release import Correlation, Release
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import Block, GradientOperator, StackedGradients, Vector
    from fedpriv.mechanisms.machinery.law import Noise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


class Mechanism(ABC):
    """A privacy mechanism; subclasses are frozen dataclasses of public numbers."""

    protects: ClassVar[bool] = True  # whether a release is anything but the mean gradient itself
    at_once: ClassVar[bool] = False  # whether it does the same to every number, so that models are released together
    least_draws: int = 0  # in each release, where each example gets a draw of its own; see :meth:`padded`
    constrains: ClassVar[bool] = False  # whether a release says of some numbers only between which values they lay
    asks_often: ClassVar[bool] = False  # whether more is asked of gradients than norms and a sum: more of them is kept

    @property
    @abstractmethod
    def name(self) -> str:
        """As in the settings."""

    def padded(self, draws: int) -> Self:
        """Return this mechanism with at least so many draws in each release, where each example gets one of its own.

        Then nothing shows how many examples there are. Where noise does not depend on them it is the same mechanism.
        """
        return self

    def release(self, gradients: "GradientOperator", batch_size: int, noise: "NoiseStream") -> "Vector":
        """Return one noisy mean gradient.

        A gradient that is not finite, in any of its parameters, counts as zero: an error would tell the receiver, with
        no noise at all, that one is among them. So nothing depends on the gradients' values but what is returned.

        Args:
            gradients: the batch; it may be empty, and its size may be private.
            batch_size: the public number by which the noisy sum is divided, at least 1.
            noise: the only source of randomness.

        Raises:
            ValueError: ``batch_size`` is not positive.
        """
        check_batch_size(batch_size)
        return self._release(self._admitted(gradients), batch_size, noise)

    def release_each(self, gradients: "StackedGradients", batch_size: int, noises: "Sequence[NoiseStream]") -> "Vector":
        """Return one noisy mean gradient for each of M models, (M, *shape): what :meth:`release` draws for it alone.

        Where :attr:`at_once` says so all models together, else one after the other.

        Args:
            gradients: of all models.
            batch_size: the public number by which each noisy sum is divided, at least 1.
            noises: a stream for each model.

        Raises:
            ValueError: ``batch_size`` is not positive.
        """
        import torch

        from fedpriv.core.randomness import NoiseStreams

        if self.at_once:
            return self.release(gradients, batch_size, NoiseStreams(noises))
        pairs = zip(gradients.each(), noises, strict=True)
        released = [self.release(own, batch_size, noise) for own, noise in pairs]
        return {name: torch.stack([vector[name] for vector in released]) for name in gradients.shapes}

    @abstractmethod
    def _release(self, gradients: "GradientOperator", batch_size: int, noise: "NoiseStream") -> "Vector":
        """Return one noisy mean gradient of gradients that are finite; batch_size is positive."""

    def _admitted(self, gradients: "GradientOperator") -> "GradientOperator":
        """The gradients, with zeros in place of those that are not finite."""
        from fedpriv.gradients.numerics import reach

        finite = gradients.magnitudes() <= reach(gradients.dtype)
        return gradients if bool(finite.all()) else gradients.masked(finite)

    @abstractmethod
    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        """Return a Euclidean norm that a release exceeds with probability ``tail`` at most; infinite where none holds.

        Args:
            examples: the most examples that the batch can hold.
            batch_size: the public number by which the noisy sum is divided.
            tensors: the number of coordinates of each parameter tensor, in the model's order.
            tail: above 0, below 1.
        """

    @abstractmethod
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> "Noise":
        """Return how a release scatters around its expectation, in standardised coordinates.

        Args:
            tensors: the number of coordinates of each parameter tensor, in the model's order.
            examples: gradients in the sum.
            divisor: the number by which the noisy sum is divided, above 0.
        """

    def draw_products(
        self,
        grams: "NDArray[np.float64]",
        dimensions: Sequence[int],
        variances: Sequence[float],
        sources: "NDArray[np.int64]",
        rng: "np.random.Generator",
    ) -> "NDArray[np.float64] | None":
        """Draw the inner products of releases of some expected releases with all of them, (m, draws, N).

        ``None``: they do not follow from inner products, or nobody wrote down how; releases are drawn whole then.

        Args:
            grams: (m, N, N), the inner products of N expected releases of a batch of one, standardised, in each of the
                m blocks of :meth:`directions`.
            dimensions: coordinates of each block.
            variances: of :meth:`noise`.
            sources: of which expected release each draw is made, (draws,).
            rng: source of randomness; not one that protects anybody.
        """
        return None

    def blocks_of(self, names: "Block") -> "tuple[Block, ...]":
        """The groups of tensors that share one factor; empty where it changes within a tensor."""
        return (names,)

    def directions(self, names: "Block") -> "tuple[Block, ...]":
        """The groups of tensors whose directions the noise turns independently of each other."""
        return (names,)

    def deviations(self, names: "Block") -> "Vector":
        """By what :meth:`standardise` divides each tensor: numbers of its shape, or (1,)."""
        import torch

        return dict.fromkeys(names, torch.ones(1))

    def scales(self, names: "Block") -> Mapping[str, float] | None:
        """Return what :meth:`standardise` multiplies each tensor with.

        ``None`` where the mechanism does more to an expected gradient than to multiply each block with a factor that
        follows from its Euclidean norm (see :class:`BlockMechanism`), or divides a tensor by different numbers: then
        gradients have to be written out.
        """
        return None

    @abstractmethod
    def expected(self, gradient: "Vector") -> "Vector":
        """Return the mean of what :meth:`release` returns for a batch of one with this gradient; differentiable."""

    def fitted(self, gradient: "Vector", released: "Vector") -> "Vector":
        """Return what attacks compare with a release instead of what is expected, where it :attr:`constrains`."""
        return self.expected(gradient)

    def standardise(self, released: "Vector") -> "Vector":
        """Divide each coordinate by a public number such that the noise is as large in all of them.

        Args:
            released: a release, an expected one, or many of them: tensors (*shape) or (N, *shape).
        """
        return released


class BlockMechanism(Mechanism):
    """A mechanism whose expected release is each block of the gradient times a factor that follows from its norm.

    Attacks need no gradients of single examples for it, only their norms and inner products.
    """

    @abstractmethod
    def weight(self, squared: "Tensor", dimension: int, blocks: int) -> "Tensor":
        """Return the expected factor of one gradient's block, one of those of :meth:`blocks_of`; differentiable.

        Args:
            squared: squared norms of the block after :meth:`standardise`, of any shape; that of the result.
            dimension: coordinates of the block.
            blocks: how many blocks the gradient has.
        """

    @override
    def scales(self, names: "Block") -> Mapping[str, float] | None:
        deviations = self.deviations(names)
        even = all(bool((value == value.flatten()[0]).all()) for value in deviations.values())
        if not (even and self.blocks_of(names)):
            return None
        return {name: 1 / float(value.flatten()[0]) for name, value in deviations.items()}

    @override
    def expected(self, gradient: "Vector") -> "Vector":
        import torch

        standard, blocks = self.standardise(gradient), self.blocks_of(tuple(gradient))
        expected: Vector = {}
        for block in blocks:
            squared = torch.stack([standard[name].square().sum() for name in block]).sum()
            factor = self.weight(squared, sum(gradient[name].numel() for name in block), len(blocks))
            expected |= {name: factor * gradient[name] for name in block}
        return expected


def check_noise(name: str, value: float) -> None:
    """Raise ValueError unless a noise parameter (zero: no noise) is a finite number, at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise InputError(key=name, given=value, allowed="it is a finite number, at least 0")


def check_clip_norm(clip_norm: float) -> None:
    """Raise ValueError unless the bound of a gradient's norm is a finite number above 0."""
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise InputError(key="clip_norm", given=clip_norm, allowed="it is a finite number above 0")


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a public batch size below 1."""
    if batch_size < 1:
        raise InputError(key="batch_size", given=batch_size, allowed="it divides the sum, so it is at least 1")


ClipNorm = Annotated[Real, Field(ge=1e-9, le=1e9)]
"""What is bounded before noise: each example's gradient, or with ``unit = "update"`` a client's whole update.

In which norm, the mechanism's field says: Euclidean, L1 (laplace), weighted (hgm); vmf gives all updates this length.
"""
Multiplier = Annotated[Real, Field(ge=1e-9, le=1e12)]

PublicModel = Callable[[int], "tuple[nn.Module, Tensor]"]
"""From a number of public images to the network and that many of them, normalised."""

NoiseAt = Literal["clients", "sum", "server"]
"""Where the noise is whole: in each upload, in the sum of a round's uploads alone, or where the server adds it."""

_ADDED_BY: Mapping[str, str] = {
    "clients": "each client adds it to its own upload",
    "sum": "each client adds a share of it to a masked sum (federation.secure_aggregation)",
    "server": "a trusted server of fedpriv run adds it to the sum of a round",
}

Contender = tuple[str, tuple[int, ...]]
"""A label and the dimensions of the blocks, for ``fedpriv account compare``."""


@dataclass(frozen=True)
class Target:
    """What the noise of a client's whole run is calibrated for."""

    key: str  # of the mechanism's settings
    value: float  # an epsilon, or with a guess a probability
    guess: float | None = None  # k0 of a ceiling

    def least_noise(self, release: "Release") -> float:
        """Return the mechanism's noise parameter; see :func:`calibrate` and :func:`calibrate_ceiling`."""
        from fedpriv.accounting import calibrate, calibrate_ceiling

        if self.guess is None:
            return calibrate(self.value, release)
        return calibrate_ceiling(self.value, self.guess, release)


class MechanismSettings(Settings):
    """The section ``[mechanism]``; a mechanism is a subclass with a default ``name``, entered in ``MECHANISMS``."""

    title: ClassVar[str]  # its name in the middle of a sentence
    label: ClassVar[str] = ""  # its name in plots; empty: the name in the settings
    summary: ClassVar[str] = ""  # one line for help texts
    # in plots, on light and on dark ground
    colours: ClassVar[tuple[str, str]] = ("#E69F00", "#F3C14B")
    marker: ClassVar[str] = "P"  # in plots, as matplotlib names it
    proven_by: ClassVar[str] = "fedpriv.accounting.proofs:NoProof"  # where its proof is, imported when asked for
    protects: ClassVar[bool] = True  # whether it changes what training uploads
    # whether it hides numbers without noise (`fedpriv.mechanisms.filters`): this is often mistaken for
    # privacy, so reports say in red that nothing is proven
    filters: ClassVar[bool] = False
    # whether it acts on gradients or updates; else on a model that a client trains alone
    # (`fedpriv.mechanisms.model_noise`)
    on_gradients: ClassVar[bool] = True
    # where the full noise is added, which decides who must be trusted (`NoiseAt`)
    noise_at: ClassVar[NoiseAt] = "clients"
    # the key that says how much noise there is, or `None`: there is none, or its amount is an epsilon
    parameter: ClassVar[str | None] = None

    name: str = Field(description="privacy mechanism")
    unit: UnitName = Field(
        "example", description="example: noise per example's gradient; update: once on the client's whole update"
    )
    delta: Annotated[Real, Field(gt=0, lt=1)] = Field(1e-5, description="delta of every (epsilon, delta) statement")

    @classmethod
    def proof(cls) -> "type[Proof]":
        """The mechanism's proof; by default nothing is proven."""
        return resolve_name(cls.proven_by)

    @classmethod
    def has_proof(cls) -> bool:
        """Whether anything can be proven."""
        return cls.proven_by != MechanismSettings.proven_by

    @abstractmethod
    def mechanism(self, redistribution: "Redistribution | None" = None) -> "Mechanism":
        """Return the object that releases gradients; that of a client is ``Plan.mechanism``.

        Args:
            redistribution: the result of :meth:`redistributed`.

        Raises:
            ValueError: the noise of a target is not calibrated yet, the redistribution is missing, or numbers are out
                of range.
        """

    def require_noise_at(self, *places: NoiseAt) -> None:
        """Refuse to release data without this mechanism's noise; every code path that releases data calls this first.

        Args:
            places: where noise is added to the release before anybody else reads it.

        Raises:
            InputError: the noise is added elsewhere.
        """
        if not self.protects or self.noise_at in places:
            return
        alike = {name: kind for name, kind in MECHANISMS.items() if kind.protects and kind.on_gradients}
        fitting = (name for name, kind in alike.items() if kind.noise_at in places)
        raise InputError(
            key="mechanism.name",
            given=self.name,
            allowed="would leave without noise here, since "
            f"{_ADDED_BY.get(self.noise_at, f'it is added at {self.noise_at!r}')}; allowed: "
            f"{', '.join(fitting)}",
        )

    @property
    def protects_examples(self) -> bool:
        """Whether the gradients of each step go through the mechanism."""
        return self.protects and self.unit == "example"

    @property
    def protects_updates(self) -> bool:
        """Whether a client's whole update goes through the mechanism."""
        return self.protects and self.unit == "update"

    @property
    def effective(self) -> tuple[str, ...]:
        """The keys that have an effect with these settings, other than name and unit."""
        return tuple(key for key in type(self).model_fields if key not in ("name", "unit"))

    @property
    def noise(self) -> float | None:
        """The noise in the mechanism's own term (sigma, scale, kappa); ``None``: a target is set, or there is none."""
        return None if self.parameter is None else getattr(self, self.parameter)

    @property
    def law(self) -> str | None:
        """The noise distribution, if the mechanism has several; ``None``: it has one."""
        return None

    @property
    def target(self) -> Target | None:
        """The target that the noise of a client's whole run is calibrated to; ``None``: the noise is given."""
        return None

    @property
    def guess(self) -> float | None:
        """The success rate of a guess without any upload, for a target ceiling; ``None``: there is no ceiling."""
        return None

    @property
    def adjacent(self) -> AdjacencyName:
        """Which two data sets must look alike."""
        return "replace-one"

    @property
    def variant(self) -> str | None:
        """Distinguishes settings of one mechanism in tables and plots; ``None``: nothing does."""
        return None

    def nominal_noise(self) -> float:
        """Return the noise for which the mechanism's paper states the configured epsilon.

        Raises:
            InputError: epsilon is out of range.
            ValueError: the mechanism makes no noise.
        """
        raise InputError(f"mechanism.name = {self.name!r} makes no noise")

    def with_noise(self, noise: float) -> Self:
        """Return these settings with this noise (sigma, scale, kappa) in place of any target.

        Raises:
            ValueError: the mechanism makes no noise, or the number is out of range.
        """
        raise InputError(f"mechanism.name = {self.name!r} makes no noise")

    def with_some_noise(self) -> Self:
        """Return these settings with an arbitrary amount of noise, to read properties that do not depend on it."""
        return self if self.parameter is None else self.with_noise(1.0)

    @property
    def bound(self) -> float:
        """The bound on the norm of an update in a sum whose noise is not the client's alone.

        Raises:
            ValueError: each client adds its own noise, or none.
        """
        raise InputError(f"mechanism.name = {self.name!r} bounds no norm of updates in a sum")

    def shared_by(self, clients: int) -> Self:
        """Return these settings for rounds with this number of clients.

        Raises:
            ValueError: they do not allow this number.
        """
        return self

    @property
    def least_in_sum(self) -> int:
        """The number of clients whose shares of noise add up to the whole noise on a sum; 0: there are no shares."""
        return 0

    def correlation(self, rounds: int, separation: int, participations: int) -> "Correlation | None":
        """Return how the noise of different rounds is correlated; ``None``: it is independent.

        Args:
            rounds: the number of rounds of the run.
            separation: a client is selected at most once in this many consecutive rounds.
            participations: a client is selected in at most this many rounds.

        Raises:
            InputError: the settings do not allow these numbers.
        """
        return None

    def noise_on_mean(self, clients: int, divisor: float) -> float:
        """Return the standard deviation of the noise added outside :meth:`mechanism`, per coordinate of a round's mean.

        Args:
            clients: the number of clients whose uploads are in the sum.
            divisor: of the sum.

        Raises:
            ValueError: the noise is added to a sum, and the mechanism does not define its amount.
        """
        if self.noise_at != "clients":
            raise InputError(f"mechanism.name = {self.name!r} does not say how much noise a sum gets (noise_on_mean)")
        return 0.0

    def dimensions(self, tensors: Sequence[int]) -> tuple[int, ...]:
        """Return the number of coordinates of each part of a gradient that gets its own draw.

        Args:
            tensors: the number of coordinates of each parameter tensor, in the model's order.
        """
        return (sum(tensors),)

    def draws(self, tensors: Sequence[int]) -> int | None:
        """Return the number of draws for one gradient; ``None``: the settings do not choose it."""
        return None

    def redistributed(self, parameters: "Vector", public: PublicModel) -> "Redistribution | None":
        """Return how the noise is distributed over the coordinates; ``None``: equally.

        Args:
            parameters: of the model, in its order.
            public: returns the network and public images, from which the shares may be computed.

        Raises:
            InputError: the shares cannot be computed.
        """
        return None

    @property
    def needs_redistribution(self) -> bool:
        """Whether an adversary who knows the mechanism must also get the result of :meth:`redistributed`."""
        return False

    @classmethod
    def contenders(cls, whole: tuple[int, ...], small: tuple[int, ...]) -> tuple[Contender, ...]:
        """Return the variants that ``fedpriv account compare`` compares; none where nothing is proven.

        Args:
            whole: block sizes for one block of all coordinates.
            small: block sizes for small blocks.
        """
        return ()


class NoisySettings(MechanismSettings):
    """Settings of a mechanism with one amount of noise, which is given or follows from an epsilon."""

    parameter: ClassVar[str]
    nominal: ClassVar[str]  # what `epsilon` means, for `fedpriv account`
    # whether the proven figures depend on the number of coordinates; then `fedpriv account` asks for it
    by_dimension: ClassVar[bool] = True

    epsilon: Epsilon | None = None
    target_epsilon: Epsilon | None = Field(
        None, description="proven for each client's whole run at delta; the noise is calibrated"
    )
    target_ceiling: Annotated[Real, Field(gt=0, lt=1)] | None = Field(
        None,
        description="how often any attack may pick a client's record out of candidates, proven for its whole run; the "
        "noise is calibrated",
    )
    ceiling_guess: Annotated[Real, Field(gt=0, lt=1)] | None = Field(
        None,
        exclude_if=absent,
        description="for target_ceiling, here and in [federation]: how often a guess without any upload is right; "
        "unset: 1 / candidates",
    )
    candidates: Annotated[Integer, Field(ge=2, le=10**12)] | None = Field(
        None, exclude_if=absent, description="in place of ceiling_guess: equally likely records; both unset: 100"
    )

    @classmethod
    def noise_keys(cls) -> tuple[str, ...]:
        """Return the keys that set the amount of noise; they exclude each other."""
        keys = ("epsilon", cls.parameter, "target_epsilon", "target_ceiling")
        return tuple(key for key in keys if cls.model_fields[key].annotation is not type(None))

    @model_validator(mode="after")
    def _one_noise_parameter(self) -> Self:
        keys = self.noise_keys()
        given = [key for key in keys if getattr(self, key) is not None]
        if self.ceiling_guess is not None and self.candidates is not None:
            raise InputError(key="candidates", given=self.candidates, allowed="in place of ceiling_guess, not with it")
        if self.target_ceiling is not None and self.target_ceiling <= (guess := self.guess or 0.0):
            allowed = f"above the guess, {guess:.4g}, and below 1"
            raise InputError(key="target_ceiling", given=self.target_ceiling, allowed=allowed)
        if len(given) == 1:
            return self
        what = f"{'both ' if len(given) == 2 else ''}{enumerated(given, 'and')} are set" if given else "none is set"
        if "target_epsilon" in given:
            what += "; to stop clients when they reach a target, set federation.target_epsilon"
        raise InputError(f"{self.name} needs exactly one of {enumerated(keys, 'or')}; {what}")

    def given_noise(self) -> float:
        """Return the given noise.

        Raises:
            ValueError: a target is set instead.
        """
        if self.noise is None:
            raise InputError(f"{self.name} needs {self.parameter} itself, not an epsilon")
        return self.noise

    @property
    @override
    def effective(self) -> tuple[str, ...]:
        idle = {"ceiling_guess", "candidates"} if self.target_ceiling is None else set()
        return tuple(key for key in super().effective if key not in idle)

    @property
    @override
    def target(self) -> Target | None:
        if self.target_ceiling is not None:
            return Target("target_ceiling", self.target_ceiling, self.guess)
        return None if self.target_epsilon is None else Target("target_epsilon", self.target_epsilon)

    @property
    @override
    def guess(self) -> float | None:
        if "target_ceiling" not in self.noise_keys():
            return None
        return 1 / (self.candidates or 100) if self.ceiling_guess is None else self.ceiling_guess

    @property
    def single_release(self) -> CalibrationName:
        """The formula from the nominal epsilon of one normal release to its noise."""
        return "analytic"

    def nominal_noise(self) -> float:
        """Return the noise for which the mechanism's paper states the configured epsilon."""
        if self.epsilon is None:
            raise InputError(f"{self.name} has no nominal epsilon here")
        return self.proof().nominal_noise(self.epsilon, self.delta, self.single_release, sensitivity=2.0)

    def with_noise(self, noise: float) -> Self:
        """Return these settings with this noise in place of any target."""
        unset = dict.fromkeys(self.noise_keys())
        return type(self).model_validate({**self.model_dump(), **unset, self.parameter: noise})


def noise_keys() -> tuple[str, ...]:
    """Return the keys of all mechanisms that set the amount of noise; settings contain at most one of them."""
    return tuple(sorted({key for kind in MECHANISMS.values() for key in getattr(kind, "noise_keys", tuple)()}))


MECHANISM = Choice[MechanismSettings]("mechanism", MECHANISMS, "none")
mechanism_settings, recorded_mechanism = MECHANISM.settings, MECHANISM.recorded


def block_sizes(blocks: str, tensors: Sequence[int]) -> tuple[int, ...]:
    """Return the number of coordinates of each block, in the order of the parameters; see :func:`block_runs`."""
    return tuple(size for count, size in block_runs(blocks, tensors) for _ in range(count))


def block_runs(blocks: str, tensors: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the blocks as (how many of one size follow each other, coordinates of each), in the parameters' order."""
    length, total = block_length(blocks), sum(tensors)
    if blocks == "layer":
        return tuple((1, size) for size in tensors)
    if length is None:
        return ((1, total),)
    whole, rest = divmod(total, length)
    return tuple((count, size) for count, size in ((whole, length), (1, rest)) if count * size)


def block_length(blocks: str) -> int | None:
    """Return D of "size:D", ``None`` for "whole" and "layer"."""
    if blocks in ("whole", "layer"):
        return None
    match = re.fullmatch(r"size:([1-9][0-9]*)", blocks)
    if not match:
        raise InputError(key="blocks", given=blocks, allowed="whole, layer, or size:D with a whole number D above 0")
    return int(match[1])
