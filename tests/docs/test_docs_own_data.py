"""The experiments of the pages on own data, from files that other libraries write to a report in one command."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import h5py
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedpriv.core.cli.app import app
from tests.docs.pages import ROOT, blocks

DRAW = np.random.default_rng(0)
QUICK = ("federation.rounds=1", "adversary.attacks=[]", "engine.name=inline")
PAGES = [ROOT / "docs" / name for name in ("own-data.md", "tables.md", "text.md")]
MODULE = """
import datasets
import numpy as np

def data():
    draw = np.random.default_rng(0)
    rows = {
        "image": list(draw.integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)),
        "label": [number % 2 for number in range(30)],
        "photographer": [f"photographer {number % 3}" for number in range(30)],
    }
    classes = datasets.ClassLabel(names=["rose", "tulip"])
    kinds = {"image": datasets.Image(), "label": classes, "photographer": datasets.Value("string")}
    return datasets.Dataset.from_dict(rows, datasets.Features(kinds))
"""


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


def idx() -> None:
    Path("kana").mkdir()
    for part, count in (("train", 400), ("t10k", 20)):
        for content, values in (("images", pixels(count, 8, 8)), ("labels", np.arange(count) % 4)):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            Path("kana", f"{part}-{content}-idx{values.ndim}-ubyte").write_bytes(
                header + values.astype(np.uint8).tobytes()
            )


def leaf() -> None:
    for part in ("train", "test"):
        data = {
            f"user {n}": {"x": DRAW.random((n + 2, 36)).tolist(), "y": [k % 2 for k in range(n + 2)]} for n in range(5)
        }
        Path("femnist", part).mkdir(parents=True)
        Path("femnist", part, "all.json").write_text(json.dumps({"users": list(data), "user_data": data}))


def hdf5() -> None:
    Path("fed_emnist").mkdir()
    for part in ("train", "test"):
        with h5py.File(f"fed_emnist/fed_emnist_{part}.h5", "w") as file:
            for number in range(5):
                client = file.create_group(f"examples/f{number:04}_00")
                client["pixels"] = DRAW.random((number + 2, 6, 6), dtype=np.float32)
                client["label"] = np.arange(number + 2, dtype=np.int32) % 2


def table() -> None:
    people = {
        "age": [None, *DRAW.integers(0, 120, 399)],
        "city": DRAW.choice(["Bern", "Oslo", "Rome"], 400),
        "phone": [f"+41 {number:07}" for number in range(400)],
        "income": ["low", "high"] * 200,
    }
    pd.DataFrame(people).to_csv("people.csv", index=False)


def text() -> None:
    reviews = {
        "review": [f"text\twith a tab, and number {number}" for number in range(400)],
        "stars": DRAW.choice(["good", "bad"], 400),
        "customer": [number % 8 for number in range(400)],
    }
    pd.DataFrame(reviews).to_csv("reviews.tsv", sep="\t", index=False)


def text_folder() -> None:
    for part, count in (("train", 136), ("test", 4)):
        for label, number in ((label, number) for label in ("good", "bad") for number in range(count)):
            path = Path("reviews", part, label, f"{number}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"this is {label}, number {number}", encoding="utf-8")


def module() -> None:
    Path("mymodule.py").write_text(MODULE)


WRITE: dict[str, Callable[[], None]] = {
    "folder": folder,
    "hub": hub,
    "npz": npz,
    "idx": idx,
    "leaf": leaf,
    "hdf5": hdf5,
    "object": module,
    "csv": table,
    "text": text,
    "text-folder": text_folder,
}


@pytest.mark.parametrize("form", WRITE)
def test_a_form_from_its_file_to_a_report(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "mymodule", raising=False)
    (block,) = (block for page in PAGES for block in blocks(page) if block.title == f"{form}.toml")
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 10
    Path(block.title).write_text(block.text)
    WRITE[form]()
    small = ("model.width=8", "model.depth=1") if "encoder" in block.text else ("model.name=logistic",)
    model = () if "embedding" in block.text else small
    settings = [part for setting in (*QUICK, *model) for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", block.title, "--out", "run", *settings])
    assert done.exit_code == 0, done.output
    assert Path("run", "report.html").is_file()
    assert ("in the median" in done.output) == ("evaluate" in block.text)
