"""Scene: what all attacks share: the network, the public scale of images, random starts and restarts."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.priors import FEWEST_IMAGES, GaussianPrior, TrainedPrior, fit_prior, generic_prior
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.core.columns import ColumnSpec
from fedpriv.core.randomness import torch_stream

Progress = Callable[[int, int, float], None]
"""(iterations done, iterations in all, mean over victims of the best finite loss so far)."""


def one_of(progress: Progress, part: int, parts: int) -> Progress:
    """Return the listener of one of so many equal parts, such as one upload of several."""
    return lambda done, total, loss: progress(part * total + done, parts * total, loss)


def counted(progress: Progress, before: int, total: int) -> Callable[[int, float], None]:
    """Return the listener of a part that counts its own iterations: so many were made before, of so many in all."""
    return lambda done, loss: progress(before + done, total, loss)


Report = Callable[[int, Tensor], bool]
"""(iterations done, losses (N,)) of one chunk of rows -> whether to go on: else time is up."""


ENDED = "time was up: this is the best so far"
_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)


@contextmanager
def limited_to(seconds: float | None) -> Iterator[None]:
    """Have searches inside end after so many seconds, with the best that they have; ``None``: they go to the end."""
    token = _UNTIL.set(math.inf if seconds is None else time.monotonic() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def time_left() -> float:
    """Seconds until a search is to end."""
    return _UNTIL.get() - time.monotonic()


def time_is_up() -> bool:
    """Whether a search is to end now."""
    return time_left() <= 0


@dataclass(frozen=True)
class Scene:
    """The public facts of a set of victims that are attacked together."""

    network: Network  # the network
    shape: tuple[int, int, int]  # (C, H, W)
    classes: int  # number of classes
    mean: Tensor  # (C, 1, 1), the public mean
    std: Tensor  # (C, 1, 1), the public standard deviation
    public_images: Tensor | None = None  # (M, C, H, W) on the [0, 1] scale; None: there are none
    columns: tuple[ColumnSpec, ...] = ()  # of the table whose rows the "images" are; empty: they are images
    trained: TrainedPrior | None = None  # a prior of such images that was trained; None: there is none

    @staticmethod
    def of(
        network: Network, settings: PublicSettings, dtype: torch.dtype, public_images: Tensor | None = None
    ) -> "Scene":
        """Read the public settings."""
        mean, std = (
            torch.tensor(values, dtype=dtype, device=network.device)[:, None, None]
            for values in (settings.mean, settings.std)
        )
        return Scene(network, settings.shape, settings.classes, mean, std, public_images, settings.columns)

    @property
    def pixels(self) -> int:
        """Numbers in one image."""
        return math.prod(self.shape)

    @cached_property
    def prior(self) -> GaussianPrior:
        """What images look like: fitted to the public images, or a generic one where there are too few."""
        if self.public_images is None or len(self.public_images) < FEWEST_IMAGES:
            return generic_prior(self.shape, self.mean, self.std)
        return fit_prior(self.normalised(self.public_images))

    def starts(self, seed: int, attack: str, victim: Victim, restarts: int) -> tuple[Tensor, Tensor]:
        """Draw images (restarts, B, C, H, W), logits (restarts, B, classes), normal; by victim and restart alone."""
        images, logits = [], []
        for restart in range(restarts):
            generator = torch_stream(seed, f"attack {attack}", victim.round, victim.client, restart)
            images.append(torch.randn(victim.model.examples, *self.shape, generator=generator))
            logits.append(torch.randn(victim.model.examples, self.classes, generator=generator))
        return torch.stack(images).to(self.mean), torch.stack(logits).to(self.mean)

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise images (..., C, H, W) of the [0, 1] scale."""
        return (images.to(self.mean) - self.mean) / self.std

    def box(self, images: Tensor) -> Tensor:
        """Move normalised images to the nearest ones with values from 0 to 1 before normalisation."""
        return torch.maximum(torch.minimum(images, (1 - self.mean) / self.std), -self.mean / self.std)

    def denoised(self, images: Tensor, noise: Tensor) -> Tensor:
        """Take noise of deviations (B,) off normalised images (B, C, H, W), by the trained prior."""
        if self.trained is None:
            raise ValueError("there is no trained prior")
        mean, std = self.mean.to(images), self.std.to(images)
        unit = self.trained.denoised((images * std + mean)[:, None], noise.to(images) * std.mean())[:, 0]
        return (unit - mean) / std

    def to_unit_scale(self, images: Tensor) -> Tensor:
        """Undo the normalisation and clamp to [0, 1]; float32, on the CPU."""
        return (images * self.std + self.mean).clamp(0, 1).float().cpu()


class Trace:
    """Tells the listener how far an attack is, a hundred times over all its chunks of rows, and ends it in time."""

    def __init__(self, listener: Progress | None, iterations: int, victims: Sequence[int]) -> None:
        self._listener = listener
        self._iterations = iterations
        self._victims = torch.tensor(victims)
        self._losses = torch.full((len(victims),), torch.inf)
        self._told = -1
        self._begun = 0

    def of(self, rows: Sequence[int]) -> Report:
        """Return the report of one chunk, rows of these numbers; the chunks before it are done."""
        before = self._begun
        self._begun += len(rows)
        numbers = torch.tensor(rows)

        def report(done: int, losses: Tensor) -> bool:
            share = (before * self._iterations + done * len(rows)) / len(self._victims)
            percent = int(100 * share / self._iterations)
            if self._listener is not None and percent != self._told:
                self._told = percent
                self._losses[numbers] = losses.detach().cpu().to(self._losses)
                self._listener(int(share), self._iterations, self._mean_of_best())
            return not time_is_up()

        return report

    def _mean_of_best(self) -> float:
        finite = torch.where(torch.isfinite(self._losses), self._losses, torch.inf)
        best = torch.full((int(self._victims.max()) + 1,), torch.inf).scatter_reduce(0, self._victims, finite, "amin")
        reached = best[torch.isfinite(best)]
        return float(reached.mean()) if len(reached) else float("nan")


@dataclass(frozen=True, eq=False)
class Start:
    """Where the search for one victim's images starts."""

    images: Tensor  # (B, C, H, W), normalised
    labels: Tensor | None  # int64 (B,), each its image's; None: not all are known

    @staticmethod
    def of(scene: Scene, images: Tensor, labels: Tensor, count: int) -> "Start":
        """Take the first ``count`` of images (n, C, H, W) with labels (n,); what is missing is the prior's mean."""
        missing = count - len(images)
        if missing <= 0:
            return Start(images[:count], labels[:count])
        mean = scene.prior.mean.view(scene.shape).expand(missing, *scene.shape)
        return Start(torch.cat([images, mean.to(images)]), None)
