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
from studies.leakage import BEGIN, END, GUESS, main, read_rows, tables

TWO_CELLS = ["--data", "digits", "--models", "mlp", "--attacks", "closed_form", "--victims", "3"]
TWO_CELLS += ["--mechanisms", "none,gaussian:0.001"]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leakage")
    (folder / "page.md").write_text(f"before\n{BEGIN}\nstale words\n{END}\nafter\n")
    main([*TWO_CELLS, *outputs(folder)])
    return folder


def outputs(folder: Path) -> list[str]:
    return ["--json", f"{folder}/rows.jsonl", "--page", f"{folder}/page.md", "--pictures", f"{folder}/pictures"]


def outcomes(text: str) -> dict[str, str]:
    """The only line of the table of outcomes, by column."""
    lines = text.partition("## What stops attacks that reconstruct pictures")[2].strip().splitlines()
    names, values = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[2]))
    return dict(zip(names, values, strict=True))


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
    text = tables([row for row in read_rows(tmp_path / "rows.jsonl").values() if row.cell.attack != "closed_form"])
    assert "every attack failed" in text and "it broke in two lines" in text


def test_the_page_has_every_cell_and_keeps_what_is_around(measured: Path) -> None:
    text = (measured / "page.md").read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"\n{END}\nafter\n")
    assert "stale words" not in text
    cells = [line for line in text.splitlines() if "| closed_form |" in line]
    assert len(cells) == 4  # each in the summary and among the details
    assert outcomes(text)["images are recovered"] == "`none`, `gaussian:0.001`"
    heads = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(heads) == {3, 8, 9, 11, 12}


def test_an_image_that_counts_as_recovered_but_is_not_identified_is_no_leak(measured: Path) -> None:
    rows = list(read_rows(measured / "rows.jsonl").values())
    lucky = [
        replace(row, result=replace(row.result, recovered=1, identified=0)) if row.result and row.cell.model else row
        for row in rows
    ]
    column = "counted as recovered, but identified no more often than by chance"
    assert outcomes(tables(lucky))[column] == "`none`, `gaussian:0.001`"
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
        (["--attacks", "", "--page", "no/such/page.md"], "no/such/page.md"),
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


def test_the_published_page_is_what_the_published_figures_say() -> None:
    """So that docs/attacks-tables.md and its figures cannot drift apart."""
    rows = list(read_rows(DOCS / "attacks.jsonl").values())
    text = (DOCS / "attacks-tables.md").read_text(encoding="utf-8")
    assert rows
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == tables(rows).strip()
    for line in (DOCS / "attacks.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)
