"""Layers that several networks share: named layers, residual blocks, and the smallest image size."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.core.columns import ColumnSpec, groups, slices
from fedpriv.models.machinery.settings import ModelSettings

SMALLEST_SIDE = 8  # of an image that is halved twice


def sequence(**layers: nn.Module) -> nn.Sequential:
    """Return layers one after the other, under their names."""
    return nn.Sequential(OrderedDict(layers))


def perceptron(widths: Sequence[int], activation: type[nn.Module]) -> dict[str, nn.Module]:
    """Return Linear layers from each width to the next, an activation after each but the last, under their names."""
    layers: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths[:-1]), start=1):
        layers |= {f"hidden{number}": nn.Linear(inputs, outputs), f"activation{number}": activation()}
    return {**layers, "output": nn.Linear(widths[-2], widths[-1])}


def check_side(config: ModelSettings, height: int, width: int) -> None:
    """Refuse images that are too small for a network which halves them twice."""
    if min(height, width) < SMALLEST_SIDE:
        raise config.refusal(f"images are {width}x{height}; expected at least {SMALLEST_SIDE}x{SMALLEST_SIDE}")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added (He et al. 2016), with GroupNorm (Wu and He 2018)."""

    # Digests of networks name it so, and noise is keyed by them.
    __module__, __qualname__ = "fedpriv.models", "_ResidualBlock"

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else sequence(
                conv=nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                norm=nn.GroupNorm(8, outputs),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride), rounded up."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


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
