"""The cells of the leakage table: one attack on single images' uploads of one network behind one mechanism.

What is measured is what a run measures: the uploads are the clients' own, the adversary gets what the tap hears, and
the referee scores. All mechanisms of a network go through an attack as one batch, which changes no figure.
"""

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedpriv.accounting import ceilings
from fedpriv.attacks.baselines import guesses
from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.candidate import CandidateSettings
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.dlg import DlgSettings
from fedpriv.attacks.methods.idlg import IdlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.attacks.referee import score, score_guesses
from fedpriv.attacks.truth import Truth
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab.results import attack_results
from fedpriv.core.lab.summary import versions
from fedpriv.core.randomness import torch_stream
from fedpriv.core.records import AttackResult, Interval, Score
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import wrong_value
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World, build_world
from fedpriv.mechanisms import mechanism_settings
from fedpriv.server.evaluation import evaluate
from fedpriv.server.rules.mean import mean_upload
from studies.leakage_candidates import best_decision, listed_truth, with_candidates
from studies.uploads import FIRST, heard, sent

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


@dataclass(frozen=True)
class Scale:
    """How much is computed: victims a cell, mechanisms, and the attacks' settings."""

    victims: int
    mechanisms: tuple[str, ...]
    settings: Mapping[str, Any]


MECHANISMS = ("none", "gaussian:0.001", "gaussian:0.01", "gaussian:0.1", "vmf:1e6", "vmf:1e5", "vmf:1e4", "vmf:500")
KINDS = (ClosedFormSettings, DlgSettings, IdlgSettings, IgaSettings, MapSettings, CandidateSettings)
DEFAULTS = {kind.name: kind() for kind in KINDS}
FASTER = {
    "dlg": DlgSettings(iterations=150, restarts=2),
    "idlg": IdlgSettings(iterations=150, restarts=1),
    "iga": IgaSettings(iterations=800, tv_start=0.0),  # as documented; the weight has fallen by default since
}
SCALES = {
    "small": Scale(8, MECHANISMS, {**DEFAULTS, **FASTER}),
    "full": Scale(32, (*MECHANISMS, "vmf-layer:1e6", "vmf-layer:1e5", "vmf-layer:1e4"), DEFAULTS),
}


@dataclass(frozen=True)
class Cell:
    """What one line of figures is about; two lines about the same are measurements of the same.

    Attributes:
        data: the data set.
        model: a key of :data:`MODELS`; empty for the guess, which sees no network.
        network: untrained, or trained for one round; empty for the guess.
        mechanism: as :func:`mechanism_of` reads it; empty for the guess.
        attack: its name.
        settings: the attack's, as ``key=value``.
        victims: how many clients upload one image's gradient each.
        seed: of the experiment.
    """

    data: str
    model: str
    network: str
    mechanism: str
    attack: str
    settings: str
    victims: int
    seed: int


@dataclass(frozen=True)
class Row:
    """One line of the JSON file.

    Attributes:
        cell: what it is about.
        result: the figures; ``None`` where the attack failed on every upload.
        failure: why; of some victims too. Empty where there is nothing to say.
        cosine: median over the victims of the cosine between what was sent and the gradient itself.
        epsilon: proven for one participation at delta 1e-5; ``None`` where nothing is.
        accuracy: the network's on the test images.
        seconds: wall time, divided by the number of cells that were attacked together.
        commit: of the code.
        best: how often the best decision among 100 candidates is right; computed with the attack that makes it.
        ceiling: no attack tells one image among 100 more often from this upload; ``None`` without a mechanism.
        date: of the measurement.
        versions: of what computed it.
    """

    cell: Cell
    result: AttackResult | None
    failure: str
    cosine: float | None
    epsilon: float | None
    accuracy: float | None
    seconds: float
    commit: str
    date: str
    versions: Mapping[str, str]
    best: Interval | None = None
    ceiling: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object as JSON types."""
        return asdict(self)


ROW = TypeAdapter(Row)

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

    def of(self, mechanisms: tuple[str, ...]) -> "Batch":
        """Return the part of it that is about these mechanisms."""
        return replace(self, mechanisms=mechanisms)

    def guess(self) -> Cell:
        """Return the cell of the guess that saw no upload."""
        return Cell(self.data, "", "", "", GUESS, "", self.victims, self.seed)


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


def measure(batch: Batch, pictures: Pictures) -> list[Row]:
    """Attack the cells of a batch and score them; the last row is the guess's."""
    with cpu_threads(1):
        scene = _scene(batch.data, batch.model, batch.network, batch.victims, batch.seed, batch.device)
        uploads = {name: heard(_behind(scene, name), scene.state) for name in batch.mechanisms}
        picks = ATTACKS[batch.attack].picks()
        if picks:
            uploads = {name: with_candidates(scene.truths, heard) for name, heard in uploads.items()}
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
                best=best_decision(scene.world, scene.truths, uploads[name], batch.seed)
                if ATTACKS[batch.attack].picks()
                else None,
                ceiling=ceilings(replace(plan.accounted([FIRST]), sampling="full", rate=1.0), [1 / 100])[0].gamma,
                accuracy=scene.accuracy,
                seconds=seconds,
            )
            rows.append(row)
    return [*rows, _stamped(batch.guess(), _result(batch.guess(), scene, []), "")]


def failed(cell: Cell, failure: str) -> Row:
    """Return the row of a cell that could not be measured."""
    return _stamped(cell, None, failure)


def _stamped(cell: Cell, result: AttackResult | None, failure: str, **figures: Any) -> Row:
    """A row that says when and with what it was measured."""
    given = {"cosine": None, "epsilon": None, "accuracy": None, "seconds": 0.0, **figures}
    return Row(cell, result, failure, **given, commit=commit(), date=time.strftime("%Y-%m-%d"), versions=versions())


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
    truths = tuple(listed_truth(world, client) for client in range(victims))
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
