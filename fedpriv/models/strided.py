"""A ConvNet of strided 5x5 convolutions: cheap enough to be asked a thousand times an image, as certificates do."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import ModelSettings, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class StridedSettings(ModelSettings):
    """Two 5x5 convolutions with 32 and 64 maps, which halve the image, and linear layers of 256 and the classes.

    After the MNIST network of Phan et al. 2019, with strides in place of pooling.
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
