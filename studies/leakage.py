"""What attacks recover of single images behind each mechanism: the tables of docs/attacks-measured.md.

Each client uploads the gradient of one image, in the first round. FILE gets one JSON line a cell as soon as it is
measured, and a later call leaves out what is there: stop it at any time and start it again. What fails is written with
its reason, tried again by the next call, and stops nothing else. --tables writes the tables as CSV; without
anything to measure (--attacks "") that is all it does.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from pydantic import ValidationError
from scipy.stats import binomtest
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid, save_image

from fedpriv.accounting import ceilings
from fedpriv.attacks.baselines import guesses
from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.intervals import best_interval
from fedpriv.attacks.methods.candidate import CandidateSettings
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.dlg import DlgSettings, IdlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, best_decisions
from fedpriv.attacks.referee import Truth, score, score_guesses
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Interval
from fedpriv.core.lab.results import attack_results
from fedpriv.core.lab.summary import versions
from fedpriv.core.lab.victims import UploadTarget, candidates, truth, upload_of
from fedpriv.core.numbers import decimal, figure, percent
from fedpriv.core.randomness import torch_stream
from fedpriv.core.records import AttackResult, Score
from fedpriv.core.registry import ATTACKS
from fedpriv.core.runs import Files
from fedpriv.core.settings import wrong_value
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World, build_world
from fedpriv.mechanisms import mechanism_settings, recorded_mechanism
from fedpriv.server.evaluation import evaluate
from fedpriv.server.rules.mean import mean_upload
from fedpriv.server.tap import observe
from fedpriv.server.uploads import Upload
from studies.arguments import StudyParser, listed, whole
from studies.results import Table

FIRST = 1


def sent(world: World, state: State | None = None) -> list[Upload]:
    """Return every client's upload; ``state``: what they are sent, the initial one unless given."""
    before = world.initial if state is None else state
    return [upload_of(world, client, before, FIRST) for client in range(len(world.partitions))]


def heard(world: World, state: State | None = None) -> tuple[Observation, ...]:
    """Return what the threat model lets the adversary hear of these uploads."""
    return observe(world, FIRST, world.initial if state is None else state, sent(world, state))


def best_decision(world: World, truths: Sequence[Truth], uploads: Sequence[Observation], seed: int) -> Interval | None:
    """Return how often the best decision is right, over all uploads; ``None`` without a mechanism."""
    if recorded_mechanism(uploads[0].settings.mechanism).name == "none":
        return None
    optima = [
        optimum
        for upload, known in zip(uploads, truths, strict=True)
        if upload.candidates is not None
        for optimum in best_decisions(world.model, upload, upload.candidates, known.images, known.labels, seed)
    ]
    return best_interval(sum(each.right for each in optima), sum(each.draws for each in optima))


# The cells of the leakage table: one attack on single images' uploads of one network behind one mechanism.
#
# What is measured is what a run measures: the uploads are the clients' own, the adversary gets what the tap hears, and
# the referee scores. All mechanisms of a network go through an attack as one batch, which changes no figure.


GUESS = "guess-mean"

DATA = ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "lfw")
NETWORKS = ("untrained", "trained")
BY_OPTIMISATION = ("dlg", "idlg", "iga", "map")


@dataclass(frozen=True)
class Model:
    """A network, and the attacks that apply to it."""

    settings: Mapping[str, Any]
    attacks: tuple[str, ...] = (*BY_OPTIMISATION, "candidate")


MODELS = {
    "lenet": Model({"name": "lenet"}),
    "mlp": Model({"name": "mlp", "hidden": (256,)}, ("closed_form", *BY_OPTIMISATION, "candidate")),
    "convnet": Model({"name": "convnet"}),
}


MECHANISMS = ("none", "gaussian:0.001", "gaussian:0.01", "gaussian:0.1", "vmf:1e6", "vmf:1e5", "vmf:1e4", "vmf:500")
SETTINGS = {  # some are faster than by default
    "closed_form": ClosedFormSettings(),
    "dlg": DlgSettings(iterations=150, restarts=2),
    "idlg": IdlgSettings(iterations=150, restarts=1),
    "iga": IgaSettings(iterations=800, tv_start=0.0),  # as documented; the weight has fallen by default since
    "map": MapSettings(),
    "candidate": CandidateSettings(),
}


@dataclass(frozen=True)
class Cell:
    """What one line of figures is about; two lines about the same are measurements of the same."""

    data: str  # the data set
    model: str  # a key of MODELS; empty for the guess, which sees no network
    network: str  # untrained, or trained for one round; empty for the guess
    mechanism: str  # as mechanism_of reads it; empty for the guess
    attack: str  # its name
    settings: str  # the attack's, as `key=value`
    victims: int  # how many clients upload one image's gradient each
    seed: int  # of the experiment

    @property
    def guess(self) -> "Cell":
        """The guess for the same images, which saw no upload."""
        return Cell(self.data, "", "", "", GUESS, "", self.victims, self.seed)


@dataclass(frozen=True)
class CellRow:
    """One line of the JSON file."""

    cell: Cell  # what it is about
    result: AttackResult | None  # the figures; `None` where the attack failed on every upload
    failure: str  # why; of some victims too. Empty where there is nothing to say.
    cosine: float | None  # median over the victims of the cosine between what was sent and the gradient itself
    epsilon: float | None  # proven for one participation at delta 1e-5; `None` where nothing is
    accuracy: float | None  # the network's on the test images
    seconds: float  # wall time, divided by the number of cells that were attacked together
    commit: str  # of the code
    date: str  # of the measurement
    versions: Mapping[str, str]  # of what computed it
    # how often the best decision among 100 candidates is right; computed with the attack that makes it
    best: Interval | None = None
    # no attack tells one image among 100 more often from this upload; `None` without a mechanism
    ceiling: float | None = None


Pictures = Callable[[str, Tensor], None]
"""Told the name of a strip and the victims' images (V, C, H, W) on [0, 1]."""


@dataclass(frozen=True)
class Batch:
    """Cells that differ in the mechanism alone, and are attacked together."""

    data: str
    model: str
    network: str
    attack: str
    config: Any
    mechanisms: tuple[str, ...]
    victims: int
    seed: int
    device: str = "auto"

    def cell(self, mechanism: str) -> Cell:
        """Return the cell of one mechanism."""
        values = self.config.model_dump().items()
        settings = ",".join(f"{key}={value if isinstance(value, str) else format(value, 'g')}" for key, value in values)
        return Cell(self.data, self.model, self.network, mechanism, self.attack, settings, self.victims, self.seed)


def mechanism_of(name: str) -> dict[str, Any]:
    """Return a mechanism's settings from a name such as none, gaussian:0.01, vmf:1e5, vmf-layer:1e5."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "gaussian": ("sigma", {"name": "gaussian", "clip_norm": 1.0}),
        "laplace": ("scale", {"name": "laplace", "clip_norm": 1.0}),
        "vmf": ("kappa", {"name": "vmf", "blocks": "whole"}),
        "vmf-layer": ("kappa", {"name": "vmf", "blocks": "layer"}),
    }
    kind, _, strength = name.partition(":")
    if name == "none":
        return {"name": "none"}
    if kind not in kinds:
        raise InputError(
            f"mechanism {name!r} is not known; allowed: none, or one of {', '.join(kinds)} with a strength"
        )
    key, settings = kinds[kind]
    try:
        return mechanism_settings({**settings, key: float(strength)}).model_dump()
    except ValidationError as error:
        raise wrong_value(error.errors()[0]).replaced(where=f"mechanism {name!r}") from None
    except ValueError:
        raise InputError(f"mechanism {name!r}: {key} = {strength!r} is no number; such as {kind}:1e4") from None


def measure(batch: Batch, pictures: Pictures) -> list[CellRow]:
    """Attack the cells of a batch and score them; the last row is the guess's."""
    with cpu_threads(1):
        scene = _scene(batch.data, batch.model, batch.network, batch.victims, batch.seed, batch.device)
        uploads = {name: heard(_behind(scene, name), scene.state) for name in batch.mechanisms}
        picks = ATTACKS[batch.attack].picks()
        if picks:  # the adversary has for each image the list from which it is to be picked
            uploads = {
                name: tuple(
                    replace(own, candidates=each.candidates) for own, each in zip(sent, scene.truths, strict=True)
                )
                for name, sent in uploads.items()
            }
        began = time.perf_counter()
        reconstructions, failures = _attacked(batch, scene, uploads)
        seconds = (time.perf_counter() - began) / len(batch.mechanisms)
        pictures(f"{batch.data}-original", torch.cat([known.images for known in scene.truths]))
        pictures(f"{batch.data}-{GUESS}", torch.stack([scene.public[0].image] * batch.victims))
        rows = []
        for name in batch.mechanisms:
            cell = batch.cell(name)
            scores = _scored(scene, reconstructions[name], "unprotected" if name == "none" else "protected")
            nothing = torch.zeros(scene.world.dataset.shape)
            images = [nothing if made is None else made.images[0] for made in reconstructions[name]]
            if not picks:
                pictures(f"{cell.data}-{cell.model}-{cell.network}-{cell.attack}-{name}", torch.stack(images))
            plan = _behind(scene, name).plans[0]
            row = _stamped(
                cell,
                _result(cell, scene, scores),
                failures[name],
                cosine=statistics.median(_cosine(*pair) for pair in zip(uploads[name], scene.bare, strict=True)),
                epsilon=plan.guarantee([FIRST]).epsilon,
                best=best_decision(scene.world, scene.truths, uploads[name], batch.seed) if picks else None,
                ceiling=ceilings(replace(plan.accounted([FIRST]), sampling="full", rate=1.0), [1 / 100])[0].gamma,
                accuracy=scene.accuracy,
                seconds=seconds,
            )
            rows.append(row)
    guess = batch.cell("").guess
    return [*rows, _stamped(guess, _result(guess, scene, []), "")]


def _stamped(cell: Cell, result: AttackResult | None, failure: str, **figures: Any) -> CellRow:
    """A row that says when and with what it was measured."""
    given = {"cosine": None, "epsilon": None, "accuracy": None, "seconds": 0.0, **figures}
    return CellRow(cell, result, failure, **given, commit=commit(), date=time.strftime("%Y-%m-%d"), versions=versions())


@dataclass(frozen=True, eq=False)
class _Scene:
    """A network, whose uploads are attacked, and what the referee knows."""

    world: World
    state: State
    accuracy: float
    truths: tuple[Truth, ...]
    public: tuple[Any, ...]
    guessed: tuple[Score, ...]
    bare: tuple[Observation, ...]


@lru_cache(maxsize=1)
def _scene(data: str, model: str, network: str, victims: int, seed: int, device: str) -> _Scene:
    experiment = _experiment(data, model, victims, seed, device)
    world = build_world(experiment)
    state = world.initial if network == "untrained" else _one_round(experiment)
    told = [(target, truth(world, target)) for target in (UploadTarget(FIRST, (client,)) for client in range(victims))]
    truths = tuple(replace(known, candidates=candidates(world, target, known)) for target, known in told)
    public = guesses(world.dataset.x_test.float() / 255)
    std = world.dataset.std
    guessed = [line for known in truths for line in score_guesses(public, known, std, perceptual=False).scores]
    return _Scene(world, state, evaluate(world, state)[1], truths, public, tuple(guessed), heard(world, state))


def _experiment(data: str, model: str, victims: int, seed: int, device: str) -> Experiment:
    """Clients who share the training data and upload the gradient of one image each; no mechanism."""
    return validated(
        Experiment,
        {
            "noise": "reproducible",
            "seed": seed,
            "data": {"name": data, "download": False},
            "model": dict(MODELS[model].settings),
            "federation": {"clients": victims, "rounds": 1},
            "training": {"batch_size": 1},
            "adversary": {"victims": victims, "attacks": []},
            "engine": {"device": device},
        },
        "these arguments",
    )


def _one_round(experiment: Experiment) -> State:
    """The network after one round of federated averaging, a pass of Adam over each client's data, unprotected."""
    tree = experiment.model_dump()
    tree["federation"] |= {"algorithm": "fedavg"}
    tree["training"] |= {"batch_size": 32, "optimizer": "adam", "learning_rate": 1e-3}
    world = build_world(Experiment.model_validate(tree))
    change = mean_upload(sent(world), "examples").parameters
    parameters = {name: value + change[name] for name, value in world.initial.parameters.items()}
    return State(parameters, world.initial.buffers)


def _behind(scene: _Scene, mechanism: str) -> World:
    """The same experiment with a mechanism."""
    tree = scene.world.experiment.model_dump() | {"mechanism": mechanism_of(mechanism)}
    return build_world(Experiment.model_validate(tree))


def _attacked(
    batch: Batch, scene: _Scene, uploads: Mapping[str, Sequence[Observation]]
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Reconstructions by mechanism, ``None`` where there is none, and why there are none."""
    together = [observation for observations in uploads.values() for observation in observations]
    seed = torch_stream(batch.seed, "adversary").initial_seed()
    public = scene.world.dataset.x_test.float() / 255
    job = AttackJob(batch.attack, together, scene.world.model, batch.config, seed, public_images=public)
    campaign = attack_each(job)
    reconstructions: dict[str, list[Any]] = {}
    failures: dict[str, str] = {}
    first = 0
    for name, observations in uploads.items():
        numbers = range(first, first + len(observations))
        first = numbers.stop
        reconstructions[name] = [campaign.found.get(number) for number in numbers]
        reasons = [campaign.failures[number] for number in numbers if number in campaign.failures]
        failures[name] = "; ".join(dict.fromkeys(reasons))
    return reconstructions, failures


def _scored(scene: _Scene, made: Sequence[Any], kind: str) -> list[Score]:
    std, threshold = scene.world.dataset.std, scene.world.experiment.adversary.success_ssim
    scores: list[Score] = []
    for reconstruction, known in zip(made, scene.truths, strict=True):
        if reconstruction is not None:
            scored = score(reconstruction, kind, known, scene.public, std, threshold, perceptual=False)
            scores += scored.scores
    return scores


def _result(cell: Cell, scene: _Scene, scores: Sequence[Score]) -> AttackResult | None:
    """Condense the scores, with those of the guesses, as a run's summary does."""
    threshold = scene.world.experiment.adversary.success_ssim
    results = attack_results((*scores, *scene.guessed), threshold, None, cell.seed)
    return next((result for result in results if result.attack == cell.attack), None)


def _cosine(noisy: Observation, bare: Observation) -> float:
    upload, gradient = (
        torch.cat([part.upload[name].flatten().double() for name in bare.upload]) for part in (noisy, bare)
    )
    return float(F.cosine_similarity(upload, gradient, dim=0))


@lru_cache(maxsize=1)
def commit() -> str:
    """The commit of the code, with -dirty where files differ from it; ``unknown`` outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9"]
    try:
        described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


CHANCE = 0.01  # what chance does more rarely than this counts as identified

Group = tuple[str, str, str]
"""(data, model, network)."""
Guessed = Mapping[Cell, AttackResult | None]
"""The figures of guesses."""


def line(row: CellRow) -> str:
    """Return a row for a terminal."""
    cell = row.cell
    where = " ".join(name for name in (cell.data, cell.model, cell.network, cell.mechanism, cell.attack) if name)
    if row.result is None:
        return f"{where}: failed: {row.failure}"
    result = row.result
    said = f"{where}: PSNR {decimal(result.psnr, 1)} dB, MSE {result.mse:.3g}, SSIM {decimal(result.ssim, 2)}"
    said += f", recovered {result.recovered} of {result.victims}, identified {result.identified} of {result.victims}"
    return f"{said}, {row.seconds:.0f} s" + (f"; {row.failure}" if row.failure else "")


def groups(rows: Sequence[CellRow]) -> dict[Group, list[CellRow]]:
    """The rows of each data set, model and network, without the guesses."""
    members: dict[Group, list[CellRow]] = {}
    for row in sorted(rows, key=lambda row: _order(row.cell.mechanism)):
        if row.cell.model:
            members.setdefault((row.cell.data, row.cell.model, row.cell.network), []).append(row)
    return dict(sorted(members.items()))


def _order(mechanism: str) -> tuple[bool, str, float]:
    """No mechanism first, then each kind from little noise to much."""
    kind, _, strength = mechanism.partition(":")
    noise = float(strength or 0)
    return kind != "none", kind, -noise if kind.startswith("vmf") else noise


def strongest(rows: Sequence[CellRow]) -> dict[str, CellRow | None]:
    """For each mechanism the row that recovers most, then identifies most, then has the lowest median MSE.

    The MSE alone would prefer the mean of all images to a picture that shows whose it is. ``None``: all attacks failed.
    """
    best: dict[str, CellRow | None] = {}
    for row in rows:
        other = best.setdefault(row.cell.mechanism, None)
        if (
            row.result is not None
            and not row.result.picked
            and (other is None or other.result is None or _strength(row.result) > _strength(other.result))
        ):
            best[row.cell.mechanism] = row
    return best


def _strength(result: AttackResult) -> tuple[int, int, float]:
    return result.recovered, result.identified or 0, -result.error


def tables(rows: Sequence[CellRow]) -> dict[str, Table]:
    """The tables of docs/attacks-measured.md by their names in docs/results."""
    guessed = {row.cell: row.result for row in rows if row.cell.attack == GUESS}
    by_group = groups(rows)
    pictures = {group: [row for row in cells if not _picks(row)] for group, cells in by_group.items()}
    return {
        "leakage-strongest": _summary(by_group, guessed),
        "leakage-picked": _picked(by_group),
        "leakage-outcomes": _outcomes(pictures),
        "leakage-cells": _details(pictures, guessed),
    }


def _summary(by_group: Mapping[Group, Sequence[CellRow]], guessed: Guessed) -> Table:
    lines: list[tuple[str, ...]] = []
    for group, cells in by_group.items():
        for mechanism, row in strongest(cells).items():
            if row is None or row.result is None:
                lines.append((group[0], _network(group), mechanism, "", "", "every attack failed", *[""] * 5))
                continue
            guess = guessed.get(row.cell.guess)
            lines.append(
                (
                    group[0],
                    _network(group),
                    mechanism,
                    "" if row.cosine is None else decimal(row.cosine, 3),
                    "none" if row.epsilon is None else figure(row.epsilon, 3),
                    row.cell.attack,
                    _interval(row.result, "psnr", 1),
                    "" if guess is None else decimal(guess.psnr, 1),
                    *_counts(row.result),
                )
            )
    heads = ("data", "network", "mechanism", "cosine", "epsilon", "strongest", "PSNR, dB", "guess", *_COUNTS)
    return Table(heads, lines)


def _details(by_group: Mapping[Group, Sequence[CellRow]], guessed: Guessed) -> Table:
    heads = ("data", "network", "test accuracy", "mechanism", "attack", "steps", "MSE", "PSNR, dB", "SSIM")
    lines = chain.from_iterable(_cells(group, cells, guessed) for group, cells in by_group.items())
    return Table((*heads, *_COUNTS, "seconds"), lines)


def _cells(group: Group, cells: Sequence[CellRow], guessed: Guessed) -> Iterator[tuple[str, ...]]:
    """One line for the guess and for each mechanism and attack on a network."""
    accuracy = next((row.accuracy for row in cells if row.accuracy is not None), None)
    network = (group[0], _network(group), "" if accuracy is None else percent(accuracy))
    for key in dict.fromkeys(row.cell.guess for row in cells):
        if (guess := guessed.get(key)) is not None:
            yield (*network, "", "public mean", "", *_figures(guess), *_counts(guess), "")
    order = list(dict.fromkeys(row.cell.mechanism for row in cells))
    for row in sorted(cells, key=lambda row: order.index(row.cell.mechanism)):
        named = (*network, row.cell.mechanism, row.cell.attack, _steps(row))
        if row.result is None:
            yield (*named, f"failed: {row.failure}", *[""] * 6)
        else:
            yield (*named, *_figures(row.result), *_counts(row.result), f"{row.seconds:.0f}")


def _picks(row: CellRow) -> bool:
    return row.cell.attack in ATTACKS and bool(ATTACKS[row.cell.attack].picks())


def _picked(by_group: Mapping[Group, Sequence[CellRow]]) -> Table:
    """One line a mechanism: guess, what pictures identify and ``candidate`` picks, the best decision, the ceiling."""
    lines: list[tuple[str, ...]] = []
    for group, cells in by_group.items():
        pictures = strongest(cells)
        for row in cells:
            if not _picks(row) or row.result is None:
                continue
            shown = pictures.get(row.cell.mechanism)
            lines.append(
                (
                    group[0],
                    _network(group),
                    row.cell.mechanism,
                    percent(1 / (row.result.candidates or 1)),
                    "" if shown is None or shown.result is None else _counts(shown.result)[1],
                    _counts(row.result)[1],
                    "" if row.best is None else percent(row.best.value),
                    "none" if row.ceiling is None else percent(row.ceiling),
                )
            )
    heads = ("data", "network", "mechanism", "guess", "by pictures", "by `candidate`", "best decision", "ceiling")
    return Table(heads, lines)


def _outcomes(by_group: Mapping[Group, Sequence[CellRow]]) -> Table:
    heads = (
        "data",
        "network",
        "images are recovered",
        "not recovered, but identified more often than by chance",
        "counted as recovered, but identified no more often than by chance",
        "neither",
        "every label is inferred",
    )
    return Table(heads, [_outcome(group, cells) for group, cells in by_group.items()])


def _outcome(group: Group, cells: Sequence[CellRow]) -> tuple[str, ...]:
    """One line a network: behind which mechanisms any of the attacks recovers or identifies images."""
    attacks = len({row.cell.attack for row in cells})
    columns: list[list[str]] = [[], [], [], [], []]
    for mechanism in dict.fromkeys(row.cell.mechanism for row in cells):
        results = [row.result for row in cells if row.cell.mechanism == mechanism and row.result is not None]
        known = [result for result in results if _is_identified(result, attacks)]
        recovers, recovers_known = (any(result.recovered for result in scored) for scored in (results, known))
        if results:
            columns[(recovers_known, bool(known), recovers, True).index(True)].append(mechanism)
        if any(result.label_accuracy == 1 for result in results):
            columns[4].append(mechanism)
    return group[0], _network(group), *map(", ".join, columns)


def _is_identified(result: AttackResult, attacks: int) -> bool:
    """Whether more originals are identified than by chance; each of several attacks has its own chance to be lucky."""
    if result.identified is None or result.candidates is None:
        return False
    chance = binomtest(result.identified, result.victims, 1 / result.candidates, alternative="greater").pvalue
    return bool(attacks * chance < CHANCE)


_COUNTS = ("recovered", "identified", "labels")


def _counts(result: AttackResult) -> tuple[str, str, str]:
    identified = "" if result.identified is None else f"{result.identified} of {result.victims}"
    labels = "" if result.label_accuracy is None else percent(result.label_accuracy)
    missing = f" ({result.missing} failed)" if result.missing else ""
    return f"{result.recovered} of {result.victims}{missing}", identified, labels


def _figures(result: AttackResult) -> tuple[str, str, str]:
    low_high = result.intervals.get("mse")
    interval = "" if low_high is None else f" ({low_high[0]:.2g} to {low_high[1]:.2g})"
    return f"{result.mse:.2g}{interval}", _interval(result, "psnr", 1), _interval(result, "ssim", 2)


def _interval(result: AttackResult, name: str, places: int) -> str:
    value = decimal(getattr(result, name), places)
    if name not in result.intervals:
        return value
    low, high = (decimal(end, places) for end in result.intervals[name])
    return f"{value} ({low} to {high})"


def _steps(row: CellRow) -> str:
    settings = dict(part.split("=") for part in row.cell.settings.split(",") if part)
    if "iterations" not in settings:
        return ""
    restarts = settings.get("restarts", "1")
    return settings["iterations"] + (f" x {restarts}" if restarts != "1" else "")


def _network(group: Group) -> str:
    return f"{group[1]}, {group[2]}"


SHOWN, TILE, GAP, LABEL, TEXT = 6, 64, 4, 220, 13
WITHHELD = ("lfw",)  # faces of real people, whose names are known


def save_strip(folder: Path, name: str, images: Tensor) -> None:
    """Write images (V, C, H, W) on [0, 1] side by side; none of a data set of faces."""
    if name.startswith(WITHHELD):
        return
    path = _strip(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_image(images.clamp(0, 1), path, nrow=len(images), padding=0)


def compose(folder: Path, rows: Sequence[CellRow]) -> None:
    """Write one picture a data set and network, from strips that are there."""
    for (data, model, network), cells in groups(rows).items():
        lines = [("original", f"{data}-original"), ("guess: the public mean", f"{data}-{GUESS}")]
        for mechanism, row in strongest(cells).items():
            if row is not None and row.result is not None:
                label = f"{row.cell.attack}, {decimal(row.result.psnr, 1)} dB"
                lines.append((f"{mechanism}\n{label}", f"{data}-{model}-{network}-{row.cell.attack}-{mechanism}"))
        there = [(label, _strip(folder, name)) for label, name in lines if _strip(folder, name).is_file()]
        if len(there) > 2:
            _stack(there).save(folder / f"leakage-{data}-{model}-{network}.png", optimize=True)


def _stack(lines: Sequence[tuple[str, Path]]) -> Image.Image:
    """The first images of strips, enlarged without smoothing, below each other, each strip with its label."""
    strips = [pil_to_tensor(Image.open(path).convert("RGB")) for _, path in lines]
    shown = [torch.stack(strip.split(strip.shape[1], dim=2)[:SHOWN]) for strip in strips]
    enlarged = F.interpolate(torch.cat(shown), TILE, mode="nearest-exact")
    tiles = to_pil_image(make_grid(enlarged, nrow=len(shown[0]), padding=GAP, pad_value=255))
    sheet = Image.new("RGB", (LABEL + tiles.width, tiles.height), "white")
    sheet.paste(tiles, (LABEL - GAP, 0))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    for number, (label, _) in enumerate(lines):
        draw.multiline_text((GAP, GAP + number * (TILE + GAP) + TILE // 2), label, "black", font, anchor="lm")
    return sheet


def _strip(folder: Path, name: str) -> Path:
    return folder / "cells" / f"{name.replace(':', '_')}.png"


ATTACK_NAMES = tuple(SETTINGS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, one printed line a cell, and write tables and pictures."""
    with _parser().parsed(arguments) as options:
        _run(options)


def _run(options: argparse.Namespace) -> None:
    rows = read_rows(options.json) if options.json else {}
    if options.json:
        _cut_torn_line(options.json)
    save = partial(save_strip, options.pictures) if options.pictures else lambda *_: None
    for batch in _missing(options, rows):
        for row in _measured(batch, save):
            rows[row.cell] = row
            print(line(row), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
    if options.pictures:
        compose(options.pictures, list(rows.values()))
    if options.tables:
        for name, table in tables(list(rows.values())).items():
            (options.tables / f"{name}.csv").write_text(str(table), encoding="utf-8")


def read_rows(path: Path) -> dict[Cell, CellRow]:
    """Return the last measurement of each cell in a file of JSON lines; a torn last line is left out."""
    return {row.cell: row for row in Files(path.parent).appended_lines(path.name, CellRow)}


def _cut_torn_line(path: Path) -> None:
    """Of a call that was killed while it wrote."""
    path.touch()  # what cannot be written is found out before anything is measured
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    if not content.startswith(b"{", end):
        raise InputError(f"{path}: its last line is none of ours")
    path.write_bytes(content[:end])


def _missing(options: argparse.Namespace, rows: dict[Cell, CellRow]) -> Iterable[Batch]:
    """The batches to attack, without the cells that are there; one network's attacks follow each other."""
    for data, model, network in product(options.data, options.models, options.networks):
        for attack in options.attacks:
            if attack not in MODELS[model].attacks:
                continue
            about = (data, model, network, attack, SETTINGS[attack], options.mechanisms)
            batch = Batch(*about, options.victims, options.seed, options.device)
            done = {cell for cell, row in rows.items() if row.result is not None and cell.attack not in options.again}
            wanted = tuple(name for name in options.mechanisms if batch.cell(name) not in done)
            if wanted:
                yield replace(batch, mechanisms=wanted)


def _measured(batch: Batch, save: Callable[..., None]) -> list[CellRow]:
    """The rows of a batch; where it fails as a whole, they say why."""
    try:
        return measure(batch, save)
    except (InputError, ArithmeticError, RuntimeError) as error:
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return [_stamped(batch.cell(name), None, " ".join(reason.split())) for name in batch.mechanisms]


def _parser() -> StudyParser:
    parser = StudyParser("studies.leakage", __doc__)
    parser.add_argument("--json", type=Path, help="of lines; read, then added to")
    parser.add_argument("--tables", type=Path, help="folder for the tables, as CSV")
    parser.add_argument("--pictures", type=Path, help="folder for pictures (none of faces)")
    parser.add_argument("--data", type=listed(DATA), default=("fashion-mnist", "cifar10", "lfw"))
    parser.add_argument("--models", type=listed(tuple(MODELS)), default=("lenet", "mlp"))
    parser.add_argument("--networks", type=listed(NETWORKS), default=("untrained",))
    parser.add_argument("--mechanisms", type=_mechanisms, default=MECHANISMS)
    parser.add_argument("--attacks", type=listed(ATTACK_NAMES, 0), default=ATTACK_NAMES)
    parser.add_argument("--again", type=listed(ATTACK_NAMES, 0), default=(), help="attacks to measure anew")
    parser.add_argument("--victims", type=whole(2), default=8)  # intervals need two
    parser.add_argument("--seed", type=whole(0), default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    return parser


def _mechanisms(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    try:
        for name in names:
            mechanism_of(name)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


if __name__ == "__main__":
    main()
