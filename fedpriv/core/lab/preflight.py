"""What is checked before anything is written: settings that cannot work or mislead, and a rehearsal.

The rehearsal is one step of a client and one of each attack, on random images.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.metrics import LEAST_PADDED
from fedpriv.attacks.observation import CandidateLists, Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused
from fedpriv.attacks.reconstruction import preflight as attack_preflight
from fedpriv.attacks.reconstruction.priors import read_trained_prior
from fedpriv.attacks.settings import Access
from fedpriv.attacks.simulation import RANDOM, Sent, SimulationCheck
from fedpriv.attacks.threat import threat_model
from fedpriv.clients.cohort import stack_of
from fedpriv.clients.training import local_upload, unprotected_upload
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.columns import worded
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.lab.victims import upload_of
from fedpriv.core.randomness import Secret, torch_stream
from fedpriv.core.registry import ATTACKS
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World, random_examples
from fedpriv.data.datasets import unit_scale
from fedpriv.data.sampling import Sampling
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import evaluating, keep_hooks, kept_numbers
from fedpriv.gradients.ghost import Entangled
from fedpriv.mechanisms import mechanism_settings
from fedpriv.server.tap import observe, public_settings


def warnings_for(world: World) -> tuple[str, ...]:
    """Return one line for each setting that has no effect or makes a result mean less than it seems to."""
    algorithm = algorithm_of(world.experiment)
    about_data = (*_read_off(world), *_copies(world), *_small(world), *_left_out(world))
    lines = (*about_data, *_probabilities(world), *algorithm.warnings(world), *_one_at_a_time(world))
    return (*lines, *attack_warnings(world, world.experiment.adversary.attacks)) if algorithm.trains_in_steps else lines


def _probabilities(world: World) -> tuple[str, ...]:
    """Say that a network of one's own ends in a softmax, which the loss does, too."""
    if not world.experiment.model.is_own:
        return ()
    images, _ = random_examples(world.experiment, world.dataset, 2)
    with evaluating(world.model), torch.no_grad():
        outputs = world.model(world.network_input(images))
    if bool((outputs < 0).any()) or not torch.allclose(outputs.sum(dim=-1), outputs.new_ones(()), atol=1e-3):
        return ()
    return (
        f"model.name = {world.experiment.model.name!r}: its outputs are positive and add up to 1, as probabilities do; "
        "the loss takes logits, so leave out the softmax",
    )


def _one_at_a_time(world: World) -> tuple[str, ...]:
    """Say why the stacked engine trains clients one at a time, if it does."""
    if world.experiment.engine.name != "stacked":
        return ()
    stack = stack_of(world)
    if not isinstance(stack, Entangled):
        return ()
    return (f"engine.name = 'stacked': clients are trained one at a time: {stack.reason}",)


def attack_warnings(world: World, names: Sequence[str]) -> tuple[str, ...]:
    """Return one line for each thing that makes these attacks on this run refused or misleading."""
    _refuse_padding(world)
    _refuse_priors(world, names)
    experiment = world.experiment
    kind = world.dataset.kind
    threat = threat_model(experiment.adversary, kind)
    refused = {name: reason for name in names if (reason := threat.refusal(name, ATTACKS[name].needs))}
    lines = [f"attack {name} refused: {reason}" for name, reason in refused.items()]
    possible = [name for name in names if name not in refused and not ATTACKS[name].active()]
    settings = public_settings(world.experiment, world.dataset, world.plans[0])
    if Access.UPLOADS not in threat.grants:
        settings = replace(settings, clients=experiment.federation.asked)
    check = simulation_check(world)
    try:
        about = attack_preflight(world.model, settings, possible)
    except AttackRefused as error:
        about = (f"attacks will be refused: {error}",)
    else:
        about = (*_about_simulations(check, world, settings, possible), *about)
    return (*lines, *(worded(line, kind) for line in about))


def _refuse_padding(world: World) -> None:
    """Refuse a second SSIM where examples are no pictures, or too small to be padded."""
    dataset, experiment = world.dataset, world.experiment
    _, height, width = dataset.shape
    if experiment.report.pads and (dataset.kind != "image" or min(height, width) < LEAST_PADDED):
        there = f"pictures of {width} x {height} pixels" if dataset.kind == "image" else f"{dataset.kind}s"
        raise experiment.wrong(
            "report.ssim", f"only for pictures of at least {LEAST_PADDED} pixels a side; {dataset.name} has {there}"
        )


def _refuse_priors(world: World, names: Sequence[str]) -> None:
    """Refuse trained priors that saw images of clients."""
    for name in names:
        path = getattr(world.experiment.adversary.settings(name), "prior", "")
        if path and (seen := read_trained_prior(Path(path)).saw(unit_scale(world.dataset.x_train))):
            allowed = f"it was trained on {seen} of the clients' images; train one on images that no client has"
            raise InputError(key=f"adversary.{name}.prior", given=path, allowed=allowed)


def _about_simulations(
    check: SimulationCheck, world: World, settings: PublicSettings, names: Sequence[str]
) -> list[str]:
    """Attacks that would not simulate these clients, tried with the parameters that training starts from."""
    found = {name: check.at(ATTACKS[name].simulation(), world.initial.parameters, settings) for name in names}
    random = [RANDOM] if any(mismatch is not None and mismatch.kind == "random" for mismatch in found.values()) else []
    wrong = [
        f"attack {name} {'will be refused' if mismatch.bars(ATTACKS[name]) else 'may be refused'}: {mismatch.text}"
        for name, mismatch in found.items()
        if mismatch is not None and mismatch.kind == "wrong"
    ]
    return [*random, *wrong]


def _read_off(world: World) -> list[str]:
    """Properties of the data that are probably not meant, or taken as public without having been declared so."""
    dataset = world.dataset
    lines = (*dataset.warnings, *(dataset.notes if world.experiment.draws_noise else ()))
    return [f"data: {line[0].lower()}{line[1:]}" for line in lines]


def _small(world: World) -> list[str]:
    """How many clients hold less than a batch, whose sampling rate is 1."""
    wanted = world.experiment.training.batch_size
    small = int((world.sizes < wanted).sum()) if algorithm_of(world.experiment).trains_in_steps else 0
    if not small or not world.experiment.data.is_natural:
        return []
    return [
        f"training.batch_size = {wanted}: {small} of {len(world.sizes)} clients hold fewer examples, and train on all "
        "of them in each step"
    ]


def _copies(world: World) -> list[str]:
    """What figures about one client's example say of a person whose example several clients hold."""
    data, examples = world.experiment.data, len(world.dataset.y_train)
    if not data.overlaps or not world.experiment.mechanism.protects:
        return []
    each = int(world.sizes.sum()) / examples
    copies = f"{each:,.0f}" if each >= 10 else f"{each:.2g}"
    return [
        f"data.partition = 'overlapping': {len(world.sizes)} clients hold {copies} copies of each of {examples} "
        "examples on average; the proof covers one client's copy"
    ]


def _left_out(world: World) -> list[str]:
    """How many examples a partitioner gave to nobody, as some do of classes and of the last shard."""
    data, examples = world.experiment.data, len(world.dataset.y_train)
    left = examples - int(world.sizes.sum())
    if data.partitioner is None or left <= 0:
        return []
    return [f"data.partitioner = '{data.partitioner.name}': {left:,} of {examples:,} examples belong to no client"]


_IMAGES = 2  # at most: enough for layers that look at a whole batch
_TEXTS = 16  # public ones, for attacks on texts
_TOLD = 0.25  # of an upload's numbers: LoRA's are about half, since one of its two factors starts at zero
_SECONDS = 20.0  # of one trial: on few words dager tries sentences for minutes
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
    kind = "texts" if world.dataset.text is not None else f"{world.dataset.kind}s"
    refused = (
        f"attack {name} refuses an upload of random {kind}: {worded(why, world.dataset.kind)}"
        for name, why in refusals.items()
        if why
    )
    open_ends = (
        f"attack {name} was tried on random {kind} for {_SECONDS:.0f} s, and did not end: it may refuse the uploads"
        for name, why in refusals.items()
        if why is None
    )
    return (*rehearsal.idle(world), *refused, *open_ends)


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

    def refusal(self, name: str) -> str | None:
        """Make one step of an attack, and return why it refuses; empty where it does not, ``None`` after too long."""
        stage, adversary, heard = self.stage, self.stage.experiment.adversary, self.heard
        threat = threat_model(adversary)
        if threat.refusal(name, ATTACKS[name].needs) is not None:
            return ""  # of which the warnings about the settings tell
        config = getattr(adversary, name)
        if ATTACKS[name].picks():
            heard = tuple(replace(each, candidates=_random_records(stage, each.settings.examples)) for each in heard)
        short = {key: 1 for key in ("iterations", "restarts") if key in type(config).model_fields}
        seconds = None if short else _SECONDS  # one step ends by itself
        short_config, seed = config.model_copy(update=short), stage.experiment.seed
        job = AttackJob(name, heard, stage.model, short_config, seed, seconds=seconds)
        if ATTACKS[name].is_text and Access.PUBLIC_DATA in threat.grants:
            texts, _ = stage.dataset.random(_TEXTS, torch_stream(seed, "rehearsal texts"))
            job = replace(job, public_images=texts)
        began = time.monotonic()
        with cpu_threads(stage.experiment.engine.threads):
            campaign = attack_each(job)
        if seconds is not None and time.monotonic() - began >= seconds:
            return None  # what a search has not found by then says nothing
        return next(iter(campaign.failures.values()), "")


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
            keep_hooks(self._world.model, model)
            self._casts[dtype] = replace(
                self._world,
                experiment=experiment.model_copy(update={"engine": engine}),
                model=model.to(dtype),
                forward_noise=noise,
            )
        return self._casts[dtype]
