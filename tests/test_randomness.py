"""Streams depend on seed, purpose and indices, and on nothing else."""

import itertools
import random

import numpy as np
import pytest
import torch

from fedpriv.randomness import generator_states, numpy_stream, seeded_generators, torch_stream


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


@pytest.mark.parametrize("generator", range(3))
def test_the_state_of_each_global_generator_shows(generator: int) -> None:
    with seeded_generators(1, torch.device("cpu")):
        states = generator_states()
        assert generator_states() == states
        [lambda: torch.rand(()), np.random.rand, random.random][generator]()
        assert generator_states() != states
