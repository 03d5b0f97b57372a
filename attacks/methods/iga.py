"""Inverting Gradients (Geiping et al. 2020)."""

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.settings import MatchingSettings, PriorFile, Recipe
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive


@ATTACKS.register
class IgaSettings(MatchingSettings):
    """Signed Adam on the angle between gradients, with total variation."""

    name: ClassVar[str] = "iga"
    title: ClassVar[str] = "Inverting Gradients"
    reference: ClassVar[str] = "Geiping, Bauermeister, Dröge and Moeller: Inverting Gradients, NeurIPS 2020"
    tunable: ClassVar[tuple[str, ...]] = ("tv",)

    iterations: Count = Field(2400, description="signed Adam steps")
    learning_rate: Positive = Field(0.1, description="of signed Adam, times 0.1 at 3/8, 5/8 and 7/8 of the steps")
    tv: NonNegative = Field(1e-4, description="weight of the total variation, at the end")
    tv_start: NonNegative = Field(
        0.015,
        description="the same at the start; falls with the square of the steps left; 0: constant, as in the paper",
    )

    prior: PriorFile = ""
    denoiser: NonNegative = Field(0.03, description="weight of that prior")

    start: Literal["normal", "closed-form", "features"] = Field(
        "normal",
        description="normal: random; closed-form: at the images that the first Linear layer shows; features: at those "
        "with the features that reach the last",
    )

    @classmethod
    @override
    def methods(cls) -> tuple[Recipe, ...]:
        return (Recipe("cosine", "signed-adam", "steps", box=True, priors=("tv", "denoiser")),)
