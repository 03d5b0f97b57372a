"""A table of one's own from its file to a report, with bounds that were estimated privately."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedpriv.config import load_experiment
from fedpriv.errors import InputError
from fedpriv.lab.run import start_run
from fedpriv.progress import Silent
from fedpriv.report import write_report

EXPERIMENT = """
[data]
name = "csv"
path = "{path}"
[data.table]
label = "income"
bounds_epsilon = 0.5
[[data.table.columns]]
name = "age"
low = 16
high = 128
[model]
name = "logistic"
[federation]
clients = 2
rounds = 1
[training]
batch_size = 1
[mechanism]
name = "gaussian"
sigma = 2.0
[adversary]
attacks = ["closed_form"]
victims = 2
"""


def experiment(folder: Path) -> Path:
    stream = np.random.default_rng(0)
    rows = [f"{stream.integers(18, 90)},{stream.choice(['Rome', 'Oslo', 'Bern'])},{row % 2}" for row in range(200)]
    (folder / "people.csv").write_text("\n".join(["age,city,income", *rows]))
    path = folder / "people.toml"
    path.write_text(EXPERIMENT.format(path=folder / "people.csv"))
    return path


@pytest.mark.essential
def test_a_run_speaks_of_rows_and_accounts_for_bounds(tmp_path: Path) -> None:
    plain = load_experiment(experiment(tmp_path))
    summary = start_run(plain, tmp_path / "run", "", Silent())
    said = " ".join(summary.verdict)
    assert "Without protection the eavesdropper recovers 2 of 2 rows, with gaussian" in said
    assert "closed_form 100.0% of the categories right" in said and "image" not in said
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Rows recovered" in page and "Released before the training" in page
    shown = page[page.index('id="pictures"') : page.index('id="training"')]
    assert not {"SSIM", "LPIPS", "image", "picture"} & set(shown.replace("<", " ").split()) and "✓" in shown
    row = json.loads((tmp_path / "run" / "reconstructions" / "0001-0000-original.json").read_text())
    assert set(row) == {"age", "city"} and row["city"] in ("Rome", "Oslo", "Bern")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    (release,) = ledger["releases"]
    assert (release["epsilon"], release["adjacency"]) == (0.5, "replace-one")
    bare = load_experiment(tmp_path / "people.toml").data.table
    assert bare is not None
    without = plain.model_copy(
        update={"data": plain.data.model_copy(update={"table": bare.model_copy(update={"bounds_epsilon": None})})}
    )
    start_run(without, tmp_path / "bare", "", Silent())
    alone = json.loads((tmp_path / "bare" / "ledger.json").read_text())
    assert "releases" not in alone and ledger["worst"]["epsilon"] == pytest.approx(alone["worst"]["epsilon"] + 0.5)
    assert ledger["worst"]["ceilings"]["told"]["gamma"] > alone["worst"]["ceilings"]["told"]["gamma"]


@pytest.mark.parametrize("clash", ["federation.target_epsilon=3", "mechanism.unit=update"])
def test_bounds_do_not_go_with_what_they_are_no_part_of(tmp_path: Path, clash: str) -> None:
    with pytest.raises(InputError, match=r"data\.table\.bounds_epsilon does not go with"):
        load_experiment(experiment(tmp_path), [clash])
