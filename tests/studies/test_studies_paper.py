"""The paper's figures as typed, and the tables that set ours beside them, as the documentation has them."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedpriv.report.comparison import Chosen, Setting, settings_of
from fedpriv.sweep import Reconstruction, TrialRecord
from fedpriv.sweep.record import MembershipFigures
from studies.kept import records_of
from studies.paper import DIFFERENCES, PAPER, ROWS, brief, by_blocks, differences, table

CHOSEN = Chosen("iga", "attack-r")
DOCS = Path(__file__).parents[2] / "docs"


def record(mechanism: str, level: float | None, folder: str, **figures: Any) -> TrialRecord:
    """One trial of Fashion-MNIST and LeNet at a level of the paper's."""
    key = {"gaussian": "mechanism.target_epsilon", "vmf": "mechanism.epsilon"}.get(mechanism)
    return TrialRecord(
        trial=1, folder=f"{folder}/trials/0001", status="completed", settings={key: level} if key else {}, seed=1,
        data="fashion-mnist", model="lenet", mechanism=mechanism, blocks="whole" if mechanism == "vmf" else None,
        rounds=1, seconds=1.0, **figures,
    )  # fmt: skip


def auc(value: float) -> dict[str, Any]:
    return {
        "memberships": (
            MembershipFigures(attack="attack-r", auc=value, tpr_at_1_percent=0.0, tpr_at_01_percent=0.0),
            MembershipFigures(attack="attack-p", auc=0.1, tpr_at_1_percent=0.0, tpr_at_01_percent=0.0),
        )
    }


def mse(value: float) -> dict[str, Any]:
    one = Reconstruction(attack="iga", upload="protected", victims=2, recovered=0, mse=0.1, mse_normalised=value)
    return {"reconstructions": (one, one.model_copy(update={"attack": "map", "mse_normalised": 9.0}))}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_table_5_is_the_difference_of_tables_3_and_4(key: tuple[str, str, float]) -> None:
    """VMF minus Gaussian, to the last printed digit: a figure typed wrong in any of the three would show."""
    *network, level = key
    vmf, gaussian = (ROWS.index((mechanism, level)) for mechanism in ("vmf", "gaussian"))
    for name, printed, half_a_digit in zip(("table3", "table4"), DIFFERENCES[key], (0.051, 0.0051), strict=True):
        column = PAPER.get((name, *network))
        if column is None:
            assert math.isnan(printed)
        else:
            assert printed == pytest.approx(column[vmf] - column[gaussian], abs=half_a_digit)


def test_differences_are_of_runs_in_two_folders() -> None:
    records = [
        record("gaussian", 50.0, "three", **auc(0.6)),
        record("vmf", 50.0, "three", **auc(0.55)),
        record("gaussian", 50.0, "four", **mse(1.0)),
        record("vmf", 50.0, "four", **mse(1.5)),
        record("vmf", 1.0, "four", **mse(1.7)),  # nothing to subtract
    ]
    *_, line = differences(settings_of(records, CHOSEN))
    assert line == "| lenet, fashion-mnist | 50 | whole | -0.6 | -5.0 | +0.49 | +0.50 |"
    only_errors = differences(settings_of(records[2:], CHOSEN))
    assert only_errors[-1] == "| lenet, fashion-mnist | 50 | whole | -0.6 |  | +0.49 | +0.50 |"
    assert len(only_errors) == 3


def test_tables_stand_in_the_papers_order() -> None:
    records = [
        record("vmf", 300000.0, "three", **auc(0.58)),
        record("vmf", 1.0, "three", **auc(0.51)),
        record("gaussian", 0.8, "three", **auc(0.52)),
        record("none", None, "three", **auc(0.7)),
    ]
    settings = settings_of(records, CHOSEN)
    others = [record("none", None, "other").model_copy(update={"data": data}) for data in ("mine", "cifar10-complete")]
    columns = "| noise | lenet, fashion-mnist | lenet, cifar10-complete | lenet, mine |"
    assert brief("table3", settings_of([*others, *records], CHOSEN))[0] == columns
    assert brief("table3", settings)[2:] == [
        "| none | 54.8 / 70.0 |",
        "| Gaussian 0.8 | 49.2 / 52.0 |",
        "| VMF 1, whole | 49.5 / 51.0 |",
        "| VMF 300000, whole | 51.8 / 58.0 |",
    ]
    rows = [line.split(" | ") for line in table("table3", settings)[2:]]
    assert [row[1] for row in rows] == ["none", "Gaussian 0.8", "VMF 1, whole", "VMF 300000, whole"]
    assert rows[0][6:] == ["54.8", "70.0 |"]


def test_table_4_has_every_attack_with_what_it_recovered() -> None:
    iga = Reconstruction(attack="iga", upload="protected", victims=16, recovered=0, mse=0.4, mse_normalised=3.0)
    better = iga.model_copy(update={"mse": 0.2, "recovered": 1})
    told = iga.model_copy(update={"attack": "map", "recovered": 9, "mse_normalised": 0.125})
    records = [
        record("vmf", 50.0, "", reconstructions=(each, told)).model_copy(update={"seed": seed})
        for seed, each in enumerate((iga, better))
    ]
    row = table("table4", settings_of(records, CHOSEN))[-1]
    assert row.endswith("| 1.66 | iga 3.00 (0.300, 1 of 32); map 0.12 (0.400, 18 of 32) |")


def kept(pattern: str) -> list[Setting]:
    """The settings of all kept results of a name."""
    files = sorted((DOCS / "results").glob(pattern))
    return settings_of([record for path in files for record in records_of(path)], CHOSEN)


def test_table_2_stands_on_its_pages() -> None:
    settings, rows = kept("table2*.csv.gz"), (DOCS / "paper-rows.md").read_text("utf-8")
    plain = [setting for setting in settings if setting.series[0] != "vmf"]
    for lines in (table("table2", settings), brief("table2", plain)):
        assert "\n".join(lines) in rows
    assert "\n".join(by_blocks("table2", settings)) in (DOCS / "paper.md").read_text("utf-8")


def test_table_4_stands_on_its_page() -> None:
    assert "\n".join(table("table4", kept("table4*.csv.gz"))) in (DOCS / "paper-rows.md").read_text("utf-8")
