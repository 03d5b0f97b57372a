"""Sentences from the row spaces of gradients (Petrov et al. 2024)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.texts.settings import TextAttackSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.scene import Progress
    from fedpriv.attacks.reconstruction.upload_model import Victim
    from fedpriv.attacks.texts.scene import Reading, TextScene


@ATTACKS.register
class DagerSettings(TextAttackSettings):
    """Tokens whose input lies in the row space of a gradient, put together by that of the next block; exact."""

    name: ClassVar[str] = "dager"
    title: ClassVar[str] = "Row spaces of gradients (DAGER)"
    label: ClassVar[str] = "DAGER"
    reference: ClassVar[str] = (
        "after Petrov, Dimitrov, Baader, Müller and Vechev: DAGER: Exact Gradient Inversion for Large Language Models, "
        "NeurIPS 2024"
    )
    simulates: ClassVar[bool] = False

    most_tokens: Count = Field(1024, description="tokens that may be kept at one position; more are refused")
    most_sentences: Count = Field(1024, description="beginnings that may be kept at one position; more are refused")
    starts: Count = Field(64, description="random sentences that the search in encoders begins with, for each length")
    rounds: Count = Field(
        40, description="rounds of the search that orders tokens where noise or a low rank hides the row spaces"
    )

    @override
    def read(self, scene: "TextScene", victim: "Victim", seed: int, progress: "Progress") -> "Reading":
        from fedpriv.attacks.texts.dager import read

        return read(scene, victim, self, scene.stream(seed, self.name, victim, 0), progress)
