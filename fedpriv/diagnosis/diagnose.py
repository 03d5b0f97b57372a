"""Find out before a run what a network costs and allows: build it, try it on random examples, and measure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedpriv.attacks.reconstruction import AttackRefused
from fedpriv.attacks.reconstruction import preflight as attack_preflight
from fedpriv.attacks.simulation import RANDOM
from fedpriv.core.columns import worded
from fedpriv.core.config import DataConfig, Experiment, override, parse_override, validated
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.federated import example_losses
from fedpriv.core.lab.preflight import Rehearsal, simulation_check
from fedpriv.core.names import PAD
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import generator_states, seeded_generators, torch_stream
from fedpriv.core.reading import GrowingRecord
from fedpriv.core.registry import ATTACKS
from fedpriv.core.threads import cpu_threads, keep_freed_memory
from fedpriv.core.world import build_world_around, check_fitness, network_of
from fedpriv.data.datasets import Dataset
from fedpriv.data.tokenizers import NO_TARGET, Bytes, TextFacts
from fedpriv.diagnosis.cost import StepCost, step_cost
from fedpriv.gradients import (
    DenseGradients,
    GradientOperator,
    Vector,
    find_route,
    per_example_gradients,
    plain_gradient,
)
from fedpriv.gradients.calls import coupled_layers
from fedpriv.gradients.dense import Loss
from fedpriv.gradients.ghost import RAISED
from fedpriv.gradients.per_example import layer_of
from fedpriv.mechanisms import mechanism_settings
from fedpriv.server.tap import public_settings

BATCH, EXACT, CLASSES, LENGTH = 16, 16, 10, 16

# What is tried where nobody says what the network takes: the first that it takes is taken.
SHAPES = ((3, 32, 32), (LENGTH,), (1, 28, 28), (3, 64, 64), (3, 96, 96), (3, 224, 224))

GAUSSIAN = {"name": "gaussian", "sigma": 1.0, "clip_norm": 1.0}
_NUMBER = re.compile(r"\d+")


class Acceptance(GrowingRecord):
    """Whether the network trains with a mechanism; tried on random examples."""

    mechanism: str
    accepted: bool
    reason: str = ""  # why not
    mixing: tuple[str, ...] = ()  # the layers that mix the examples of a batch
    instead: str = ""  # what to write


class LayerGroup(GrowingRecord):
    """Layers whose names differ in numbers only, and whose gradients are computed the same way."""

    name: str  # with ranges, such as layer{1-4}.conv{1-2}
    kind: str  # their class
    count: int
    parameters: int  # of all of them, those inside included
    way: str  # ghost, dense, frozen or unused
    reason: str = ""  # why dense


class Exactness(GrowingRecord):
    """Largest error of per-example gradients against autograd, one example at a time, on random examples."""

    error: float  # of norms, inner products, a weighted sum, and that sum of each parameter; the largest, relative
    examples: int
    precision: str  # float64, or float32 where the network takes no other
    layer: str  # whose sum is the furthest off
    rounding: float | None = None  # the same for autograd with weights off by a rounding, where the error is not tiny


class AttackTrial(GrowingRecord):
    """One step of an attack on an upload of random examples without a mechanism."""

    name: str
    runs: bool
    reason: str = ""  # why it refuses


class Diagnosis(GrowingRecord):
    """All of it; a part that could not be measured is ``None``, and ``unmeasured`` says why."""

    model: str
    takes: str  # what an example is
    shape: tuple[int, ...]  # (C, H, W), or (T,) of texts
    classes: int
    trained: int  # parameters
    frozen: int
    acceptance: Acceptance
    way: str = ""  # why the whole network is dense; empty: layer by layer
    layers: tuple[LayerGroup, ...] = ()
    exactness: Exactness | None = None
    cost: StepCost | None = None
    unmeasured: str = ""
    attacks: tuple[AttackTrial, ...] = ()
    warnings: tuple[str, ...] = ()  # what makes attacks mean less than it seems


def experiment_around(name: str, overrides: Sequence[str], takes_texts: bool, length: int = LENGTH) -> Experiment:
    """Return an experiment with a network, Gaussian noise and the attacks that just listen, labels known."""
    about = {"name": "text", "path": "random", "text": {"length": length, "task": "classify"}} if takes_texts else {}
    listening = {each: kind for each, kind in ATTACKS.items() if not kind.active() and not kind.picks()}
    attacks = [each for each, kind in listening.items() if kind.is_text == takes_texts and not kind.is_of_rows]
    tree: dict[str, Any] = {
        "data": about,
        "model": {"name": name},
        "mechanism": dict(GAUSSIAN),
        "federation": {"clients": 1, "rounds": 1},
        "training": {"batch_size": 2},
        "adversary": {"attacks": attacks, "knows_labels": True},
    }
    override(tree, [parse_override(text) for text in overrides], "--set ")
    return validated(Experiment, tree, f"fedpriv model {name}")


def random_dataset(config: DataConfig, shape: tuple[int, ...], classes: int, examples: int) -> Dataset:
    """Return random images (C, H, W), or texts of (T,) tokens, as the settings say."""
    texts = None
    if len(shape) == 1:
        texts = TextFacts((config.text and config.text.task) or "classify", Bytes())
        classes = Bytes.size if texts.task == "next" else classes
    sides = shape if texts is None else (1, 1, *shape)
    names = tuple(str(label) for label in range(classes))
    none = torch.zeros(1, *sides, dtype=torch.uint8 if texts is None else torch.int32)
    labels = none.flatten(1).long() if texts is not None and texts.task == "next" else torch.zeros(1).long()
    halves = (0.5,) * sides[0]
    empty = Dataset("random", none, labels, none, labels, names, halves, halves, "random examples", text=texts)
    drawn = empty.random(examples, torch_stream(0, "random examples"))
    return Dataset("random", *drawn, *drawn, names, halves, halves, "random examples", text=texts)


def fitting(
    name: str, overrides: Sequence[str], shape: tuple[int, ...] | None, classes: int, batch: int
) -> tuple[Experiment, Dataset]:
    """Return an experiment with a network, and random examples that it takes."""
    reasons: list[InputError] = []
    for tried in SHAPES if shape is None else (shape,):
        experiment = experiment_around(name, overrides, len(tried) == 1, tried[-1])
        dataset = random_dataset(experiment.data, tried, classes, max(batch, EXACT))
        try:
            network_of(experiment, dataset)
        except InputError as error:
            reasons.append(error)
            if len({str(each) for each in reasons}) < len(reasons):
                raise  # whatever it is given
            continue
        return experiment, dataset
    raise reasons[0]


def diagnose(experiment: Experiment, dataset: Dataset, batch: int, progress: Progress) -> Diagnosis:
    """Measure a network on random examples of a data set's shape."""
    with cpu_threads(experiment.engine.threads):
        keep_freed_memory()
        progress.stage(f"building {experiment.model.name}")
        model = network_of(experiment, dataset)
        sizes = [value.numel() * (1 if value.requires_grad else -1) for value in model.parameters()]
        found = Diagnosis(
            model=experiment.model.name,
            takes=dataset.kind,
            shape=dataset.shape if dataset.text is None else dataset.shape[-1:],
            classes=dataset.classes,
            trained=sum(size for size in sizes if size > 0),
            frozen=-sum(size for size in sizes if size < 0),
            acceptance=_acceptance(experiment, dataset, model, progress),
        )
        found = _measured(found, experiment, dataset, model, batch, progress)
        trials, warnings = attacked(experiment, dataset, progress)
        return found.model_copy(update={"attacks": trials, "warnings": warnings})


def _acceptance(experiment: Experiment, dataset: Dataset, model: nn.Module, progress: Progress) -> Acceptance:
    mechanism = experiment.mechanism.name
    progress.stage(f"checking mechanism {mechanism}: no example may influence another's gradient")
    mixing = tuple(
        f"{group.name} ({group.kind})" for group in _grouped(model, dict.fromkeys(coupled_layers(model), ""))
    )
    instead = 'model.norm = "group"' if mixing else ""
    reason = ""
    try:
        check_fitness(experiment, dataset, model)
    except InputError as error:
        reason = str(error)
    return Acceptance(mechanism=mechanism, accepted=not reason, reason=reason, mixing=mixing, instead=instead)


def _measured(
    found: Diagnosis, experiment: Experiment, dataset: Dataset, model: nn.Module, batch: int, progress: Progress
) -> Diagnosis:
    """Add ways, exactness and cost."""
    inputs, labels = random_batch(dataset, max(batch, EXACT))
    try:
        progress.stage("finding how each layer's gradients are computed")
        x, y = inputs[:batch], labels[:batch]
        with seeded_generators(0, x.device):
            route = find_route(model, example_losses, x, y)
            gradients = per_example_gradients(model, example_losses, x, y, route=route)
        routes, whole = gradients.routes, gradients.routes.get("", "")
        # One that holds parameters itself has a route as a layer among others.
        is_dense = len(routes) == 1 and whole.startswith("dense")
        layers = () if is_dense else tuple(_grouped(model, routes))
        found = found.model_copy(update={"way": whole if is_dense else "", "layers": layers})
        progress.stage("comparing gradients with autograd, one example at a time")
        # Built anew: some networks keep tensors of a pass, which cannot be copied.
        found = found.model_copy(update=_exact(network_of(experiment, dataset), inputs[:EXACT], labels[:EXACT]))
        progress.stage(f"measuring steps on {batch} examples")
        config = experiment.mechanism if experiment.mechanism.protects_examples else mechanism_settings(GAUSSIAN)
        noisy = config if config.noise is not None else config.with_some_noise()  # a step costs the same with any
        cost = step_cost(network_of(experiment, dataset), example_losses, x, y, noisy.mechanism())
        return found.model_copy(update={"cost": cost})
    except RAISED as error:
        return found.model_copy(update={"unmeasured": reason_of(error)})


def _exact(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, object]:
    try:
        return {"exactness": exactness(model, example_losses, inputs, labels)}
    except RAISED as error:
        return {"unmeasured": reason_of(error)}


def random_batch(dataset: Dataset, examples: int) -> tuple[Tensor, Tensor]:
    """Return random inputs as the network takes them, and labels; a third of the texts is padded."""
    inputs, labels = dataset.random(examples, torch_stream(0, "random batch"))
    inputs = dataset.normalise(inputs)
    if dataset.text is not None:
        half = inputs.shape[-1] // 2
        inputs[::3, half:] = PAD
        if dataset.is_next:
            labels[::3, half - 1 :] = NO_TARGET
    return inputs, labels


def _grouped(model: nn.Module, routes: Mapping[str, str]) -> Iterator[LayerGroup]:
    """Fold layers of a kind whose gradients are computed alike, and whose parents differ in numbers only."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, route in routes.items():
        parent, kind = name.rpartition(".")[0], type(model.get_submodule(name)).__name__
        groups.setdefault((_NUMBER.sub("*", parent), kind, route), []).append(name)
    for (_, kind, route), names in groups.items():
        layers = [model.get_submodule(name) for name in names]
        way, _, about = route.partition(": ")
        yield LayerGroup(
            name=_with_ranges(names) or "(the network)",
            kind=kind,
            count=len(names),
            parameters=sum(value.numel() for layer in layers for value in layer.parameters(recurse=way == "dense")),
            way=way,
            reason=about.removeprefix(f"{kind} (").replace(")", "") if way == "dense" else "",
        )


def _with_ranges(names: Sequence[str]) -> str:
    """One name for all: numbers that differ become {first-last}, and last names stand together."""
    parts = [name.rpartition(".") for name in names]
    parent = _folded([before for before, _, _ in parts])
    last: dict[str, list[str]] = {}
    for _, _, after in parts:
        last.setdefault(_NUMBER.sub("*", after), []).append(after)
    folded = ", ".join(map(_folded, last.values()))
    return f"{parent}{'.' if parent else ''}{f'({folded})' if len(last) > 1 else folded}"


def _folded(names: Sequence[str]) -> str:
    """One name for names that differ in numbers only."""
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ranges = iter([sorted({int(number) for number in column}) for column in columns])

    def shown(_: re.Match[str]) -> str:
        numbers = next(ranges)
        return str(numbers[0]) if len(numbers) == 1 else f"{{{numbers[0]}-{numbers[-1]}}}"

    return _NUMBER.sub(shown, names[0])


def attacked(
    experiment: Experiment, dataset: Dataset, progress: Progress
) -> tuple[tuple[AttackTrial, ...], tuple[str, ...]]:
    """Return which attacks can be made on uploads without a mechanism, and what makes them mean less than it seems."""
    names = experiment.adversary.passive_attacks
    bare = experiment.model_copy(update={"mechanism": mechanism_settings({})})
    try:
        world = build_world_around(bare, dataset)
        settings, check = public_settings(bare, dataset, world.plans[0]), simulation_check(world)
        rehearsal = Rehearsal.of(world)
        about = attack_preflight(world.model, settings, names)
        warnings = [*rehearsal.idle(world), *(worded(line, dataset.kind) for line in about)]
    except (InputError, AttackRefused) as error:
        return tuple(AttackTrial(name=name, runs=False, reason=str(error)) for name in names), ()
    trials = []
    for name in names:
        progress.stage(f"trying attack {name}")
        mismatch = check.at(ATTACKS[name].simulation(), world.initial.parameters, settings)
        if mismatch is not None and mismatch.kind == "random":
            warnings.append(RANDOM)
        reason = mismatch.text if mismatch is not None and mismatch.bars(ATTACKS[name]) else _refused(rehearsal, name)
        trials.append(AttackTrial(name=name, runs=not reason, reason=reason))
    return tuple(trials), tuple(dict.fromkeys(warnings))


def _refused(rehearsal: Rehearsal, name: str) -> str:
    try:
        return rehearsal.refusal(name) or ""
    except InputError as error:
        return str(error)


# From this error on it is compared with what rounding does to autograd's own gradients.
TINY = 1e-12

# Gradients of single examples that are held at once, at most.
MOST_BYTES = 1 << 30

# A parameter whose gradients are all below this share of the longest one has nothing but rounding in them, such as a
# bias of keys, which moves every score by the same; its sum is compared with that longest one.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}

_AWAKE = 0.02  # the deviation of what replaces zeros, as of weights that transformers start from


def exactness(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Exactness:
    """Return the largest relative error on a batch, without dropout and in float64 if possible; changes the model."""
    try:
        return _compared(model.double(), loss, x.double() if x.is_floating_point() else x, y)
    except RAISED:
        return _compared(model.float(), loss, x, y)


def _compared(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Exactness:
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    size = sum(value.nbytes for value in trained.values())
    count = max(2, min(len(x), MOST_BYTES // size))
    x, y = x[:count], y[:count]
    with _without_chance(model, x):
        route = find_route(model, loss, x, y)
        _wake(trained.values())
        found = per_example_gradients(model, loss, x, y, route=route)
        rows = _one_by_one(model, loss, x, y)
        error, layer = _error(model, found, rows)
        rounding = None
        if error > TINY:
            _round_weights(model)
            again = _one_by_one(model, loss, x, y)
            stacked = {name: torch.stack([row[name] for row in again]) for name in trained}
            rounding, _ = _error(model, DenseGradients(stacked), rows)
    precision = str(found.dtype).removeprefix("torch.")
    return Exactness(error=error, examples=count, precision=precision, layer=layer, rounding=rounding)


def _wake(parameters: Iterable[Tensor]) -> None:
    """Move parameters off zero: a head or a gain of zeros leaves the layers before it without a gradient to compare."""
    stream = torch_stream(0, "waking")
    with torch.no_grad():
        for value in parameters:
            if not value.any():
                value.add_(torch.randn(value.shape, generator=stream, dtype=value.dtype), alpha=_AWAKE)


def _one_by_one(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> list[Vector]:
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with torch.enable_grad():
        return [plain_gradient(loss(model(x[[row]]), y[[row]]).sum(), trained) for row in range(len(x))]


def _round_weights(model: nn.Module) -> None:
    """Change each weight by about a rounding, up or down."""
    stream = torch_stream(0, "rounding")
    with torch.no_grad():
        for value in model.parameters():
            signs = torch.randint(2, value.shape, generator=stream).mul_(2).sub_(1)
            value.add_(value * signs, alpha=torch.finfo(value.dtype).eps)


@contextmanager
def _without_chance(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Switch off what the model draws."""
    model.train()
    for layer in model.modules():
        if isinstance(layer, _DropoutNd | nn.RReLU):
            layer.eval()
    with seeded_generators(0, x.device):
        if _draws(model, x):
            model.eval()
            if _draws(model, x):
                raise InputError("its exactness: it draws in evaluation mode, too, and other numbers for one example")
        yield


def _draws(model: nn.Module, x: Tensor) -> bool:
    before = generator_states()
    with torch.no_grad():
        model(x)
    return generator_states() != before


def _error(model: nn.Module, found: GradientOperator, rows: list[Vector]) -> tuple[float, str]:
    """The largest relative error, and the layer whose sum is the furthest off."""
    names = list(rows[0])
    weights = torch.linspace(1.0, -0.5, len(rows), dtype=found.dtype)
    lengths = {name: torch.stack([torch.linalg.vector_norm(row[name]) for row in rows]) for name in names}
    norms = torch.linalg.vector_norm(torch.stack(list(lengths.values())), dim=0)
    products = torch.stack([torch.stack([_inner(one, other) for other in rows]) for one in rows])
    longest = float(norms.max())
    if not longest:
        raise InputError("the gradients of random examples are all zero")
    sums, off = found.combine(weights), {}
    for name in names:
        wanted = torch.stack([weight * row[name] for weight, row in zip(weights, rows, strict=True)]).sum(dim=0)
        off[name] = float(torch.linalg.vector_norm(sums[name] - wanted))
    own = {name: float(length.max()) for name, length in lengths.items()}
    scale = {name: size if size > ROUNDING[found.dtype] * longest else longest for name, size in own.items()}
    worst = max(names, key=lambda name: off[name] / scale[name])
    error = max(
        float(((found.norms() - norms).abs() / longest).max()),
        float((found.gram() - products).abs().max()) / longest**2,
        sum(value**2 for value in off.values()) ** 0.5 / longest,
        off[worst] / scale[worst],
    )
    return error, layer_of(worst, model)


def _inner(one: Vector, other: Vector) -> Tensor:
    return torch.stack([torch.dot(value.flatten(), other[name].flatten()) for name, value in one.items()]).sum()
