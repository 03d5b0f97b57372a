"""Gradients of dummy batches by both routes against plain autograd, one batch at a time, in float64."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_networks import CLASSES, GHOST, SHAPE, VMAP, network, seeded
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients import convolution
from fedpriv.attacks.reconstruction.dummy_gradients.factors import DummyGradients, Targets
from fedpriv.attacks.reconstruction.dummy_gradients.network import (
    Network,
    dummy_gradients,
    ghost_dummies,
    ghost_obstacle,
    is_plain,
    written_dummies,
)
from fedpriv.gradients import Vector
from tests.cases import in_one_test

ROWS = 4
OWNERS = [0, 0, 1, 2]  # two restarts of a victim, one of each of two others


def dummies(examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(ROWS, examples, *SHAPE, generator=generator).double()
    return images, torch.randn(ROWS, examples, CLASSES, generator=generator).double().softmax(dim=2)


def trained(model: nn.Module) -> Vector:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def plain(model: nn.Module, images: Tensor, labels: Tensor) -> Vector:
    """The gradient of one batch, differentiable, as one writes it for a single victim."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = F.cross_entropy(model(images), labels)  # torch's own for label probabilities
    found = torch.autograd.grad(loss, list(named.values()), create_graph=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def plain_units(model: nn.Module, images: Tensor, labels: Tensor, each: bool) -> list[list[Vector]]:
    units = [slice(k, k + 1) for k in range(images.shape[1])] if each else [slice(None)]
    return [[plain(model, images[row, unit], labels[row, unit]) for unit in units] for row in range(len(images))]


def inner(one: Vector, other: Vector, block: tuple[str, ...]) -> Tensor:
    return torch.stack([(one[name] * other[name]).sum() for name in block]).sum()


def vectors(like: Vector, count: int) -> list[Vector]:
    generator = torch.Generator().manual_seed(9)
    return [
        {name: torch.randn(value.shape, generator=generator).double() for name, value in like.items()}
        for _ in range(count)
    ]


def made(name: str, model: nn.Module, images: Tensor, labels: Tensor, each: bool) -> DummyGradients:
    """By the route that the name says, whatever the network finds itself."""
    build = ghost_dummies if name in GHOST else written_dummies
    return build(Network(model), trained(model), images, labels, each=each)


@pytest.mark.parametrize("name", [*GHOST, "twice", "bare", "temperature", "functional", "transposed", "deciding"])
@in_one_test("examples", [1, 3])
@in_one_test("each", [True, False])
def test_everything_that_is_asked_and_its_derivatives(name: str, examples: int, each: bool) -> None:
    model = network(name)
    images, labels = (value.requires_grad_() for value in dummies(examples))
    found = made(name, model, images, labels, each)
    wanted = plain_units(model, images, labels, each)
    targets = vectors(trained(model), 3)
    names = found.names
    assert names == tuple(trained(model))
    for block in (None, names[:1], names[1:]):
        chosen = names if block is None else block
        norms = torch.stack([torch.stack([inner(g, g, chosen) for g in row]) for row in wanted])
        gram = torch.stack(
            [torch.stack([torch.stack([inner(g, h, chosen) for h in row]) for g in row]) for row in wanted]
        )
        dots = torch.stack(
            [torch.stack([inner(g, targets[OWNERS[i]], chosen) for g in row]) for i, row in enumerate(wanted)]
        )
        pairs = [
            (found.squared(block), norms),
            (found.gram(block), gram),
            (found.dot(Targets(targets, OWNERS), block), dots),
        ]
        for given, value in pairs:
            torch.testing.assert_close(given, value, rtol=1e-9, atol=1e-13)
            weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(1)).double()
            idle = 0 * (images.sum() + labels.sum())  # a layer that is not used depends on nothing
            slopes = (
                torch.autograd.grad((result * weights).sum() + idle, (images, labels), retain_graph=True)
                for result in (given, value)
            )
            for one, other in zip(*slopes, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)
    for key, value in found.rows().items():
        for i, row in enumerate(wanted):
            torch.testing.assert_close(value[i], torch.stack([g[key] for g in row]), rtol=1e-9, atol=1e-13)


def gates(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(144, 40), nn.Linear(40, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function(8 * self.first(x.flatten(1))))

    return seeded(Gated)


@in_one_test(
    "function", [F.hardsigmoid, nn.Hardsigmoid(), nn.Hardsigmoid(inplace=True), lambda x: x * F.hardsigmoid(x)]
)
@in_one_test("build", [ghost_dummies, written_dummies, dummy_gradients])
def test_hardsigmoid_has_its_second_derivative(function: Callable[[Tensor], Tensor], build: Callable[..., Any]) -> None:
    """Which torch lacks; the oracle computes the same by other functions."""
    model, images, labels = gates(function), *dummies(3)
    usual = images.requires_grad_()
    found = build(Network(model), trained(model), usual, labels, each=False).rows()
    is_product = getattr(function, "__name__", "") == "<lambda>"
    twin = gates(lambda x: (x if is_product else 1) * F.relu6(x + 3) / 6)
    for row in range(ROWS):
        wanted = plain(twin, images[row], labels[row])
        for key, value in wanted.items():
            torch.testing.assert_close(found[key][row, 0], value, rtol=1e-9, atol=1e-13)
        slopes = (
            torch.autograd.grad(sum(value.sin().sum() for value in each.values()), images, retain_graph=True)[0][row]
            for each in ({key: value[row, 0] for key, value in found.items()}, wanted)
        )
        torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-12)


@in_one_test("name", GHOST)
def test_ghost_route_is_open(name: str) -> None:
    assert ghost_obstacle(Network(network(name)), torch.Size(SHAPE), CLASSES) == ""


def plain_layers(**changes: nn.Module) -> nn.Sequential:
    layers: dict[str, nn.Module] = {"conv": nn.Conv2d(1, 2, 3), "act": nn.ReLU(), "pool": nn.MaxPool2d(2)}
    return nn.Sequential(OrderedDict(layers | {"flat": nn.Flatten(), "out": nn.Linear(8, CLASSES)} | changes))


def hooked() -> nn.Sequential:
    model = plain_layers()
    model.act.register_forward_hook(lambda layer, inputs, output: output - output.mean(dim=0))
    return model


def tied() -> nn.Sequential:
    model = plain_layers(out=nn.Linear(8, 8), more=nn.Linear(8, 8))
    model.more.weight = model.out.weight
    return model


def replaced() -> nn.Sequential:
    model = plain_layers()
    model.act.forward = lambda x: x - x.mean(dim=0)  # type: ignore[method-assign]
    return model


def test_layers_of_torch_in_a_row_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds the same; whatever could differ from layer by layer is tried."""
    for model in (plain_layers(), plain_layers(act=nn.Tanh(), pool=nn.AvgPool2d(2))):
        assert is_plain(model)
        network = Network(model)
        monkeypatch.setattr(network, "is_plain", False)
        assert ghost_obstacle(network, torch.Size((1, 6, 6)), CLASSES) == ""
    once = nn.ReLU()
    other = (
        plain_layers(act=nn.ReLU(inplace=True)), plain_layers(act=nn.BatchNorm2d(2)), plain_layers(act=once, last=once),
        plain_layers(conv=nn.Conv2d(1, 2, 3, padding_mode="circular")), plain_layers(flat=nn.Flatten(0)), hooked(),
        tied(), replaced(), nn.Sequential(plain_layers()), type("Own", (nn.Sequential,), {})(nn.Linear(2, 2)),
    )  # fmt: skip
    assert not any(map(is_plain, other))
    assert not Network(plain_layers(), lambda logits, labels: logits.square().sum(dim=1)).is_plain


def test_a_network_that_keeps_what_it_computed_is_copied() -> None:
    """As spiking networks keep their potentials, in autograd's graph, until the next pass."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(144, 6), nn.Linear(6, CLASSES)
            self.states: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.states["potential"] = self.first(x.flatten(1)).tanh()
            return self.last(self.states["potential"])

    model, (images, labels) = seeded(Keeping), dummies(1)
    wanted = plain(model, images[0], labels[0])
    found = written_dummies(Network(model), trained(model), images[:1], labels[:1], each=False).rows()
    assert model.states["potential"].grad_fn is not None
    for key, value in wanted.items():
        torch.testing.assert_close(found[key][0, 0], value, rtol=1e-9, atol=1e-13)


@in_one_test("name", VMAP)
def test_ghost_route_is_closed_and_says_why(name: str) -> None:
    """By what the network did: several of these have nothing but Linear layers."""
    assert VMAP[name][1] in ghost_obstacle(Network(network(name)), torch.Size(SHAPE), CLASSES)


@pytest.mark.parametrize("name", [*GHOST, *(name for name in VMAP if name != "changed")])
@in_one_test("zero", [True, False])
def test_the_route_that_is_found_gives_each_batch_its_own_gradient(name: str, zero: bool) -> None:
    """Also where the network's own parameters, on which nothing must depend, are zero."""
    model = network(name)
    parameters = trained(model)
    images, labels = dummies(3)
    blank = network(name)
    if zero:
        with torch.no_grad():
            for value in blank.parameters():
                if value.requires_grad:
                    value.zero_()
    found = dummy_gradients(Network(blank), parameters, images, labels, each=False).rows()
    if isinstance(getattr(model, "drop", None), nn.Dropout):
        model.drop.eval()
    for row in range(ROWS):
        for key, value in plain(model, images[row], labels[row]).items():
            torch.testing.assert_close(found[key][row, 0], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_targets_are_found_and_give_the_same_products(dtype: torch.dtype) -> None:
    """Uploads of one example without noise are products of two vectors; with noise they are not."""
    generator = torch.Generator().manual_seed(2)
    layers = (nn.Flatten, lambda: nn.Linear(144, 80), nn.Sigmoid, lambda: nn.Linear(80, CLASSES))
    model = seeded(lambda: nn.Sequential(*(layer() for layer in layers))).to(dtype)
    images, labels = (value.to(dtype) for value in dummies(1))
    clean = [{k: v.detach() for k, v in plain(model, images[row], labels[row]).items()} for row in range(3)]
    noisy = [{k: v + 1e-4 * torch.randn(v.shape, generator=generator).to(v) for k, v in one.items()} for one in clean]
    for targets, kind in ((clean, "_LowRank"), (noisy, "_Stacked"), ([*clean[:2], noisy[0]], "_Stacked")):
        rows = Targets(targets, OWNERS)
        assert type(rows.matrix("1.weight")).__name__ == kind
        found = ghost_dummies(Network(model), trained(model), images, labels, each=False).dot(rows)
        for row, one in enumerate(plain_units(model, images, labels, each=False)):
            pair = [{k: v.double() for k, v in g.items()} for g in (one[0], targets[OWNERS[row]])]
            exact = inner(*pair, tuple(one[0])).item()
            size = (inner(pair[0], pair[0], tuple(one[0])) * inner(pair[1], pair[1], tuple(one[0]))).sqrt().item()
            assert found[row].item() == pytest.approx(exact, abs=(1e-5 if dtype == torch.float32 else 1e-13) * size)


@in_one_test("owners", [[0, 0, 1, 2], [2, 1, 0, 0], [0, 1, 0, 2], [1, 1, 1, 1]])
@in_one_test("hidden", [6, 600])
def test_targets_of_any_order_and_size(owners: list[int], hidden: int) -> None:
    """Small matrices are stacked, large ones used where they lie: one by one, in strips, or for several rows."""
    layers = (nn.Flatten, lambda: nn.Linear(144, hidden), nn.Sigmoid, lambda: nn.Linear(hidden, CLASSES))
    model = seeded(lambda: nn.Sequential(*(layer() for layer in layers)))
    images, labels = dummies(2)
    images.requires_grad_()
    targets = vectors(trained(model), 3)
    for rows in (torch.arange(4), torch.tensor([3, 1])):
        kept = Targets(targets, owners).select(rows.tolist())
        found = ghost_dummies(Network(model), trained(model), images[rows], labels[rows], each=False).dot(kept)
        units = plain_units(model, images[rows], labels[rows], each=False)
        wanted = [
            inner(one[0], targets[owners[row]], tuple(one[0])) for one, row in zip(units, rows.tolist(), strict=True)
        ]
        torch.testing.assert_close(found[:, 0], torch.stack(wanted), rtol=1e-9, atol=1e-12)
        pair = [
            torch.autograd.grad(value.sum(), images, retain_graph=True)[0] for value in (found, torch.stack(wanted))
        ]
        torch.testing.assert_close(*pair, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (3, {}),
        (5, {"stride": 2, "padding": 2}),
        ((3, 2), {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}),
        (1, {"stride": 3}),
    ],
)
@pytest.mark.parametrize("most", [0, 2**18])
def test_a_convolution_by_patches_and_its_derivatives(
    monkeypatch: pytest.MonkeyPatch, most: int, kernel: Any, options: dict[str, Any], images: int, bias: bool
) -> None:
    """The output, the kernel's gradient, and what that gives the image, as torch's own convolution has them."""
    monkeypatch.setattr(convolution, "FEW_PRODUCTS", most)
    layer = seeded(lambda: nn.Conv2d(2, 3, kernel, bias=bias, **options)).double()
    x = torch.randn(images, 2, 9, 8, generator=torch.Generator().manual_seed(17)).double().requires_grad_()

    def asked(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        output = run(x)
        gradients = torch.autograd.grad(output.square().sum(), list(layer.parameters()), create_graph=True)
        (felt,) = torch.autograd.grad(sum(value.pow(3).sum() for value in gradients), x)
        return [output, *gradients, felt]

    for ours, theirs in zip(asked(convolution.by_patches(layer)), asked(layer), strict=True):
        torch.testing.assert_close(ours, theirs)
