"""Linear layers of the given widths; without hidden layers, softmax regression."""

from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Count
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class MlpSettings(ModelSettings):
    """A multilayer perceptron."""

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
