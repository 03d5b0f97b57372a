"""What per-example gradients take in memory, for several bounds (engine.gradient_memory), beside plain SGD.

Usage: python -m benchmarks.memory [--json FILE] [--batch 256]

Each row is a process of its own that draws one VMF release, whole gradient (or takes one plain step), and reports how
much its resident memory grew at most from before the first batch: what the kernels and the allocator take is in it.
"""

import argparse
import json
import multiprocessing
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fedpriv.gradients import per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.mechanisms.vmf import VmfMechanism
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from fedpriv.randomness import Secret

_MIB = 1 << 20
_MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"name": "lenet"},
    "convnet": {"name": "convnet"},
    "mlp(1024,1024)": {"name": "mlp", "hidden": (1024, 1024)},
}
_BOUNDS_MIB = (16, 64, 256)


def _peak_mib() -> float:
    """The most memory this process has had resident so far; Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (_MIB if sys.platform == "darwin" else 1024)


def measure(model_name: str, batch: int, way: str, bound_mib: int) -> dict[str, Any]:
    """Return one row: the growth of the peak; ``way`` is "sgd" (one forward and backward pass), "ghost" or "dense"."""
    torch.set_num_threads(1)
    model = build_model(model_settings(_MODELS[model_name]), (3, 32, 32), 10, seed=1)
    loss = partial(functional.cross_entropy, reduction="none")
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    tiny = torch.nn.Linear(1, 1), lambda output, target: output[:, 0], torch.ones(2, 1), torch.zeros(2)
    for gradients in (per_example_gradients(*tiny), dense_gradients(*tiny, "what is loaded on first use")):
        VmfMechanism(1.0).release(gradients, 2, Secret.of_seed(0).stream("benchmark"))
    before = _peak_mib()
    if way == "sgd":
        functional.cross_entropy(model(x), y).backward()
    else:
        gradients = (
            per_example_gradients(model, loss, x, y, chunk_bytes=bound_mib * _MIB)
            if way == "ghost"
            else dense_gradients(model, loss, x, y, "a benchmark", bound_mib * _MIB)
        )
        VmfMechanism(50.0).release(gradients, batch, Secret.of_seed(1).stream("benchmark"))
    peak = _peak_mib() - before
    return {"model": model_name, "batch": batch, "way": way, "bound_mib": bound_mib, "peak_mib": peak}


def main() -> None:
    """Measure all models and bounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--batch", type=int, default=256, help="examples")
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':<16}{'batch':>6}{'way':>7}{'bound MiB':>11}{'peak MiB':>10}")
    for model in _MODELS:
        # Dense gradients of the MLP are 16 MiB an example.
        ways = ["ghost"] if model.startswith("mlp") else ["ghost", "dense"]
        for way, bound in [("sgd", 0), *((way, bound) for way in ways for bound in _BOUNDS_MIB)]:
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                row = alone.apply(measure, (model, arguments.batch, way, bound))
            rows.append(row)
            print(f"{model:<16}{arguments.batch:>6}{way:>7}{bound or '-':>11}{row['peak_mib']:>10.1f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
