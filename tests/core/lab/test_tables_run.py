"""A table of one's own from its file to a report, with bounds that were estimated privately."""

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.estimated import bounds_release
from fedpriv.core.cli.app import main
from fedpriv.core.cli.data import data
from fedpriv.core.config import load_experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab.preflight import warnings_for
from fedpriv.core.lab.run import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.service.opening import open_service, with_earlier
from fedpriv.service.policies import Facts
from fedpriv.service.policies.network import Exact
from fedpriv.service.records import Service, made_service
from fedpriv.service.settings import ServiceConfig

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
    for line in (
        "The values of city, income were read off",
        "Whether city hold numbers and whether numbers are whole",
        "All test examples are taken as public",
    ):
        assert any(note.startswith(line) for note in ledger["worst"]["notes"]) and line in page
    bare = load_experiment(tmp_path / "people.toml").data.table
    assert bare is not None
    without = plain.model_copy(
        update={"data": plain.data.model_copy(update={"table": bare.model_copy(update={"bounds_epsilon": None})})}
    )
    start_run(without, tmp_path / "bare", "", Silent())
    alone = json.loads((tmp_path / "bare" / "ledger.json").read_text())
    assert "releases" not in alone and ledger["worst"]["epsilon"] == pytest.approx(alone["worst"]["epsilon"] + 0.5)
    assert ledger["worst"]["ceilings"]["told"]["gamma"] > alone["worst"]["ceilings"]["told"]["gamma"]
    rounds, bare_rounds = (RunFolder.open(tmp_path / name).rounds() for name in ("run", "bare"))
    assert rounds[-1].epsilon == pytest.approx((bare_rounds[-1].epsilon or 0.0) + 0.5)
    answers = [served(tmp_path / name, method="label", noise=1.0, answers=3).guarantee for name in ("run", "bare")]
    assert answers[0].epsilon == pytest.approx((answers[1].epsilon or 0.0) + 0.5)
    assert "bounds of the table's columns" in answers[0].theorem["epsilon"] and "0.5" in answers[0].notes[-1]
    assert any(note.startswith("The values of city, income were read off") for note in answers[1].notes)
    exact = Exact().guarantee(Facts(2), 1, 0.0, RunFolder.open(tmp_path / "run").final_ledger())
    assert with_earlier(exact, Exact(), build_world(plain), Facts(2)) == exact


def served(path: Path, **service: object) -> Service:
    """What an endpoint of the run is; votes for whole clients are refused first, where bounds are about rows."""
    folder = RunFolder.open(path)
    if path.name == "run":
        with pytest.raises(InputError, match=r"bounds_epsilon does not go with service\.shards = 0"):
            open_service(folder, ServiceConfig.model_validate({"method": "votes", "noise": 1.0}), Silent())
    open_service(folder, ServiceConfig.model_validate(service), Silent())
    return made_service(folder.path)


ERM = ["federation.algorithm=erm", "mechanism={name='output',target_epsilon=8.0}", "adversary.attacks=[]"]


def test_a_length_that_is_read_off_rows_is_warned_of(tmp_path: Path) -> None:
    path = experiment(tmp_path)
    with pytest.raises(InputError, match=r"report\.ssim = 'padded': only for pictures of at least 6 .*; csv has rows"):
        warnings_for(build_world(load_experiment(path, ["report.ssim=padded"])))
    lines = warnings_for(build_world(load_experiment(path, ERM)))
    assert any(line.startswith("erm.clip_norm is unset: it is the median length of test rows") for line in lines)
    assert any(line.startswith("data: the values of city") for line in lines)
    for public in ("erm.clip_norm=1", f"data.table.test_path={tmp_path / 'people.csv'}"):
        assert not any(
            "erm.clip_norm is" in line for line in warnings_for(build_world(load_experiment(path, [*ERM, public])))
        )


def test_each_estimate_of_bounds_adds_to_those_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = experiment(tmp_path)
    path.write_text(path.read_text().replace("low = 16\nhigh = 128\n", ""))
    data(bounds=900.0, name=str(path))
    said = capsys.readouterr().out
    table = tomllib.loads(said)["data"]["table"]
    assert table["bounds_epsilon"] == 900.5 and [column["name"] for column in table["columns"]] == ["age"]
    assert "# Without bounds: 'city' (a category); 'income' (the label)" in said
    assert "is a new release" in said and "bounds_epsilon is 0.5, which" in said and "and 900 of this call" in said
    for much in (1e300, 1e9, math.nan, -1.0):
        with pytest.raises(InputError, match="allowed is"):
            data(bounds=much, name=str(path))


def test_the_ledger_says_what_it_does_not_know_about_bounds() -> None:
    one, two = bounds_release(1.0, ["age"]), bounds_release(1.0, ["age", "wage"])
    assert one.what.endswith("of age") and two.what.endswith("of one or more of age, wage")
    assert len(one.notes) == 1 and "does not tell" in two.notes[1]


@pytest.mark.parametrize("clash", ["federation.target_epsilon=3", "mechanism.unit=update"])
def test_bounds_do_not_go_with_what_they_are_no_part_of(tmp_path: Path, clash: str) -> None:
    with pytest.raises(InputError, match=r"data\.table\.bounds_epsilon does not go with"):
        load_experiment(experiment(tmp_path), [clash])


def test_the_command_line_prints_a_section_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = experiment(tmp_path)
    path.write_text(path.read_text().replace("low = 16\nhigh = 128\n", ""))
    monkeypatch.setattr("sys.argv", ["fedpriv", "run", str(path), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    line, section = capsys.readouterr().err.split("\n", 1)
    assert ended.value.code == 2 and line.endswith("public constants; in place of the section [data.table]:")
    table = tomllib.loads(section)["data"]["table"]
    assert table["columns"] == [{"name": "age", "low": "?", "high": "?"}]
    path.write_text(path.read_text().replace('name = "age"', 'name = "age"\nlow = "?"\nhigh = "?"'))
    with pytest.raises(InputError, match=r"data\.table\.columns\S+low = '\?'"):
        load_experiment(path)
