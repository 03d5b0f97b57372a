"""Images from the features that the last layer got: each image of a batch is looked for alone.

The least squared distance of features, each on its own scale, next to what photographs are like; L-BFGS in coordinates
in which the pixels of photographs are independent. A batch is so cut into single images, and which label goes with
which image is known.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.features.last_layer import Features, read_features
from fedpriv.attacks.reconstruction.matching.coordinates import coordinates_of
from fedpriv.attacks.reconstruction.matching.lbfgs import minimise
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.starts import Start
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["read_feature_starts"]

ITERATIONS = 300
PRIOR = 1e-4  # weight of the coordinates' mean square next to the features' relative squared distance
NO_TAPE = "features need a last layer that can be followed: a torch.nn.Linear that the network calls once"


def read_feature_starts(scene: Scene, victims: Sequence[Victim]) -> list[Start]:
    """Return each victim's images and labels.

    Raises:
        AttackRefused: as for :func:`read_features`.
    """
    return [_invert(scene, victim, read_features(scene, victim)) for victim in victims]


def _invert(scene: Scene, victim: Victim, features: Features) -> Start:
    coordinates = coordinates_of(scene.shape).to(scene.mean)
    wanted = features.values.to(scene.mean)
    sizes = wanted.square().mean(dim=1).clamp(min=1e-30)

    def evaluate(points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        leaf = points.detach().requires_grad_()
        with torch.enable_grad():
            images = coordinates.images(leaf.unflatten(1, scene.shape))
            given = _features(scene, victim, features.layer, images)
            distances = (given - wanted[index]).square().mean(dim=1) / sizes[index]
            values = distances + PRIOR * leaf.square().mean(dim=1)
            (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradients

    begin = coordinates.of(torch.zeros(len(wanted), *scene.shape).to(scene.mean)).flatten(1)
    ended = minimise(evaluate, begin, ITERATIONS)
    images = coordinates.images(ended.points.unflatten(1, scene.shape))
    return Start(scene.box(images), features.labels)


def _features(scene: Scene, victim: Victim, layer: str, images: Tensor) -> Tensor:
    """What the last layer gets (B, F) for images (B, C, H, W)."""
    _, entries = scene.network.follow(victim.parameters, images)
    kept = [entry.kept for entry in entries if entry.name == layer]
    if len(kept) != 1:
        raise AttackRefused(NO_TAPE)
    inputs: Tensor = kept[0]
    return inputs.flatten(1)
