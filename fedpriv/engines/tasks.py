"""Many independent pieces of work as Ray tasks, with shares of CPUs and GPUs for each, here or on a cluster."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpriv.core.errors import reason_of


@dataclass(frozen=True)
class TaskResources:
    """What one task takes, and whose Ray it runs on."""

    cpus: float  # share of CPUs
    gpus: float  # share of a GPU
    address: str  # of a running cluster; empty: a local one is started, and stopped in the end
    # of the settings that the three come from, for people
    keys: tuple[str, str, str] = ("resources.cpus", "resources.gpus", "resources.address")


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
    function: Callable[[Any], Any], arguments: Sequence[Any], resources: TaskResources, poll: float
) -> Iterator[TaskStarted | TaskEnded | None]:
    """Call ``function`` on each argument, as many at once as fit; a failed or dead task does not stop the others."""
    # Imported here: Ray takes a second, and most runs do without it.
    import ray

    from fedpriv.engines.ray import ResourceShare, connect

    cpus, gpus, address = resources.keys
    connect(
        resources.address,
        address,
        (ResourceShare(cpus, "CPU", resources.cpus), ResourceShare(gpus, "GPU", resources.gpus)),
    )
    try:
        task = ray.remote(_ended_at_once).options(num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=0)
        waiting, running = list(range(len(arguments)))[::-1], dict[Any, int]()
        while waiting or running:
            while waiting and len(running) < _room(resources, ray.cluster_resources()):
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


def _room(resources: TaskResources, offered: Mapping[str, float]) -> int:
    """How many tasks fit at once; a cluster may grow and shrink."""
    shares = [(resources.cpus, offered.get("CPU", 0.0)), (resources.gpus, offered.get("GPU", 0.0))]
    return max(1, min(int(there / share + 1e-9) for share, there in shares if share > 0))


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
        return TaskEnded(index, error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
