"""Run one attack on many observations as one batch."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import (
    Loss,
    Network,
    soft_cross_entropy,
    twice_differentiable,
)
from fedpriv.attacks.reconstruction.matching import MEASURED, chunks
from fedpriv.attacks.reconstruction.priors import TrainedPrior, read_trained_prior
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome, Reconstruction, Restart
from fedpriv.attacks.reconstruction.scene import Progress, Scene, Trace
from fedpriv.attacks.reconstruction.upload_model import (
    Heard,
    OtherBatches,
    Victim,
    join,
    prepare_victims,
    stack,
    uploads_of,
)
from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.errors import InputError, printable
from fedpriv.core.registry import ATTACKS
from fedpriv.gradients.operator import first_line

NO_STACK = "{} matches one batch; uploads of other batches can only be stacked by closed_form"
NOT_FINITE = "the optimisation gave no finite loss; the images are its random start"


@dataclass(frozen=True, eq=False)
class AttackJob:
    """One attack, what it attacks, and what it knows."""

    name: str  # a name in ATTACKS
    # what was heard; of one data set and network. Put all of them in one job: that is much faster than one job each. A
    # tuple is one victim, several uploads of the very same batch, and so are OtherBatches (see upload_model); its
    # result bears round and client of the first
    observations: Sequence[Heard]
    model: nn.Module  # the network, on the device to use. Its own parameters do not matter, and it is not changed
    config: Any  # the attack's settings
    seed: int  # from which random starts are drawn, with round, client and restart
    progress: Progress | None = None  # told about a hundred times
    loss: Loss = soft_cross_entropy  # what the clients minimise, of each example
    # (M, C, H, W) on the [0, 1] scale, of the same kind as the victims' and none of theirs, for attacks that know what
    # images look like; None: they are withheld
    public_images: Tensor | None = None
    seconds: float | None = None  # after which attacks that search keep what they have; None: they go to the end


@twice_differentiable()
def run_attack(job: AttackJob) -> list[Reconstruction]:
    """Attack uploads, all of them and all restarts as one batch.

    What a victim yields depends on its observation, the settings and the seed, not on who else is in the job, but for
    rounding. Two observations of one round and client start from the same random images.
    """
    attack = _attack(job)
    if not job.observations:
        return []
    if attack.whole:
        return resolve_name(attack.whole)(job)
    network = Network(job.model, job.loss)
    observations = [observation for heard in job.observations for observation in uploads_of(heard)]
    prepared = iter(prepare_victims(observations, network.names, network.device))
    victims = [_together(attack, heard, [next(prepared) for _ in uploads_of(heard)]) for heard in job.observations]
    public = (observation.settings for observation in observations)
    if len({(each.shape, each.classes, each.mean, each.std, each.columns) for each in public}) > 1:
        raise AttackRefused("the observations are of different data sets; attack each data set's by themselves")
    if observations[0].settings.text is not None:
        raise AttackRefused(f"{attack.name} reads images or rows of tables, and these uploads are of texts")
    dtype = next(iter(victims[0].parameters.values())).dtype
    scene = Scene.of(network, observations[0].settings, dtype, job.public_images)
    scene = replace(scene, trained=_trained_prior(job.config, scene))
    results: dict[int, Reconstruction] = {}
    for size in sorted({victim.model.examples for victim in victims}):
        members = [number for number, victim in enumerate(victims) if victim.model.examples == size]
        began = time.perf_counter()
        outcomes = _run(attack, scene, [victims[number] for number in members], job)
        seconds = (time.perf_counter() - began) / len(members)
        known = "" if scene.trained is None else scene.trained.words
        for number, (attempts, note) in zip(members, outcomes, strict=True):
            note = "; ".join(filter(None, (note, known)))
            results[number] = _result(job.name, victims[number], attempts, note, seconds)
    return [results[number] for number in range(len(victims))]


def _trained_prior(config: Any, scene: Scene) -> TrainedPrior | None:
    """The prior that the settings name; it is of images of this size."""
    path = getattr(config, "prior", "")
    if not path:
        return None
    trained = read_trained_prior(Path(path))
    if trained.shape != scene.shape:
        raise AttackRefused(f"{path} is a prior of images {trained.shape}, and these are {scene.shape}")
    return trained


def _attack(job: AttackJob) -> type[AttackSettings]:
    if job.name not in ATTACKS:
        raise AttackRefused(f"attack {job.name!r} is not known; known: {', '.join(ATTACKS)}")
    attack: type[AttackSettings] = ATTACKS[job.name]
    if type(job.config) is not attack:
        raise AttackRefused(f"attack {job.name} takes {attack.__name__}; given {type(job.config).__name__}")
    return attack


def _together(attack: type[AttackSettings], heard: Heard, victims: Sequence[Victim]) -> Victim:
    """One victim of what was heard as one."""
    if not isinstance(heard, OtherBatches):
        return join(victims)
    if not attack.stacks:
        raise AttackRefused(NO_STACK.format(attack.name))
    return stack(victims, heard.observations[0].settings.client_examples)


def _run(
    attack: type[AttackSettings], scene: Scene, victims: Sequence[Victim], job: AttackJob
) -> list[tuple[tuple[Restart, ...], str]]:
    """Attack victims with the same number of examples; return each one's attempts and note."""
    restarts = int(job.config.restarts)
    owners = [number for number in range(len(victims)) for _ in range(restarts)]
    rows = [victims[number] for number in owners]
    if victims[0].model.examples > MEASURED:
        # Refused, if it is, before random starts are drawn that do not fit either.
        next(chunks(scene.network, rows[:1], scene.shape, scene.classes))
    starts = [scene.starts(job.seed, attack.name, victim, restarts) for victim in victims]
    images, logits = (torch.cat(parts) for parts in zip(*starts, strict=True))
    trace = Trace(job.progress, job.config.iterations, owners)
    attempts: dict[int, Restart] = {}
    notes: dict[int, str] = {}
    with _of_others(attack):
        runs = attack.runs()
    for turn, run in enumerate(runs):
        mine = [row for row in range(len(rows)) if row % restarts % len(runs) == turn]
        my_rows = [rows[row] for row in mine]
        # What reads uploads without dummies keeps nothing for derivatives.
        parts = chunks(scene.network, my_rows, scene.shape, scene.classes) if attack.simulates else [range(len(mine))]
        for part in parts:
            these = mine[part.start : part.stop]
            with _of_others(attack):
                outcome = run(
                    scene, [rows[row] for row in these], images[these], logits[these], job.config, trace.of(these)
                )
                _check(attack, scene, outcome, images[these].shape)
            attempts |= zip(these, _attempts(scene, outcome), strict=True)
            notes |= zip(these, map(printable, outcome.notes), strict=True)
    first = [number * restarts for number in range(len(victims))]
    return [(tuple(attempts[row + restart] for restart in range(restarts)), notes[row]) for row in first]


@contextmanager
def _of_others(attack: type[AttackSettings]) -> Iterator[None]:
    """Refuse with what an attack of another package raises: it fails, and all else goes on; a bug of ours is one."""
    try:
        yield
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if attack.__module__.startswith("fedpriv."):
            raise
        raise AttackRefused(
            f"{attack.name} ({attack.__module__}) failed: {type(error).__name__}: {first_line(error)}"
        ) from error


def _check(attack: type[AttackSettings], scene: Scene, outcome: Outcome, shape: torch.Size) -> None:
    """Refuse an outcome that cannot be one of these rows: what scores it expects what :class:`Outcome` says."""
    count, examples, *image = shape
    for what in ("images", "labels", "losses", "iterations", "notes"):
        if len(getattr(outcome, what)) != count:
            raise AttackRefused(
                f"{attack.name} returned {what} of {len(getattr(outcome, what))} rows, expected {count}"
            )
    for images, labels in zip(outcome.images, outcome.labels, strict=True):
        expected = len(images) if attack.stacks else examples
        _check_tensor(attack, "images of shape", images, (expected, *image))
        _check_tensor(attack, "labels of shape", labels, (expected,), whole=True)
        low, high = (int(labels.min()), int(labels.max())) if expected else (0, 0)
        if not -1 <= low <= high < scene.classes:
            raise AttackRefused(
                f"{attack.name} returned labels from {low} to {high}; allowed is from -1 (none) to {scene.classes - 1}"
            )
    _check_tensor(attack, "losses of shape", outcome.losses, (count,))
    _check_tensor(attack, "iterations of shape", outcome.iterations, (count,), whole=True)


def _check_tensor(
    attack: type[AttackSettings], what: str, given: Tensor, shape: tuple[int, ...], *, whole: bool = False
) -> None:
    if tuple(given.shape) != shape:
        raise AttackRefused(f"{attack.name} returned {what} {tuple(given.shape)}, expected {shape}")
    if whole and (given.is_floating_point() or given.dtype == torch.bool):
        raise AttackRefused(f"{attack.name} returned {what.split()[0]} as {given.dtype}, expected whole numbers")


def _attempts(scene: Scene, outcome: Outcome) -> list[Restart]:
    values = zip(
        map(scene.to_unit_scale, outcome.images),
        outcome.labels,
        outcome.losses.detach().cpu().double().tolist(),
        outcome.iterations.tolist(),
        strict=True,
    )
    return [
        Restart(images.clone(), labels.cpu().clone(), loss if math.isfinite(loss) else None, iterations)
        for images, labels, loss, iterations in values
    ]


def _result(name: str, victim: Victim, attempts: tuple[Restart, ...], note: str, seconds: float) -> Reconstruction:
    chosen = Reconstruction.lowest(attempts)
    failed = NOT_FINITE if attempts[chosen].loss is None else ""
    notes = "; ".join(text for text in (victim.note, note, failed) if text)
    picked = ATTACKS[name].picks()
    return Reconstruction(victim.round, victim.client, name, attempts, chosen, notes, seconds, picked)
