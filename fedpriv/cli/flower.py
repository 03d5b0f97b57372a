"""What ``flwr run .`` starts on the server's side: a whole experiment, from its rounds to its report."""

import os
import subprocess
import sys
from pathlib import Path

from fedpriv.cli.display import Display
from fedpriv.cli.terminal import err, print_line, print_sentences, print_warning
from fedpriv.errors import RunFailedError
from fedpriv.lab import Engine, start_run
from fedpriv.server.app import Started, started_app

__all__ = ["app"]


def _run(started: Started) -> None:
    """Do what `fedpriv run` does, on the clients that Flower has started.

    Raises:
        RunFailedError: there are fewer SuperNodes than the experiment has clients.
    """
    clients = started.experiment.federation.clients

    def tell(nodes: int) -> None:
        err.print(f"waiting for SuperNodes: {nodes} of {clients} are connected", markup=False, soft_wrap=True)

    nodes = started.connected(tell)
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
    if not (folder / "summary.json").is_file():
        return
    command = [sys.executable, "-m", "fedpriv", "report", str(folder)]
    done = subprocess.run(command, cwd=folder, env=_outside_the_app(), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        print_line(done.stdout.strip())
    else:
        reason = " ".join(done.stderr.split())
        print_warning(f"the report was not written: {reason}; once that is solved: fedpriv report {folder}")


def _outside_the_app() -> dict[str, str]:
    """The environment without Flower's pack of the app, which Ray's workers are told of in PYTHONPATH."""
    packed = Path(__file__).resolve().parents[2]
    told = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in told if path and Path(path).resolve() != packed]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}


app = started_app(_run)
