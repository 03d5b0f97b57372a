"""Membership and attribute inference on a reply, where no gradient attack fits: dense layers of any framework, trees.

The change of the first layer's weights is a sum of multiples of the inputs, whatever network follows and however many
steps were taken: a record that was trained on lies in the space of its rows, one that was not does so by chance alone.
So does a record with one unknown value, which is read off where it comes nearest. Thresholds of trees are values of
records (XGBoost's histograms) or halfway between two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.scores import auc_interval, curve
from fedpriv.core.errors import InputError
from fedpriv.flower.folder import Tapped, imported
from fedpriv.gradients import Vector

_RANK = 1e-4  # of the largest singular value, below which there is rounding alone
_FREE = 1e-6  # share of a unit vector outside a space, below which a value there cannot be told

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Records:
    """What a client trained on, and records of the same kind that it did not."""

    members: Floats  # (n, features)
    others: Floats  # (m, features)

    @property
    def all(self) -> Floats:
        """(n + m, features), members first."""
        return np.concatenate([self.members, self.others])


def records_of(tapped: Tapped, client: int) -> Records:
    """Ask the function that ``tap.records`` names for a client's records; attacks see no more than candidates."""
    if tapped.records is None:
        raise ValueError("tap.records is not set")
    try:
        members, others = imported(tapped, tapped.records)(client)
        found = Records(*(np.asarray(values, np.float64).reshape(len(values), -1) for values in (members, others)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"tap.records = {tapped.records!r}: of a client's number it returns two arrays of rows: {error}"
        ) from error
    if not len(found.members) or not len(found.others) or found.members.shape[1] != found.others.shape[1]:
        raise InputError(f"tap.records = {tapped.records!r}: both arrays need rows, all of the same length")
    return found


def inferred(update: Vector, splits: Mapping[int, list[float]], records: Records) -> list[str]:
    """Say of a client's records how well a reply tells members, and a value of theirs, next to a guess."""
    columns = records.members.shape[1]
    if splits:
        scores = _at_thresholds(splits, records)
        return [_membership(scores, records, "values that are thresholds of its trees")]
    sides = ((value if value.shape[1] == columns else value.T) for value in update.values() if value.ndim == 2)
    layer = next((rows for rows in sides if rows.shape[1] == columns), None)
    if layer is None:
        return [f"membership: no array has {columns} columns, as the records have"]
    outside = _outside(layer)
    apart = np.linalg.norm(records.all @ outside, axis=1) / np.linalg.norm(records.all, axis=1).clip(1e-12)
    if not outside.any():
        return ["membership: the change of the first layer fills all dimensions, and tells nothing in closed form"]
    how = "records in the space of the first layer's change"
    return [_membership(-apart, records, how), _attributes(outside, records)]


def _outside(layer: Tensor) -> Floats:
    """The projection on what is orthogonal to a layer's rows, (features, features)."""
    _, values, vectors = np.linalg.svd(layer.double().numpy(), full_matrices=False)
    kept = vectors[values > _RANK * max(float(values[0]), 1e-300)]
    projection: Floats = np.eye(layer.shape[1]) - kept.T @ kept
    return np.where(np.abs(projection) < 1e-12, 0.0, projection)


def _at_thresholds(splits: Mapping[int, list[float]], records: Records) -> Floats:
    """How many of a record's values are thresholds; those of equal numbers by how near the nearest is."""
    rows, ranges = records.all, np.ptp(records.all, axis=0).clip(1e-12)
    used = [(place, values) for place, values in splits.items() if 0 <= place < rows.shape[1]]
    if not used:
        return np.zeros(len(rows))
    away = [np.abs(rows[:, [place]] - np.array(values)).min(axis=1) / ranges[place] for place, values in used]
    nearest = np.stack(away)
    scores: Floats = (nearest < 1e-6).sum(axis=0) - nearest.min(axis=0)
    return scores


def _membership(scores: Floats, records: Records, how: str) -> str:
    members = np.arange(len(scores)) < len(records.members)
    low, high = auc_interval(scores, members)
    return (
        f"membership, of {len(records.members)} members and {len(records.others)} others, by {how}: guess AUC 0.500, "
        f"measured {curve(scores, members).auc:.3f} (95 % interval {low:.3f} to {high:.3f})"
    )


def _attributes(outside: Floats, records: Records) -> str:
    """Each value of each member from its other values: where the record comes nearest to the space."""
    free, known = np.diag(outside), records.members @ outside
    told = free > _FREE
    values = records.members - known / np.where(told, free, 1.0)
    middle = np.median(records.others, axis=0)
    values = np.where(told, values, middle)
    ranges = np.ptp(records.all, axis=0)
    kept = ranges > 0
    measured, guess = (
        float(np.median(np.abs(made - records.members)[:, kept] / ranges[kept])) for made in (values, middle)
    )
    return (
        f"one unknown value of a member's record: guess (the others' median) off by {guess:.1%} of its column's range, "
        f"measured {measured:.1%} (medians)"
    )
