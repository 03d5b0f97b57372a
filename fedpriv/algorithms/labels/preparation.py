"""Label noise: each client changes its labels once, by randomised response, before anything else is done."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.algorithms.labels.settings import LabelSettings
from fedpriv.core.algorithm import Preparation, algorithm_of
from fedpriv.core.errors import InputError
from fedpriv.core.registry import PREPARATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.accounting.response import Response
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.core.records import Guarantee
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World
    from fedpriv.data.datasets import Dataset
    from fedpriv.server.uploads import Upload


def response_of(world: "World") -> "Response":
    """Return how clients change their labels."""
    from fedpriv.accounting.response import Response

    epsilon = LabelSettings.of(world.experiment).epsilon
    if epsilon is None:
        raise ValueError("clients use labels as they are")
    return Response(epsilon, world.dataset.classes)


def changed_labels(labels: "Tensor", response: "Response", noise: "NoiseStream") -> "Tensor":
    """Return labels (n,), int64, from 0 to K - 1, of which each is the given one with probability p, else any other."""
    import torch

    kept = noise.uniform(len(labels)) < response.keep
    steps = 1 + (noise.uniform(len(labels)) * (response.answers - 1)).long().clamp(max=response.answers - 2)
    return torch.where(kept, labels, (labels + steps) % response.answers)


@PREPARATIONS.register
class ChangedLabels(Preparation):
    """Randomised response of each label."""

    name: ClassVar[str] = "labels"
    key: ClassVar[str] = "data.label_epsilon"

    @override
    def is_asked_for(self, experiment: "Experiment") -> bool:
        return LabelSettings.of(experiment).epsilon is not None

    @override
    def conflicts(self, experiment: "Experiment") -> None:
        given = LabelSettings.of(experiment)
        if given.epsilon is not None and experiment.data.overlaps:
            raise InputError(
                "data.label_epsilon with partition = 'overlapping': each copy's label would be changed again"
            )
        if not given.corrected:
            return
        correction = "training.label_correction = 'forward'"
        if given.epsilon is None:
            raise InputError(f"{correction} corrects for labels that clients change: set data.label_epsilon, too")
        if not algorithm_of(experiment).trains_in_steps:
            raise InputError(f"{correction} is for fedsgd and fedavg, not for {experiment.federation.algorithm!r}")
        if experiment.adversary.attacks:
            raise InputError(
                f"{correction}: attacks on gradients are for the cross entropy; set adversary.attacks = []"
            )

    @override
    def check_data(self, experiment: "Experiment", dataset: "Dataset") -> None:
        if dataset.is_next:
            raise InputError("data.label_epsilon is about labels of whole examples, and the next token is predicted")

    @override
    def changed(self, world: "World", labels: "Tensor", noise: "NoiseStream") -> "Tensor":
        return changed_labels(labels, response_of(world), noise)

    @override
    def correction(self, world: "World") -> "Response | None":
        return response_of(world) if LabelSettings.of(world.experiment).corrected else None

    @override
    def claim(self, world: "World") -> "Guarantee":
        from fedpriv.accounting.response import label_guarantee

        notes = [
            "About labels alone. An image often shows its class: anyone who has the image, from its owner or from an "
            "upload that nothing else protects, needs no label.",
            "It is separate from the mechanism's claim and is never added to it: changing labels before training keeps "
            "neighbouring data sets neighbours.",
        ]
        if world.experiment.noise == "reproducible":
            notes.append("noise = 'reproducible': anyone who guesses the seed knows which labels were changed.")
        return label_guarantee(response_of(world), [*notes, *world.taken_as_public])

    @override
    def record(self, world: "World", folder: "RunFolder", uploads: "Sequence[Upload]") -> None:
        from fedpriv.algorithms.labels.survey import record_survey

        record_survey(world, folder, uploads)
