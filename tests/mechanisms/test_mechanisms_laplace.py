"""The Laplace mechanism: L1 clipping against a loop in numpy, the law of its noise against scipy's.

All seeds are fixed. Each statistical comparison raises a false alarm with probability 1e-6 had they been random.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms.laplace import LaplaceMechanism, laplace_quantile
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-6


def rows(examples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(41)
    sizes = torch.logspace(-3, 3, examples, dtype=torch.float64)
    made = {"a": torch.randn(examples, 3, 4, generator=generator), "b": torch.randn(examples, 5, generator=generator)}
    return {name: (value * sizes.view(-1, *([1] * (value.ndim - 1)))).to(dtype) for name, value in made.items()}


def flat(vector: Vector) -> NDArray[np.float64]:
    return np.concatenate([value.double().numpy().ravel() for value in vector.values()])


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("examples", [0, 1, 2, 9])
@in_one_test("clip_norm", [1e-3, 1.0, 1e3])
def test_clips_each_example_in_l1(dtype: torch.dtype, examples: int, clip_norm: float) -> None:
    gradients = rows(examples, dtype)
    expected = np.zeros(17)
    for i in range(examples):
        one = flat({name: value[i] for name, value in gradients.items()})
        expected += one * min(1.0, clip_norm / np.abs(one).sum())
    released = LaplaceMechanism(0.0, clip_norm).release(DenseGradients(gradients), 4, stream())
    assert released["a"].shape == (3, 4)
    assert released["a"].dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(flat(released), expected / 4, rtol=tolerance, atol=tolerance * clip_norm)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=npst.arrays(np.float64, (3, 6), elements=st.floats(-1e30, 1e30, allow_subnormal=False)),
    clip_norm=st.sampled_from([1e-9, 1e-3, 1.0, 1e9]),
    double=st.booleans(),
)
def test_no_example_moves_the_sum_by_more_than_the_clipping_norm(
    values: NDArray[np.float64], clip_norm: float, double: bool
) -> None:
    """Also for zero and for huge gradients; those that float32 cannot hold are refused."""
    gradient = torch.from_numpy(values).to(torch.float64 if double else torch.float32)
    for one in gradient:
        released = LaplaceMechanism(0.0, clip_norm).release(
            DenseGradients({"a": one[None, :4], "b": one[None, 4:]}), 1, stream()
        )
        slack = 1e-12 if double else 1e-5
        assert np.abs(flat(released)).sum() <= clip_norm * (1 + slack)


@pytest.mark.parametrize(
    ("dtype", "examples", "scale", "clip_norm", "batch_size"),
    [
        *((torch.float32, 0, 0.5, 2.0, 1), (torch.float64, 1, 30.0, 0.1, 7)),
        *((torch.float32, 9, 30.0, 0.1, 7), (torch.float64, 9, 0.5, 2.0, 1)),
    ],
)
def test_noise_has_the_configured_law_for_any_batch(
    dtype: torch.dtype, examples: int, scale: float, clip_norm: float, batch_size: int
) -> None:
    """Kolmogorov-Smirnov against scipy's Laplace law; 5 % more or less would show."""
    count = 100_000
    gradients = DenseGradients(
        {"a": torch.ones(examples, count // 2, dtype=dtype), "b": torch.ones(examples, count // 2, dtype=dtype)}
    )
    quiet = LaplaceMechanism(0.0, clip_norm).release(gradients, batch_size, stream())
    loud = LaplaceMechanism(scale, clip_norm).release(gradients, batch_size, stream(42))
    noise = flat(loud) - flat(quiet)
    claimed = scale * clip_norm / batch_size
    for factor, fits in ((1.0, True), (1.05, False), (0.95, False)):
        assert bool(stats.kstest(noise, stats.laplace(scale=factor * claimed).cdf).pvalue > ALARM) is fits
    signs = stats.binomtest(int((noise > 0).sum()), count).pvalue
    assert signs > ALARM


def test_both_tails_have_their_weight() -> None:
    """Four million draws in float32: the numbers beyond 3, 6, 9 and 12 scales are binomial, on either side."""
    count = 4_000_000
    zero = DenseGradients({"a": torch.zeros(1, count)})
    noise = LaplaceMechanism(2.0, 3.0).release(zero, 1, stream(43))["a"].double() / 6
    assert torch.isfinite(noise).all()
    for bound in (3, 6, 9, 12):
        for beyond in (int((noise > bound).sum()), int((noise < -bound).sum())):
            assert stats.binomtest(beyond, count, math.exp(-bound) / 2).pvalue > ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_uniform_number_gives_a_finite_one(dtype: torch.dtype) -> None:
    """The ends of the range and its middle, where a wrong formula gives infinity; elsewhere scipy's quantiles."""
    last = 1 - torch.finfo(dtype).eps / 2
    edges = torch.tensor([0.0, torch.finfo(dtype).eps / 2, 0.5 - torch.finfo(dtype).eps / 2, 0.5, last], dtype=dtype)
    sizes = laplace_quantile(edges)
    assert torch.isfinite(sizes).all()
    assert sizes[0] == 0 and sizes[3] == 0
    assert sizes[2] > 15 and sizes[4] < -15
    uniform = torch.linspace(0.001, 0.999, 999, dtype=dtype)
    known = uniform.double().numpy()
    expected = np.where(known < 0.5, stats.laplace.isf(0.5 - known), stats.laplace.ppf(1 - known))
    np.testing.assert_allclose(laplace_quantile(uniform).double().numpy(), expected, rtol=0, atol=3e-4)


def test_a_zero_gradient_stays_zero() -> None:
    released = LaplaceMechanism(0.0, 1.0).release(DenseGradients({"a": torch.zeros(3, 4)}), 3, stream())
    assert torch.equal(released["a"], torch.zeros(4))


@pytest.mark.parametrize("clip_norm", [0.1, 1e3])
def test_expected_is_the_release_without_noise(clip_norm: float) -> None:
    gradients = rows(1, torch.float64)
    expected = LaplaceMechanism(2.0, clip_norm).expected({name: value[0] for name, value in gradients.items()})
    quiet = LaplaceMechanism(0.0, clip_norm).release(DenseGradients(gradients), 1, stream())
    np.testing.assert_allclose(flat(expected), flat(quiet), rtol=1e-13)


@pytest.mark.parametrize("size", [0.01, 5.0])
def test_expected_is_differentiable(size: float) -> None:
    start = size * torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(44))
    start.requires_grad_()
    assert torch.autograd.gradcheck(lambda value: LaplaceMechanism(2.0, 1.0).expected({"a": value})["a"], (start,))


def test_expected_of_zero_has_finite_derivatives() -> None:
    value = torch.zeros(4, requires_grad=True)
    LaplaceMechanism(2.0, 1.0).expected({"a": value})["a"].sum().backward()
    assert value.grad is not None
    assert torch.isfinite(value.grad).all()


@in_one_test(("scale", "clip_norm"), [(-1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, -1), (1, math.inf)])
def test_refuses_settings(scale: float, clip_norm: float) -> None:
    with pytest.raises(ValueError, match=r" = .*: "):
        LaplaceMechanism(scale, clip_norm)


def test_refuses_a_batch_size_of_zero() -> None:
    with pytest.raises(ValueError, match="batch_size = 0"):
        LaplaceMechanism(1.0, 1.0).release(DenseGradients(rows(2, torch.float64)), 0, stream())
