"""The Flower ServerApp.

In a simulation the engine hands over the built experiment and the run folder. Where Flower starts the app, its run
configuration names the experiment file, which travels inside the app, and the environment variable ``FEDPRIV_RUNS``
names the folder of runs.
"""

import json
import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.config import Experiment, load_experiment
from fedpriv.core.files import append_line
from fedpriv.core.progress import Progress
from fedpriv.core.runs import NOTICES, RunFolder
from fedpriv.core.seeds import kept_for
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World, build_world
from fedpriv.server.exchange import PROBE_SECONDS, Clients

# How long a run that Flower has started waits for its clients.
_CONNECT_SECONDS = 60.0
# How long it waits for more SuperNodes while their number stays the same, and when it says that it waits.
_STEADY_SECONDS, _TELL_SECONDS = 15.0, 2.0


@dataclass(frozen=True)
class StartedRun:
    """A run that Flower has started."""

    experiment: Experiment  # as the app has it; in a deployment without its seed
    # the name under which the seed is kept here and at the clients (seeds); empty where the experiment has it
    seed: str
    path: Path  # where the run's folder is to be: `FEDPRIV_RUNS/run-ID`, else `runs/run-ID`
    command: str  # what starts it once more
    grid: Grid  # Flower's way to the clients

    @property
    def is_simulated(self) -> bool:
        """Whether Flower simulates the clients: then it is the settings of Flower that say how many there are."""
        from flwr.superlink.grid import InMemoryGrid  # a second to import, and only Flower's own runs ask

        return isinstance(self.grid, InMemoryGrid)

    def connected(self, tell: Callable[[int], None]) -> int:
        """Wait a minute at most for a SuperNode for each client, a quarter where no other comes; return how many."""
        began = changed = time.monotonic()
        nodes, told = 0, False
        steady = _TELL_SECONDS if self.is_simulated else _STEADY_SECONDS
        while (now := len(list(self.grid.get_node_ids()))) < self.experiment.federation.clients:
            clock = time.monotonic()
            if now != nodes:
                nodes, changed = now, clock
            if clock - began > _CONNECT_SECONDS or (nodes and clock - changed > steady):
                break
            if not told and clock - began > _TELL_SECONDS:
                tell(nodes)
                told = True
            time.sleep(0.1)
        return now

    def federate(self, world: World, folder: RunFolder, progress: Progress) -> None:
        """Do the server's part of the algorithm."""
        # Flower's simulation has no SuperNodes that could be restarted, and answers in any order.
        probe = math.inf if self.is_simulated else PROBE_SECONDS
        _run(Clients(self.grid, self.experiment, _CONNECT_SECONDS, progress, probe), world, folder, progress)


def started_app(run: Callable[[StartedRun], None]) -> ServerApp:
    """Return an app that does what ``run`` does with what Flower started, by its experiment, overrides and seed."""
    bound = ServerApp()

    @bound.main()
    def main(grid: Grid, context: Context) -> None:
        settings = {key: str(context.run_config[key]) for key in ("experiment", "overrides", "seed")}
        overrides = [part for part in settings["overrides"].split(",") if part]
        # Wherever Flower has put the app, its folder has the settings that it packed.
        packed = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
        experiment = load_experiment(packed / settings["experiment"], overrides)
        path = Path(os.environ.get("FEDPRIV_RUNS", "runs")) / f"run-{context.run_id}"
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items() if value)
        command = shlex.join(["flwr", "run", ".", "--stream", "--run-config", config])
        run(StartedRun(experiment, settings["seed"], path, command, grid))

    return bound


def _serve(started: StartedRun) -> None:
    """Run the rounds only: in a deployment, whoever sent the app fetches what they leave and goes on with it."""
    experiment, secret = kept_for(started.experiment.to_json(), started.seed)
    folder = RunFolder.create(started.path, experiment)
    started.federate(build_world(experiment, secret), folder, _Noting(folder.path / NOTICES))


@dataclass(frozen=True)
class _Noting(Progress):
    """Writes warnings into a file in the run's folder, where the command that follows the run finds them."""

    path: Path

    @override
    def warn(self, text: str) -> None:
        append_line(self.path, text)


app = started_app(_serve)


def server_app(world: World, folder: RunFolder, progress: Progress) -> ServerApp:
    """Return the app bound to one experiment, run folder and listener."""
    bound = ServerApp()

    @bound.main()
    def main(grid: Grid, context: Context) -> None:
        _run(Clients(grid), world, folder, progress)

    return bound


def _run(clients: Clients, world: World, folder: RunFolder, progress: Progress) -> None:
    with cpu_threads(world.experiment.engine.threads):
        algorithm_of(world.experiment).serve(clients, world, folder, progress)
