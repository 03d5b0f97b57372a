"""ResNet-8 for small images: one block each of 16, 32 and 64 channels, GroupNorm in place of BatchNorm."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class ResnetSettings(ModelSettings):
    """A residual network (He et al. 2016)."""

    is_own = False

    name: Literal["resnet"] = Field("resnet", description="network")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import ResidualBlock, check_side, sequence

        channels, height, width = shape
        check_side(self, height, width)
        return sequence(
            conv=nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False),
            norm=nn.GroupNorm(8, 16),
            relu=nn.ReLU(),
            block1=ResidualBlock(16, 16, stride=1),
            block2=ResidualBlock(16, 32, stride=2),
            block3=ResidualBlock(32, 64, stride=2),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            output=nn.Linear(64, classes),
        )
