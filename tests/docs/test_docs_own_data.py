"""The experiments of the page on own data, from files that other libraries write to a report in one command."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedpriv.core.cli.app import app
from tests.docs.pages import ROOT, blocks

DRAW = np.random.default_rng(0)
QUICK = ("model.name=logistic", "federation.rounds=1", "adversary.attacks=[]", "engine.name=inline")


def pixels(*shape: int) -> np.ndarray:
    return DRAW.integers(0, 256, shape, dtype=np.uint8)


def folder() -> None:
    for part, owner in ((part, owner) for part in ("train", "test") for owner in "abcd"):
        for label, number in ((label, number) for label in ("cat", "dog") for number in range(3)):
            path = Path("scans", part, owner, label, f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(40, 36 + number, 3)).save(path)


def hub() -> None:
    rows = {
        "picture": [Image.fromarray(image) for image in pixels(30, 8, 8, 3)],
        "kind": [number % 2 for number in range(30)],
        "photographer": [f"photographer {number % 3}" for number in range(30)],
    }
    kinds = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["rose", "tulip"])}
    kinds["photographer"] = datasets.Value("string")
    datasets.Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet("flowers.parquet")


def npz() -> None:
    x, y = pixels(1800, 8, 8), np.arange(1800)[:, None] % 4
    np.savez("scans.npz", train_images=x[:1600], train_labels=y[:1600], test_images=x[1600:], test_labels=y[1600:])


def leaf() -> None:
    for part in ("train", "test"):
        data = {
            f"user {n}": {"x": DRAW.random((n + 2, 36)).tolist(), "y": [k % 2 for k in range(n + 2)]} for n in range(5)
        }
        Path("femnist", part).mkdir(parents=True)
        Path("femnist", part, "all.json").write_text(json.dumps({"users": list(data), "user_data": data}))


WRITE: dict[str, Callable[[], None]] = {"folder": folder, "hub": hub, "npz": npz, "leaf": leaf}


@pytest.mark.parametrize("form", WRITE)
def test_a_form_from_its_file_to_a_report(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in blocks(ROOT / "docs" / "own-data.md") if block.title == f"{form}.toml")
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 10
    Path(block.title).write_text(block.text)
    WRITE[form]()
    settings = [part for setting in QUICK for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", block.title, "--out", "run", *settings])
    assert done.exit_code == 0, done.output
    assert Path("run", "report.html").is_file()
    assert ("in the median" in done.output) == ("evaluate" in block.text)
