"""What a private training step costs, as a multiple of plain SGD's.

Usage: python -m benchmarks.step [--json FILE] [--models NAME ...] [--batches B ...] [--methods NAME ...] [--threads N]

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
from typing import Any

import torch
from rich.console import Console

from benchmarks.measure import cpu_seconds, in_own_process, options, peak_mib, reset_peak, save, show
from benchmarks.methods import LOSS, METHODS, MODELS, Setting, network, random_batch
from fedpriv.core.randomness import Secret
from fedpriv.gradients import per_example_gradients

BATCHES = (64, 256)
SLOW_SECONDS = 1.0
SLOW_REPEATS = 3
WARMUP = 2
# Steps whose numbers would not fit a common machine are left out, and named.
LARGEST_GIB = 12.0


def main() -> None:
    """Measure, print a table, and write the rows."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    # Opacus' hooks fire in another order at a first layer, whose input needs no gradient; torch says so at every call.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    floors = []
    for name in arguments.models:
        for batch in arguments.batches:
            console.print(f"{name}, batch {batch}", style="dim")
            methods = [method for method in arguments.methods if _fits(MODELS[name], batch, method)]
            skipped += [
                {"model": name, "batch": batch, "method": method, "reason": f"needs more than {LARGEST_GIB:g} GiB"}
                for method in arguments.methods
                if method not in methods
            ]
            times = median_ms(MODELS[name], batch, methods, arguments.repeats)
            floors.append({"model": name, "batch": batch, **floor_ms(MODELS[name], batch, arguments.repeats)})
            rows += [
                {
                    "model": name,
                    "batch": batch,
                    "method": method,
                    "ms": ms,
                    "ratio": ms / times["sgd"] if "sgd" in times else None,
                    "peak_mib": _peak_in_own_process(name, batch, method, arguments.threads),
                }
                for method, ms in times.items()
            ]
    _show(rows, floors, skipped)
    save(
        arguments.json,
        rows=rows,
        floors=floors,
        skipped=skipped,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        threads=arguments.threads,
        torch=torch.__version__,
        opacus=version("opacus"),
    )


def median_ms(setting: Setting, batch: int, methods: Sequence[str], repeats: int) -> dict[str, float]:
    """Median milliseconds of one step of each method, alternating; slow ones take part in fewer rounds."""
    steps = {method: METHODS[method](setting, batch) for method in methods}
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
    return {method: 1e3 * statistics.median(taken) for method, taken in times.items()}


def floor_ms(setting: Setting, batch: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of what the directional mechanism cannot do without, each alone."""
    stream = Secret.of_seed(0).stream("benchmark")
    compute = partial(per_example_gradients, network(setting), LOSS, *random_batch(setting, batch))
    parts: dict[str, list[float]] = {"draw": [], "gradients": [], "gram": [], "dot": [], "combine": []}
    for _ in range(min(repeats, 20)):
        parts["gradients"].append(cpu_seconds(compute))
        gradients = compute()
        noise = gradients.draw(stream)
        parts["draw"].append(cpu_seconds(partial(gradients.draw, stream)))
        parts["gram"].append(cpu_seconds(gradients.gram))
        parts["dot"].append(cpu_seconds(partial(gradients.dot, noise)))
        parts["combine"].append(cpu_seconds(partial(gradients.combine, torch.ones(batch))))
    return {f"{part}_ms": 1e3 * statistics.median(taken) for part, taken in parts.items()}


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


def _fits(setting: Setting, batch: int, method: str) -> bool:
    """Whether B gradients of K numbers, and the copies that are made of them, fit; asked of the dense ways only."""
    if method not in ("vmf-dense", "opacus-hooks"):
        return True
    numbers = batch * sum(value.numel() for value in network(setting).parameters() if value.requires_grad)
    return 2 * 4 * numbers <= LARGEST_GIB * 2**30


def _show(rows: Sequence[dict[str, Any]], floors: Sequence[dict[str, Any]], skipped: Sequence[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append((row["model"], row["method"], row["batch"], f"{row['ms']:.2f}", ratio, f"{row['peak_mib']:.0f}"))
    show(("model", "method", "batch", "ms", "x SGD", "peak MiB"), lines, words=2)
    print("\nParts of a directional step, ms each alone:")
    parts = ("gradients", "gram", "draw", "dot", "combine")
    figures = [(row["model"], row["batch"], *(f"{row[f'{part}_ms']:.2f}" for part in parts)) for row in floors]
    show(("model", "batch", *parts), figures)
    for row in skipped:
        print(f"left out: {row['model']}, batch {row['batch']}, {row['method']}: {row['reason']}")


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    images = [name for name, setting in MODELS.items() if setting.sequences is None]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=images, help="by default those of images")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=30, help="rounds in which every method takes a step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; clients use engine.threads, by default 1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
