"""The parts of a deployment without Flower's processes: records, processes, seeds, the app as sent, error texts."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from deployments import SMALL, fedpriv, free_ports, one_line, wait_for

from fedpriv.core.config import Experiment, load_experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret
from fedpriv.core.seeds import SEEDS, forget_seed, keep_seed, kept_for, without_seed
from fedpriv.deploy import flower
from fedpriv.deploy.certificates import Authority
from fedpriv.deploy.containers import admit, check_nodes, prepare
from fedpriv.deploy.flower import RunStatus, environment, program
from fedpriv.deploy.folder import DeploymentFolder, DeploymentRecord
from fedpriv.deploy.processes import StartedProcess, is_alive, start, stop
from fedpriv.deploy.run import _Outage, _why, for_deployment, make_app
from fedpriv.deploy.up import Command, look, start_process

# The package has a function of the same name.
deploy_up = importlib.import_module("fedpriv.deploy.up")

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def sleeper(folder: Path, code: str = "import time; time.sleep(600)") -> StartedProcess:
    return start("sleeper", [sys.executable, "-c", code], {}, folder, folder / "log")


def recorded(folder: Path, *processes: StartedProcess) -> DeploymentFolder:
    deployment = DeploymentFolder(folder)
    deployment.create()
    deployment.write(DeploymentRecord(1, 20_000, False, processes))
    return deployment


def test_a_process_is_known_by_number_and_time_of_start(tmp_path: Path) -> None:
    started = sleeper(tmp_path)
    assert is_alive(started)
    stranger = replace(started, created=started.created - 60)
    assert not is_alive(stranger)
    assert stop([stranger]) == ()
    assert is_alive(started), "another's process of the same number was stopped"
    assert stop([started]) == ("sleeper",)
    assert not is_alive(started)


def test_children_end_with_their_parent_and_who_ignores_a_request_is_made_to_end(tmp_path: Path) -> None:
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    started = sleeper(tmp_path, stubborn)
    wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"))
    child = int((tmp_path / "log").read_text())
    stop([started])
    assert not is_alive(started)
    assert not psutil.pid_exists(child)


def test_the_record_comes_back_as_it_was_and_is_the_owners_alone(tmp_path: Path) -> None:
    record = DeploymentRecord(2, 8000, True, (StartedProcess("superlink", 7, 1.5),), ("12", "13"))
    deployment = DeploymentFolder(tmp_path / "d")
    deployment.create()
    deployment.write(record)
    assert deployment.read() == record
    assert deployment.path.stat().st_mode & 0o077 == 0
    assert (deployment.path / "deployment.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("gpus", "seen"),
    [
        ((), [None, None, None, None, None]),
        (("3",), ["3", "3", "3", "3", None]),
        (("0", "1"), ["0", "0", "1", "0", None]),
    ],
)
def test_gpus_are_shared_out_among_those_who_run_apps(gpus: tuple[str, ...], seen: list[str | None]) -> None:
    record = DeploymentRecord(3, 8000, False, (), gpus=gpus)
    names = ("serverapp", "clientapp-0", "clientapp-1", "clientapp-2", "supernode-1")
    assert [record.gpu(name) for name in names] == seen


def test_a_process_sees_its_gpu(tmp_path: Path) -> None:
    deployment = recorded(tmp_path / "d")
    arguments = ("-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    started = [
        start_process(deployment, Command(name, Path(sys.executable).name, arguments), gpu)
        for name, gpu in (("clientapp-0", "1"), ("clientapp-1", None))
    ]
    wait_for(lambda: not any(map(is_alive, started)))
    shown = [(deployment.logs / f"clientapp-{number}.log").read_text().strip() for number in (0, 1)]
    assert shown == ["1", str(os.environ.get("CUDA_VISIBLE_DEVICES"))]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("up", "--gpus", "999,0"), "--gpus 999,0: there is no GPU 999; expected numbers or UUIDs"),
        (("warm", "no-such-program"), "no-such-program"),
        (("gateway",), "--keys keys/gateway: expected ca.pem, server.pem and server.key"),
    ],
)
def test_what_no_command_can_use_is_refused(here: Path, command: tuple[str, ...], told: str) -> None:
    one_line(fedpriv("deploy", *command, cwd=here), 2, told)


CONTAINED = [
    (("down",), "docker compose --profile '*' down --volumes"),
    (("restart",), "docker compose up"),
    (("up",), "docker compose --profile '*' down --volumes"),
    (("run", "small.toml"), "does not answer"),
]


@pytest.mark.parametrize(("command", "told"), CONTAINED)
def test_containers_are_not_ours_to_start_and_stop(here: Path, command: tuple[str, ...], told: str) -> None:
    prepare(here / "deployment", here / "keys", 3, free_ports(1), False)
    code = 1 if command[0] == "run" else 2
    one_line(fedpriv("deploy", *command, cwd=here), code, told)


def test_keys_are_made_once_and_each_partys_are_its_own(tmp_path: Path) -> None:
    folder, keys = tmp_path / "deployment", tmp_path / "keys"
    assert prepare(folder, keys, 2, 8000, False, ["fl.example.org"])
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    assert not prepare(folder, keys, 2, 8000, False, ["fl.example.org"])
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()} == before
    secret = [path for path in before if path.suffix not in (".pem", ".pub")]
    # The server's and the gateway's key and executors' secret; each node's these and its own key.
    assert len(secret) == 2 * (1 + 1) + 2 * 3
    assert len({before[path] for path in secret}) == len(secret)
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)
    assert not [path for path in (keys / "admission").iterdir() if path.name != "ca.pem" and path.suffix != ".pub"]
    assert {(each / "ca.pem").read_bytes() for each in (*keys.iterdir(), folder / "tls")} == {
        (folder / "tls" / "ca.pem").read_bytes()
    }


@pytest.mark.parametrize(
    "missing",
    [
        "supernode-1/server.pem",
        "superlink/server.key",
        "superlink/executors.secret",
        "supernode-0/supernode",
        "admission/supernode-1.pub",
    ],
)
@pytest.mark.parametrize("left", [None, b""])
def test_where_a_file_is_missing_all_is_made_anew(missing: str, left: bytes | None, tmp_path: Path) -> None:
    folder, keys = tmp_path / "deployment", tmp_path / "keys"
    prepare(folder, keys, 2, 8000, False)
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    (keys / missing).unlink() if left is None else (keys / missing).write_bytes(left)
    assert prepare(folder, keys, 2, 8000, False)
    assert not [path for path, content in before.items() if path.read_bytes() == content]
    assert not prepare(folder, keys, 2, 8000, False)


def test_keys_that_end_soon_are_not_made_anew_under_running_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, keys = tmp_path / "deployment", tmp_path / "keys"
    prepare(folder, keys, 1, 8000, False)
    monkeypatch.setattr("fedpriv.deploy.containers._MARGIN", timedelta(days=31))
    with socket.create_server(("127.0.0.1", 0)) as running:
        at = running.getsockname()
        with pytest.raises(InputError, match=r"end on \d{4}-\d\d-\d\d, and services run with them"):
            prepare(folder, keys, 1, 8000, False, (), at)
        assert prepare(folder, keys, 1, 8000, False, ["fl.example.org"], at)
    assert prepare(folder, keys, 1, 8000, False, (), at)


@pytest.mark.parametrize(
    ("profiles", "nodes", "wanted"),
    [("three", 3, None), ("", 5, None), ("eight", 8, None), ("eight", 3, 8), ("three,eight", 3, 8), ("gpu", 8, 3)],
)
def test_profiles_have_their_number_of_nodes(profiles: str, nodes: int, wanted: int | None) -> None:
    if wanted is None:
        check_nodes(profiles.split(","), nodes)
        return
    with pytest.raises(InputError, match=f"set FEDPRIV_NODES={wanted}"):
        check_nodes(profiles.split(","), nodes)


def test_a_folder_of_somebody_elses_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deployment").mkdir()
    monkeypatch.setattr("os.access", lambda path, how: False)  # root may write everywhere
    with pytest.raises(InputError, match=f"belongs to user {os.getuid()}, .* set FEDPRIV_UID={os.getuid()}"):
        prepare(tmp_path / "deployment", tmp_path / "keys", 1, 8000, False)


def test_down_takes_the_containers_of_all_profiles(here: Path) -> None:
    prepare(here / "deployment", here / "keys", 1, 8000, True)
    (here / "docker-compose.yml").touch()
    (here / "docker").write_text('#!/bin/sh\nprintf "%s|" "$@" > called\n')
    (here / "docker").chmod(0o700)
    done = fedpriv("deploy", "down", cwd=here, PATH=f"{here}{os.pathsep}{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "Down: stopped containers\n"), done.stderr
    assert (here / "called").read_text() == "compose|--profile|*|down|--volumes|"
    assert not (here / "deployment" / "deployment.json").exists()


class Told(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def test_a_superlink_in_a_container_that_is_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, told = recorded(tmp_path), Told()
    deployment.write(DeploymentRecord(1, free_ports(1), True, (), is_contained=True))
    answers: list[RunStatus | None] = [None, None, RunStatus("7", "running", ""), None]

    def asked(*_: object) -> RunStatus:
        answer = answers.pop(0)
        if answer is None:
            raise RunFailedError("check your network connection")
        return answer

    monkeypatch.setattr(flower, "run_status", asked)
    outage = _Outage(deployment, told)
    assert [outage.status("7"), outage.status("7")] == [None, None]
    assert outage.status("7") == RunStatus("7", "running", "")
    assert len(told.texts) == 2
    assert "does not answer; retrying" in told.texts[0]
    assert told.texts[1] == "the SuperLink answers again"
    monkeypatch.setattr("fedpriv.deploy.run._OUTAGE_SECONDS", -1.0)
    with pytest.raises(RunFailedError, match=r"docker compose ps .* up --detach .* run --resume DIR"):
        outage.status("7")


def test_a_superlink_in_a_container_that_is_slow_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, told = recorded(tmp_path), Told()
    deployment.write(DeploymentRecord(1, free_ports(1), True, (), is_contained=True))
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(flower, "program", lambda _: str(slow))
    monkeypatch.setattr(flower, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("fedpriv.deploy.run.is_serving", lambda *_: True)
    assert _Outage(deployment, told).status("7") is None
    assert "does not answer; retrying" in told.texts[0]


def test_what_flower_says_of_a_killed_server_is_put_in_words() -> None:
    lost = RunStatus("7", "finished:failed", "No heartbeat received from the task")
    contained = DeploymentRecord(1, 8000, False, (), is_contained=True)
    assert "docker compose ps" in _why(lost, contained)
    assert "fedpriv deploy restart" in _why(lost, replace(contained, is_contained=False))
    assert _why(replace(lost, details="ServerApp failed with exception: x"), contained) == "x"


def test_sigterm_leaves_no_seed(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from types import SimpleNamespace as Of\n"
        "from fedpriv.deploy import run;"
        "from fedpriv.core.config import Experiment; from fedpriv.core.randomness import Secret\n"
        "world = Of(experiment=Experiment.model_validate({'seed': 3}), secret=Secret(bytes(32)))\n"
        "with run._kept_seed(Of(seeds=Path('.')), world): print('kept', flush=True); time.sleep(600)"
    )
    started = start("kept", [sys.executable, "-c", code], os.environ, tmp_path, tmp_path.parent / "log")
    wait_for(lambda: bool(list(tmp_path.iterdir())))
    os.kill(started.pid, signal.SIGTERM)
    wait_for(lambda: not is_alive(started))
    assert not list(tmp_path.iterdir())


def test_a_further_name_needs_a_new_certificate_and_one_less_does_not(tmp_path: Path) -> None:
    folder, keys = tmp_path / "deployment", tmp_path / "keys"
    names = ["fl.example.org", "10.0.0.5", "fe80::1"]
    assert prepare(folder, keys, 1, 8000, False, names[:1])
    assert prepare(folder, keys, 1, 8000, False, names)
    assert not prepare(folder, keys, 1, 8000, False, names[1:])
    assert not prepare(folder, keys, 1, 8000, False)


@pytest.mark.parametrize(
    "name", ["b\u00fccher.example", "a b", "fl.example.org:8000", "[::1]", "-x.org", "a..b", "x" * 64]
)
def test_a_name_that_is_none_is_refused_before_anything_is_written(name: str, here: Path) -> None:
    before = sorted(here.iterdir())
    with pytest.raises(InputError, match="is no host"):
        prepare(here / "deployment", here / "keys", 1, 8000, False, ["fl.example.org", name])
    assert sorted(here.iterdir()) == before


def test_the_superlinks_certificate_has_its_names(tmp_path: Path) -> None:
    prepare(tmp_path / "deployment", tmp_path / "keys", 1, 8000, False, ["fl.example.org", "10.0.0.5"])
    found = x509.load_pem_x509_certificate((tmp_path / "keys" / "superlink" / "server.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["superlink", "localhost", "fl.example.org"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.5"]


def test_who_is_admitted_is_found_from_where_the_command_was_typed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own program, which runs elsewhere, gets as far as the SuperLink that is not there."""
    prepare(here / "deployment", here / "keys", 1, 8000, False)
    monkeypatch.chdir(here)
    with pytest.raises(RunFailedError, match="unavailable") as caught:
        admit(f"127.0.0.1:{free_ports(1)}", Path("keys/admission"))
    assert "does not exist" not in str(caught.value)


@pytest.mark.parametrize(("content", "told"), [(None, "does not exist"), ("no key", "Exit Code: 500")])
def test_complaints_of_flower_come_without_frame_and_colours(content: str | None, told: str, tmp_path: Path) -> None:
    key = tmp_path / "supernode-0.pub"
    if content is not None:
        key.write_text(content)
    with pytest.raises(RunFailedError, match=told) as caught:
        flower.register(recorded(tmp_path / "d"), key)
    assert str(caught.value).isascii()
    assert "\x1b" not in str(caught.value)
    assert "[9" not in str(caught.value)


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a shell switches off for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("refused", [False, True])
def test_ctrl_c_while_a_run_is_submitted_stops_it_if_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    def slow(folder: DeploymentFolder, *arguments: str) -> dict[str, object]:
        if arguments[0] == "run":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            if refused:
                raise RunFailedError("no")
        asked.append(arguments[:2])
        return {"run-id": "17"}

    monkeypatch.setattr(flower, "_ask", slow)
    with pytest.raises(KeyboardInterrupt):
        flower.submit(recorded(tmp_path / "d"), tmp_path, {"seed": "x"})
    assert asked == ([] if refused else [("run", str(tmp_path)), ("stop", "17")])


def test_restart_stops_the_runs_that_nobody_follows_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = StartedProcess("superlink", 1, 0.0)
    deployment = recorded(tmp_path / "d", dead)
    fresh = replace(sleeper(tmp_path), name="superlink")
    stopped: list[str] = []
    runs = (RunStatus("1", "running", ""), RunStatus("2", "finished:failed", ""), RunStatus("3", "pending", ""))
    monkeypatch.setattr(deploy_up, "start_process", lambda *_: fresh)
    monkeypatch.setattr(deploy_up, "answers", lambda *_: True)
    monkeypatch.setattr(flower, "list_runs", lambda _: runs)
    monkeypatch.setattr(flower, "stop_run", lambda _, number: stopped.append(number))
    try:
        assert deploy_up.restart(deployment.path) == ("superlink",)
        assert deploy_up.restart(deployment.path) == ()
    finally:
        stop([fresh])
    assert stopped == ["1", "3"]


def test_down_forgets_secrets_and_keeps_logs_and_runs(tmp_path: Path) -> None:
    deployment = recorded(tmp_path / "d")
    secret = [deployment.keys / "k", deployment.tls / "t", deployment.seeds / "s", deployment.database]
    kept = [deployment.logs / "l.log", deployment.runs / "r"]
    for path in (*secret, *kept):
        path.write_text("x")
    deployment.forget()
    assert not any(path.exists() for path in secret)
    assert all(path.exists() for path in kept)
    assert not deployment.is_up()


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_the_seed_stays_on_the_machine(sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = {"name": "gaussian", "sigma": 1.0}
    experiment = Experiment.model_validate(
        {"seed": 987654321, "mechanism": mechanism, "training": {"sampling": sampling}}
    )
    secret = Secret.drawn()
    name = keep_seed(tmp_path, experiment, secret)
    assert (tmp_path / name).stat().st_mode & 0o077 == 0
    told = without_seed(experiment)
    assert "987654321" not in told.model_dump_json()
    monkeypatch.setenv(SEEDS, str(tmp_path))
    # Batches are drawn by the secret where what is proven rests on nobody knowing them.
    assert kept_for(told.model_dump_json(), name) == (experiment, secret if sampling == "poisson" else None)
    assert kept_for(experiment.model_dump_json(), "") == (experiment, None)
    forget_seed(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "0123456789abcdef", "0123456789ABCDEF", "0" * 17, "a/b"])
def test_the_name_of_a_seed_comes_over_the_wire_and_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(SEEDS, str(tmp_path))
    with pytest.raises(InputError, match="seed"):
        kept_for(Experiment().model_dump_json(), name)
    monkeypatch.delenv(SEEDS)
    with pytest.raises(InputError, match=SEEDS):
        kept_for(Experiment().model_dump_json(), name)


def test_the_app_that_is_sent_is_the_projects_without_the_seed(tmp_path: Path) -> None:
    experiment = Experiment(seed=987654321)
    make_app(tmp_path / "app", experiment)
    sent = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    own = tomllib.loads(PROJECT.read_text())["tool"]["flwr"]["app"]
    assert sent["components"].keys() == own["components"].keys()
    assert sent["config"].keys() == own["config"].keys()
    assert load_experiment(tmp_path / "app" / "experiment.toml") == without_seed(experiment)
    files = [path for path in (tmp_path / "app").rglob("*") if path.is_file()]
    assert not any("987654321" in path.read_text() for path in files)
    home, package = PROJECT.parent, tmp_path / "app" / "fedpriv"
    mine = {path.relative_to(home / "fedpriv") for path in (home / "fedpriv").rglob("*.py")}
    for room in ("clients", "server", "attacks"):
        mine |= {path.relative_to(home) for path in (home / room).rglob("*.py")}
    assert mine == {path.relative_to(package) for path in package.rglob("*.py")}
    assert Path("server", "app.py") in mine


def test_flower_accepts_the_app(tmp_path: Path) -> None:
    deployment = DeploymentFolder(tmp_path / "d")
    deployment.create()
    make_app(tmp_path / "app", Experiment())
    command = [program("flwr"), "build", "--app", str(tmp_path / "app")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(deployment), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("*.fab")), done.stdout


@pytest.mark.parametrize(
    "command", [("status",), ("down",), ("restart",), ("run", "small.toml")], ids=lambda command: command[0]
)
def test_without_up_every_command_says_so(here: Path, command: tuple[str, ...]) -> None:
    one_line(fedpriv("deploy", *command, cwd=here), 2, "no deployment is up in", "fedpriv deploy up")


def test_up_in_a_folder_of_something_else(here: Path) -> None:
    (here / "photos").mkdir()
    (here / "photos" / "cat.jpg").touch()
    done = fedpriv("deploy", "up", "--dir", "photos", "--port", str(free_ports(4)), cwd=here)
    one_line(done, 2, "--dir", "cat.jpg")


@pytest.mark.parametrize("offset", [0, 2])
def test_up_on_a_port_that_is_in_use(here: Path, offset: int) -> None:
    port = free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + offset))
        taken.listen()
        done = fedpriv("deploy", "up", "--nodes", "3", "--port", str(port), cwd=here)
    one_line(done, 2, f"--port {port}", f"port {port + offset} is in use")
    assert not (here / "deployment").exists()


def test_up_beyond_the_last_port(here: Path) -> None:
    one_line(fedpriv("deploy", "up", "--port", "65535", cwd=here), 2, "65535")


def test_up_where_one_is_up(here: Path) -> None:
    started = sleeper(here)
    recorded(here / "deployment", started)
    one_line(fedpriv("deploy", "up", cwd=here), 2, "is up in", "fedpriv deploy down")
    stop([started])
    one_line(fedpriv("deploy", "up", cwd=here), 2, "has died in", "fedpriv deploy down")
    done = fedpriv("deploy", "down", cwd=here)
    assert (done.returncode, done.stdout) == (0, "Down: no process was running\n")


def test_up_without_flower(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower.sysconfig, "get_path", lambda name: str(here / "nowhere"))
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(RunFailedError, match=r"flwr is missing from .*pip install flwr"):
        deploy_up.up(here / "deployment", 1, free_ports(2), False, print)
    assert not (here / "deployment").exists()


def test_run_where_the_servers_process_has_died(here: Path) -> None:
    started = sleeper(here)
    psutil.Process(started.pid).send_signal(signal.SIGKILL)
    deployment = recorded(here / "deployment", replace(started, name="superlink"))
    (deployment.logs / "superlink.log").write_text("\x1b[91mERROR\x1b[0m: [/v1/x][Api] disk full\nINFO: bye\n")
    status = fedpriv("deploy", "status", cwd=here)
    assert status.returncode == 0, status.stderr
    assert "[/v1/x][Api] disk" in status.stdout  # brackets in a log are no markup
    done = fedpriv("deploy", "run", "small.toml", "--set", "federation.clients=1", cwd=here)
    one_line(done, 1, "superlink", "has died", "disk full", "fedpriv deploy restart")


@pytest.mark.parametrize("damage", ["missing", "damaged", "ended"])
@pytest.mark.parametrize("is_contained", [False, True])
def test_certificates_that_are_no_more_valid(is_contained: bool, damage: str, tmp_path: Path) -> None:
    started = replace(sleeper(tmp_path), name="superlink")
    deployment = recorded(tmp_path / "d", started)
    if is_contained:
        deployment.write(DeploymentRecord(1, free_ports(1), False, (), is_contained=True))
    if damage == "damaged":
        (deployment.tls / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    if damage == "ended":
        Authority(datetime(2026, 1, 2, tzinfo=UTC), timedelta(days=1)).certify(deployment.tls, ["localhost"])
    told = "were valid until 2026-01-03" if damage == "ended" else "missing or damaged"
    anew = f"fedpriv deploy down, then {'docker compose up' if is_contained else 'fedpriv deploy up'}"
    one_client = Experiment.model_validate({"federation": {"clients": 1}})
    try:
        for ask in (lambda: look(deployment.path), lambda: for_deployment(one_client, deployment.path)):
            with pytest.raises(RunFailedError, match=f"{told}.* made anew by: {anew}"):
                ask()
    finally:
        stop([started])


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("INFO :      Started\n\x1b[92mINFO \x1b[0m:      \n", "INFO :      Started"),
        ("INFO :\nWARNING :  \n", "it printed nothing"),
        ("ERROR: disk full\nINFO : bye\nINFO :\n", "ERROR: disk full"),
        ("INFO : on\nExit Code: 3\nINFO :\nNo key\nSee there\n", "No key See there"),
    ],
)
def test_last_words_say_something(log: str, said: str, tmp_path: Path) -> None:
    deployment = recorded(tmp_path / "d")
    (deployment.logs / "superlink.log").write_text(log)
    assert deployment.last_words("superlink") == said


def test_run_with_more_clients_than_nodes(here: Path) -> None:
    recorded(here / "deployment")
    one_line(fedpriv("deploy", "run", "small.toml", cwd=here), 2, "federation.clients = 3", "1 SuperNodes", "--set")


def test_a_damaged_record(here: Path) -> None:
    recorded(here / "deployment")
    for text in ("", "{", json.dumps({"nodes": "many"})):
        (here / "deployment" / "deployment.json").write_text(text)
        one_line(fedpriv("deploy", "status", cwd=here), 2, "deployment.json is damaged", "then delete this file")
