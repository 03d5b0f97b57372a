"""The last step: which sentences, how often and with which labels, by the whole gradient.

The gradient of a batch is a sum of its sequences' own with weights of at least 0: they are found by least squares
(Lawson and Hanson 1974), over all candidates and labels at once. Repeated sentences get their number, beginnings of
others that are no sentences get nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import TextScene, padded
from fedpriv.core.names import END
from fedpriv.data.sequences import NO_TARGET

__all__ = ["MOST_COLUMNS", "Weighed", "weigh"]

Sentence = tuple[int, ...]

MOST_COLUMNS = 512  # sentences times labels of which gradients are computed
NUMBERS = 1 << 19  # of a gradient that are looked at
_HALF = 0.5  # of a sentence's weight in the batch, from which it is there, or there once more


@dataclass(frozen=True, eq=False)
class Weighed:
    """What explains an upload best.

    Attributes:
        sentences: those that count, each as often as it is in the batch; the heaviest first.
        labels: of each, or -1.
        unexplained: the length of what is left over that of the upload.
    """

    sentences: tuple[Sentence, ...]
    labels: tuple[int, ...]
    unexplained: float


def weigh(
    scene: TextScene, victim: Victim, whole: Sequence[Sentence], inner: Sequence[Sentence], wanted: int
) -> Weighed:
    """Choose among sentences, and name their labels.

    Args:
        scene: the network and the task.
        victim: the upload.
        whole: distinct sentences. Where they are no more than wanted all of them stay.
        inner: beginnings of these, that may be sentences, too. All together, times labels, at most
            :data:`MOST_COLUMNS`.
        wanted: how many sentences the batch has, at least.
    """
    names, sentences = _looked_at(scene, victim), [*whole, *inner]
    labels = [-1] if scene.is_next else list(range(scene.classes))
    columns = [_column(scene, victim, sentence, label, names) for sentence in sentences for label in labels]
    heard = torch.cat([victim.gradient[name].flatten() for name in names]).double()
    weights, unexplained = _weights(torch.stack(columns, dim=1), heard)
    left = weights.reshape(len(sentences), len(labels)) * wanted
    sure = [number for number in range(len(whole)) if len(whole) <= wanted or left[number].max() >= _HALF]
    chosen = [(number, int(left[number].argmax())) for number in sure]
    for pair in chosen:
        left[pair] -= 1
    # The largest shares that remain, each taken down by one when its sentence is chosen again.
    while len(chosen) < wanted and left.max() >= _HALF:
        number, label = divmod(int(left.argmax()), len(labels))
        chosen.append((number, label))
        left[number, label] -= 1
    return Weighed(
        tuple(sentences[number] for number, _ in chosen), tuple(labels[label] for _, label in chosen), unexplained
    )


def _looked_at(scene: TextScene, victim: Victim) -> list[str]:
    """The smallest tensors, together at most so many numbers; one in any case."""
    sizes = sorted((victim.gradient[name].numel(), name) for name in scene.names)
    totals = np.cumsum([size for size, _ in sizes])
    return [name for (_, name), total in zip(sizes, totals, strict=True) if total <= NUMBERS] or [sizes[0][1]]


def _column(scene: TextScene, victim: Victim, sentence: Sentence, label: int, names: Sequence[str]) -> Tensor:
    tokens = padded([sentence], scene.length).to(scene.device)
    labels = torch.tensor([label], device=scene.device)
    if scene.is_next:
        labels = scene.targets(tokens)
        if len(sentence) < scene.length:
            labels[0, len(sentence) - 1] = END
        elif bool((labels == NO_TARGET).all()):
            labels[0, -1] = END
    gradient = scene.gradient(victim.parameters, tokens, labels)
    return torch.cat([gradient[name].flatten() for name in names]).double()


def _weights(columns: Tensor, heard: Tensor) -> tuple[np.ndarray, float]:
    """Weights of at least 0 of columns (K, C) whose sum is nearest to a vector (K,), and what is left of its length."""
    # Orthonormal coordinates of the columns' span: what is outside of it no weights explain.
    basis, triangle = torch.linalg.qr(columns)
    inside = basis.T @ heard
    weights, rest = nnls(triangle.cpu().numpy(), inside.cpu().numpy(), maxiter=50 * columns.shape[1])
    outside = float((heard.square().sum() - inside.square().sum()).clamp(min=0))
    length = float(heard.norm())
    return weights, ((rest**2 + outside) ** 0.5 / length if length else 1.0)
