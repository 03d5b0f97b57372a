"""The study of tables finds readings that are wrong."""

from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.config import DataConfig, validated
from fedpriv.data.datasets import load_dataset
from studies import tables

ROWS = [(number % 30, f"2020-01-{number % 9 + 1:02}", "ab"[number % 2], "ny"[number % 3 % 2]) for number in range(90)]
RIGHT: dict[str, dict[str, Any]] = {
    "a": {"name": "a", "low": 0, "high": 30},
    "b": {"name": "b", "kind": "ignore"},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"a": {"name": "a", "low": 0, "high": 20}}, ["a: other numbers"]),
        ({"a": {"name": "a", "kind": "category"}}, ["a: category, of int64"]),
        ({"b": {"name": "b", "kind": "category"}}, ["b: category, of numbers or dates"]),
    ],
)
def test_a_wrong_reading_is_found(tmp_path: Path, changes: dict[str, Any], said: list[str]) -> None:
    path = tmp_path / "own.csv"
    path.write_text("a,b,c,y\n" + "".join(",".join(map(str, row)) + "\n" for row in ROWS))
    table = {"label": "y", "columns": list((RIGHT | changes).values())}
    data = load_dataset(validated(DataConfig, {"name": "csv", "path": str(path), "table": table}, ""), 0)
    assert list(tables._wrong(data, tables._by_pandas(path), "y", ())) == said


def test_a_missing_label_that_is_a_class_is_found(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("a,y\n" + "".join(f"{row},{'NA' if row % 9 == 4 else 'ny'[row % 2]}\n" for row in range(90)))
    table = {"label": "y", "classes": ["NA", "n", "y"], "columns": [{"name": "a", "low": 0, "high": 90}]}
    data = load_dataset(validated(DataConfig, {"name": "csv", "path": str(path), "table": table}, ""), 0)
    assert list(tables._wrong(data, tables._by_pandas(path), "y", ())) == ["y: classes ['NA']"]


def test_a_table_is_read_after_one_edit(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("a,b,c,y\n" + "".join(",".join(map(str, row)) + "\n" for row in ROWS))
    reading = tables._read("mine", path, "y", tmp_path)
    assert (reading.ended, reading.edits, reading.read, reading.wrong) == ("run", 1, 2, [])
    assert tables._summary([reading]).rows[-1] == ("all", *"1111", "0", "0")
