"""A plain ReLU ConvNet, after the ConvNets of Geiping et al. 2020, smaller and without BatchNorm."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class ConvnetSettings(ModelSettings):
    """Four convolutions, which halve the image twice, and a linear layer."""

    is_own = False

    name: Literal["convnet"] = Field("convnet", description="network")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import check_side, sequence

        channels, height, width = shape
        check_side(self, height, width)
        return sequence(
            conv1=nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, kernel_size=3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 64, kernel_size=3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(64, 128, kernel_size=3, padding=1),
            relu4=nn.ReLU(),
            pool4=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            output=nn.Linear(128 * (height // 4) * (width // 4), classes),
        )
