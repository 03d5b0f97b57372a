"""Batch sampling: what a batch is made of, and how often an example takes part."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from scipy import stats

from fedpriv.data.sampling import Sampling

KINDS = ("shuffled", "fixed", "poisson", "balls-in-bins")
VARYING = ("poisson", "balls-in-bins")
SIZES = [(1, 1), (1, 7), (3, 7), (7, 7), (8, 64), (10, 99)]


@pytest.mark.parametrize(("batch_size", "examples"), SIZES)
def test_batches_of_a_shuffled_pass_are_disjoint_and_full(batch_size: int, examples: int) -> None:
    sampling = Sampling("shuffled", batch_size, examples)
    for epoch in range(3):
        steps = range(epoch * sampling.steps_per_epoch, (epoch + 1) * sampling.steps_per_epoch)
        batches = [sampling.batch(5, 2, step) for step in steps]
        used = np.concatenate(batches)
        assert all(len(batch) == batch_size for batch in batches)
        assert len(np.unique(used)) == len(used) == examples // batch_size * batch_size
        assert used.min() >= 0 and used.max() < examples


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch_size", "examples"), SIZES)
def test_a_batch_holds_distinct_local_indices(kind: str, batch_size: int, examples: int) -> None:
    sampling = Sampling(kind, batch_size, examples)  # type: ignore[arg-type]
    for step in range(20):
        batch = sampling.batch(1, 0, step)
        assert batch.dtype == np.int64 and batch.ndim == 1
        assert len(np.unique(batch)) == len(batch)
        assert np.all((batch >= 0) & (batch < examples))
        assert kind in VARYING or len(batch) == batch_size
    steps = examples // batch_size
    assert sampling.rate == (1 / steps if kind == "balls-in-bins" else batch_size / examples)
    assert sampling.steps_per_epoch == examples // batch_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_function_of_seed_partition_and_step(kind: str) -> None:
    sampling = Sampling(kind, 20, 200)  # type: ignore[arg-type]
    keys = list(product((0, 1), (0, 1), (0, 1, 9, 10, 11)))
    forward = {key: sampling.batch(*key).tobytes() for key in keys}
    backward = {key: sampling.batch(*key).tobytes() for key in reversed(keys)}
    assert forward == backward
    assert len(set(forward.values())) == len(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_equally_likely(kind: str) -> None:
    """Chi-square over 40 examples and 4,000 independent batches; false alarm 1e-6 a kind, fixed seed."""
    sampling = Sampling(kind, 8, 40)  # type: ignore[arg-type]
    steps = range(0, 4000 * sampling.steps_per_epoch, sampling.steps_per_epoch)
    counts = np.bincount(np.concatenate([sampling.batch(3, 0, step) for step in steps]), minlength=40)
    inclusion = 4000 * sampling.rate * (1 - sampling.rate)
    freedom = 40 if kind in VARYING else 39  # a fixed batch size takes one degree of freedom
    shrink = 1 if kind in VARYING else 39 / 40
    statistic = shrink * ((counts - 4000 * sampling.rate) ** 2).sum() / inclusion
    assert stats.chi2.sf(statistic, freedom) > 1e-6


@pytest.mark.parametrize(("batch_size", "examples"), SIZES)
def test_the_batches_of_balls_in_bins_hold_every_example_once_a_pass(batch_size: int, examples: int) -> None:
    sampling = Sampling("balls-in-bins", batch_size, examples)
    steps = sampling.steps_per_epoch
    for epoch in range(3):
        used = np.concatenate([sampling.batch(5, 2, step) for step in range(epoch * steps, (epoch + 1) * steps)])
        assert sorted(used.tolist()) == list(range(examples))
    assert sampling.participations(range(steps + 1)) == 2


def test_balls_in_bins_choose_their_steps_independently() -> None:
    """Chi-square of the steps of two examples in 4,000 passes, 16 cells; false alarm 1e-6, fixed seed."""
    sampling = Sampling("balls-in-bins", 2, 8)
    batches = [[set(sampling.batch(4, 0, 4 * epoch + slot).tolist()) for slot in range(4)] for epoch in range(4000)]
    chosen = [[next(slot for slot in range(4) if ball in slots[slot]) for ball in (0, 1)] for slots in batches]
    counts = Counter(map(tuple, chosen))
    assert stats.chisquare([counts[pair] for pair in product(range(4), repeat=2)]).pvalue > 1e-6


def test_poisson_batches_have_binomial_sizes_and_may_be_empty() -> None:
    """Chi-square against Binomial(20, 0.1), pooled from 6 on; false alarm 1e-6, fixed seed."""
    sampling = Sampling("poisson", 2, 20)
    sizes = np.array([len(sampling.batch(4, 0, step)) for step in range(4000)])
    assert sizes.min() == 0
    observed = np.bincount(np.minimum(sizes, 6), minlength=7)
    expected = 4000 * np.append(stats.binom.pmf(range(6), 20, 0.1), stats.binom.sf(5, 20, 0.1))
    assert stats.chisquare(observed, expected).pvalue > 1e-6


@pytest.mark.parametrize(("batch_size", "examples"), SIZES)
def test_participations_bound_what_is_counted(batch_size: int, examples: int) -> None:
    for kind, start, length in product(KINDS, [0, 1, 5], [0, 1, 2, 7, 30]):
        steps = range(start, start + length)
        sampling = Sampling(kind, batch_size, examples)  # type: ignore[arg-type]
        uses = Counter(index for step in steps for index in sampling.batch(0, 0, step).tolist())
        assert max(uses.values(), default=0) <= sampling.participations(steps)


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_participations_are_reached(length: int) -> None:
    """Batches that use the whole pass leave no example out: the count is exact; one batch a pass repeats everything."""
    for sampling in (Sampling("shuffled", 5, 15), Sampling("shuffled", 5, 5), Sampling("fixed", 5, 5)):
        steps = range(length * sampling.steps_per_epoch)
        uses = Counter(index for step in steps for index in sampling.batch(0, 0, step).tolist())
        assert max(uses.values()) == sampling.participations(steps)


def test_participations_by_hand() -> None:
    shuffled = Sampling("shuffled", 10, 35)  # three steps a pass
    assert shuffled.participations([]) == 0
    assert shuffled.participations([0, 1, 2]) == 1
    assert shuffled.participations([2, 3]) == 2
    assert shuffled.participations([0, 3, 6, 100]) == 4
    assert shuffled.participations([0, 0, 1, 3]) == 3, "a batch released twice is used twice"
    assert Sampling("fixed", 10, 35).participations([0, 1, 2]) == 3
    assert Sampling("poisson", 10, 35).participations(range(7)) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_larger_than_the_data_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="a batch of 11 is more than the 10 examples"):
        Sampling(kind, 11, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        Sampling(kind, 0, 10)  # type: ignore[arg-type]
