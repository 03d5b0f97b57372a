"""Membership and attribute inference on a reply, where no gradient attack fits: dense layers of any framework, trees.

The change of the first layer's weights is a sum of multiples of the inputs, whatever network follows and however many
steps were taken: a record that was trained on lies in the space of its rows, one that was not does so by chance alone.
So does a record with one unknown value, which is read off where it comes nearest. Thresholds of trees are values of
records (XGBoost's histograms) or halfway between two, and the weights of leaves tell how many records fell where: what
an unknown value may be given the others (after Fredrikson et al. 2014, with the trees' own weights).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.intervals import auc_interval, curve
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


def records_of(tapped: Tapped, client: int) -> Records | None:
    """Ask the function that ``tap.records`` names for a client's records; attacks see no more than candidates."""
    if tapped.records is None:
        return None
    try:
        members, others = imported(tapped, tapped.records, "tap.records")(client)
        found = Records(*(np.asarray(values, np.float64).reshape(len(values), -1) for values in (members, others)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"tap.records = {tapped.records!r}: of a client's number it returns two arrays of rows: {error}"
        ) from error
    if not len(found.members) or not len(found.others) or found.members.shape[1] != found.others.shape[1]:
        raise InputError(f"tap.records = {tapped.records!r}: both arrays need rows, all of the same length")
    return found


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree: by feature the least value that falls into it, and the first that is too large."""

    bounds: Mapping[int, tuple[float, float]]
    weight: float  # of the records that fell into it: their number, or the sum of their second derivatives

    def holds(self, column: int, values: Floats) -> NDArray[np.bool_]:
        """Whether values of a feature fall into it."""
        low, high = self.bounds.get(column, (-np.inf, np.inf))
        return (values >= low) & (values < high)


def inferred(
    update: Vector, splits: Mapping[int, list[float]], trees: Sequence[Sequence[Leaf]], records: Records
) -> list[str]:
    """Say of a client's records how well a reply tells members, and a value of theirs, next to a guess."""
    columns = records.members.shape[1]
    if splits:
        scores = _at_thresholds(splits, records)
        told = _membership(scores, records, "values that are thresholds of its trees")
        return [told, *_attributes_of_trees(trees, records)]
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
    return (nearest < 1e-6).sum(axis=0) - nearest.min(axis=0)


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
    values = np.where(told, values, np.median(records.others, axis=0))
    return _compared(values, range(values.shape[1]), "", records)


def _attributes_of_trees(trees: Sequence[Sequence[Leaf]], records: Records) -> Iterator[str]:
    """Each value of each member in a column that trees split, from its other values: the others' weighted median."""
    split = {column for tree in trees for leaf in tree for column in leaf.bounds}
    columns = sorted(split & {*range(records.members.shape[1])})
    if columns:
        values = np.stack([_values_in_leaves(trees, column, records) for column in columns], axis=1)
        yield _compared(values, columns, ", in columns that its trees split, by the weights of leaves", records)


def _values_in_leaves(trees: Sequence[Sequence[Leaf]], column: int, records: Records) -> Floats:
    """The values of members (n,) in a column: others' values, each weighted by the leaf that it would lead to."""
    rows, candidates = records.members, np.sort(records.others[:, column])
    likely, used = np.zeros((len(rows), len(candidates))), 0
    for tree in (tree for tree in trees if any(column in leaf.bounds for leaf in tree)):
        shares = np.zeros_like(likely)
        for leaf in tree:
            inside = leaf.holds(column, candidates)
            others = [leaf.holds(each, rows[:, each]) for each in leaf.bounds if each not in (column, -1)]
            reached = np.logical_and.reduce([np.ones(len(rows), bool), *others])
            shares += np.outer(reached, inside) * leaf.weight / max(int(inside.sum()), 1)
        likely += np.log(shares.clip(1e-12))
        used += 1
    weights = np.exp((likely - likely.max(axis=1, keepdims=True)) / max(used, 1)).cumsum(axis=1)
    return candidates[(weights < weights[:, -1:] / 2).sum(axis=1)]


def _compared(values: Floats, columns: Sequence[int], how: str, records: Records) -> str:
    """How far values (n, columns) of members are off, next to the median of the others' values."""
    members, middle = records.members[:, columns], np.median(records.others[:, columns], axis=0)
    ranges = np.ptp(records.all[:, columns], axis=0)
    kept = ranges > 0
    measured, guess = (float(np.median(np.abs(made - members)[:, kept] / ranges[kept])) for made in (values, middle))
    return (
        f"one unknown value of a member's record{how}: guess (the others' median) off by {guess:.1%} of its column's "
        f"range, measured {measured:.1%} (medians)"
    )
