"""What certificates and evasion attacks found: lines for each image and attempt, robustness.json and evasion.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from fedpriv.attacks.evasion.steps import EvasionAttempt
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.reading import FileRecord, Record
from fedpriv.core.runs import RunFolder
from fedpriv.robustness.norms import LayerNorms

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
    """One image: what no perturbation below a radius can change about the vote on it."""

    image: Annotated[int, Field(ge=0)]  # its row in the test set
    label: Annotated[int, Field(ge=0)]  # its class
    predicted: Annotated[int, Field(ge=0)]  # the class that the first votes chose
    count: Annotated[int, Field(ge=0)]  # fresh votes for it
    votes: Annotated[int, Field(ge=1)]  # fresh votes in all
    runner_up: Annotated[int, Field(ge=0)]  # fresh votes for the strongest other class
    lower: Share  # what the probability of the chosen class is at least
    upper: Share  # what that of any other class is at most
    margins: Mapping[str, NotNegative]  # bound -> margin, 0 where it proves nothing; `main` is the one to use
    # below which no perturbation changes the vote, Euclidean, in pixels from 0 to 1; of the main margin
    radius_l2: NotNegative
    radius_linf: NotNegative  # the same for the largest change of a pixel

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
                    allowed=f"at most margins.{stronger} = {self.margins[stronger]:g}",
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
    """The noise that the certificates are about."""

    place: str  # hidden or input
    redistribution: str  # how it is shared out
    sigma: float  # what it is scaled by: the radius for a margin of 1 in `norm`, pixels from 0 to 1
    norm: Literal["l2", "linf"]  # l2 or linf
    afterwards: bool  # whether the model was trained without this noise
    dimension: int  # K, numbers that noise is added to
    model: str  # SHA-256 of the certified model's numbers, hexadecimal
    # that names sigma, with delta and size; `None` where sigma was given. It is no privacy budget.
    epsilon: float | None = None


@dataclass(frozen=True)
class CertifiedCurve(Record):
    """Certified accuracy against size: the share of images whose right class no perturbation of that size changes."""

    norm: str  # l2 or linf
    bound: str  # which margin
    sizes: tuple[float, ...]  # of perturbations, pixels from 0 to 1, ascending
    shares: tuple[Interval, ...]  # with Wilson intervals over images


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


class Robustness(FileRecord):
    """robustness.json."""

    path: ClassVar[str] = "robustness.json"

    noise: NoiseFacts  # that was added
    norms: LayerNorms  # of the first layer, in units of the noise
    examples: Annotated[int, Field(ge=1)]  # images, drawn from the test set by the seed
    selection: int  # votes that chose a class
    votes: int  # fresh votes of an image
    alpha: float  # probability with which one certificate may be wrong
    rivals: str  # each or together, how other classes were bounded
    wrong_at_most: int  # of all certificates, with 95 % confidence
    voted: Interval  # the share of images whose chosen class is right
    noiseless: Interval  # that of the model without noise, on the same images
    abstained: int  # images whose votes do not show which class is ahead
    curves: tuple[CertifiedCurve, ...]  # for each norm and bound
    radii: tuple[MeanRadius, ...]  # for each bound
    reach: Reach  # how large a radius can be at all
    seconds: float  # wall time

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

    def mean_radius(self, norm: str, bound: str) -> float:
        """Return one mean radius."""
        mean = next(each for each in self.radii if each.bound == bound)
        return mean.l2 if norm == "l2" else mean.linf

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


@dataclass(frozen=True)
class EvasionCurve(Record):
    """Accuracy under one attack against size."""

    attack: str  # the name
    draws: int  # of noise that each gradient is a mean over; 0: without noise
    shares: tuple[Interval, ...]  # for each size the share of all victims that is right, with Wilson intervals
    broken: tuple[int, ...]  # for each size how many certificates it broke


def _other(share: Interval) -> Interval:
    """The share of the others."""
    low, high = (None if end is None else 1 - end for end in (share.high, share.low))
    return Interval(1 - share.value, low, high, share.confidence)


class Evasion(FileRecord):
    """evasion.json. At every size: certified <= the least of all attacks <= each attack <= clean."""

    path: ClassVar[str] = "evasion.json"

    norm: Literal["l2", "linf"]  # l2 or linf
    sizes: Annotated[tuple[float, ...], Field(min_length=1)]  # ascending, pixels from 0 to 1
    steps: int  # of an attack that makes several
    restarts: int  # of attacks with random starts
    votes: int  # of an attacked image; 1 without noise
    victims: Annotated[int, Field(ge=1)]  # test images, drawn by the seed; certified ones where there are certificates
    attacked: int  # those of them that are right unattacked; the others count as wrong under every attack
    clean: Interval  # the share that is right unattacked
    # for each size the share that is proven to stay right; `None`: nothing was certified
    certified: tuple[Interval, ...] | None
    least: tuple[Interval, ...]  # for each size the share that stays right under every attack up to it
    curves: Annotated[tuple[EvasionCurve, ...], Field(min_length=1)]  # one an attack
    broken: int  # certificates that attacks broke
    wrong_at_most: int | None  # certificates that may be wrong, of all that were made, with 95 % confidence
    seconds: float  # wall time

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        counts = {len(self.least), len(self.least if self.certified is None else self.certified)}
        counts |= {len(figures) for curve in self.curves for figures in (curve.shares, curve.broken)}
        if counts != {len(self.sizes)}:
            raise ValueError("there is not one figure for each size")
        return self

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The share that attacks turned at each size, and how many certificates they broke."""
        proven: Sequence[Interval | None] = self.certified or (None,) * len(self.sizes)
        turned = tuple(
            Figure(
                f"wrong under attack at {self.norm} {size:g}",
                _other(least),
                guess=1 - self.clean.value,
                ceiling=None if held is None else 1 - held.value,
                theorem="certificates",
                holds=True,
            )
            for size, least, held in zip(self.sizes, self.least, proven, strict=True)
        )
        if self.wrong_at_most is None:
            return turned
        broken = Figure(
            "broken certificates",
            Interval(self.broken, None, None),
            ceiling=0.0,
            theorem=f"by chance at most {self.wrong_at_most} are wrong, with 95 % confidence; they have broken = true "
            "in robustness/attacks.jsonl",
            unit="number",
            holds=not self.broken,
        )
        return (*turned, broken)

    @property
    def attempts(self) -> int:
        """How many lines attacks.jsonl has."""
        return self.attacked * len(self.curves) * len(self.sizes)


Line = TypeVar("Line", bound=Record)
_CERTIFICATES, _ATTEMPTS = "robustness/certificates.jsonl", "robustness/attacks.jsonl"


def read_certificates(folder: RunFolder) -> tuple[Certificate, ...]:
    """Return the certificate of each image; empty if none were made, or not all of their files were written."""
    found = folder.read(Robustness)
    return () if found is None else _whole(folder, _CERTIFICATES, Certificate, found, found.examples)


def read_attempts(folder: RunFolder) -> tuple[EvasionAttempt, ...]:
    """Return every attempt to change a vote; empty if there were none, or not all of their files were written."""
    found = folder.read(Evasion)
    return () if found is None else _whole(folder, _ATTEMPTS, EvasionAttempt, found, found.attempts)


def _whole(folder: RunFolder, path: str, kind: type[Line], said: FileRecord, count: int) -> tuple[Line, ...]:
    lines = folder.whole_lines(path, kind)
    if len(lines) != count:
        raise InputError(f"{folder.path / path} is damaged: it has {len(lines)} lines; {said.path} is of {count}")
    return lines


def write_certificates(folder: RunFolder, robustness: Robustness, certificates: Sequence[Certificate]) -> None:
    """Write the certificates, then robustness.json, which says that all files agree."""
    folder.write_jsonl(_CERTIFICATES, [asdict(each) for each in certificates])
    folder.write(robustness)


def write_evasion(folder: RunFolder, evasion: Evasion, attempts: Sequence[EvasionAttempt]) -> None:
    """Write the attempts, then what they show, in place of what an earlier probe found."""
    (folder.path / _ATTEMPTS).parent.mkdir(exist_ok=True)
    remove_evasion(folder)
    folder.write_jsonl(_ATTEMPTS, [asdict(each) for each in attempts])
    folder.write(evasion)


def remove_certificates(folder: RunFolder) -> None:
    """Remove robustness.json before other files of certificates change, and attacks that were judged by these."""
    remove_evasion(folder)
    folder.remove(Robustness.path)


def remove_evasion(folder: RunFolder) -> None:
    """Remove what an earlier probe found."""
    folder.remove(Evasion.path, _ATTEMPTS)
