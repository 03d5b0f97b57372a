"""Start a deployment on this machine, look at it, and take it down."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import write_whole
from fedpriv.core.numbers import several
from fedpriv.deploy import flower
from fedpriv.deploy.certificates import Authority, make_node_key
from fedpriv.deploy.containers import DOWN, UP, take_down_containers
from fedpriv.deploy.flower import answers, check_certificates, is_serving
from fedpriv.deploy.folder import HOST, PRIVATE, DeploymentFolder, DeploymentRecord, is_free
from fedpriv.deploy.launcher import LAUNCHED, SERVING, SOCKET, write_stand_ins
from fedpriv.deploy.processes import StartedProcess, is_alive, start, stop

_HEALTH_SECONDS = 120.0
# Each question to Flower is a process, a fork of the launcher.
_LOOK_SECONDS = 1.0
_LAST_PORT = 65535
_Tell = Callable[[str], None]


@dataclass(frozen=True)
class Command:
    """One process."""

    name: str  # how people call it, such as `supernode-0`
    program: str  # a program of Flower's, `fedpriv`, or a path
    arguments: tuple[str, ...]  # its arguments


@dataclass(frozen=True)
class KeyFiles:
    """Where the files of TLS and of authentication are, as the process sees them."""

    authority: PurePath  # the certificate that all others are checked against
    certificate: PurePath  # of the server
    key: PurePath  # of the server's certificate
    secret: PurePath  # shared by a SuperLink or SuperNode and its executor


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a deployment: its name, number, whether it runs, and if not, its last words."""

    name: str
    pid: int
    alive: bool
    last_words: str


@dataclass(frozen=True)
class Status:
    """A deployment, looked at."""

    server: str  # the SuperLink's host and port
    insecure: bool  # nothing is encrypted
    processes: tuple[ProcessStatus, ...]  # what was started
    nodes: int  # how many SuperNodes were started
    online: int | None  # how many are connected, by what Flower says; `None` where the SuperLink does not answer
    runs: tuple[flower.RunStatus, ...]  # all runs since `up`, by what Flower says


def up(
    path: Path,
    nodes: int,
    port: int,
    insecure: bool,
    tell: _Tell,
    listens: bool = False,
    gpus: Sequence[str] = (),
) -> DeploymentRecord:
    """Start SuperLink, SuperNodes and their executors, and wait until all SuperNodes are connected."""
    folder = DeploymentFolder(path)
    if folder.is_up():
        earlier = _own(folder, f"{DOWN}, or fedpriv deploy down; or another --dir")
        state = "is up" if len(earlier.dead()) < len(earlier.processes) else "has died"
        raise InputError(f"a deployment {state} in {folder.path} already; first: fedpriv deploy down")
    record = DeploymentRecord(nodes, port, insecure, (), listens=listens, gpus=tuple(gpus))
    _check_gpus(record.gpus)
    _check_ports(record)
    for name in (*LAUNCHED, *SERVING):
        flower.program(name)
    folder.create()
    folder.forget()
    for log in folder.logs.glob("*.log"):
        log.unlink()
    if folder.heard.exists():
        shutil.rmtree(folder.heard)
    _make_keys(folder, record)
    flower.connect(folder, record)
    write_stand_ins(folder.programs, {program: flower.program(program) for program in LAUNCHED})
    try:
        return _start_all(folder, record, tell)
    except BaseException:
        stop(folder.read().processes if folder.is_up() else ())
        folder.forget()
        raise


def look(path: Path) -> Status:
    """Say how a deployment is."""
    folder = DeploymentFolder(path)
    record = folder.read()
    living = [(process, is_alive(process)) for process in record.processes]
    processes = tuple(
        ProcessStatus(process.name, process.pid, alive, "" if alive else folder.last_words(process.name))
        for process, alive in living
    )
    serves = is_serving(folder, record)
    if serves or record.is_contained:
        check_certificates(folder, record)
    if record.is_contained:
        flower.connect(folder, record)
    online = len(flower.online_nodes(folder)) if serves else None
    runs = flower.list_runs(folder) if serves else ()
    return Status(record.server, record.insecure, processes, record.nodes, online, runs)


def restart(path: Path) -> tuple[str, ...]:
    """Start again what has died; a SuperNode keeps its key, and so its number and its partition.

    Where the SuperLink has died all SuperNodes are started again: with Flower 1.41 one that had lost its answer to the
    outage went on one answer late. Runs that were under way then are stopped; ``fedpriv run --resume`` finishes them.
    Returns the names of the processes that were started.
    """
    folder = DeploymentFolder(path)
    record = _own(folder, UP)
    commands = {command.name: command for command in commands_of(folder, record)}
    dead = record.dead()
    if any(process.name == "superlink" for process in dead):
        dead += tuple(each for each in record.processes if each not in dead and each.name.startswith("supernode-"))
    for process in dead:
        stop([process])  # a SuperNode that still runs says good-bye to the SuperLink, which is back by now
        _wait_until_missed(folder, record, process.name)
        fresh = start_process(folder, commands[process.name], record.gpu(process.name))
        record = replace(record, processes=tuple(fresh if each == process else each for each in record.processes))
        folder.write(record)
        if process.name == "superlink":
            # Of the others some may still be down.
            _stop_orphans(folder, replace(record, processes=(fresh,)))
    return tuple(process.name for process in dead)


def take_down(path: Path) -> tuple[str, ...] | None:
    """Stop what ``up`` started, forget keys and state, and return the names of what ran; ``None``: containers."""
    folder = DeploymentFolder(path)
    record = folder.read()
    if record.is_contained:
        take_down_containers(folder)
        return None
    stopped = stop(record.processes)
    folder.forget()
    return stopped


def _own(folder: DeploymentFolder, instead: str) -> DeploymentRecord:
    """The record of a deployment whose processes are ours to start and stop."""
    record = folder.read()
    if record.is_contained:
        raise InputError(f"the deployment in {folder.path} runs in containers; use: {instead}")
    return record


def keys_of(folder: DeploymentFolder, record: DeploymentRecord) -> KeyFiles | None:
    """Where the files of TLS and authentication are; ``None`` for an insecure deployment."""
    if record.insecure:
        return None
    tls = folder.tls
    return KeyFiles(tls / "ca.pem", tls / "server.pem", tls / "server.key", folder.keys / "executors.secret")


def start_process(folder: DeploymentFolder, command: Command, gpu: str | None = None) -> StartedProcess:
    """Start one process of a deployment, which sees one GPU, or all of them; its log carries its name."""
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    is_launcher, socket = command.name == "launcher", folder.programs / SOCKET
    if is_launcher:
        socket.unlink(missing_ok=True)
    started = start(
        command.name,
        [flower.program(command.program), *command.arguments],
        {**flower.environment(folder), **visible},
        Path.cwd(),
        folder.logs / f"{command.name}.log",
        None if is_launcher else folder.programs,
    )
    while is_launcher and not socket.exists() and is_alive(started):
        time.sleep(0.05)
    return started


def _check_gpus(names: Sequence[str]) -> None:
    """Refuse a GPU that is not there: CUDA would show none, and its app would train on the CPU."""
    for name in dict.fromkeys(names):
        count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": name}
        seen = subprocess.run(count, env=environment, stdout=subprocess.PIPE, text=True)
        if seen.returncode or not int(seen.stdout):
            raise InputError(
                key="--gpus",
                given=",".join(names),
                allowed=f"there is no GPU {name}; expected numbers or UUIDs of GPUs, such as 0,1",
                hint="fedpriv doctor lists what PyTorch finds",
            )


def _check_ports(record: DeploymentRecord) -> None:
    wanted = record.ports
    if wanted[-1] > _LAST_PORT:
        raise InputError(
            key="--port",
            given=record.port,
            allowed=f"{record.nodes} SuperNodes need the ports up to {wanted[-1]}, above {_LAST_PORT}",
        )
    for number in wanted:
        if not is_free(number):
            raise InputError(
                key="--port",
                given=record.port,
                allowed=f"port {number} is in use; {len(wanted)} free ports in a row are needed",
            )


def _make_keys(folder: DeploymentFolder, record: DeploymentRecord) -> None:
    if record.insecure:
        return
    Authority().certify(folder.tls, ("localhost", HOST))
    write_whole(folder.keys / "executors.secret", secrets.token_bytes(32), mode=PRIVATE)
    for partition in range(record.nodes):
        make_node_key(_node_key(folder, partition))


def _node_key(folder: DeploymentFolder, partition: int) -> Path:
    return folder.keys / f"supernode-{partition}"


def commands_of(folder: DeploymentFolder, record: DeploymentRecord) -> tuple[Command, ...]:
    """The processes of a deployment, in the order in which they start."""
    keys = keys_of(folder, record)
    server = [
        launcher(folder.programs),
        superlink(HOST, record.port, folder.database, keys),
        executor("serverapp", record.server, keys),
    ]
    if record.listens:
        server.insert(2, listener(HOST, record.ports[-1], record.server, folder.heard))
    nodes = tuple(
        command for partition in range(record.nodes) for command in _client_commands(folder, record, partition, keys)
    )
    return (*server, *nodes)


def _client_commands(
    folder: DeploymentFolder, record: DeploymentRecord, partition: int, keys: KeyFiles | None
) -> tuple[Command, Command]:
    port = record.port + 1 + partition
    node_key = None if record.insecure else _node_key(folder, partition)
    reached = record.listener if record.listens else record.server
    node = supernode(partition, record.nodes, reached, HOST, port, keys, node_key)
    return node, executor(f"clientapp-{partition}", f"{HOST}:{port}", keys)


def _wait_until_missed(folder: DeploymentFolder, record: DeploymentRecord, name: str) -> None:
    """Wait until Flower has missed a SuperNode, about a minute: until then it refuses a second one with that key."""
    kind, _, partition = name.partition("-")
    if kind != "supernode" or not record.node_ids or not is_alive(record.process("superlink")):
        return
    number, deadline = record.node_ids[int(partition)], time.monotonic() + _HEALTH_SECONDS
    while number in flower.online_nodes(folder):
        if time.monotonic() > deadline:
            raise RunFailedError(f"{name} has ended, and the SuperLink still holds it for connected; try again later")
        time.sleep(_LOOK_SECONDS)


def _stop_orphans(folder: DeploymentFolder, record: DeploymentRecord) -> None:
    """Stop the runs that the SuperLink has kept on disk: whoever followed them gave up when it died."""
    _wait_for_health(folder, record)
    for run in flower.list_runs(folder):
        if not run.is_over:
            flower.stop_run(folder, run.run_id)


def _start_all(folder: DeploymentFolder, record: DeploymentRecord, tell: _Tell) -> DeploymentRecord:
    first, server, *others = commands_of(folder, record)
    tell(f"starting the SuperLink on {record.server}")
    record = _add(folder, _add(folder, record, first), server)
    _wait_for_health(folder, record)
    if not record.insecure:
        keys = [_node_key(folder, partition).with_suffix(".pub") for partition in range(record.nodes)]
        record = replace(record, node_ids=tuple(flower.register(folder, key) for key in keys))
    tell(f"starting {several(record.nodes, 'SuperNode')} and the executors")
    for command in others:
        record = _add(folder, record, command)

    def all_connected() -> bool:
        return len(flower.online_nodes(folder)) >= record.nodes

    _wait(folder, record, "not all SuperNodes are connected", all_connected, _LOOK_SECONDS)
    return record


def _add(folder: DeploymentFolder, record: DeploymentRecord, command: Command) -> DeploymentRecord:
    """Start one process and write it down at once, so that it can be stopped whatever happens next."""
    record = replace(record, processes=(*record.processes, start_process(folder, command, record.gpu(command.name))))
    folder.write(record)
    return record


def _wait_for_health(folder: DeploymentFolder, record: DeploymentRecord) -> None:
    _wait(folder, record, f"the SuperLink on {record.server} does not answer", partial(answers, folder, record), 0.5)


def _wait(
    folder: DeploymentFolder, record: DeploymentRecord, failure: str, is_done: Callable[[], bool], every: float
) -> None:
    deadline = time.monotonic() + _HEALTH_SECONDS
    while not is_done():
        for process in record.dead():
            raise RunFailedError(
                f"{process.name} ended: {folder.last_words(process.name)} (more in {folder.logs / process.name}.log)"
            )
        if time.monotonic() > deadline:
            raise RunFailedError(f"{failure} within {_HEALTH_SECONDS:g} s (logs in {folder.logs})")
        time.sleep(every)


# Command lines of a deployment's processes, for one machine and for containers alike.


def superlink(host: str, port: int, database: PurePath, keys: KeyFiles | None) -> Command:
    """Return the server of a deployment."""
    arguments = ["--host", host, "--port", str(port), "--database", str(database)]
    arguments += ["--isolation", "process", "--disable-runtime-dependency-installation"]
    authentication = () if keys is None else ("--enable-supernode-auth",)
    return Command("superlink", "flower-superlink", (*arguments, *_serving(keys), *authentication))


def supernode(
    partition: int,
    partitions: int,
    server: str,
    host: str,
    port: int,
    keys: KeyFiles | None,
    node_key: PurePath | None,
) -> Command:
    """Return one client's node, which holds partition ``partition`` of ``partitions``."""
    arguments = ["--superlink", server, "--host", host, "--port", str(port), "--isolation", "process"]
    arguments += ["--node-config", f"partition-id={partition} num-partitions={partitions}"]
    if keys is not None:
        arguments += ["--root-certificates", str(keys.authority)]
    if node_key is not None:
        arguments += ["--auth-supernode-private-key", str(node_key)]
    return Command(f"supernode-{partition}", "flower-supernode", (*arguments, *_serving(keys)))


def executor(name: str, served: str, keys: KeyFiles | None) -> Command:
    """Return the process that runs the apps of a SuperLink or SuperNode."""
    trust: tuple[str, ...] = ("--insecure",)
    if keys is not None:
        trust = ("--root-certificates", str(keys.authority), "--superexec-auth-secret-file", str(keys.secret))
    return Command(name, "flower-superexec", ("--runtime-api-address", served, *trust))


def launcher(programs: PurePath) -> Command:
    """Return the process that the others fork from, and what starts for each message or question."""
    # -P: the modules beside the file are none of Python's.
    code = Path(__file__).with_name("launcher.py")
    return Command("launcher", sys.executable, ("-P", str(code), "serve", str(programs), *LAUNCHED, *SERVING))


def listener(host: str, port: int, server: str, heard: PurePath) -> Command:
    """Return the eavesdropper between the SuperNodes, which take it for the SuperLink, and the SuperLink."""
    arguments = ("deploy", "listen", "--host", host, "--port", str(port), "--server", server, "--heard", str(heard))
    return Command("listener", "fedpriv", arguments)


def _serving(keys: KeyFiles | None) -> tuple[str, ...]:
    if keys is None:
        return ("--insecure",)
    files = {"certfile": keys.certificate, "keyfile": keys.key, "ca-certfile": keys.authority}
    named = [part for flag, path in files.items() for part in (f"--ssl-{flag}", str(path))]
    return (*named, "--superexec-auth-secret-file", str(keys.secret))
