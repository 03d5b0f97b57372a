"""Small convolutional networks for images."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class LenetSettings(ModelSettings):
    """The sigmoid LeNet of Zhu et al. 2019, twice differentiable, as their attack needs."""

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


@MODELS.register
class ConvnetSettings(ModelSettings):
    """A plain ReLU ConvNet, after those of Geiping et al. 2020, smaller and without BatchNorm.

    Four convolutions, which halve the image twice, and a linear layer.
    """

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


@MODELS.register
class StridedSettings(ModelSettings):
    """Two 5x5 convolutions with 32 and 64 maps, which halve the image, and linear layers of 256 and the classes.

    After the MNIST network of Phan et al. 2019, with strides in place of pooling: cheap enough to be asked a thousand
    times an image, as certificates do.
    """

    is_own = False

    name: Literal["strided"] = Field("strided", description="network")

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        from torch import nn

        from fedpriv.models.machinery.layers import check_side, sequence

        channels, height, width = shape
        check_side(self, height, width)
        # A stride of 2 rounds an odd side up.
        rows, columns = (-(-side // 4) for side in (height, width))
        return sequence(
            conv1=nn.Conv2d(channels, 32, kernel_size=5, stride=2, padding=2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, kernel_size=5, stride=2, padding=2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * rows * columns, 256),
            relu3=nn.ReLU(),
            output=nn.Linear(256, classes),
        )


@MODELS.register
class ResnetSettings(ModelSettings):
    """ResNet-8 (He et al. 2016): one block each of 16, 32 and 64 channels, GroupNorm in place of BatchNorm."""

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
