"""Evasion attacks on a run's final model: which votes a small change turns, of certified images where there are any."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fedpriv.attacks.evasion.methods import EvasionAttack, named_evasion, noiseless_name
from fedpriv.attacks.evasion.steps import Ball, EvasionAttempt, EvasionTrial, PlainTarget, Target, Victims, attempts
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Interval
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, final_state, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.robustness.build import certified_rows
from fedpriv.robustness.records import (
    Certificate,
    Evasion,
    EvasionCurve,
    Robustness,
    read_attempts,
    read_certificates,
    write_evasion,
)
from fedpriv.robustness.settings import EvadeConfig, RobustnessConfig
from fedpriv.robustness.smoothed import pixel_images, read_smoothed, smoothed_model


def evade_run(folder: RunFolder, config: EvadeConfig, progress: Progress) -> Evasion:
    """Attack test images that a run's final model has right, and return what is written to evasion.json."""
    began = time.monotonic()
    summary = completed_summary(folder)
    read_attempts(folder)  # whoever has damaged ones may want to look at them first
    certificates, robustness = read_certificates(folder), folder.read(Robustness)
    experiment = folder.experiment()
    world = finished_world(folder, experiment)
    with cpu_threads(experiment.engine.threads):
        target = _target(folder, world, bool(certificates))
        rows = _chosen_rows(world, certificates, config, progress)
        victims = _victims(world, target, rows, certificates, config)
        trials = _trials(world, target, len(victims.rows), config, robustness)
        progress.stage(f"attacking {len(victims.rows)} of {len(rows)} images; the others are wrong without an attack")
        lines: list[EvasionAttempt] = []
        for number, trial in enumerate(trials, 1):
            lines += attempts(trial, target, victims)
            progress.advanced("attacks by size", number, len(trials))
    evasion = _evasion(config, victims, trials, lines, len(rows), robustness, time.monotonic() - began)
    with writing():
        write_evasion(folder, evasion, lines)
        folder.write_summary(summary.with_found({"evasion": evasion}))
    return evasion


def _target(folder: RunFolder, world: World, certified: bool) -> Target:
    """The network that was certified; without certificates the run's own, with noise if it has any."""
    if certified:
        return read_smoothed(folder, world).network
    if world.forward_noise is not None:
        return smoothed_model(folder, world, None).network
    final_state(folder, world, "attack").load_into(world.model)
    dataset = world.dataset

    def normalise(pixels: Tensor) -> Tensor:
        return dataset.normalise(pixels, pixels.dtype)

    return PlainTarget(world.model.eval(), normalise, dataset.classes, dataset.x_test[0].numel())


def _chosen_rows(
    world: World, certificates: Sequence[Certificate], config: EvadeConfig, progress: Progress
) -> list[int]:
    """Rows of the test set, ascending; where there are certificates, a part of theirs."""
    public, there = RobustnessConfig.public(world.experiment), len(world.dataset.x_test)
    wanted = config.among(len(certificates) or there - public)
    if certificates and wanted > len(certificates):
        progress.warn(f"evade.victims = {wanted}: only certified images are attacked, {len(certificates)}")
        wanted = len(certificates)
    rows: list[int] = certified_rows(world.experiment.seed, there, wanted, public, "evade.victims").tolist()
    missing = set(rows) - {each.image for each in certificates}
    if certificates and missing:
        raise InputError(f"test image {min(missing)} has no certificate: certify again with fedpriv certify")
    return rows


def _victims(
    world: World, target: Target, rows: Sequence[int], certificates: Sequence[Certificate], config: EvadeConfig
) -> Victims:
    """Those of the images that are right; certificates say it by the votes that chose their class."""
    known = {each.image: each for each in certificates}
    chosen = torch.tensor(rows)
    images, labels = pixel_images(world, chosen).to(world.device), world.dataset.y_test[chosen]
    if known:
        right = [at for at, row in enumerate(rows) if known[row].right]
    else:
        votes = target.votes(images, config.votes, "evasion-clean", rows)
        right = (votes.argmax(dim=1) == labels).nonzero()[:, 0].tolist()
    radii = {row: each.radius(config.norm) for row, each in known.items()}
    return Victims([rows[at] for at in right], images[right], labels[right].to(world.device), radii)


def _trials(
    world: World, target: Target, images: int, config: EvadeConfig, robustness: Robustness | None
) -> list[EvasionTrial]:
    """Each attack of each size. Together they call a sound certificate broken with the certificates' own alpha."""
    kinds: dict[str, tuple[type[EvasionAttack], int]] = {}
    for name in config.attacks:
        kind, noiseless = named_evasion(name)
        draws = 0 if noiseless or not target.noisy else config.draws
        # Without noise an attack and its variant are the same.
        kinds[noiseless_name(name) if target.noisy and not draws else kind.name] = kind, draws
    sizes = config.attacked_sizes
    tests = max(1, images * len(kinds) * len(sizes) * world.dataset.classes)
    alpha = (1.0 if robustness is None else robustness.alpha) / tests
    alike = config.steps, config.restarts, config.votes, alpha, world.experiment.seed
    return [
        EvasionTrial(name, kind, Ball(config.norm, size), draws, *alike)
        for name, (kind, draws) in kinds.items()
        for size in sizes
    ]


def _evasion(
    config: EvadeConfig,
    victims: Victims,
    trials: Sequence[EvasionTrial],
    lines: Sequence[EvasionAttempt],
    chosen: int,
    robustness: Robustness | None,
    seconds: float,
) -> Evasion:
    sizes, known = config.attacked_sizes, victims.radii
    least, certified = [], []
    for size in sizes:
        fallen = {each.image for each in lines if each.size <= size and not each.right}
        least.append(rate_interval(len(victims.rows) - len(fallen), chosen))
        if known:
            held = sum(size < known[row] for row in victims.rows)
            certified.append(rate_interval(held, chosen))
    return Evasion(
        norm=config.norm,
        sizes=sizes,
        steps=config.steps,
        restarts=config.restarts,
        votes=max((each.votes for each in lines[:1]), default=config.votes),
        victims=chosen,
        attacked=len(victims.rows),
        clean=rate_interval(len(victims.rows), chosen),
        certified=tuple(certified) if known else None,
        least=tuple(least),
        curves=tuple(
            _curve(name, [trial for trial in trials if trial.name == name], lines, chosen)
            for name in dict.fromkeys(trial.name for trial in trials)
        ),
        broken=len({each.image for each in lines if each.broken}),
        wrong_at_most=None if robustness is None else robustness.wrong_at_most,
        seconds=seconds,
    )


def _curve(name: str, trials: Sequence[EvasionTrial], lines: Sequence[EvasionAttempt], chosen: int) -> EvasionCurve:
    shares: list[Interval] = []
    broken: list[int] = []
    for trial in trials:
        own = [each for each in lines if (each.attack, each.size) == (name, trial.ball.size)]
        shares.append(rate_interval(sum(each.right for each in own), chosen))
        broken.append(sum(each.broken for each in own))
    return EvasionCurve(name, trials[0].draws, tuple(shares), tuple(broken))
