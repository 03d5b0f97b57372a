"""Linear layers of the given widths; without hidden layers, softmax regression."""

from itertools import pairwise
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

        activation = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}[self.activation]
        channels, height, width = shape
        model = nn.Sequential()
        model.add_module("flatten", nn.Flatten())
        widths = (channels * height * width, *self.hidden)
        for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            model.add_module(f"hidden{number}", nn.Linear(inputs, outputs))
            model.add_module(f"activation{number}", activation())
        model.add_module("output", nn.Linear(widths[-1], classes))
        return model
