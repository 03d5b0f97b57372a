"""Networks for classes of torchvision, by name."""

from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.library import LibraryModelSettings
from fedpriv.models.machinery.settings import Shape

if TYPE_CHECKING:
    from torch import nn

_CHANNELS = 3  # that they take


@MODELS.register
class TorchvisionSettings(LibraryModelSettings):
    """A network for classes of torchvision; with one channel its first convolution has one."""

    library = "torchvision"

    name: str = Field("torchvision:NAME", pattern="^torchvision:", description="network of torchvision")

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        self.check_library()
        from torchvision import models

        self.check_name(models.list_models(module=models))
        sizes = {"image_size": shape[1], "input_size": shape[1:]}
        network = self.sized(models.get_model, sizes, self.architecture, num_classes=classes, **self.keywords)
        self.load(network, classes)
        if shape[0] != _CHANNELS:
            _take_channels(network, shape[0])
        return network


def _take_channels(network: "nn.Module", channels: int) -> None:
    """Replace the first convolution by one of another number of channels, which sees a grey image as before."""
    from torch import nn

    name, old = next(each for each in network.named_modules() if isinstance(each[1], nn.Conv2d))
    new = nn.Conv2d(
        channels, old.out_channels, old.kernel_size, old.stride, old.padding, old.dilation, old.groups,
        old.bias is not None, old.padding_mode,
    )  # fmt: skip
    new.weight = nn.Parameter(old.weight.detach().sum(dim=1, keepdim=True).repeat(1, channels, 1, 1) / channels)
    new.bias = old.bias
    parent, _, local = name.rpartition(".")
    setattr(network.get_submodule(parent), local, new)
