"""Gradient matching over vectors of tokens (Deng et al. 2021)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.texts.settings import TextAttackSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.scene import Progress
    from fedpriv.attacks.reconstruction.upload_model import Victim
    from fedpriv.attacks.simulation import Simulation
    from fedpriv.attacks.texts.scene import Reading, TextScene


@ATTACKS.register
class TagSettings(TextAttackSettings):
    """Adam on the squared and the absolute distance of gradients, over vectors; then the nearest tokens."""

    name: ClassVar[str] = "tag"
    title: ClassVar[str] = "Transformer attack on gradients (TAG)"
    label: ClassVar[str] = "TAG"
    reference: ClassVar[str] = (
        "Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran and Ding: TAG: Gradient Attack on Transformer-based Language "
        "Models, Findings of EMNLP 2021"
    )

    iterations: Count = Field(300, description="steps of Adam")
    restarts: Count = Field(1, description="random starts; the one with the lowest loss of its own is kept")
    learning_rate: Positive = Field(
        0.1, description="of Adam, in deviations of tokens' vectors, falling to 0 in a line"
    )
    alpha: NonNegative = Field(
        0.01, description="weight of the absolute distance in the first tensor; it falls in a line towards the last"
    )

    @classmethod
    @override
    def simulation(cls) -> "Simulation":
        from fedpriv.attacks.texts.search import simulated_vectors

        return simulated_vectors

    @override
    def read(self, scene: "TextScene", victim: "Victim", seed: int, progress: "Progress") -> "Reading":
        from fedpriv.attacks.reconstruction.scene import counted, one_of
        from fedpriv.attacks.texts.scene import Reading
        from fedpriv.attacks.texts.scoring import squared_and_absolute
        from fedpriv.attacks.texts.search import Ground, Vectors

        ground = Ground.of(scene, victim)

        def rate(step: int) -> float:
            return self.learning_rate * (1 - step / self.iterations)

        attempts = []
        for restart in range(self.restarts):
            stream = scene.stream(seed, self.name, victim, restart)
            tell = counted(one_of(progress, restart, self.restarts), 1, self.iterations)
            vectors = Vectors(ground, squared_and_absolute(self.alpha), None, stream)
            loss = vectors.descend(self.iterations, rate, tell)
            attempts.append(ground.sentences(vectors.texts(vectors.now), loss, self.iterations))
        return Reading(tuple(attempts))
