"""The ledger: worst client first, nothing lost in JSON."""

import itertools
import json
from dataclasses import asdict, fields, replace

import pytest
from pydantic import TypeAdapter, ValidationError

from fedpriv.accounting import Guarantee, Ledger, LedgerLine, Release, ceilings, guarantee
from tests.cases import in_one_test


def entry(client, epsilon, pure=None, participations=1):
    found = Guarantee(
        "replace-one", "shuffled", participations, None, pure, epsilon, 1e-5, {"epsilon": "by hand"}, ("note",)
    )
    return LedgerLine.of(client, 100 + client, found)


WORST_FIRST = [
    entry(9, None, None, 7),
    entry(4, None, 3.0, 7),
    entry(5, 8.0, None, 2),
    entry(0, 8.0, 20.0, 1),
    entry(7, 8.0, 19.0, 3),
    entry(8, 8.0, 19.0, 2),
    entry(1, 0.1 + 0.2, 19.0, 9),
    entry(2, 0.3, 19.0, 9),
    entry(3, 0.3, 19.0, 9),
    entry(6, 0.0, 0.0, 0),
]


@in_one_test("rotation", range(len(WORST_FIRST)))
def test_worst_first_in_whatever_order_the_lines_come(rotation):
    lines = WORST_FIRST[rotation:] + WORST_FIRST[:rotation]
    ledger = Ledger.of("example", "gaussian", {"sigma": 1.0}, reversed(lines))
    assert list(ledger.clients) == WORST_FIRST
    assert ledger.worst is ledger.clients[0]


def test_the_runs_figure_is_the_worst_clients_not_a_sum():
    releases = [Release("gaussian", "example", "shuffled", 0.1, count, (10,), 3.0, 1e-5) for count in (1, 5, 3)]
    lines = [LedgerLine.of(client, 50, guarantee(release)) for client, release in enumerate(releases)]
    ledger = Ledger.of("example", "gaussian", {"sigma": 3.0}, lines)
    assert ledger.worst.client == 1
    assert ledger.worst.epsilon == max(line.epsilon for line in lines)


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    list(itertools.product(["none", "gaussian", "vmf"], ["shuffled", "fixed", "poisson", "full"])),
)
def test_json_round_trip_keeps_every_bit(mechanism, sampling):
    release = Release(mechanism, "example", sampling, 0.1, 3, (100, 7), 7 / 3, 1e-5)
    lines = [LedgerLine.of(k, 40 + k, guarantee(replace(release, participations=k + 1))) for k in range(3)]
    ledger = Ledger.of("example", mechanism, {"kappa": 1 / 3, "blocks": "layer"}, lines)
    assert TypeAdapter(Ledger).validate_json(json.dumps(ledger.to_json(), allow_nan=False)) == ledger


def test_json_has_the_keys_of_the_run_folder():
    tree = Ledger.of("example", "none", {}, [entry(3, None), entry(1, None)]).to_json()
    assert set(tree) == {"unit", "mechanism", "parameters", "clients", "worst"}
    assert set(tree["worst"]) == {
        "client",
        "count",
        "members",
        "examples",
        "noise",
        "ceilings",
        *(field.name for field in fields(Guarantee)),
    }
    assert tree["clients"][0] == tree["worst"]
    assert tree["worst"]["epsilon"] is None
    assert [line["client"] for line in tree["clients"]] == [1, 3]


def test_ceilings_are_read_back_and_may_be_missing():
    (figure,) = ceilings(Release("vmf", "example", "full", 1.0, 3, (100,), 2.0, 1e-5), [0.01])
    line = replace(entry(2, 1.0), ceilings={"told": figure})
    tree = Ledger.of("example", "vmf", {}, [line]).to_json()
    assert tree["clients"][0]["ceilings"] == {"told": asdict(figure)}
    assert TypeAdapter(Ledger).validate_json(json.dumps(tree)).worst == line
    del tree["clients"][0]["ceilings"]
    assert TypeAdapter(Ledger).validate_python(tree).worst.ceilings == {}


def test_a_ledger_without_clients_is_refused():
    with pytest.raises(ValueError, match="at least one client"):
        Ledger.of("example", "none", {}, [])


def test_a_truncated_ledger_is_refused():
    tree = Ledger.of("example", "none", {}, [entry(3, None)]).to_json()
    del tree["clients"][0]["epsilon"]
    with pytest.raises(ValidationError, match="epsilon"):
        TypeAdapter(Ledger).validate_python(tree)
