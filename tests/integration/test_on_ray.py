"""Whole runs on Ray leave the bytes behind that inline ones leave: one Ray and two actors for all of them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from flwr.clientapp import ClientApp

import fedpriv.engines.ray as engine
from fedpriv.config import EngineConfig
from fedpriv.lab import start_run
from fedpriv.progress import Silent
from tests.integration import test_active_server, test_determinism, test_pate, test_secure_aggregation
from tests.integration.small import LEAVER, experiment, left_behind

SETTINGS = {
    "vmf by layer, dirichlet": test_determinism.SETTINGS["fedsgd, vmf by layer, dirichlet"],
    "noise in the forward pass": test_determinism.SETTINGS["noise in the forward pass"],
    "a server that lies": test_active_server.SETTINGS["fedavg of one step, adam on the server"],
    "votes under masks": test_pate.MASKED,
    "secure aggregation": test_secure_aggregation.secure(),
    "a model that ends the process": experiment(model=LEAVER),
}
TOLD = {"config.toml", "summary.json"}  # the engine, and how long it took


@pytest.fixture
def two_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Those of the first run, which serve every later one, too: each becomes its actor with its clients' app."""
    actors: list[Any] = []
    start = engine._start_actors

    def started(client_app: ClientApp, count: int, config: EngineConfig) -> list[Any]:
        assert count == 2
        if not actors:
            actors.extend(start(client_app, count, config))
        ray.get([actor.__ray_call__.remote(engine._Actor.__init__, client_app) for actor in actors])
        return list(actors)

    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    engine.connect("", "", ())
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_start_actors", started)
        patched.setattr(engine, "connect", lambda *_: None)
        patched.setattr(ray, "shutdown", lambda: None)
        yield actors
    ray.shutdown()


@pytest.mark.slow
def test_every_run_leaves_the_bytes_of_inline(tmp_path: Path, two_actors: list[Any]) -> None:
    halves = {"name": "ray", "cpus_per_client": ray.cluster_resources()["CPU"] / 2}
    differing = {}
    for name, settings in SETTINGS.items():
        on_ray = settings.model_copy(update={"engine": settings.engine.model_copy(update=halves)})
        for kind, asked in (("inline", settings), ("ray", on_ray)):
            t=sum(os.times()[:2])
            assert start_run(asked, tmp_path / name / kind, "", Silent()).status == "completed"
            print(name, kind, sum(os.times()[:2])-t)
        inline, there = (left_behind(tmp_path / name / kind) for kind in ("inline", "ray"))
        differing[name] = {key for key in inline | there if inline.get(key) != there.get(key)}
    assert differing == dict.fromkeys(SETTINGS, TOLD)
    import psutil
    for pp in psutil.Process().children(recursive=True): print(sum(pp.cpu_times()[:2]), ' '.join(pp.cmdline())[:100])
    # A Ray that is started here has this process's environment, and looks for modules where it does.
    known = [actor.__ray_call__.remote(lambda _: (os.environ["FEDPRIV_DATA"], sys.path)) for actor in two_actors]
    for data, path in ray.get(known):
        assert data == str(tmp_path) and str(Path.cwd()) in path
