"""A table's categories as learnt vectors: one table of vectors a category, then Linear layers as in the perceptron.

The input is one-hot, so that a row's vector is a product: the same network as one that looks numbers up, in which each
example's gradient follows the rule of Linear layers, and which attacks can differentiate.
"""

from math import ceil
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Count
from fedpriv.models.machinery.settings import TableModelSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fedpriv.core.columns import ColumnSpec


@MODELS.register
class EmbeddingSettings(TableModelSettings):
    """A perceptron on the vectors of a row's categories, its flags and its numbers."""

    is_own = False

    name: Literal["embedding"] = Field("embedding", description="network")
    dimensions: Count | None = Field(
        None, description="of a category's vectors; unset: half of its values, rounded up, at most 50"
    )
    hidden: tuple[Count, ...] = Field((128, 64), description="widths of the hidden layers")

    @override
    def table_network(self, columns: "Sequence[ColumnSpec]", classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import EmbeddedColumns, perceptron, sequence

        if not any(column.kind == "category" for column in columns):
            raise self.refusal("the data have no categories that could be embedded; use mlp")
        widths = [self.dimensions or min(ceil(column.width / 2), 50) for column in columns if column.kind == "category"]
        embedded = EmbeddedColumns(columns, widths)
        layers = perceptron((embedded.outputs, *self.hidden, classes), nn.ReLU)
        return sequence(flatten=nn.Flatten(), embedded=embedded, **layers)
