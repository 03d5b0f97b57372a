"""Normal noise against its configured size, and what leaves without a mechanism.

All seeds are fixed. Each statistical comparison raises a false alarm with probability 1e-6 had they been random.
"""

import math
from typing import Literal

import torch
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
