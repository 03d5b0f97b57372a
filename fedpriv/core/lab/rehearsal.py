"""A rehearsal before the run: one step of a client and one of each attack, on random images."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.attacks.access import Access
from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.observation import CandidateLists, Observation
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.attacks.simulation import Sent, SimulationCheck
from fedpriv.attacks.threat import threat_model
from fedpriv.clients.training import local_upload, unprotected_upload
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.lab.victims import upload_of
from fedpriv.core.randomness import Secret, torch_stream
from fedpriv.core.registry import ATTACKS
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World
from fedpriv.data.datasets import unit_scale
from fedpriv.data.sampling import Sampling
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import kept_numbers
from fedpriv.mechanisms import mechanism_settings
from fedpriv.server.tap import observe

_IMAGES = 2  # at most: enough for layers that look at a whole batch
_TEXTS = 16  # public ones, for attacks on texts
_TOLD = 0.25  # of an upload's numbers: LoRA's are about half, since one of its two factors starts at zero
_CLIENT, _ROUND = 0, 1


def rehearse(world: World) -> tuple[str, ...]:
    """Attack one upload of random images for one step; return a line for each attack that refuses it unprotected.

    And one where attacks would fail for a reason that is not privacy.
    """
    rehearsal = Rehearsal.of(world)
    refusals = {}
    for name in world.experiment.adversary.passive_attacks:
        with _in_words(f"adversary.attacks: {name} cannot attack model.name = {world.experiment.model.name!r}"):
            refusals[name] = rehearsal.refusal(name)
    kind = "images" if world.dataset.text is None else "texts"
    refused = (f"attack {name} refuses an upload of random {kind}: {why}" for name, why in refusals.items() if why)
    return (*rehearsal.idle(world), *refused)


@dataclass(frozen=True)
class Rehearsal:
    """A client with random examples, and what is heard of its upload without a mechanism."""

    stage: World
    heard: tuple[Observation, ...]

    @staticmethod
    def of(world: World) -> "Rehearsal":
        """Make an upload with the mechanism, and one without, which is heard."""
        stage = _stage(world)
        with (
            cpu_threads(world.experiment.engine.threads),
            _in_words(f"model.name = {world.experiment.model.name!r} cannot be trained"),
        ):
            local_upload(stage, _CLIENT, stage.initial, _ROUND, stage.secret)
            # Only gradients and changes by a few steps are attacked.
            in_steps = algorithm_of(world.experiment).trains_in_steps
            return Rehearsal(stage, _heard(_unprotected(stage)) if in_steps else ())

    def idle(self, world: World) -> tuple[str, ...]:
        """Return a line if nearly all parameters are without a gradient in an attacked first step."""
        adversary, (plan, *_) = world.experiment.adversary, world.plans
        if not (self.heard and adversary.passive_attacks and 1 in adversary.rounds and plan.steps_per_round == 1):
            return ()
        upload = self.heard[0].upload.values()
        numbers, told = (sum(value.numel() for value in upload if value.any() or every) for every in (True, False))
        if told > _TOLD * numbers:
            return ()
        return (
            f"all but {told:,} of the {numbers:,} numbers in a first upload are zero, whatever the data, since "
            f"{world.experiment.model.name} starts with layers of zeros: attacks on round 1 tell little of later ones "
            "(adversary.rounds)",
        )

    def refusal(self, name: str) -> str:
        """Make one step of an attack, and return why it refuses; empty where it does not."""
        with cpu_threads(self.stage.experiment.engine.threads):
            return _refusal(self.stage, name, self.heard)


def _stage(world: World) -> World:
    """The same world with one client that holds a few random images and trains on all of them at once."""
    dataset, plan = world.dataset, world.plans[_CLIENT]
    count = min(_IMAGES, plan.sampling.batch_size)
    draws = torch_stream(world.experiment.seed, "rehearsal")
    images, labels = dataset.random(count, draws)
    few = replace(dataset, x_train=images, y_train=labels)
    once = replace(plan, sampling=Sampling("shuffled", count, count), steps_per_round=1)
    secret = Secret.of_seed(draws.initial_seed())
    return replace(world, dataset=few, partitions=(np.arange(count),), plans=(once,), secret=secret, unchanged=None)


def _unprotected(stage: World) -> World:
    """The same without the mechanism: what noise hides is sought for long, and the network is what is tried."""
    (plan,) = stage.plans
    bare = stage.experiment.model_copy(update={"mechanism": mechanism_settings({})})
    return replace(stage, experiment=bare, plans=(replace(plan, config=bare.mechanism),))


def _heard(stage: World) -> tuple[Observation, ...]:
    """What the threat model lets the adversary see of one upload."""
    return observe(stage, _ROUND, stage.initial, [upload_of(stage, _CLIENT, stage.initial, _ROUND)])


def _refusal(stage: World, name: str, heard: Sequence[Observation]) -> str:
    """Make one step of an attack, and return why it refuses; empty where it does not."""
    adversary = stage.experiment.adversary
    threat = threat_model(adversary)
    if threat.refusal(name, ATTACKS[name].needs) is not None:
        return ""  # of which the warnings about the settings tell
    config = getattr(adversary, name)
    if ATTACKS[name].picks():
        heard = [replace(each, candidates=_random_records(stage, each.settings.examples)) for each in heard]
    short = {key: 1 for key in ("iterations", "restarts") if key in type(config).model_fields}
    job = AttackJob(name, heard, stage.model, config.model_copy(update=short), stage.experiment.seed)
    if ATTACKS[name].is_text and Access.PUBLIC_DATA in threat.grants:
        texts, _ = stage.dataset.random(_TEXTS, torch_stream(stage.experiment.seed, "rehearsal texts"))
        job = replace(job, public_images=texts)
    campaign = attack_each(job)
    return next(iter(campaign.failures.values()), "")


def _random_records(stage: World, examples: int) -> CandidateLists:
    """The images of the upload, and as many random ones as the upload is said to be of; all of them in each list."""
    images, draws = unit_scale(stage.dataset.x_train), torch_stream(stage.experiment.seed, "rehearsal records")
    records = torch.cat([images, torch.rand(examples, *stage.dataset.shape, generator=draws)])
    return CandidateLists.of_all(records, torch.arange(len(records)) % stage.dataset.classes, examples)


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: {reason_of(error)}") from error


# Attacks are compared with it (:mod:`fedpriv.attacks.simulation`). It has random streams and a network of its own: what
# the run draws, and the numbers in its model, stay as they are.


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
