"""Networks for classes of torchvision, by name."""

from typing import Any

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.library import LibraryModelSettings
from fedpriv.models.machinery.settings import Shape

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
            from fedpriv.models.machinery.adapt import take_channels

            take_channels(network, shape[0])
        return network
