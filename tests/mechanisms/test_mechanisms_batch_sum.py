"""The sum of a batch's draws, drawn at once, against adding up one draw an example in R^K (see ``vmf_oracle``).

What is compared is in ``sum_comparison``. All seeds are fixed. Each case raises a false alarm with probability ALARM
had they been random; what the comparison can see is tested too.
"""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from sum_comparison import Floats, gradients, smallest_pvalue
from torch.nn import functional
from vmf_oracle import draw_sums

from fedpriv.gradients import DenseGradients, per_example_gradients
from fedpriv.mechanisms.machinery.vmf_sampling import (
    Basis,
    _walk,
    cut_groups,
    draw_small,
    draw_uniform_cosines,
    group_size,
    made_parts,
    spectral_basis,
)
from fedpriv.mechanisms.vmf import VmfMechanism
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-4


def ours(rows: Floats, kappa: float, count: int, dtype: torch.dtype, seed: int, draws: int = 0) -> Floats:
    operator = DenseGradients(
        {"a": torch.tensor(rows[:, :1], dtype=dtype), "b": torch.tensor(rows[:, 1:], dtype=dtype)}
    )
    mechanism, generator = VmfMechanism(kappa).padded(draws), stream(seed)
    releases = (mechanism.release(operator, 1, generator) for _ in range(count))
    return np.stack([torch.cat(list(one.values())).double().numpy() for one in releases])


# More examples than dimensions, as many, one fewer, far fewer; each kind of dependence, in few and in many dimensions.
CASES = [
    *(("independent", *shape) for shape in ((1, 2), (5, 3), (4, 4), (4, 5), (12, 200))),
    *(("duplicates", 4, 5), ("opposite", 6, 40), ("zeros", 4, 5), ("plane", 6, 40), ("close", 4, 5), ("close", 6, 40)),
    *(("all-zero", 3, 4), ("zeros", 2, 2), ("opposite", 2, 2), ("plane", 9, 3)),
]


@pytest.mark.parametrize(("case", "examples", "dimension"), CASES)
def test_agrees_with_adding_up(case: str, examples: int, dimension: int) -> None:
    rows, count = gradients(case, examples, dimension), 200
    expected = draw_sums(rows, 4.0, 10 * count, np.random.default_rng(43))
    assert smallest_pvalue(rows, ours(rows, 4.0, count, torch.float32, 44), expected) > ALARM


# Alone an example is one with a direction or without; a batch of no more than a group is not cut, and the last group
# may be shorter. Groups whose directions depend on each other are cut further.
CUT = [
    *((1, "independent", 12, 200), (1, "all-zero", 3, 4)),
    *((2, "independent", 7, 6), (3, "plane", 9, 3)),
]


@pytest.mark.parametrize(("size", "case", "examples", "dimension"), CUT)
def test_groups_agree_with_adding_up(
    case: str, examples: int, dimension: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpriv.mechanisms.machinery.vmf_sampling.group_size", lambda gradients, block: size)
    rows, count = gradients(case, examples, dimension), 200
    expected = draw_sums(rows, 4.0, 10 * count, np.random.default_rng(63))
    assert smallest_pvalue(rows, ours(rows, 4.0, count, torch.float32, 64), expected) > ALARM


# In one group that spans all of the space; in several, which are cut further where they depend; gradients of zero.
PADDED = [
    *((16, "independent", 5, 3), (16, "all-zero", 3, 4)),
    *((2, "independent", 5, 6), (2, "close", 6, 40), (3, "zeros", 4, 5)),
]


@pytest.mark.parametrize(("size", "case", "examples", "dimension"), PADDED)
def test_padding_adds_uniform_directions(
    case: str, examples: int, dimension: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gradients of zero do; a batch that has the draws already gets no more."""
    monkeypatch.setattr("fedpriv.mechanisms.machinery.vmf_sampling.group_size", lambda gradients, block: size)
    rows, count = gradients(case, examples, dimension), 150
    padded = np.concatenate([rows, np.zeros((3, dimension))])
    expected = draw_sums(padded, 4.0, 10 * count, np.random.default_rng(65))
    assert smallest_pvalue(rows, ours(rows, 4.0, count, torch.float32, 66, examples + 3), expected) > ALARM
    unpadded = ours(rows, 4.0, 1, torch.float32, 67)
    assert np.array_equal(ours(rows, 4.0, 1, torch.float32, 67, examples), unpadded)


def test_batches_are_cut_where_pairs_are_dear() -> None:
    """LeNet's batch into small groups, of one size where the batch allows it; an MLP's inner products are cheap."""
    shape, loss = (3, 32, 32), partial(functional.cross_entropy, reduction="none")
    sizes = {}
    for name, examples in (("lenet", 64), ("lenet", 65), ("mlp", 64)):
        model = build_model(model_settings({"name": name}), shape, 10, seed=0)
        batch = per_example_gradients(model, loss, torch.randn(examples, *shape), torch.arange(examples) % 10)
        sizes[name, examples] = group_size(batch, None)
    assert sizes == {("lenet", 64): 16, ("lenet", 65): 13, ("mlp", 64): 64}


@pytest.mark.parametrize("size", [1, 4, 16])
def test_groups_cover_the_batch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, all but the last of one size, and the normal vectors of those drawn together within the memory."""
    monkeypatch.setattr("fedpriv.mechanisms.machinery.vmf_sampling.group_size", lambda gradients, block: size)
    for examples, chunk_bytes in product((0, 1, 4, 7, 16, 35), (1, 100, 400, 1 << 20)):
        given = f"{examples} examples, {chunk_bytes} bytes"
        rows = torch.arange(12.0 * examples).view(examples, 12)
        parts = cut_groups(DenseGradients({"a": rows}, chunk_bytes=chunk_bytes), None)
        assert torch.equal(torch.cat([part.rows(0, part.examples)["a"] for part, _ in parts]), rows), given
        assert all(part.examples == groups * size for part, groups in parts[:-1]), given
        last, groups = parts[-1]
        assert last.examples == groups * size or (groups == 1 and last.examples < size), given
        assert all(groups == 1 or groups * 12 * 4 <= chunk_bytes for _, groups in parts), given


@pytest.mark.parametrize(("examples", "dimension"), [(2, 3), (3, 5)])
def test_few_dimensions_outside_the_span(examples: int, dimension: int) -> None:
    """Where each degree of freedom shows: nearly uniform draws, of which one to three dimensions lie outside."""
    rows, count = gradients("independent", examples, dimension), 500
    expected = draw_sums(rows, 0.2, 10 * count, np.random.default_rng(57))
    assert smallest_pvalue(rows, ours(rows, 0.2, count, torch.float64, 58), expected) > ALARM


@in_one_test("dimension", [2, 3, 4, 5, 8])
def test_a_uniform_draw_beside_a_certain_one(dimension: int) -> None:
    """The draw of a zero gradient leans on another's direction as any uniform direction does: a Beta law."""
    rng, similarity = np.random.default_rng(59), torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    bases = Basis(*(value.expand(4000, -1, -1) for value in spectral_basis(similarity, dimension, 1e-9)))
    normals = torch.from_numpy(rng.standard_normal((4000, 1, 2)))
    draws = draw_small(1e7, dimension, 1, (4000, 2), rng)
    parts = made_parts(bases, torch.tensor([[True, False]]).expand(4000, 2), normals, draws)
    cosines = parts.inside[:, 0].numpy()
    half = (dimension - 1) / 2
    assert stats.kstest((1 + cosines) / 2, stats.beta(half, half).cdf).pvalue > ALARM
    # What is outside has the rest of the draw's length, and next to nothing of the certain one's, sqrt((K - 1) / 1e7).
    assert parts.outside.numpy() == pytest.approx(np.sqrt(1 - cosines**2), abs=1e-2)


@pytest.mark.parametrize(
    ("dimension", "lengths"),
    [
        *((1, (1.0,)), (1, (0.3, 1.0, 0.7, 0.5)), (2, (1.0, 1.0)), (2, (2.0, 0.0, 1.0))),
        *((3, (1.0, 0.4, 0.6, 2.0, 0.1)), (4, (0.3, 1.0, 0.7, 0.5)), (30, (1.0, 0.4, 0.6, 2.0, 0.1))),
    ],
)
def test_walk(dimension: int, lengths: tuple[float, ...]) -> None:
    """The length of a sum of uniform directions, against adding them up."""
    rng, count = np.random.default_rng(61), 6000
    turns = draw_uniform_cosines(dimension, count * (len(lengths) - 1), rng).reshape(count, -1)
    walked = _walk(np.tile(lengths, (count, 1)), turns)
    steps = rng.standard_normal((10 * count, len(lengths), dimension))
    steps *= np.array(lengths)[:, None] / np.linalg.norm(steps, axis=2, keepdims=True)
    added = np.linalg.norm(steps.sum(axis=1), axis=1)
    assert stats.ks_2samp(walked.round(9), added.round(9)).pvalue > ALARM
    # Of the square, whose mean is known: the sum of the squared lengths.
    error = (walked**2).std() / count**0.5 + 1e-12
    assert abs((walked**2).mean() - np.square(lengths).sum()) < stats.norm.isf(ALARM / 2) * error


@pytest.mark.parametrize(("dimension", "kappa"), [(2, 20.0), (3, 0.5), (8, 20.0)])
def test_agrees_with_scipy(dimension: int, kappa: float) -> None:
    """The sum of four draws of scipy's own, which shares nothing with ours."""
    rows, count = gradients("independent", 4, dimension), 400
    directions = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    theirs = sum(
        stats.vonmises_fisher(direction, kappa, seed=seed).rvs(10 * count)
        for seed, direction in enumerate(directions, start=52)
    )
    assert smallest_pvalue(rows, ours(rows, kappa, count, torch.float64, 56), theirs) > ALARM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "examples", "dimension", "kappa", "dtype"),
    # Nearly uniform or concentrated; all cases are above with fewer draws.
    [
        *(("independent", 4, 5, 0.5, torch.float64), ("plane", 6, 40, 0.5, torch.float64)),
        *(("independent", 12, 200, 60.0, torch.float32), ("zeros", 4, 5, 60.0, torch.float32)),
    ],
)
def test_agrees_with_adding_up_many_times(
    case: str, examples: int, dimension: int, kappa: float, dtype: torch.dtype
) -> None:
    """Ours are the expensive ones: few of them against many of the oracle's."""
    rows, count = gradients(case, examples, dimension), 700
    expected = draw_sums(rows, kappa, 20 * count, np.random.default_rng(45))
    assert smallest_pvalue(rows, ours(rows, kappa, count, dtype, 46), expected) > ALARM


def test_the_comparison_can_fail() -> None:
    """It sees a concentration that is off by a fifth, one example too few, and noise that is halved."""
    rows, kappa, count = gradients("independent", 6, 30), 12.0, 500
    expected = draw_sums(rows, kappa, 10 * count, np.random.default_rng(47))
    right = ours(rows, kappa, count, torch.float64, 48)
    assert smallest_pvalue(rows, right, expected) > ALARM
    halved = right.mean(axis=0) + (right - right.mean(axis=0)) / 2
    wrong = (
        ours(rows, 1.2 * kappa, count, torch.float64, 48),
        ours(rows, 0.8 * kappa, count, torch.float64, 48),
        ours(rows[1:], kappa, count, torch.float64, 48),
        halved,
    )
    assert max(smallest_pvalue(rows, sums, expected) for sums in wrong) < ALARM


@in_one_test("case", ["independent", "duplicates", "close", "zeros", "plane"])
@in_one_test("dtype", [torch.float32, torch.float64])
def test_length_of_a_draw_among_others(case: str, dtype: torch.dtype) -> None:
    """With a huge concentration of all examples the sum is the sum of the directions, in any batch."""
    rows = gradients(case, 6, 40)
    rows = rows[np.linalg.norm(rows, axis=1) > 0]
    directions = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    sums = ours(rows, 1e7, 1, dtype, 49)[0]
    # Each draw is off by about sqrt(K / kappa) = 2e-3.
    assert np.linalg.norm(sums - directions.sum(axis=0)) < 0.05


def test_layers_are_drawn_independently() -> None:
    """Blocks: each is the sum of its own draws, and what two blocks add to their means is uncorrelated."""
    rows, count = gradients("independent", 3, 9), 500
    parts = {"a": rows[:, :4], "b": rows[:, 4:]}
    operator = DenseGradients({name: torch.tensor(part) for name, part in parts.items()})
    mechanism, generator = VmfMechanism(4.0, "layer"), stream(50)
    drawn = [mechanism.release(operator, 1, generator) for _ in range(count)]
    sums = {name: np.stack([one[name].numpy() for one in drawn]) for name in parts}
    for name, part in parts.items():
        expected = draw_sums(part, 4.0, 4 * count, np.random.default_rng(51))
        assert smallest_pvalue(part, sums[name], expected) > ALARM
    correlations = np.corrcoef(sums["a"].T, sums["b"].T)[:4, 4:]
    # 20 correlations of 500 pairs, each within 5.5 standard errors: false alarm below 1e-6.
    assert np.abs(correlations).max() < 5.5 / count**0.5
