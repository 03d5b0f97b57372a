"""Blocks of a given size: what the ledger counts, and sums of draws of blocks against adding up one draw after another.

All seeds are fixed. Each case raises a false alarm with probability ALARM had they been random; what the comparison can
see is tested too.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sum_comparison import Floats, gradients, smallest_pvalue
from vmf_oracle import draw_sums

from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms.machinery import block_sum as block_sum_module
from fedpriv.mechanisms.machinery.base import block_length, block_runs, block_sizes
from fedpriv.mechanisms.machinery.block_sum import draw_block_sums
from fedpriv.mechanisms.machinery.vmf_sampling import Draws
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-4


@in_one_test(
    ("blocks", "tensors", "sizes"),
    [
        ("whole", (5, 7, 1), (13,)),
        ("layer", (5, 7, 1), (5, 7, 1)),
        ("layer", (3, 3, 3), (3, 3, 3)),
        ("size:4", (5, 7, 1), (4, 4, 4, 1)),
        ("size:4", (5, 7), (4, 4, 4)),
        ("size:1", (2, 1), (1, 1, 1)),
        ("size:13", (5, 7, 1), (13,)),
        ("size:14", (5, 7, 1), (13,)),
    ],
)
def test_sizes(blocks: str, tensors: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    assert block_sizes(blocks, tensors) == sizes
    assert sum(count * size for count, size in block_runs(blocks, tensors)) == sum(tensors)


def test_many_blocks_are_few_runs() -> None:
    assert block_runs("size:3", (10**9, 1)) == ((333333333, 3), (1, 2))
    assert block_length("size:16") == 16
    assert block_length("whole") is None


@in_one_test("blocks", ["", "none", "size", "size:", "size:0", "size:-1", "size:1.5", "size:1e3", "Size:2"])
def test_refuses_blocks(blocks: str) -> None:
    with pytest.raises(ValueError, match=r"blocks = .*: whole, layer, or size:D"):
        block_sizes(blocks, (3,))


def ours(
    rows: Floats, kappa: float, length: int, count: int, dtype: torch.dtype, seed: int, chunk_bytes: int = 1 << 20
) -> Floats:
    """Sums, (count, K), with a border between tensors inside a block."""
    cut = max(1, rows.shape[1] // 3)
    parts = {"a": rows[:, :cut], "b": rows[:, cut:]}
    operator = DenseGradients({name: torch.tensor(part, dtype=dtype) for name, part in parts.items()}, "", chunk_bytes)
    mechanism, generator = VmfMechanism(kappa, f"size:{length}"), stream(seed)
    releases = (mechanism.release(operator, 1, generator) for _ in range(count))
    return np.stack([torch.cat(list(one.values())).double().numpy() for one in releases])


def drawn_together(rows: Floats, kappa: float, length: int, count: int, dtype: torch.dtype, seed: int) -> Floats:
    """Sums as of ``ours``, in one call: the whole blocks of all, then the shorter blocks at the ends of all."""
    whole = rows.shape[1] - rows.shape[1] % length
    ends = rows.shape[1] - whole
    laid = np.concatenate([np.tile(rows[:, :whole], count), np.tile(rows[:, whole:], count)], axis=1)
    draws = Draws(kappa, 1.0, stream(seed), np.random.default_rng(seed))
    runs = [(count * whole // length, length), *([(count, ends)] if ends else [])]
    released = draw_block_sums(DenseGradients({"a": torch.tensor(laid, dtype=dtype)}), runs, draws)
    sums = released["a"].double().numpy()
    return np.concatenate(
        [sums[: count * whole].reshape(count, -1), sums[count * whole :].reshape(count, ends)], axis=1
    )


def cut(rows: Floats, length: int) -> list[Floats]:
    return np.split(rows, np.arange(length, rows.shape[1], length), axis=1)


CASES = [
    ("independent", 1, 4, 2),
    ("independent", 3, 7, 3),
    ("independent", 5, 6, 6),
    ("independent", 2, 200, 150),
    *((case, 4, 7, 5) for case in ("duplicates", "opposite", "zeros", "plane", "close")),
    ("all-zero", 3, 5, 2),
]


def assert_agree(case: str, examples: int, dimension: int, length: int, kappa: float, drawn: Floats) -> None:
    """Each block against its own sums, and all of them together: blocks are independent."""
    rows = gradients(case, examples, dimension)
    rng = np.random.default_rng(62)
    parts = [(part, draw_sums(part, kappa, 10 * len(drawn), rng)) for part in cut(rows, length) if part.shape[1] > 1]
    for (part, expected), some in zip(parts, cut(drawn, length), strict=False):
        assert smallest_pvalue(part, some, expected) > ALARM / (len(parts) + 1)
    expected = np.concatenate([sums for _, sums in parts], axis=1)
    inside = expected.shape[1]
    assert smallest_pvalue(rows[:, :inside], drawn[:, :inside], expected) > ALARM / (len(parts) + 1)


@pytest.mark.parametrize(("case", "examples", "dimension", "length"), CASES)
def test_agrees_with_adding_up(case: str, examples: int, dimension: int, length: int) -> None:
    drawn = ours(gradients(case, examples, dimension), 4.0, length, 200, torch.float32, 61)
    assert_agree(case, examples, dimension, length, 4.0, drawn)


@pytest.mark.parametrize(("chunk_bytes", "chunk"), [(1, 1 << 18), (300, 1)])
def test_chunks_do_not_change_the_law(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, chunk: int) -> None:
    """One example at a time, one block at a time, and a few of both."""
    monkeypatch.setattr(block_sum_module, "CHUNK", chunk)
    drawn = ours(gradients("zeros", 4, 7), 4.0, 3, 200, torch.float64, 63, chunk_bytes)
    assert_agree("zeros", 4, 7, 3, 4.0, drawn)


# Nearly uniform and concentrated in turn.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "examples", "dimension", "length", "kappa", "dtype"),
    [(*case, *((0.5, torch.float64), (60.0, torch.float32))[number % 2]) for number, case in enumerate(CASES)],
)
def test_agrees_with_adding_up_many_times(
    case: str, examples: int, dimension: int, length: int, kappa: float, dtype: torch.dtype
) -> None:
    drawn = drawn_together(gradients(case, examples, dimension), kappa, length, 3000, dtype, 64)
    assert_agree(case, examples, dimension, length, kappa, drawn)


@pytest.mark.parametrize(("length", "kappa"), [(2, 20.0), (3, 0.5), (8, 20.0)])
def test_agrees_with_scipy(length: int, kappa: float) -> None:
    """One example, two blocks: projections on the direction and on four others; 5 comparisons a block."""
    rows, count = gradients("independent", 1, 2 * length), 1500
    drawn = drawn_together(rows, kappa, length, count, torch.float64, 65)
    rng = np.random.default_rng(66)
    for part, some in zip(cut(rows, length), cut(drawn, length), strict=True):
        direction = part[0] / np.linalg.norm(part[0])
        theirs = stats.vonmises_fisher(direction, kappa, seed=67).rvs(4 * count)
        for axis in (direction, *rng.standard_normal((4, length))):
            assert stats.ks_2samp(some @ axis, theirs @ axis).pvalue > ALARM / 10


@pytest.mark.parametrize(("length", "kappa"), [(3, 4.0), (9, 8.0)])
def test_the_comparison_can_fail(length: int, kappa: float) -> None:
    """It sees a concentration that is off by a fifth, and blocks of another length."""
    rows, count = gradients("close", 4, 2 * length), 400
    first = rows[:, :length]
    expected = draw_sums(first, kappa, 10 * count, np.random.default_rng(68))
    right = drawn_together(rows, kappa, length, count, torch.float64, 69)
    assert smallest_pvalue(first, right[:, :length], expected) > ALARM
    wrong = [
        drawn_together(rows, 1.2 * kappa, length, count, torch.float64, 69),
        drawn_together(rows, 0.8 * kappa, length, count, torch.float64, 69),
        drawn_together(rows, kappa, length + 1, count, torch.float64, 69),
    ]
    assert max(smallest_pvalue(first, sums[:, :length], expected) for sums in wrong) < ALARM


@pytest.mark.parametrize("kappa", [0.0, 0.6, 3.0])
def test_blocks_of_one_coordinate_are_random_signs(kappa: float) -> None:
    """Each keeps its sign with probability 1 / (1 + exp(-2 kappa)), a zero has a fair one; 5 coordinates."""
    rows = np.array([[1.0, -2.0, 0.0, 1e-3, 5.0], [3.0, 4.0, 0.0, 0.0, -7.0]])
    keep, count = 1 / (1 + math.exp(-2 * kappa)), 1500
    sums = drawn_together(rows, kappa, 1, count, torch.float32, 70)
    for k in range(rows.shape[1]):
        first, second = (keep if value > 0 else 1 - keep if value < 0 else 0.5 for value in rows[:, k])
        both = [(1 - first) * (1 - second), first * (1 - second) + second * (1 - first), first * second]
        counts = [int((np.abs(sums[:, k] - total) < 1e-5).sum()) for total in (-2, 0, 2)]
        assert sum(counts) == count
        assert stats.chisquare(counts, count * np.array(both)).pvalue > ALARM / 5


@in_one_test(
    ("scale", "dtype"),
    [
        *((scale, torch.float32) for scale in (1e-36, 1e-25, 1e-20, 1e20, 1e37)),
        *((scale, torch.float64) for scale in (1e-250, 1e-160, 1e140)),
    ],
)
@in_one_test("length", [1, 3])
def test_lengths_that_cannot_be_squared(scale: float, dtype: torch.dtype, length: int) -> None:
    """Gradients whose squares are 0 or infinite have a direction all the same, in float32 down to 1e-31 a block."""
    rows = gradients("independent", 3, 7)
    drawn = ours(rows / np.abs(rows).max() * scale, 1e7, length, 1, dtype, 71)[0]
    if scale < 1e-31 and dtype == torch.float32:
        assert all(np.linalg.norm(part) <= len(rows) + 1e-5 for part in np.split(drawn, range(length, 7, length)))
        return
    for part, some in zip(cut(rows, length), np.split(drawn, range(length, 7, length)), strict=True):
        directions = part / np.linalg.norm(part, axis=1, keepdims=True)
        assert np.linalg.norm(some - directions.sum(axis=0)) < 5e-3


def test_no_examples() -> None:
    released = VmfMechanism(3.0, "size:2").release(DenseGradients({"a": torch.zeros(0, 5)}), 4, stream())
    assert torch.equal(released["a"], torch.zeros(5))
