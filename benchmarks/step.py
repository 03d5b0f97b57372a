"""What a private training step costs, as a multiple of plain SGD's.

For each network and batch size all methods take turns, so that whatever disturbs the machine hits all of them; reported
is the median of the CPU time, which other work on the machine stretches less than wall time. Peak memory is that of a
process of its own: the most that network, batch and step held at any time.
The floor is what no directional noise can go below: a plain step, one normal number a parameter, and the products that
the noise adds.
"""

import argparse
import os
import statistics
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from rich.console import Console

from benchmarks.measure import in_own_process, medians, options, report, save
from benchmarks.methods import LOSS, METHODS, MODELS, RandomNetwork
from fedpriv.core.randomness import Secret
from fedpriv.diagnosis.cost import cpu_seconds, peak_mib, reset_peak
from fedpriv.gradients import find_route, per_example_gradients
from studies.arguments import whole

BATCHES = (64, 256)
SMALL = ("3,32,32", "1,28,28")  # images by default
SLOW_SECONDS = 1.0
SLOW_REPEATS = 3
WARMUP = 2
# Steps whose numbers would not fit a common machine are left out, and named.
LARGEST_GIB = 12.0


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = options("step", __doc__)
    images = [name for name, row in MODELS.items() if row.asked.shape in SMALL]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=images, help="by default those of small images")
    parser.add_argument("--batches", nargs="+", type=whole(1), default=list(BATCHES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=whole(1), default=30, help="rounds in which every method takes a step")
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads, as engine.threads of clients")
    with parser.parsed() as asked:
        torch.set_num_threads(asked.threads)
        # Opacus' hooks fire in another order at a first layer, whose input needs no gradient; torch says so each time.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        _measure(asked)


def _measure(asked: argparse.Namespace) -> None:
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    floors = []
    for name, batch in product(asked.models, asked.batches):
        console.print(f"{name}, batch {batch}", style="dim")
        methods = [method for method in asked.methods if _fits(MODELS[name], batch, method)]
        reason = f"needs more than {LARGEST_GIB:g} GiB"
        skipped += [
            {"model": name, "batch": batch, "method": method, "reason": reason}
            for method in asked.methods
            if method not in methods
        ]
        times = median_ms(MODELS[name], batch, methods, asked.repeats)
        console.print("  " + ", ".join(f"{method} {ms:.1f} ms" for method, ms in times.items()), style="dim")
        floors.append({"model": name, "batch": batch, **floor_ms(MODELS[name], batch, asked.repeats)})
        for method, ms in times.items():
            ratio = ms / times["sgd"] if "sgd" in times else None
            peak = _peak_in_own_process(name, batch, method, asked.threads)
            console.print(f"  {method}: {peak:.0f} MiB", style="dim")
            row = {"model": name, "batch": batch, "method": method, "ms": ms, "ratio": ratio, "peak_mib": peak}
            rows.append(row)
    shown = [{**row, "times": "" if row["ratio"] is None else f"{row['ratio']:.2f}"} for row in rows]
    columns = {"model": "{model}", "method": "{method}", "batch": "{batch}", "ms": "{ms:.2f}", "x SGD": "{times}"}
    report({**columns, "peak MiB": "{peak_mib:.0f}"}, shown, words=2)
    print("\nParts of a directional step, ms each alone:")
    parts = {part: f"{{{part}_ms:.2f}}" for part in ("gradients", "gram", "draw", "dot", "combine")}
    report({"model": "{model}", "batch": "{batch}", **parts}, floors)
    for row in skipped:
        print("left out: {model}, batch {batch}, {method}: {reason}".format(**row))
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "threads": asked.threads, "torch": torch.__version__}
    save(asked.json, rows=rows, floors=floors, skipped=skipped, **about, opacus=version("opacus"))


def median_ms(row: RandomNetwork, batch: int, methods: Sequence[str], repeats: int) -> dict[str, float]:
    """Median milliseconds of one step of each method, alternating; slow ones take part in fewer rounds."""
    steps = {method: METHODS[method](row, batch) for method in methods}
    times: dict[str, list[float]] = {method: [] for method in methods}
    for step in steps.values():
        if cpu_seconds(step) < SLOW_SECONDS:
            for _ in range(WARMUP):
                step()
    for number in range(repeats):
        for method, step in steps.items():
            slow = number > 0 and statistics.median(times[method]) > SLOW_SECONDS
            if not slow or number < SLOW_REPEATS:
                times[method].append(cpu_seconds(step))
    return {method: 1e3 * taken for method, taken in medians(times).items()}


def floor_ms(row: RandomNetwork, batch: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of what the directional mechanism cannot do without, each alone."""
    stream = Secret.of_seed(0).stream("benchmark")
    given = (row.network(), LOSS, *row.batch(batch))
    compute = partial(per_example_gradients, *given, route=find_route(*given), often=True)
    parts: dict[str, list[float]] = {"draw": [], "gradients": [], "gram": [], "dot": [], "combine": []}
    slow = cpu_seconds(compute) > SLOW_SECONDS
    for _ in range(min(repeats, SLOW_REPEATS if slow else 20)):
        parts["gradients"].append(cpu_seconds(compute))
        gradients = compute()
        noise = gradients.draw(stream)
        parts["draw"].append(cpu_seconds(partial(gradients.draw, stream)))
        parts["gram"].append(cpu_seconds(gradients.gram))
        parts["dot"].append(cpu_seconds(partial(gradients.dot, noise)))
        parts["combine"].append(cpu_seconds(partial(gradients.combine, torch.ones(batch))))
    return {f"{part}_ms": 1e3 * taken for part, taken in medians(parts).items()}


def peak_of(model: str, batch: int, method: str, threads: int) -> float:
    """MiB that a process with network, batch and three steps held at most beyond what it held before.

    Libraries are loaded by a step of the same kind on a tiny batch first.
    """
    torch.set_num_threads(threads)
    METHODS[method](MODELS["mlp(128)"], 2)()
    before = reset_peak()
    step = METHODS[method](MODELS[model], batch)
    for _ in range(1 if batch >= BATCHES[-1] and method == "vmf-dense" else 3):
        step()
    return peak_mib() - before


def _peak_in_own_process(model: str, batch: int, method: str, threads: int) -> float:
    # Large pieces go back to the system at once, so that what was freed is not counted.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    return in_own_process(peak_of, model, batch, method, threads)


def _fits(row: RandomNetwork, batch: int, method: str) -> bool:
    """Whether B gradients of K numbers, and the copies that are made of them, fit; asked of the dense ways only."""
    if method not in ("vmf-dense", "opacus-hooks"):
        return True
    numbers = batch * sum(value.numel() for value in row.network().parameters() if value.requires_grad)
    return 2 * 4 * numbers <= LARGEST_GIB * 2**30


if __name__ == "__main__":
    main()
