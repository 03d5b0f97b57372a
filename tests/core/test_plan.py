"""The plan binds what is done and what is claimed."""

from dataclasses import replace

import pytest
import torch

from fedpriv.accounting import guarantee
from fedpriv.accounting.release import Release
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.plan import Plan, participants, plan_client
from fedpriv.data.sampling import Sampling
from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.mechanisms.machinery.redistribution import uniform_shares
from tests.noise import stream

TENSORS = (12, 3)
SHARES = uniform_shares({"a": torch.zeros(12), "b": torch.zeros(3)})


def experiment(**sections: dict[str, object]) -> Experiment:
    return Experiment.model_validate({"training": {"batch_size": 10}, **sections})


@pytest.mark.parametrize("sampling", ["shuffled", "fixed", "poisson", "balls-in-bins"])
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
    if sampling in ("shuffled", "balls-in-bins"):
        passes = {step // 5 for number in rounds for step in plan.steps(number)}
        assert claimed == len(passes)
    else:
        assert claimed == sum(len(plan.steps(number)) for number in rounds)


def test_steps_of_balls_in_bins_have_as_many_draws_whoever_is_in_them() -> None:
    """Of uniform directions the squared length of a sum is on average their number: 1,000 blocks, 6 deviations."""
    settings = experiment(
        training={"batch_size": 1, "sampling": "balls-in-bins"},
        mechanism={"name": "vmf", "kappa": 0.0, "blocks": "size:30"},
    )
    plan = plan_client(settings, 0, 2, [30_000])
    for examples in range(3):
        released = plan.release_gradient(DenseGradients({"w": torch.ones(examples, 30_000)}), stream(examples))
        assert float(released["w"].square().sum()) / 1000 == pytest.approx(2, abs=0.07)


@pytest.mark.parametrize("sampling", ["shuffled", "fixed", "poisson"])
@pytest.mark.parametrize("unit", ["example", "update"])
@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "gaussian"},
        {"name": "laplace"},
        {"name": "hgm"},
        *({"name": "vmf", "blocks": blocks} for blocks in ("whole", "layer", "size:4")),
    ],
    ids=lambda mechanism: "-".join(mechanism.values()),
)
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_a_target_epsilon_is_met_and_not_by_far(
    sampling: str, unit: str, mechanism: dict[str, str], algorithm: str
) -> None:
    """For the rounds in which the client will be asked, and by the plan's own ledger; a little less noise misses it."""
    settings = experiment(
        training={"batch_size": 10, "sampling": sampling},
        mechanism={**mechanism, "target_epsilon": 3.0, "unit": unit},
        federation={"rounds": 12, "clients_per_round": 4, "algorithm": algorithm},
    )
    plan = plan_client(settings, 1, 50, TENSORS, SHARES)
    rounds = [r for r in range(1, 13) if 1 in participants(settings, r)]
    assert 0 < len(rounds) < 12
    assert plan.config == plan.config.with_noise(plan.config.noise)
    reached = plan.guarantee(rounds).epsilon
    assert reached is not None
    assert 3.0 * (1 - 2e-3) <= reached <= 3.0
    noise = plan.config.noise
    assert noise is not None
    quieter = replace(plan, config=plan.config.with_noise(noise * (1.01 if mechanism["name"] == "vmf" else 1 / 1.01)))
    missed = quieter.guarantee(rounds).epsilon
    assert missed is not None
    assert missed > 3.0


@pytest.mark.parametrize("name", ["gaussian", "hgm"])
@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_the_ledger_and_the_calibration_are_told_the_adjacency(name: str, adjacency: str) -> None:
    settings = experiment(
        training={"batch_size": 10, "sampling": "poisson"},
        mechanism={"name": name, "adjacency": adjacency, "target_epsilon": 3.0},
        federation={"rounds": 12},
    )
    plan = plan_client(settings, 1, 50, TENSORS, SHARES)
    told = plan.accounted(range(1, 13))
    assert told.adjacency == adjacency
    reached = plan.guarantee(range(1, 13))
    assert reached.adjacency.startswith(f"{adjacency}:")
    assert reached.epsilon is not None
    assert 3.0 * (1 - 2e-3) <= reached.epsilon <= 3.0


@pytest.mark.parametrize("name", ["gaussian", "hgm"])
def test_epsilon_of_single_examples_is_the_runs(name: str) -> None:
    """As experiment files of earlier versions have it."""
    options = {"name": name, "delta": 1e-6}
    plans = [
        plan_client(experiment(mechanism={**options, key: 3.0}), 0, 50, TENSORS, SHARES)
        for key in ("epsilon", "target_epsilon")
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", ["gaussian", "laplace", "vmf", "hgm"])
@pytest.mark.parametrize("unit", ["example", "update"])
def test_a_client_that_is_never_asked_has_a_plan(name: str, unit: str) -> None:
    settings = experiment(
        mechanism={"name": name, "target_epsilon": 3.0, "unit": unit},
        federation={"rounds": 1, "clients_per_round": 1},
    )
    (asked,) = participants(settings, 1)
    plan = plan_client(settings, (asked + 1) % 8, 50, TENSORS, SHARES)
    assert plan.guarantee([]).epsilon == 0
    once = plan.guarantee([1]).epsilon
    assert once is not None
    assert once <= 3.0


@pytest.mark.parametrize(
    ("mechanism", "rounds", "says"),
    [
        ({"name": "gaussian", "target_epsilon": 1e-9}, 1000, "target_epsilon = 1e-09 for client 2: "),
        ({"name": "hgm", "target_epsilon": 1e-9}, 1000, "target_epsilon = 1e-09 for client 2: "),
        ({"name": "laplace", "target_epsilon": 1e-9}, 1000, "target_epsilon = 1e-09 for client 2: "),
        ({"name": "vmf", "target_epsilon": 1e-9}, 1000, "target_epsilon = 1e-09 for client 2: "),
        ({"name": "vmf", "target_epsilon": 1e9}, 1, "target_epsilon = 1e+09 for client 2: "),
    ],
)
def test_a_target_that_no_noise_reaches_is_one_line(mechanism: dict[str, object], rounds: int, says: str) -> None:
    settings = experiment(mechanism={**mechanism, "unit": "update", "delta": 1e-300}, federation={"rounds": rounds})
    with pytest.raises(InputError) as caught:
        plan_client(settings, 2, 50, TENSORS, SHARES)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_nominal_epsilon_is_twice_kappa() -> None:
    plan = plan_client(experiment(mechanism={"name": "vmf", "epsilon": 50.0}), 0, 50, TENSORS)
    assert (plan.config.kappa, plan.config.epsilon) == (25.0, None)
    assert plan.guarantee([1]).nominal_epsilon == 50.0


@pytest.mark.parametrize(("blocks", "sizes"), [("whole", (15,)), ("layer", (12, 3)), ("size:4", (4, 4, 4, 3))])
def test_the_ledger_sees_the_blocks_that_the_noise_has(blocks: str, sizes: tuple[int, ...]) -> None:
    plan = plan_client(experiment(mechanism={"name": "vmf", "kappa": 4.0, "blocks": blocks}), 0, 50, TENSORS)
    expected = guarantee(Release("vmf", "example", "shuffled", 0.2, 1, sizes, 4.0, 1e-5))
    assert plan.guarantee([1, 2]) == expected


@pytest.mark.parametrize(
    ("mechanism", "noise"),
    [
        ({"name": "laplace", "epsilon": 0.25}, 4.0),
        ({"name": "laplace", "scale": 0.25}, 0.25),
        ({"name": "laplace", "epsilon": 0.25, "unit": "update"}, 4.0),
        ({"name": "vmf", "epsilon": 0.25, "unit": "update"}, 0.125),
        ({"name": "gaussian", "sigma": 0.25, "unit": "update"}, 0.25),
        ({"name": "hgm", "sigma": 0.25}, 0.25),
    ],
)
def test_noise_as_it_is_given(mechanism: dict[str, object], noise: float) -> None:
    plan = plan_client(experiment(mechanism=mechanism), 0, 50, TENSORS, SHARES)
    assert plan.config.noise == noise
    assert plan.config.epsilon is None


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 2.0},
        {"name": "laplace", "scale": 2.0},
        {"name": "vmf", "kappa": 2.0},
        {"name": "hgm", "sigma": 2.0},
    ],
    ids=lambda mechanism: str(mechanism["name"]),
)
def test_the_ledger_is_told_the_mechanisms_own_noise(mechanism: dict[str, object]) -> None:
    plan = plan_client(experiment(mechanism={**mechanism, "clip_norm": 5.0, "delta": 1e-7}), 0, 50, TENSORS, SHARES)
    told = plan.accounted([1])
    assert (told.mechanism, told.noise, told.delta) == (mechanism["name"], 2.0, 1e-7)


def test_a_round_of_balls_in_bins_that_was_asked_twice_is_accounted_as_one_of_shuffled_batches() -> None:
    """Under replace-one, which implies zero-out: of that nothing is proven without amplification."""
    training = {"batch_size": 10, "sampling": "balls-in-bins"}
    bins = experiment(mechanism={"name": "gaussian", "sigma": 2.0, "adjacency": "zero-out"}, training=training)
    once, twice = (plan_client(bins, 0, 50, TENSORS).accounted(rounds) for rounds in ([1], [1, 1]))
    assert (once.sampling, once.adjacency) == ("balls-in-bins", "zero-out")
    assert (twice.sampling, twice.adjacency, twice.participations) == ("shuffled", "replace-one", 2)


@pytest.mark.parametrize(
    "config",
    [
        mechanism_settings({"name": "gaussian", "epsilon": 1.0}),
        mechanism_settings({"name": "vmf", "target_epsilon": 1.0}),
        mechanism_settings({"name": "hgm", "sigma": 1.0}),
    ],
    ids=lambda config: config.name,
)
def test_no_plan_can_claim_something_else_than_it_does(config: MechanismSettings) -> None:
    """Settings with a target still in them, or without r, are refused."""
    with pytest.raises(ValueError, match=r"itself|needs r"):
        Plan(0, Sampling("shuffled", 10, 50), 1, config, TENSORS, 0)


@pytest.mark.parametrize("sizes", [(12, 4), (15,), (3, 12), (12, 3, 1)])
def test_gradients_that_were_not_accounted_for_are_refused(sizes: tuple[int, ...]) -> None:
    """The figures of vmf depend on the numbers of coordinates."""
    plan = plan_client(experiment(mechanism={"name": "vmf", "kappa": 4.0}), 0, 50, TENSORS)
    gradients = {str(number): torch.ones(1, size) for number, size in enumerate(sizes)}
    with pytest.raises(ValueError, match=r"planned and accounted for: \(12, 3\)"):
        plan.release_gradient(DenseGradients(gradients), stream())
    with pytest.raises(ValueError, match=r"planned and accounted for: \(12, 3\)"):
        plan.release_update({name: value[0] for name, value in gradients.items()}, stream())


def test_the_batch_must_fit_the_client() -> None:
    with pytest.raises(InputError, match="batch_size = 10: larger than the data of client 4: 9 examples"):
        plan_client(experiment(), 4, 9, TENSORS)


@pytest.mark.parametrize("asked", [1, 3, 8])
def test_participants_are_a_public_function_of_the_seed(asked: int) -> None:
    settings = experiment(federation={"clients": 8, "clients_per_round": asked, "rounds": 50})
    rounds = [participants(settings, number) for number in range(1, 51)]
    assert rounds == [participants(settings, number) for number in range(1, 51)]
    assert all(len(set(chosen)) == asked and list(chosen) == sorted(chosen) for chosen in rounds)
    assert {client for chosen in rounds for client in chosen} == set(range(8))
