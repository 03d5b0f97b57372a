"""Robbing the Fed (Fowl et al. 2022): parameters that the server has made; only for an active adversary."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.settings import GRADIENT_MATCHING, Access, ActiveSettings, Runs
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Integer

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
    needs: ClassVar[tuple[Access, ...]] = (
        *GRADIENT_MATCHING,
        Access.PUBLIC_DATA,
        Access.ACTIVE,
    )
    iterations: ClassVar[int] = 1

    bins: Annotated[Integer, Field(ge=2, le=10_000_000)] | None = Field(
        None, description="rows of the first layer used as bins for the images' brightness; unset: all"
    )

    @override
    def craft(self, model: "nn.Module", public_images: "Tensor", threat: "ThreatModel") -> "Vector":
        from fedpriv.attacks.reconstruction.first_layer.imprint import craft_parameters

        return craft_parameters(model, public_images, threat, self.bins)

    @classmethod
    @override
    def methods(cls) -> tuple[Runs, ...]:
        from fedpriv.attacks.reconstruction.first_layer.imprint import run_imprint

        return (run_imprint,)
