"""Who may still take part: never above the target, never stopped without need, the same whenever it is asked."""

import math
from collections.abc import Sequence

import pytest
import torch

from fedpriv.accounting import Release, ceilings, running_epsilon
from fedpriv.core import budget as budget_module
from fedpriv.core.budget import Budget, last_round
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.plan import Plan, participants, plan_client
from fedpriv.core.randomness import numpy_stream
from fedpriv.mechanisms.machinery.redistribution import uniform_shares
from tests.cases import in_one_test

SIZES = (50, 53, 97, 50, 200)
TENSORS = (12, 3)

MECHANISMS = {
    "gaussian": {"name": "gaussian", "sigma": 3.0},
    "laplace": {"name": "laplace", "scale": 8.0},
    "vmf": {"name": "vmf", "kappa": 0.4},
    "vmf-layer": {"name": "vmf", "kappa": 0.2, "blocks": "layer"},
    "hgm": {"name": "hgm", "sigma": 3.0},
}


def experiment(**sections: dict[str, object]) -> Experiment:
    federation = {"clients": len(SIZES), "rounds": 60, **sections.pop("federation", {})}
    training = {"batch_size": 10, **sections.pop("training", {})}
    return Experiment.model_validate(
        {"federation": federation, "training": training, "adversary": {"attacks": []}, **sections}
    )


def plans_of(settings: Experiment) -> list[Plan]:
    shares = uniform_shares({str(number): torch.zeros(size) for number, size in enumerate(TENSORS)})
    return [plan_client(settings, client, size, TENSORS, shares) for client, size in enumerate(SIZES)]


def run(settings: Experiment, plans: Sequence[Plan]) -> tuple[Budget, dict[int, tuple[int, ...]]]:
    """All rounds, as the server goes through them."""
    budget, asked = Budget(settings, plans), {}
    for number in range(1, settings.federation.rounds + 1):
        if budget.is_used_up(number):
            break
        asked[number] = participants(settings, number, budget.left(number))
        budget.spend(number, asked[number])
    return budget, asked


def proven(plan: Plan, asked: dict[int, tuple[int, ...]]) -> float:
    epsilon = plan.guarantee([number for number, who in asked.items() if plan.client in who]).epsilon
    return math.inf if epsilon is None else epsilon


@in_one_test("sampling", ["shuffled", "fixed", "poisson"])
@in_one_test("federation", [{}, {"algorithm": "fedavg"}])
@in_one_test("unit", ["example", "update"])
@in_one_test("epochs", [1, 3])
def test_further_participations_add_up_to_those_of_the_ledger(
    sampling: str, federation: dict[str, object], unit: str, epochs: int
) -> None:
    """Rounds in which a client is asked are drawn at random; the ledger counts them all at once."""
    settings = experiment(
        federation=federation,
        training={"sampling": sampling, "local_epochs": epochs},
        mechanism={"name": "gaussian", "sigma": 1.0, "unit": unit},
    )
    for plan in plans_of(settings):
        drawn = numpy_stream(5, "test", plan.client).random(60) < 0.6
        rounds, count, last = [], 0, 0
        for number in [number for number in range(1, 61) if drawn[number - 1]]:
            count += plan.further_participations(last, number)
            last = number
            rounds.append(number)
            assert count == plan.participations(rounds)


SAMPLINGS = ("shuffled", "fixed", "poisson")
FEDERATIONS: tuple[dict[str, object], ...] = ({}, {"clients_per_round": 2}, {"algorithm": "fedavg"})


# Each mechanism with each sampling, and each of the two with each kind of federation.
@pytest.mark.parametrize("column", range(len(SAMPLINGS)), ids=SAMPLINGS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clients_stop_at_the_target_and_not_before(mechanism: str, column: int) -> None:
    """The target is a share of what the worst client would reach without one: less of it where not all are asked."""
    sampling, federation = SAMPLINGS[column], FEDERATIONS[(list(MECHANISMS).index(mechanism) + column) % 3]
    share = 0.3 if federation else 0.7
    free = experiment(federation=federation, training={"sampling": sampling}, mechanism=MECHANISMS[mechanism])
    unlimited, everybody = run(free, plans_of(free))
    assert unlimited.stops == ()
    assert all(len(who) == free.federation.clients_per_round or len(SIZES) for who in everybody.values())
    assert unlimited.worst_epsilon is not None
    once = max(proven(plan, {1: (plan.client,)}) for plan in plans_of(free))
    target = max(share * unlimited.worst_epsilon, 1.01 * once)

    settings = experiment(
        federation={**federation, "target_epsilon": target},
        training={"sampling": sampling},
        mechanism=MECHANISMS[mechanism],
    )
    plans = plans_of(settings)
    budget, asked = run(settings, plans)
    if all(proven(plan, everybody) <= target for plan in plans):  # the running figure lies above the final ledger's
        assert budget.stops == ()
        return
    assert budget.stops
    for plan in plans:
        assert proven(plan, asked) <= target
    for stop in budget.stops:
        mine = [number for number, who in asked.items() if stop.client in who]
        assert stop.round == max(mine, default=0)
        assert stop.epsilon <= target
        assert stop.next_epsilon is None or stop.next_epsilon > target
    assert {stop.client for stop in budget.stops}.isdisjoint(budget.left(settings.federation.rounds))


# Of every release the running figure is compared with the final one in test_accounting_guarantees.
@pytest.mark.parametrize(
    ("mechanism", "sampling"), list(zip([*MECHANISMS, "calibrated"], [*SAMPLINGS, *reversed(SAMPLINGS)], strict=True))
)
def test_the_running_figure_is_the_worst_clients_and_never_below_the_proven_one(mechanism: str, sampling: str) -> None:
    settings = experiment(
        federation={"clients_per_round": 3},
        training={"sampling": sampling},
        mechanism={**MECHANISMS, "calibrated": {"name": "gaussian", "target_epsilon": 3.0}}[mechanism],
    )
    plans = plans_of(settings)
    budget, asked = Budget(settings, plans), {}
    for number in range(1, 61):
        asked[number] = participants(settings, number, budget.left(number))
        budget.spend(number, asked[number])
        rounds = {plan.client: [past for past, who in asked.items() if plan.client in who] for plan in plans}
        assert budget.worst_epsilon == max(running_epsilon(plan.accounted(rounds[plan.client])) for plan in plans)
    assert budget.worst_epsilon is not None
    assert max(proven(plan, asked) for plan in plans) <= budget.worst_epsilon


@pytest.mark.parametrize("federation", [{}, {"clients_per_round": 2}])
def test_the_past_is_replayed_to_the_same_state(federation: dict[str, object]) -> None:
    settings = experiment(federation={**federation, "target_epsilon": 4.0}, mechanism=MECHANISMS["gaussian"])
    plans = plans_of(settings)
    whole, asked = run(settings, plans)
    assert len(whole.stops) >= 2
    for until in (0, 1, 7, max(asked)):
        again = Budget(settings, plans)
        again.replay({number: who for number, who in reversed(asked.items()) if number <= until})
        for number in range(until + 1, max(asked) + 1):
            assert participants(settings, number, again.left(number)) == asked[number]
            again.spend(number, asked[number])
        again.left(settings.federation.rounds)
        whole.left(settings.federation.rounds)
        assert (again.stops, again.worst_epsilon) == (whole.stops, whole.worst_epsilon)


CEILED: dict[str, dict[str, object]] = {**MECHANISMS, "blocks": {"name": "vmf", "kappa": 0.2, "blocks": "size:5"}}


@pytest.mark.parametrize(("mechanism", "unit"), [*((name, "example") for name in CEILED), ("hgm", "update")])
def test_clients_stop_before_a_ceiling_is_exceeded_and_not_before(mechanism: str, unit: str) -> None:
    """Every mechanism that has a ceiling; one more round of what stopped would exceed it, as ceilings() says."""
    own = {**CEILED[mechanism], "unit": unit, "candidates": 20}
    place = list(CEILED).index(mechanism)
    sampling, federation = SAMPLINGS[(place + 2) % 3], {**FEDERATIONS[place % 3], "rounds": 24}
    free = experiment(federation=federation, training={"sampling": sampling}, mechanism=own)
    everybody = run(free, plans_of(free))[1]
    reached = max(told(plan, everybody) for plan in plans_of(free))
    once = max(told(plan, {1: (plan.client,)}) for plan in plans_of(free))
    target = max(once, (reached + 0.05) / 2)
    settings = experiment(
        federation={**federation, "target_ceiling": target}, training={"sampling": sampling}, mechanism=own
    )
    plans = plans_of(settings)
    budget, asked = run(settings, plans)
    assert budget.stops
    assert all(told(plan, asked) <= target for plan in plans)
    for stop in budget.stops:
        mine = [number for number, who in asked.items() if stop.client in who]
        assert stop.round == max(mine, default=0)
        assert stop.target == "target_ceiling"
        assert stop.ceiling == pytest.approx(told(plans[stop.client], asked), abs=1e-12)
        assert stop.ceiling <= target < (stop.next_ceiling or 0.0)
    if mechanism not in ("gaussian", "vmf"):
        return
    again = Budget(settings, plans)
    again.replay({number: who for number, who in asked.items() if number <= 7})
    for number in range(8, max(asked) + 1):
        assert participants(settings, number, again.left(number)) == asked[number]
        again.spend(number, asked[number])
    again.left(settings.federation.rounds)
    budget.left(settings.federation.rounds)
    assert again.stops == budget.stops


def told(plan: Plan, asked: dict[int, tuple[int, ...]]) -> float:
    rounds = [number for number, who in asked.items() if plan.client in who]
    (ceiling,) = ceilings(plan.accounted(rounds), [0.05])
    assert ceiling.gamma is not None
    return ceiling.gamma


def test_the_nearer_of_two_targets_stops() -> None:
    for target, key in ((0.5, "target_epsilon"), (0.024, "target_ceiling")):
        both = {"target_epsilon": 4.0, "target_ceiling": target}
        settings = experiment(federation=both, mechanism=MECHANISMS["gaussian"])
        budget, asked = run(settings, plans_of(settings))
        assert {stop.target for stop in budget.stops} == {key}
        assert all(proven(plan, asked) <= 4.0 for plan in plans_of(settings))


def test_noise_for_a_ceiling_stops_nobody_at_the_same() -> None:
    settings = experiment(
        federation={"target_ceiling": 0.05}, mechanism={"name": "gaussian", "target_ceiling": 0.05, "candidates": 100}
    )
    budget, asked = run(settings, plans_of(settings))
    assert budget.stops == ()
    assert len(asked) == 60


@in_one_test(
    ("federation", "mechanism", "words"),
    [
        (0.05, {}, r"federation.target_ceiling = 0.05: mechanism.name = 'none' proves no ceiling; allowed: gaussian"),
        (0.05, {"name": "percentile"}, "'percentile' proves no ceiling; allowed: gaussian, hgm, laplace, vmf"),
        (0.005, {"name": "vmf", "kappa": 2}, "target_ceiling = 0.005: above mechanism's guess, 0.01, and below 1"),
        (0.5, {"name": "vmf", "kappa": 2, "candidates": 2}, "target_ceiling = 0.5: above mechanism's guess, 0.5"),
        (0.1, {"name": "vmf", "target_ceiling": 0.05}, "above mechanism.target_ceiling = 0.05, for which the noise"),
        (0.1, {"name": "vmf", "kappa": 2, "candidates": 9, "ceiling_guess": 0.1}, "candidates = 9: in place of"),
        (None, {"name": "vmf", "target_ceiling": 0.01}, "target_ceiling = 0.01: above the guess, 0.01, and below 1"),
        (None, {"name": "vmf", "target_ceiling": 0.04, "candidates": 25}, "above the guess, 0.04, and below 1"),
        (None, {"name": "vmf", "kappa": 1, "candidates": 1}, "mechanism.vmf.candidates"),
    ],
)
def test_a_ceiling_that_makes_no_sense_is_refused(federation, mechanism, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        experiment(federation={"target_ceiling": federation}, mechanism=mechanism)


def test_rounds_stay_full_while_enough_clients_are_left() -> None:
    settings = experiment(
        federation={"clients_per_round": 2, "rounds": 200, "target_epsilon": 4.0}, mechanism=MECHANISMS["gaussian"]
    )
    budget, asked = run(settings, plans_of(settings))
    gone = {stop.client: stop.round for stop in budget.stops}
    for number, who in asked.items():
        left = [client for client in range(len(SIZES)) if number <= gone.get(client, number)]
        assert len(who) == min(2, len(left))


def test_a_run_ends_when_too_few_are_left() -> None:
    settings = experiment(
        federation={"target_epsilon": 4.0, "min_clients": 3, "rounds": 500}, mechanism=MECHANISMS["gaussian"]
    )
    plans = plans_of(settings)
    budget, asked = run(settings, plans)
    end = max(asked)
    assert end < 500
    assert len(asked[end]) >= 3 > len(budget.left(end + 1))
    assert last_round(settings, plans, 500) == end
    assert last_round(settings, plans, 3) == 3


@pytest.mark.parametrize(("clients", "refused"), [(1, False), (2, True), (5, True)])
def test_a_target_that_allows_no_round_is_refused(clients: int, refused: bool) -> None:
    """With fixed batches the largest client, with its small rate, pays less than the others."""
    settings = experiment(
        federation={"target_epsilon": 1e-9, "min_clients": clients},
        training={"sampling": "fixed"},
        mechanism=MECHANISMS["vmf"],
    )
    plans = plans_of(settings)
    costs = sorted(proven(plan, {1: (plan.client,)}) for plan in plans)
    assert costs[0] < costs[1]
    between = settings.model_copy(
        update={"federation": settings.federation.model_copy(update={"target_epsilon": (costs[0] + costs[1]) / 2})}
    )
    if refused:
        with pytest.raises(InputError, match=r"target_epsilon = .* allows no round: .* 4 of 5 clients above it"):
            Budget(between, plans)
    else:
        assert Budget(between, plans).left(1) == (4,)
        assert [(stop.round, stop.epsilon) for stop in run(between, plans)[0].stops[:4]] == [(0, 0.0)] * 4
    with pytest.raises(InputError, match="5 of 5 clients above it"):
        Budget(settings, plans)


def test_without_a_mechanism_nothing_is_proven() -> None:
    settings = experiment()
    budget, asked = run(settings, plans_of(settings))
    assert budget.worst_epsilon is None
    assert len(asked) == 60


def test_each_figure_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 clients of two sizes over 300 rounds: what changes is the number of passes, so there is little to compute."""
    computed: list[Release] = []
    real = budget_module.running_epsilon

    def counted(release: Release) -> float:
        computed.append(release)
        return real(release)

    monkeypatch.setattr(budget_module, "running_epsilon", counted)
    settings = experiment(
        federation={"clients": 200, "rounds": 300, "target_epsilon": 100.0}, mechanism=MECHANISMS["gaussian"]
    )
    plans = [plan_client(settings, client, 50 + client % 2, TENSORS) for client in range(200)]
    run(settings, plans)
    assert len(computed) == len(set(computed)) <= 2 * (300 // 5 + 1)


@in_one_test(
    ("mechanism", "words"),
    [
        ({}, "mechanism.name = 'none' proves no epsilon"),
        ({"name": "vmf", "target_epsilon": 2}, "above mechanism.target_epsilon = 2, for which the noise"),
        ({"name": "gaussian", "epsilon": 2}, "above mechanism.epsilon = 2, for which the noise"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(mechanism: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experiment(federation={"target_epsilon": 3.0}, mechanism=mechanism)


@in_one_test(
    "mechanism",
    [
        {"name": "vmf", "target_epsilon": 3},
        {"name": "gaussian", "epsilon": 5},
        {"name": "gaussian", "epsilon": 2, "unit": "update"},
        {"name": "vmf", "epsilon": 2},
    ],
)
def test_a_target_beside_another_epsilon_is_taken(mechanism: dict[str, object]) -> None:
    settings = experiment(federation={"target_epsilon": 3.0}, mechanism=mechanism)
    assert settings.federation.target_epsilon == 3.0


def test_noise_that_is_calibrated_for_the_target_stops_nobody() -> None:
    """Where the running figure is the final one, both targets may be the same."""
    settings = experiment(
        federation={"target_epsilon": 3.0},
        training={"sampling": "shuffled"},
        mechanism={"name": "gaussian", "target_epsilon": 3.0},
    )
    budget, asked = run(settings, plans_of(settings))
    assert budget.stops == ()
    assert len(asked) == 60


@pytest.mark.parametrize(
    ("name", "sampling", "clients_per_round"),
    [("gaussian", "poisson", None), ("gaussian", "fixed", 2), ("laplace", "fixed", None), ("vmf", "shuffled", 2)],
)
def test_the_final_ledger_decides_whether_all_that_is_planned_may_be_done(
    name: str, sampling: str, clients_per_round: int | None
) -> None:
    """Noise calibrated for the same target stops nobody before that, although the running figure lies above it."""
    settings = experiment(
        federation={"target_epsilon": 3.0, "rounds": 20, "clients_per_round": clients_per_round},
        training={"sampling": sampling},
        mechanism={"name": name, "target_epsilon": 3.0},
    )
    plans = plans_of(settings)
    budget, asked = run(settings, plans)
    if clients_per_round is None:
        assert budget.stops == ()
    assert all(2.99 < stop.epsilon <= 3.0 for stop in budget.stops)
    assert len(asked) == 20
    for plan in plans:
        rounds = [number for number, who in asked.items() if plan.client in who]
        assert proven(plan, asked) <= 3.0
        if sampling == "poisson" and clients_per_round is None:
            assert running_epsilon(plan.accounted(rounds)) > 3.0
