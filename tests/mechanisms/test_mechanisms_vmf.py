"""The directional mechanism: its edges, its scale, and its mean."""

import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients import DenseGradients, Vector, per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.machinery.base import Mechanism, block_sizes
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

BLOCKS = ["whole", "layer", "size:1", "size:4", "size:99"]


def rows(examples: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Gradients with a matrix, a vector, and a parameter of one number."""
    generator = torch.Generator().manual_seed(31)
    shapes = {"a": (3, 4), "b": (5,), "c": (1,)}
    return {name: torch.randn(examples, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def flat(vector: Vector) -> Tensor:
    return torch.cat([value.flatten() for value in vector.values()])


def cut(vector: Vector, blocks: str) -> tuple[Tensor, ...]:
    """The blocks that the ledger counts."""
    return flat(vector).split(list(block_sizes(blocks, [value.numel() for value in vector.values()])))


def release(mechanism: Mechanism, gradients: dict[str, Tensor], batch_size: int = 1, seed: int = 1) -> Vector:
    return mechanism.release(DenseGradients(gradients), batch_size, stream(seed))


@in_one_test("blocks", BLOCKS)
@in_one_test("kappa", [0.0, 3.0, 1e4, 1e7])
@in_one_test("dtype", [torch.float32, torch.float64])
def test_one_draw_has_the_public_length(blocks: str, kappa: float, dtype: torch.dtype) -> None:
    """A batch of one is one draw: of length ``scale`` in each block that the ledger counts, whatever the gradient's."""
    gradients = {name: 1e3 * value for name, value in rows(1, dtype).items()}
    released = release(VmfMechanism(kappa, blocks, 2.5), gradients)
    assert {name: value.shape for name, value in released.items()} == {
        name: value.shape[1:] for name, value in gradients.items()
    }
    assert all(value.dtype == dtype for value in released.values())
    lengths = [float(part.norm()) for part in cut(released, blocks)]
    assert lengths == pytest.approx(len(lengths) * [2.5], rel=1e-5)


@in_one_test("blocks", BLOCKS)
def test_much_concentration_gives_the_mean_direction(blocks: str) -> None:
    gradients = rows(4)
    released = release(VmfMechanism(1e7, blocks), gradients, batch_size=4)
    each = [cut({name: value[i] for name, value in gradients.items()}, blocks) for i in range(4)]
    for part, *columns in zip(cut(released, blocks), *each, strict=True):
        mean = torch.stack([column / column.norm() for column in columns]).mean(dim=0)
        # The noise of a draw has a length of about sqrt(K / kappa), below 1.5e-3 here.
        assert float((part - mean).norm()) < 5e-3


@pytest.mark.parametrize("kappa", [30.0, 100.0])
def test_draws_are_as_concentrated_as_kappa_says(kappa: float) -> None:
    """The mean cosine is that of the law, a ratio of Bessel functions; 4,000 draws, false alarm below 1e-5."""
    batch, repeats = 100, 40
    operator = DenseGradients({name: value.expand(batch, *value.shape[1:]) for name, value in rows(1).items()})
    direction = flat({name: value[0] for name, value in rows(1).items()})
    direction, order, generator = direction / direction.norm(), direction.numel() / 2, stream(34)
    mean = special.ive(order, kappa) / special.ive(order - 1, kappa)
    variance = 1 - mean**2 - (2 * order - 1) * mean / kappa
    released = [flat(VmfMechanism(kappa).release(operator, batch, generator)) for _ in range(repeats)]
    cosine = statistics.mean(float(total @ direction) for total in released)
    assert abs(cosine - mean) <= 5 * math.sqrt(variance / (batch * repeats))


def test_a_million_dimensions() -> None:
    """No matrix of the square of it (findings/scipy-vmf-memory.sh); the ratio lies between bounds of Amos (1974)."""
    dimension = kappa = 1_000_000
    gradient = torch.ones(1, dimension)
    released = flat(VmfMechanism(kappa).release(DenseGradients({"w": gradient}), 1, stream(35)))
    low, high = (kappa / (shift + math.hypot(shift, kappa)) for shift in (dimension / 2, dimension / 2 - 1))
    cosine = float(released.double().sum()) / math.sqrt(dimension)
    assert low - 6e-3 < cosine < high + 6e-3  # its standard deviation is 1e-3 at most


@in_one_test("blocks", BLOCKS)
def test_an_empty_batch_gives_zero(blocks: str) -> None:
    released = release(VmfMechanism(3.0, blocks), rows(0), batch_size=8)
    assert list(released) == ["a", "b", "c"]
    assert float(flat(released).abs().max()) == 0


def test_the_batch_size_divides() -> None:
    one, eight = (release(VmfMechanism(3.0), rows(4), batch_size=size) for size in (1, 8))
    assert torch.allclose(flat(one), 8 * flat(eight), rtol=1e-12)


def test_only_the_direction_of_a_gradient_counts() -> None:
    """Gradients of very different lengths, some too small or too large to be squared in float32."""
    gradients = rows(6, torch.float32)
    factors = torch.tensor([1e-28, 1e-20, 1.0, 1e4, 1e20, 1e30])
    scaled = {name: value * factors.view(-1, *([1] * (value.ndim - 1))) for name, value in gradients.items()}
    before, after = release(VmfMechanism(20.0), gradients), release(VmfMechanism(20.0), scaled)
    assert torch.allclose(flat(before), flat(after), atol=1e-4)


@in_one_test("blocks", BLOCKS)
def test_repeats_with_the_generator(blocks: str) -> None:
    mechanism = VmfMechanism(0.2, blocks)
    first, again, other = (flat(release(mechanism, rows(5, torch.float32), seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).all()


@in_one_test(
    "mechanism",
    [
        NoMechanism(),
        GaussianMechanism(0.5, 0.1),
        VmfMechanism(50.0),
        VmfMechanism(5.0, "layer"),
        VmfMechanism(2.0, "size:7"),
    ],
)
@in_one_test("examples", [3, 20])
def test_both_operators_give_the_same_release(mechanism: Mechanism, examples: int) -> None:
    """A mechanism sees no more than the operator's products, so that the same seed gives the same vector."""
    with torch.random.fork_rng():
        torch.manual_seed(34)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()
        x, y = torch.randn(examples, 1, 5, 5, dtype=torch.float64), torch.randint(3, (examples,))
    loss = partial(functional.cross_entropy, reduction="none")
    operators = per_example_gradients(model, loss, x, y), dense_gradients(model, loss, x, y, "a test")
    ghost, dense = (mechanism.release(one, 4, stream(35)) for one in operators)
    assert torch.allclose(flat(ghost), flat(dense), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("examples", "kappa"), [(1, 0.0), (3, 0.6)])
def test_one_coordinate_is_a_random_sign(examples: int, kappa: float) -> None:
    """Each draw keeps its sign with probability 1 / (1 + exp(-2 kappa)); false alarm 1e-5 a case."""
    mechanism, gradients = VmfMechanism(kappa), DenseGradients({"a": torch.linspace(1, 2, examples)[:, None]})
    generator, count = stream(32), 500
    sums = [float(mechanism.release(gradients, 1, generator)["a"]) for _ in range(count)]
    kept = (np.array(sums) + examples) / 2
    assert np.allclose(kept, kept.round(), atol=1e-5)
    probabilities = stats.binom(examples, 1 / (1 + math.exp(-2 * kappa))).pmf(np.arange(examples + 1))
    counts = np.bincount(kept.round().astype(int), minlength=examples + 1)
    assert stats.chisquare(counts, count * probabilities).pvalue > 1e-5


@pytest.mark.parametrize(("blocks", "kappa"), [("whole", 9.0), ("layer", 1.0), ("size:1", 2.0), ("size:4", 2.0)])
def test_expected_is_the_mean_of_releases(blocks: str, kappa: float) -> None:
    """Per coordinate within 5.5 standard errors, 18 coordinates: false alarm below 1e-6."""
    gradients = rows(1)
    mechanism = VmfMechanism(kappa, blocks, 2.0)
    operator, generator, count = DenseGradients(gradients), stream(33), 500
    draws = torch.stack([flat(mechanism.release(operator, 1, generator)) for _ in range(count)])
    expected = flat(mechanism.expected({name: value[0] for name, value in gradients.items()}))
    deviations = (draws.mean(dim=0) - expected) / (draws.std(dim=0) / count**0.5)
    assert float(deviations.abs().max()) < 5.5
    assert float((deviations - 0.3 * expected / (draws.std(dim=0) / count**0.5)).abs().max()) > 5.5


@in_one_test("blocks", BLOCKS)
def test_expected_is_differentiable(blocks: str) -> None:
    mechanism = VmfMechanism(6.0, blocks)
    starts = tuple(value[0].clone().requires_grad_() for value in rows(1).values())

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(mechanism.expected(dict(zip("abc", values, strict=True))).values())

    assert torch.autograd.gradcheck(function, starts)


@in_one_test("blocks", BLOCKS)
def test_expected_of_zero_is_zero_with_finite_derivatives(blocks: str) -> None:
    value = torch.zeros(4, requires_grad=True)
    expected = VmfMechanism(6.0, blocks).expected({"a": value})["a"]
    assert torch.equal(expected, torch.zeros(4))
    expected.sum().backward()
    assert value.grad is not None
    assert torch.isfinite(value.grad).all()


@in_one_test("blocks", BLOCKS)
@pytest.mark.parametrize("exponent", range(-44, 13, 2))
def test_expected_has_finite_derivatives_at_any_length(blocks: str, exponent: int) -> None:
    """Against float64, where nothing overflows; below 7e-12 a block counts as zero."""
    start = 10.0**exponent * torch.tensor([3.0, -1.0, 2.0, 0.5])
    pull = torch.tensor([1.0, 2.0, -1.0, 0.3])

    def of(value: Tensor) -> tuple[Tensor, Tensor]:
        value = value.clone().requires_grad_()
        expected = VmfMechanism(6.0, blocks).expected({"a": value})["a"]
        (derivative,) = torch.autograd.grad(expected @ pull.to(value), value)
        return expected.detach(), derivative

    expected, derivative = of(start)
    assert bool(torch.isfinite(expected).all() and torch.isfinite(derivative).all())
    if exponent >= -10:
        exact, slope = of(start.double())
        torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(derivative.double(), slope, rtol=1e-4, atol=float(1e-5 / start.norm()))


@in_one_test(
    ("kappa", "blocks", "scale"),
    [
        (-1, "whole", 1),
        (math.nan, "whole", 1),
        (2e7, "whole", 1),
        (1, "size", 1),
        (1, "size:0", 1),
        (1, "size:-3", 1),
        (1, "size:2.5", 1),
        (1, "size: 2", 1),
        (1, "whole", 0),
        (1, "layer", math.inf),
    ],
)
def test_refuses_settings(kappa: float, blocks: str, scale: float) -> None:
    with pytest.raises(ValueError, match=r" = .*: "):
        VmfMechanism(kappa, blocks, scale)
