"""The most probable sentences given upload, noise and a language model (after Balunović et al. 2022)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.texts.settings import PriorSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, Steps

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.scene import Progress
    from fedpriv.attacks.reconstruction.upload_model import Victim
    from fedpriv.attacks.simulation import Simulation
    from fedpriv.attacks.texts.scene import Reading, TextScene


@ATTACKS.register
class TextMapSettings(PriorSettings):
    """Maximum a posteriori over tokens, under the mechanism's own noise and a language model."""

    name: ClassVar[str] = "text_map"
    title: ClassVar[str] = "Noise-adaptive maximum a posteriori for texts"
    label: ClassVar[str] = "MAP (texts)"
    reference: ClassVar[str] = (
        "after Balunović, Dimitrov, Staab and Vechev: Bayesian Framework for Gradient Leakage, ICLR 2022, and "
        "Ebrahimi, Rao, Lowd and Dou: HotFlip, ACL 2018; with the mechanism's own noise"
    )

    iterations: Count = Field(
        40,
        description="rounds of changes, at most; where no table tells the length, a quarter as many try several first",
    )
    kicks: Steps = Field(
        3, description="how often some tokens are drawn again where no change helps, while rounds are left"
    )
    restarts: Count = Field(1, description="starts; the first at what the tables of tokens and positions show")

    @classmethod
    @override
    def simulation(cls) -> "Simulation":
        from fedpriv.attacks.texts.search import simulated_probabilities

        return simulated_probabilities

    @override
    def read(self, scene: "TextScene", victim: "Victim", seed: int, progress: "Progress") -> "Reading":
        from fedpriv.attacks.texts.search import most_probable

        return most_probable(scene, victim, self, seed, progress)
