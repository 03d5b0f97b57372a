"""Synthetic data for shadow models without access to the target's data (Shokri et al. 2017, Section V.C).

Three ways: search for records that the target is sure of; draw every feature from its own distribution; or take real
records of the same kind, with noise. Records are images here, every pixel a feature.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.questions import Questions
from fedpriv.attacks.scene import Public, probabilities


@dataclass(frozen=True)
class RecordSearch:
    """How records are searched for (the paper's Algorithm 1)."""

    confidence: float = 0.5  # of the target in a record's class, from which on it may be taken
    changed: float = 0.3  # share of the features that a proposal changes at first (k_max)
    least: float = 0.03  # share that it changes at last (k_min)
    rejections: int = 5  # in a row after which the share is halved


def is_binary(images: Tensor) -> bool:
    """Return whether every feature is 0 or 1."""
    return bool(((images == 0) | (images == 1)).all())


def by_model(
    endpoint: Questions,
    shape: tuple[int, int, int],
    count: int,
    budget: int,
    binary: bool,
    generator: np.random.Generator,
    search: RecordSearch | None = None,
) -> Public:
    """Climb the target's confidence from random records, all records of all classes at once.

    A proposal that the target is at least as sure of is kept. A record is taken with the probability that the target
    gives its class, once that class is ahead and surer than the threshold.

    It returns those that were found; there may be none.
    """
    how = search or RecordSearch()
    features = int(np.prod(shape))
    wanted = np.arange(count) % endpoint.classes
    best = _random(generator, (count, features), binary)
    proposed = best.copy()
    height, waited = np.zeros(count), np.zeros(count, dtype=np.int64)
    share, open_, taken = np.full(count, how.changed), np.ones(count, dtype=np.bool_), []
    spent = 0
    while open_.any() and spent + int(open_.sum()) <= budget:
        rows = np.flatnonzero(open_)
        spent += len(rows)
        answers = endpoint.ask(torch.from_numpy(proposed[rows]).view(-1, *shape))
        shares = probabilities(answers, endpoint.classes)
        own = shares[np.arange(len(rows)), wanted[rows]]
        better = own >= height[rows]
        gained, lost = rows[better], rows[~better]
        best[gained], height[gained], waited[gained] = proposed[gained], own[better], 0
        sure = better & (own > how.confidence) & (shares.argmax(axis=1) == wanted[rows])
        accepted = rows[sure & (generator.random(len(rows)) < own)]
        taken += accepted.tolist()
        open_[accepted] = False
        waited[lost] += 1
        weary = lost[waited[lost] > how.rejections]
        share[weary], waited[weary] = np.maximum(share[weary] / 2, how.least), 0
        changed = generator.random(best.shape) < share[:, None]
        changed[np.arange(count), generator.integers(features, size=count)] = True
        proposed = np.where(changed, _random(generator, best.shape, binary), best)
    chosen = np.array(sorted(taken), dtype=np.int64)
    return Public(torch.from_numpy(best[chosen]).view(-1, *shape), torch.from_numpy(wanted[chosen]))


def by_statistics(images: Tensor, endpoint: Questions, count: int, generator: np.random.Generator) -> Public:
    """Draw every feature from its own distribution, independently, and ask the target for the labels."""
    flat = images.double().flatten(1).numpy()
    rows = generator.integers(len(flat), size=(count, flat.shape[1]))
    made = torch.from_numpy(flat[rows, np.arange(flat.shape[1])]).view(-1, *images.shape[1:])
    return Public(made, torch.from_numpy(endpoint.ask(made).labels))


def noisy_real(images: Tensor, labels: Tensor, share: float, generator: np.random.Generator) -> Public:
    """Return real records with noise: a share of binary features is flipped, others get normal noise so large."""
    flat = images.double().numpy()
    if is_binary(images):
        made: NDArray[np.float64] = np.where(generator.random(flat.shape) < share, 1 - flat, flat)
    else:
        made = (flat + generator.normal(scale=share, size=flat.shape)).clip(0, 1)
    return Public(torch.from_numpy(made), labels.clone())


def _random(generator: np.random.Generator, shape: tuple[int, ...], binary: bool) -> NDArray[np.float64]:
    drawn = generator.random(shape)
    return np.rint(drawn) if binary else drawn
