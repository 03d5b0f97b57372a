"""The most probable images given upload, noise and prior (after Balunović et al. 2022)."""

from typing import ClassVar

from pydantic import Field

from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, Positive


@ATTACKS.register
class MapSettings(AttackSettings):
    """Maximum a posteriori under the mechanism's own noise."""

    name: ClassVar[str] = "map"
    title: ClassVar[str] = "Noise-adaptive maximum a posteriori"
    label: ClassVar[str] = "Noise-adaptive MAP"
    reference: ClassVar[str] = (
        "after Balunović, Dimitrov, Staab and Vechev: Bayesian Framework for Gradient Leakage, ICLR 2022; with the "
        "mechanism's own noise"
    )
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.reconstruction.posterior:run_map",)

    iterations: Count = Field(400, description="steps of Adam")
    restarts: Count = Field(1, description="random starts; the most probable result is kept")
    learning_rate: Positive = Field(0.05, description="of Adam, in standard deviations of the prior")
