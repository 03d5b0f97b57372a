"""What is checked before anything is written: settings that cannot work, and settings that mislead."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedpriv.attacks.access import Access
from fedpriv.attacks.metrics import LEAST_PADDED
from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.reconstruction import AttackRefused
from fedpriv.attacks.reconstruction import preflight as attack_preflight
from fedpriv.attacks.reconstruction.trained_prior import read_trained_prior
from fedpriv.attacks.simulation import RANDOM, SimulationCheck
from fedpriv.attacks.threat import threat_model
from fedpriv.clients.stack import stack_of
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.columns import worded
from fedpriv.core.errors import InputError
from fedpriv.core.lab.rehearsal import simulation_check
from fedpriv.core.registry import ATTACKS
from fedpriv.core.world import World
from fedpriv.data.datasets import unit_scale
from fedpriv.gradients.ghost import Entangled
from fedpriv.server.tap import public_settings


def warnings_for(world: World) -> tuple[str, ...]:
    """Return one line for each setting that has no effect or makes a result mean less than it seems to."""
    algorithm = algorithm_of(world.experiment)
    about_data = (*_read_off(world), *_copies(world), *_small(world), *_left_out(world))
    lines = (*about_data, *algorithm.warnings(world), *_one_at_a_time(world))
    return (*lines, *attack_warnings(world, world.experiment.adversary.attacks)) if algorithm.trains_in_steps else lines


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
    dataset, report = world.dataset, world.experiment.report
    _, height, width = dataset.shape
    if report.pads and (dataset.kind != "image" or min(height, width) < LEAST_PADDED):
        there = f"pictures of {width} x {height} pixels" if dataset.kind == "image" else f"{dataset.kind}s"
        raise InputError(
            key="report.ssim",
            given=report.ssim,
            allowed=f"only for pictures of at least {LEAST_PADDED} pixels a side; {dataset.name} has {there}",
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
    lines = (*dataset.warnings, *(dataset.notes if world.experiment.mechanism.protects else ()))
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
