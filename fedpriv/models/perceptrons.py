"""Linear layers on the features of an image or of a table's row."""

from math import ceil, prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Count
from fedpriv.models.machinery.settings import ModelSettings, Shape, TableModelSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fedpriv.core.columns import ColumnSpec


@MODELS.register
class LogisticSettings(ModelSettings):
    """Logistic regression: one layer, one logit a class; with more than two classes, softmax regression."""

    is_own = False

    name: Literal["logistic"] = Field("logistic", description="network")
    bias: bool = Field(True, description="whether a constant is added to each logit")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import sequence

        return sequence(flatten=nn.Flatten(), output=nn.Linear(prod(shape), classes, bias=self.bias))


@MODELS.register
class MlpSettings(ModelSettings):
    """A multilayer perceptron; without hidden layers, softmax regression."""

    is_own = False

    name: Literal["mlp"] = Field("mlp", description="network")
    hidden: tuple[Count, ...] = Field((1024, 1024), description="widths of the hidden layers")
    activation: Literal["relu", "sigmoid", "tanh"] = Field("relu", description="between the hidden layers")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import perceptron, sequence

        activation = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}[self.activation]
        widths = (prod(shape), *self.hidden, classes)
        return sequence(flatten=nn.Flatten(), **perceptron(widths, activation))


@MODELS.register
class EmbeddingSettings(TableModelSettings):
    """A perceptron on the learnt vectors of a row's categories, its flags and its numbers."""

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
        # The input is one-hot, so that a row's vector is a product: the same network as one that looks numbers up, in
        # which each example's gradient follows the rule of Linear layers, and which attacks can differentiate.
        embedded = EmbeddedColumns(columns, widths)
        layers = perceptron((embedded.outputs, *self.hidden, classes), nn.ReLU)
        return sequence(flatten=nn.Flatten(), embedded=embedded, **layers)
