"""Same settings, same bytes: twice inline, inline against Ray, and across a kill."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunInterruptedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import reported
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World
from fedpriv.server.tap import record_heard
from tests.command_line import Started
from tests.integration.small import experiment, left_behind

ATTACKED = {"attacks": ["iga"], "victims": 2, "rounds": [1, 3], "iga": {"iterations": 5}}
FEDAVG = {"algorithm": "fedavg", "server_optimizer": "adam", "server_learning_rate": 0.05}

SETTINGS = {
    "fedsgd, vmf": experiment(mechanism={"name": "vmf", "kappa": 40.0}, adversary=ATTACKED),
    "fedsgd, vmf by layer, dirichlet": experiment(
        mechanism={"name": "vmf", "kappa": 40.0, "blocks": "layer"}, data={"partition": "dirichlet"}, adversary=ATTACKED
    ),
    "fedavg, gaussian, poisson": experiment(
        mechanism={"name": "gaussian", "sigma": 1.0},
        training={"sampling": "poisson", "optimizer": "adam", "learning_rate": 0.01, "batch_size": 32},
        federation=FEDAVG,
    ),
    "fedavg, update unit": experiment(
        mechanism={"name": "gaussian", "sigma": 0.1, "unit": "update"}, federation={"algorithm": "fedavg"}
    ),
    "none, some clients": experiment(federation={"clients_per_round": 2, "server_momentum": 0.9}, adversary=ATTACKED),
    "clients that stop": experiment(
        mechanism={"name": "vmf", "kappa": 40.0, "unit": "example"},
        training={"batch_size": 32},
        data={"partition": "dirichlet"},
        federation={"clients_per_round": 3, "rounds": 40, "target_epsilon": 35.0},
        adversary=ATTACKED,
    ),
    "noise in the forward pass": experiment(
        model={"name": "lenet"},
        robustness={"noise": 0.3, "redistribution": "vulnerable"},
        mechanism={"name": "gaussian", "sigma": 1.0},
        training={"batch_size": 16, "sampling": "poisson"},
    ),
    "noise in local steps": experiment(
        robustness={"noise": 0.1, "place": "input", "redistribution": "informative", "norm": "linf"},
        federation={"algorithm": "fedavg"},
        training={"batch_size": 16},
    ),
    "lenet": experiment(model={"name": "lenet"}, training={"batch_size": 16}, adversary=ATTACKED),
}


def fingerprint(folder: Path) -> dict[str, bytes]:
    """What repeats on every engine: parameters, observations, ledger, scores, who was asked, the running epsilon."""
    names = ["ledger.json", "referee/partition.json", "checkpoint/server.safetensors"]
    files = [folder / name for name in names]
    files += sorted((folder / "observations").iterdir()) + sorted((folder / "reconstructions").iterdir())
    found = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    run = RunFolder.open(folder)
    found["asked"] = repr(run.asked()).encode()
    found["noisy"] = repr([record.noisy_accuracy for record in run.rounds()]).encode()
    found["epsilon"] = repr([record.epsilon for record in run.rounds()]).encode()
    return found


def on_engine(settings: Experiment, engine: str) -> Experiment:
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"name": engine})})


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "fedsgd, vmf"])  # by layer is more
def test_twice_inline_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        start_run(SETTINGS[name], tmp_path / folder, "fedpriv run x", Silent())
    assert left_behind(tmp_path / "a") == left_behind(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedsgd, vmf", "fedavg, update unit", "none, some clients", "lenet"])
def test_a_stacked_run_says_what_an_inline_one_does(name: str, tmp_path: Path) -> None:
    """What is proven is the same bytes; what was heard is the same numbers to rounding, from the same clients.

    Noise depends on every byte that a client was sent: after a round that was rounded otherwise, it is other noise.
    """
    for engine in ("inline", "stacked"):
        start_run(on_engine(SETTINGS[name], engine), tmp_path / engine, "", Silent())
    inline, stacked = (fingerprint(tmp_path / engine) for engine in ("inline", "stacked"))
    assert list(inline) == list(stacked)
    for file in ("ledger.json", "referee/partition.json", "epsilon"):
        assert inline[file] == stacked[file]
    noisy = SETTINGS[name].mechanism.name != "none"
    for file in sorted(
        (file for file in inline if file.endswith(".safetensors")), key=lambda file: "checkpoint" in file
    ):
        ours, theirs = load(inline[file]), load(stacked[file])
        assert ours.keys() == theirs.keys()
        sent = [key for key in ours if key.startswith("parameters/")]
        if noisy and file.startswith("observations/") and not all(torch.equal(ours[key], theirs[key]) for key in sent):
            assert not file.startswith("observations/0001-")  # all start from the same bytes
            return
        for key, value in ours.items():
            torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-4)


def test_another_seed_gives_other_bytes(tmp_path: Path) -> None:
    settings = experiment(mechanism={"name": "vmf", "kappa": 40.0})
    start_run(settings, tmp_path / "a", "", Silent())
    start_run(settings.model_copy(update={"seed": 4}), tmp_path / "b", "", Silent())
    name = "checkpoint/server.safetensors"
    assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "b" / name).read_bytes()


def _wait_for_rounds(folder: Path, count: int, command: Started) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.read_text().count("\n") <= count:
        assert not command.is_over(), command.ended()
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An experiment of some seconds in which three of four clients stop; its file and its uninterrupted folder."""
    folder = tmp_path_factory.mktemp("long")
    settings = experiment(
        mechanism={"name": "vmf", "kappa": 40.0},
        data={"partition": "dirichlet"},
        training={"batch_size": 10},
        federation={"rounds": 44, "server_optimizer": "adam", "target_ceiling": 0.2},
        adversary=ATTACKED,
    )
    (folder / "x.toml").write_text(settings.to_toml())
    with reported(folder / "whole"):
        stops = start_run(settings, folder / "whole", f"fedpriv run {folder / 'x.toml'}", Silent()).stops
    assert sorted(stop.client for stop in stops) == [0, 2, 3]
    return folder / "x.toml", folder / "whole"


@pytest.mark.essential
@pytest.mark.parametrize(
    ("last", "batches"), [(1, "shuffled"), (7, "shuffled"), (7, "fixed"), (7, "poisson"), (7, "balls-in-bins")]
)
def test_an_interrupted_run_resumes_to_the_same_bytes(
    last: int, batches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them what was used up, the last round before the interruption included."""

    def interrupted(world: World, folder: RunFolder, number: int, *arguments: Any) -> None:
        if number > last:
            raise KeyboardInterrupt
        record_heard(world, folder, number, *arguments)

    settings = experiment(
        mechanism={"name": "gaussian", "sigma": 0.8},
        training={"sampling": batches},
        data={"partition": "dirichlet"},
        federation={"rounds": 10, "server_optimizer": "adam"},
    )
    start_run(settings, tmp_path / "whole", "fedpriv run x", Silent())
    with monkeypatch.context() as patched, pytest.raises(RunInterruptedError):
        patched.setattr("fedpriv.server.rounds.record_heard", interrupted)
        start_run(settings, tmp_path / "cut", "fedpriv run x", Silent())
    assert [record.round for record in RunFolder.open(tmp_path / "cut").rounds()] == list(range(last + 1))
    resume_run(tmp_path / "cut", Silent())
    assert left_behind(tmp_path / "cut") == left_behind(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(long_run: tuple[Path, Path], tmp_path: Path) -> None:
    file, whole = long_run
    command = Started("run", str(file), "--out", "cut", cwd=tmp_path)
    _wait_for_rounds(tmp_path / "cut", 12, command)
    command.send_signal(signal.SIGKILL)
    assert command.ended().returncode == -signal.SIGKILL
    with reported(tmp_path / "cut"):
        resume_run(tmp_path / "cut", Silent())
    assert left_behind(tmp_path / "cut") == left_behind(whole)
    assert [record.round for record in RunFolder.open(tmp_path / "cut").rounds()] == list(range(45))


@pytest.mark.slow
def test_a_killed_stacked_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """Which clients are trained together follows from the round alone, so that a resumed one repeats its bytes."""
    settings = on_engine(SETTINGS["fedsgd, vmf by layer, dirichlet"], "stacked")
    settings = settings.model_copy(update={"federation": settings.federation.model_copy(update={"rounds": 30})})
    (tmp_path / "x.toml").write_text(settings.to_toml())
    with reported(tmp_path / "whole"):
        start_run(settings, tmp_path / "whole", f"fedpriv run {tmp_path / 'x.toml'}", Silent())
    command = Started("run", str(tmp_path / "x.toml"), "--out", "cut", cwd=tmp_path)
    _wait_for_rounds(tmp_path / "cut", 6, command)
    command.send_signal(signal.SIGKILL)
    assert command.ended().returncode == -signal.SIGKILL
    with reported(tmp_path / "cut"):
        resume_run(tmp_path / "cut", Silent())
    assert left_behind(tmp_path / "cut") == left_behind(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_cleanly_and_can_be_finished(
    long_run: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    file, whole = long_run
    command = Started("run", str(file), "--out", "cut", cwd=tmp_path)
    _wait_for_rounds(tmp_path / "cut", 10, command)
    command.send_signal(number)
    done = command.ended()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "--resume" in done.stderr
    assert (tmp_path / "cut" / "report.html").exists()
    with reported(tmp_path / "cut"):
        resume_run(tmp_path / "cut", Silent())
    assert left_behind(tmp_path / "cut") == left_behind(whole)
