"""Parameters that the server has made, imprint and class fishing (both 2022); only for an active adversary."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.settings import ActiveSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, Integer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedpriv.attacks.threat import ThreatModel
    from fedpriv.gradients import Vector


@ATTACKS.register
class ImprintSettings(ActiveSettings):
    """Clients get a first Linear layer whose rows each hold back one image; convolutions before it let all through."""

    name: ClassVar[str] = "imprint"
    title: ClassVar[str] = "Imprint, an active server"
    reference: ClassVar[str] = "Fowl, Geiping, Czaja, Goldblum and Goldstein: Robbing the Fed, ICLR 2022"
    iterations: ClassVar[int] = 1
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.reconstruction.first_layer.imprint:run_imprint",)

    bins: Annotated[Integer, Field(ge=2, le=10_000_000)] | None = Field(
        None, description="rows of the first layer used as bins for the images' brightness; unset: all"
    )

    @override
    def craft(self, model: "nn.Module", public_images: "Tensor", threat: "ThreatModel") -> "Vector":
        from fedpriv.attacks.reconstruction.first_layer.imprint import craft_parameters

        return craft_parameters(model, public_images, threat, self.bins)


@ATTACKS.register
class FishingSettings(ActiveSettings):
    """Clients get a last layer whose gradient holds the records of each class by themselves."""

    name: ClassVar[str] = "fishing"
    title: ClassVar[str] = "Class fishing, an active server"
    reference: ClassVar[str] = (
        "after Wen, Geiping, Fowl, Goldblum and Goldstein: Fishing for User Data in Large-Batch Federated Learning, "
        "ICML 2022; certificates by counting"
    )
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.reconstruction.fishing:run_fishing",)

    target: Annotated[Integer, Field(ge=0, le=10_000_000)] = Field(
        0, description="the class whose record also shows in the gradients of all layers before the last"
    )
    body: Literal["auto", "kept"] = Field(
        "auto",
        description="the layers before the last: auto: made so that features determine the image, where a ReLU network "
        "has room for that; kept: as they are",
    )
    iterations: Count = Field(600, description="L-BFGS iterations by which an image is found from its features")

    @override
    def craft(self, model: "nn.Module", public_images: "Tensor", threat: "ThreatModel") -> "Vector":
        from fedpriv.attacks.reconstruction.fishing import craft_fishing

        return craft_fishing(model, public_images, threat, self.target, self.body == "auto")
