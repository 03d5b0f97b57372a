"""The tap: writes down, of the attacked rounds, exactly what the threat model lets the adversary see."""

from collections.abc import Sequence

from attacks.observation import Observation, PublicSettings, write_observation
from fedpriv.plan import Plan
from fedpriv.runs import RunFolder
from fedpriv.world import State, World
from server.exchange import Upload

__all__ = ["Tap", "public_settings"]


class Tap:
    """Stores the uploads of the rounds in ``adversary.rounds``, those of the first ``adversary.victims`` clients."""

    def __init__(self, world: World, folder: RunFolder) -> None:
        self._world = world
        self._folder = folder

    def record(self, round_number: int, before: State, uploads: Sequence[Upload]) -> None:
        """Write an observation for each upload that will be attacked; others are not kept."""
        adversary = self._world.experiment.adversary
        if not adversary.attacks or round_number not in adversary.rounds:
            return
        for upload in uploads[: adversary.victims]:
            plan = self._world.plans[upload.client]
            observation = Observation(
                round_number,
                upload.client,
                before.parameters,
                upload.state.parameters,
                public_settings(self._world, plan),
                plan.redistribution,
            )
            write_observation(self._folder.observations, observation)


def public_settings(world: World, plan: Plan) -> PublicSettings:
    """What everybody may know of a client's work (Kerckhoffs: the mechanism and its parameters included)."""
    experiment, dataset = world.experiment, world.dataset
    return PublicSettings(
        model=experiment.model.model_dump(mode="json"),
        shape=dataset.shape,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        algorithm=experiment.federation.algorithm,
        batch_size=experiment.training.batch_size,
        local_steps=plan.steps_per_round,
        learning_rate=experiment.training.learning_rate,
        optimizer=experiment.training.optimizer,
        momentum=experiment.training.momentum,
        client_examples=plan.sampling.examples,
        mechanism=plan.config.model_dump(mode="json", exclude_none=True),
    )
