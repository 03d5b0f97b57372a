"""What the launcher runs is the program itself: arguments, folder, environment, input, output, exit code and end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedpriv.deploy.flower import program
from fedpriv.deploy.launcher import LAUNCHED, write_stand_ins
from fedpriv.deploy.processes import StartedProcess, is_alive, start, stop
from fedpriv.deploy.up import launcher

# `tqdm` copies its input to its output until that ends.
NAMES = ("flwr", "tqdm")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, StartedProcess]]:
    """A launcher, in a folder whose name is longer than the address of a socket may be."""
    folder = tmp_path_factory.mktemp("programs") / ("long 'name'" * 12)
    folder.mkdir(parents=True)
    write_stand_ins(folder, {name: program(name) for name in NAMES})
    command = launcher(folder)
    started = start("launcher", [command.program, *command.arguments, "tqdm"], os.environ, folder, folder / "log")
    while not (folder / "launcher.sock").exists():
        assert is_alive(started), (folder / "log").read_text()
        time.sleep(0.05)
    yield folder, started
    stop([started])


def test_an_app_of_ours_imports_no_further_package() -> None:
    """What an app imports by itself is CPU time of every message."""
    code = (
        "import sys; from importlib import import_module\n"
        "from fedpriv.deploy import launcher\n"
        "for program in launched: launcher._entry(program)\n"
        "for module in launcher._APPS_IMPORT: import_module(module)\n"
        "known = {name.partition('.')[0] for name in sys.modules} - {'fedpriv'}\n"
        "from fedpriv.clients.app import client_app; from fedpriv.core.world import build_world\n"
        "from fedpriv.core.config import Experiment\n"
        "build_world(Experiment())\n"
        "print({name.partition('.')[0] for name in sys.modules} - known - set(sys.stdlib_module_names))\n"
    )
    command = [sys.executable, "-c", f"launched = {LAUNCHED}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "{'fedpriv'}\n", done.stdout


def asked(path: str | Path, *arguments: str, text: str = "", **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(path), *arguments], input=text, capture_output=True, text=True, cwd="/", env={**os.environ, **variables}
    )
    return done.returncode, done.stdout, done.stderr


def test_it_answers_as_the_program_does(launched: tuple[Path, StartedProcess], tmp_path: Path) -> None:
    folder, started = launched
    (tmp_path / "config.toml").touch()
    cases: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
        (("--version",), {}),
        (("nonsense",), {"COLUMNS": "60"}),
        (("ls", "nowhere", "--format", "json"), {"FLWR_HOME": str(tmp_path)}),
    )
    codes = []
    for arguments, variables in cases:
        answer = asked(folder / "flwr", *arguments, **variables)
        assert answer == asked(program("flwr"), *arguments, **variables)
        codes.append(answer[0])
    assert codes[:2] == [0, 2]
    assert asked(folder / "tqdm", text="a line\n" * 1000)[:2] == (0, "a line\n" * 1000)
    assert (folder / "log").read_text() == ""
    assert is_alive(started)


def test_a_process_of_a_deployment_is_a_fork(
    launched: tuple[Path, StartedProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no launcher answers, it is the program itself."""
    folder, _ = launched
    logs = [tmp_path / "fork.log", tmp_path / "program.log"]
    for log, place in zip(logs, (folder, tmp_path), strict=True):
        with monkeypatch.context() as patched:
            if place == folder:
                patched.setattr(subprocess, "Popen", None)
            command = [program("tqdm"), "--version"]
            started = start("version", command, os.environ, tmp_path, log, place)
        while is_alive(started):
            time.sleep(0.05)
    assert logs[0].read_text() == logs[1].read_text() != ""


def has_begun(fork: psutil.Process) -> bool:
    """Whether its second thread waits for who asked, who knows by then that the program runs."""
    try:
        return fork.num_threads() > 1
    except psutil.NoSuchProcess:  # what the launcher imports may start processes, too
        return False


def running(launched: tuple[Path, StartedProcess]) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A program that waits for input, and the fork that runs it."""
    folder, started = launched
    silent = subprocess.DEVNULL
    asking = subprocess.Popen([folder / "tqdm"], stdin=subprocess.PIPE, stdout=silent, stderr=silent, cwd="/")
    while not (forks := [fork for fork in psutil.Process(started.pid).children() if has_begun(fork)]):
        time.sleep(0.05)
    return asking, forks[0]


def test_it_ends_with_whoever_asked_for_it(launched: tuple[Path, StartedProcess]) -> None:
    asking, fork = running(launched)
    asking.kill()
    asking.communicate()
    fork.wait(timeout=60)


def test_a_program_that_was_killed_has_failed_and_is_not_started_again(launched: tuple[Path, StartedProcess]) -> None:
    asking, fork = running(launched)
    fork.send_signal(signal.SIGKILL)
    asking.communicate()
    assert asking.returncode == 1


def test_without_the_launcher_it_becomes_the_program(launched: tuple[Path, StartedProcess]) -> None:
    folder, started = launched
    psutil.Process(started.pid).kill()
    while is_alive(started):
        time.sleep(0.05)
    assert asked(folder / "tqdm", text="x\n")[:2] == (0, "x\n")
    (folder / "launcher.sock").unlink()
    assert asked(folder / "tqdm", text="x\n")[:2] == (0, "x\n")
    assert sys.executable in (folder / "tqdm").read_text()
