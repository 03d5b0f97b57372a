"""The Ray engine: Flower's simulation, with shares of CPUs and GPUs for each client, here or on a cluster."""

import logging
import os
import socket
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import ray
from flwr.app import Context, Message, RecordDict
from flwr.app.typing import ConfigRecordValues
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from flwr.supercore.run import Run

from fedpriv.config import EngineConfig
from fedpriv.errors import InputError, RunFailedError

__all__ = ["Share", "connect", "run_ray"]

_KNOCK_SECONDS = 10.0


def run_ray(server_app: ServerApp, client_app: ClientApp, clients: int, config: EngineConfig) -> None:
    """Run the apps on Ray actors; a local Ray is started, and stopped in the end, unless ``config.address`` names one.

    Raises:
        InputError: no cluster answers at the address, or it cannot host one client.
        RunFailedError: the run failed.
    """
    stopped = threading.Event()
    outcome = _Outcome()
    shares = (
        Share("engine.cpus_per_client", "CPU", config.cpus_per_client),
        Share("engine.gpus_per_client", "GPU", config.gpus_per_client),
    )
    connect(config.address, "engine.address", shares)
    try:
        with _silenced("flwr", "ray"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            run_simulation(
                server_app=_guarded(server_app, stopped, outcome),
                client_app=client_app,
                num_supernodes=clients,
                backend_config={"client_resources": _actor_options(config)},
            )
    except RuntimeError as error:
        if outcome.error is None:
            raise RunFailedError(f"Ray: {error.__cause__ or error}") from error
    finally:
        # Ctrl-C reaches this thread only; the server's thread learns of it at its next look for replies.
        stopped.set()
        ray.shutdown()
    if outcome.error is not None:
        raise outcome.error
    if not outcome.finished:
        raise RunFailedError("Ray: the simulation ended before the server was done")


def _actor_options(config: EngineConfig) -> dict[str, ConfigRecordValues]:
    """What a client's actor is given, and what becomes of one that dies (out of memory, a crash in native code).

    Flower hands all of this to Ray. By itself it puts a dead actor back into its pool, and every later message fails;
    so Ray starts the actor anew and asks it once more. A client computes the same again, so nothing else changes.
    """
    return {
        "num_cpus": config.cpus_per_client,
        "num_gpus": config.gpus_per_client,
        "max_restarts": -1,
        "max_task_retries": 1,
    }


class _Outcome:
    """What became of the server's main function, which runs in a thread of Flower's."""

    def __init__(self) -> None:
        self.finished = False
        self.error: Exception | None = None


def _guarded(server_app: ServerApp, stopped: threading.Event, outcome: _Outcome) -> ServerApp:
    guarded = ServerApp()

    @guarded.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            server_app(_StoppableGrid(grid, stopped), context)
            outcome.finished = True
        except Exception as error:
            outcome.error = error
            raise

    return guarded


class _StoppableGrid(Grid):
    """A grid that ends the run at the next look for replies once ``stopped`` is set."""

    def __init__(self, grid: Grid, stopped: threading.Event) -> None:
        self._grid = grid
        self._stopped = stopped

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self._stopped.is_set():
            raise RunFailedError("stopped")
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)


def _set_environment() -> None:
    # Neither Flower nor Ray reports usage from a privacy laboratory, unless the user asked for it.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Clients that are given no share of a GPU may still use it, as engine.device says.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


class Share(NamedTuple):
    """How much of one kind of resource the smallest unit of work takes, and the key of the settings that says so."""

    key: str
    kind: str
    amount: float


def connect(address: str, key: str, shares: Sequence[Share]) -> None:
    """Start or join Ray, so that a wrong address or share is one clear line.

    Args:
        address: of a running cluster; empty: start one here.
        key: of the settings that the address comes from, for people.
        shares: of CPUs and GPUs that one unit of work takes.

    Raises:
        InputError: no cluster answers at the address, or it cannot host one unit.
    """
    _set_environment()
    _knock(address, key)
    try:
        ray.init(
            address=address or None,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            runtime_env={"env_vars": _workers_environment()},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"{key} = {address!r}: no Ray cluster answers: {error}") from None
    offered = ray.cluster_resources()
    for share in shares:
        if share.amount > offered.get(share.kind, 0.0):
            ray.shutdown()
            there = offered.get(share.kind, 0.0)
            raise InputError(f"{share.key} = {share.amount:g}: Ray offers {there:g} {share.kind}s in all")


def _knock(address: str, key: str) -> None:
    """See whether anybody listens at host:port or ray://host:port: Ray itself would try for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
    except (OSError, ValueError) as error:
        raise InputError(f"{key} = {address!r}: no Ray cluster answers: {error}") from None


def _workers_environment() -> dict[str, str]:
    """What workers take over from this process: where modules and data are looked for."""
    data = os.environ.get("FEDPRIV_DATA")
    return {"PYTHONPATH": _python_path(), **({"FEDPRIV_DATA": data} if data else {})}


def _python_path() -> str:
    """Workers look for the experiment's own modules where this process does."""
    return os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def _silenced(*names: str) -> Iterator[None]:
    """Mute loggers for a while: what clients raise is told by the server, with name and round."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
