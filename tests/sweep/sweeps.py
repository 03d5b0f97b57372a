"""Sweep files whose trials take less than a second each, and who is told how they go."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedpriv.sweep.record import TrialRecord
from fedpriv.sweep.settings import Sweep, Trial, load_sweep
from tests.integration.small import BASE

NOISES: list[dict[str, Any]] = [
    {"mechanism": {"name": "none"}},
    {"mechanism": {"name": "gaussian", "sigma": 2.0}},
    {"mechanism": {"name": "vmf", "kappa": 5.0, "blocks": "layer"}},
]
SMALL: dict[str, Any] = {
    **BASE,
    "data": {"train_examples": 60},
    "federation": {"clients": 2, "rounds": 2},
    "adversary": {"attacks": []},
}


def tree(**changes: Any) -> dict[str, Any]:
    """A small sweep as nested tables, with other keys in their place; ``None`` takes one away."""
    whole = {
        "name": "small",
        "base": SMALL,
        "seeds": [1, 2],
        "list": {"noise": NOISES},
        "resources": {"engine": "inline"},
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "sweep.toml"
    path.write_text(tomli_w.dumps(tree(**changes)), encoding="utf-8")
    return path


def sweep(folder: Path, **changes: Any) -> Sweep:
    return load_sweep(write(folder, **changes))


class Notes:
    """Who is told, and writes it down."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.begun: list[int] = []
        self.over: list[int] = []

    def found(self, records: Sequence[TrialRecord]) -> None:
        self.before += [record.trial for record in records]

    def started(self, trial: Trial) -> None:
        self.begun.append(trial.number)

    def ended(self, record: TrialRecord) -> None:
        self.over.append(record.trial)

    def tick(self) -> None:
        pass
