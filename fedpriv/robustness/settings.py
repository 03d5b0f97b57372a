"""The section ``[robustness]``: noise inside the forward pass, and how its certificates are made."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import override

from fedpriv.attacks.evasion.methods import EVASIONS, NOISELESS
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.errors import InputError
from fedpriv.core.registry import SECTIONS
from fedpriv.core.sections import ExperimentSection, ForwardNoise, NoiseInPass
from fedpriv.core.settings import Count, Epsilon, Integer, NonNegative, Positive, Real, Registered, Settings, named_once

if TYPE_CHECKING:
    from torch import nn

    from fedpriv.core.config.experiment import Experiment
    from fedpriv.data.datasets import Dataset

LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""In pixels from 0 to 1. Smaller noise is lost in the rounding of float32, and what it would prove with it."""

_CERTIFIED, _EVADED = 500, 200  # images, unless set
_USED_BY_EPSILON = ("delta", "size", "calibration")


def _ascending(sizes: tuple[float, ...]) -> tuple[float, ...]:
    """Refuse sizes that are not in order, or named twice."""
    if list(sizes) != sorted(set(sizes)):
        raise InputError("sizes ascend, each once")
    return sizes


Sizes = Annotated[tuple[Positive, ...], AfterValidator(_ascending)]


class CertifyConfig(Settings):
    """What ``fedpriv certify`` does where its options do not say otherwise."""

    examples: Count | None = Field(None, description="test images that are certified; unset: 500, or all of fewer")
    selection: Count = Field(100, description="votes that choose the class of an image")
    votes: Count = Field(1000, description="fresh votes that its certificate rests on")
    alpha: Annotated[Real, Field(ge=1e-15, lt=0.5)] = Field(
        0.001, description="probability with which one image's certificate may be wrong"
    )
    rivals: Literal["each", "together"] = Field(
        "each",
        description="each: every other class is bounded apart (top-two), better where several compete; together: the "
        "others are what the chosen class leaves, better near certainty",
    )
    radii_l2: Sizes = Field((0.25, 0.5, 0.75, 1.0), description="sizes of the curve, Euclidean, pixels from 0 to 1")
    radii_linf: Sizes = Field((0.01, 0.02, 0.03, 0.04), description="sizes of the curve, largest change of a pixel")

    def among(self, images: int) -> int:
        """Return how many of so many images are certified."""
        return min(_CERTIFIED, images) if self.examples is None else self.examples


# Where attacks begin to tell networks of this laboratory apart; for the largest change of a pixel they are the paper's.
_ATTACKED = {"l2": (0.25, 0.5, 1.0, 1.5), "linf": (0.05, 0.1, 0.2, 0.3)}


class EvadeConfig(Settings):
    """What ``fedpriv probe`` does to images where its options do not say otherwise."""

    attacks: Annotated[
        tuple[Annotated[str, Registered(EVASIONS, NOISELESS)], ...], Field(min_length=1), AfterValidator(named_once)
    ] = Field(
        default_factory=lambda: tuple(EVASIONS),
        description="evasion attacks; unset: all; NAME-noiseless ignores the network's noise",
    )
    norm: Literal["l2", "linf"] = Field("linf", description="what perturbations are measured by")
    sizes: Annotated[Sizes, Field(min_length=1)] | None = Field(
        None,
        description="of perturbations, pixels from 0 to 1; unset: 0.05 to 0.3 for linf, 0.25 to 1.5 for l2",
    )
    steps: Count = Field(20, description="of attacks that make several")
    draws: Annotated[Integer, Field(ge=0, le=10_000)] = Field(
        8, description="draws of noise that each gradient is a mean over (EOT); 0: without noise, the weaker attack"
    )
    restarts: Count = Field(1, description="random starts of attacks that have them; the highest loss is kept")
    victims: Count | None = Field(None, description="test images that are attacked; unset: 200, or all of fewer")
    votes: Count = Field(200, description="votes that judge an attacked image")

    def among(self, images: int) -> int:
        """Return how many of so many images are attacked."""
        return min(_EVADED, images) if self.victims is None else self.victims

    @property
    def attacked_sizes(self) -> tuple[float, ...]:
        """The sizes, ascending."""
        return _ATTACKED[self.norm] if self.sizes is None else self.sizes


@SECTIONS.register
class RobustnessConfig(ExperimentSection):
    """Gaussian noise in every forward pass, behind the first affine layer or on the image.

    Its epsilon and delta name an amount of noise, as in PixelDP. They are no privacy budget, and nothing in the ledger.
    """

    name: ClassVar[str] = "robustness"
    rank: ClassVar[int] = 1
    about: ClassVar[str] = "noise inside the forward pass, for certificates of what inputs cannot change; unset: none"

    noise: Annotated[NonNegative, Field(le=MOST_NOISE)] | None = Field(
        None, description="sigma: certified radius for a margin of 1, pixels from 0 to 1; 0: none; or epsilon and size"
    )
    epsilon: Epsilon | None = Field(
        None, description="with delta, size and calibration, another name for noise (PixelDP); not a privacy budget"
    )
    delta: Annotated[Real, Field(gt=0, lt=1)] = Field(0.05, description="with epsilon")
    size: Positive | None = Field(None, description="with epsilon: the construction size, pixels from 0 to 1")
    calibration: Literal["analytic", "extended", "classic"] = Field(
        "analytic", description="with epsilon: formula for sigma over size; extended: the paper's Theorem 2"
    )
    place: Literal["hidden", "input"] = Field(
        "hidden", description="after the first affine layer (Secure-SGD), or on the image"
    )
    norm: Literal["l2", "linf"] = Field("l2", description="the norm of perturbations that the noise is scaled for")
    redistribution: Literal["uniform", "vulnerable", "rows", "informative"] = Field(
        "uniform",
        description="r, the shares of the noise power: even; by the loss's gradient at public images (the paper's "
        "Eq. 9); by the norms of the layer's rows; less noise on pixels that vary (place = 'input')",
    )
    inflation: Annotated[Real, Field(gt=0, le=100)] = Field(
        1.0, description="beta, for vulnerable and rows: power of what the shares follow; large: more uneven"
    )
    public_examples: Count = Field(64, description="for vulnerable and informative: test images kept for the shares")
    certify: CertifyConfig = Field(default_factory=lambda: CertifyConfig())
    evade: EvadeConfig = Field(default_factory=lambda: EvadeConfig())

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        if (self.noise is None) == (self.epsilon is None):
            raise InputError("give either noise, or epsilon and size")
        if self.epsilon is None:
            idle = [key for key in _USED_BY_EPSILON if getattr(self, key) != RobustnessConfig.model_fields[key].default]
            if idle:
                raise InputError(f"{idle[0]} is for epsilon, and noise = {self.noise:g} is given")
        elif self.size is None:
            raise InputError(f"epsilon = {self.epsilon:g} needs size, the perturbation that the noise is made for")
        elif not self.sigma <= MOST_NOISE:
            raise InputError(f"epsilon = {self.epsilon:g} needs noise above {MOST_NOISE:g}")
        if 0 < self.sigma < LEAST_NOISE:
            raise InputError(f"noise is {self.sigma:g}; allowed: 0, or from {LEAST_NOISE:g}: float32 rounds less away")
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.redistribution == "informative" and self.place == "hidden":
            raise self.wrong("redistribution", "for place = 'input'; allowed: uniform, vulnerable, rows")
        if self.redistribution == "rows" and self.place == "input":
            raise self.wrong("redistribution", "for place = 'hidden'; allowed: uniform, vulnerable, informative")
        if self.inflation != 1 and self.redistribution not in ("vulnerable", "rows"):
            raise InputError(f"inflation is for vulnerable and rows, not for redistribution = {self.redistribution!r}")
        return self

    @property
    def sigma(self) -> float:
        """The certified radius for a margin of 1, in pixels from 0 to 1, measured in ``norm``; 0: there is no noise.

        From epsilon it is size times noise over sensitivity (Phan et al. 2019, Eq. 5 and 11).
        """
        if self.epsilon is None:
            return self.noise or 0.0
        from fedpriv.accounting.gaussian import CALIBRATIONS

        return (self.size or 0.0) * CALIBRATIONS[self.calibration](self.epsilon, self.delta)

    @classmethod
    def noisy(cls, experiment: "Experiment") -> Self | None:
        """Return the settings of an experiment whose forward pass has noise; ``None``: it has none."""
        found = cls.of(experiment)
        return found if found is not None and found.sigma > 0 else None

    @classmethod
    def public(cls, experiment: "Experiment") -> int:
        """How many test images the noise is shared out by, so that they are neither certified nor attacked."""
        found = cls.noisy(experiment)
        return 0 if found is None else found.public_images

    @classmethod
    def certified(cls, experiment: "Experiment") -> CertifyConfig | None:
        """How a trial's final model is certified: where ``[robustness.certify]`` is given, and there is noise."""
        found = cls.noisy(experiment)
        return found.certify if found is not None and "certify" in found.model_fields_set else None

    @classmethod
    def evaded(cls, experiment: "Experiment") -> EvadeConfig | None:
        """How a trial's final model is attacked: where ``[robustness.evade]`` is given, with noise or without."""
        found = cls.of(experiment)
        return found.evade if found is not None and "evade" in found.model_fields_set else None

    @override
    def forward_noise(self) -> ForwardNoise | None:
        return self if self.sigma > 0 else None

    def put_into(self, network: "nn.Module", shape: tuple[int, int, int], seed: int) -> "nn.Module":
        """Return the network with a noise layer; see :class:`fedpriv.core.sections.ForwardNoise`."""
        from fedpriv.robustness.build import with_noise

        return with_noise(network, self.place, shape, seed)

    def scaled(self, experiment: "Experiment", dataset: "Dataset", network: "nn.Module") -> NoiseInPass:
        """Share the noise out and scale it; see :class:`fedpriv.core.sections.ForwardNoise`."""
        from fedpriv.robustness.build import scaled_smoothing

        return scaled_smoothing(self, experiment, dataset, network)

    @property
    def public_images(self) -> int:
        """How many test images the shares are computed from, and which are therefore not certified."""
        return self.public_examples if self.redistribution in ("vulnerable", "informative") else 0

    @override
    def conflicts(self, experiment: "Experiment") -> None:
        algorithm = algorithm_of(experiment)
        if not algorithm.trains_in_steps:
            raise InputError(f"[robustness] is noise in the training of uploads; with {algorithm.name} leave it out")

    @override
    def decisive(self) -> dict[str, Any]:
        """The settings that decide what the noise is, without how it is certified and attacked."""
        return self.model_dump(mode="json", exclude={"certify", "evade"}) if self.sigma > 0 else {}
