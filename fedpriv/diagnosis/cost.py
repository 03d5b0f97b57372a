"""What a private step costs next to one of plain SGD: CPU time, and the highest memory of the process."""

import ctypes
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpriv.core.randomness import Secret
from fedpriv.core.reading import GrowingRecord
from fedpriv.gradients import Vector, find_route, per_example_gradients
from fedpriv.gradients.dense import Loss
from fedpriv.mechanisms.machinery.base import Mechanism

Step = Callable[[], None]
"""A whole step on one batch: forward, backward, noise, update of the parameters."""

LEARNING_RATE = 1e-3

# Both take steps in turns until so much CPU time is spent, in seconds, but at least and at most in so many rounds.
SPENT, FEWEST, MOST = 2.0, 3, 11

_TRIM, _MAPPED = -1, -3  # of mallopt in glibc: from how many bytes freed memory goes back to the system
_AT_ONCE, _USUAL = 1 << 16, 1 << 25  # the second as fedpriv.core.threads.keep_freed_memory has it


class StepCost(GrowingRecord):
    """A private step next to one of plain SGD: medians of CPU time, and the highest memory of the process."""

    batch: int
    rounds: int  # in which both took a step
    times: float  # CPU time of the private step over SGD's
    sgd_ms: float
    private_ms: float
    memory_times: float | None  # memory of the private step over SGD's; `None`: the system does not tell
    sgd_mib: float | None  # parameters, batch and what a step adds at most
    private_mib: float | None


def sgd_step(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Step:
    """Return a step of plain SGD."""
    return stepping(sgd(model), lambda: loss(model(x), y).mean())


def private_step(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, mechanism: Mechanism) -> Step:
    """Return what a client does in a step with a mechanism for examples."""
    noise, route = Secret.of_seed(0).stream("noise of a step"), find_route(model, loss, x, y)
    compute = partial(per_example_gradients, model, loss, x, y, route=route, often=mechanism.asks_often)
    return releasing(model, lambda: mechanism.release(compute(), len(x), noise))


def releasing(model: nn.Module, release: Callable[[], Vector]) -> Step:
    """Return a step along what is released of a model's gradients."""
    optimizer, parameters = sgd(model), dict(model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        for name, value in release().items():
            parameters[name].grad = value
        optimizer.step()

    return step


def stepping(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    """Return a step down the gradient of a loss."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return plain SGD on the trained parameters."""
    return torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=LEARNING_RATE)


def step_cost(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, mechanism: Mechanism) -> StepCost:
    """Measure both steps on one model, in turns; its numbers are changed."""
    steps = {"sgd": sgd_step(model, loss, x, y), "private": private_step(model, loss, x, y, mechanism)}
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    while len(taken["sgd"]) < FEWEST or (len(taken["sgd"]) < MOST and sum(map(sum, taken.values())) < SPENT):
        for name, step in steps.items():
            taken[name].append(cpu_seconds(step))
    plain, private = (1e3 * statistics.median(times) for times in taken.values())
    held = sum(value.nbytes for value in (x, y, *model.parameters(), *model.buffers())) / 2**20
    added = [_added(model, step) for step in steps.values()]
    sgd_mib, private_mib = (None if extra is None else held + extra for extra in added)
    return StepCost(
        batch=len(x),
        rounds=len(taken["sgd"]),
        times=private / plain,
        sgd_ms=plain,
        private_ms=private,
        memory_times=private_mib / sgd_mib if sgd_mib and private_mib else None,
        sgd_mib=sgd_mib,
        private_mib=private_mib,
    )


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time that a call takes, of all threads of this process together."""
    began = time.process_time()
    call()
    return time.process_time() - began


def _added(model: nn.Module, step: Step) -> float | None:
    """MiB that a step adds at most, freed memory not counted; ``None`` where the system does not tell (not Linux)."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return None
    model.zero_grad()
    library.mallopt(_MAPPED, _AT_ONCE)
    library.mallopt(_TRIM, _AT_ONCE)
    library.malloc_trim(0)
    try:
        before = reset_peak()
        step()
        return peak_mib() - before
    finally:
        library.mallopt(_MAPPED, _USUAL)
        library.mallopt(_TRIM, 2 * _USUAL)


def reset_peak() -> float:
    """Forget the highest resident memory so far, where the system can (Linux), and return the present one in MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak_mib()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """Return the highest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
