"""The heterogeneous Gaussian mechanism: the size of its noise in each coordinate, and the shares.

All seeds are fixed. Each statistical comparison raises a false alarm with probability 1e-6 had they been random.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.machinery.redistribution import Redistribution, layer_shares, public_shares, uniform_shares
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-6
SHAPES = {"a": (3, 4), "b": (5,)}


def some_shares(dtype: torch.dtype = torch.float64, seed: int = 51) -> Redistribution:
    """Uneven over four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    raw = {name: (4 * torch.randn(shape, generator=generator)).double().exp() for name, shape in SHAPES.items()}
    total = sum(float(value.sum()) for value in raw.values())
    return Redistribution({name: (value / total).to(dtype) for name, value in raw.items()})


def rows(examples: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(52)
    sizes = torch.logspace(-3, 3, examples, dtype=torch.float64)
    made = {name: torch.randn(examples, *shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (value * sizes.view(-1, *([1] * (value.ndim - 1)))).to(dtype) for name, value in made.items()}


def flat(vector: Vector) -> NDArray[np.float64]:
    return np.concatenate([value.detach().double().numpy().ravel() for value in vector.values()])


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("examples", [0, 1, 9])
@pytest.mark.parametrize(("sigma", "clip_norm", "batch_size"), [(0.5, 2.0, 1), (3.0, 0.1, 7)])
def test_the_noise_of_each_coordinate_has_deviation_sigma_clip_norm_root_k_r(
    dtype: torch.dtype, examples: int, sigma: float, clip_norm: float, batch_size: int
) -> None:
    """Not K r, as a known implementation has it. Six groups of coordinates; variances follow a chi^2 law."""
    count = 20_000
    powers = dict(zip("abcdef", (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0), strict=True))
    total = count * sum(powers.values())
    shares = Redistribution({name: torch.full((count,), power / total, dtype=dtype) for name, power in powers.items()})
    gradients = DenseGradients({name: torch.ones(examples, count, dtype=dtype) for name in powers})
    quiet, loud = (
        HeterogeneousGaussianMechanism(size, clip_norm, shares).release(gradients, batch_size, stream(53))
        for size in (0.0, sigma)
    )
    law = stats.chi2(count)
    for name, power in powers.items():
        noise = (loud[name] - quiet[name]).double().numpy() * batch_size / (sigma * clip_norm)
        share = 6 * count * power / total
        for claimed, fits in ((share, True), (1.1 * share, False), (0.9 * share, False), (share**2, False)):
            size = (noise**2).sum() / claimed
            assert bool(2 * min(law.cdf(size), law.sf(size)) > ALARM) is fits
        assert stats.kstest(noise / math.sqrt(share), "norm").pvalue > ALARM


@in_one_test("clip_norm", [0.1, 1e3])
@in_one_test("examples", [0, 1, 9])
def test_with_even_shares_it_is_the_gaussian_mechanism(clip_norm: float, examples: int) -> None:
    gradients = DenseGradients(rows(examples))
    shares = uniform_shares({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    heterogeneous = HeterogeneousGaussianMechanism(0.7, clip_norm, shares)
    one, other = (
        mechanism.release(gradients, 3, stream(54)) for mechanism in (heterogeneous, GaussianMechanism(0.7, clip_norm))
    )
    np.testing.assert_allclose(flat(one), flat(other), rtol=1e-12)


def test_standardised_noise_is_as_large_everywhere() -> None:
    shares = some_shares()
    mechanism = HeterogeneousGaussianMechanism(2.0, 3.0, shares)
    zero = DenseGradients({name: torch.zeros(1, *shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    generator = stream(56)
    noise = np.stack([flat(mechanism.standardise(mechanism.release(zero, 1, generator))) for _ in range(1500)])
    assert stats.kstest(noise.ravel() / 6, "norm").pvalue > ALARM


# ---- the shares -----------------------------------------------------------------------------------------------------


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test(
    ("make", "share"),
    [(uniform_shares, lambda name: 1 / 17), (layer_shares, lambda name: {"a": 1 / 24, "b": 1 / 10}[name])],
)
def test_shares_of_shapes(
    make: Callable[[Vector], Redistribution], share: Callable[[str], float], dtype: torch.dtype
) -> None:
    made = make({name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()})
    assert made.dimension == 17
    for name, value in made.shares.items():
        assert value.dtype == dtype
        assert value.shape == SHAPES[name]
        torch.testing.assert_close(value, torch.full_like(value, share(name)))
        torch.testing.assert_close(made.deviations[name], torch.full_like(value, math.sqrt(17 * share(name))))
        torch.testing.assert_close(made.weights[name], torch.full_like(value, 1 / (17 * share(name))))


@in_one_test("wrong", [0.0, -0.1, math.nan, math.inf])
def test_refuses_shares_that_are_none(wrong: float) -> None:
    shares = {"a": torch.full((4,), 0.25)}
    shares["a"][2] = wrong
    with pytest.raises(ValueError, match="not a positive number"):
        Redistribution(shares)


@in_one_test("total", [0.5, 1.01, 17.0])
def test_refuses_shares_of_another_sum(total: float) -> None:
    with pytest.raises(ValueError, match="not to 1"):
        Redistribution({"a": torch.full((4,), total / 4)})


def small_network(kind: str) -> nn.Module:
    torch.manual_seed(57)
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3)).double()


@in_one_test("kind", ["mlp", "conv"])
@in_one_test("inflation", [0.5, 1.0, 3.0])
@in_one_test("count", [1, 5])
def test_public_shares_follow_the_forward_derivative(kind: str, inflation: float, count: int) -> None:
    """Against autograd, one image and one output at a time."""
    model = small_network(kind)
    images = torch.randn(count, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(58))
    sensitivity = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for image in images:
        for output in range(3):
            derivatives = torch.autograd.grad(model(image[None])[0, output], list(model.parameters()))
            for (name, _), value in zip(model.named_parameters(), derivatives, strict=True):
                sensitivity[name] += value.abs() / count
    powers = flat(sensitivity) ** inflation
    expected = 0.9 * powers / powers.sum() + 0.1 / len(powers)
    found = public_shares(model, images, inflation)
    assert list(found.shares) == [name for name, _ in model.named_parameters()]
    np.testing.assert_allclose(flat(found.shares), expected, rtol=1e-10)


def test_public_shares_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network("mlp")
    images = torch.randn(7, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(59))
    whole = public_shares(model, images, 1.0)
    monkeypatch.setattr("fedpriv.mechanisms.machinery.redistribution.PIECE", 2 * whole.dimension)
    np.testing.assert_allclose(flat(public_shares(model, images, 1.0).shares), flat(whole.shares), rtol=1e-12)


def test_public_shares_of_frozen_and_unused_parameters() -> None:
    model = small_network("mlp")
    model[1].weight.requires_grad_(False)
    images = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    assert list(public_shares(model, images, 1.0).shares) == ["1.bias", "3.weight", "3.bias"]
    with torch.no_grad():
        model[3].weight.zero_()
    shares = public_shares(model, images, 100.0)
    assert flat(shares.shares).min() >= 0.1 / shares.dimension * (1 - 1e-12)


def test_public_shares_of_a_network_without_derivatives_are_even() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return 0 * self.layer(x)

    assert np.allclose(flat(public_shares(Constant(), torch.ones(2, 4), 1.0).shares), 1 / 10)


def test_public_shares_of_a_broken_network_are_refused() -> None:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    broken = nn.Sequential(model, nn.Linear(2, 2))
    with pytest.raises(InputError, match="NaN or infinite"):
        public_shares(broken, torch.ones(2, 4), 1.0)
