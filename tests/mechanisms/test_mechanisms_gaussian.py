"""Clipping against a loop, noise against its configured size.

All seeds are fixed. Each statistical comparison raises a false alarm with probability 1e-6 had they been random.
"""

import math
from typing import Literal

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
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.none import NoMechanism
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-6


def rows(examples: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(21)
    sizes = torch.logspace(-2, 2, examples, dtype=torch.float64) if examples > 1 else torch.ones(examples)
    made = {"a": torch.randn(examples, 3, 4, generator=generator), "b": torch.randn(examples, 5, generator=generator)}
    return {name: (value * sizes.view(-1, *([1] * (value.ndim - 1)))).to(dtype) for name, value in made.items()}


def flat(vector: Vector) -> Tensor:
    return torch.cat([value.flatten() for value in vector.values()])


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("examples", [1, 2, 9])
@in_one_test("clip_norm", [1e-3, 1.0, 1e3])
def test_clips_each_example(dtype: torch.dtype, examples: int, clip_norm: float) -> None:
    gradients = rows(examples, dtype)
    expected = torch.zeros(17, dtype=torch.float64)
    for i in range(examples):
        one = torch.cat([value[i].flatten() for value in gradients.values()]).double()
        expected += one * min(1.0, clip_norm / float(one.norm()))
    released = GaussianMechanism(0.0, clip_norm).release(DenseGradients(gradients), 4, stream())
    assert released["a"].shape == (3, 4)
    assert released["a"].dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(flat(released).double(), expected / 4, rtol=tolerance, atol=tolerance * clip_norm)


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("examples", [0, 1, 2, 9])
@in_one_test("clip_norm", [1e-3, 1.0, 1e3])
def test_clips_each_tensor_of_each_example(dtype: torch.dtype, examples: int, clip_norm: float) -> None:
    gradients = rows(examples, dtype)
    expected = {name: np.zeros(value.shape[1:]) for name, value in gradients.items()}
    for name, value in gradients.items():
        for one in value.double().numpy():
            expected[name] += one * min(1.0, clip_norm / math.sqrt(2) / np.linalg.norm(one))
    mechanism = GaussianMechanism(0.0, clip_norm, "layer")
    released = mechanism.release(DenseGradients(gradients), 4, stream())
    assert list(released) == ["a", "b"]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name, value in released.items():
        assert value.dtype == dtype
        np.testing.assert_allclose(
            value.double().numpy(), expected[name] / 4, rtol=tolerance, atol=tolerance * clip_norm
        )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    values=npst.arrays(np.float64, (4, 6), elements=st.floats(-1e18, 1e18, allow_subnormal=False)),
    clip_norm=st.sampled_from([1e-9, 1e-3, 1.0, 1e9]),
    double=st.booleans(),
    clipping=st.sampled_from(["flat", "layer"]),
)
def test_no_example_moves_the_sum_by_more_than_the_clipping_norm(
    values: NDArray[np.float64], clip_norm: float, double: bool, clipping: Literal["flat", "layer"]
) -> None:
    """Products of zero, small and huge numbers; with clipping by layer the whole is bounded, too."""
    dtype = torch.float64 if double else torch.float32
    for one in torch.from_numpy(values).to(dtype):
        gradients = DenseGradients({"a": one[None, :3], "b": one[None, 3:5], "c": one[None, 5:]})
        released = GaussianMechanism(0.0, clip_norm, clipping).release(gradients, 1, stream())
        assert float(flat(released).double().norm()) <= clip_norm * (1 + (1e-12 if double else 1e-5))


@in_one_test("clipping", ["flat", "layer"])
@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("examples", [0, 1, 9])
@in_one_test(("sigma", "clip_norm", "batch_size"), [(0.5, 2.0, 1), (3.0, 0.1, 7)])
def test_noise_has_the_configured_size_for_any_batch(
    clipping: Literal["flat", "layer"],
    dtype: torch.dtype,
    examples: int,
    sigma: float,
    clip_norm: float,
    batch_size: int,
) -> None:
    """Also for an empty batch and whatever is clipped; the variance of n normal numbers follows a chi^2 law."""
    count = 40_000
    ones = torch.ones(examples, count // 2, dtype=dtype)
    gradients = DenseGradients({"a": ones, "b": ones})
    quiet, loud = (
        GaussianMechanism(size, clip_norm, clipping).release(gradients, batch_size, stream(22)) for size in (0.0, sigma)
    )
    noise = (flat(loud) - flat(quiet)).double() * batch_size / clip_norm
    total = float(noise.square().sum())
    for claimed, fits in ((sigma, True), (1.05 * sigma, False), (0.95 * sigma, False)):
        law = stats.chi2(count)
        pvalue = 2 * min(law.cdf(total / claimed**2), law.sf(total / claimed**2))
        assert bool(pvalue > ALARM) is fits
    assert stats.kstest((noise / sigma).numpy(), "norm").pvalue > ALARM


def test_a_zero_gradient_stays_zero() -> None:
    released = GaussianMechanism(0.0, 1.0).release(DenseGradients({"a": torch.zeros(3, 4)}), 3, stream())
    assert torch.equal(released["a"], torch.zeros(4))


@in_one_test("clipping", ["flat", "layer"])
@in_one_test("clip_norm", [0.1, 3.0, 1e3])
def test_expected_is_the_release_without_noise(clip_norm: float, clipping: Literal["flat", "layer"]) -> None:
    gradients = rows(1)
    expected = GaussianMechanism(2.0, clip_norm, clipping).expected(
        {name: value[0] for name, value in gradients.items()}
    )
    quiet = GaussianMechanism(0.0, clip_norm, clipping).release(DenseGradients(gradients), 1, stream())
    assert list(expected) == list(gradients)
    assert torch.allclose(flat(expected), flat(quiet), rtol=1e-13)


@in_one_test("clipping", ["flat", "layer"])
@in_one_test("size", [0.0, 0.01, 5.0])
def test_expected_is_differentiable(size: float, clipping: Literal["flat", "layer"]) -> None:
    mechanism = GaussianMechanism(2.0, 1.0, clipping)
    generator = torch.Generator().manual_seed(23)
    start = tuple(
        (size * torch.randn(count, dtype=torch.float64, generator=generator)).requires_grad_() for count in (6, 2)
    )

    def function(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return tuple(mechanism.expected({"a": one, "b": other}).values())

    assert torch.autograd.gradcheck(function, start)


@in_one_test(
    ("sigma", "clip_norm", "clipping"),
    [
        (-1, 1, "flat"),
        (math.nan, 1, "flat"),
        (math.inf, 1, "flat"),
        (1, 0, "flat"),
        (1, -1, "layer"),
        (1, math.inf, "layer"),
        (1, 1, "tensor"),
    ],
)
def test_refuses_settings(sigma: float, clip_norm: float, clipping: Literal["flat", "layer"]) -> None:
    with pytest.raises(ValueError, match=r" = .*: "):
        GaussianMechanism(sigma, clip_norm, clipping)


@pytest.mark.parametrize("mechanism", [NoMechanism(), GaussianMechanism(1.0, 1.0)])
def test_refuses_a_batch_size_of_zero(mechanism: NoMechanism | GaussianMechanism) -> None:
    with pytest.raises(ValueError, match="batch_size = 0"):
        mechanism.release(DenseGradients(rows(2)), 0, stream())


@in_one_test("examples", [0, 1, 9])
def test_no_mechanism_is_the_sum_over_the_public_batch_size(examples: int) -> None:
    gradients = rows(examples)
    released = NoMechanism().release(DenseGradients(gradients), 4, stream())
    assert all(torch.allclose(released[name], value.sum(dim=0) / 4) for name, value in gradients.items())
    one = {name: value.sum(dim=0) for name, value in gradients.items()}
    assert all(torch.equal(value, one[name]) for name, value in NoMechanism().expected(one).items())


def test_no_mechanism_does_not_hide_nan() -> None:
    released = NoMechanism().release(DenseGradients({"a": torch.full((2, 3), math.nan)}), 2, stream())
    assert torch.isnan(released["a"]).all()
