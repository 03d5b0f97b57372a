"""The commands ``fedpriv deploy up | run | status | restart | listen | down``.

For containers and several machines: ``prepare | admit | gateway | warm``.
"""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedpriv.core.cli import importing
from fedpriv.core.cli.terminal import (
    File,
    Json,
    Out,
    Quiet,
    Set,
    command_of,
    default_folder,
    err,
    out,
    print_json,
    print_line,
    print_summary,
    shown,
)
from fedpriv.core.config import load_experiment
from fedpriv.core.errors import InputError
from fedpriv.core.numbers import several
from fedpriv.core.verb import Verb

if TYPE_CHECKING:  # what is heavy is imported when a command needs it
    from fedpriv.deploy.up import ProcessStatus

_INSECURE = (
    "INSECURE: nothing is encrypted and nobody authenticated; anyone who listens reads every model and upload. "
    "Only for showing what a listener hears."
)

deploy_app = typer.Typer(
    help="Run an experiment on Flower's own processes on this machine, with TLS and keys.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example:\n\n  fedpriv deploy up --nodes 3\n\n"
    "  fedpriv deploy run configs/quickstart.toml --set federation.clients=3\n\n  fedpriv deploy down",
)

Folder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the deployment.")]
Nodes = Annotated[int, typer.Option("--nodes", "-n", min=1, max=1000, help="SuperNodes; one client each.")]
Server = Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The SuperLink.")]
_DEFAULT = Path("deployment")


@deploy_app.command(epilog="Example:\n\n  fedpriv deploy up --nodes 3")
def up(
    nodes: Nodes = 3,
    port: Annotated[
        int,
        typer.Option(min=1024, max=65535, help="Port of the SuperLink; the nodes take the following ones."),
    ] = 8000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no keys: to show what a listener reads.")
    ] = False,
    listens: Annotated[
        bool,
        typer.Option(
            "--listener", help="Put an eavesdropper between the nodes and the SuperLink; it writes DIR/heard."
        ),
    ] = False,
    gpus: Annotated[
        str, typer.Option(metavar="0,1,...", help="GPUs to distribute among clients; default: each sees all.")
    ] = "",
    folder: Folder = _DEFAULT,
    quiet: Quiet = False,
) -> None:
    """Start SuperLink, SuperNodes and their executors on this machine, and wait until they are connected."""
    from fedpriv.deploy.up import up as start

    named = [name for name in gpus.split(",") if name]
    _warn(insecure)
    record = start(folder, nodes, port, insecure, _teller(quiet), listens, named)
    how = "INSECURE, without TLS and keys" if insecure else "TLS and SuperNode keys"
    how += f", a listener on {record.listener}" if listens else ""
    down = (
        "fedpriv deploy down" if folder == _DEFAULT else shlex.join(["fedpriv", "deploy", "down", "--dir", str(folder)])
    )
    print_line(f"Up: {several(record.nodes, 'SuperNode')} on {record.server}, {how}; stop it with: {down}")


@deploy_app.command(epilog="Example:\n\n  fedpriv deploy run configs/quickstart.toml --set federation.clients=3")
def run(
    file: File,
    set_: Set = None,
    out_dir: Out = None,
    folder: Folder = _DEFAULT,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run FILE on the deployment; folder and report are as from `fedpriv run`."""
    experiment = load_experiment(file, set_ or ())
    with importing():
        from fedpriv.core.lab import Engine, start_run
        from fedpriv.core.report import reported
        from fedpriv.deploy.folder import DeploymentFolder
        from fedpriv.deploy.run import federate, for_deployment

    experiment = for_deployment(experiment, folder)
    insecure = DeploymentFolder(folder).read().insecure
    _warn(insecure)
    path = out_dir or default_folder(experiment.name)
    engine = Engine("insecure deployment" if insecure else "deployment", partial(federate, folder))
    with shown(quiet or as_json) as progress, reported(path):
        summary = start_run(experiment, path, command_of("deploy run", file, set_), progress, engine)
    print_summary(summary, path, as_json)


@deploy_app.command()
def status(folder: Folder = _DEFAULT, as_json: Json = False) -> None:
    """Show the running processes, the connected SuperNodes, and the state of each run."""
    from fedpriv.deploy.up import look

    state = look(folder)
    if as_json:
        print_json(asdict(state))
        return
    _warn(state.insecure)
    if state.processes:
        out.print(_processes(state.processes))
    online = "the SuperLink does not run" if state.online is None else f"{state.online} of {state.nodes} connected"
    print_line(f"SuperNodes: {online}; SuperLink: {state.server}")
    for run in state.runs:
        details = f": {' '.join(run.details.split())}" if run.details else ""
        print_line(f"run {run.run_id}: {run.status}{details}")


@deploy_app.command()
def restart(folder: Folder = _DEFAULT) -> None:
    """Restart the processes that have died."""
    from fedpriv.deploy.up import restart as start_again

    started = start_again(folder)
    print_line(f"Started again: {', '.join(started)}" if started else "All processes run: nothing to start")


@deploy_app.command(epilog="Example:\n\n  fedpriv deploy prepare --nodes 3 --volumes keys --name fl.example.org")
def prepare(
    nodes: Nodes = 3,
    volumes: Annotated[Path, typer.Option(metavar="DIR", help="Folder with one folder of keys for each party.")] = Path(
        "keys"
    ),
    names: Annotated[
        list[str] | None, typer.Option("--name", metavar="HOST", help="A further name or address of the SuperLink.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Where users on this machine reach the SuperLink.")
    ] = 8000,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for the wire-tap demo only.")] = False,
    profiles: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Profiles of the compose file; `eight` needs eight nodes."),
    ] = "",
    running: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Keep keys that expire soon if a SuperLink answers here."),
    ] = "",
    folder: Folder = _DEFAULT,
) -> None:
    """Make certificates and keys for containers or several machines; valid ones are kept."""
    from fedpriv.deploy.containers import check_nodes
    from fedpriv.deploy.containers import prepare as make

    _warn(insecure)
    check_nodes(profiles.split(","), nodes)
    served = _host_and_port(running, "--running") if running else None
    made = make(folder, volumes, nodes, port, insecure, [name for name in names or () if name], served)
    print_line(f"Prepared: {'no keys' if insecure else 'new keys' if made else 'the keys that were there'}")


@deploy_app.command(epilog="Example:\n\n  fedpriv deploy admit --server fl.example.org:8000 --keys keys/admission")
def admit(
    server: Server = "127.0.0.1:8000",
    keys: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder `admission` that `prepare` has written.")
    ] = Path("keys/admission"),
) -> None:
    """Admit the SuperNodes whose public keys are in DIR."""
    from fedpriv.deploy.containers import admit as let_in

    _host_and_port(server)
    admission = let_in(server, keys)
    print_line(f"Admitted: {', '.join(admission.new) or 'nobody new'}; known before: {len(admission.known)}")


@deploy_app.command(
    epilog="Example:\n\n  fedpriv deploy gateway --host 0.0.0.0 --port 9000 --server 127.0.0.1:8000 --keys keys/gateway"
)
def gateway(
    server: Server = "127.0.0.1:8000",
    keys: Annotated[Path, typer.Option(metavar="DIR", help="The folder `gateway` that `prepare` has written.")] = Path(
        "keys/gateway"
    ),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="SuperNodes connect here.")] = 9000,
) -> None:
    """Pass requests of SuperNodes on to the SuperLink; refuse to submit runs or to admit SuperNodes."""
    from fedpriv.deploy.gateway import serve_gateway

    _host_and_port(server)
    serve_gateway(host, port, server, keys)


@deploy_app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example:\n\n  fedpriv deploy warm flower-superexec --runtime-api-address supernode-0:9094 --insecure",
)
def warm(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="An executor with its options.")],
) -> None:
    """Start COMMAND; its apps fork from a process that has loaded PyTorch and Flower."""
    from fedpriv.deploy.launcher import LAUNCHED, beside

    if shutil.which(command[0]) is None:
        raise InputError(key="COMMAND", given=command[0], allowed="no such program")
    beside(Path(tempfile.mkdtemp(prefix="fedpriv-")), list(LAUNCHED), command)


@deploy_app.command(
    epilog="Example:\n\n  fedpriv deploy listen --port 9000 --server 10.0.0.5:8000\n\n"
    "  fedpriv attack runs/x --heard heard --out runs/x-heard"
)
def listen(
    server: Server = "127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that SuperNodes connect to.")] = 9000,
    heard: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the observations.")] = Path("heard"),
    quiet: Quiet = False,
) -> None:
    """Eavesdrop between SuperNodes and the SuperLink until Ctrl-C: pass everything on, and store what it can read.

    Without TLS that is every upload; with TLS it is nothing. Attack it with `fedpriv attack RUN --heard DIR --out NEW`.
    """
    from fedpriv.deploy.relay import listen as eavesdrop

    listened = eavesdrop((host, port), _host_and_port(server), heard, _teller(quiet))
    print_line(listened.verdict)


@deploy_app.command()
def down(folder: Folder = _DEFAULT) -> None:
    """Stop what `up` started, or all containers of the compose file; keys are deleted, logs and runs stay."""
    from fedpriv.deploy.up import take_down

    stopped = take_down(folder)
    what = "containers" if stopped is None else f"{len(stopped)} processes"
    print_line(f"Down: stopped {what}" if stopped != () else "Down: no process was running")


def _host_and_port(text: str, key: str = "--server") -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(key=key, given=text, allowed="expected HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def _warn(insecure: bool) -> None:
    if insecure:
        err.print(_INSECURE, style="bold red", soft_wrap=True)


def _teller(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else err.print(text, style="dim", markup=False, soft_wrap=True)


def _processes(processes: "Sequence[ProcessStatus]") -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("process", "pid", "runs", "last words"):
        table.add_column(heading, overflow="fold")
    for process in processes:
        # What a process said is no markup, whatever brackets it has.
        table.add_row(process.name, str(process.pid), "yes" if process.alive else "no", Text(process.last_words))
    return table


VERBS = (Verb("deploy", deploy_app, place=40),)
