"""What ``fedpriv probe`` found by changing images: a line of robustness/attacks.jsonl an attempt, and evasion.json."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.records.attacks import Interval
from fedpriv.core.records.reading import Model, Record

# Sizes are projected onto in the network's numbers, which may be float32.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Attempt(Record):
    """One attack of one size on one image that the votes had right before.

    Attributes:
        image: its row in the test set.
        label: its class.
        attack: the name.
        norm: l2 or linf.
        size: of the ball, pixels from 0 to 1.
        distance: how far the attacked image is from the original, in the norm.
        predicted: the class that the votes choose of the attacked image.
        count: votes for the label.
        rival: votes for the strongest other class.
        votes: in all.
        radius: below which the image's certificate says that the vote cannot change; ``None``: there is none.
        broken: whether the votes refute the certificate.

    Raises:
        ValueError: the image is outside the ball, or figures do not fit together.
    """

    image: Annotated[int, Field(ge=0)]
    label: Annotated[int, Field(ge=0)]
    attack: str
    norm: str
    size: Annotated[float, Field(gt=0)]
    distance: Annotated[float, Field(ge=0)]
    predicted: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=0)]
    rival: Annotated[int, Field(ge=0)]
    votes: Annotated[int, Field(ge=1)]
    radius: Annotated[float, Field(ge=0)] | None = None
    broken: bool = False

    def __post_init__(self) -> None:
        if self.count + self.rival > self.votes:
            raise ValueError(f"{self.count} and {self.rival} of {self.votes} votes")
        if self.distance > self.size * (1 + _ROUNDING) + _ROUNDING:
            raise InputError(key="distance", given=self.distance, allowed=f"above size = {self.size:g}")
        if self.broken and (self.right or not self.certified):
            raise ValueError("broken = true, where no certificate can be broken")

    @property
    def right(self) -> bool:
        """Whether the vote is still right."""
        return self.predicted == self.label

    @property
    def certified(self) -> bool:
        """Whether a certificate says that no perturbation of this size changes the vote."""
        return self.radius is not None and self.size < self.radius


@dataclass(frozen=True)
class EvasionCurve(Record):
    """Accuracy under one attack against size.

    Attributes:
        attack: the name.
        draws: of noise that each gradient is a mean over; 0: without noise.
        shares: for each size the share of all victims that is right, with Wilson intervals.
        broken: for each size how many certificates it broke.
    """

    attack: str
    draws: int
    shares: tuple[Interval, ...]
    broken: tuple[int, ...]


class Evasion(Model):
    """evasion.json. At every size: certified <= the least of all attacks <= each attack <= clean.

    Attributes:
        norm: l2 or linf.
        sizes: ascending, pixels from 0 to 1.
        steps: of an attack that makes several.
        restarts: of attacks with random starts.
        votes: of an attacked image; 1 without noise.
        victims: test images, drawn by the seed; certified ones where there are certificates.
        attacked: those of them that are right unattacked; the others count as wrong under every attack.
        clean: the share that is right unattacked.
        certified: for each size the share that is proven to stay right; ``None``: nothing was certified.
        least: for each size the share that stays right under every attack up to it.
        curves: one an attack.
        broken: certificates that attacks broke.
        wrong_at_most: certificates that may be wrong, of all that were made, with 95 % confidence.
        seconds: wall time.

    Raises:
        ValueError: there is not one figure for each size.
    """

    norm: Literal["l2", "linf"]
    sizes: Annotated[tuple[float, ...], Field(min_length=1)]
    steps: int
    restarts: int
    votes: int
    victims: Annotated[int, Field(ge=1)]
    attacked: int
    clean: Interval
    certified: tuple[Interval, ...] | None
    least: tuple[Interval, ...]
    curves: Annotated[tuple[EvasionCurve, ...], Field(min_length=1)]
    broken: int
    wrong_at_most: int | None
    seconds: float

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        counts = {len(self.least), len(self.least if self.certified is None else self.certified)}
        counts |= {len(figures) for curve in self.curves for figures in (curve.shares, curve.broken)}
        if counts != {len(self.sizes)}:
            raise ValueError("there is not one figure for each size")
        return self

    @property
    def attempts(self) -> int:
        """How many lines attacks.jsonl has."""
        return self.attacked * len(self.curves) * len(self.sizes)
