"""Inverting Gradients with what has been learnt since (after the settings "modern" of Geiping's breaching)."""

from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.settings import MatchingSettings, Recipe
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive, Steps


@ATTACKS.register
class IgaModernSettings(MatchingSettings):
    """Signed Adam on the angle between gradients, with a total variation that knows colours and whose weight falls."""

    name: ClassVar[str] = "iga_modern"
    title: ClassVar[str] = "Inverting Gradients, modern settings"
    label: ClassVar[str] = "IGA, modern"
    reference: ClassVar[str] = (
        "after Geiping, Bauermeister, Dröge and Moeller: Inverting Gradients, NeurIPS 2020, and the settings modern of "
        "breaching"
    )
    tunable: ClassVar[tuple[str, ...]] = ("opponents",)

    iterations: Count = Field(2400, description="signed Adam steps")
    learning_rate: Positive = Field(0.1, description="of signed Adam, at its highest; falls like a cosine")
    warm_up: Steps = Field(50, description="steps over which the learning rate rises to that")
    opponents: NonNegative = Field(
        1e-3, description="weight of the total variation of channels and their differences, at the end"
    )
    opponents_start: NonNegative = Field(
        0.1, description="the same at the start; falls with the square of the steps left; 0: constant"
    )

    @classmethod
    @override
    def methods(cls) -> tuple[Recipe, ...]:
        return (Recipe("cosine", "signed-adam", "cosine", start="patterned", box=True, priors=("opponents",)),)
