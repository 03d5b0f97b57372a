"""What clients of an experiment would upload for random data, by their own code and without a mechanism.

Attacks are compared with it (:mod:`fedpriv.attacks.simulation`). It has random streams and a network of its own: what
the run draws, and the numbers in its model, stay as they are.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedpriv.attacks.simulation import Sent, SimulationCheck
from fedpriv.clients.training import unprotected_upload
from fedpriv.core.randomness import torch_stream
from fedpriv.core.world import State, World
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import kept_numbers


def simulation_check(world: World) -> SimulationCheck:
    """Return what compares attacks on a run with its clients; the model is put into training mode."""
    world.model.train()  # as the clients do before they compute an upload
    return SimulationCheck(_RandomUploads(world), world.model, world.experiment.seed)


class _RandomUploads:
    """See :class:`fedpriv.attacks.simulation.Client`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._casts: dict[torch.dtype, World] = {}

    def __call__(self, parameters: Vector, batches: Sequence[tuple[Tensor, Tensor]], draw: int) -> Sent:
        world = self._in(next(iter(parameters.values())).dtype)
        seed = torch_stream(world.experiment.seed, "simulation-draw", draw).initial_seed()
        return Sent(*unprotected_upload(world, State(parameters, world.initial.buffers), batches, seed))

    def _in(self, dtype: torch.dtype) -> World:
        """The same world with a copy of the model, in numbers of one type; in none are passes in bfloat16."""
        if dtype not in self._casts:
            experiment = self._world.experiment
            precision = "float64" if dtype == torch.float64 else "float32"
            engine = experiment.engine.model_copy(update={"precision": precision})
            kept = kept_numbers(self._world.model)
            model, noise = copy.deepcopy((self._world.model, self._world.forward_noise), kept)
            self._casts[dtype] = replace(
                self._world,
                experiment=experiment.model_copy(update={"engine": engine}),
                model=model.to(dtype),
                forward_noise=noise,
            )
        return self._casts[dtype]
