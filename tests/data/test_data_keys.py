"""Whose each example is, in every form of data, and the clients that follow from it."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import accuracy_score

from fedpriv.algorithms.rounds import ledger as rounds_ledger
from fedpriv.core.config import DataConfig, Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.data.files import Keys
from fedpriv.data.own import split_rows
from fedpriv.data.partition import partition_indices

HOSPITALS = [f"hospital {number:02}" for number in range(30)]


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
    assert np.bincount(dataset.keys.test, minlength=30).tolist() == [round(0.2 * count) for count in held]
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
        (
            {"key": "hospital", "cells": {4: "NA"}},
            r"patients\.csv: row 5, column 'hospital': the cell is 'NA', and data\.key",
        ),
        ({"key": ""}, r"data\.partition = 'key': data\.name = 'csv' does not say whose an example is; data\.key"),
        ({"name": "digits", "table": None}, r"'digits' does not read data\.key"),
    ],
)
def test_wrong_keys_of_tables(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    cells = change.pop("cells", {})
    owners = [cells.get(row, name) for row, name in enumerate(HOSPITALS * 20)]
    tree = table(patients(tmp_path, owners), partition="key", **change)
    with pytest.raises(InputError, match=words):
        build_world(validated(Experiment, {"data": tree, "model": {"name": "logistic"}}, "a test"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("npz", r"an array client does, or the one that data\.key names"),
        ("folder", r"data\.key = 'client' reads CLIENT/CLASS/PICTURE"),
        ("idx", r"data\.name = 'idx' does not say whose an example is$"),
    ],
)
def test_a_form_without_keys_says_where_they_may_be(name: str, words: str) -> None:
    config = validated(DataConfig, {"name": name, "path": "x", "partition": "key"}, "a test")
    with pytest.raises(InputError, match=words):
        partition_indices(np.zeros(4, int), config, 2, 0)


# --- one person at several clients --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csv", "csv by key", "npz", "object", "folder", "name"])
def test_a_person_is_found_at_every_client(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column is no feature, and owners stay with their examples when a part of them is drawn."""
    owners = [HOSPITALS[number % 7] for number in range(40)]
    pixels = np.arange(40 * 16).reshape(40, 4, 4).astype(np.uint8)
    if form in ("folder", "name"):
        for number, (image, owner) in enumerate(zip(pixels, owners, strict=True)):
            file = tmp_path / f"{'odd' if number % 2 else 'even'}/{owner}{'/' if form == 'folder' else '_'}{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
        tree: dict[str, Any] = {"name": "folder", "path": str(tmp_path), "owner": form}
    elif form == "npz":
        labels = np.arange(40) % 2
        np.savez(tmp_path / "x.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels, who=owners)
        tree = {"name": "npz", "path": str(tmp_path / "x.npz"), "owner": "who"}
    else:
        tree = table(patients(tmp_path, owners), owner="hospital", key="hospital" if form == "csv by key" else "")
    if form == "object":
        rows = patients(tmp_path, owners).read_text(encoding="utf-8").splitlines()[1:]
        cells = [row.split(",") for row in rows]
        columns = {"age": [int(row[0]) for row in cells], "hospital": owners, "ill": [row[2] for row in cells]}
        source = f"import datasets\ndata = datasets.Dataset.from_dict({columns!r})\n"
        (tmp_path / "held_module.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        tree = tree | {"name": "held_module:data"}
        tree.pop("path")
    whole, part = loaded(tree), loaded(tree | {"train_examples": 20})
    assert whole.owners is not None and part.owners is not None
    whole_rows, part_rows = (each.x_train.flatten(1).tolist() for each in (whole, part))
    pairs = list(zip(whole_rows, whole.owners.tolist(), strict=True))
    assert all(pair in pairs for pair in zip(part_rows, part.owners.tolist(), strict=True))
    assert len(whole.owners) == len(whole.x_train)
    assert [column.name for column in whole.columns] == ([] if form in ("npz", "folder", "name") else ["age"])
    held = np.bincount(whole.owners)
    if form == "npz":
        assert held.tolist() == [owners.count(name) for name in HOSPITALS[:7]]
    elif form == "csv by key":
        assert len(held) == 7
    else:  # all rows of a person are for training, or all for the test
        assert len(held) == 6 and set(held.tolist()) <= {40 // 7, 40 // 7 + 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"owner": "ward"}, r"data\.owner: .*has no column 'ward'"),
        ({"name": "text", "owner": "ward", "table": None}, r"does not read data\.owner, but for that of data\.key"),
        ({"name": "folder", "key": "", "owner": "ward", "table": None}, "'ward': allowed: 'folder' for CLASS/PERSON/"),
        ({"name": "digits", "owner": "ward", "key": "", "table": None}, r"'digits' does not read data\.owner$"),
    ],
)
def test_wrong_owners(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    tree = table(patients(tmp_path, HOSPITALS * 4), **change)
    with pytest.raises(InputError, match=words):
        loaded(tree)


def test_a_picture_that_names_no_person(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "odd/ann-1.png")
    for owner in ("folder", "name"):
        with pytest.raises(InputError, match=r"odd/ann-1\.png: names no person; .* reads CLASS/PERSON"):
            loaded({"name": "folder", "path": str(tmp_path), "owner": owner})


@pytest.mark.parametrize("form", ["csv", "npz", "folder"])
def test_persons_in_both_parts_of_the_files_are_counted(tmp_path: Path, form: str) -> None:
    train, test = ["ann", "ann", "bob", "cleo", "dan"], ["ann", "cleo", "eve"]
    if form == "csv":
        tree = table(patients(tmp_path, train * 2), owner="hospital", key="")
        (tmp_path / "test").mkdir()
        tree["table"]["test_path"] = str(patients(tmp_path / "test", test * 2))
    elif form == "npz":
        parts = {"x_train": np.zeros((5, 4, 4), np.uint8), "x_test": np.zeros((3, 4, 4), np.uint8)}
        labels = {"y_train": np.arange(5) % 2, "y_test": np.arange(3) % 2}
        np.savez(tmp_path / "x.npz", **parts, **labels, who=train, who_test=test)
        tree = {"name": "npz", "path": str(tmp_path / "x.npz"), "owner": "who"}
    else:
        for part, person in {("train", person) for person in train} | {("test", person) for person in test}:
            for label in ("cat", "dog"):
                (tmp_path / part / label / person).mkdir(parents=True)
                Image.new("L", (4, 4)).save(tmp_path / part / label / person / "1.png")
        tree = {"name": "folder", "path": str(tmp_path), "owner": "folder"}
    (warning,) = (line for line in loaded(tree).warnings if "persons" in line)
    assert "2 of 4 persons with training examples (data.owner) have test examples, too" in warning


def test_a_persons_examples_are_all_for_training_or_all_for_the_test() -> None:
    """Of each client a fifth of the persons; without persons the rows are those that they were."""
    clients = ["large"] * 100 + ["small"] * 30 + ["single"]
    people = [f"{client}{number // 4}" for number, client in enumerate(clients[:-1])] + ["large0"]
    train, test = split_rows(clients, len(clients), 0.2, "a file", people=people)
    assert sorted([*train, *test]) == list(range(131))
    sides = [{people[row] for row in part} for part in (train, test)]
    assert not sides[0] & sides[1]
    assert [sum(person.startswith(client) for person in sides[1]) for client in ("large", "small")] == [5, 2]
    alone = split_rows(clients, len(clients), 0.2, "a file", people=list(map(str, range(131))))
    assert len(alone[1]) == 26
    with pytest.raises(InputError, match=r"0\.2 of 1 persons leaves no test example"):
        split_rows(None, 9, 0.2, "a file", people=["one"] * 9)


def test_the_ledger_has_persons_over_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records at each client are counted from the partition; one at one client has the client's own figure."""
    owners = ["one", *[f"p{number % 9}" for number in range(99)]]
    given = validated(
        Experiment,
        {
            "data": table(patients(tmp_path, owners), owner="hospital", key=""),
            "model": {"name": "logistic"},
            "federation": {"clients": 3, "rounds": 2},
            "training": {"batch_size": 4},
            "mechanism": {"name": "gaussian", "sigma": 9.0},
            "adversary": {"attacks": []},
        },
        "a test",
    )
    summary = start_run(given, tmp_path / "run", "", Silent())
    ledger, world = RunFolder.open(tmp_path / "run").ledger(), build_world(given)
    assert ledger is not None and world.dataset.owners is not None
    held = [
        tuple(sorted((int((world.dataset.owners[rows] == person).sum()) for rows in world.partitions), reverse=True))
        for person in np.unique(world.dataset.owners)
    ]
    expected = sorted(tuple(count for count in counts if count) for counts in held)
    assert sorted(person.records for person in ledger.people for _ in range(person.count)) == expected
    alone = next((person for person in ledger.people if person.records == (1,)), None)
    assert alone is None or alone.epsilon == pytest.approx(ledger.worst.epsilon)
    worst = ledger.people[0]
    assert worst.epsilon is not None and ledger.worst.epsilon is not None
    assert worst.epsilon > ledger.worst.epsilon
    assert any(worst.held in sentence for sentence in summary.verdict)
    assert "One person over all clients" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    monkeypatch.setattr(rounds_ledger, "_MOST_PROFILES", 1)
    (bound,) = rounds_ledger.run_ledger(world, RunFolder.open(tmp_path / "run")).people
    assert bound.held.startswith("at most ") and bound.count == len(held)
    assert bound.epsilon is not None and bound.epsilon >= worst.epsilon


# --- federations of clients by nature -----------------------------------------------------------------------------


def hospitals(folder: Path) -> dict[str, Any]:
    """30 hospitals, some with fewer rows than a batch, some in training or test data alone."""
    owners = [name for number, name in enumerate(HOSPITALS) for _ in range(number % 7 + 1)] + ["hospital 03"] * 10
    columns = [{"name": "age", "low": 0, "high": 100}]
    (folder / "test").mkdir()
    data = table(patients(folder, owners), partition="key")
    tests = patients(folder / "test", [*HOSPITALS[5:], "hospital 30"] * 4)
    return data | {"table": {"label": "ill", "columns": columns, "test_path": str(tests)}}


def leaf_writers(folder: Path) -> dict[str, Any]:
    """100 writers of small pictures in LEAF's format."""
    draw = np.random.default_rng(1)
    users = {}
    for number in range(100):
        y = draw.integers(0, 2, number % 5 + 3).tolist()
        users[f"f{number:04}"] = {"x": [(draw.random(16) * (0.5 + label)).clip(0, 1).tolist() for label in y], "y": y}
    (folder / "leaf.json").write_text(json.dumps({"users": list(users), "user_data": users}))
    return {"name": "leaf", "path": str(folder / "leaf.json"), "partition": "key"}


FEDERATIONS: dict[str, tuple[Any, int]] = {"hospitals": (hospitals, 28), "writers": (leaf_writers, 100)}


def federation(folder: Path, which: str, **changes: Any) -> Experiment:
    make, clients = FEDERATIONS[which]
    settings = {
        "data": make(folder),
        "model": {"name": "logistic"},
        "federation": {"clients": clients, "rounds": 2, "evaluate": "clients"},
        "training": {"batch_size": 4, "sampling": "poisson"},
        "mechanism": {"name": "gaussian", "sigma": 1.0},
        "adversary": {"attacks": []},
        "noise": "reproducible",
    }
    return validated(Experiment, settings | changes, "a test")


@pytest.mark.parametrize("which", FEDERATIONS)
def test_a_federation_of_clients_by_nature(tmp_path: Path, which: str) -> None:
    """Accuracy per client as sklearn and numpy have it, a guarantee for each size, and no file that names a key."""
    given = federation(tmp_path, which)
    summary = start_run(given, tmp_path / "run", "", Silent())
    assert summary.status == "completed"
    folder, world = RunFolder.open(tmp_path / "run"), build_world(given)
    state = folder.load_checkpoint()
    last = folder.rounds()[-1]
    keys = world.dataset.keys
    assert state is not None and last.client_accuracy is not None and keys is not None
    own = {int(keys.train[rows[0]]) for rows in world.partitions}
    model = world.model
    model.load_state_dict(
        {name.removeprefix("parameters/"): value for name, value in state.tensors.items()}, strict=False
    )
    right = (model(world.network_input(world.dataset.x_test)).argmax(1) == world.dataset.y_test).numpy()
    assert right.mean() == pytest.approx(last.accuracy)
    for record, numbers in ((last.client_accuracy, own), (last.other_accuracy, set(keys.test.tolist()) - own)):
        each = [accuracy_score(right[keys.test == number], [True] * int((keys.test == number).sum()))
                for number in sorted(numbers & set(keys.test.tolist()))]  # fmt: skip
        assert (record is None) == (not each)
        if record is not None:
            assert record.clients == len(each)
            expected = [np.median(each), *np.percentile(each, (10, 90)), min(each)]
            assert [record.median, record.low, record.high, record.worst] == pytest.approx(expected)
    ledger = folder.ledger()
    assert ledger is not None
    assert sum(line.count for line in ledger.clients) == len(world.partitions)
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Accuracy of clients" in page
    assert any("in the median" in sentence for sentence in summary.verdict)
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert not any(name.encode() in written for name in keys.names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"data": {"name": "digits"}},
            r"federation\.evaluate = 'clients': data\.partition = 'iid' gives no client test",
        ),
        (
            {"data": {"name": "npz"}},
            r"federation\.evaluate = 'clients': the test examples of .* do not say whose they are",
        ),
    ],
)
def test_clients_without_test_examples(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    if change["data"]["name"] == "npz":
        x, y = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, client=y)
        change = {"data": {"name": "npz", "path": str(tmp_path / "a.npz"), "partition": "key"}}
        change["federation"] = {"clients": 2, "evaluate": "clients"}
    with pytest.raises(InputError, match=words):
        start_run(federation(tmp_path, "writers", **change), tmp_path / "run", "", Silent())
    assert not (tmp_path / "run").exists()  # refused before anything is written
