"""The whole game on real training: known answers, and what the game promises about its draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.attacks.epsilon import is_gaussian
from fedpriv.attacks.intervals import auc_interval
from fedpriv.attacks.membership.attacks import ATTACKS, Signals
from fedpriv.attacks.membership.audit import (
    canaries_in_references,
    draw_references,
    make_attacks,
    membership_signals,
)
from fedpriv.attacks.references import (
    MemberPairs,
    Reference,
    build_pool,
    draw_candidates,
    train_references,
    usual_schedule,
)
from fedpriv.core.errors import InputError
from fedpriv.core.world import World, build_world
from fedpriv.gradients import Vector
from tests.integration.small import experiment

EXAMPLES = 120
MEMORISING = {
    "data": {"train_examples": EXAMPLES},
    "model": {"hidden": [128], "activation": "relu"},
    "federation": {"clients": 2, "rounds": 40, "algorithm": "fedavg"},
    "training": {"batch_size": 20, "learning_rate": 0.3, "local_epochs": 2},
}


def random_labels(world: World) -> World:
    """The same images under labels that nothing but memory can tell."""
    generator = torch.Generator().manual_seed(0)
    data = world.dataset
    drawn = torch.randint(10, (len(data.y_train) + len(data.y_test),), generator=generator)
    train, test = drawn.split([len(data.y_train), len(data.y_test)])
    return replace(world, dataset=replace(data, y_train=train, y_test=test))


def trained(world: World, shares: tuple[np.ndarray, ...]) -> Vector:
    """A target, trained on some rows of the pool."""
    rounds = world.experiment.federation.rounds
    one = train_references(
        world, build_pool(world), [Reference(7, shares)], usual_schedule(world.experiment), [rounds]
    )[rounds]
    return {name: value[0] for name, value in one.items()}


def signals_of(world: World, target: Vector, candidates: MemberPairs, count: int) -> Signals:
    references, inside = draw_references(world, candidates, count, seed=5)
    schedule = usual_schedule(world.experiment)
    last = world.experiment.federation.rounds
    return membership_signals(world, build_pool(world), {last: target}, candidates, references, inside, schedule)


@pytest.fixture(scope="module")
def memorised() -> tuple[World, MemberPairs, Signals]:
    world = random_labels(build_world(experiment(**MEMORISING)))
    candidates = draw_candidates(world, 100, seed=1)
    return world, candidates, signals_of(world, trained(world, world.partitions), candidates, 16)


@pytest.mark.slow
def test_a_model_that_memorised_random_labels_gives_its_members_away(memorised) -> None:
    _, candidates, signals = memorised
    for result in make_attacks({name: attack(signals) for name, attack in ATTACKS.items()}, candidates.truth, seed=0):
        assert result.auc > 0.95, result.attack


@pytest.mark.slow
def test_a_model_trained_without_the_members_tells_nothing(memorised) -> None:
    """The target saw neither kind of candidates: 0.5 lies in every interval at 99.9 % (eight attacks: an alarm in one
    of 120 seeds at most; the seed is fixed)."""
    world, candidates, signals = memorised
    train = len(world.dataset.x_train)
    taken = set(candidates.rows.tolist())
    free = np.array([row for row in range(train + len(world.dataset.x_test)) if row not in taken])
    cuts = np.cumsum([len(rows) for rows in world.partitions])
    others = tuple(np.split(free[:EXAMPLES], cuts)[: len(cuts)])
    without = signals_of(world, trained(world, others), candidates, 2)
    blind = replace(signals, target=without.target, others=without.others)
    for result in make_attacks(
        {name: attack(blind) for name, attack in ATTACKS.items()}, candidates.truth, seed=0, confidence=0.999
    ):
        low, high = result.intervals["auc"]
        assert low <= 0.5 <= high, result.attack


def test_the_gaussian_bound_is_for_normal_noise_without_sampling_alone() -> None:
    found = {
        (name, sampling): is_gaussian(experiment(training={"sampling": sampling}, mechanism={"name": name, key: 1.0}))
        for name, key in (("gaussian", "sigma"), ("hgm", "sigma"), ("laplace", "scale"), ("vmf", "kappa"))
        for sampling in ("shuffled", "fixed", "poisson", "balls-in-bins")
    }
    assert {case for case, normal in found.items() if normal} == {("gaussian", "shuffled"), ("hgm", "shuffled")}


@pytest.mark.slow
def test_canaries_find_that_memory_is_not_private_and_noise_is(memorised) -> None:
    _, _, signals = memorised
    assert canaries_in_references(signals, "lira-online", 1e-5).epsilon > 1.0
    noisy = experiment(**MEMORISING, mechanism={"name": "gaussian", "sigma": 20.0, "clip_norm": 1.0})
    world = random_labels(build_world(replace_rounds(noisy, 3)))
    candidates = draw_candidates(world, 100, seed=1)
    found = signals_of(world, trained(world, world.partitions), candidates, 16)
    proven = world.plans[0].guarantee(range(1, 4)).epsilon
    assert proven is not None
    assert max(canaries_in_references(found, "lira-online", 1e-5, each).epsilon for each in (False, True)) <= proven
    low, high = auc_interval(ATTACKS["lira-online"](found), candidates.truth, 0.999)
    assert low <= 0.5 <= high


def replace_rounds(settings, rounds: int):
    federation = settings.federation.model_copy(update={"rounds": rounds})
    return settings.model_copy(update={"federation": federation})


def test_candidates_and_references_are_what_they_are_said_to_be() -> None:
    world = build_world(experiment(data={"train_examples": 200}))
    candidates = draw_candidates(world, 50, seed=2)
    everyone = np.concatenate(world.partitions)
    assert set(candidates.members) <= set(everyone)
    assert min(candidates.non_members.min(), candidates.population.min()) >= len(world.dataset.x_train)
    assert not set(candidates.non_members) & set(candidates.population)
    references, inside = draw_references(world, candidates, 6, seed=3)
    assert (inside.sum(axis=0) == 3).all()
    assert (inside[::2] == ~inside[1::2]).all()
    for reference, row in zip(references, inside, strict=True):
        held = np.concatenate(reference.shares)
        assert [len(share) for share in reference.shares] == [len(rows) for rows in world.partitions]
        np.testing.assert_array_equal(np.isin(candidates.rows, held), row)
        rest = np.setdiff1d(everyone, candidates.members)
        assert np.isin(rest, held).all()
        assert len(np.unique(held)) == len(everyone)
    assert len({reference.seed for reference in references}) == 6


def test_draws_repeat_and_depend_on_the_seed() -> None:
    world = build_world(experiment(data={"train_examples": 200}))
    first, again, other = (draw_candidates(world, 50, seed=seed) for seed in (2, 2, 3))
    np.testing.assert_array_equal(first.rows, again.rows)
    assert not np.array_equal(first.rows, other.rows)


def test_what_cannot_be_played_is_refused() -> None:
    world = build_world(experiment())
    with pytest.raises(InputError, match="pairs of candidates"):
        draw_candidates(world, 1, seed=0)
    candidates = draw_candidates(world, 10, seed=0)
    for count in (0, 3):
        with pytest.raises(InputError, match="even number"):
            draw_references(world, candidates, count, seed=0)
