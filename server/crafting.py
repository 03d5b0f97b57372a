"""Parameters that an active server makes up and sends to some clients.

In each attacked round the clients whose uploads are attacked get a network in which the active attack has replaced
parameters (``ActiveSettings.craft``); all others get the model. The server reads the answers to the made network and
throws them away: they are gradients of another function, which would ruin the model that it pretends to train. So a
round whose clients were all deceived leaves the model as it is.

What is sent depends on the settings and the model only, so that a resumed run sends the same again.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedpriv.attacks.access import Access
from fedpriv.attacks.reconstruction.active import refuse_local_training
from fedpriv.attacks.settings import ActiveSettings
from fedpriv.attacks.threat import threat_model
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import State, World
from fedpriv.server.tap import public_settings


def check_crafting(world: World) -> None:
    """Refuse settings under which an active attack could not be made."""
    if not world.experiment.adversary.crafts:
        return
    for client in np.unique(world.alike, return_index=True)[1].tolist():
        settings = public_settings(world.experiment, world.dataset, world.plans[client])
        refuse_local_training(settings, _active(world).name)
    crafted_state(world, world.initial)


def crafted_clients(experiment: Experiment, round_number: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Return the clients of a round that are sent made parameters: the victims, or all whose sum is read."""
    adversary = experiment.adversary
    if not adversary.crafts or round_number not in adversary.rounds:
        return ()
    if Access.UPLOADS in threat_model(adversary).grants:
        return tuple(asked[: adversary.victims])
    return tuple(asked)


def crafted_state(world: World, before: State) -> State:
    """Return what the deceived clients are sent in place of the global state."""
    adversary = world.experiment.adversary
    before.load_into(world.model)
    images = world.network_input(_public_images(world))
    try:
        made = _active(world).craft(world.model, images, threat_model(adversary))
    except InputError as error:
        raise world.experiment.model.refusal(str(error)) from None
    return State({name: made[name].cpu() for name in before.parameters}, before.buffers)


def _active(world: World) -> ActiveSettings:
    """The run's active attack, of which there is one."""
    adversary = world.experiment.adversary
    settings: ActiveSettings = adversary.settings(adversary.active_attack or "")
    return settings


def _public_images(world: World) -> Tensor:
    """Test images, which are public in this laboratory and no client's."""
    images = world.dataset.x_test
    attack = _active(world)
    wanted = min(attack.public_examples, len(images))
    chosen = numpy_stream(world.experiment.seed, attack.name).choice(len(images), size=wanted, replace=False)
    return images[torch.from_numpy(np.sort(chosen))]
