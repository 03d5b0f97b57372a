"""Gradient matching of parts of your own choice."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedpriv.attacks.settings import (
    MatchingSettings,
    ObjectiveName,
    OptimiserName,
    Recipe,
    Restarts,
    ScheduleName,
    StartName,
)
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive, Steps

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.reconstruction.results import Outcome
    from fedpriv.attacks.reconstruction.scene import Report, Scene
    from fedpriv.attacks.reconstruction.upload_model import Victim


@ATTACKS.register
class CustomSettings(MatchingSettings):
    """Gradient matching of parts of your own choice."""

    name: ClassVar[str] = "custom"
    title: ClassVar[str] = "Parts of your own choice"
    label: ClassVar[str] = "Custom"
    reference: ClassVar[str] = "Geiping et al., NeurIPS 2020, and Zhu et al., NeurIPS 2019, for the parts"
    tunable: ClassVar[tuple[str, ...]] = ("tv",)
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.methods.custom:run_custom",)

    objective: ObjectiveName = Field(
        "cosine", description="how gradients are compared; likelihood: of the mechanism's noise"
    )
    optimiser: OptimiserName = Field(
        "signed-adam",
        description="lbfgs: own line searches, in float64; signed-adam: Adam that sees the signs only; "
        "soft-signed-adam: Adam that sees large gradients cut, at the end none",
    )
    schedule: ScheduleName = Field(
        "cosine", description="of Adam's learning rate; steps: times 0.1 at 3/8, 5/8 and 7/8"
    )
    variables: Literal["pixels", "decorrelated"] = Field(
        "pixels", description="decorrelated: coordinates in which pixels of photographs are independent"
    )
    start: StartName = Field(
        "normal",
        description="normal: of the variables; uniform: over the valid pixels; patterned: a normal square of 4 x 4 "
        "pixels, repeated; the others: around images, the mean public one, those that the first Linear layer shows, or "
        "those with the features that reach the last",
    )
    box: bool = Field(True, description="keep images within the valid range of pixels")
    read_labels: bool = Field(True, description="read labels off the last layer; where not, optimise them")
    iterations: Count = Field(1000, description="steps")
    restarts: Restarts = 1
    learning_rate: Positive = Field(0.1, description="of Adam, at the start")
    warm_up: Steps = Field(0, description="steps of Adam over which the learning rate rises to the schedule's")
    tv: NonNegative = Field(1e-4, description="weight of the total variation, at the end")
    tv_start: NonNegative = Field(0.0, description="the same at the start; falls with the square of the steps left")
    opponents: NonNegative = Field(
        0.0, description="weight of the total variation of channels and their differences, at the end"
    )
    opponents_start: NonNegative = Field(0.0, description="the same at the start; falls likewise")
    public_mean: NonNegative = Field(0.0, description="weight of the squared distance from the mean public image")
    gaussian: NonNegative = Field(0.0, description="weight of the normal distribution fitted to public images")


def run_custom(
    scene: "Scene",
    rows: "Sequence[Victim]",
    images: "Tensor",
    logits: "Tensor",
    config: CustomSettings,
    report: "Report",
) -> "Outcome":
    """Run the recipe that the settings are; arguments as for ``run_recipe``."""
    from fedpriv.attacks.reconstruction.recipes import run_recipe

    recipe = Recipe(
        config.objective,
        config.optimiser,
        config.schedule,
        config.variables,
        config.start,
        config.box,
        ("tv", "opponents", "public_mean", "gaussian"),
        ("known", "read", "optimised") if config.read_labels else ("known", "optimised"),
    )
    return run_recipe(recipe, scene, rows, images, logits, config, report)
