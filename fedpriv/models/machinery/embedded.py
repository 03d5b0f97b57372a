"""The layer that turns a row's one-hot categories into vectors."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.core.columns import ColumnSpec, groups, slices


class EmbeddedColumns(nn.Module):
    """The vector of each category, then the features of flags and numbers as they are."""

    def __init__(self, columns: Sequence[ColumnSpec], widths: Sequence[int]) -> None:
        super().__init__()
        self._groups = groups(columns)
        self._others = [where for column, where in slices(columns) if column.kind != "category"]
        self.tables = nn.ModuleList(_table(where, width) for where, width in zip(self._groups, widths, strict=True))
        self.outputs = sum(widths) + sum(where.stop - where.start for where in self._others)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        """Rows (B, features) to (B, outputs)."""
        vectors = [table(rows[:, where]) for table, where in zip(self.tables, self._groups, strict=True)]
        return torch.cat([*vectors, *(rows[:, where] for where in self._others)], dim=1)


def _table(where: slice, width: int) -> nn.Linear:
    table = nn.Linear(where.stop - where.start, width, bias=False)
    nn.init.normal_(table.weight)  # as of torch's Embedding
    return table
