"""Central noise: the server clips what it was sent, adds it up, and adds noise before anybody sees the sum."""

import torch

from fedpriv.core.federated import weighted_sum
from fedpriv.core.world import State, World
from fedpriv.server.uploads import Upload, norm


def noised_mean(world: World, number: int, uploads: tuple[Upload, ...]) -> State:
    """Return the noisy sum of clipped updates, divided by the public number of clients that a round asks.

    Who fails counts as zero, and a round that asks nobody is noise alone: the divisor tells nothing of either. The
    noise is keyed by the sum, so that a round that is repeated with other uploads has other noise.
    """
    config = world.plans[0].config
    divisor = world.experiment.federation.asked
    total = {name: torch.zeros_like(value, device="cpu") for name, value in world.initial.parameters.items()}
    if uploads:
        factors = [config.bound / max(norm(upload.state.parameters), config.bound) for upload in uploads]
        total = weighted_sum([upload.state.parameters for upload in uploads], factors)
    stream = world.secret.stream("noise-on-the-sum", number, State(total, {}).digest())
    deviation = config.noise_on_mean(len(uploads), divisor)
    generator = stream.numpy()
    mean = {
        name: value / divisor + torch.from_numpy(generator.normal(0.0, deviation, tuple(value.shape))).to(value.dtype)
        for name, value in total.items()
    }
    return State(mean, {name: torch.zeros_like(value, device="cpu") for name, value in world.initial.buffers.items()})
