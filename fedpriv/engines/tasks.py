"""Many independent pieces of work as Ray tasks, with shares of CPUs and GPUs for each, here or on a cluster."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fedpriv.core.errors import one_line, reason_of

if TYPE_CHECKING:
    from fedpriv.core.config import EngineConfig


@dataclass(frozen=True)
class RayResources:
    """What one task, or one actor, takes, and whose Ray it runs on."""

    cpus: float  # share of CPUs
    gpus: float  # share of a GPU
    address: str  # of a running cluster; empty: a local one is started, and stopped in the end
    # of the settings that the three come from, for people
    keys: tuple[str, str, str] = ("resources.cpus", "resources.gpus", "resources.address")

    @classmethod
    def of(cls, engine: "EngineConfig") -> Self:
        """Return what a client takes of an experiment's Ray."""
        keys = "engine.cpus_per_client", "engine.gpus_per_client", "engine.address"
        return cls(engine.cpus_per_client, engine.gpus_per_client, engine.address, keys)

    @property
    def shares(self) -> tuple[tuple[str, str, float], ...]:
        """What is taken: the key that says so, Ray's name of the resource, and how much of it."""
        return (self.keys[0], "CPU", self.cpus), (self.keys[1], "GPU", self.gpus)

    def room(self, offered: Mapping[str, float]) -> int:
        """Return how often it fits into what is offered."""
        return min(int(offered.get(kind, 0.0) / share + 1e-9) for _, kind, share in self.shares if share > 0)


@dataclass(frozen=True)
class TaskStarted:
    """A task was handed to Ray."""

    index: int


@dataclass(frozen=True)
class TaskEnded:
    """A task is over."""

    index: int  # which
    result: Any = None  # what the function returned; `None` where it failed
    error: str | None = None  # why it failed; `None` where it did not


def run_tasks(
    function: Callable[[Any], Any], arguments: Sequence[Any], resources: RayResources, poll: float
) -> Iterator[TaskStarted | TaskEnded | None]:
    """Call ``function`` on each argument, as many at once as fit; a failed or dead task does not stop the others."""
    # Imported here: Ray takes a second, and most runs do without it.
    import ray

    from fedpriv.engines.ray import connect

    connect(resources)
    try:
        task = ray.remote(_ended_at_once).options(num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=0)
        waiting, running = list(range(len(arguments)))[::-1], dict[Any, int]()
        while waiting or running:
            # A cluster may grow and shrink.
            while waiting and len(running) < max(1, resources.room(ray.cluster_resources())):
                index = waiting.pop()
                running[task.remote(function, arguments[index])] = index
                yield TaskStarted(index)
            done, _ = ray.wait(list(running), num_returns=1, timeout=poll)
            if not done:
                yield None
            for reference in done:
                yield _outcome(running.pop(reference), reference)
    finally:
        ray.shutdown()


def _ended_at_once(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call it in a worker that SIGTERM ends at once.

    Ray sends one where whoever started it was killed, and its handler raises ``SystemExit`` wherever the code is. A run
    would count that as the failure of a client, write a checkpoint without it, and be resumed from there.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return function(argument)


def _outcome(index: int, reference: Any) -> TaskEnded:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return TaskEnded(index, ray.get(reference))
    except RayTaskError as error:
        cause = error.cause
        return TaskEnded(index, error=reason_of(cause) if isinstance(cause, Exception) else str(error))
    except RayError as error:
        # The worker died, for want of memory as a rule: Ray's text says which and how.
        return TaskEnded(index, error=f"{type(error).__name__}: {one_line(error)[:500]}")
