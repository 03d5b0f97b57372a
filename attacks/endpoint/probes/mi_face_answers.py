"""MI-FACE through an endpoint, by differences of its answers."""

from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.access import Access
from fedpriv.attacks.endpoint.probes.mi_face import Gradient, MiFace, by_answers
from fedpriv.attacks.scene import ProbeScene
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Real


@PROBES.register
class MiFaceByAnswers(MiFace):
    """The first step takes d + 1 questions for all classes together, each further one d + 1 a class."""

    name: ClassVar[str] = "mi-face-answers"
    title: ClassVar[str] = "Model inversion through answers"
    needs: ClassVar[tuple[Access, ...]] = (Access.ANSWERS,)

    difference: Annotated[Real, Field(gt=0, le=0.5)] = Field(
        0.01, description="by which a pixel is changed, from 0 to 1; larger where answers are rounded"
    )

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if scene.labels_only:
            return f"{self.name} follows probabilities, and this policy names labels only"
        if scene.budget <= scene.pixels:
            return f"{self.name} takes {scene.pixels + 1} questions for its first step, and {scene.budget} are answered"
        return super().refusal(scene)

    @override
    def gradient(self, scene: ProbeScene) -> tuple[Gradient, Callable[[], int]]:
        endpoint = scene.open()
        estimate = by_answers(endpoint, scene.budget, self.costs(), self.auxiliary(scene), self.difference)
        return estimate, lambda: endpoint.asked
