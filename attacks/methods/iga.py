"""Inverting Gradients (Geiping et al. 2020): as in the paper, with modern settings, and from features."""

from typing import ClassVar, Literal

from pydantic import Field

from fedpriv.attacks.settings import MatchingSettings, PriorFile, Recipe
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive, Steps


@ATTACKS.register
class IgaSettings(MatchingSettings):
    """Signed Adam on the angle between gradients, with total variation."""

    name: ClassVar[str] = "iga"
    title: ClassVar[str] = "Inverting Gradients"
    reference: ClassVar[str] = "Geiping, Bauermeister, Dröge and Moeller: Inverting Gradients, NeurIPS 2020"
    tunable: ClassVar[tuple[str, ...]] = ("tv",)
    made_of: ClassVar[tuple[Recipe, ...]] = (
        Recipe("cosine", "signed-adam", "steps", box=True, priors=("tv", "denoiser")),
    )

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
    made_of: ClassVar[tuple[Recipe, ...]] = (
        Recipe("cosine", "signed-adam", "cosine", start="patterned", box=True, priors=("opponents",)),
    )

    iterations: Count = Field(2400, description="signed Adam steps")
    learning_rate: Positive = Field(0.1, description="of signed Adam, at its highest; falls like a cosine")
    warm_up: Steps = Field(50, description="steps over which the learning rate rises to that")
    opponents: NonNegative = Field(
        1e-3, description="weight of the total variation of channels and their differences, at the end"
    )
    opponents_start: NonNegative = Field(
        0.1, description="the same at the start; falls with the square of the steps left; 0: constant"
    )


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
    made_of: ClassVar[tuple[Recipe, ...]] = (
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

    iterations: Count = Field(100, description="signed Adam steps")
    feature_iterations: Count = Field(100, description="steps of L-BFGS on the features, before those")
    warm_up: Steps = Field(0, description="steps over which the learning rate rises to that")
    opponents_start: NonNegative = Field(
        0.03, description="the same at the start; falls with the square of the steps left; 0: constant"
    )
