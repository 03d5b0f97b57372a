"""The parts that gradient matching is made of, and recipes: which attack takes which.

A recipe names one part of each kind. All of them combine: what an attack minimises (objective and priors), in which
variables, how (optimiser, schedule), from where (start), and where labels come from.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.features.inversion import read_feature_starts
from fedpriv.attacks.reconstruction.first_layer.closed_form import read_starts
from fedpriv.attacks.reconstruction.matching.distances import (
    angle,
    opponent_variation,
    squared_distance,
    total_variation,
)
from fedpriv.attacks.reconstruction.matching.matcher import Objective
from fedpriv.attacks.reconstruction.posterior.likelihood import misfit
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.starts import Start
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["AROUND", "FOUND", "MILESTONES", "OBJECTIVES", "PRIORS", "SCHEDULES", "SIGNS", "STARTS", "Recipe"]
__all__ += ["annealed", "warmed"]

MILESTONES = (3 / 8, 5 / 8, 7 / 8)  # of the steps; at each the learning rate falls to a tenth
AROUND = 0.1  # standard deviation of starts around an image: enough to tell apart the examples of a batch
TILE = 4  # pixels along a side of the square that a patterned start repeats


@dataclass(frozen=True)
class Recipe:
    """Parts of an attack.

    Attributes:
        objective: how expected and heard upload are compared: a key of :data:`OBJECTIVES`.
        optimiser: lbfgs (in float64 where the device has it), or Adam and what it sees of gradients: a key of
            :data:`SIGNS`.
        schedule: of Adam's learning rate: a key of :data:`SCHEDULES`; L-BFGS searches along lines.
        variables: pixels, decorrelated (``matching.coordinates``), or relaxed, of rows (``matching.relaxation``).
        start: a key of :data:`STARTS` or of :data:`FOUND`.
        box: whether images stay within the valid range of pixels.
        priors: keys of :data:`PRIORS`; the weight of each is the setting of its name.
        labels: where they come from, in this order: known, read (off the last layer), optimised (with the images).
    """

    objective: Literal["squared-distance", "cosine", "likelihood"]
    optimiser: Literal["lbfgs", "adam", "signed-adam", "soft-signed-adam"]
    schedule: Literal["constant", "steps", "cosine"] = "constant"
    variables: Literal["pixels", "decorrelated", "relaxed"] = "pixels"
    start: Literal["normal", "uniform", "patterned", "public-mean", "closed-form", "features"] = "normal"
    box: bool = False
    priors: tuple[Literal["tv", "opponents", "public_mean", "gaussian"], ...] = ()
    labels: tuple[Literal["known", "read", "optimised"], ...] = ("known", "read", "optimised")

    @property
    def parts(self) -> Mapping[str, str]:
        """Kind of part -> part, for people."""
        return {
            "objective": self.objective,
            "prior": ", ".join([*(["box"] if self.box else []), *self.priors]) or "none",
            "variables": self.variables,
            "optimiser": self.optimiser,
            "schedule": "line search" if self.optimiser == "lbfgs" else self.schedule,
            "start": self.start,
            "labels": ", else ".join(self.labels),
        }


OBJECTIVES: Mapping[str, Objective] = {"squared-distance": squared_distance, "cosine": angle, "likelihood": misfit}
"""Comparison -> (N,)."""


def _public_mean(scene: Scene, images: Tensor) -> Tensor:
    """Mean squared distance of the pixels from the mean of public images, or from grey without any."""
    middle = scene.prior.mean.to(images).view(scene.shape)
    return (images - middle).square().flatten(1).mean(dim=1)


def _gaussian(scene: Scene, images: Tensor) -> Tensor:
    """Squared distance from that mean in the public images' standard deviations, for each pixel."""
    return scene.prior.to(images).energy(images).mean(dim=1) / scene.pixels


PRIORS: Mapping[str, Callable[[Scene, Tensor], Tensor]] = {
    "tv": lambda scene, images: total_variation(images),
    "opponents": lambda scene, images: opponent_variation(images),
    "public_mean": _public_mean,
    "gaussian": _gaussian,
}
"""(scene, normalised images (N, B, C, H, W)) -> (N,); differentiable."""


SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "constant": lambda done, steps: 1.0,
    "steps": lambda done, steps: 0.1 ** sum(done >= int(share * steps) for share in MILESTONES),
    "cosine": lambda done, steps: (1 + math.cos(math.pi * done / steps)) / 2,
}
"""(steps that were made, all steps) -> factor of the learning rate."""


def warmed(done: int, steps: int) -> float:
    """The factor of the learning rate while it rises over the first ``steps`` steps, of which ``done`` were made."""
    return min((done + 1) / steps, 1.0) if steps else 1.0


def annealed(start: float, end: float, done: int, steps: int) -> float:
    """The weight of a prior that falls from ``start`` to ``end``: smooth pictures first, their details later."""
    return max(end, start * (1 - done / steps) ** 2)


def _softened(gradients: Tensor, share: float) -> Tensor:
    """Large gradients are cut at 1 / share: nowhere at the end of the steps."""
    return (share * gradients).tanh() / share


SIGNS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "adam": lambda gradients, share: gradients,
    "signed-adam": lambda gradients, share: gradients.sign(),
    "soft-signed-adam": _softened,
}
"""(gradients, share of the steps that are left, above 0) -> what Adam sees."""


def _uniform(scene: Scene, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    images: Tensor = (torch.special.ndtr(numbers) - scene.mean) / scene.std
    return images


def _patterned(scene: Scene, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    """One small square of each image, repeated (Wei et al. 2020)."""
    height, width = numbers.shape[-2:]
    down, across = (torch.arange(side, device=numbers.device) % TILE for side in (height, width))
    return numbers[..., down[:, None], across]


def _around_mean(scene: Scene, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    return scene.prior.mean.to(numbers).view(scene.shape) + AROUND * numbers


FOUND: Mapping[str, Callable[[Scene, Sequence[Victim]], Sequence[Start]]] = {
    "closed-form": read_starts,
    "features": read_feature_starts,
}
"""Starts at images that were found, each with its label: (scene, distinct victims) -> one a victim."""


STARTS: Mapping[str, Callable[[Scene, Sequence[Victim], Tensor], Tensor] | None] = {
    "normal": None,
    "uniform": _uniform,
    "patterned": _patterned,
    "public-mean": _around_mean,
}
"""(scene, rows, standard normal numbers (N, B, C, H, W)) -> normalised images; ``None``: these are the variables."""
