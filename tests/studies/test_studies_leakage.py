"""studies.leakage: cells are measured once and as a run does, failures are told, the page says what the file has."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import studies.leakage
from fedpriv.core.config import Experiment
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from studies.leakage import GUESS, main, read_rows, tables
from studies.results import Table

TWO_CELLS = ["--data", "digits", "--models", "mlp", "--attacks", "closed_form", "--victims", "3"]
TWO_CELLS += ["--mechanisms", "none,gaussian:0.001"]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leakage")
    main([*TWO_CELLS, *outputs(folder)])
    return folder


def outputs(folder: Path) -> list[str]:
    return ["--json", f"{folder}/rows.jsonl", "--tables", f"{folder}", "--pictures", f"{folder}/pictures"]


def outcomes(made: dict[str, Table]) -> dict[str, str]:
    """The only line of the table of outcomes, by column."""
    table = made["leakage-outcomes"]
    (row,) = table.rows
    return dict(zip(table.heads, row, strict=True))


def results(folder: Path) -> dict[tuple[str, str], Any]:
    return {(cell.mechanism, cell.attack): row for cell, row in read_rows(folder / "rows.jsonl").items()}


def test_clean_gradients_are_read_exactly_and_noise_costs(measured: Path) -> None:
    rows = results(measured)
    bare, noisy, guess = rows["none", "closed_form"], rows["gaussian:0.001", "closed_form"], rows["", GUESS]
    assert bare.result.mse < 1e-10
    assert bare.result.recovered == bare.result.victims == bare.result.identified == 3
    assert bare.cosine == pytest.approx(1) and bare.epsilon is None
    assert bare.result.mse < noisy.result.mse < guess.result.mse
    assert 0 < noisy.cosine < 1 and noisy.epsilon > 0
    assert guess.result.recovered == 0
    low, high = noisy.result.intervals["mse"]
    assert low <= noisy.result.mse <= high


def test_the_figures_are_those_of_a_run(measured: Path, tmp_path: Path) -> None:
    """A run of the same settings, through Flower, tap, attack stage and referee."""
    experiment = Experiment.model_validate(
        {
            "seed": 1,
            "noise": "reproducible",
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": (256,)},
            "federation": {"clients": 3, "rounds": 1},
            "training": {"batch_size": 1},
            "mechanism": {"name": "gaussian", "sigma": 0.001, "clip_norm": 1.0},
            "adversary": {"attacks": ["closed_form"], "victims": 3},
            "engine": {"name": "inline", "device": "cpu"},
        }
    )
    start_run(experiment, tmp_path / "run", "", Silent())
    scores = RunFolder.open(tmp_path / "run").scores()
    rows = results(measured)
    for upload, mechanism in (("protected", "gaussian:0.001"), ("unprotected", "none")):
        lines = [one for one in scores if one.upload == upload]
        assert len(lines) == 3
        row = rows[mechanism, "closed_form"].result
        assert row.mse == pytest.approx(statistics.median(one.mse for one in lines), rel=1e-3)
        assert row.recovered == sum(one.recovered for one in lines)
        assert row.identified == sum(one.rank == 1 for one in lines)


def test_what_is_there_is_not_measured_again(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (measured / "rows.jsonl").read_bytes()
    monkeypatch.setattr("studies.leakage.measure", lambda *_: pytest.fail("measured again"))
    main([*TWO_CELLS, *outputs(measured)])
    assert (measured / "rows.jsonl").read_bytes() == before
    assert capsys.readouterr().out == ""


def test_a_torn_line_is_measured_again(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (measured / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_bytes(whole[0] + whole[1][:40])
    main([*TWO_CELLS, "--json", f"{tmp_path}/rows.jsonl"])
    assert results(tmp_path).keys() == results(measured).keys()
    assert "gaussian:0.001" in capsys.readouterr().out.splitlines()[0]


def test_a_failing_cell_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = studies.leakage.attack_each

    def broken(job: Any) -> Any:
        if job.name == "iga":
            raise RuntimeError("it broke\nin two lines")
        return plain(job)

    monkeypatch.setattr(studies.leakage, "attack_each", broken)
    asked = [*TWO_CELLS, "--attacks", "iga,closed_form", "--json", f"{tmp_path}/rows.jsonl"]
    main(asked)
    rows = results(tmp_path)
    assert rows["none", "iga"].result is None
    assert rows["none", "iga"].failure == "RuntimeError: it broke in two lines"
    assert rows["none", "closed_form"].result is not None
    assert "failed: RuntimeError: it broke in two lines" in capsys.readouterr().out
    made = tables([row for row in read_rows(tmp_path / "rows.jsonl").values() if row.cell.attack != "closed_form"])
    assert "every attack failed" in str(made["leakage-strongest"])
    assert "it broke in two lines" in str(made["leakage-cells"])


def test_the_tables_have_every_cell(measured: Path) -> None:
    made = tables(list(read_rows(measured / "rows.jsonl").values()))
    for name, table in made.items():
        assert (measured / f"{name}.csv").read_text() == str(table)
        assert {len(row) for row in table.rows} <= {len(table.heads)}
    assert [row[5] for row in made["leakage-strongest"].rows] == ["closed_form"] * 2
    assert [row[4] for row in made["leakage-cells"].rows] == ["public mean", "closed_form", "closed_form"]
    assert outcomes(made)["images are recovered"] == "none, gaussian:0.001"


def test_an_image_that_counts_as_recovered_but_is_not_identified_is_no_leak(measured: Path) -> None:
    rows = list(read_rows(measured / "rows.jsonl").values())
    lucky = [
        replace(row, result=replace(row.result, recovered=1, identified=0)) if row.result and row.cell.model else row
        for row in rows
    ]
    column = "counted as recovered, but identified no more often than by chance"
    assert outcomes(tables(lucky))[column] == "none, gaussian:0.001"
    assert outcomes(tables(rows))[column] == ""


def test_pictures_have_a_row_for_each_mechanism(measured: Path) -> None:
    with Image.open(measured / "pictures" / "leakage-digits-mlp-untrained.png") as picture:
        assert picture.height == 4 * 68 + 4  # originals, guess, two mechanisms
    with Image.open(measured / "pictures" / "cells" / "digits-original.png") as original:
        assert original.size == (24, 8)


def test_a_trained_network_is_another(tmp_path: Path) -> None:
    asked = [*TWO_CELLS, "--networks", "untrained,trained", "--mechanisms", "none", "--json", f"{tmp_path}/rows.jsonl"]
    main(asked)
    accuracies = [row.accuracy for cell, row in read_rows(tmp_path / "rows.jsonl").items() if cell.model]
    assert len(accuracies) == 2
    assert accuracies[1] > accuracies[0] + 0.2


def test_no_faces_are_pictured(tmp_path: Path) -> None:
    import torch

    from studies.leakage import save_strip

    save_strip(tmp_path, "lfw-original", torch.zeros(2, 3, 8, 8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "imagenet"], "'imagenet' is not known; allowed: digits"),
        (["--models", "vgg"], "'vgg' is not known"),
        (["--attacks", "imprint"], "'imprint' is not known"),
        (["--mechanisms", "foo:1"], "mechanism 'foo:1' is not known"),
        (["--mechanisms", "vmf:many"], "kappa = 'many' is no number"),
        (["--mechanisms", "gaussian:-1"], "sigma = -1"),
        (["--victims", "1"], "2 or more"),
        (["--victims", "some"], "2 or more"),
        (["--attacks", "", "--tables", "no/such"], "no/such"),
        (["--attacks", "", "--json", "tests"], "tests"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in told
    assert told.count("\n") == 1


def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit) as ended:
        main(["--attacks", "", "--json", f"{tmp_path}/rows.jsonl"])
    assert ended.value.code == 2
    assert "rows.jsonl, line 1 is damaged" in capsys.readouterr().err


def test_the_published_tables_are_what_the_published_figures_say() -> None:
    rows = list(read_rows(DOCS / "results" / "attacks.jsonl").values())
    assert rows
    for name, table in tables(rows).items():
        assert (DOCS / "results" / f"{name}.csv").read_text(encoding="utf-8") == str(table)
    for line in (DOCS / "results" / "attacks.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)
