"""What ``fedpriv certify`` found: a line of robustness/certificates.jsonl for each image, and robustness.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.records.attacks import Interval
from fedpriv.core.records.reading import Model, Record

BOUNDS: Mapping[str, str] = {
    "main": "main: exact for Gaussian noise",
    "renyi": "Renyi",
    "analytic": "PixelDP, analytic Gaussian",
    "classic": "PixelDP, classic Gaussian",
    "extended": "PixelDP, extended Gaussian",
    "paper": "the paper's: extended, Hoeffding",
}
"""The bounds under which a certificate has a margin, and what they are called."""

Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]

# Margins are maxima that are searched for, and agree to this where theorems say that they are equal.
_TOLERANCE = 1e-9
_ORDER = (("extended", "analytic"), ("classic", "analytic"), ("analytic", "main"), ("renyi", "main"))


@dataclass(frozen=True)
class Certificate(Record):
    """One image: what no perturbation below a radius can change about the vote on it.

    Attributes:
        image: its row in the test set.
        label: its class.
        predicted: the class that the first votes chose.
        count: fresh votes for it.
        votes: fresh votes in all.
        runner_up: fresh votes for the strongest other class.
        lower: what the probability of the chosen class is at least.
        upper: what that of any other class is at most.
        margins: bound -> margin, 0 where it proves nothing; ``main`` is the one to use.
        radius_l2: below which no perturbation changes the vote, Euclidean, in pixels from 0 to 1; of the main margin.
        radius_linf: the same for the largest change of a pixel.

    Raises:
        ValueError: a weaker theorem is said to prove more than a stronger one, or counts do not fit.
    """

    image: Annotated[int, Field(ge=0)]
    label: Annotated[int, Field(ge=0)]
    predicted: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=0)]
    votes: Annotated[int, Field(ge=1)]
    runner_up: Annotated[int, Field(ge=0)]
    lower: Share
    upper: Share
    margins: Mapping[str, NotNegative]
    radius_l2: NotNegative
    radius_linf: NotNegative

    def __post_init__(self) -> None:
        if self.count + self.runner_up > self.votes:
            raise ValueError(f"{self.count} and {self.runner_up} of {self.votes} votes")
        missing = [name for pair in _ORDER for name in pair if name not in self.margins]
        if missing:
            raise ValueError(f"margins has no {missing[0]!r}")
        for weaker, stronger in _ORDER:
            if self.margins[weaker] > self.margins[stronger] + _TOLERANCE:
                raise InputError(
                    key=f"margins.{weaker}",
                    given=self.margins[weaker],
                    allowed=f"above margins.{stronger} = {self.margins[stronger]:g}, which no votes give",
                )

    @property
    def right(self) -> bool:
        """Whether the chosen class is the image's."""
        return self.predicted == self.label

    @property
    def abstains(self) -> bool:
        """Whether the votes do not show which class is ahead."""
        return self.margins["main"] == 0

    def radius(self, norm: str, bound: str = "main") -> float:
        """The radius in ``l2`` or ``linf`` under a bound's margin; 0 where the class is wrong or nothing is proven."""
        main = self.margins["main"]
        if not self.right or main == 0:
            return 0.0
        return (self.radius_l2 if norm == "l2" else self.radius_linf) * (self.margins[bound] / main)

    def holds(self, norm: str, size: float, bound: str = "main") -> bool:
        """Whether the right class is proven for every perturbation up to this size."""
        return size < self.radius(norm, bound)


@dataclass(frozen=True)
class NoiseFacts(Record):
    """The noise that the certificates are about.

    Attributes:
        place: hidden or input.
        redistribution: how it is shared out.
        sigma: what it is scaled by: the radius for a margin of 1 in ``norm``, pixels from 0 to 1.
        norm: l2 or linf.
        afterwards: whether the model was trained without this noise.
        dimension: K, numbers that noise is added to.
        epsilon: that names sigma, with delta and size; ``None`` where sigma was given. It is no privacy budget.
        model: SHA-256 of the certified model's numbers, hexadecimal.
    """

    place: str
    redistribution: str
    sigma: float
    norm: Literal["l2", "linf"]
    afterwards: bool
    dimension: int
    model: str
    epsilon: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class NormFacts(Record):
    """How far a perturbation moves the noisy value at most, in units of the noise: a radius is margin over norm.

    Attributes:
        l2: S_2, from above.
        linf: S_infinity, from above.
        linf_how: how it was bounded.
        linf_least: a lower bound of S_infinity, by sign ascent.
    """

    l2: float
    linf: float
    linf_how: str
    linf_least: float


@dataclass(frozen=True)
class CertifiedCurve(Record):
    """Certified accuracy against size: the share of images whose right class no perturbation of that size changes.

    Attributes:
        norm: l2 or linf.
        bound: which margin.
        sizes: of perturbations, pixels from 0 to 1, ascending.
        shares: with Wilson intervals over images.
    """

    norm: str
    bound: str
    sizes: tuple[float, ...]
    shares: tuple[Interval, ...]


@dataclass(frozen=True)
class Reach(Record):
    """The radii of an image that all votes agree on: no certificate of as many votes has larger ones."""

    l2: float
    linf: float

    def of(self, norm: str) -> float:
        """In ``l2`` or ``linf``."""
        return self.l2 if norm == "l2" else self.linf


@dataclass(frozen=True)
class MeanRadius(Record):
    """The mean radius over all images, 0 for wrong ones, under one bound."""

    bound: str
    l2: float
    linf: float


class Robustness(Model):
    """robustness.json.

    Attributes:
        noise: that was added.
        norms: of the first layer, in units of the noise.
        examples: images, drawn from the test set by the seed.
        selection: votes that chose a class.
        votes: fresh votes of an image.
        alpha: probability with which one certificate may be wrong.
        rivals: each or together, how other classes were bounded.
        wrong_at_most: of all certificates, with 95 % confidence.
        voted: the share of images whose chosen class is right.
        noiseless: that of the model without noise, on the same images.
        abstained: images whose votes do not show which class is ahead.
        curves: for each norm and bound.
        radii: for each bound.
        reach: how large a radius can be at all.
        seconds: wall time.

    Raises:
        ValueError: a curve or a mean radius is missing, or curves have other sizes than shares or than one another.
    """

    noise: NoiseFacts
    norms: NormFacts
    examples: Annotated[int, Field(ge=1)]
    selection: int
    votes: int
    alpha: float
    rivals: str
    wrong_at_most: int
    voted: Interval
    noiseless: Interval
    abstained: int
    curves: tuple[CertifiedCurve, ...]
    radii: tuple[MeanRadius, ...]
    reach: Reach
    seconds: float

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        sizes = {(curve.norm, curve.bound): curve.sizes for curve in self.curves}
        for norm in ("l2", "linf"):
            missing = [bound for bound in BOUNDS if (norm, bound) not in sizes]
            if missing:
                raise ValueError(f"curves has none of {missing[0]} in {norm}")
            if any(sizes[norm, bound] != sizes[norm, "main"] for bound in BOUNDS):
                raise ValueError(f"curves in {norm} have different sizes")
        if any(len(curve.sizes) != len(curve.shares) for curve in self.curves):
            raise ValueError("a curve has not one share for each size")
        without = set(BOUNDS) - {radius.bound for radius in self.radii}
        if without:
            raise ValueError(f"radii has none of {min(without)}")
        return self

    def curve(self, norm: str, bound: str = "main") -> CertifiedCurve:
        """Return one curve."""
        return next(curve for curve in self.curves if (curve.norm, curve.bound) == (norm, bound))

    def beyond(self, norm: str, sizes: Sequence[float]) -> tuple[float, ...]:
        """Those of the sizes that no certificate of so many votes holds for."""
        return tuple(size for size in sizes if size >= self.reach.of(norm))


def mean_radius(certificates: Sequence[Certificate], bound: str) -> MeanRadius:
    """Return the mean radius of at least one certificate under a bound."""
    l2, linf = (sum(each.radius(norm, bound) for each in certificates) / len(certificates) for norm in ("l2", "linf"))
    return MeanRadius(bound, l2, linf)


def middle(sizes: Sequence[float]) -> int:
    """Return the place of the size that headlines are about: the middle one, of an even number the smaller."""
    return (len(sizes) - 1) // 2
