"""What ``flwr run .`` starts on the server's side: a whole experiment, from its rounds to its report."""

import subprocess
import sys
from pathlib import Path

from fedpriv.cli.display import Display
from fedpriv.cli.terminal import err, print_line, print_sentences
from fedpriv.errors import RunFailedError
from fedpriv.lab import Engine, start_run
from fedpriv.server.app import Started, started_app

__all__ = ["app"]


def _run(started: Started) -> None:
    """Do what `fedpriv run` does, on the clients that Flower has started.

    Raises:
        RunFailedError: there are fewer SuperNodes than the experiment has clients.
    """
    clients, nodes = started.experiment.federation.clients, started.connected()
    if nodes < clients:
        raise RunFailedError(
            f"federation.clients = {clients}, but {nodes} SuperNodes are connected; a run needs one for each client: "
            f"flwr run . --stream --federation-config num-supernodes={clients}"
        )
    engine = Engine("Flower", started.federate)
    try:
        with Display(err) as progress:
            summary = start_run(started.experiment, started.path, started.command, progress, engine)
    finally:
        _report(started.path.resolve())
    print_sentences(summary.verdict)


def _report(folder: Path) -> None:
    """Write the report with the fedpriv that is installed: Flower packs no templates into an app."""
    if (folder / "summary.json").is_file():
        command = [sys.executable, "-m", "fedpriv", "report", str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        print_line(done.stdout.strip() if done.returncode == 0 else f"Report: fedpriv report {folder}")


app = started_app(_run)
