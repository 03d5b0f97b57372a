"""Networks of timm, by name."""

import sys
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.library import LibraryModelSettings
from fedpriv.models.machinery.settings import Shape

if TYPE_CHECKING:
    from torch import Tensor

_CHANNELS = 3  # of the images that its weights were made with


@MODELS.register
class TimmSettings(LibraryModelSettings):
    """A network of timm, which has arguments for the number of channels and, where it matters, the size."""

    library = "timm"

    name: str = Field("timm:NAME", pattern="^timm:", description="network of timm")

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        self.check_library()
        import timm

        self.check_name([*timm.list_models(), *timm.list_pretrained()])
        keywords = {"num_classes": classes, "in_chans": shape[0], **self.keywords}
        network = self.sized(timm.create_model, {"img_size": shape[1:]}, self.architecture, **keywords)
        self.load(network, classes)
        return network

    @override
    def converted(self, network: Any, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Other names and sizes of positions by timm's own rules, which most of its modules have; and channels."""
        from timm.models import adapt_input_conv

        change = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
        tensors = dict(tensors if change is None else change(tensors, network))
        first = network.pretrained_cfg.get("first_conv") or ()
        for name in (first,) if isinstance(first, str) else first:
            wanted, given = network.get_submodule(name).weight, tensors.get(f"{name}.weight")
            if given is not None and given.ndim == 4 and given.shape[1] == _CHANNELS != wanted.shape[1]:
                tensors[f"{name}.weight"] = adapt_input_conv(wanted.shape[1], given)
        return tensors
