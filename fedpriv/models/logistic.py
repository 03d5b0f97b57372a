"""Logistic regression: one Linear layer on the features themselves; with more than two classes, softmax regression."""

from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class LogisticSettings(ModelSettings):
    """One logit a class."""

    is_own = False

    name: Literal["logistic"] = Field("logistic", description="network")
    bias: bool = Field(True, description="whether a constant is added to each logit")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import sequence

        return sequence(flatten=nn.Flatten(), output=nn.Linear(prod(shape), classes, bias=self.bias))
