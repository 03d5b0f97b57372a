"""Reference models trained together are the models that a federation, or a plain loop, trains one at a time."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional

from fedpriv.attacks.references import (
    Pool,
    Reference,
    mapped_network,
    train_references,
    trained_network,
    usual_schedule,
)
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.federated import stack_objective
from fedpriv.core.lab import start_run
from fedpriv.core.plan import Plan
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import NoiseStream, Secret, numpy_stream
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World, build_world
from fedpriv.gradients import DenseGradients, per_example_gradients
from fedpriv.models.convnets import LenetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings
from tests.cases import in_one_test
from tests.integration.small import experiment

MECHANISMS: dict[str, dict[str, object]] = {
    "none": {"name": "none"},
    "gaussian": {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.5},
    "gaussian by layer": {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.5, "clipping": "layer"},
    "gaussian on updates": {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.5, "unit": "update"},
    "laplace": {"name": "laplace", "scale": 0.01},
    "vmf": {"name": "vmf", "kappa": 300.0},
    "vmf by layer": {"name": "vmf", "kappa": 300.0, "blocks": "layer"},
    "hgm": {"name": "hgm", "sigma": 0.3, "redistribution": "layer"},
}
FEDERATIONS: dict[str, dict[str, dict[str, object]]] = {
    "fedsgd": {"training": {"batch_size": 5}},
    "fedavg": {"federation": {"algorithm": "fedavg"}, "training": {"batch_size": 40}},
    "poisson": {"training": {"batch_size": 2, "sampling": "poisson"}},
    "adam": {
        "federation": {"algorithm": "fedavg", "server_optimizer": "adam", "clients_per_round": 2},
        "training": {"batch_size": 60, "optimizer": "adam", "learning_rate": 0.01},
    },
}


def pool_of(world: World) -> Pool:
    return Pool(world.network_input(world.dataset.x_train), world.dataset.y_train)


def others(world: World, count: int) -> list[Reference]:
    """References on shuffled shares, with seeds of their own."""
    found = []
    for seed in range(100, 100 + count):
        order = numpy_stream(seed, "test").permutation(len(world.dataset.x_train))
        cuts = np.cumsum([len(rows) for rows in world.partitions])
        found.append(Reference(seed, tuple(np.split(order, cuts)[: len(world.partitions)])))
    return found


@dataclass(frozen=True)
class _Shared:
    """Noise of a client and a step, or of a client and a round, and of nothing else."""

    client: int
    index: int

    def stream(self, purpose: str, step: int | None = None) -> NoiseStream:
        return Secret(bytes(32)).stream(purpose, self.client, self.index if step is None else step)


def run_alone(settings: Experiment, folder: Path) -> dict[str, Tensor]:
    start_run(settings, folder, "", Silent())
    checkpoint = RunFolder.open(folder).load_checkpoint()
    assert checkpoint is not None
    return {
        name.removeprefix("parameters/"): value
        for name, value in checkpoint.tensors.items()
        if name.startswith("parameters/")
    }


# Each mechanism with two of the federations in turn.
PAIRS = [pair for place, pair in enumerate(itertools.product(MECHANISMS, FEDERATIONS)) if (place // 4 + place) % 2 == 0]


@pytest.mark.parametrize(("mechanism", "federation"), PAIRS)
def test_a_reference_on_the_targets_data_is_the_target(
    mechanism: str, federation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the real run: server, clients, messages. Of themselves the two have two noises."""
    monkeypatch.setattr(
        "fedpriv.clients.answering.answer_secret", lambda _, client, number, __: _Shared(client, number)
    )
    settings = experiment(**FEDERATIONS[federation], mechanism=MECHANISMS[mechanism], engine={"precision": "float64"})

    def noise(plan: Plan, index: int) -> NoiseStream:
        return _Shared(plan.client, index if plan.seed == settings.seed else -1 - index).stream("noise")

    monkeypatch.setattr("fedpriv.attacks.references._noise", noise)
    target = run_alone(settings, tmp_path / "run")
    world = build_world(settings)
    own = Reference(settings.seed, world.partitions)
    references = [*others(world, 2), own]
    schedule = usual_schedule(settings)
    # As an audit does: a draw from directions that hardly differ hangs on their last bits.
    with cpu_threads(settings.engine.threads):
        found = train_references(world, pool_of(world), references, schedule, [3])[3]
    for name, value in target.items():
        torch.testing.assert_close(found[name][2], value, rtol=1e-7, atol=1e-7)
        assert not torch.allclose(found[name][0], value, atol=1e-3)


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet"])
def test_models_together_are_the_models_of_a_plain_loop(name: str) -> None:
    """The oracle is a loop of nothing but PyTorch."""
    settings = experiment(
        model={"name": name, **({"hidden": [16]} if name == "mlp" else {})},
        federation={"algorithm": "fedavg", "clients": 1, "rounds": 2},
        training={"batch_size": 400, "learning_rate": 0.05, "momentum": 0.5},
    )
    world = build_world(settings)
    pool, references = pool_of(world), others(world, 3)
    found = train_references(world, pool, references, usual_schedule(settings), [2])[2]
    for index, reference in enumerate(references):
        model = build_model(settings.model, world.dataset.shape, world.dataset.classes, settings.seed)
        step = 0
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
            for _ in range(world.plans[0].steps_per_round):
                rows = reference.shares[0][world.plans[0].sampling.batch(reference.seed, 0, step)]
                optimizer.zero_grad()
                functional.cross_entropy(model(pool.images[rows]), pool.labels[rows]).backward()
                optimizer.step()
                step += 1
        for key, value in model.named_parameters():
            torch.testing.assert_close(found[key][index], value.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", ["none", "gaussian", "vmf"])
def test_how_many_are_trained_at_once_makes_no_difference(mechanism: str) -> None:
    settings = experiment(mechanism=MECHANISMS[mechanism])
    world = build_world(settings)
    references, schedule = others(world, 5), usual_schedule(settings)
    shown: list[tuple[int, int]] = []

    class Counted(Silent):
        def advanced(self, what: str, done: int, total: int) -> None:
            shown.append((done, total))

    together, apart = (
        train_references(world, pool_of(world), references, schedule, [1, 3], count, Counted()) for count in (5, 2)
    )
    assert shown == [(done, 3) for done in (1, 2, 3)] + [(done, 9) for done in range(1, 10)]
    for number, name in itertools.product((1, 3), together[3]):
        torch.testing.assert_close(together[number][name], apart[number][name], rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """A weight that is used by its layer and once more: its gradients are not those of the layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x.flatten(1)))
        return self.last(torch.tanh(functional.linear(inner, self.first.weight)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.tanh(self.first(x.flatten(1)))))


class Plain(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


def shared() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(16, 4))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    model[1].register_forward_hook(lambda _module, _given, output: 2 * output)
    return model


# Those that are chains of Linear layers have their gradients from the layers' inputs and errors.
CHAINS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build_model(MlpSettings(hidden=(8, 5)), (1, 4, 4), 4, 0),
    "softmax regression": lambda: build_model(MlpSettings(hidden=()), (1, 4, 4), 4, 0),
    "some without bias": lambda: nn.Sequential(
        nn.Tanh(), nn.Flatten(), nn.Linear(16, 8, bias=False), nn.GELU(), nn.Linear(8, 7), nn.Linear(7, 4, bias=False)
    ),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "used twice": Twice,
    "a module of its own": Plain,
    "shared": shared,
    "hooked": hooked,
    "in place": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
    "rows": lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(12, 4)),
    "flat from 2": lambda: nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(16, 4)),
    "lenet": lambda: build_model(LenetSettings(), (1, 4, 4), 4, 0),
}
NETWORKS = {**CHAINS, **OTHERS}


def cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")


@in_one_test("name", NETWORKS)
def test_gradients_and_operators_are_those_of_each_model(name: str) -> None:
    """Against autograd on each model by itself, and its own operator."""
    torch.manual_seed(0)
    models = [NETWORKS[name]() for _ in range(3)]
    for model in models:
        for value in model.parameters():
            nn.init.normal_(value, std=0.4)
    stack = {name: value.detach().clone() for name, value in stack_module_state(models)[0].items()}
    x, y, weights = torch.randn(3, 6, 1, 4, 4), torch.randint(4, (3, 6)), torch.rand(3, 6)
    network = trained_network(models[0])
    objective = partial(stack_objective, weights, None, None)
    gradients = network.gradients(stack, x, y, objective)
    moved = {name: value.clone() for name, value in stack.items()}
    network.descend(moved, x, y, objective, 0.3)
    sizes = [6, 0, 4]
    operators = list(network.operators(stack, x, y, cross_entropies, 1 << 20, sizes))
    assert isinstance(operators[0], DenseGradients) == (name in OTHERS)
    for index, model in enumerate(models):
        loss = (weights[index] * cross_entropies(model(x[index]), y[index])).sum()
        wanted = dict(
            zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
        )
        size = sizes[index]
        alone = per_example_gradients(model, cross_entropies, x[index, :size], y[index, :size])
        combined = operators[index].combine(weights[index, :size])
        for key, value in wanted.items():
            torch.testing.assert_close(gradients[key][index], value, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moved[key][index], stack[key][index] - 0.3 * value, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(combined[key], alone.combine(weights[index, :size])[key], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(operators[index].norms(), alone.norms(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(16), nn.Dropout(0.5)])
def test_networks_that_cannot_be_stacked_are_refused(layer: nn.Module) -> None:
    with pytest.raises(InputError, match="reference models"):
        mapped_network(nn.Sequential(nn.Flatten(), layer, nn.Linear(16, 4)))


def test_what_does_not_fit_is_refused() -> None:
    settings = experiment()
    world = build_world(settings)
    pool, schedule = pool_of(world), usual_schedule(settings)
    with pytest.raises(InputError, match="at least one"):
        train_references(world, pool, [], schedule, [3])
    with pytest.raises(InputError, match="clients hold"):
        train_references(world, pool, [Reference(0, world.partitions[:3])], schedule, [3])
    with pytest.raises(InputError, match="no client took part in round 4"):
        train_references(world, pool, [Reference(0, world.partitions)], schedule, [4])
    robust = build_world(experiment(federation={"aggregation": "median"}))
    with pytest.raises(InputError, match="aggregation = 'median': reference models"):
        train_references(robust, pool, [Reference(0, world.partitions)], schedule, [3])


def test_a_model_that_diverges_is_told() -> None:
    settings = experiment(training={"learning_rate": 1e9}, model={"activation": "relu"}, federation={"rounds": 9})
    world = build_world(settings)
    with pytest.raises(RunFailedError, match="diverged"):
        train_references(world, pool_of(world), others(world, 2), usual_schedule(settings), [9])
