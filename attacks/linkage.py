"""Linkage: how many people can be singled out in an anonymous table by a few known facts (de Montjoye et al. 2013)."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.columns import slices
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Interval
from fedpriv.data.datasets import Dataset


def facts_of(dataset: Dataset) -> NDArray[np.bool_]:
    """Return which facts hold for which person, (N, D), in all data; of a table its categories and flags."""
    rows = np.concatenate([images.flatten(1).numpy() for images in (dataset.x_train, dataset.x_test)])
    if dataset.columns:
        named = [where for column, where in slices(dataset.columns) if not column.is_number]
        rows = np.concatenate([rows[:, :0], *(rows[:, where] for where in named)], axis=1)
    elif not np.isin(rows, (0, 255)).all():
        raise InputError(
            f"{dataset.name} has features between 0 and 1; facts are features of yes or no, as in location30"
        )
    return rows > 0


def unicity(facts: NDArray[np.bool_], known: int, people: int, generator: np.random.Generator) -> Interval:
    """Return the share of people that a few facts about them, (N, D), single out, with its Wilson interval."""
    whom = np.flatnonzero(facts.sum(axis=1) >= known)
    if not len(whom):
        raise InputError(f"nobody has {known} facts; the most that anybody has are {int(facts.sum(axis=1).max())}")
    drawn = generator.permutation(whom)[:people]
    alone = 0
    for person in drawn.tolist():
        told = generator.choice(np.flatnonzero(facts[person]), size=known, replace=False)
        alone += int(facts[:, told].all(axis=1).sum() == 1)
    return rate_interval(alone, len(drawn))
