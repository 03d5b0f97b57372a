"""The base of the settings of attacks on uploads of text models, which its modules enter."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.settings import AttackSettings, Recipe, Runs

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.engine import AttackJob
    from fedpriv.attacks.reconstruction.results import Reconstruction
    from fedpriv.attacks.reconstruction.scene import Progress
    from fedpriv.attacks.reconstruction.upload_model import Victim
    from fedpriv.attacks.simulation import Simulation
    from fedpriv.attacks.texts.scene import Reading, TextScene


class TextAttackSettings(AttackSettings):
    """The section ``[adversary.NAME]`` of an attack on texts."""

    is_text: ClassVar[bool] = True

    @abstractmethod
    def read(self, scene: "TextScene", victim: "Victim", seed: int, progress: "Progress") -> "Reading":
        """Read the sentences behind one upload, with random starts of ``scene.stream(seed, name, victim, restart)``."""

    @classmethod
    @override
    def whole(cls) -> "Callable[[AttackJob], list[Reconstruction]]":
        from fedpriv.attacks.texts.scene import read_texts

        return read_texts

    @classmethod
    @override
    def simulation(cls) -> "Simulation":
        """The network itself on tokens, unless an attack runs another one."""
        from fedpriv.attacks.texts.search import simulated_texts

        return simulated_texts

    @classmethod
    @override
    def methods(cls) -> tuple[Recipe | Runs, ...]:
        """None: it is not made of the parts of attacks on images."""
        return ()


class PriorSettings(TextAttackSettings):
    """The section of an attack that asks a language model how usual a sentence is."""

    language_model: str = Field(
        "", description="a stories260k.npz as prior, for texts of its tokens; empty: a GPT trained on the public texts"
    )
