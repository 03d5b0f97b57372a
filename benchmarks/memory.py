"""What per-example gradients take in memory, for several bounds (engine.gradient_memory), and plain SGD.

Usage: python -m benchmarks.memory [--json FILE] [--batch 256]

Each row is a process of its own that draws one VMF release, whole gradient (or takes one plain step), and reports how
much its resident memory grew at most from before the first batch: what the kernels and the allocator take is in it.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.measure import in_own_process, options, peak_mib, save, show
from fedpriv.core.randomness import Secret
from fedpriv.gradients import per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.mechanisms.vmf import VmfMechanism
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model

_MIB = 1 << 20
_MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"name": "lenet"},
    "convnet": {"name": "convnet"},
    "mlp(1024,1024)": {"name": "mlp", "hidden": (1024, 1024)},
}
_BOUNDS_MIB = (16, 64, 256)


def measure(model_name: str, batch: int, way: str, bound_mib: int) -> dict[str, Any]:
    """Return one row: the growth of the peak; ``way`` is "sgd" (one forward and backward pass), "ghost" or "dense"."""
    torch.set_num_threads(1)
    model = build_model(model_settings(_MODELS[model_name]), (3, 32, 32), 10, seed=1)
    loss = partial(functional.cross_entropy, reduction="none")
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    tiny = torch.nn.Linear(1, 1), lambda output, target: output[:, 0], torch.ones(2, 1), torch.zeros(2)
    for gradients in (per_example_gradients(*tiny), dense_gradients(*tiny, "what is loaded on first use")):
        VmfMechanism(1.0).release(gradients, 2, Secret.of_seed(0).stream("benchmark"))
    before = peak_mib()
    if way == "sgd":
        functional.cross_entropy(model(x), y).backward()
    else:
        gradients = (
            per_example_gradients(model, loss, x, y, chunk_bytes=bound_mib * _MIB)
            if way == "ghost"
            else dense_gradients(model, loss, x, y, "a benchmark", bound_mib * _MIB)
        )
        VmfMechanism(50.0).release(gradients, batch, Secret.of_seed(1).stream("benchmark"))
    peak = peak_mib() - before
    return {"model": model_name, "batch": batch, "way": way, "bound_mib": bound_mib, "peak_mib": peak}


def main() -> None:
    """Measure all models and bounds and print a table."""
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=256, help="examples")
    arguments = parser.parse_args()
    rows = []
    for model in _MODELS:
        # Dense gradients of the MLP are 16 MiB an example.
        ways = ["ghost"] if model.startswith("mlp") else ["ghost", "dense"]
        for way, bound in [("sgd", 0), *((way, bound) for way in ways for bound in _BOUNDS_MIB)]:
            rows.append(in_own_process(measure, model, arguments.batch, way, bound))
    show(
        ("model", "way", "batch", "bound MiB", "peak MiB"),
        [(r["model"], r["way"], r["batch"], r["bound_mib"] or "-", f"{r['peak_mib']:.1f}") for r in rows],
        words=2,
    )
    save(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
