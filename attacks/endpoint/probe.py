"""Attacks on a run's finished model and on its answers: copies, inverted classes, attributes, membership by questions.

Every attack gets an endpoint of its own under one policy, with one budget. Half of the test images, drawn by the seed,
are public: the adversary holds them. Copies are compared with the model on the other half. Results are added to the
folder; nothing that was there is changed but what an earlier probe of this kind left, and summary.json.
"""

import copy
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedpriv.attacks.endpoint.report import Probe, write_probe
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import OpenEndpoint, endpoints
from fedpriv.attacks.scene import Counted, Network, ProbeReferee, ProbeScene, Public, Rehearsal
from fedpriv.attacks.settings import Access
from fedpriv.attacks.threat import ThreatModel, prober
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.files import writing
from fedpriv.core.finding import png
from fedpriv.core.finished import completed_summary, final_state, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Guarantee, Ledger
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.data.datasets import Dataset, load_dataset, unit_scale
from fedpriv.models.machinery.build import build_model

_FEWEST_QUESTIONS = 2500
_MOST_IMAGES = 2000  # that are public, and that copies are compared on
_AT_ONCE = 4096


def probe_run(
    folder: RunFolder,
    attacks: Sequence[ModelAttack],
    answers: str | None,
    questions: int | None,
    adversary: str | None,
    progress: Progress,
) -> Probe:
    """Attack the finished model of a run, and write what came of it. It returns what is written to probe.json."""
    began = time.monotonic()
    summary = completed_summary(folder)
    experiment = folder.experiment()
    threat = prober(adversary or _usual(attacks), experiment)
    world = finished_world(folder, experiment)
    source = endpoints()
    shown = answers or source.usual(experiment)
    pixels = int(np.prod(world.dataset.shape))
    budget = source.budget(experiment, shown, questions) or max(_FEWEST_QUESTIONS, 2 * (pixels + 1))
    with cpu_threads(experiment.engine.threads):
        endpoint = source.open(folder, world, shown)
        scene = _scene(folder, world, threat, endpoint, budget)
        findings, refusals = _made(attacks, scene, _referee(folder, world, endpoint), threat, progress)
    if not findings:
        raise InputError("; ".join(refusals))
    probe = Probe(
        adversary=threat.name,
        answers=shown,
        heuristic=endpoint.claim is None,
        results=tuple(finding.result for finding in findings),
        refusals=tuple(refusals),
        seconds=time.monotonic() - began,
    )
    pictures = {name: png(image) for finding in findings for name, image in finding.pictures.items()}
    with writing():
        write_probe(folder, probe, pictures)
        folder.write_summary(summary.with_found({"probe": probe}))
    return probe


def _made(
    attacks: Sequence[ModelAttack], scene: ProbeScene, referee: ProbeReferee, threat: ThreatModel, progress: Progress
) -> tuple[list[ProbeOutcome], list[str]]:
    """Make the attacks one after the other: what came of them, and why others could not be made."""
    outcomes: list[ProbeOutcome] = []
    refusals: list[str] = []
    for number, attack in enumerate(attacks):
        progress.advanced("attacks", number, len(attacks))
        try:
            if refusal := threat.refusal(attack.name, attack.needs) or attack.refusal(scene):
                raise InputError(refusal)
            progress.stage(f"{attack.title}, up to {scene.budget} questions")
            outcomes += attack.run(scene, referee)
        except InputError as error:
            refusals.append(str(error))
            if len(attacks) > 1:
                progress.warn(str(error))
    progress.advanced("attacks", len(attacks), len(attacks))
    return outcomes, refusals


def _usual(attacks: Sequence[ModelAttack]) -> str | None:
    """Who makes these attacks unless somebody is named; ``None``: whoever gets the model."""
    named = {attack.adversary for attack in attacks}
    return named.pop() or None if len(named) == 1 else None


def proven_of(answers: OpenEndpoint, experiment: Experiment, ledger: Ledger) -> Guarantee | None:
    """What is proven about all copies of one example, under replace-one: the smaller epsilon.

    The ledger is about the run's network: of other models that answer it says nothing.
    """
    if experiment.data.overlaps:  # several clients hold copies, and the figures are about one
        return None
    claims = (answers.claim, ledger.worst if answers.rule.source == "network" else None)
    known = [each for each in claims if each is not None and each.epsilon is not None and each.replaces]
    return min(known, key=lambda each: each.epsilon or 0.0, default=None)


def _scene(
    folder: RunFolder,
    world: World,
    threat: ThreatModel,
    endpoint: OpenEndpoint,
    budget: int,
) -> ProbeScene:
    dataset, experiment = world.dataset, world.experiment
    public, _ = _halves(world)
    finer = _finer(experiment)
    schedule = {record.round: record.used for record in folder.rounds() if record.used}
    return ProbeScene(
        open=lambda: Counted(endpoint.questions, budget),
        budget=budget,
        classes=dataset.classes,
        shape=dataset.shape,
        copy=lambda seed: build_model(experiment.model, dataset.shape, dataset.classes, seed, dataset.columns).double(),
        normalise=_normalised(world),
        seed=experiment.seed,
        labels_only=endpoint.rule.labels_only,
        public=public if Access.PUBLIC_DATA in threat.grants else None,
        model=_model(folder, world) if Access.MODEL in threat.grants else None,
        rehearsal=Rehearsal(world, schedule, endpoint.rule),
        proven=proven_of(endpoint, experiment, folder.final_ledger()),
        finer_classes=0 if finer is None else finer.classes,
    )


def _referee(folder: RunFolder, world: World, endpoint: OpenEndpoint) -> ProbeReferee:
    dataset = world.dataset
    _, held = _halves(world)
    rows = torch.from_numpy(np.concatenate(world.partitions))
    return ProbeReferee(
        # What is no network of the run's has no gradients.
        truth=_model(folder, world)
        if endpoint.rule.source == "network"
        else lambda images: torch.from_numpy(endpoint.exact(images)),
        classes=dataset.classes,
        held=held,
        train_means=_class_means(dataset.x_train[rows], world.true_labels[rows], dataset.classes),
        test_means=_class_means(dataset.x_test, dataset.y_test, dataset.classes),
        seed=world.experiment.seed,
    )


def _model(folder: RunFolder, world: World) -> Network:
    """The finished model in float64 on the CPU, for images on [0, 1]."""
    network = copy.deepcopy(world.model).to("cpu", torch.float64)
    final_state(folder, world, "attack").load_into(network)
    network.eval().requires_grad_(False)
    normalise = _normalised(world)
    return lambda images: network(normalise(images))


def _normalised(world: World) -> Callable[[Tensor], Tensor]:
    dataset = world.dataset
    return lambda images: dataset.normalise(images, images.dtype)


def _halves(world: World) -> tuple[Public, Public]:
    """Test images that are public, and the others."""
    dataset = world.dataset
    order = torch.from_numpy(numpy_stream(world.experiment.seed, "probe-public").permutation(len(dataset.x_test)))
    if len(order) < 2:
        raise InputError(f"{len(order)} test image(s): expected at least two, a public one and one to compare on")
    middle = len(order) // 2
    parts = order[:middle][:_MOST_IMAGES].sort().values, order[middle:][:_MOST_IMAGES].sort().values
    finer = _finer(world.experiment)
    one, two = (
        Public(
            unit_scale(dataset.x_test[rows], torch.float64),
            dataset.y_test[rows],
            None if finer is None else finer.y_test[rows],
        )
        for rows in parts
    )
    return one, two


def _finer(experiment: Experiment) -> Dataset | None:
    """The data before ``data.groups`` joined classes; ``None``: none were joined."""
    if experiment.data.groups is None:
        return None
    return load_dataset(experiment.data.model_copy(update={"groups": None}), experiment.seed)


def _class_means(images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean image of each class (classes, C, H, W) on [0, 1]; NaN where there is none."""
    sums = torch.zeros((classes, *images.shape[1:]), dtype=torch.float64)
    for part, own in zip(images.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True):
        sums.index_add_(0, own, part.double())
    unit = 1 if images.is_floating_point() else 255
    return sums / unit / labels.bincount(minlength=classes)[:, None, None, None]
