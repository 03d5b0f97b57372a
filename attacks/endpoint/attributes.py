"""Attribute inference: a hidden value of a record, from its other values, its label and the model's answers.

Fredrikson et al. (2014, 2015) and Yeom, Giacomelli, Fredrikson and Jha (2018): of all values the one with the largest
prior(v) p(label | record with v). What works as well on records that nobody trained with is a fact about people, which
any good model learns; what it tells of members beyond that is a leak.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.questions import Questions
from fedpriv.attacks.scene import Public, probabilities

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Attribute:
    """A feature that is hidden, with two values."""

    pixel: int  # its place in a flat image
    threshold: float  # above it the value is the higher one
    values: tuple[float, float]  # the two numbers that stand for them, ascending
    prior: float  # how often the higher one is met


def attributes(public: Public, count: int) -> tuple[Attribute, ...]:
    """Return the features that vary most among public records, each split at its median."""
    flat = public.images.flatten(1).numpy()
    order = np.argsort(-flat.var(axis=0), kind="stable")[:count]
    return tuple(_attribute(int(pixel), flat[:, pixel]) for pixel in order if flat[:, pixel].var() > 0)


def truth_of(attribute: Attribute, images: Tensor) -> NDArray[np.bool_]:
    """Return whether records (n, C, H, W) on [0, 1] have the higher value."""
    return images.flatten(1)[:, attribute.pixel].numpy() > attribute.threshold


def guessed_values(
    endpoint: Questions, attribute: Attribute, images: Tensor, labels: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether the higher value is the likelier one; two questions a record."""
    asked = images.double().flatten(1)
    weights = []
    for value, prior in zip(attribute.values, (1 - attribute.prior, attribute.prior), strict=True):
        changed = asked.clone()
        changed[:, attribute.pixel] = value
        shares = probabilities(endpoint.ask(changed.view(images.shape)), endpoint.classes)
        weights.append(prior * shares[torch.arange(len(labels)), labels].clip(_SMALLEST))
    return weights[1] > weights[0]


def _attribute(pixel: int, values: NDArray[np.float64]) -> Attribute:
    # Where half of all values are the largest one, the threshold is below it.
    threshold = float(np.median(values))
    threshold = threshold if (values > threshold).any() else float(values[values < threshold].max())
    above = values > threshold
    return Attribute(pixel, threshold, (float(values[~above].mean()), float(values[above].mean())), float(above.mean()))
