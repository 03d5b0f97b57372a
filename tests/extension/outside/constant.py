"""An attack on answers of somebody else: a copy that says the same of every image, whatever the endpoint says most."""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from fedpriv.attacks.endpoint.records import ProbeResult
from fedpriv.attacks.endpoint.table import EndpointAttack, ProbeOutcome
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.figure import Figure
from fedpriv.core.settings import Count

if TYPE_CHECKING:
    from fedpriv.attacks.endpoint.scene import Referee, Scene


class Constant(EndpointAttack):
    """Agrees with the model as often as the model says that."""

    name: ClassVar[str] = "constant"
    title: ClassVar[str] = "The commonest answer"
    reference: ClassVar[str] = "nobody, 2026"

    images: Count = Field(20, description="that are asked about")

    def run(self, scene: "Scene", referee: "Referee") -> tuple[ProbeOutcome, ...]:
        endpoint = scene.open()
        asked = scene.known_public().images[: min(self.images, scene.budget)]
        commonest = int(np.bincount(endpoint.ask(asked).labels).argmax())
        right = int((referee.scores(referee.held.images).argmax(dim=1) == commonest).sum())
        figure = Figure(
            "agreement of a constant", rate_interval(right, len(referee.held.labels)), 1 / scene.classes, theorem="none"
        )
        return (ProbeOutcome(ProbeResult(self.name, "", self.surface, endpoint.asked, (figure,))),)
