"""A disk that gets full at any file of any command: one line, exit code 1, nothing half-written, and it can go on."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedpriv.attacks.membership import audit as lab_audit
from fedpriv.core import lab
from fedpriv.core.cli import main
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunFailedError, RunInterruptedError
from fedpriv.core.progress import Progress, Silent
from fedpriv.core.report import page, reported, write_report
from fedpriv.core.runs import DEPLOYMENT, RunFolder
from fedpriv.deploy import attack as heard_attack
from fedpriv.deploy.containers import prepare
from fedpriv.deploy.folder import DeploymentFolder
from fedpriv.deploy.report import Listened, write_listened
from fedpriv.sweep import page as comparison_page
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.page import write_sweep_report
from fedpriv.sweep.run import run_sweep
from tests.command_line import fedpriv
from tests.full_disk import fill_up, leftovers
from tests.integration.small import experiment, left_behind
from tests.sweep.sweeps import Notes, sweep

SETTINGS: dict[str, dict[str, object]] = {
    "data": {"train_examples": 120},
    "federation": {"clients": 2, "rounds": 2},
    "training": {"batch_size": 4},
    "adversary": {"attacks": ["iga"], "victims": 1, "rounds": [2], "iga": {"iterations": 2}},
}
FULL = "cannot be written: No space left on device"


def start_run(settings: Experiment, folder: Path, command: str, progress: Progress) -> object:
    """What these four do is what the commands do: the report is a part of it."""
    with reported(folder):
        return lab.start_run(settings, folder, command, progress)


def resume_run(folder: Path, progress: Progress) -> lab.Summary:
    with reported(folder):
        return lab.resume_run(folder, progress)


def attack_run(folder: Path, names: Any, victims: Any, overrides: Any, out: Path | None, *told: Any) -> object:
    with reported(out or folder):
        return lab.attack_run(folder, names, victims, overrides, out, *told)


def attack_heard(folder: Path, heard: Path, names: Any, victims: Any, overrides: Any, out: Path, *told: Any) -> object:
    with reported(out):
        return heard_attack.attack_heard(folder, heard, names, victims, overrides, out, *told)


def audit_run(run: RunFolder, *told: Any) -> object:
    with reported(run.path):
        return lab_audit.audit_run(run, *told)


@pytest.fixture(autouse=True)
def _plain_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn in them is for other tests; here each would take a second."""
    for module, name in ((page, "render_page"), (comparison_page, "render_comparison")):
        monkeypatch.setattr(module, name, lambda *_: "<html>a report</html>")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render_page", lambda *_: "<html>a report</html>")
        start_run(experiment(**SETTINGS), folder, "fedpriv run x", Silent())
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def refused(function: Callable[[], object], kind: type[Exception] = RunFailedError) -> str:
    with pytest.raises(kind) as raised:
        function()
    text = str(raised.value)
    assert "\n" not in text
    return text


# ---- run ------------------------------------------------------------------------------------------------------------

# File, its folder, how many writes to it still work, and the command that goes on.
RUN = [
    ("command.txt", "", 0, "run --resume"),
    ("partition.json", "referee/", 0, "run --resume"),
    ("ceilings.json", "referee/", 0, "run --resume"),
    ("metrics.jsonl", "", 0, "run --resume"),
    ("metrics.jsonl", "", 1, "run --resume"),
    ("metrics.jsonl", "", 3, "run --resume"),
    ("asked.jsonl", "", 0, "run --resume"),
    ("asked.jsonl", "", 1, "run --resume"),
    ("0002-0000.json", "observations/", 0, "run --resume"),
    ("0002-0000.safetensors", "observations/", 0, "run --resume"),
    ("server.safetensors", "checkpoint/", 0, "run --resume"),
    ("0002-0000-iga-unprotected-1.png", "reconstructions/", 0, "run --resume"),
    ("0002-0000-original-3.png", "reconstructions/", 0, "run --resume"),
    ("guess-mean.png", "reconstructions/", 0, "run --resume"),
    ("scores.jsonl", "reconstructions/", 0, "run --resume"),
    ("ledger.json", "", 0, "run --resume"),
    ("summary.json", "", 0, "run --resume"),
    ("report.html", "", 0, "report"),
]


@pytest.mark.parametrize(
    ("name", "where", "after", "command"), RUN, ids=[f"{name}-{after}" for name, _, after, _ in RUN]
)
def test_a_run_goes_on_where_the_disk_was_full(
    name: str, where: str, after: int, command: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        hit = fill_up(patch, name, after)
        text = refused(lambda: start_run(experiment(**SETTINGS), path, "fedpriv run x", Silent()))
    assert len(hit) > after
    assert text == f"{path}/{where}{name} {FULL}; go on with: fedpriv {command} {path}"
    assert leftovers(path) == []
    if (path / "summary.json").exists():
        summary = json.loads((path / "summary.json").read_text())
        assert (summary["status"], summary["reason"]) in (("failed", text), ("completed", None))
    if command == "report":
        write_report(path)
    else:
        assert resume_run(path, Silent()).status == "completed"
    if name == "command.txt":
        # The folder's own settings repeat it, too.
        (path / "command.txt").write_bytes((whole / "command.txt").read_bytes())
        resume_run(path, Silent())
    assert left_behind(path) == left_behind(whole)


def test_a_run_that_cannot_even_begin_leaves_an_empty_folder(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"

    def start() -> object:
        return start_run(experiment(**SETTINGS), path, "fedpriv run x", Silent())

    with monkeypatch.context() as patch:
        fill_up(patch, "config.toml")
        assert refused(start) == f"{path} {FULL}; then give the same command again"
    assert list(path.iterdir()) == []
    start()
    assert left_behind(path) == left_behind(whole)


@pytest.mark.parametrize("name", ["ledger.json", "summary.json", "report.html", "*"])
@pytest.mark.parametrize("end", [KeyboardInterrupt(), RunFailedError("the training diverged")])
def test_why_a_run_ends_early_is_told_on_a_full_disk_too(
    end: BaseException, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    append = RunFolder.append_round

    def ends(folder: RunFolder, record: Any) -> None:
        append(folder, record)
        if record.round == 1:
            fill_up(monkeypatch, name)
            raise end

    monkeypatch.setattr(RunFolder, "append_round", ends)
    kind = RunInterruptedError if isinstance(end, KeyboardInterrupt) else RunFailedError
    text = refused(lambda: start_run(experiment(**SETTINGS), path, "fedpriv run x", Silent()), kind)
    assert text in (f"interrupted; finish it with: fedpriv run --resume {path}", "the training diverged") or name == "*"
    assert leftovers(path) == []


@pytest.mark.parametrize("name", ["guess-mean.png", "scores.jsonl", "summary.json"])
def test_nothing_of_a_finished_run_is_lost_where_resuming_it_fails(
    name: str, run: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_up(patch, name)
        assert f"{name} {FULL}" in refused(lambda: resume_run(run, Silent()))
    after, before = left_behind(run), left_behind(whole)
    told = {"summary.json", "report.html"}
    assert {key: value for key, value in after.items() if key not in told} == {
        key: value for key, value in before.items() if key not in told
    }
    resume_run(run, Silent())
    assert left_behind(run) == before


def test_what_a_kill_left_of_files_goes_when_the_run_is_resumed(run: Path, whole: Path) -> None:
    (run / "membership").mkdir()
    for name in ("", "observations", "reconstructions", "checkpoint", "membership"):
        (run / name / ".file.0123456789abcdef.part").write_bytes(b"half")
    write_report(run)
    assert len(leftovers(run)) == 5, "who reads a run may not be the only one there"
    resume_run(run, Silent())
    assert left_behind(run) == left_behind(whole)


# ---- attack and audit -----------------------------------------------------------------------------------------------

OVERRIDES = ("adversary.iga.iterations=3",)
ATTACK = [
    ("*-iga,iterations=3-unprotected-0.png", "attack"),
    ("scores.jsonl", "attack"),
    ("command.txt", "attack"),
    ("summary.json", "attack"),
    ("report.html", "report"),
]


def attack(run: Path, out: Path | None = None) -> dict[str, Any]:
    return attack_run(run, ["iga"], ["2-0"], OVERRIDES, out, "fedpriv attack x", Silent())


@pytest.fixture(scope="module")
def attacked(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("attacked") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render_page", lambda *_: "<html>a report</html>")
        attack(folder)
    return left_behind(folder)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("name", "command"), ATTACK)
def test_an_attack_goes_on_where_the_disk_was_full(
    name: str,
    command: str,
    copied: bool,
    run: Path,
    whole: Path,
    attacked: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out" if copied else None
    path = out or run
    with monkeypatch.context() as patch:
        hit = fill_up(patch, name)
        text = refused(lambda: attack(run, out))
    options = " --attack iga --victim 2-0 --set adversary.iga.iterations=3" if command == "attack" else ""
    assert text.endswith(f"/{hit[0]} {FULL}; go on with: fedpriv {command} {path}{options}")
    assert text.startswith(str(path))
    assert leftovers(path) == []
    if copied:
        assert left_behind(run) == left_behind(whole)
    write_report(path) if command == "report" else attack(path)
    assert left_behind(path) == attacked


@pytest.mark.parametrize("command", ["attack", "attack what was heard"])
def test_a_copy_that_does_not_fit_is_taken_back(
    command: str, run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copy = tmp_path / "out", shutil.copy2

    def full(source: str, target: str, **options: Any) -> object:
        if source.endswith(".toml"):
            raise OSError(28, "No space left on device", str(target))
        return copy(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil.copytree, "__defaults__", (False, None, full, False, False))
        text = refused(lambda: attack(run, out) if command == "attack" else heard(run, tmp_path / "heard", out))
    assert re.fullmatch(rf"{out}/\S+ cannot be written: .*No space left on device.*; then give the same .*", text)
    assert not out.exists()
    assert left_behind(run) == left_behind(whole) or command != "attack"


def heard(run: Path, folder: Path, out: Path) -> dict[str, Any]:
    """Attack what a listener has heard of the run, which is what its server heard."""
    (run / DEPLOYMENT).write_text(json.dumps({"run_id": "1"}))
    if not folder.exists():
        shutil.copytree(run / "observations", folder / "run-1" / "observations")
        write_listened(folder, Listened("here:1", "there:2", {"http": 1}, uploads=1))
    return attack_heard(run, folder, ["iga"], (), (), out, "fedpriv attack run --heard heard", Silent())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.toml", "fedpriv attack run --heard heard --out {out}"),
        ("0002-0000.safetensors", "fedpriv attack run --heard heard --out {out}"),
        ("listener.json", "fedpriv attack run --heard heard --out {out}"),
        ("scores.jsonl", "fedpriv attack {out} --attack iga --victim 2-0"),
        ("summary.json", "fedpriv attack run --heard heard --out {out}"),
        ("report.html", "fedpriv report {out}"),
    ],
)
def test_an_attack_on_what_was_heard_goes_on(
    name: str, expected: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "out", tmp_path / "heard"
    heard(run, folder, tmp_path / "first")
    with monkeypatch.context() as patch:
        fill_up(patch, name)
        text = refused(lambda: heard(run, folder, out))
    assert text.endswith(f"/{name} {FULL}; go on with: {expected.format(out=out)}")
    assert leftovers(tmp_path) == []
    if "--heard" in expected:
        assert not out.exists()
        heard(run, folder, out)
    elif "attack" in expected:
        attack_run(out, ["iga"], ["2-0"], (), None, "fedpriv attack run --heard heard", Silent())
    else:
        write_report(out)
    assert left_behind(out) == left_behind(tmp_path / "first")


@pytest.fixture(scope="module")
def signals(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, dict[str, object]]:
    """What reference models see, which takes an audit's time; and what an uninterrupted audit leaves."""
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("audited") / "run"))
    kept: list[object] = []
    find = lab_audit.membership_signals
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render_page", lambda *_: "<html>a report</html>")
        patch.setattr(lab_audit, "membership_signals", lambda *given: kept.append(find(*given)) or kept[0])
        audit_run(RunFolder.open(folder), 6, 8, Silent())
    return kept[0], left_behind(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "the same command") for name in ("signals.npz", "membership.json", "summary.json")),
        ("report.html", "fedpriv report {run}"),
    ],
)
def test_an_audit_goes_on_where_the_disk_was_full(
    name: str, expected: str, run: Path, signals: tuple[object, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_audit, "membership_signals", lambda *_: signals[0])
    with monkeypatch.context() as patch:
        fill_up(patch, name)
        text = refused(lambda: audit_run(RunFolder.open(run), 6, 8, Silent()))
    assert text.endswith(f"/{name} {FULL}; go on with: {expected.format(run=run)}")
    assert leftovers(run) == []
    write_report(run) if name == "report.html" else audit_run(RunFolder.open(run), 6, 8, Silent())
    assert left_behind(run) == signals[1]


# ---- sweeps ---------------------------------------------------------------------------------------------------------

ONE = {"seeds": [1], "list": {"noise": [{"mechanism": {"name": "none"}}]}}


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sweep.json", RunFailedError, "{out} {FULL}; then give the same command again"),
        ("command.txt", RunFailedError, "{out} {FULL}; then give the same command again"),
        ("record.json", RunFailedError, "{out}/trials/0001/record.json {FULL}; go on with: fedpriv sweep x"),
        ("results.parquet", RunFailedError, "{out}/results.parquet {FULL}; go on with: fedpriv sweep x"),
        ("results.csv", RunFailedError, "{out}/results.csv {FULL}; go on with: fedpriv sweep x"),
    ],
)
def test_a_sweep_goes_on_where_the_disk_was_full(
    name: str, kind: type[Exception], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = sweep(tmp_path, **ONE), tmp_path / "out"

    def go() -> list[Any]:
        folder = SweepFolder.prepare(out, asked)
        folder.write_command("fedpriv sweep x")
        return run_sweep(asked, folder, Notes())

    with monkeypatch.context() as patch:
        fill_up(patch, name)
        assert refused(go, kind) == expected.format(out=out, FULL=FULL)
    assert leftovers(out) == []
    (record,) = go()
    assert record.status == "completed"
    assert (out / "results.csv").is_file()


def test_what_a_kill_left_of_a_sweep_goes_when_it_is_taken_up(tmp_path: Path) -> None:
    asked, out = sweep(tmp_path, **ONE), tmp_path / "out"
    out.mkdir()
    left = out / ".sweep.json.0123456789abcdef.part"
    left.write_bytes(b"half")
    folder = SweepFolder.prepare(out, asked)
    folder.trial(1).mkdir()
    other = folder.trial(1) / ".record.json.0123456789abcdef.part"
    other.write_bytes(b"half")
    with folder.at_work():
        assert leftovers(out) == [other], "a worker of the killed sweep may still be writing there"
    run_sweep(asked, folder, Notes())
    assert leftovers(out) == []


def test_a_trial_on_a_full_disk_is_made_again_by_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, out = sweep(tmp_path, **ONE), tmp_path / "out"
    with monkeypatch.context() as patch:
        fill_up(patch, "ledger.json")
        (record,) = run_sweep(asked, SweepFolder.prepare(out, asked), Notes())
    assert record.failed
    assert record.reason is not None
    assert f"trials/0001/ledger.json {FULL}; go on with: fedpriv run --resume" in record.reason
    (record,) = run_sweep(asked, SweepFolder.open(out), Notes(), retry=True)
    assert record.status == "completed"
    assert write_sweep_report(out).is_file()


# ---- deployments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ca.pem", "server.key", "executors.secret", "supernode", "*.pub", "deployment.json"])
def test_keys_are_made_anew_where_the_disk_was_full(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> bool:
        return prepare(tmp_path / "deployment", tmp_path / "keys", 1, 8000, False)

    with monkeypatch.context() as patch:
        fill_up(patch, name)
        assert refused(make).endswith(f" {FULL}; then give the same command again")
    assert leftovers(tmp_path) == []
    assert make() == (name != "deployment.json")
    assert not make()


def test_what_a_kill_left_of_a_deployment_goes_with_its_keys(tmp_path: Path) -> None:
    folder = DeploymentFolder(tmp_path)
    folder.create()
    for part in (folder.path, folder.keys, folder.tls, folder.seeds):
        (part / ".file.0123456789abcdef.part").write_bytes(b"half a secret")
    folder.create()
    folder.forget()
    assert leftovers(tmp_path) == []


# ---- exit codes, in this process ------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it says on standard error."""
    monkeypatch.setattr(sys, "argv", ["fedpriv", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip()
    assert isinstance(ended.value.code, int)
    assert len(said.splitlines()) == (1 if said else 0), said
    return ended.value.code, said


COMMANDS = ["run", "run --resume", "report", "attack", "audit", "sweep", "compare", "plot"]
# Their folder is new, and nothing can be in a file's place.
NEW = ("run", "sweep")


@pytest.mark.parametrize(
    ("command", "damage"),
    [*((command, "full") for command in COMMANDS), *((command, "taken") for command in COMMANDS if command not in NEW)],
)
def test_a_report_or_plot_that_cannot_be_written_ends_with_exit_code_1_and_one_line(
    command: str,
    damage: str,
    run: Path,
    signals: tuple[object, dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lab_audit, "membership_signals", lambda *_: signals[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(experiment(**SETTINGS).to_toml())
    sweep(tmp_path, **ONE)
    of_run, of_new = "; go on with: fedpriv report run", "; go on with: fedpriv report new"
    arguments, name, then = {
        "run": ("run x.toml --out new -q", "new/report.html", of_new),
        "run --resume": ("run --resume run -q", "run/report.html", of_run),
        "report": ("report run", "run/report.html", of_run),
        "attack": ("attack run -a iga -q", "run/report.html", of_run),
        "audit": ("audit run --references 6 --pairs 8 -q", "run/report.html", of_run),
        "sweep": ("sweep sweep.toml --out new -q", "new/report.html", of_new),
        "compare": ("compare run --out new.html", "new.html", ""),
        "plot": ("account compare --epsilon 1 --plot new.png", "new.png", ""),
    }[command]
    expected = "No space left on device" if damage == "full" else "Is a directory"
    if damage == "full":
        fill_up(monkeypatch, Path(name).name)
    else:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
    code, said = told(capsys, monkeypatch, *arguments.split())
    is_given = damage != "full" and command in ("compare", "plot")
    assert code == (2 if is_given else 1)
    prefix = "--plot new.png:" if command == "plot" else name
    end = then or ("" if is_given else "; then give the same command again")
    assert said.splitlines()[-1] == f"fedpriv: {prefix} cannot be written: {expected}{end}"
    assert leftovers(tmp_path) == []


# ---- exit codes, with errors of the kernel --------------------------------------------------------------------------

SMALL = """
name = "small"
model = {name = "mlp", hidden = [8]}
data = {train_examples = 60}
federation = {clients = 2, rounds = 1}
training = {batch_size = 4}
adversary = {attacks = []}
engine = {name = "inline", device = "cpu"}
"""


def test_files_that_the_kernel_refuses(tmp_path: Path) -> None:
    """Reports of more than 20 kB, with no mock between the command and the kernel."""
    (tmp_path / "small.toml").write_text(SMALL)
    limited = {"cwd": tmp_path, "file_size": 20_000}
    too_large = "cannot be written: File too large"
    done = fedpriv("run", "small.toml", "--out", "run", "-q", **limited)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"fedpriv: run/report.html {too_large}; go on with: fedpriv report run\n"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
    done = fedpriv("report", "run", **limited)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"fedpriv: run/report.html {too_large}; go on with: fedpriv report run\n"
    done = fedpriv("account", "compare", "--epsilon", "1", "--plot", "plot.png", **limited)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"fedpriv: --plot plot.png: {too_large}; then give the same command again\n"
    assert leftovers(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {"small.toml", "run"}
    done = fedpriv("report", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Report: run/report.html\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    ["--version", "--help", "config show small.toml", "config show small.toml --json", "data", "run small.toml -q"],
)
def test_output_that_goes_nowhere_is_one_line(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    done = fedpriv(*arguments.split(), cwd=tmp_path, stdout=Path("/dev/full"))
    assert done.returncode == 1
    assert done.stderr == "fedpriv: the output cannot be written: No space left on device\n"
