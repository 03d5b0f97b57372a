"""The adversary's knowledge of the finished model, and, apart from it, the referee's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.attacks.questions import AnswerRule, Answers, Questions, UsedUpError
from fedpriv.core.errors import InputError
from fedpriv.core.records import Guarantee
from fedpriv.core.world import World

Array = NDArray[np.float64]

# Finer grids than these are not told from numbers that were not rounded at all.
_FINEST_DECIMALS = 12

Network = Callable[[Tensor], Tensor]
"""Images (n, C, H, W), floating point on [0, 1], -> logits (n, classes), differentiable."""


class Counted:
    """An endpoint with a count and a budget of one attack's own; see :class:`fedpriv.attacks.questions.Questions`."""

    def __init__(self, endpoint: Questions, most: int) -> None:
        """Open it for ``most`` images."""
        self.classes, self.asked = endpoint.classes, 0
        self._endpoint, self._most = endpoint, most

    def ask(self, images: Tensor) -> Answers:
        """Answer questions, all or none."""
        if self.asked + len(images) > self._most:
            raise UsedUpError(f"answers asked for: {len(images)}; left: {self._most - self.asked} of {self._most}")
        self.asked += len(images)
        return self._endpoint.ask(images)


@dataclass(frozen=True, eq=False)
class Public:
    """Images of the same kind as the training data that are nobody's there."""

    images: Tensor  # (N, C, H, W) on [0, 1], float64
    labels: Tensor  # (N,), int64
    # (N,), int64, the classes that `data.groups` joins to labels; `None`: labels are the classes
    finer: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """The run's training, which an adversary who knows all examples but the candidates repeats on data of its own."""

    world: World  # the run's experiment, built
    schedule: Mapping[int, Sequence[int]]  # round -> the clients whose uploads were averaged
    rule: AnswerRule  # how the endpoint answers, as it is known to everybody


@dataclass(frozen=True, eq=False)
class ProbeScene:
    """All that an adversary of the finished model has."""

    open: Callable[[], Questions]  # opens the endpoint anew, with the budget of one variant of an attack
    budget: int  # images that it answers at most
    classes: int  # how many there are
    shape: tuple[int, int, int]  # (C, H, W) of an image
    # an untrained network of the model's architecture in float64, drawn by a seed of the adversary's
    copy: Callable[[int], nn.Module]
    normalise: Callable[[Tensor], Tensor]  # images on [0, 1] -> what a network is fed; public constants of the data set
    seed: int  # of the adversary's random choices
    labels_only: bool = False  # whether the endpoint never names a probability
    public: Public | None = None  # public images; `None`: the threat model withholds them
    # the finished model in float64, parameters frozen; `None`: the threat model withholds it
    model: Network | None = None
    # for membership inference, whose adversary knows all other examples; `None`: not in this scene
    rehearsal: Rehearsal | None = None
    # about the model or its answers, under replace-one, whichever is less; `None`: nothing
    proven: Guarantee | None = None
    finer_classes: int = 0  # how many classes `data.groups` joins; 0: none

    @property
    def pixels(self) -> int:
        """Numbers of an image."""
        return math.prod(self.shape)

    def known_training(self) -> Rehearsal:
        """Return the run's training."""
        if self.rehearsal is None:
            raise ValueError("the scene has no rehearsal")
        return self.rehearsal

    def known_public(self) -> Public:
        """Return the public images."""
        if self.public is None:
            raise InputError("the adversary holds no public images (adversary.knows_public_data = false)")
        return self.public


@dataclass(frozen=True, eq=False)
class ProbeReferee:
    """What attacks are scored against."""

    truth: Network  # the finished model in float64, exact, whatever the endpoint's policy shows of it
    classes: int  # how many there are
    held: Public  # test images that the adversary does not hold; what copies are compared on
    # (classes, C, H, W), the mean of each class's training images on [0, 1]; NaN where there is none
    train_means: Tensor
    test_means: Tensor  # (classes, C, H, W), the same of the test images, which nobody trained with
    seed: int  # of the images that copies are compared on besides

    def scores(self, images: Tensor) -> Tensor:
        """Return exact logits (n, classes) without gradients."""
        return outputs(self.truth, images)


def outputs(network: Network, images: Tensor) -> Tensor:
    """Return a network's logits (n, classes), some images at a time, without gradients."""
    with torch.no_grad():
        return torch.cat([network(part) for part in images.split(512)])


def probabilities(answers: Answers, classes: int) -> Array:
    """Return what answers say as probabilities (n, classes) that add up to 1.

    A label alone is certainty. What a policy does not show gets an even part of what the shown ones leave. Rounding may
    leave nothing anywhere: then all classes are alike.
    """
    if answers.probabilities is None:
        return np.eye(classes)[answers.labels]
    shown = answers.probabilities
    hidden = np.isnan(shown)
    filled = np.where(hidden, 0.0, shown.clip(0.0, 1.0))
    rest = (1 - filled.sum(axis=1, keepdims=True)).clip(0.0) / np.maximum(hidden.sum(axis=1, keepdims=True), 1)
    filled = np.where(hidden, rest, filled)
    total = filled.sum(axis=1, keepdims=True)
    return np.where(total > 0, filled / np.where(total > 0, total, 1.0), 1 / classes)


def rounding_unit(shown: Array) -> float:
    """Return the distance of two neighbouring values where all are rounded to the same decimals; else 0."""
    for decimals in range(_FINEST_DECIMALS + 1):
        scaled = shown * 10.0**decimals
        if np.abs(scaled - np.rint(scaled)).max() < 1e-4:
            return 10.0**-decimals
    return 0.0


def uniform_images(count: int, shape: tuple[int, int, int], generator: np.random.Generator) -> Tensor:
    """Draw images (count, C, H, W) with independent pixels from U(0, 1), float64."""
    return torch.from_numpy(generator.random((count, *shape)))


# The exact probabilities behind Algorithm 1 of Lu et al. 2022, from two answers to one question.
#
# An answer is the softmax of logits of which one, drawn at random, has noise. Up to one shift the others are exact. Two
# answers agree in all logits but the two that were drawn, and each has the one that the other lacks.


# What rounding of probabilities in float64 leaves of equal logits.
_EQUAL = 1e-6


def exact_logits(one: Array, two: Array) -> Array:
    """Return the logits, (classes,), up to a shift: exact unless both answers drew the same class.

    Of the two logits in which the answers differ either may be the noisy one of the first: the pair that lies
    closer to the middle of all others is believed, since noise of any use throws a logit far out. No better choice
    is possible where logits are normal: both readings take the same amounts of noise, with other signs. Logarithms
    of probabilities tell more than these, which float64 takes for 0 where noise made another one large.
    """
    first, second = one, two
    finite = np.isfinite(first) & np.isfinite(second)
    if not finite.any():
        return first
    shift = float(np.median(first[finite] - second[finite]))
    second = second + shift
    equal = finite & (np.abs(np.where(finite, first, 0) - np.where(finite, second, 0)) < _EQUAL)
    differ = ~equal
    middle = float(first[equal].mean()) if equal.any() else 0.0
    choices = [_mixed(first, second, differ, at) for at in np.flatnonzero(differ).tolist()] or [first]
    return min(choices, key=lambda logits: float(np.square(logits - middle)[differ].sum()))


def _mixed(first: Array, second: Array, differ: NDArray[np.bool_], at: int) -> Array:
    """Take the one logit from the second answer, and all others in which they differ from the first."""
    logits = first.copy()
    logits[at] = second[at]
    return logits
