"""What mechanisms that clip have in common: their norms against a loop in numpy, their means, and what they refuse."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

Floats = NDArray[np.float64]

SHAPES = {"a": (3, 4), "b": (5,)}
# Shares of the noise of 17 numbers, uneven over four orders of magnitude.
SHARES = np.exp(4 * np.random.default_rng(51).normal(size=17))
SHARES /= SHARES.sum()
NORMS: dict[str, Callable[[Floats], float]] = {
    "gaussian": np.linalg.norm,
    "gaussian by layer": np.linalg.norm,
    "laplace": lambda one: float(np.abs(one).sum()),
    "hgm": lambda one: float(np.linalg.norm(one / np.sqrt(17 * SHARES))),
}


def made(name: str, noise: float, clip_norm: float, dtype: torch.dtype = torch.float64) -> Mechanism:
    match name:
        case "gaussian":
            return GaussianMechanism(noise, clip_norm)
        case "gaussian by layer":
            return GaussianMechanism(noise, clip_norm, "layer")
        case "laplace":
            return LaplaceMechanism(noise, clip_norm)
    shares = torch.from_numpy(SHARES).to(dtype)
    return HeterogeneousGaussianMechanism(noise, clip_norm, Redistribution(named(shares)))


def named(values: Tensor) -> Vector:
    """Numbers (..., 17) under the names of the parameters."""
    parts = zip(SHAPES.items(), values.split([12, 5], dim=-1), strict=True)
    return {name: part.view(*values.shape[:-1], *shape) for (name, shape), part in parts}


def flat(vector: Vector) -> Floats:
    return np.concatenate([value.double().numpy().ravel() for value in vector.values()])


def rows(examples: int) -> Floats:
    """Gradients (examples, 17) of lengths over six orders of magnitude."""
    made = np.random.default_rng(52).normal(size=(examples, 17))
    return made * np.logspace(-3, 3, examples)[:, None] if examples > 1 else made


def clipped(name: str, one: Floats, clip_norm: float) -> Floats:
    blocks = [one[:12], one[12:]] if name == "gaussian by layer" else [one]
    bound = clip_norm / math.sqrt(len(blocks))
    return np.concatenate([block * min(1.0, bound / NORMS[name](block)) for block in blocks])


@in_one_test("name", NORMS)
@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("examples", [0, 1, 2, 9])
@in_one_test("clip_norm", [1e-3, 1.0, 1e3])
def test_each_example_is_clipped(name: str, dtype: torch.dtype, examples: int, clip_norm: float) -> None:
    given = torch.from_numpy(rows(examples)).to(dtype)
    expected = sum((clipped(name, one, clip_norm) for one in given.double().numpy()), np.zeros(17))
    released = made(name, 0.0, clip_norm, dtype).release(DenseGradients(named(given)), 4, stream())
    assert {key: value.shape for key, value in released.items()} == SHAPES
    assert all(value.dtype == dtype for value in released.values())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(flat(released), expected / 4, rtol=tolerance, atol=tolerance * clip_norm)


@pytest.mark.parametrize("name", NORMS)
def test_no_example_moves_the_sum_by_more_than_the_clipping_norm(name: str) -> None:
    """Products of zero, small and huge numbers; with clipping by layer the whole is bounded, too."""
    most = {"laplace": 1e30, "hgm": 1e15}.get(name, 1e18)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        values=npst.arrays(np.float64, (3, 17), elements=st.floats(-most, most, allow_subnormal=False)),
        clip_norm=st.sampled_from([1e-9, 1e-3, 1.0, 1e9]),
        double=st.booleans(),
    )
    def moves_no_further(values: Floats, clip_norm: float, double: bool) -> None:
        dtype = torch.float64 if double else torch.float32
        for one in torch.from_numpy(values).to(dtype):
            released = made(name, 0.0, clip_norm, dtype).release(DenseGradients(named(one[None])), 1, stream())
            assert NORMS[name](flat(released)) <= clip_norm * (1 + (1e-12 if double else 1e-5))

    moves_no_further()


@in_one_test("name", NORMS)
def test_a_zero_gradient_stays_zero(name: str) -> None:
    released = made(name, 0.0, 1.0).release(DenseGradients(named(torch.zeros(3, 17, dtype=torch.float64))), 3, stream())
    assert not flat(released).any()


@in_one_test("name", NORMS)
@in_one_test("clip_norm", [0.01, 0.1, 3.0, 1e3])
def test_expected_is_the_release_without_noise(name: str, clip_norm: float) -> None:
    one = torch.from_numpy(rows(1))
    quiet = made(name, 0.0, clip_norm).release(DenseGradients(named(one)), 1, stream())
    expected = made(name, 2.0, clip_norm).expected(named(one[0]))
    assert list(expected) == list(SHAPES)
    np.testing.assert_allclose(flat(expected), flat(quiet), rtol=1e-12)


@in_one_test("name", NORMS)
@in_one_test("size", [0.0, 0.01, 5.0])
def test_expected_is_differentiable(name: str, size: float) -> None:
    start = size * torch.from_numpy(rows(1)[0])
    mechanism = made(name, 2.0, 1.0)
    assert torch.autograd.gradcheck(lambda one: tuple(mechanism.expected(named(one)).values()), start.requires_grad_())


@in_one_test("name", NORMS)
@in_one_test(("noise", "clip_norm"), [(-1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, -1), (1, math.inf)])
def test_refuses_settings(name: str, noise: float, clip_norm: float) -> None:
    with pytest.raises(ValueError, match=r" = .*: "):
        made(name, noise, clip_norm)


def test_refuses_clipping_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="clipping = 'tensor': flat, layer"):
        GaussianMechanism(1.0, 1.0, "tensor")  # type: ignore[arg-type]


@in_one_test("mechanism", [NoMechanism(), VmfMechanism(1.0), *(made(name, 1.0, 1.0) for name in NORMS)])
def test_refuses_a_batch_size_of_zero(mechanism: Mechanism) -> None:
    with pytest.raises(ValueError, match="batch_size = 0"):
        mechanism.release(DenseGradients(named(torch.ones(2, 17, dtype=torch.float64))), 0, stream())
