"""How long the ledger takes: a line of it, the figure while a run goes on, and calibration.

line: the final ledger line (guarantee). running: the figure while a run goes on. ceiling: what no attack can exceed,
for one baseline. renyi: the Renyi divergences at all orders and their conversion to epsilon alone. calibrate: the
search for the noise of epsilon = 8. Each repeat has slightly other noise, so that nothing is remembered from the one
before. Median, fastest and slowest of the repeats are reported, in milliseconds; the import of dp-accounting, once a
process, is a row of its own.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from benchmarks.measure import options, report, save, seconds
from fedpriv.accounting import (
    ORDERS,
    calibrate,
    ceilings,
    equal_blocks,
    guarantee,
    rdp_to_epsilon,
    release_with,
    running_epsilon,
    vmf_rdp,
)
from fedpriv.core.names import SamplingName

_STEPS = 10_000
_DELTA = 1e-5
_REPEATS, _CALIBRATIONS = 9, 3
_FACTORS = (1 + 1e-6 * number for number in count())

_COLUMNS = {name: f"{{{name}}}" for name in ("what", "mechanism", "sampling")}
_COLUMNS |= {name: f"{{{name}:,}}" for name in ("dimension", "blocks")}
_COLUMNS |= {name: f"{{{name}:.2f}}" for name in ("ms", "fastest", "slowest")}

# mechanism, noise, coordinates, blocks, sampling, rate
_CASES: tuple[tuple[str, float, int, int, SamplingName, float], ...] = (
    ("vmf", 25.0, 15_826, 1, "full", 1.0),
    ("vmf", 25.0, 4_000_000, 1, "full", 1.0),
    ("vmf", 1000.0, 100_000_000, 1, "full", 1.0),
    ("vmf", 0.2, 15_826, 990, "full", 1.0),
    ("vmf", 25.0, 15_826, 1, "fixed", 0.01),
    ("vmf", 25.0, 15_826, 1, "poisson", 0.01),
    ("vmf", 0.2, 15_826, 990, "fixed", 0.01),
    ("laplace", 20.0, 15_826, 1, "full", 1.0),
    ("laplace", 20.0, 15_826, 1, "fixed", 0.01),
    ("gaussian", 100.0, 15_826, 1, "full", 1.0),
    ("gaussian", 1.0, 15_826, 1, "fixed", 0.01),
    ("gaussian", 1.0, 15_826, 1, "poisson", 0.01),
)


def main() -> None:
    """Measure, print a table, and write the rows."""
    with options("accounting", __doc__).parsed() as asked:
        rows = list(_measured())
        print(f"{_STEPS:,} participations, {ORDERS.size} orders, delta = {_DELTA:g}")
        report(_COLUMNS, rows, words=3)
        save(asked.json, participations=_STEPS, orders=ORDERS.size, rows=rows)


def _measured() -> Iterator[dict[str, Any]]:
    yield _row("import", "", 0, 0, "", _times(_import, 1))
    for dimension in (3, 15_826, 100_000_000):
        yield _row("renyi", "vmf", dimension, 1, "full", _times(partial(_renyi, dimension), _REPEATS))
    for case in _CASES:
        yield from _case(*case)


def _case(
    mechanism: str, noise: float, dimension: int, blocks: int, sampling: SamplingName, rate: float
) -> Iterator[dict[str, Any]]:
    run: dict[str, Any] = {
        "mechanism": mechanism,
        "sampling": sampling,
        "rate": rate,
        "participations": _STEPS,
        "dimensions": equal_blocks(dimension, blocks if mechanism == "vmf" else 1),
    }
    measured: dict[str, tuple[Callable[[float], object], int]] = {
        "line": (lambda factor: guarantee(release_with(factor * noise, _DELTA, **run)), _REPEATS),
        "ceiling": (lambda factor: ceilings(release_with(factor * noise, _DELTA, **run), [0.01]), _REPEATS),
        "running": (lambda factor: running_epsilon(release_with(factor * noise, _DELTA, **run)), _REPEATS),
        "calibrate": (lambda factor: calibrate(8.0 * factor, release_with(noise, _DELTA, **run)), _CALIBRATIONS),
    }
    for what, (call, repeats) in measured.items():
        yield _row(what, mechanism, dimension, blocks, sampling, _times(call, repeats))


def _times(call: Callable[[float], object], repeats: int) -> list[float]:
    """Milliseconds of each repeat; what is called gets a number near 1, another each time."""
    return [1e3 * seconds(partial(call, next(_FACTORS))) for _ in range(repeats)]


def _import(_: float) -> None:
    rdp_to_epsilon([2.0], [1.0], _DELTA)
    guarantee(release_with(1.0, _DELTA, mechanism="laplace", sampling="full", rate=1.0, participations=2))


def _renyi(dimension: int, factor: float) -> float:
    return rdp_to_epsilon(ORDERS, _STEPS * vmf_rdp(ORDERS, dimension, 25.0 * factor), _DELTA)


def _row(what: str, mechanism: str, dimension: int, blocks: int, sampling: str, times: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "mechanism": mechanism,
        "dimension": dimension,
        "blocks": blocks,
        "sampling": sampling,
        "participations": _STEPS,
        "ms": statistics.median(times),
        "fastest": min(times),
        "slowest": max(times),
    }


if __name__ == "__main__":
    main()
