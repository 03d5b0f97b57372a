"""Streams depend on seed, purpose and indices, and on nothing else."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy import stats

from fedpriv.core.randomness import Secret, generator_states, numpy_stream, seeded_generators, torch_stream
from tests.cases import in_one_test


def test_streams_of_other_uses_differ_and_the_same_use_repeats() -> None:
    uses = list(itertools.product((0, 1), ("noise", "batches"), ((), (0,), (1,), (0, 1), (1, 0))))
    for make in (
        lambda seed, purpose, indices: tuple(numpy_stream(seed, purpose, *indices).integers(2**62, size=3)),
        lambda seed, purpose, indices: tuple(
            torch.randint(2**62, (3,), generator=torch_stream(seed, purpose, *indices)).tolist()
        ),
    ):
        first = [make(*use) for use in uses]
        assert len(set(first)) == len(uses)
        assert [make(*use) for use in uses] == first


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    draws = [torch.randn(4, generator=torch_stream(3, "noise", 1))]
    torch.manual_seed(2)
    draws.append(torch.randn(4, generator=torch_stream(3, "noise", 1)))
    assert torch.equal(*draws)
    torch.random.set_rng_state(state)
    numpy_stream(3, "noise").normal(size=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not np.array_equal(numpy_stream(3, "noise").normal(size=4), numpy_stream(4, "noise").normal(size=4))


def test_streams_of_a_secret_differ_in_every_part() -> None:
    """Also where 32 bits of seed did not tell them apart: seed 7, (client, step) = (33, 651) and (79, 503)."""
    secret = Secret.of_seed(7)
    parts: list[tuple[int | bytes, ...]] = [(), (0,), (0, 0), (1,), (b"1",), (b"",), (33, 651), (79, 503), (336, 51)]
    streams = [one.stream(purpose, *each) for one in (secret, Secret.drawn()) for purpose in "ab" for each in parts]
    keys = [stream.key() for stream in streams for _ in range(2)]
    assert len(set(keys)) == len(keys) == 8 * len(parts)
    assert all(len(key) == 16 for key in keys)
    assert secret.stream("a", 33, 651).key() == Secret.of_seed(7).stream("a", 33, 651).key()


def test_a_secret_is_not_shown_and_has_its_length() -> None:
    secret = Secret(bytes(range(32)))
    assert "1f" not in repr(secret)
    assert Secret.drawn() != Secret.drawn()
    with pytest.raises(ValueError, match="a secret of 16 bytes; allowed: 32"):
        Secret(bytes(16))
    assert secret.derived("a") != secret.derived("b") != secret
    assert 2**100 < secret.seed("batches") < 2**128


@in_one_test("law", ["uniform", "numpy's uniform", "numpy's gamma"])
def test_the_laws_of_a_noise_stream(law: str) -> None:
    """A false alarm once in ten thousand times for each, with random seeds; they are fixed."""
    stream = Secret.of_seed(3).stream(law)
    count = 200_000
    if law == "uniform":
        drawn = stream.uniform(count).numpy()
        assert ((drawn * 2**53) % 1 == 0).all()
    else:
        generator = stream.numpy()
        drawn = generator.random(count) if law == "numpy's uniform" else generator.standard_gamma(2.5, count)
    expected = stats.gamma(2.5) if law == "numpy's gamma" else stats.uniform()
    assert stats.kstest(drawn, expected.cdf).pvalue > 1e-4
    assert drawn.min() >= 0


def test_each_call_has_its_own_key() -> None:
    """What a call returns does not depend on how much an earlier one took."""
    few, many = (Secret.of_seed(1).stream("x") for _ in range(2))
    few.uniform(3)
    many.uniform(1000)
    assert torch.equal(few.uniform(5), many.uniform(5))


def global_draws() -> list[float]:
    """One of each global generator."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002 - the global one is meant


def test_all_global_generators_are_seeded_inside_the_block_and_go_on_afterwards() -> None:
    cpu, draws = torch.device("cpu"), {}
    for seed in (5, 5 + (1 << 32), (1 << 64) - 1):
        states = generator_states()
        with seeded_generators(seed, cpu):
            draws[seed] = global_draws()
        assert generator_states() == states
        global_draws()  # what was drawn before is not what counts
        with seeded_generators(seed, cpu):
            assert global_draws() == draws[seed]
    assert all(len({drawn[generator] for drawn in draws.values()}) == 3 for generator in (1, 2))
    states = generator_states()
    with pytest.raises(ValueError, match="inside"), seeded_generators(5, cpu):
        global_draws()
        raise ValueError("inside")
    assert generator_states() == states


@in_one_test("generator", range(3))
def test_the_state_of_each_global_generator_shows(generator: int) -> None:
    with seeded_generators(1, torch.device("cpu")):
        states = generator_states()
        assert generator_states() == states
        [lambda: torch.rand(()), np.random.rand, random.random][generator]()
        assert generator_states() != states
