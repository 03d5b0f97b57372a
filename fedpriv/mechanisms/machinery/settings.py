"""What the settings of every mechanism have in common, and what all others ask of a mechanism through them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, CalibrationName, UnitName
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Choice, Epsilon, Real, Section, enumerated

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedpriv.accounting.proofs import Proof
    from fedpriv.gradients import Vector
    from fedpriv.mechanisms.machinery.base import Mechanism
    from fedpriv.mechanisms.machinery.redistribution import Redistribution

ClipNorm = Annotated[Real, Field(ge=1e-9, le=1e9)]
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


class MechanismSettings(Section):
    """The section ``[mechanism]``; a mechanism is a subclass with a default ``name``, entered in ``MECHANISMS``.

    Attributes:
        title: for people, in the middle of a sentence.
        label: for people, in plots; empty: the name.
        summary: one line for help texts.
        colours: in plots, on light and on dark ground.
        marker: in plots, as matplotlib names it.
        protects: whether an upload is anything but what training gives.
        on_gradients: whether it acts on gradients or updates; else on a model that a client trains alone
            (:mod:`fedpriv.mechanisms.machinery.model_noise`).
        noise_at: where the noise is whole, and so whom one has to trust (:data:`NoiseAt`).
        parameter: the key that says how much noise there is, or ``None``: there is none, or its amount is an epsilon.
    """

    title: ClassVar[str]
    label: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    colours: ClassVar[tuple[str, str]] = ("#E69F00", "#F3C14B")
    marker: ClassVar[str] = "P"
    protects: ClassVar[bool] = True
    on_gradients: ClassVar[bool] = True
    noise_at: ClassVar[NoiseAt] = "clients"
    parameter: ClassVar[str | None] = None

    name: str = Field(description="privacy mechanism")
    unit: UnitName = Field(
        "example", description="example: noise per example's gradient; update: once on the client's whole update"
    )
    delta: Annotated[Real, Field(gt=0, lt=1)] = Field(1e-5, description="delta of every (epsilon, delta) statement")

    @classmethod
    def proof(cls) -> "type[Proof]":
        """What is proven about it; a mechanism that says nothing has nothing proven."""
        from fedpriv.accounting.proofs import NoProof

        return NoProof

    @abstractmethod
    def mechanism(self, redistribution: "Redistribution | None" = None) -> "Mechanism":
        """Return what releases gradients.

        Args:
            redistribution: as :meth:`redistributed` has it.

        Raises:
            ValueError: the noise is a target still, what is redistributed is missing, or numbers are out of range.
        """

    def require_noise_at(self, *places: NoiseAt) -> None:
        """Refuse to release where nobody adds this mechanism's noise; whatever lets data out calls this first.

        Args:
            places: where noise is added to what is about to leave, before anybody else reads it.

        Raises:
            InputError: the noise is added elsewhere.
        """
        if not self.protects or self.noise_at in places:
            return
        alike = {name: kind for name, kind in MECHANISMS.items() if kind.protects and kind.on_gradients}
        fitting = (name for name, kind in alike.items() if kind.noise_at in places)
        raise InputError(
            f"mechanism.name = {self.name!r}: would leave without noise here, since "
            f"{_ADDED_BY.get(self.noise_at, f'it is added at {self.noise_at!r}')}; allowed: {', '.join(fitting)}"
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
        """Which of several laws the noise has; ``None`` where there is one."""
        return None

    @property
    def calibrated_epsilon(self) -> float | None:
        """What the noise of a client's whole run is calibrated to prove; ``None`` where it is not."""
        return None

    @property
    def target_key(self) -> str:
        """The key that :attr:`calibrated_epsilon` was set by."""
        return "target_epsilon"

    @property
    def adjacent(self) -> AdjacencyName:
        """Which two data sets must look alike."""
        return "replace-one"

    @property
    def variant(self) -> str | None:
        """What tells settings of one mechanism apart in tables and plots; ``None``: nothing does."""
        return None

    def nominal_noise(self) -> float:
        """Return the noise with which the mechanism's paper prints the epsilon that is set.

        Raises:
            InputError: it is out of range.
            ValueError: the mechanism makes no noise.
        """
        raise ValueError(f"mechanism.name = {self.name!r} makes no noise")

    def with_noise(self, noise: float) -> Self:
        """Return these settings with the noise itself (sigma, scale, kappa) in place of any target.

        Raises:
            ValueError: the mechanism makes no noise, or the number is out of range.
        """
        raise ValueError(f"mechanism.name = {self.name!r} makes no noise")

    def with_some_noise(self) -> Self:
        """Return these settings with an arbitrary amount of noise, to ask what does not depend on it."""
        return self if self.parameter is None else self.with_noise(1.0)

    @property
    def bound(self) -> float:
        """The bound of an update's norm.

        Raises:
            ValueError: there is none.
        """
        raise ValueError(f"mechanism.name = {self.name!r} bounds no norm of updates in a sum")

    def shared_by(self, clients: int) -> Self:
        """Return these settings as they are where so many clients are asked in a round.

        Raises:
            ValueError: they are not for so many.
        """
        return self

    @property
    def least_in_sum(self) -> int:
        """How many clients' shares are the whole noise on a sum; 0 where there are no shares."""
        return 0

    def noise_on_mean(self, clients: int, divisor: float) -> float:
        """Return the deviation of noise that :meth:`mechanism` leaves to others, on each coordinate of a round's mean.

        Args:
            clients: whose uploads are in the sum.
            divisor: of the sum.

        Raises:
            ValueError: the noise is added to a sum, and the mechanism does not say how much.
        """
        if self.noise_at != "clients":
            raise ValueError(f"mechanism.name = {self.name!r} does not say how much noise a sum gets (noise_on_mean)")
        return 0.0

    def dimensions(self, tensors: Sequence[int]) -> tuple[int, ...]:
        """The numbers of coordinates of the parts of a gradient that get a draw of their own.

        Args:
            tensors: the number of coordinates of each parameter tensor, in the model's order.
        """
        return (sum(tensors),)

    def draws(self, tensors: Sequence[int]) -> int | None:
        """How many draws one gradient gets; ``None`` where that is no choice of the settings."""
        return None

    def redistributed(self, parameters: "Vector", public: PublicModel) -> "Redistribution | None":
        """Return how the noise is shared out over the coordinates; ``None``: the mechanism reads no shares.

        Args:
            parameters: of the model, in its order.
            public: asked for the network and public images where the shares follow from them.

        Raises:
            InputError: there are no such shares.
        """
        return None

    @property
    def needs_redistribution(self) -> bool:
        """Whether an adversary who knows the mechanism must be told :meth:`redistributed`, too."""
        return False

    @classmethod
    def contenders(cls, whole: tuple[int, ...], small: tuple[int, ...]) -> tuple[Contender, ...]:
        """What of it is compared by ``fedpriv account compare``; nothing, where nothing is proven.

        Args:
            whole: all coordinates as one block.
            small: the same in small blocks.
        """
        return ()


class NoisySettings(MechanismSettings):
    """Settings of a mechanism with one amount of noise, which is given or follows from an epsilon.

    Attributes:
        nominal: what ``epsilon`` is, for people who account for releases without a run.
        by_dimension: whether a proven figure depends on how many numbers a gradient has; ``fedpriv account`` asks then.
    """

    parameter: ClassVar[str]
    nominal: ClassVar[str]
    by_dimension: ClassVar[bool] = True

    epsilon: Epsilon | None = None
    target_epsilon: Epsilon | None = Field(
        None, description="proven for each client's whole run at delta; the noise is calibrated"
    )

    @classmethod
    def noise_keys(cls) -> tuple[str, ...]:
        """These exclude each other: one of them says how much noise there is."""
        return ("epsilon", cls.parameter, "target_epsilon")

    @model_validator(mode="after")
    def _one_noise_parameter(self) -> Self:
        keys = self.noise_keys()
        given = [key for key in keys if getattr(self, key) is not None]
        if len(given) == 1:
            return self
        what = f"{'both ' if len(given) == 2 else ''}{enumerated(given, 'and')} are set" if given else "none is set"
        if "target_epsilon" in given:
            what += "; to stop clients when they reach a target, set federation.target_epsilon"
        raise ValueError(f"{self.name} needs exactly one of {enumerated(keys, 'or')}; {what}")

    @property
    def calibrated_epsilon(self) -> float | None:
        """The target, where one is set."""
        return self.target_epsilon

    def given_noise(self) -> float:
        """Return the noise itself.

        Raises:
            ValueError: a target is set.
        """
        if self.noise is None:
            raise ValueError(f"{self.name} needs {self.parameter} itself, not an epsilon")
        return self.noise

    @property
    def target_key(self) -> str:
        """The key that :attr:`calibrated_epsilon` was set by."""
        return "epsilon" if self.target_epsilon is None else "target_epsilon"

    @property
    def single_release(self) -> CalibrationName:
        """From the nominal epsilon of one normal release to its noise."""
        return "analytic"

    def nominal_noise(self) -> float:
        """Return what the mechanism's paper says for epsilon."""
        if self.epsilon is None:
            raise ValueError(f"{self.name} has no nominal epsilon here")
        return self.proof().nominal_noise(self.epsilon, self.delta, self.single_release)

    def with_noise(self, noise: float) -> Self:
        """Return these settings with the noise itself in place of any target."""
        unset = dict.fromkeys(self.noise_keys())
        return type(self).model_validate({**self.model_dump(), **unset, self.parameter: noise})


def noise_keys() -> tuple[str, ...]:
    """Every key that says how much noise some mechanism makes; settings have one of them at most."""
    return tuple(sorted({key for kind in MECHANISMS.values() for key in getattr(kind, "noise_keys", tuple)()}))


MECHANISM = Choice[MechanismSettings]("mechanism", MECHANISMS, "none")
mechanism_settings, recorded_mechanism = MECHANISM.settings, MECHANISM.recorded
