"""An attack on answers of somebody else: a copy that says the same of every image, whatever the endpoint says most."""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from fedpriv.attacks.intervals import rate_interval
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome, ProbeResult
from fedpriv.core.figure import Figure
from fedpriv.core.settings import Count

if TYPE_CHECKING:
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


class Constant(ModelAttack):
    """Agrees with the model as often as the model says that."""

    name: ClassVar[str] = "constant"
    title: ClassVar[str] = "The commonest answer"
    reference: ClassVar[str] = "nobody, 2026"

    images: Count = Field(20, description="that are asked about")

    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        endpoint = scene.open()
        asked = scene.known_public().images[: min(self.images, scene.budget)]
        commonest = int(np.bincount(endpoint.ask(asked).labels).argmax())
        right = int((referee.scores(referee.held.images).argmax(dim=1) == commonest).sum())
        figure = Figure(
            "agreement of a constant", rate_interval(right, len(referee.held.labels)), 1 / scene.classes, theorem="none"
        )
        return (ProbeOutcome(ProbeResult(self.name, "", self.surface, endpoint.asked, (figure,))),)
