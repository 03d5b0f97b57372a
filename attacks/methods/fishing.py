"""Class fishing (Wen et al. 2022): a last layer that the server has made; only for an active adversary."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.settings import GRADIENT_MATCHING, Access, ActiveSettings, Runs
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, Integer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedpriv.attacks.threat import ThreatModel
    from fedpriv.gradients import Vector


@ATTACKS.register
class FishingSettings(ActiveSettings):
    """Clients get a last layer whose gradient holds the records of each class by themselves."""

    name: ClassVar[str] = "fishing"
    title: ClassVar[str] = "Class fishing, an active server"
    reference: ClassVar[str] = (
        "after Wen, Geiping, Fowl, Goldblum and Goldstein: Fishing for User Data in Large-Batch Federated Learning, "
        "ICML 2022; certificates by counting"
    )
    needs: ClassVar[tuple[Access, ...]] = (
        *GRADIENT_MATCHING,
        Access.PUBLIC_DATA,
        Access.ACTIVE,
    )

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

    @classmethod
    @override
    def methods(cls) -> tuple[Runs, ...]:
        from fedpriv.attacks.reconstruction.fishing import run_fishing

        return (run_fishing,)
