"""Networks of timm, by name."""

from typing import Any

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.library import LibraryModelSettings
from fedpriv.models.machinery.settings import Shape


@MODELS.register
class TimmSettings(LibraryModelSettings):
    """A network of timm, which has arguments for the number of channels and, where it matters, the size."""

    library = "timm"

    name: str = Field("timm:NAME", pattern="^timm:", description="network of timm")

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        self.check_library()
        import timm

        self.check_name(timm.list_models())
        keywords = {"num_classes": classes, "in_chans": shape[0], **self.keywords}
        if "img_size" in keywords:
            return timm.create_model(self.architecture, **keywords)
        try:
            return timm.create_model(self.architecture, img_size=shape[1:], **keywords)
        except TypeError as error:
            if "img_size" not in str(error):  # what does not take the argument takes any size
                raise
            return timm.create_model(self.architecture, **keywords)
