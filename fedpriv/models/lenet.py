"""The sigmoid LeNet of Zhu et al. 2019: twice differentiable, as their attack needs."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class LenetSettings(ModelSettings):
    """Three convolutions and a linear layer."""

    is_own = False

    name: Literal["lenet"] = Field("lenet", description="network")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import sequence

        channels, height, width = shape
        features = 12 * -(-height // 4) * -(-width // 4)
        return sequence(
            conv1=nn.Conv2d(channels, 12, kernel_size=5, stride=2, padding=2),
            sigmoid1=nn.Sigmoid(),
            conv2=nn.Conv2d(12, 12, kernel_size=5, stride=2, padding=2),
            sigmoid2=nn.Sigmoid(),
            conv3=nn.Conv2d(12, 12, kernel_size=5, stride=1, padding=2),
            sigmoid3=nn.Sigmoid(),
            flatten=nn.Flatten(),
            output=nn.Linear(features, classes),
        )
