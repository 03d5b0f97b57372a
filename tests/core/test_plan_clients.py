"""Clients that are alike: plans, budgets and ledgers of all of them are those of each one by itself."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.accounting import ceilings
from fedpriv.core.budget import Budget
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.plan import Plans, kinds_of, participants, plan_client
from fedpriv.core.progress import Silent
from fedpriv.core.records import LedgerLine, Partition, member_ranges, members_text, named_members
from fedpriv.core.report import load_view, write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.mechanisms.machinery.redistribution import uniform_shares
from tests.integration.small import experiment as small

SIZES = np.array([50, 53, 97, 50, 200, 53, 53, 50, 50, 97])
TENSORS = (12, 3)
SHARES = uniform_shares({"a": torch.zeros(12), "b": torch.zeros(3)})
GIVEN = [{"name": "gaussian", "sigma": 3.0}, {"name": "laplace", "scale": 8.0}, {"name": "hgm", "sigma": 3.0}]
CASES = list(product(GIVEN, ["shuffled", "poisson"], [None, 3], ["fedsgd", "fedavg"]))
CALIBRATED = list(product([{"name": "gaussian", "target_epsilon": 3.0}], ["shuffled"], [None, 3], ["fedsgd", "fedavg"]))


def settings_of(
    mechanism: object, sampling: str, asked: int | None, algorithm: str, **federation: object
) -> Experiment:
    return Experiment.model_validate(
        {
            "federation": {
                "clients": 10,
                "rounds": 9,
                "clients_per_round": asked,
                "algorithm": algorithm,
                **federation,
            },
            "training": {"batch_size": 10, "sampling": sampling},
            "mechanism": mechanism,
            "adversary": {"attacks": []},
        }
    )


@pytest.mark.parametrize("case", [*CASES, *CALIBRATED], ids=str)
def test_a_plan_is_the_one_that_is_made_by_itself(case: tuple[object, str, int | None, str]) -> None:
    settings = settings_of(*case)
    plans = Plans(settings, SIZES, TENSORS, SHARES)
    alone = [plan_client(settings, client, int(size), TENSORS, SHARES) for client, size in enumerate(SIZES)]
    # In another order than that of the clients: whoever is looked at first, all get their own.
    assert [plans[client] for client in reversed(range(10))] == alone[::-1]
    assert plans[-1] == plans[9:][0] == alone[9]
    with pytest.raises(IndexError):
        plans[10]
    for one, other in product(range(10), repeat=2):
        if plans.kinds[one] == plans.kinds[other]:
            assert replace(alone[one], client=other) == alone[other]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", [1.0, 4.0, 40.0])
def test_a_budget_of_many_that_are_alike_asks_as_that_of_each(
    case: tuple[object, str, int | None, str], target: float
) -> None:
    settings = settings_of(*case, target_epsilon=target, min_clients=1)
    grouped = Plans(settings, SIZES, TENSORS, SHARES)
    ends: list[list[object]] = []
    for plans in (grouped, tuple(grouped)):
        try:
            budget = Budget(settings, plans)
        except InputError as error:
            ends.append([str(error)])
            continue
        asked = []
        for number in range(1, 10):
            if budget.is_used_up(number):
                break
            asked.append(participants(settings, number, budget.left(number)))
            budget.spend(number, asked[-1])
        stopped = sorted(
            (client, stop.round, stop.epsilon, stop.next_epsilon or 0.0)
            for stop in budget.stops
            for part in stop.ranges
            for client in part
        )
        ends.append([*asked, stopped, budget.worst_epsilon])
    assert ends[0] == ends[1]


def _lines(lines: tuple[LedgerLine, ...]) -> Iterator[tuple[int, LedgerLine]]:
    yield from ((client, line) for line in lines for part in line.ranges for client in part)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 clients of unlike sizes, of whom some are never asked."""
    path = tmp_path_factory.mktemp("sampled") / "run"
    settings = small(
        federation={"clients": 12, "clients_per_round": 3, "rounds": 4},
        training={"sampling": "fixed", "batch_size": 16},
        mechanism={"name": "gaussian", "sigma": 2.0},
    )
    start_run(settings, path, "", Silent())
    return path


def test_each_client_has_the_figures_that_it_has_by_itself(sampled: Path) -> None:
    """Counted once more from who was asked, without any grouping."""
    folder = RunFolder.open(sampled)
    world, ledger = build_world(folder.experiment()), folder.final_ledger()
    by_client = dict(_lines(ledger.clients))
    asked = {client: [line.round for line in folder.asked() if client in line.clients] for client in range(12)}
    assert sorted(by_client) == list(range(12)) == sorted(asked)
    assert [] in asked.values()
    for client, line in by_client.items():
        plan = plan_client(world.experiment, client, len(world.partitions[client]), world.plans[client].tensors)
        assert (line.examples, line.participations) == (len(world.partitions[client]), len(asked[client]))
        assert line.epsilon == plan.guarantee(asked[client]).epsilon
        labels = np.bincount(world.dataset.y_train.numpy()[world.partitions[client]])
        baselines = [1 / 100, labels.max() / labels.sum()]
        alone = ceilings(plan.accounted(asked[client]), baselines) if asked[client] else []
        own = [each.label for each in folder.label_ceilings() if client in chain(*member_ranges(each.members))]
        assert [*line.ceilings.values(), *own] == list(alone)
        assert list(line.ceilings) == ["told"] * bool(asked[client])
    assert ledger.worst.epsilon == max(line.epsilon or 0.0 for line in ledger.clients)


def test_ledgers_with_a_line_a_client_are_still_read(sampled: Path, tmp_path: Path) -> None:
    tree = json.loads((sampled / "ledger.json").read_text())
    lines = [
        {**vars(line), "client": client} for client, line in _lines(RunFolder.open(sampled).final_ledger().clients)
    ]
    for line in lines:
        del line["count"], line["members"]
        line["ceilings"] = {}
    (tmp_path / "config.toml").write_bytes((sampled / "config.toml").read_bytes())
    (tmp_path / "ledger.json").write_text(json.dumps({**tree, "clients": lines}))
    rows = json.loads((sampled / "referee" / "partition.json").read_text())
    (tmp_path / "partition.json").write_text(json.dumps({key: rows[key] for key in ("class_names", "clients")}))
    old, new = load_view(tmp_path), load_view(sampled)
    assert old.ledger is not None
    assert new.ledger is not None
    assert sum(line.count for line in new.ledger.clients) == len(old.ledger.clients) == 12 > len(new.ledger.clients)
    assert old.partition is not None
    assert new.partition is not None
    assert (old.partition.count, old.partition.commonest) == (12, new.partition.commonest)
    write_report(tmp_path)


def test_names_of_clients_are_read_as_they_were_written() -> None:
    rng = np.random.default_rng(1)
    for share in (0.02, 0.5, 0.98):
        clients = np.flatnonzero(rng.random(300) < share).tolist()
        ranges = member_ranges(members_text(clients))
        assert [client for one in ranges for client in one] == clients
    assert members_text([0, 1, 2, 3, 5]) == "0-3, 5"
    assert named_members(member_ranges("0-3, 5, 7-1006"), 2) == "0-3, 5 and 1,000 more"
    for wrong in ("", "a", "3-1", "0-3, 2", "01", "0-3,5", "5, 5", "-1"):
        with pytest.raises(ValueError, match="name"):
            member_ranges(wrong)
    plan = plan_client(settings_of({"name": "none"}, "shuffled", None, "fedsgd"), 0, 50, TENSORS)
    line = LedgerLine.of(2, 9, plan.guarantee([1])).of_all([2, 3, 9])
    assert (line.client, line.count, line.members) == (2, 3, "2-3, 9")
    with pytest.raises(ValueError, match="members are not 2 clients from number 2"):
        replace(line, count=2)


@pytest.mark.essential
def test_a_hundred_thousand_clients_cost_what_the_asked_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More clients than examples: the first thousand have a row in partition.json, and the asked ones are looked at."""
    looked_at = set()
    counts_of = World.class_counts_of

    def noted(world: World, labels: torch.Tensor, client: int) -> list[int]:
        looked_at.add(client)
        return counts_of(world, labels, client)

    monkeypatch.setattr(World, "class_counts_of", noted)
    settings = small(
        federation={"clients": 100_000, "clients_per_round": 5, "rounds": 3},
        data={"partition": "overlapping", "examples_per_client": 8},
        mechanism={"name": "gaussian", "target_epsilon": 5.0},
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    asked = {client for line in folder.asked() for client in line.clients}
    assert looked_at - set(range(1000)) == asked - set(range(1000))
    ledger, partition = folder.final_ledger(), folder.partition()
    assert sum(line.count for line in ledger.clients) == 100_000
    assert {line.participations for line in ledger.clients} == {0, 1}
    assert all("one client's copy" in line.notes[-1] for line in ledger.clients)
    assert any("100000 clients hold 557 copies of each of 1437 examples" in text for text in summary.warnings)
    assert isinstance(partition, Partition)
    assert (partition.count, len(partition.clients)) == (100_000, 1000)
    assert len(write_report(tmp_path / "run").read_bytes()) < 2_000_000
    assert sum(path.stat().st_size for path in (tmp_path / "run").glob("*.json")) < 300_000
    assert len(set(kinds_of(build_world(settings).plans).tolist())) == 2
