"""The Laplace mechanism: the law of its noise against scipy's.

All seeds are fixed. Each statistical comparison raises a false alarm with probability 1e-6 had they been random.
"""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms.laplace import LaplaceMechanism, laplace_quantile
from tests.noise import stream

ALARM = 1e-6


def flat(vector: Vector) -> NDArray[np.float64]:
    return np.concatenate([value.double().numpy().ravel() for value in vector.values()])


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
