"""The endpoint in this process: a policy's answers to questions, counted, with a hard budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.questions import Answers
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret
from fedpriv.data.datasets import Dataset
from fedpriv.service.features import Features, pixels
from fedpriv.service.policies import AnswerPolicy, Facts, Scores

_AT_ONCE = 256  # images of one forward pass


@dataclass(frozen=True, eq=False)
class Oracle:
    """What answers are computed from, without any count."""

    policy: AnswerPolicy  # what is shown of the scores
    facts: Facts  # public sizes
    shape: tuple[int, int, int]  # (C, H, W) of an image
    scores: Callable[[Tensor], Scores]  # images (n, C, H, W) -> (n, classes) float64
    scale: float  # of the noise
    secret: Secret  # what the noise of an answer is drawn from, with its number and the question

    def answers(self, images: Tensor, numbers: Sequence[int]) -> Answers:
        """Answer images whose answers have these numbers; the same image and number give the same noise again."""
        draws = self.policy.draws_of(self.scale, self._streams(images, numbers), self.facts)
        return self.policy.answer(self.scores(images), draws)

    def _streams(self, images: Tensor, numbers: Sequence[int]) -> list[np.random.Generator]:
        if not (self.policy.draws and self.policy.repeats_noise):
            return []
        asked = zip(numbers, map(digest, pixels(images)), strict=True)
        return [self.secret.stream("answer", number, bytes.fromhex(question)).numpy() for number, question in asked]


def digest(image: NDArray[np.float64]) -> str:
    """SHA-256 of an image from :func:`pixels`, by which a question is known."""
    return sha256(np.ascontiguousarray(image, dtype="<f8").tobytes()).hexdigest()


class Endpoint:
    """Answers in this process, counted; see :class:`fedpriv.attacks.questions.Questions`.

    Its noise is its own: no answer that it gives has a number in a query ledger. ``exact`` are the scores of images
    that it answers from, without policy and noise: for a referee, and never for an attack.
    """

    def __init__(self, oracle: Oracle) -> None:
        """Open it."""
        self.classes, self.shape, self.asked = oracle.facts.classes, oracle.shape, 0
        self.policy, self.facts, self.exact = oracle.policy, oracle.facts, oracle.scores
        self._oracle = oracle

    def ask(self, images: Tensor) -> Answers:
        """Answer questions; see :class:`fedpriv.attacks.questions.Questions`."""
        checked = checked_images(images, self.shape)
        numbers = range(self.asked, self.asked + len(checked))
        self.asked += len(checked)
        return self._oracle.answers(checked, numbers)


def checked_images(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return images, if they are some of this shape."""
    if images.ndim != 4 or tuple(images.shape[1:]) != shape or not len(images):
        wanted = " x ".join(str(size) for size in ("n", *shape))
        given = " x ".join(str(size) for size in images.shape) or "one number"
        raise InputError(f"images of {given}: expected {wanted}, n from 1")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InputError(f"images of {str(images.dtype).removeprefix('torch.')}: bytes, or numbers on [0, 1]")
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise InputError("images: a pixel is not a number on [0, 1]")
    return images


def network_scores(network: torch.nn.Module, dataset: Dataset) -> Callable[[Tensor], Scores]:
    """Return how images (n, C, H, W) get logits (n, classes), float64, from a network in evaluation mode."""
    first = next(network.parameters())

    def scores(images: Tensor) -> Scores:
        with torch.no_grad():
            parts = [network(dataset.normalise(part.to(first.device), first.dtype)) for part in images.split(_AT_ONCE)]
            logits: Scores = torch.cat(parts).double().cpu().numpy()
        return logits

    return scores


def head_scores(weights: Scores, features: Features) -> Callable[[Tensor], Scores]:
    """Return how images (n, C, H, W) get logits (n, classes), float64, from the convex head."""

    def scores(images: Tensor) -> Scores:
        return features(images) @ weights.T

    return scores
