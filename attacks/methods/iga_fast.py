"""Inverting Gradients from images with the features that the last layer reveals."""

from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.methods.iga_modern import IgaModernSettings
from fedpriv.attacks.settings import Recipe
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Steps


@ATTACKS.register
class IgaFastSettings(IgaModernSettings):
    """Each image alone from its features, by passes without second derivatives; then all of them by ``iga_modern``."""

    name: ClassVar[str] = "iga_fast"
    title: ClassVar[str] = "Inverting Gradients, from features"
    label: ClassVar[str] = "IGA, fast"
    reference: ClassVar[str] = (
        "features of each example after Kariyappa et al.: Cocktail Party Attack, ICML 2023; then Geiping, "
        "Bauermeister, Dröge and Moeller: Inverting Gradients, NeurIPS 2020"
    )

    iterations: Count = Field(100, description="signed Adam steps")
    feature_iterations: Count = Field(100, description="steps of L-BFGS on the features, before those")
    warm_up: Steps = Field(0, description="steps over which the learning rate rises to that")
    opponents_start: NonNegative = Field(
        0.03, description="the same at the start; falls with the square of the steps left; 0: constant"
    )

    @classmethod
    @override
    def methods(cls) -> tuple[Recipe, ...]:
        return (
            Recipe(
                "cosine",
                "signed-adam",
                "cosine",
                start="features",
                otherwise="patterned",
                box=True,
                priors=("opponents",),
            ),
        )
