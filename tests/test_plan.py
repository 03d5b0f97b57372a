"""The plan binds what is done and what is claimed."""

import math

import pytest
import torch

from fedpriv.accounting import guarantee
from fedpriv.accounting.release import Release
from fedpriv.config import Experiment
from fedpriv.errors import InputError
from fedpriv.gradients import DenseGradients
from fedpriv.plan import participants, plan_client

TENSORS = (12, 3)


def experiment(**sections: dict[str, object]) -> Experiment:
    return Experiment.model_validate({"training": {"batch_size": 10}, **sections})


@pytest.mark.parametrize("sampling", ["shuffled", "fixed", "poisson"])
@pytest.mark.parametrize(
    "federation",
    [
        {"rounds": 25},
        {"rounds": 4, "algorithm": "fedavg"},
        {"rounds": 30, "clients_per_round": 3},
    ],
    ids=lambda federation: "-".join(map(str, federation.values())),
)
def test_the_claimed_participations_bound_what_the_batches_use(sampling: str, federation: dict[str, object]) -> None:
    """Count how often each example really is in a batch. Exact for shuffled passes, an upper bound otherwise."""
    settings = experiment(federation={"clients": 5, **federation}, training={"batch_size": 10, "sampling": sampling})
    plan = plan_client(settings, 2, 50, TENSORS)
    rounds = [r for r in range(1, settings.federation.rounds + 1) if 2 in participants(settings, r)]
    used = torch.zeros(50, dtype=torch.int64)
    for number in rounds:
        for step in plan.steps(number):
            used[plan.batch(step)] += 1
    claimed = plan.participations(rounds)
    assert int(used.max()) <= claimed
    if sampling == "shuffled":
        passes = {step // 5 for number in rounds for step in plan.steps(number)}
        assert claimed == len(passes)
    else:
        assert claimed == sum(len(plan.steps(number)) for number in rounds)


@pytest.mark.parametrize("sampling", ["shuffled", "fixed", "poisson"])
@pytest.mark.parametrize("unit", ["example", "update"])
def test_a_target_epsilon_is_met_and_not_by_far(sampling: str, unit: str) -> None:
    settings = experiment(
        training={"batch_size": 10, "sampling": sampling},
        mechanism={"name": "gaussian", "target_epsilon": 3.0, "unit": unit},
        federation={"rounds": 12, "clients_per_round": 4},
    )
    plan = plan_client(settings, 1, 50, TENSORS)
    rounds = [r for r in range(1, 13) if 1 in participants(settings, r)]
    assert (plan.config.epsilon, plan.config.target_epsilon) == (None, None)
    reached = plan.guarantee(rounds).epsilon
    assert reached is not None
    assert 3.0 * (1 - 2e-3) <= reached <= 3.0


def test_the_nominal_epsilon_is_twice_kappa() -> None:
    plan = plan_client(experiment(mechanism={"name": "vmf", "epsilon": 50.0}), 0, 50, TENSORS)
    assert (plan.config.kappa, plan.config.epsilon) == (25.0, None)
    assert plan.guarantee([1]).nominal_epsilon == 50.0


@pytest.mark.parametrize(("blocks", "sizes"), [("whole", (15,)), ("layer", (12, 3))])
def test_the_ledger_sees_the_blocks_that_the_noise_has(blocks: str, sizes: tuple[int, ...]) -> None:
    plan = plan_client(experiment(mechanism={"name": "vmf", "kappa": 4.0, "blocks": blocks}), 0, 50, TENSORS)
    expected = guarantee(Release("vmf", "example", "shuffled", 0.2, 1, sizes, 4.0, None, 1.0, 1e-5))
    assert plan.guarantee([1, 2]) == expected


@pytest.mark.parametrize("examples", [1, 7])
def test_the_gaussian_noise_has_the_sigma_of_the_ledger(examples: int) -> None:
    """4,000 draws of 15 numbers: the sample deviation is within 5 of its standard errors (false alarm below 1e-6)."""
    plan = plan_client(
        experiment(mechanism={"name": "gaussian", "sigma": 1.7, "clip_norm": 0.5}, federation={"rounds": 4000}),
        0, 50, TENSORS,
    )  # fmt: skip
    zero = DenseGradients({"a": torch.zeros(examples, 12), "b": torch.zeros(examples, 3)})
    draws = torch.cat([value.flatten() for step in range(4000) for value in plan.release_gradient(zero, step).values()])
    expected = 1.7 * 0.5 / 10
    assert abs(draws.std().item() / expected - 1) < 5 / math.sqrt(2 * draws.numel())


def test_streams_of_other_steps_and_clients_differ() -> None:
    settings = experiment(mechanism={"name": "gaussian", "sigma": 1.0})
    zero = DenseGradients({"a": torch.zeros(1, 12), "b": torch.zeros(1, 3)})
    plans = [plan_client(settings, client, 50, TENSORS) for client in (0, 1)]
    released = [plan.release_gradient(zero, step)["a"] for plan in plans for step in (0, 1)]
    assert len({tuple(value.tolist()) for value in released}) == 4
    assert torch.equal(plans[0].release_gradient(zero, 0)["a"], released[0])


def test_the_batch_must_fit_the_client() -> None:
    with pytest.raises(InputError, match="batch_size = 10 is larger than the data of client 4: 9 examples"):
        plan_client(experiment(), 4, 9, TENSORS)


@pytest.mark.parametrize("asked", [1, 3, 8])
def test_participants_are_a_public_function_of_the_seed(asked: int) -> None:
    settings = experiment(federation={"clients": 8, "clients_per_round": asked, "rounds": 50})
    rounds = [participants(settings, number) for number in range(1, 51)]
    assert rounds == [participants(settings, number) for number in range(1, 51)]
    assert all(len(set(chosen)) == asked and list(chosen) == sorted(chosen) for chosen in rounds)
    assert {client for chosen in rounds for client in chosen} == set(range(8))
