"""The Flower ServerApp.

In a simulation the engine hands over the built experiment and the run folder; in a deployment Flower's run
configuration names the experiment file, which travels inside the app, and the environment variable ``FEDPRIV_RUNS``
names the folder of runs.
"""

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpriv.config import load_experiment
from fedpriv.progress import Progress, Silent
from fedpriv.runs import RunFolder
from fedpriv.seeds import kept_for
from fedpriv.server.rounds import run_rounds
from fedpriv.threads import cpu_threads
from fedpriv.world import World, build_world

__all__ = ["app", "server_app"]

app = ServerApp()

# How long a deployment waits for its clients.
_CONNECT_SECONDS = 60.0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration names, in the folder ``FEDPRIV_RUNS/run-ID``, else ``runs/run-ID``.

    Keys: ``experiment``, the file; ``overrides``, comma-separated; ``seed``, the name under which the seed is kept here
    and at the clients (:mod:`fedpriv.seeds`), empty where the file has it.
    """
    settings = {key: str(context.run_config[key]) for key in ("experiment", "overrides", "seed")}
    overrides = [part for part in settings["overrides"].split(",") if part]
    announced = load_experiment(_packed_in() / settings["experiment"], overrides)
    experiment, secret = kept_for(announced.model_dump_json(), settings["seed"])
    path = Path(os.environ.get("FEDPRIV_RUNS", "runs")) / f"run-{context.run_id}"
    folder = RunFolder.create(path, experiment)
    with cpu_threads(experiment.engine.threads):
        run_rounds(grid, build_world(experiment, secret), folder, Silent(), announced, _CONNECT_SECONDS)


def _packed_in() -> Path:
    """Return the app's folder, wherever Flower has put it: the one with the settings that it packed."""
    return next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())


def server_app(world: World, folder: RunFolder, progress: Progress) -> ServerApp:
    """Return the app bound to one experiment, run folder and listener."""
    bound = ServerApp()

    @bound.main()
    def main(grid: Grid, context: Context) -> None:
        with cpu_threads(world.experiment.engine.threads):
            run_rounds(grid, world, folder, progress)

    return bound
