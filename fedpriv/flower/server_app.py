"""The server app of ``flwr run .``: a whole experiment, from its rounds to its report."""

import os
import subprocess
import sys
from pathlib import Path

from fedpriv.core.cli.display import Display
from fedpriv.core.cli.terminal import err, print_line, print_sentences, print_warning
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunFailedError
from fedpriv.core.lab import Engine, start_run
from fedpriv.server.app import StartedRun, started_app

_DOWNLOADED = "runtime-envs"  # where Flower installs what an app depends on
_NO_DOWNLOAD = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"


def _run(started: StartedRun) -> None:
    """Do what `fedpriv run` does, on the clients that Flower has started."""
    if _DOWNLOADED in os.environ.get("VIRTUAL_ENV", ""):
        print_warning(f"Flower has installed fedpriv's dependencies once more for this run; {_NO_DOWNLOAD} prevents it")
    experiment, engine = _placed(started)
    try:
        with Display(err) as progress:
            summary = start_run(experiment, started.path, started.command, progress, engine)
    finally:
        _report(started.path.resolve())
    print_sentences(summary.verdict)


def _placed(started: StartedRun) -> tuple[Experiment, Engine | None]:
    """Flower's clients; or, where it simulates fewer than the experiment has, all of them in the server's process."""
    clients = started.experiment.federation.clients
    few = f"federation.clients = {clients}, but {{}} SuperNodes are connected"
    command = f"flwr run . --stream --federation-config num-supernodes={clients}"

    def tell(nodes: int) -> None:
        err.print(f"waiting for SuperNodes: {nodes} of {clients} are connected", markup=False, soft_wrap=True)

    nodes = started.connected(tell)
    if nodes >= clients:
        return started.experiment, Engine("Flower", started.federate)
    if not started.is_simulated:
        raise RunFailedError(f"{few.format(nodes)}; a run needs one for each client")
    print_warning(f"{few.format(nodes)}: the server's process answers for all of them; {command} gives each its own")
    here = started.experiment.engine.model_copy(update={"name": "inline"})
    return started.experiment.model_copy(update={"engine": here}), None


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
