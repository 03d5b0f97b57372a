"""What a model has to be, and what is left untouched in it."""

import copy

import pytest
import torch
from gradient_models import NoisyPairs, build, loss, one_by_one
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import seeded_generators
from fedpriv.gradients import Route, find_route, per_example_gradients
from fedpriv.gradients.dense import Loss
from tests.cases import in_one_test


@in_one_test("layer", [nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, track_running_stats=True)])
@in_one_test("training", [True, False])
def test_refuses_layers_that_couple_examples(layer: nn.Module, training: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(2, 2, 1), layer), nn.Flatten(), nn.Linear(8, 3)).train(training)
    with pytest.raises(InputError, match=rf"layer 0\.1 \({type(layer).__name__}\) .* GroupNorm") as caught:
        per_example_gradients(model, loss, torch.randn(3, 2, 2, 2), torch.zeros(3, dtype=torch.long))
    assert "\n" not in str(caught.value)


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


@in_one_test(
    ("model", "message"),
    [
        (nn.Flatten(), "Flatten has no parameter that is trained"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no parameter that is trained"),
        (_mixed(), "several kinds: torch.float32 on cpu, torch.float64 on cpu"),
    ],
)
def test_refuses_models(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        per_example_gradients(model, loss, torch.randn(3, 2), torch.zeros(3, dtype=torch.long))


def test_refuses_different_lengths() -> None:
    with pytest.raises(InputError, match="3 inputs and 2 targets"):
        per_example_gradients(nn.Linear(2, 2), loss, torch.randn(3, 2), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("name", ["mlp", "twice"])
def test_refuses_a_loss_that_is_not_one_number_an_example(name: str) -> None:
    model, x, y = build(name, 3, torch.float32)
    with pytest.raises(InputError, match=r"has shape \(\); allowed: \(\d,\), one number each"):
        per_example_gradients(model, lambda outputs, targets: loss(outputs, targets).mean(), x, y)


@in_one_test("name", ["conv", "own-layer", "frozen", "twice"])
@in_one_test("training", [True, False])
def test_leaves_the_model_alone(name: str, training: bool) -> None:
    model, x, y = build(name, 3, torch.float32)
    model.train(training)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        per_example_gradients(model, loss, x, y)
    assert all(module.training is training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_go_when_the_model_fails() -> None:
    model, x, y = build("conv", 3, torch.float32)
    with pytest.raises(RuntimeError):
        per_example_gradients(model, loss, x[:, :, :2], y)
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_of_the_user_are_respected() -> None:
    """A hook that changes a layer's output is part of the model: the layer is taken as a whole."""
    model, x, y = build("mlp", 4, torch.float64)
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    made = per_example_gradients(model, loss, x, y)
    trained = dict(model.named_parameters())
    expected = torch.autograd.grad(loss(model(x), y).sum(), list(trained.values()))
    combined = made.combine(torch.ones(4, dtype=torch.float64))
    assert all(torch.allclose(combined[name], value) for name, value in zip(trained, expected, strict=True))


@pytest.mark.parametrize("way", ["ghost", "dense"])
def test_dropout_draws_anew_for_each_example(way: str) -> None:
    middle = nn.Identity() if way == "ghost" else NoisyPairs(20, 20, 20)
    model = nn.Sequential(nn.Dropout(0.5), middle, nn.Flatten(), nn.Linear(20, 3))
    made = per_example_gradients(model, loss, torch.ones(40, 1, 1, 20), torch.zeros(40, dtype=torch.long))
    assert ("" in made.routes) == (way == "dense")
    directions = made.gram() / torch.outer(made.norms(), made.norms())
    # Two masks of 20 coins agree with probability 1e-6, 780 pairs: false alarm below 1e-3.
    assert float((directions - torch.eye(40)).max()) < 0.999


def test_a_part_that_does_not_repeat_itself_makes_the_model_dense() -> None:
    model = nn.Sequential(nn.Linear(6, 6), NoisyPairs(6, 6, 6), nn.Linear(6, 5))
    x, y = torch.randn(7, 6), torch.zeros(7, dtype=torch.long)
    reason = "1 (NoisyPairs) does not repeat what it did in the batch"
    assert per_example_gradients(model, loss, x, y).routes == {"": f"dense: {reason}"}
    with seeded_generators(0, x.device):  # as runs look for the route: nothing may be drawn again by chance
        assert find_route(model, loss, x, y).dense == reason
    assert "0" in per_example_gradients(model.eval(), loss, x, y).routes


class Approximate(nn.Module):
    """Adds a little to an image that is computed alone, as rounding does."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + (1e-2 if len(x) == 1 else 0.0)


def rows_of_others(largest: float, route: Route | None) -> tuple[Tensor, ...]:
    """The gradients of all examples but the first, whose numbers are as large as that."""
    return tuple(per_example_gradients(*approximate(largest), route=route).rows(1, 4).values())


def approximate(largest: float) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Approximate(), nn.Linear(6, 5)), torch.randn(4, 6)
    x[0] *= largest
    return model, loss, x, torch.arange(4)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("dense", [True, False])
def test_no_example_decides_how_the_others_are_computed(dense: bool) -> None:
    """One whose numbers are large hides that a layer does not repeat itself, if the batch is asked."""
    route = Route("a test") if dense else route_of(1)
    assert same(rows_of_others(1, route), rows_of_others(1e4, route))


def route_of(largest: float) -> Route:
    return find_route(*approximate(largest))


class Twice(nn.Module):
    """Calls its layer once more if an image is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        return torch.where(x[:, :1] > 9, self.layer(made), made) if bool((x > 9).any()) else made


def test_a_batch_that_does_not_take_its_route_is_refused() -> None:
    model, x, y = Twice(), torch.zeros(4, 5), torch.arange(4)
    route = find_route(model, loss, x, y)
    x[2] = 10
    assert find_route(model, loss, x, y) != route
    with pytest.raises(InputError, match=r"Twice works otherwise on these examples: .* calls linear"):
        per_example_gradients(model, loss, x, y, route=route)


@pytest.mark.parametrize(("name", "length"), [("language-model", 8), ("attention", 3)])
def test_sequences_as_long_as_the_batch(name: str, length: int) -> None:
    """With one example more it is seen which axis counts them; the oracle: autograd, one example at a time."""
    model, x, y = build(name, length, torch.float64)
    route = find_route(model, loss, x, y)
    made = per_example_gradients(model, loss, x, y, route=route)
    assert all(way.startswith("ghost: ") for way in made.routes.values())
    for key, rows in one_by_one(model, x, y).items():
        assert torch.allclose(made.rows(0, len(x))[key], rows, rtol=1e-9, atol=1e-11)


def test_an_empty_batch_has_a_route() -> None:
    assert find_route(Twice(), loss, torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)) == Route()


class Attended(nn.Module):
    """Attention without a rule, because it holds a parameter itself; what a bias of keys adds cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (torch.softmax(self.query(x) @ self.key(x).mT, dim=2) @ self.value(x))


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("seed", range(3))
def test_a_gradient_that_is_rounding_alone_makes_no_model_dense(dtype: torch.dtype, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 16), Attended(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)
        x = torch.randn(5, 4, 12, dtype=dtype)
    assert not find_route(model, loss, x, torch.arange(5) % 3).dense
