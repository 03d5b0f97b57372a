"""A run's folder in one record, and records as a table that other programs read."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from scipy.stats import norm

from benchmarks.comparison import synthetic_records as synthetic
from fedpriv.attacks.membership.audit import audit_run
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.robustness.report import CertifiedFigures, EvasionFigures
from fedpriv.sweep.display import result_table
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.page import write_sweep_report
from fedpriv.sweep.record import (
    SweepProgress,
    TrialRecord,
    describe_columns,
    from_csv,
    read_record,
    to_csv,
    to_parquet,
    to_table,
)
from fedpriv.sweep.run import run_sweep
from tests.integration.small import experiment
from tests.sweep.sweeps import SMALL, sweep


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    settings: dict[str, dict[str, object]] = {
        "data": {"train_examples": 80},
        "federation": {"clients": 2, "rounds": 3},
        "training": {"batch_size": 10},
        "mechanism": {"name": "vmf", "kappa": 4.0, "blocks": "size:100"},
        "adversary": {"attacks": ["iga"], "victims": 2, "iga": {"iterations": 2}},
    }
    path = tmp_path_factory.mktemp("record") / "run"
    start_run(experiment(**settings), path, "fedpriv run small.toml", Silent())
    audit_run(RunFolder.open(path), 6, 8, Silent())
    return RunFolder.open(path)


@pytest.mark.slow
def test_a_record_says_what_the_files_say(run: RunFolder) -> None:
    record = read_record(run, "here", 7, {"mechanism.kappa": 4.0}, seconds=2.5)
    summary = json.loads((run.path / "summary.json").read_text())
    assert (record.trial, record.folder, record.seconds, record.seed) == (7, "here", 2.5, 3)
    assert (record.accuracy, record.loss) == (summary["test_accuracy"], summary["test_loss"])
    for key in ("epsilon", "delta", "pure_epsilon", "nominal_epsilon", "adjacency", "participations"):
        assert getattr(record, key) == summary["ledger"][key]
    assert (record.mechanism, record.blocks, record.noise) == ("vmf", "size:100", 4.0)
    # 64 inputs, 12 hidden units, 10 classes.
    assert record.parameters == 64 * 12 + 12 + 12 * 10 + 10
    assert record.draws == -(-record.parameters // 100)
    rows = {(one["attack"], one["upload"]): one for one in summary["attacks"]}
    assert len(record.reconstructions) == len(rows)
    for one in record.reconstructions:
        row = rows[one.attack, one.upload]
        assert (one.mse, one.psnr, one.ssim, one.recovered) == (row["mse"], row["psnr"], row["ssim"], row["recovered"])
    assert [one.upload for one in record.reconstruction] == ["protected"]
    membership = summary["membership"]
    assert [(one.attack, one.auc) for one in record.memberships] == [
        (r["attack"], r["auc"]) for r in membership["attacks"]
    ]
    assert record.epsilon_bound == membership["epsilon_bound"]["epsilon"]
    assert not record.refuted and not record.failed


@pytest.mark.slow
def test_accuracys_interval_is_wilsons(run: RunFolder) -> None:
    record = read_record(run, "here")
    count = json.loads((run.path / "summary.json").read_text())["data"]["test_examples"]
    assert record.accuracy is not None
    z, p = norm.ppf(0.975), record.accuracy
    centre = (p + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (p * (1 - p) / count + z**2 / (4 * count**2)) ** 0.5
    assert record.accuracy_low == pytest.approx(centre - half)
    assert record.accuracy_high == pytest.approx(centre + half)


@pytest.mark.slow
def test_a_bound_above_the_proof_is_a_refuted_ledger(run: RunFolder, tmp_path: Path) -> None:
    found = json.loads((run.path / "membership.json").read_text())
    found["epsilon_bound"]["epsilon"] = found["proven_epsilon"] * 1.01
    for name in ("config.toml", "ledger.json", "summary.json"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    (tmp_path / "membership.json").write_text(json.dumps(found))
    record = read_record(RunFolder(tmp_path), "here")
    assert record.refuted and record.wrong


def test_accuracy_per_client_is_in_tables(tmp_path: Path) -> None:
    """The median and the worst of metrics.jsonl, in the record, the terminal and the report, where a run has them."""
    x, y, owner = np.random.default_rng(0).integers(0, 256, (36, 4, 4), np.uint8), np.arange(36) % 2, np.arange(36) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, client=owner, client_test=owner)
    data = {"name": "npz", "path": str(tmp_path / "own.npz"), "partition": "key"}
    base = {**SMALL, "data": data, "federation": {"clients": 3, "rounds": 2}}
    rows = [{"federation": {"evaluate": which}} for which in ("all", "clients")]
    asked = sweep(tmp_path, base=base, seeds=[1], list={"row": rows})
    plain, each = run_sweep(asked, SweepFolder.prepare(tmp_path / "out", asked), SweepProgress())
    lines = (tmp_path / "out" / each.folder / "metrics.jsonl").read_text().splitlines()
    found = json.loads(lines[-1])["client_accuracy"]
    assert (each.client_median, each.client_worst) == (found["median"], found["worst"])
    assert plain.client_median is None and plain.client_worst is None
    row = parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()[1]
    assert (row["client_median"], row["client_worst"]) == (found["median"], found["worst"])
    headings = [column.header for column in result_table([plain, each]).columns]
    assert headings[-3:-1] == ["clients\nmedian", "clients\nworst"]
    assert not any("clients" in str(column.header) for column in result_table([plain]).columns)
    page = write_sweep_report(tmp_path / "out").read_text(encoding="utf-8")
    assert "Clients, median" in page and "Clients, worst" in page


def test_a_folder_without_its_end_has_no_record(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(InputError, match=r"has no summary.json: finish the run with fedpriv run --resume"):
        read_record(RunFolder(tmp_path), "here")
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        read_record(RunFolder(tmp_path), "here")


def test_records_survive_json() -> None:
    for record in synthetic(5):
        assert TrialRecord.model_validate_json(record.model_dump_json()) == record


def test_parquet_and_csv_hold_every_figure() -> None:
    """Parquet read back by pyarrow, CSV by the standard library."""
    records = synthetic(12)
    table = to_table(records)
    back = parquet.read_table(io.BytesIO(to_parquet(table))).to_pylist()
    lines = list(csv.DictReader(io.StringIO(to_csv(table).decode())))
    assert list(lines[0]) == list(back[0]) == list(describe_columns(records))
    for record, row, line in zip(records, back, lines, strict=True):
        for one in record.reconstructions:
            assert row[f"reconstruction.{one.attack}.{one.upload}.mse"] == one.mse
        for other in record.memberships:
            assert row[f"membership.{other.attack}.auc"] == other.auc
            assert float(line[f"membership.{other.attack}.auc"]) == pytest.approx(other.auc)
        assert row["set.training.learning_rate"] == record.settings["training.learning_rate"]
        assert (row["epsilon"], row["status"], row["trial"]) == (record.epsilon, record.status, record.trial)
        assert (
            line["epsilon"] == "" if record.epsilon is None else float(line["epsilon"]) == pytest.approx(record.epsilon)
        )


def test_records_survive_csv() -> None:
    """Whatever a trial may have: figures of every kind, settings of every type, refusals, nothing at all."""
    certified = CertifiedFigures(norm="linf", size=0.05, share=0.25)
    evasion = EvasionFigures(attack="pgd", norm="linf", size=0.1, right=1 / 3, low=0.1, high=None)
    full, *others = synthetic(5)
    records = [
        full.model_copy(
            update={
                "settings": {"model.hidden": [8, 4], "data.name": "a, \"b\"", "x": 2},
                "refusals": ("iga: no; use map", 'map: "never", [so]'),
                "certified": (certified,), "evasions": (evasion,),
            }
        ),
        *others,
        TrialRecord(trial=9, folder="", status="failed", reason="a, b; c", seed=2, settings={"x": 0.1}),
    ]  # fmt: skip
    back = from_csv(to_csv(to_table(records)))
    assert list(map(in_order, back)) == list(map(in_order, records))


def in_order(record: TrialRecord) -> TrialRecord:
    """A record with its attacks in one order."""
    return record.model_copy(update={"reconstructions": tuple(sorted(record.reconstructions, key=str))})


def test_every_column_is_described() -> None:
    table = to_table(synthetic(6))
    for field in table.schema:
        assert len(field.metadata[b"description"]) > 5, field.name


def test_values_of_several_kinds_share_a_column_as_text() -> None:
    first, second, third = synthetic(3)
    records = [
        first.model_copy(update={"settings": {"model.hidden": [8, 4], "x": 1}}),
        second.model_copy(update={"settings": {"model.hidden": "wide", "x": 2.5}}),
        third.model_copy(update={"settings": {}}),
    ]
    table = to_table(records)
    assert table["set.model.hidden"].to_pylist() == ["[8, 4]", "wide", None]
    assert table["set.x"].to_pylist() == [1.0, 2.5, None]
    assert to_csv(to_table(records[:1]))
