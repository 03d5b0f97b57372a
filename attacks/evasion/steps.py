"""The loop of all evasion attacks: gradient steps inside a ball around the image and inside the range of pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.attacks.evasion.methods import EvasionAttack
from fedpriv.attacks.intervals import binomial_upper
from fedpriv.core.errors import InputError
from fedpriv.core.names import NormName
from fedpriv.core.randomness import torch_stream
from fedpriv.core.reading import Record

# What an evasion attack climbs: the loss of the network as it is, or through the expectation over its noise.


Loss = Callable[[Tensor, Tensor], Tensor]
"""Images (B, C, H, W) on [0, 1] and labels (B,) -> each image's own loss (B,), differentiable by the images."""


class Target(Protocol):
    """A network that is attacked, and that judges by its votes."""

    @property
    def noisy(self) -> bool:
        """Whether there is noise in it."""

    @property
    def dimension(self) -> int:
        """How many numbers it draws for one image; without noise, how many it is fed."""

    def loss(self, draws: int, stream: torch.Generator) -> Loss:
        """Return the loss through so many draws of noise, new ones whenever it is asked; 0: without noise."""

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Return how often each class wins, (B, classes), int64, on the CPU."""


@dataclass(frozen=True, eq=False)
class PlainTarget:
    """A network without noise: each image has one vote."""

    network: nn.Module  # in evaluation mode
    normalise: Callable[[Tensor], Tensor]  # (B, C, H, W) on [0, 1] -> what the network is fed
    classes: int  # number of logits
    dimension: int  # numbers of an image
    noisy: ClassVar[bool] = False

    def loss(self, draws: int, stream: torch.Generator) -> Loss:
        """Return the cross entropy; there is nothing to draw."""
        return lambda images, labels: functional.cross_entropy(
            self.network(self.normalise(images)), labels, reduction="none"
        )

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Return one vote of each image, whatever ``count`` says."""
        with torch.no_grad():
            won = self.network(self.normalise(images)).argmax(dim=1)
        return functional.one_hot(won, self.classes).cpu()


def gradient(loss: Loss, images: Tensor, labels: Tensor) -> Tensor:
    """Return each image's gradient of its own loss, (B, C, H, W), detached; zero where it is not finite."""
    leaf = images.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf, labels).sum(), leaf, allow_unused=True)
    if slope is None:
        raise InputError("the network has no derivative in its input, which these attacks follow")
    return slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


_PIXELS = (1, 2, 3)
_FAR_L2 = 2.5


@dataclass(frozen=True)
class Ball:
    """The perturbations that are allowed."""

    norm: NormName  # l2: Euclidean; linf: the largest change of a pixel
    size: float  # above 0, in pixels from 0 to 1

    def distance(self, origins: Tensor, images: Tensor) -> Tensor:
        """Return how far images (B, C, H, W) are from their origins, (B,)."""
        order = 2 if self.norm == "l2" else torch.inf
        return torch.linalg.vector_norm(images - origins, order, dim=_PIXELS)

    def project(self, origins: Tensor, images: Tensor) -> Tensor:
        """Return images in the box [0, 1] and in the ball; the Euclidean one last, which leaves no box."""
        boxed = images.clamp(0, 1)
        if self.norm == "linf":
            return origins + (boxed - origins).clamp(-self.size, self.size)
        length = self.distance(origins, boxed).clamp(min=self.size)
        return origins + (boxed - origins) * (self.size / length)[:, None, None, None]

    def direction(self, followed: Tensor) -> Tensor:
        """Return the steepest way of length 1 in the norm, (B, C, H, W); zero where what is followed is zero."""
        if self.norm == "linf":
            return followed.sign()
        length: Tensor = torch.linalg.vector_norm(followed, dim=_PIXELS, keepdim=True)
        return followed / length.where(length > 0, 1)

    def anywhere(self, origins: Tensor, stream: torch.Generator) -> Tensor:
        """Return points drawn uniformly from the ball, then put into the box."""
        device, dtype = origins.device, origins.dtype
        if self.norm == "linf":
            moved = 2 * torch.rand(origins.shape, generator=stream, device=device, dtype=dtype) - 1
        else:
            # A share u of the ball's volume lies within the radius u^(1/d).
            shares = torch.rand(len(origins), 1, 1, 1, generator=stream, device=device, dtype=dtype)
            ways = self.direction(torch.randn(origins.shape, generator=stream, device=device, dtype=dtype))
            moved = ways * shares ** (1 / origins[0].numel())
        return self.project(origins, origins + self.size * moved)


# Run one evasion attack of one size on many images; votes and certificates judge the result.


# Noisy numbers that are differentiated at once, over images, restarts and draws.
_AT_ONCE = 1 << 22
_MOST_IMAGES = 50
# A certified image whose vote turned is asked again, so many times as often: near a tie, chance turns votes, too. Few
# votes can refute nothing, however many attacks share the error.
_AGAIN, _LEAST_AGAIN = 20, 2_000
# Sizes are projected onto in the network's numbers, which may be float32.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class EvasionAttempt(Record):
    """One attack of one size on one image that the votes had right before."""

    image: Annotated[int, Field(ge=0)]  # its row in the test set
    label: Annotated[int, Field(ge=0)]  # its class
    attack: str  # the name
    norm: str  # l2 or linf
    size: Annotated[float, Field(gt=0)]  # of the ball, pixels from 0 to 1
    distance: Annotated[float, Field(ge=0)]  # how far the attacked image is from the original, in the norm
    predicted: Annotated[int, Field(ge=0)]  # the class that the votes choose of the attacked image
    count: Annotated[int, Field(ge=0)]  # votes for the label
    rival: Annotated[int, Field(ge=0)]  # votes for the strongest other class
    votes: Annotated[int, Field(ge=1)]  # in all
    # below which the image's certificate says that the vote cannot change; `None`: there is none
    radius: Annotated[float, Field(ge=0)] | None = None
    broken: bool = False  # whether the votes refute the certificate

    def __post_init__(self) -> None:
        if self.count + self.rival > self.votes:
            raise ValueError(f"{self.count} and {self.rival} of {self.votes} votes")
        if self.distance > self.size * (1 + _ROUNDING) + _ROUNDING:
            raise InputError(key="distance", given=self.distance, allowed=f"at most size = {self.size:g}")
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


@dataclass(frozen=True, eq=False)
class Victims:
    """Images that are right unattacked."""

    rows: Sequence[int]  # of the test set, N
    images: Tensor  # (N, C, H, W) on [0, 1], on the network's device
    labels: Tensor  # (N,), on the network's device
    radii: Mapping[int, float]  # row -> radius of its certificate, in the norm of the attacks; empty: there are none

    def part(self, start: int, count: int) -> "Victims":
        """Return ``count`` of them, or as many as there are from ``start`` on."""
        chunk = slice(start, start + count)
        return Victims(self.rows[chunk], self.images[chunk], self.labels[chunk], self.radii)


@dataclass(frozen=True)
class EvasionTrial:
    """One attack of one size."""

    name: str  # of the attack, as it is recorded
    kind: type[EvasionAttack]  # the attack
    ball: Ball  # how far it goes
    draws: int  # of noise for each gradient; 0: without noise
    steps: int  # of attacks that make several
    restarts: int  # of attacks with random starts
    votes: int  # that judge an attacked image
    alpha: float  # probability with which the sound certificate of one image may be called broken
    seed: int  # of random starts, draws and votes

    @property
    def purpose(self) -> str:
        """Tells its streams from those of all others."""
        return f"evasion-{self.name}-{self.ball.norm}-{self.ball.size!r}"

    def attacked(self, loss: Loss, images: Tensor, labels: Tensor, stream: torch.Generator) -> Tensor:
        """Return images (B, C, H, W) in ball and box whose loss the attack made large."""
        attack, ball = self.kind, self.ball
        count = 1 if attack.single else self.steps
        far = attack.far if ball.norm == "linf" or attack.single else _FAR_L2
        moved = ball.anywhere(images, stream) if attack.starts_anywhere else images
        followed: Tensor | None = None
        for _ in range(count):
            followed = attack.followed(followed, gradient(loss, moved, labels))
            moved = ball.project(images, moved + far * ball.size / count * ball.direction(followed))
        return moved

    def strongest(self, loss: Loss, images: Tensor, labels: Tensor, stream: torch.Generator) -> Tensor:
        """Return of several restarts, all attacked at once, the one with each image's highest loss."""
        copies = self.restarts if self.kind.starts_anywhere else 1
        every, their_labels = images.repeat(copies, 1, 1, 1), labels.repeat(copies)
        moved = self.attacked(loss, every, their_labels, stream)
        if copies == 1:
            return moved
        with torch.no_grad():
            best = loss(moved, their_labels).view(copies, -1).argmax(dim=0)
        return moved.view(copies, *images.shape)[best, torch.arange(len(images), device=best.device)]


def attempts(trial: EvasionTrial, target: Target, victims: Victims) -> list[EvasionAttempt]:
    """Attack images, and have each attacked one voted on."""
    many = max(1, trial.draws) * (trial.restarts if trial.kind.starts_anywhere else 1)
    step = min(_MOST_IMAGES, max(1, _AT_ONCE // (many * target.dimension)))
    attempts: list[EvasionAttempt] = []
    for start in range(0, len(victims.rows), step):
        part = victims.part(start, step)
        stream = torch_stream(trial.seed, trial.purpose, part.rows[0], device=part.images.device)
        moved = trial.strongest(target.loss(trial.draws, stream), part.images, part.labels, stream)
        attempts += _judged(trial, target, part, moved)
    return attempts


def _judged(trial: EvasionTrial, target: Target, victims: Victims, attacked: Tensor) -> list[EvasionAttempt]:
    """A line for each image; a certified one whose vote turned is asked again, and that answer counts."""
    votes = target.votes(attacked, trial.votes, f"{trial.purpose}-votes", victims.rows)
    distances = trial.ball.distance(victims.images, attacked)
    lines = [_line(trial, victims, at, float(distances[at]), votes[at]) for at in range(len(attacked))]
    turned = [at for at, line in enumerate(lines) if line.certified and not line.right]
    if turned:
        rows = [victims.rows[at] for at in turned]
        votes = target.votes(attacked[turned], max(_AGAIN * trial.votes, _LEAST_AGAIN), f"{trial.purpose}-again", rows)
        for at, counts in zip(turned, votes, strict=True):
            lines[at] = _line(trial, victims, at, float(distances[at]), counts)
    return lines


def _line(trial: EvasionTrial, victims: Victims, at: int, distance: float, votes: Tensor) -> EvasionAttempt:
    """One line; a certificate is broken where, of the votes for two classes, its own has surely less than half."""
    radius, label, ball = victims.radii.get(victims.rows[at]), int(victims.labels[at]), trial.ball
    others = votes.clone()
    others[label] = 0
    count, rival = int(votes[label]), int(others.max())
    proven = radius is not None and ball.size < radius
    return EvasionAttempt(
        image=victims.rows[at],
        label=label,
        attack=trial.name,
        norm=ball.norm,
        size=ball.size,
        distance=distance,
        predicted=int(votes.argmax()),
        count=count,
        rival=rival,
        votes=int(votes.sum()),
        radius=radius,
        broken=proven and rival > count and binomial_upper(count, count + rival, trial.alpha) < 0.5,
    )
