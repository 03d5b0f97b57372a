"""Clients trained as one stack, against each of them trained alone: the same draws, numbers equal to rounding."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedpriv.clients.cohort import Stack, same_work, stack_of
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.world import World, build_world
from fedpriv.gradients.ghost import Entangled
from fedpriv.gradients.stacked import as_groups, of_patches, one_by_one
from tests.cases import in_one_test

MODELS: dict[str, dict[str, object]] = {
    "mlp": {"name": "mlp", "hidden": [9], "activation": "tanh"},
    "lenet": {"name": "lenet"},
    "dropping": {"name": "tests.clients.test_stack:dropping"},
}
MECHANISMS: dict[str, dict[str, object]] = {
    "none": {"name": "none"},
    "gaussian": {"name": "gaussian", "sigma": 0.5},
    "by layer": {"name": "gaussian", "sigma": 0.5, "clipping": "layer"},
    "hgm": {"name": "hgm", "sigma": 0.5, "redistribution": "layer"},
    "laplace": {"name": "laplace", "scale": 0.01},
    "vmf": {"name": "vmf", "kappa": 300.0},
    "vmf, layer": {"name": "vmf", "kappa": 30.0, "blocks": "layer"},
    "vmf, size": {"name": "vmf", "kappa": 30.0, "blocks": "size:200"},
    "of updates": {"name": "gaussian", "sigma": 0.1, "unit": "update"},
}


def dropping(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A network with code of its own: two branches, a view, normalisation, and dropout twice."""
    return Dropping(shape[0], shape[1] * shape[2], classes)


class Dropping(nn.Module):
    def __init__(self, channels: int, positions: int, classes: int) -> None:
        super().__init__()
        self.left = nn.Conv2d(channels, 4, 3, padding=1)
        self.right = nn.Conv2d(channels, 4, 3, padding="same", padding_mode="reflect", bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.drops = nn.Dropout(0.25), nn.Dropout(0.5)
        self.first, self.second = self.drops
        self.last = nn.Linear(4 * positions, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(functional.relu(self.left(x)) + self.norm(self.right(x)))
        return self.last(self.second(x.view(len(x), -1)))


def world(model: str, mechanism: str, algorithm: str = "fedavg", training: dict[str, object] | None = None) -> World:
    tree: dict[str, object] = {
        "seed": 5,
        "data": {"train_examples": 60},
        "model": MODELS[model],
        "federation": {"clients": 4, "rounds": 3, "algorithm": algorithm},
        "training": {"batch_size": 5, "learning_rate": 0.2, **(training or {})},
        "mechanism": MECHANISMS[mechanism],
        "adversary": {"attacks": []},
        "engine": {"device": "cpu", "precision": "float64", "name": "stacked"},
    }
    return build_world(Experiment.model_validate(tree))


def stacked(built: World) -> Stack:
    stack = stack_of(built)
    assert isinstance(stack, Stack), stack
    return stack


def assert_agree(built: World, tolerance: float = 1e-8) -> None:
    """To rounding, of which a direction of one layer's gradient makes most: that of sigmoid LeNet is short."""
    clients = range(4)
    together = stacked(built).uploads(clients, built.initial, 2)
    assert together is not None
    for client, upload in zip(clients, together, strict=True):
        alone = local_upload(built, client, built.initial, 2)
        assert list(upload.parameters) == list(alone.parameters)
        assert upload.buffers == alone.buffers
        for name, value in alone.parameters.items():
            assert float(value.abs().max()) > 0
            torch.testing.assert_close(upload.parameters[name], value, rtol=0, atol=tolerance)


# Each mechanism with each model, which have the algorithms in turn; an update is of FedAvg.
@pytest.mark.parametrize(
    ("algorithm", "model", "mechanism"),
    [
        ("fedavg" if mechanism == "of updates" else ("fedavg", "fedsgd")[(row + column) % 2], model, mechanism)
        for row, mechanism in enumerate(MECHANISMS)
        for column, model in enumerate(MODELS)
    ],
)
def test_a_stack_gives_what_each_client_gives_alone(algorithm: str, model: str, mechanism: str) -> None:
    assert_agree(world(model, mechanism, algorithm))


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "adam", "learning_rate": 0.01},
        {"momentum": 0.5, "weight_decay": 0.1},
        {"loss": "risk-averting", "risk": 2.0},
        {"sampling": "fixed", "local_epochs": 2},
    ],
)
@pytest.mark.parametrize("mechanism", ["none", "gaussian"])
def test_whatever_the_optimiser_and_the_loss(mechanism: str, training: dict[str, object]) -> None:
    if mechanism == "gaussian" and training.keys() & {"loss", "weight_decay"}:
        pytest.skip("per-example gradients of a mean are what a mechanism protects")
    assert_agree(world("dropping", mechanism, training=training))


@pytest.mark.parametrize(
    ("model", "training", "reason"),
    [
        ("mlp", {"sampling": "poisson"}, "different sizes"),
        ("mixing", {}, "1 mixes the examples of a batch"),
        ("drawing", {}, "computes otherwise with the examples of several models"),
        ("scaling", {}, "computes otherwise with the examples of several models"),
        ("held", {}, "the model (Held) has no rule for many models"),
        ("hooked", {}, "1.weight has a hook on its gradient"),
    ],
)
def test_what_cannot_be_stacked_says_why(
    model: str, training: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, model, MODELS.get(model, {"name": f"tests.clients.test_stack:{model}"}))
    found = stack_of(world(model, "none", training=training))
    assert isinstance(found, Entangled)
    assert reason in found.reason


def mixing(shape: tuple[int, int, int], classes: int) -> nn.Module:
    numbers = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(numbers), nn.Linear(numbers, classes))


def hooked(shape: tuple[int, int, int], classes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
    model[1].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def scaling(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """As quantised networks do, which round by a step that is the same for a batch."""
    return _Scaled(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


class _Scaled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / input.abs().amax())


def drawing(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Its code drops numbers where no layer says so."""
    return _Dropped(shape[0] * shape[1] * shape[2], classes)


class _Dropped(nn.Sequential):
    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(numbers, classes))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.5))


def held(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Held(shape[0] * shape[1] * shape[2], classes)


class Held(nn.Module):
    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers, classes))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


@in_one_test(
    "layer",
    [nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Conv1d(4, 6, 3, stride=2, bias=False), nn.Conv2d(4, 6, 3, dilation=2)],
)
def test_convolutions_as_groups_are_each_models_own(layer: nn.Conv1d | nn.Conv2d) -> None:
    """The way of a GPU, on a CPU, against the layer itself with each model's numbers."""
    draws = torch.Generator().manual_seed(3)
    models = [copy.deepcopy(layer).double() for _ in range(3)]
    for value in (value for model in models for value in model.parameters()):
        value.data = torch.randn(value.shape, generator=draws, dtype=torch.float64)
    own = {name: torch.stack([dict(model.named_parameters())[name] for model in models]) for name in layer.state_dict()}
    x = torch.randn(3 * 2, 4, *[7] * (layer.weight.ndim - 2), generator=draws, dtype=torch.float64)
    expected = torch.cat([model(some) for model, some in zip(models, x.chunk(3), strict=True)])
    torch.testing.assert_close(as_groups(layer, x, own), expected)
    torch.testing.assert_close(one_by_one(layer, x, own), expected)


@in_one_test(
    "layer",
    [
        nn.Conv2d(1, 6, (3, 5), stride=2, padding=2),
        nn.Conv1d(1, 6, 3, dilation=2, bias=False),
        nn.Conv2d(1, 6, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(1, 6, 3, padding="same"),
    ],
)
def test_convolutions_of_one_channel_are_products_of_patches(layer: nn.Conv1d | nn.Conv2d) -> None:
    """Values, and the gradient of each model's numbers by autograd through the layer itself."""
    draws = torch.Generator().manual_seed(4)
    own = {
        name: torch.randn(3, *value.shape, generator=draws, dtype=torch.float64, requires_grad=True)
        for name, value in layer.state_dict().items()
    }
    x = torch.randn(3 * 2, 1, *[7] * (layer.weight.ndim - 2), generator=draws, dtype=torch.float64)
    each = [
        functional_call(layer, {name: value[row] for name, value in own.items()}, some)
        for row, some in enumerate(x.chunk(3))
    ]
    expected, found = torch.cat(each), of_patches(layer, x, own)
    torch.testing.assert_close(found, expected)
    along = torch.randn(expected.shape, generator=draws, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(value, list(own.values()), along) for value in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_clients_of_other_work_are_not_of_one_stack() -> None:
    plans = copy.copy(world("mlp", "none").plans)
    assert len({same_work(plan) for plan in plans}) == 1
    shares = {"data": {"partition": "dirichlet", "alpha": 0.2}, "seed": 5, "training": {"batch_size": 2}}
    uneven = build_world(Experiment.model_validate({**shares, "federation": {"algorithm": "fedavg", "clients": 5}}))
    assert len({same_work(plan) for plan in uneven.plans}) == len({len(rows) // 2 for rows in uneven.partitions})


def test_memory_bounds_how_many_are_trained_at_once() -> None:
    built = world("mlp", "none")
    smaller = built.experiment.model_copy(
        update={"engine": built.experiment.engine.model_copy(update={"gradient_memory": 1})}
    )
    assert 1 <= stacked(build_world(smaller)).most < stacked(built).most
