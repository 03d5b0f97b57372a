"""Normal numbers against their law, and against the transformation in float64.

Seeds are fixed; each test raises a false alarm with probability 1e-4 at most had they been random.
"""

import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from scipy import stats

from fedpriv.gradients import normal
from fedpriv.gradients.normal import standard_normal
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-4
DTYPES = [torch.float32, torch.float64]


def drawn(count: int, seed: int, dtype: torch.dtype = torch.float32) -> NDArray[np.float64]:
    numbers = standard_normal(count, stream(seed), dtype)
    assert numbers.dtype == dtype
    assert numbers.shape == (count,)
    return numbers.double().numpy()


def bits(key: bytes, number: int) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(number.to_bytes(8, "big") + bytes(8))).encryptor()


@in_one_test("dtype", DTYPES)
@pytest.mark.parametrize("count", [1_000_000, 300_001])
def test_law(count: int, dtype: torch.dtype) -> None:
    assert stats.kstest(drawn(count, 1, dtype), "norm").pvalue > ALARM


def test_tails() -> None:
    """How many of 20 million are beyond a bound is a Poisson number: 1267 to be expected, 11, and 0.01."""
    sizes = np.abs(drawn(20_000_000, 2))
    for bound in (4.0, 5.0, 6.2):
        expected = 2 * stats.norm.sf(bound) * len(sizes)
        found = int((sizes > bound).sum())
        assert min(stats.poisson.cdf(found, expected), stats.poisson.sf(found - 1, expected)) > ALARM / 6


@pytest.mark.parametrize("coarse", [2.0**-3, 2.0**-10])
def test_what_is_drawn_again_is_uniform(coarse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are drawn again so often that it can be seen: the logarithm is exponential all the way."""
    monkeypatch.setattr(normal, "COARSE", coarse)
    lengths = np.square(drawn(1_000_000, 3)).reshape(2, -1).sum(axis=0) / 2
    assert stats.kstest(lengths, "expon").pvalue > ALARM
    beyond = lengths[lengths > -math.log(coarse)] + math.log(coarse)
    assert len(beyond) > 300
    assert stats.kstest(beyond, "expon").pvalue > ALARM


@in_one_test("distance", [1, 2, 1 << 15, 200_000])
def test_pairs_are_independent(distance: int) -> None:
    """Neighbours, and the two coordinates of a point: all 64 cells of a grid are as likely."""
    cells = np.minimum(8 * stats.norm.cdf(drawn(400_000, 4)), 7).astype(int)
    counts = np.bincount(8 * cells[:-distance] + cells[distance:], minlength=64)
    assert stats.chisquare(counts).pvalue > ALARM


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding(dtype: torch.dtype) -> None:
    """Computed from the same bits in float64, a number differs by a few roundings."""
    points = normal.POINTS
    found = standard_normal(2 * points, stream(5), dtype).double().numpy()
    whole, end = (np.int32, 2.0**31) if dtype == torch.float32 else (np.int64, 2.0**63)
    distances, _, angles = (
        np.frombuffer(bits(stream(5).key(), number).update(bytes(points * np.dtype(whole).itemsize)), whole)
        for number in range(3)
    )
    uniform = (np.abs(distances.astype(np.float64)) + 0.5) / end
    radius, angle = np.sqrt(-2 * np.log(uniform)), math.pi * angles / end
    allowed = 6 * torch.finfo(dtype).eps * (radius + 1 / np.maximum(radius, 1e-3))
    for half, exact in zip(found.reshape(2, -1), (radius * np.cos(angle), radius * np.sin(angle)), strict=True):
        assert uniform.min() > normal.COARSE
        assert (np.abs(half - exact) < allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_one_test("count", [1, 2, 15_827, 200_001])
def test_the_number_of_threads_changes_nothing(count: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(drawn(count, 6, dtype))
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_repeats_with_the_stream() -> None:
    noise = stream(7)
    first, second = (standard_normal(1000, noise, torch.float32) for _ in range(2))
    assert np.array_equal(first.numpy(), drawn(1000, 7))
    assert not torch.isin(first, second).any()
    assert not np.isin(first.numpy(), drawn(1000, 8)).any()


def test_none() -> None:
    assert drawn(0, 9).shape == (0,)
