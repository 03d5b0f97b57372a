"""The paper's figures as typed, and the tables that set ours beside them, as the documentation has them."""

import gzip
import math
from pathlib import Path
from typing import Any

import pytest

from fedpriv.attacks.membership.report import MembershipFigures
from fedpriv.core.errors import InputError
from fedpriv.sweep.comparison import Chosen, Setting, settings_of
from fedpriv.sweep.record import ReconstructionPart, TrialRecord
from studies.kept import records_of
from studies.paper import DIFFERENCES, PAPER, ROWS, brief, by_blocks, differences, main, table

CHOSEN = Chosen("iga", {"membership": "attack-r"})
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
    one = ReconstructionPart(attack="iga", upload="protected", victims=2, recovered=0, mse=0.1, mse_normalised=value)
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
    (row,) = differences(settings_of(records, CHOSEN)).rows
    assert row == ("lenet, fashion-mnist", "50", "whole", "-0.6", "-5.0", "+0.49", "+0.50")
    (only_errors,) = differences(settings_of(records[2:], CHOSEN)).rows
    assert only_errors == ("lenet, fashion-mnist", "50", "whole", "-0.6", "", "+0.49", "+0.50")


def test_tables_stand_in_the_papers_order() -> None:
    records = [
        record("vmf", 300000.0, "three", **auc(0.58)),
        record("vmf", 1.0, "three", **auc(0.51)),
        record("gaussian", 0.8, "three", **auc(0.52)),
        record("none", None, "three", **auc(0.7)),
    ]
    settings = settings_of(records, CHOSEN)
    others = [record("none", None, "other").model_copy(update={"data": data}) for data in ("mine", "cifar10-complete")]
    columns = ("noise", "lenet, fashion-mnist", "lenet, cifar10-complete", "lenet, mine")
    assert brief("table3", settings_of([*others, *records], CHOSEN)).heads == columns
    assert brief("table3", settings).rows == (
        ("none", "54.8 / 70.0"),
        ("Gaussian 0.8", "49.2 / 52.0"),
        ("VMF 1, whole", "49.5 / 51.0"),
        ("VMF 300000, whole", "51.8 / 58.0"),
    )
    rows = table("table3", settings).rows
    assert [row[1] for row in rows] == ["none", "Gaussian 0.8", "VMF 1, whole", "VMF 300000, whole"]
    assert rows[0][6:] == ("54.8", "70.0")


def error(
    attack: str, upload: str, normalised: float | None, mse: float | None, recovered: int = 0
) -> ReconstructionPart:
    return ReconstructionPart(
        attack=attack, upload=upload, victims=16, recovered=recovered, mse=mse, mse_normalised=normalised
    )


def attacked(seed: int, *lines: ReconstructionPart) -> TrialRecord:
    """A seed of VMF 50, with what a guess and the upload before noise gave."""
    others = (error("guess-mean", "none", 0.5, 0.1), error("iga", "unprotected", 0.01, 0.01, 16))
    return record("vmf", 50.0, "", reconstructions=(*lines, *others)).model_copy(update={"seed": seed})


def test_table_4_has_every_attack_with_what_it_recovered() -> None:
    """Means over seeds; `map` ran in the second alone, and once gave no number."""
    settings = settings_of(
        [
            attacked(1, error("iga", "protected", 3.0, 0.4)),
            attacked(2, error("iga", "protected", 2.0, 0.2, 1), error("map", "protected", 0.125, 0.04, 9)),
            attacked(3, error("map", "protected", None, None)),
        ],
        CHOSEN,
    )
    row = table("table4", settings).rows[-1]
    assert row[-2:] == ("1.66", "iga 2.50 (0.300, 1 of 32); map 0.12 (0.040, 9 of 32)")
    assert brief("table4", settings).rows == (
        ("guess: the mean public image", "0.50"),
        ("VMF 50, whole", "1.66 / 2.50"),
    )
    assert by_blocks("table4", settings).rows[-1] == ("lenet, fashion-mnist", "whole", "", "", "", "2.50", "", "")


def test_no_attack_leaves_cells_empty() -> None:
    settings = settings_of([record("vmf", 50.0, "four")], CHOSEN)
    assert table("table4", settings).rows[-1][-2:] == ("1.66", "")
    assert brief("table4", settings).rows[-1] == ("VMF 50, whole", "1.66 / ")


def test_blocks_stand_from_large_to_small() -> None:
    sizes = ["size:2", "size:16", "layer", "whole", "size:256"]
    records = [
        record("vmf", level, "", accuracy=0.5).model_copy(update={"blocks": blocks, "data": data})
        for level in (50.0, 1.0)
        for blocks in sizes
        for data in ("fashion-mnist", "mine")
    ]
    settings = settings_of(records, CHOSEN)
    large_to_small = ["whole", "layer", "size:256", "size:16", "size:2"]
    cells = [row[:2] for row in by_blocks("table2", settings).rows]
    assert cells == [
        *(("lenet, fashion-mnist", blocks) for blocks in ["the paper", *large_to_small]),
        *(("lenet, mine", blocks) for blocks in large_to_small),  # the paper has no such data
    ]
    rows = [row[1] for row in table("table2", settings).rows[:10]]
    assert rows == [f"VMF {level}, {blocks}" for blocks in large_to_small for level in (1, 50)]


def test_noise_that_the_paper_has_not_is_left_out() -> None:
    records = [record("none", None, ""), record("gaussian", None, "").model_copy(update={"mechanism": "gaussian"})]
    records[1] = records[1].model_copy(update={"settings": {"mechanism.sigma": 1.5}, "accuracy": 0.2})
    records[0] = records[0].model_copy(update={"accuracy": 0.9})
    assert brief("table2", settings_of(records, CHOSEN)).rows == (("none", "87.7 / 90.0"),)


def test_a_row_that_is_there_twice_is_refused() -> None:
    records = [record("vmf", 50.0, folder, accuracy=0.5) for folder in ("one", "two")]
    with pytest.raises(InputError, match="VMF 50, whole with lenet on fashion-mnist is there twice"):
        brief("table2", settings_of(records, CHOSEN))


def test_table_5_knows_complete_data_and_stands_in_the_papers_order() -> None:
    records = [
        record(mechanism, 50.0, "", **mse(value)).model_copy(update={"data": data})
        for data in ("cifar10-complete", "fashion-mnist")
        for mechanism, value in (("gaussian", 1.0), ("vmf", 1.5))
    ]
    rows = differences(settings_of(records, CHOSEN)).rows
    assert [row[0] for row in rows] == ["lenet, fashion-mnist", "lenet, cifar10-complete"]
    assert rows[1][-2:] == ("+0.60", "+0.50")


def test_the_command_prints_chosen_rows_of_kept_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [str(DOCS / "results" / f"table2-{name}.csv.gz") for name in ("mlp-blocks", "more-seeds")]
    monkeypatch.setattr("sys.argv", ["paper", "table2", *files, "--shape", "levels", "--mechanisms", "none"])
    main()
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["noise", "none"]
    monkeypatch.setattr("sys.argv", ["paper", "table3", *files])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "none of 94 trials is a row of table3 with a figure" in capsys.readouterr().err
    for content in (b"not gzipped", gzip.compress(b"a,b\n1,2\n"), gzip.compress(b"whole")[:-3]):
        (tmp_path / "other.csv.gz").write_bytes(content)
        monkeypatch.setattr("sys.argv", ["paper", "table2", str(tmp_path / "other.csv.gz")])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert "other.csv.gz is neither the folder of a sweep nor what is kept" in capsys.readouterr().err


def kept(pattern: str) -> list[Setting]:
    """The settings of all kept results of a name."""
    files = sorted((DOCS / "results").glob(pattern))
    return settings_of([record for path in files for record in records_of(path)], CHOSEN)


def test_the_tables_of_the_documentation_are_those_of_the_kept_results() -> None:
    settings = kept("table2*.csv.gz")
    plain = [setting for setting in settings if setting.series[0] != "vmf"]
    tables = {
        "table2-rows": table("table2", settings),
        "table2-gaussian": brief("table2", plain),
        "table2-blocks": by_blocks("table2", settings),
        "table4-steps": table("table4", kept("table4*.csv.gz")),
    }
    for name, made in tables.items():
        assert str(made) == (DOCS / "results" / f"{name}.csv").read_text("utf-8")
