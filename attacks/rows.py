"""Rows of tables: how well cells were read, and what is offered by whoever never saw an upload.

What counts is the decoded cell: of a category the value of its largest feature, of a number the number itself.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.columns import Column, decode, slices
from fedpriv.core.records import RowScore

__all__ = ["most_frequent", "recovered_rows", "row_scores"]


def row_scores(columns: Sequence[Column], originals: Tensor, rows: Tensor) -> list[RowScore]:
    """Compare rows (N, 1, 1, features) on the [0, 1] scale with the true ones, cell by cell."""
    errors = _errors(columns, originals, rows)
    numbers = np.array([column.is_number for column in columns], dtype=bool)
    names = np.array([column.name for column in columns], dtype=object)
    return [
        RowScore(
            dict(zip(names[~numbers], (line[~numbers] == 0).tolist(), strict=True)),
            dict(zip(names[numbers], line[numbers].tolist(), strict=True)),
        )
        for line in errors
    ]


def recovered_rows(columns: Sequence[Column], originals: Tensor, rows: Tensor) -> list[bool]:
    """Whether each row counts as recovered; see :class:`RowScore`."""
    return [score.is_recovered for score in row_scores(columns, originals, rows)]


def most_frequent(columns: Sequence[Column], rows: Tensor) -> Tensor:
    """Return the row (1, 1, features) of the most frequent values and the medians.

    Of all rows of independent columns it has the most right categories and the least absolute errors of numbers.

    Args:
        columns: of the table.
        rows: (N, 1, 1, features) with N >= 1 on the [0, 1] scale.
    """
    flat = rows.flatten(1)
    made = torch.zeros_like(flat[0])
    for column, where in slices(columns):
        part = flat[:, where]
        if column.kind == "category":
            made[where.start + int(part.sum(dim=0).argmax())] = 1
        elif column.optional and part[:, 1].mean() >= 0.5:
            made[where] = part.new_tensor([0.5, 1.0])
        else:
            known = part[part[:, 1] < 0.5, 0] if column.optional else part[:, 0]
            made[where.start] = known.quantile(0.5, interpolation="nearest")
    return made.view(rows.shape[1:])


def _errors(columns: Sequence[Column], originals: Tensor, rows: Tensor) -> NDArray[np.float64]:
    """(N, columns): 0 or 1 for categories and flags, for numbers as a share of the range."""
    true, made = (decode(columns, part.cpu().flatten(1).numpy()) for part in (originals, rows))
    spans = np.array([column.span if column.is_number else 1.0 for column in columns])
    errors = np.abs(true - made) / spans
    named = np.array([not column.is_number for column in columns], dtype=bool)
    errors[:, named] = errors[:, named] > 0
    # Where one of the two has no number; where neither has one, nothing is wrong.
    return np.where(np.isnan(true) & np.isnan(made), 0.0, np.where(np.isnan(errors), 1.0, errors))
