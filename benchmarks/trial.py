"""What a run costs beyond its gradients: ``python -m benchmarks trial configs/quickstart.toml [--set KEY=VALUE]``.

The file is an experiment's. Printed are the CPU seconds of the whole process, imports included, and of the mean
gradients of its steps, mechanism included, with the batches' images; what is left is start, data, optimiser,
evaluation, ledger and files.
"""

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measure import show
from fedpriv.clients import training
from fedpriv.core.config import Experiment, load_experiment
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from studies.arguments import StudyParser


def main() -> None:
    """Read the experiment, and run it."""
    parser = StudyParser("benchmarks.trial", __doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    with parser.parsed() as asked:
        measure(load_experiment(asked.file, asked.set))


def measure(experiment: Experiment) -> None:
    """Run once and print."""
    spent: list[float] = []
    original = training._gradient

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return original(*arguments)
        finally:
            spent.append(time.process_time() - began)

    with tempfile.TemporaryDirectory() as folder, patch.object(training, "_gradient", timed):
        start_run(experiment, Path(folder) / "run", "", Silent())
    whole, gradients = time.process_time(), sum(spent)
    show(
        ("", "CPU s", "share"),
        [
            ("whole process", f"{whole:.1f}", ""),
            (f"gradients of {len(spent):,} steps", f"{gradients:.1f}", f"{gradients / whole:.1%}"),
            ("all else", f"{whole - gradients:.1f}", f"{1 - gradients / whole:.1%}"),
        ],
    )


if __name__ == "__main__":
    main()
