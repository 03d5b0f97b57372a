"""Runs in a notebook: the same bytes as the command line's, frames, pictures, attacks and audits; and trackers."""

import csv
import json
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import fedpriv
from fedpriv.core.cli.app import app
from fedpriv.core.errors import optional
from fedpriv.core.notebook import _overrides
from tests.docs.pages import ROOT, blocks
from tests.docs.test_docs_blocks import SMALL
from tests.integration.small import left_behind

MECHANISM = {"name": "gaussian", "sigma": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedpriv.Run:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = fedpriv.run("small.toml", out="run", quiet=True, mechanism=MECHANISM, report={"trackers": ["csv"]})
        return fedpriv.Run(made.path.resolve())


def test_a_run_leaves_the_bytes_of_the_command(
    run: fedpriv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    sets = ("mechanism.name=gaussian", "mechanism.sigma=1", 'report.trackers=["csv"]')
    app(
        ["run", "small.toml", "--out", "run", "-q", *(word for text in sets for word in ("--set", text))],
        standalone_mode=False,
    )
    assert left_behind(run.path) == left_behind(tmp_path / "run")
    assert "--set mechanism.sigma=1" in (run.path / "command.txt").read_text()
    assert "Report: run/report.html" in capsys.readouterr().out


def test_its_figures_and_frames_are_those_of_its_folder(run: fedpriv.Run) -> None:
    summary = json.loads((run.path / "summary.json").read_text())
    assert (run.accuracy, run.epsilon) == (summary["test_accuracy"], summary["ledger"]["epsilon"])
    assert run.report == run.path / "report.html" and run.report.is_file()
    assert run.experiment.mechanism.name == "gaussian"
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.rounds["accuracy"].tolist() == [line["accuracy"] for line in lines] and list(run.rounds.index) == [
        0,
        1,
        2,
    ]
    assert set(run.scores["attack"]) >= {"closed_form"} and run.scores["mse"].min() >= 0
    assert run.ledger["epsilon"].max() == run.epsilon and int(run.ledger["count"].sum()) == 2


def test_a_notebook_shows_figures_pictures_and_the_verdict(run: fedpriv.Run) -> None:
    shown = run._repr_html_()
    assert f"{run.accuracy:.1%}" in shown.replace("\u00a0", "")
    assert shown.count('<img src="data:image/png;base64,') >= 3  # the original, and two uploads
    assert '<th scope="col">closed_form, protected</th>' in shown and run.summary.verdict[-1].split()[0] in shown


def test_csv_holds_rounds_and_leakage(run: fedpriv.Run) -> None:
    with (run.path / "metrics.csv").open() as file:
        rows = {(row["name"], int(row["step"])): float(row["value"]) for row in csv.DictReader(file)}
    assert rows["test_accuracy", 2] == run.accuracy and rows["round/accuracy", 2] == run.accuracy
    assert rows["epsilon", 2] == run.epsilon
    found = {name for name, _ in rows if name.startswith("leakage/closed_form/protected/")}
    assert {name.rpartition("/")[2] for name in found} >= {"recovered", "mse", "rate", "guess", "ceiling"}


def test_attacks_and_audits_are_added(run: fedpriv.Run, tmp_path: Path) -> None:
    again = run.attack("map", out=tmp_path / "again", quiet=True, iterations=5)
    assert {result.attack.partition(",")[0] for result in again.summary.attacks} >= {"closed_form", "map"}
    assert "--set adversary.map.iterations=5" in (again.path / "command.txt").read_text()
    found = again.audit(references=6, pairs=10, quiet=True)
    assert found.references == 6 and 0 <= found.attacks[0].auc <= 1  # type: ignore[attr-defined]
    assert (again.path / "membership.json").is_file()
    with pytest.raises(fedpriv.InputError, match="audit has no option 'refrences'; did you mean references"):
        again.audit(refrences=6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mechanism": {"sigm": 1}}, "unknown key mechanism.sigm"),
        ({"training": {"batch_size": None}}, "training.batch_size = None: a number, a text, true or false"),
        ({"sede": 1}, "unknown key sede"),
    ],
)
def test_wrong_settings_are_input_errors(settings: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    with pytest.raises(fedpriv.InputError, match=said):
        fedpriv.run(tmp_path / "small.toml", out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_settings() -> None:
    given = {"seed": np.int64(3), "mechanism": {"sigma": np.float32(0.5)}, "adversary": {"rounds": [np.int64(1)]}}
    assert _overrides(given) == ["seed=3", "mechanism.sigma=0.5", "adversary.rounds=[1]"]
    assert _overrides({"model": {"hidden": np.arange(2)}}) == ["model.hidden=[0, 1]"]
    with pytest.raises(fedpriv.InputError, match="expected the path of an experiment file; its sections are keywords"):
        fedpriv.run({"seed": 3})  # type: ignore[arg-type]


def test_a_missing_extra_is_named_in_one_line() -> None:
    with pytest.raises(fedpriv.InputError, match=r"^fedpriv serve needs no_such: pip install 'fedpriv\[service\]'$"):
        optional("no_such", "service", "fedpriv serve")


def test_the_page_in_a_real_kernel(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text(SMALL)
    cells = [block.text for block in blocks(ROOT / "docs" / "notebook.md") if block.language == "python"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (*cells, "run")])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (shown,) = [each for each in notebook.cells[-1].outputs if each.output_type == "execute_result"]
    assert "data:image/png;base64," in shown["data"]["text/html"]
    assert list(tmp_path.glob("runs/*/membership.json"))


def test_mlflow_and_tensorboard_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    Path("small.toml").write_text(SMALL)
    run = fedpriv.run("small.toml", out="one", quiet=True, report={"trackers": ["mlflow", "tensorboard"]})
    run.attack("map", quiet=True, iterations=5)
    (logged,) = mlflow.search_runs(output_format="list")
    assert logged.data.metrics["test_accuracy"] == pytest.approx(run.accuracy)
    assert logged.data.metrics["epsilon"] == pytest.approx(run.epsilon)
    assert any(name.startswith("leakage/map") for name in logged.data.metrics)
    assert logged.data.params["mechanism.name"] == "vmf" and logged.info.run_name == "experiment-one"
    assert {each.path for each in mlflow.MlflowClient().list_artifacts(logged.info.run_id)} >= {"report.html"}
    events = EventAccumulator("one/tensorboard").Reload()
    assert [event.step for event in events.Scalars("round/accuracy")] == [0, 1, 2]
