"""Certified accuracy on MNIST: noise on the image and behind the first layer, even and shared out, with privacy or not.

Each row trains and certifies one run in OUT/ROW, which is kept if it is there, and prints a line; all five rows take
about ten minutes of processor time. FEDPRIV_DATA names the folder with MNIST.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpriv.core.config import Experiment, validated
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.robustness.certify import certify_run
from fedpriv.robustness.records import Robustness
from fedpriv.robustness.settings import CertifyConfig
from studies.arguments import StudyParser, listed, whole

SIGMA = 0.5
SIDE = 28
BOUNDS = ("main", "renyi", "analytic", "classic", "extended", "paper")

BASE: Mapping[str, Any] = {
    "seed": 1,
    "noise": "reproducible",
    "data": {"name": "mnist"},
    "model": {"name": "strided"},
    "adversary": {"attacks": []},
    "engine": {"name": "inline", "device": "cpu"},
}
# One client with all data: two passes with Adam, 938 steps.
ALONE: Mapping[str, Mapping[str, Any]] = {
    "federation": {"clients": 1, "rounds": 2, "algorithm": "fedavg"},
    "training": {"batch_size": 128, "optimizer": "adam", "learning_rate": 0.001},
}
PRIVATE = {
    "federation": {"clients": 10, "rounds": 60, "server_optimizer": "adam", "server_learning_rate": 0.002},
    "training": {"batch_size": 300, "sampling": "poisson"},
    "mechanism": {"name": "gaussian", "target_epsilon": 2.0, "delta": 1e-5, "adjacency": "zero-out"},
}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "input": {**ALONE, "robustness": {"noise": SIGMA, "place": "input"}},
    # As far from the largest change of a pixel as even noise of SIGMA: S_inf = 28 / SIGMA.
    "informative": {
        **ALONE,
        "robustness": {
            "noise": SIGMA / SIDE,
            "norm": "linf",
            "place": "input",
            "redistribution": "informative",
            "public_examples": 1000,
        },
    },
    "hidden": {**ALONE, "robustness": {"noise": SIGMA}},
    "vulnerable": {**ALONE, "robustness": {"noise": SIGMA, "redistribution": "vulnerable", "public_examples": 1000}},
    "private": {**PRIVATE, "robustness": {"noise": SIGMA, "place": "input"}},
}


def certified(row: str, out: Path, config: CertifyConfig) -> Robustness:
    """Train a row where that was not done yet, and certify it."""
    path = out / row
    if not path.exists():
        experiment = validated(Experiment, {**BASE, "name": row, **ROWS[row]}, f"row {row}")
        start_run(experiment, path, "studies.robustness", Silent())
    return certify_run(RunFolder.open(path), config, None, Silent())


def main() -> None:
    """Print what each row certifies."""
    parser = StudyParser("studies.robustness", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", type=listed(ROWS), default=tuple(ROWS))
    parser.add_argument("--examples", type=whole(1), default=500)
    with parser.parsed() as asked:
        config = validated(CertifyConfig, {"examples": asked.examples}, "--examples")
        for row in asked.only:
            _print(row, certified(row, asked.out, config))


def _print(row: str, result: Robustness) -> None:
    print(f"{row}: voted {result.voted.value:.3f}, noiseless {result.noiseless.value:.3f}, {result.seconds:.0f} s")
    radii = {radius.bound: radius for radius in result.radii}
    for bound in BOUNDS:
        shares = [f"{share.value:.3f}" for norm in ("l2", "linf") for share in result.curve(norm, bound).shares]
        print(f"  {bound:9}", *shares, f"mean {radii[bound].l2:.3f} {radii[bound].linf:.4f}", flush=True)
