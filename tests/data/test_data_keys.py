"""Whose each example is, in every form of data, and the clients that follow from it."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.core.config import DataConfig, Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.world import build_world
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.data.files import Keys

HOSPITALS = [f"H{number:02}" for number in range(30)]


def patients(folder: Path, owners: list[str]) -> Path:
    """A table with a row for each of ``owners``."""
    draw = np.random.default_rng(0).integers(0, 100, (len(owners), 2))
    with (folder / "patients.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "hospital", "ill"])
        lines.writerows(
            [age, owner, "yes" if odd > age else "no"] for (age, odd), owner in zip(draw, owners, strict=True)
        )
    return folder / "patients.csv"


def table(path: Path, **changes: Any) -> dict[str, Any]:
    columns = [{"name": "age", "low": 0, "high": 100}]
    return {
        "name": "csv",
        "path": str(path),
        "key": "hospital",
        "table": {"label": "ill", "columns": columns},
        **changes,
    }


def loaded(tree: dict[str, Any]) -> Dataset:
    return load_dataset(validated(DataConfig, tree, "a test"), 0)


def test_keys_are_numbered_by_name() -> None:
    keys = Keys.of(["b", "a", "b"], ["c", "a"])
    assert keys.names == ("a", "b", "c")
    assert (keys.train.tolist(), keys.test.tolist()) == ([1, 0, 1], [2, 0])
    assert keys.chosen(np.array([2])).train.tolist() == [1]


def test_a_column_of_a_table_says_whose_a_row_is(tmp_path: Path) -> None:
    """Every hospital's rows are one client's, the column is no feature, and each has the batch that it can fill."""
    owners = [name for number, name in enumerate(HOSPITALS) for _ in range(number % 7 + 2)]
    data = table(patients(tmp_path, owners), partition="key")
    dataset = loaded(data)
    assert [column.name for column in dataset.columns] == ["age"]
    assert dataset.keys is not None
    held = np.bincount(dataset.keys.train, minlength=30) + np.bincount(dataset.keys.test, minlength=30)
    assert held.tolist() == [owners.count(name) for name in HOSPITALS]
    clients = int(np.count_nonzero(np.bincount(dataset.keys.train)))
    world = build_world(
        Experiment.model_validate(
            {
                "data": data,
                "federation": {"clients": clients},
                "training": {"batch_size": 4},
                "model": {"name": "logistic"},
            }
        )
    )
    sizes = sorted(np.bincount(dataset.keys.train).tolist(), reverse=True)[:clients]
    assert world.sizes.tolist() == sizes
    assert [plan.sampling.batch_size for plan in world.plans] == [min(4, size) for size in sizes]
    assert all(len({int(dataset.keys.train[row]) for row in rows}) == 1 for rows in world.partitions)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": "ward"}, r"data\.key: .*patients\.csv has no column 'ward'; its columns are age, hospital, ill"),
        (
            {"key": "hospital", "cells": {4: ""}},
            r"patients\.csv: row 5, column 'hospital': the cell is empty, and data\.key",
        ),
        ({"key": ""}, r"data\.partition = 'key': data\.name = 'csv' does not say whose an example is; .* data\.key"),
        ({"name": "digits", "table": None}, r"'digits' does not read data\.key"),
    ],
)
def test_wrong_keys_of_tables(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    cells = change.pop("cells", {})
    owners = [cells.get(row, name) for row, name in enumerate(HOSPITALS * 20)]
    tree = table(patients(tmp_path, owners), partition="key", **change)
    with pytest.raises(InputError, match=words):
        build_world(validated(Experiment, {"data": tree, "model": {"name": "logistic"}}, "a test"))
