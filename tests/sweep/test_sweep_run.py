"""Sweeps as they go: what fails is recorded, what is over is not repeated, a kill changes nothing."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as parquet
import pytest
from rich.console import Console

import fedpriv.sweep.comparison as comparison
import fedpriv.sweep.run as lab
from benchmarks.comparison import synthetic_records as synthetic
from fedpriv.accounting import ORDERS, rdp_to_epsilon, release_with, vmf_rdp
from fedpriv.clients import answering
from fedpriv.core.cli import main
from fedpriv.core.config import Experiment
from fedpriv.core.config.data import DataConfig
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.engines.tasks import _ended_at_once
from fedpriv.sweep.comparison import read_folders
from fedpriv.sweep.display import SweepDisplay, print_results, result_table
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.page import write_sweep_report
from fedpriv.sweep.record import TrialRecord
from fedpriv.sweep.run import TrialTask, run_sweep, run_trial
from fedpriv.sweep.selection import _TrialRun, chosen_trial
from fedpriv.sweep.settings import Sweep
from tests.sweep.sweeps import NOISES, SMALL, Notes, sweep, write


def run(asked: Sweep, path: Path, retry: bool = False) -> tuple[list[TrialRecord], Notes]:
    notes = Notes()
    return run_sweep(asked, SweepFolder.prepare(path, asked), notes, retry), notes


def figures(path: Path) -> list[dict[str, Any]]:
    """The results without what a clock says."""
    rows = parquet.read_table(path / "results.parquet").to_pylist()
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_every_trial_is_a_run_with_a_record(tmp_path: Path) -> None:
    asked = sweep(tmp_path, seeds=[1], audit={"references": 6, "pairs": 10})
    records, notes = run(asked, tmp_path / "out")
    assert notes.begun == notes.over == [1, 2, 3]
    for trial, record in zip(asked.trials, records, strict=True):
        folder = tmp_path / "out" / record.folder
        assert not (folder / "report.html").exists()
        assert json.loads((folder / "record.json").read_text()) == record.model_dump(mode="json")
        assert record.settings == dict(trial.settings)
        assert record.memberships and record.epsilon_bound is not None
        assert record.rounds == 2
    assert [record.draws for record in records] == [None, None, 4]
    assert [row["trial"] for row in figures(tmp_path / "out")] == [1, 2, 3]
    assert write_sweep_report(tmp_path / "out").stat().st_size > 10_000


def test_nothing_that_is_over_is_repeated(tmp_path: Path) -> None:
    asked = sweep(tmp_path)
    _, first = run(asked, tmp_path / "out")
    table = figures(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").rglob("*.json")}
    _, second = run(asked, tmp_path / "out")
    assert len(first.over) == 6 and second.over == [] and second.before == [1, 2, 3, 4, 5, 6]
    assert figures(tmp_path / "out") == table
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("no\nroom"), "MemoryError: no room"),
        (RunFailedError("no client\nanswered"), "no client answered"),
        (InputError("no noise proves that"), "no noise proves that"),
    ],
)
def test_a_trial_that_fails_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def failing(task: TrialTask) -> TrialRecord:
        if task.trial.number == 2:
            raise error
        return run_trial(task)

    asked = sweep(tmp_path, seeds=[1])
    monkeypatch.setattr(lab, "run_trial", failing)
    records, _ = run(asked, tmp_path / "out")
    assert [record.status for record in records] == ["completed", "failed", "completed"]
    assert records[1].reason == reason
    assert [row["reason"] for row in figures(tmp_path / "out")] == [None, reason, None]
    assert reason in write_sweep_report(tmp_path / "out").read_text()
    monkeypatch.undo()
    again, notes = run(asked, tmp_path / "out")
    assert notes.begun == [] and again == records
    repeated, notes = run(asked, tmp_path / "out", retry=True)
    assert notes.begun == [2]
    assert [record.status for record in repeated] == ["completed"] * 3


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ZeroDivisionError("of an\nextension"), True),
        (ValueError("\udce9"), True),
        (RunFailedError("no client answered"), False),
        (InputError("no noise proves that"), False),
    ],
)
def test_an_unexpected_error_leaves_its_traceback_until_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: bool
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    asked = sweep(tmp_path, seeds=[1])
    monkeypatch.setattr(lab, "read_record", failing)
    records, _ = run(asked, tmp_path / "out")
    assert [record.status for record in records] == ["failed"] * 3
    files = sorted((tmp_path / "out").rglob("traceback.txt"))
    assert [file.parent.name for file in files] == ["0001", "0002", "0003"] * kept
    for file in files:
        text = file.read_text()
        assert "in failing" in text and text.splitlines()[-1] in ("extension", r"ValueError: \udce9")
    monkeypatch.undo()
    repeated, _ = run(asked, tmp_path / "out", retry=True)
    assert [record.status for record in repeated] == ["completed"] * 3
    assert not list((tmp_path / "out").rglob("traceback.txt"))


def test_an_interruption_leaves_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise RunInterruptedError("by the user")

    monkeypatch.setattr(lab, "read_record", interrupted)
    with pytest.raises(RunInterruptedError):
        run(sweep(tmp_path, seeds=[1]), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("traceback.txt"))


def test_a_traceback_that_cannot_be_written_is_told_beside_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        (tmp_path / "out" / "trials" / "0001" / "traceback.txt").mkdir(exist_ok=True)
        raise ZeroDivisionError("the reason")

    monkeypatch.setattr(lab, "read_record", failing)
    records, _ = run(sweep(tmp_path, seeds=[1]), tmp_path / "out")
    reasons = [record.reason for record in records]
    assert reasons[1:] == ["ZeroDivisionError: the reason"] * 2
    assert str(reasons[0]).startswith("ZeroDivisionError: the reason (no traceback.txt: ")


def test_a_refuted_ledger_is_a_result_and_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedpriv.attacks.membership import audit
    from fedpriv.core.figure import EpsilonBound

    monkeypatch.setattr(audit, "canaries_in_references", lambda *_: EpsilonBound(999.0, 1e-5, 0.95, 20, "test"))
    asked = sweep(tmp_path, seeds=[1], audit={"references": 6, "pairs": 10})
    records, _ = run(asked, tmp_path / "out")
    assert [record.refuted for record in records] == [False, True, True]
    assert [record.failed for record in records] == [False] * 3
    page = write_sweep_report(tmp_path / "out").read_text()
    assert "the ledger is refuted" in page and page.count("ε of at least 999 with confidence") == 2
    styles = [str(row.style) for row in result_table(records).rows]
    assert styles == ["", "red", "red"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": [1, 2, 3]}, "of 6 trials, not 9"),
        ({"audit": {"references": 6}}, "with another audit"),
        ({"name": "other"}, "'small', not 'other'"),
        ({"set": {"training": {"learning_rate": 0.4}}}, "its trial 1 has other settings"),
    ],
)
def test_another_sweeps_folder_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    SweepFolder.prepare(tmp_path / "out", sweep(tmp_path))
    with pytest.raises(InputError, match=f"holds the results of another sweep .*{said}"):
        SweepFolder.prepare(tmp_path / "out", sweep(tmp_path, **changes))


def test_resources_and_the_order_of_default_keys_make_no_other_sweep(tmp_path: Path) -> None:
    SweepFolder.prepare(tmp_path / "out", sweep(tmp_path))
    same = sweep(tmp_path, resources={"cpus": 0.25}, set={"federation": {"min_clients": 1}})
    assert SweepFolder.prepare(tmp_path / "out", same).records() == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(InputError, match="is not the folder of a sweep; choose another --out"):
        SweepFolder.prepare(tmp_path / "out", sweep(tmp_path))
    with pytest.raises(InputError, match=r"it has no sweep.json"):
        SweepFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Invalid JSON"),
        ('{"name": "small", "audit"', "Invalid JSON"),
        ("[]", "is damaged"),
        ("{}", "name: Field required"),
        ('{"name": "small", "audit": null, "trials": 5}', "trials: Input should be a valid"),
        ('{"name": "small", "audit": null, "trials": [1, 2]}', "trials.0: Input should be an object"),
    ],
)
def test_a_damaged_plan_is_one_line_wherever_it_is_read(tmp_path: Path, content: str, said: str) -> None:
    asked = sweep(tmp_path)
    folder = SweepFolder.prepare(tmp_path / "out", asked)
    (tmp_path / "out" / "sweep.json").write_text(content)
    for read in (lambda: SweepFolder.prepare(tmp_path / "out", asked), folder.records, lambda: folder.name):
        with pytest.raises(InputError, match=f"sweep.json .*{said}") as error:
            read()
        assert "\n" not in str(error.value)


def test_a_damaged_record_and_that_of_another_trial_are_told_with_what_to_do(tmp_path: Path) -> None:
    folder = SweepFolder.prepare(tmp_path / "out", sweep(tmp_path))
    first, second = (record.model_copy(update={"trial": number}) for number, record in enumerate(synthetic(2), 1))
    folder.write_record(first)
    folder.write_record(second)
    path = folder.trial(2) / "record.json"
    whole = path.read_text()
    path.write_text(whole[:40])
    with pytest.raises(InputError, match=r"0002/record.json is damaged: .*; remove it, and the sweep writes it again$"):
        folder.records()
    path.write_bytes((folder.trial(1) / "record.json").read_bytes())
    with pytest.raises(InputError, match=r"0002/record.json is that of trial 1; remove it"):
        folder.records()
    path.write_text(whole)
    assert folder.records() == [first, second]


def test_a_record_that_cannot_be_read_or_removed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SweepFolder.prepare(tmp_path / "out", sweep(tmp_path))
    (folder.trial(1) / "record.json").mkdir(parents=True)
    with pytest.raises(InputError, match=r"0001/record.json cannot be read: Is a directory$"):
        folder.records()

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(InputError, match=r"0001/record.json cannot be removed: Permission denied$"):
        folder.forget_record(1)


@pytest.mark.parametrize("name", ["command.txt", ".lock"])
def test_what_cannot_be_written_is_told_before_a_trial_starts(tmp_path: Path, name: str) -> None:
    asked = sweep(tmp_path)
    folder = SweepFolder.prepare(tmp_path / "out", asked)
    (tmp_path / "out" / name).mkdir()
    with pytest.raises(InputError, match="out cannot be written: Is a directory"):
        folder.write_command("fedpriv sweep small.toml")
        run(asked, tmp_path / "out")


def test_a_sweep_whose_trials_were_removed_begins_anew(tmp_path: Path) -> None:
    asked = sweep(tmp_path, seeds=[1], list={"noise": [{"mechanism": {"name": "none"}}]})
    SweepFolder.prepare(tmp_path / "out", asked).trials.rmdir()
    records, _ = run(asked, tmp_path / "out")
    assert [record.status for record in records] == ["completed"]


def test_two_processes_do_not_run_one_sweep(tmp_path: Path) -> None:
    asked = sweep(tmp_path)
    folder = SweepFolder.prepare(tmp_path / "out", asked)
    with folder.at_work(), pytest.raises(InputError, match=rf"out is being written by process {os.getpid()}$"):
        run(asked, tmp_path / "out")


def test_an_unfinished_trial_is_resumed_with_the_same_record(tmp_path: Path) -> None:
    """As after a kill between two files: no record, no summary, or no configuration yet."""
    asked = sweep(tmp_path, seeds=[1])
    whole, _ = run(asked, tmp_path / "out")
    for number, names in enumerate(
        (["record.json"], ["record.json", "summary.json"], ["record.json", "config.toml"]), 1
    ):
        for name in names:
            (tmp_path / "out" / "trials" / f"000{number}" / name).unlink()
        (tmp_path / "out" / "trials" / f"000{number}" / "report.html").write_text("not finished")
    again, notes = run(asked, tmp_path / "out")
    assert notes.begun == [1, 2, 3]
    assert [_timeless(record) for record in again] == [_timeless(record) for record in whole]
    assert not list((tmp_path / "out" / "trials").glob("*/report.html"))


def _timeless(record: TrialRecord) -> TrialRecord:
    return record.model_copy(update={"seconds": None})


# ---- the display -----------------------------------------------------------------------------------------------------


def test_the_time_left_follows_from_the_trials_so_far(tmp_path: Path) -> None:
    now = [0.0]
    asked = sweep(tmp_path)
    folder = SweepFolder.prepare(tmp_path / "out", asked)
    console = Console(file=open(os.devnull, "w"), width=80)  # noqa: PTH123, SIM115
    display = SweepDisplay(console, folder, 6, clock=lambda: now[0])
    records = synthetic(6)
    display.found(records[:1])
    display.started(asked.trials[1])
    display.started(asked.trials[2])
    assert display.seconds_left() is None
    now[0] = 10.0
    display.ended(records[1])
    display.started(asked.trials[3])
    # Two at once: one has run for 10 of about 10 seconds, one is new, two wait.
    assert display.seconds_left() == pytest.approx((0 + 10 + 2 * 10) / 2)
    assert display.headline() == "2 of 6 trials finished, 2 running, about 0:15 left"


def test_the_live_table_fits_80_columns(tmp_path: Path) -> None:
    asked = sweep(tmp_path)
    console = Console(width=80, force_terminal=True, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    display = SweepDisplay(console, SweepFolder.prepare(tmp_path / "out", asked), 6)
    display.started(asked.trials[2])
    console.print(display.table())
    console.print(result_table(synthetic(4)))
    text = console.export_text()
    assert "mechanism.name=vmf" in text and "round 0 of 2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_no_figure_of_a_wide_table_is_cut() -> None:
    """What does not fit the terminal is wrapped by it; a long value of a setting is shortened."""
    console = Console(width=60, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    record = synthetic(4)[-1]
    print_results([record.model_copy(update={"settings": {"adversary.attacks": ("dlg",) * 20}})], console)
    text = console.export_text()
    assert f"{record.accuracy:.1%}" in text and f"{record.epsilon:.4g}" in text
    assert max(map(len, text.splitlines())) > 60
    assert "attacks=[dlg," in text and text.count("dlg") < 10 and "several statements" not in text
    trusting = record.model_copy(update={"mechanism": "central"})
    print_results([record, trusting], console)  # one adjacency and delta, but the server is trusted in one of them
    assert "several statements" in console.export_text()


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kill_9_and_a_new_start_give_the_table_of_one_that_went_through(tmp_path: Path) -> None:
    """The one that is killed runs on Ray, whose workers end by themselves; all else runs inline."""
    slower = {**SMALL, "federation": {"clients": 2, "rounds": 12}}
    path = write(tmp_path, base=slower, resources={"engine": "ray", "cpus": 1})
    command = [sys.executable, "-m", "fedpriv", "sweep", str(path), "-q", "--out", "killed"]
    running = subprocess.Popen(command, cwd=tmp_path, env=_environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 480
    while not (done := _written(tmp_path / "killed")) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    at_work = _workers(running.pid)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert at_work and not psutil.wait_procs(at_work, timeout=120)[1]
    done = _written(tmp_path / "killed")
    assert 1 <= len(done) < 6
    _, notes = run(sweep(tmp_path, base=slower), tmp_path / "killed")
    assert len(notes.before) == len(done) and len(notes.over) == 6 - len(done)
    assert _written(tmp_path / "killed").items() >= done.items()
    run(sweep(tmp_path, base=slower), tmp_path / "whole")
    assert len(figures(tmp_path / "killed")) == 6
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")


def _workers(sweep: int) -> list[psutil.Process]:
    """The processes that a sweep has on Ray for trials, by their command or by the title that Ray gives them."""
    found = []
    for process in psutil.Process(sweep).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some live for a moment
            command = " ".join(process.cmdline())
            found += [process] if "default_worker.py" in command or "ray::_ended_at_once" in command else []
    return found


def test_a_worker_whose_sweep_was_killed_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends it SIGTERM, and its handler raises: counted as a client's failure, that would be in the checkpoint."""
    asked = sweep(tmp_path, seeds=[1], list={"noise": NOISES[:1]})
    whole, _ = run(asked, tmp_path / "whole")
    killed = SweepFolder.prepare(tmp_path / "killed", asked)
    worker = os.fork()
    if worker == 0:
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            monkeypatch.setattr(answering, "check_question", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            _ended_at_once(run_trial, TrialTask(killed.path, asked.trials[0], None))
        finally:  # else what it raises would end in a second pytest, for which nobody waits
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGTERM
    again, _ = run(asked, tmp_path / "killed")
    assert [each.model_copy(update={"seconds": None}) for each in again] == [
        each.model_copy(update={"seconds": None}) for each in whole
    ]


def _written(folder: Path) -> dict[Path, int]:
    """The trials' records that are there, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "trials").glob("*/record.json")}


Fedpriv = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fedpriv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fedpriv:
    """The command in ``tmp_path``; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedpriv", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def test_the_list_is_the_check(tmp_path: Path, fedpriv: Fedpriv) -> None:
    """It warns as the sweep would, writes nothing, and is JSON where that is asked for."""
    unread = {"mechanism": {"name": "vmf", "kappa": 3.0, "clip_norm": 2.0}}
    write(tmp_path, seeds=[4], list={"noise": [*NOISES, unread]})
    code, out, shown = fedpriv("sweep", "sweep.toml", "--list")
    assert (
        code == 0
        and out.splitlines()[3] == "4: mechanism.name=vmf, mechanism.kappa=3.0, mechanism.clip_norm=2.0, seed=4"
    )
    assert shown == "warning: mechanism.clip_norm is set, but vmf with these settings does not read it\n"
    code, out, shown = fedpriv("sweep", "sweep.toml", "--list", "--json")
    assert (code, shown) == (0, "")
    assert json.loads(out)["trials"][3] == {
        "trial": 4, "seed": 4,
        "settings": {"mechanism.name": "vmf", "mechanism.kappa": 3.0, "mechanism.clip_norm": 2.0},
    }  # fmt: skip
    assert not (tmp_path / "sweeps").exists()


def test_a_refused_attack_is_named_beside_what_it_leaves_empty(tmp_path: Path, fedpriv: Fedpriv) -> None:
    base = SMALL | {
        "model": {"name": "lenet"},
        "adversary": {"attacks": ["closed_form"], "victims": 1},
        "federation": {"clients": 2, "rounds": 1},
    }
    write(tmp_path, base=base, seeds=[1], list={"noise": NOISES[:1]})
    reason = "closed_form needs a network whose first layer multiplies the image itself"
    code, _, shown = fedpriv("sweep", "sweep.toml", "--list")
    assert code == 0 and f"warning: attack closed_form refuses an upload of random images: {reason}" in shown
    code, printed, _ = fedpriv("sweep", "sweep.toml", "--out", "out")
    assert code == 0 and f"trial 1: attack closed_form refused: {reason}" in printed
    (row,) = [line for line in printed.splitlines() if line.lstrip().startswith("1 ")]
    assert " refused " in row
    assert f'<td colspan="6">attack closed_form refused: {reason}' in (tmp_path / "out" / "report.html").read_text()
    (figure,) = figures(tmp_path / "out")
    assert json.loads(figure["refusals"])[0].startswith("attack closed_form refused")


def test_the_command_in_the_folder_goes_on_with_it(tmp_path: Path, fedpriv: Fedpriv) -> None:
    one = {"noise": [{"mechanism": {"name": "none"}}]}
    write(tmp_path, seeds=[1], list=one, scales={"tiny": {"set": {"federation": {"rounds": 1}}}})
    assert fedpriv("sweep", "sweep.toml", "--scale", "tiny", "--out", "my place", "-q")[0] == 0
    command = (tmp_path / "my place" / "command.txt").read_text()
    assert command == "fedpriv sweep sweep.toml --scale tiny --out 'my place'\n"
    code, _, shown = fedpriv(*shlex.split(command)[1:])
    assert (code, shown) == (0, "1 of 1 trials were over before\n")


@pytest.mark.parametrize(("count", "title"), [(1, "a0"), (3, "a0, a1, a2"), (5, "5 sweeps and runs")])
def test_a_comparison_is_named_after_its_folders(
    fedpriv: Fedpriv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, title: str
) -> None:
    monkeypatch.setattr(comparison, "read_folders", lambda _: synthetic(2))
    (tmp_path / "a0").mkdir()
    monkeypatch.chdir(tmp_path / "a0")
    assert fedpriv("compare", ".", *(f"../a{number}" for number in range(1, count)))[0] == 0
    assert f"<h1>{title}</h1>" in Path("comparison.html").read_text()


def test_what_may_not_be_looked_at_is_one_line(fedpriv: Fedpriv, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a folder of somebody else's; root, who runs many tests, may look at everything."""

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "theirs/sweep.json")

    monkeypatch.setattr(comparison, "read_folders", denied)
    assert fedpriv("compare", "theirs") == (2, "", "fedpriv: theirs/sweep.json: permission denied\n")


def test_single_runs_may_have_mechanisms_with_other_settings(tmp_path: Path) -> None:
    """Each mechanism has keys of its own; a key that a run lacks is no setting of it."""
    paths = [tmp_path / name for name in ("none", "gaussian", "vmf")]
    for path, noise in zip(paths, NOISES, strict=True):
        path.mkdir()
        start_run(Experiment.model_validate({**SMALL, **noise}), path, "fedpriv run x.toml", Silent())
    records = comparison.read_folders(paths)
    assert [record.settings["mechanism.name"] for record in records] == ["none", "gaussian", "vmf"]
    assert [record.settings.get("mechanism.sigma") for record in records] == [None, 2.0, None]
    assert [record.settings.get("mechanism.kappa") for record in records] == [None, None, 5.0]
    assert not any("mechanism.calibration" in record.settings for record in records)  # one has it, at its default


def test_the_help_keeps_its_square_brackets(fedpriv: Fedpriv) -> None:
    assert "One of the file's [scales]" in fedpriv("sweep", "--help")[1]


def test_a_sweep_without_ray_says_what_else_there_is(
    tmp_path: Path, fedpriv: Fedpriv, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, seeds=[1], resources={"cpus": 1})
    monkeypatch.setattr("fedpriv.engines._has_ray", lambda: False)
    code, _, said = fedpriv("sweep", "sweep.toml")
    assert code == 2 and not (tmp_path / "sweeps").exists()
    assert said.endswith("not installed: pip install 'fedpriv[ray]', or run one trial after the other with --inline\n")
    assert fedpriv("sweep", "sweep.toml", "--list")[0] == 0


def test_a_tracker_names_trials_after_their_sweep(
    tmp_path: Path, fedpriv: Fedpriv, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr("fedpriv.core.trackers._TRACKERS", {"csv": lambda tracked: names.append(tracked.name)})
    write(tmp_path, base=SMALL | {"report": {"trackers": ["csv"]}}, seeds=[1], resources={"cpus": 1})
    assert fedpriv("sweep", "sweep.toml", "--inline", "--out", "noise")[0] == 0
    assert (tmp_path / "noise" / "command.txt").read_text() == "fedpriv sweep sweep.toml --out noise --inline\n"
    assert names == ["noise-0001", "noise-0002", "noise-0003"]


def check_what_a_choice_counts(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client of every trial, failed ones included, and the estimate of a table's bounds: by closed forms."""
    records = read_folders(folders)
    path = folders[0] / "ledger.json"
    whole = path.read_text()
    tree = json.loads(whole)
    (line,) = tree["clients"]
    # The second client has the smaller epsilon and, at small orders, the larger divergence.
    other = line | {"client": 1, "count": 1, "members": "1", "noise": 0.3, "epsilon": line["epsilon"] / 2}
    tree["clients"] = [line | {"count": 1, "members": "0"}, other]
    path.write_text(json.dumps(tree))
    gaussian = 2 * line["participations"] * ORDERS / 0.3**2
    vmf = json.loads((folders[1] / "ledger.json").read_text())["worst"]
    sizes = (64 * 12, 12, 12 * 10, 10)
    directional = vmf["participations"] * sum(vmf_rdp(ORDERS, size, 5.0) for size in sizes)
    expected = rdp_to_epsilon(ORDERS, gaussian + directional, 1e-5)
    assert chosen_trial(records).selections[0].epsilon == pytest.approx(expected, rel=1e-9)
    failed = [records[0].model_copy(update={"status": "failed", "accuracy": None}), records[1]]
    assert chosen_trial(failed).selections[0].epsilon == pytest.approx(expected, rel=1e-9)
    with monkeypatch.context() as patched:
        patched.setattr(DataConfig, "bounds_epsilon", 1.5)
        assert chosen_trial(records).selections[0].epsilon == pytest.approx(expected + 1.5, rel=1e-9)
    path.unlink()
    with pytest.raises(InputError, match="trial 1 failed once it had begun, and what it released counts, too"):
        chosen_trial(failed)
    path.write_text(whole)


def test_sweeps_as_a_user_meets_them(tmp_path: Path, fedpriv: Fedpriv, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, base=SMALL | {"report": {"trackers": ["csv"]}}, seeds=[1], resources={"cpus": 1})
    code, out, shown = fedpriv("sweep", "sweep.toml", "--inline")
    assert "test_accuracy," in (tmp_path / "sweeps" / "small" / "trials" / "0002" / "metrics.csv").read_text()
    assert code == 0 and "Report: sweeps/small/report.html" in out
    assert "3 of 3 trials finished" in shown
    code, out, _ = fedpriv("compare", "sweeps/small", "sweeps/small/trials/0001", "--json")
    assert code == 0 and (tmp_path / "comparison.html").is_file()
    assert [trial["trial"] for trial in json.loads(out)["trials"]] == [1, 2, 3, 4]
    (tmp_path / "runs").mkdir()
    shutil.copytree(tmp_path / "sweeps" / "small" / "trials" / "0001", tmp_path / "runs" / "run")
    assert "trials 1-3: sweeps/small\ntrial 4: runs/run\n" in fedpriv("compare")[1]
    noisy = ("sweeps/small/trials/0002", "sweeps/small/trials/0003")
    code, out, _ = fedpriv("compare", *noisy, "--private-selection", "--json")
    found = json.loads(out)["private_selection"]
    assert code == 0
    assert min(each["epsilon"] for each in found["selections"]) > found["own_epsilon"] > 0
    assert "Epsilon of the chosen trial" in fedpriv("compare", *noisy, "--private-selection")[1]
    check_what_a_choice_counts([tmp_path / each for each in noisy], monkeypatch)
    (tmp_path / "sweeps" / "small" / "trials" / "0002" / "record.json").unlink()
    assert fedpriv("report", "sweeps/small")[0] == 0
    assert "2 of 3 trials finished" in (tmp_path / "sweeps" / "small" / "report.html").read_text()
    (tmp_path / "sweeps" / "small" / "report.html").unlink()
    assert fedpriv("report", "sweeps/small")[:2] == (0, "Report: sweeps/small/report.html\n")
    assert fedpriv("sweep", "sweep.toml", "--list")[1].startswith("1: mechanism.name=none, seed=1\n2: ")
    for arguments, said in (
        (["sweep", "sweep.toml", "--scale", "full"], "scale 'full' is not known"),
        (["sweep", "nowhere.toml"], "no such file"),
        (["compare", "sweeps"], "is not the folder of a run or a sweep"),
        (["compare", "nowhere"], "is not the folder of a run or a sweep"),
        (["compare", "sweeps/small", "./sweeps/../sweeps/small"], "sweeps/../sweeps/small is given twice"),
        (["compare", "sweeps/small/trials/0001", "sweeps/small/trials/0001"], "0001 is given twice"),
        (["compare", "sweeps/small", "--private-selection"], "nothing is proven of trial 1 (sweeps/small/trials/0001)"),
        (["compare", "sweeps/small", "--attack", "dlg"], "no trial has a reconstruction attack 'dlg'"),
    ):
        code, _, refused = fedpriv(*arguments)
        assert code == 2
        assert said in refused and len(refused.strip().splitlines()) == 1


def test_trials_have_a_report_when_asked(tmp_path: Path, fedpriv: Fedpriv) -> None:
    write(tmp_path, seeds=[1], list={"noise": NOISES[:2]})
    trials = tmp_path / "sweeps" / "small" / "trials"
    assert fedpriv("sweep", "sweep.toml", "--inline")[0] == 0
    assert not list(trials.glob("*/report.html"))
    (trials / "0001" / "config.toml").unlink()
    code, out, said = fedpriv("sweep", "sweep.toml", "--inline", "--reports")
    assert code == 0 and "Report: sweeps/small/report.html" in out
    assert "warning: trial 1: sweeps/small/trials/0001 is not the folder of a run" in said
    assert list(trials.glob("*/report.html")) == [trials / "0002" / "report.html"]
    assert "Gaussian" in (trials / "0002" / "report.html").read_text()


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def test_trials_that_hold_against_others_are_of_another_kind() -> None:
    given = {"unit": "update", "sampling": "full", "rate": 1.0, "participations": 1}
    trusting, own = (release_with(1.0, 1e-5, mechanism=name, **given) for name in ("central", "gaussian"))
    assert _TrialRun(1, (trusting,), 0.0).kind != _TrialRun(2, (own,), 0.0).kind
