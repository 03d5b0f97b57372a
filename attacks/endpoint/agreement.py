"""How alike a copy and the model are, beside what someone has who never asked."""

import numpy as np
import torch
from torch import Tensor

from fedpriv.attacks.endpoint.copies import trained_copy
from fedpriv.attacks.endpoint.scene import Network, Referee, Scene, uniform_images
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Interval, ProbeFigure

__all__ = ["agreement", "agreement_figures", "never_asked"]

UNIFORM = 1000
NO_THEOREM = "no theorem bounds how well a copy does that is trained on answers"


def never_asked(scene: Scene) -> Network | None:
    """Return the copy of someone who asked nothing: trained on the public images and their own labels.

    ``None`` where the adversary holds no public images.
    """
    if scene.public is None:
        return None
    return trained_copy(scene, scene.public.images, np.eye(scene.classes)[scene.public.labels.numpy()])


def agreement(referee: Referee, copy: Network, images: Tensor) -> Interval:
    """Return the share of images that the copy and the model name the same class for."""
    same = _labels(copy, images) == referee.scores(images).argmax(dim=1)
    return rate_interval(int(same.sum()), len(images))


def agreement_figures(
    referee: Referee, copy: Network, guess: Network | None, ceiling: float | None = None, theorem: str = NO_THEOREM
) -> tuple[ProbeFigure, ...]:
    """Return what a copy is like: on the referee's images, on uniform ones, and in its probabilities.

    The guess is the class that the model names most often, or the copy of someone who never asked if that does better.

    Args:
        referee: has the model.
        copy: images -> logits.
        guess: of :func:`never_asked`.
        ceiling: of the agreement.
        theorem: what it rests on.
    """
    _, channels, height, width = referee.held.images.shape
    uniform = uniform_images(UNIFORM, (channels, height, width), numpy_stream(referee.seed, "probe-uniform"))
    return (
        ProbeFigure(
            "agreement on test images",
            agreement(referee, copy, referee.held.images),
            _guessed(referee, guess, referee.held.images),
            ceiling=ceiling,
            theorem=theorem,
        ),
        ProbeFigure(
            "agreement on uniform images",
            agreement(referee, copy, uniform),
            _guessed(referee, guess, uniform),
            ceiling=ceiling,
            theorem=theorem,
        ),
        ProbeFigure(
            "total variation on test images",
            Interval(_variation(referee, copy), None, None),
            None if guess is None else _variation(referee, guess),
            theorem="0 is a perfect copy",
            unit="number",
        ),
    )


def _guessed(referee: Referee, guess: Network | None, images: Tensor) -> float:
    labels = referee.scores(images).argmax(dim=1)
    most = float(labels.bincount(minlength=referee.classes).max()) / len(labels)
    return most if guess is None else max(most, agreement(referee, guess, images).value)


def _labels(network: Network, images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([network(part).argmax(dim=1) for part in images.split(512)])


def _variation(referee: Referee, copy: Network) -> float:
    images = referee.held.images
    with torch.no_grad():
        mine = torch.cat([copy(part) for part in images.split(512)]).softmax(dim=1)
    return float((mine - referee.scores(images).softmax(dim=1)).abs().sum(dim=1).mean() / 2)
