"""What runs on Ray gives what it gives in this process: whole runs by their bytes, attacks, trials of a sweep.

All on one Ray that is started here, and all runs with the same actors: each would take seconds for its own.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from flwr.clientapp import ClientApp

import fedpriv.engines.ray as engine
from fedpriv.core.config import EngineConfig
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.engines.tasks import RayResources
from tests.algorithms.pate import test_pate
from tests.algorithms.secure_aggregation import test_secure_aggregation
from tests.core.lab import test_lab_attack_on_ray as attacks
from tests.data import test_data_keys
from tests.integration import test_active_server, test_determinism
from tests.integration.small import LEAVER, experiment, left_behind
from tests.sweep import test_sweep_run as sweeps

HEARD = {"attacks": ["iga"], "victims": 2, "rounds": [1, 3], "iga": {"iterations": 2}}
SETTINGS = {
    "vmf by layer, dirichlet": experiment(
        mechanism={"name": "vmf", "kappa": 40.0, "blocks": "layer"}, data={"partition": "dirichlet"}, adversary=HEARD
    ),
    "noise in the forward pass": test_determinism.SETTINGS["noise in the forward pass"],
    "a server that lies": test_active_server.SETTINGS["fedavg of one step, adam on the server"],
    "votes under masks": test_pate.MASKED,
    "secure aggregation": test_secure_aggregation.secure(),
    "a model that ends the process": experiment(model=LEAVER),
}
TOLD = {"config.toml", "summary.json"}  # the engine, and how long it took


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ray, started here with this as FEDPRIV_DATA; it stays when a run ends, and the next one finds it started."""
    folder = str(tmp_path_factory.mktemp("data"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDPRIV_DATA", folder)
        engine.connect(RayResources(0.0, 0.0, ""))
        patched.setattr(engine, "connect", lambda *_: None)
        with pytest.MonkeyPatch.context() as running:
            running.setattr(ray, "shutdown", lambda: None)
            yield folder
        ray.shutdown()


@pytest.fixture
def shared_actors(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Those of the first run, which serve every later one, too: they begin anew with its clients' app."""
    actors: list[Any] = []
    start = engine.start_actors

    def started(client_app: ClientApp, count: int, config: EngineConfig) -> list[Any]:
        actors.extend(start(client_app, count - len(actors), config))
        ray.get([actor.__ray_call__.remote(engine._Actor.__init__, client_app) for actor in actors])
        return actors[:count]

    monkeypatch.setattr(engine, "start_actors", started)
    yield actors
    for actor in actors:
        ray.kill(actor)


def cpus() -> float:
    return float(ray.cluster_resources()["CPU"])


@pytest.mark.slow
def test_every_run_leaves_the_bytes_of_inline(tmp_path: Path, shared_actors: list[Any], elsewhere: str) -> None:
    differing, by_nature = {}, {}
    for name in test_data_keys.FEDERATIONS:
        (tmp_path / "data" / name).mkdir(parents=True)
        by_nature[name] = test_data_keys.federation(tmp_path / "data" / name, name)
    share = max(0.5, cpus() // 2)  # room for two, for three where three CPUs are
    for name, settings in (SETTINGS | by_nature).items():
        on_ray = settings.engine.model_copy(update={"name": "ray", "cpus_per_client": share})
        for kind, asked in (("inline", settings.engine), ("ray", on_ray)):
            run = settings.model_copy(update={"engine": asked})
            assert start_run(run, tmp_path / name / kind, "", Silent()).status == "completed"
        inline, there = (left_behind(tmp_path / name / kind) for kind in ("inline", "ray"))
        differing[name] = {key for key in inline | there if inline.get(key) != there.get(key)}
    assert differing == dict.fromkeys(SETTINGS | by_nature, TOLD)
    assert len(shared_actors) >= 2
    # A Ray that is started here has this process's environment, and looks for modules where it does.
    known = [actor.__ray_call__.remote(lambda _: (os.environ["FEDPRIV_DATA"], sys.path)) for actor in shared_actors]
    for data, path in ray.get(known):
        assert data == elsewhere and str(Path.cwd()) in path


@pytest.mark.slow
def test_attacks_and_trials_in_tasks_find_the_same(tmp_path: Path, elsewhere: str) -> None:
    """Each task takes all CPUs, so that one worker after the other does: they need seconds to start."""
    heard = attacks.Heard()
    alone = attacks.run(tmp_path / "alone", 1, attacks=["iga"])
    together = attacks.run(tmp_path / "spread", 2, heard, cpus(), attacks=["iga"])
    assert heard.advances == [("iga", 1, 2), ("iga", 2, 2)]
    assert together.warnings == alone.warnings
    for one, other in zip(attacks.lines(tmp_path / "alone"), attacks.lines(tmp_path / "spread"), strict=True):
        # Who is attacked together decides the order of sums.
        assert other == {
            key: pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value
            for key, value in one.items()
        }
    for kind in ("inline", "ray"):
        asked = sweeps.sweep(tmp_path, resources={"engine": kind, "cpus": cpus()})
        sweeps.run(asked, tmp_path / kind)
    assert len(sweeps.figures(tmp_path / "ray")) == 6
    assert sweeps.figures(tmp_path / "ray") == sweeps.figures(tmp_path / "inline")
