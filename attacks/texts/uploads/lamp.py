"""Gradient matching in turn with changes of order, scored with a language model (Balunović et al. 2022)."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.texts.settings import PriorSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.scene import Progress
    from fedpriv.attacks.reconstruction.upload_model import Victim
    from fedpriv.attacks.simulation import Simulation
    from fedpriv.attacks.texts.scene import Reading, TextScene


@ATTACKS.register
class LampSettings(PriorSettings):
    """Adam over vectors of usual length, in turn with tokens exchanged and moved."""

    name: ClassVar[str] = "lamp"
    title: ClassVar[str] = "Vectors and orders of tokens in turn (LAMP)"
    label: ClassVar[str] = "LAMP"
    reference: ClassVar[str] = (
        "after Balunović, Dimitrov, Jovanović and Vechev: LAMP: Extracting Text from Gradients with Language Model "
        "Priors, NeurIPS 2022"
    )

    objective: Literal["cosine", "whole", "distance"] = Field(
        "cosine",
        description="how gradients are compared: by the mean angle of their tensors, by one angle of all (better "
        "with noise), or by the squared and the absolute distance",
    )
    alpha: NonNegative = Field(0.01, description="weight of the absolute distance, where that is the objective")
    iterations: Count = Field(300, description="steps of Adam")
    restarts: Count = Field(1, description="random starts; the one with the lowest loss of its own is kept")
    learning_rate: Positive = Field(
        0.1, description="of Adam, in deviations of tokens' vectors; times 0.89 each 50 steps"
    )
    length: NonNegative = Field(1.0, description="weight of how far the mean length of vectors is from that of tokens'")
    language: NonNegative = Field(0.1, description="weight of the nats a token of a language model, between orders")
    orders: Count = Field(16, description="changes of order that are tried at once")
    every: Count = Field(30, description="steps of Adam from one such trial to the next")

    @classmethod
    @override
    def simulation(cls) -> "Simulation":
        from fedpriv.attacks.texts.search import simulated_vectors

        return simulated_vectors

    @override
    def read(self, scene: "TextScene", victim: "Victim", seed: int, progress: "Progress") -> "Reading":
        from fedpriv.attacks.texts.search import vectors_and_orders

        return vectors_and_orders(scene, victim, self, seed, progress)
