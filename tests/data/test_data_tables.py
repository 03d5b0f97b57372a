"""Tables as data: cells against scikit-learn's encoders, bad files in one line each, bounds under their noise."""

import gzip
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from scipy import stats
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder

from fedpriv.core.columns import Column, cell_texts, decode
from fedpriv.core.config import DataConfig, validated
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.data import bounds
from fedpriv.data.bounds import EDGES, estimated_bounds
from fedpriv.data.datasets import Dataset, load_dataset, place_of
from fedpriv.data.sets.csv import private_bounds

CITIES, COUNT = ("Bern", "Oslo", "Rome"), 60
AGE = {"name": "age", "low": 0, "high": 90}
NOISE = Secret.of_seed(1)


def rows() -> dict[str, list[Any]]:
    stream = numpy_stream(0, "people")
    return {
        "age": stream.integers(0, 91, COUNT).tolist(),
        "city": [CITIES[number] for number in stream.integers(0, 3, COUNT)],
        "income": ["low", "high"] * (COUNT // 2),
    }


def written(folder: Path, changes: Mapping[str, Mapping[int, str]], name: str = "people.csv") -> Path:
    """A CSV file with these cells changed."""
    table = rows()
    for column, cells in changes.items():
        for row, text in cells.items():
            table[column][row - 1] = text
    lines = [",".join(table), *(",".join(map(str, cells)) for cells in zip(*table.values(), strict=True))]
    path = folder / name
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def read(path: Path, **table: Any) -> Dataset:
    tree = {"name": "csv", "path": str(path), "table": {"label": "income", "columns": [AGE], **table}}
    return load_dataset(validated(DataConfig, tree, "test"), 0)


def everything(data: Dataset) -> np.ndarray:
    return torch.cat([data.x_train, data.x_test]).flatten(1).numpy()


@pytest.mark.parametrize("name", ["people.csv", "people.csv.gz", "people.parquet"])
def test_rows_are_what_scikit_learn_makes_of_them(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(pa.table(rows()), path)
    else:
        written(tmp_path, {}, name)
    data, table = read(path), rows()
    ages = MinMaxScaler().fit([[0], [90]]).transform(np.array(table["age"])[:, None])
    cities = OneHotEncoder(sparse_output=False).fit_transform(np.array(table["city"])[:, None])
    wanted = np.hstack([ages, cities]).astype(np.float32)
    found = everything(data)
    np.testing.assert_allclose(*(each[np.lexsort(each.T)] for each in (found, wanted)), rtol=1e-6)
    assert (len(data.x_train), len(data.x_test), data.shape) == (48, 12, (1, 1, 4))
    assert data.class_names == ("high", "low") and int(torch.cat([data.y_train, data.y_test]).sum()) == COUNT // 2
    assert (data.mean, data.std) == ((0.0,), (1.0,)) and torch.equal(data.normalise(data.x_test), data.x_test)


def test_every_cell_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path, {"age": {3: "", 7: ""}, "city": {4: ""}})
    data, table = read(path, missing="own", unknown="other"), rows()
    for column, row in (("age", 3), ("age", 7), ("city", 4)):
        table[column][row - 1] = "(missing)"
    wanted = Counter(zip(map(str, table["age"]), table["city"], strict=True))
    assert Counter(cell_texts(data.columns, row) for row in everything(data)) == wanted


def test_decoding_takes_any_numbers() -> None:
    columns = (
        Column("city", "category", CITIES),
        Column("age", "number", low=10, high=20, whole=True, optional=True),
        Column("wed", "flag", ("no", "yes")),
    )
    made = np.array([[0.2, 0.5, 0.5, 1.7, 0.4, 0.5], [-1, -3, -2, 0.26, 0.6, 0.49]])
    cells = decode(columns, made)
    assert cells[0].tolist() == [1, 20, 1]
    assert cells[1][0] == 0 and np.isnan(cells[1][1]) and cells[1][2] == 0


BAD = [
    ({"age": {50: "old"}}, {}, "people.csv: row 50, column 'age': 'old' is no number"),
    ({"age": {50: "old"}}, {"columns": []}, "column 'age' holds numbers: tell low and high"),
    ({"age": {50: "inf"}}, {}, "row 50, column 'age': 'inf' is no number"),
    ({"age": {50: "\uff11\uff12"}}, {}, "row 50, column 'age': '\uff11\uff12' is no number"),
    ({"age": {50: "1_000"}}, {}, "row 50, column 'age': '1_000' is no number"),
    ({}, {"columns": [{"name": "age", "low": -1e308, "high": 1e308}]}, "column 'age': high - low is no finite number"),
    ({"city": {5: ""}}, {}, "row 5, column 'city': the cell is empty; in place of"),
    ({"age": {5: ""}}, {}, "row 5, column 'age': the cell is empty"),
    ({"income": {5: ""}}, {"missing": "own"}, "row 5, column 'income': the label is empty"),
    ({}, {"label": "wage"}, "data.table.label: "),
    ({}, {"columns": [AGE, {"name": "zip"}]}, "has no column 'zip'; its columns are age, city, income"),
    ({}, {"columns": [AGE, {"name": "city", "values": ["Oslo", "Rome"]}]}, "'Bern' is none of the known values (Oslo"),
    ({}, {"columns": [AGE, {"name": "city", "kind": "number", "low": 0, "high": 1}]}, "is no number"),
    ({}, {"classes": ["low", "middle"]}, "the label 'high' is none of low, middle"),
    ({}, {"test_share": 0.001}, "leaves no training or no test row"),
    ({"city": {5: "Rome,more"}}, {}, "cannot be read as a table"),
    ({}, {"delimiter": "é"}, "one printable ASCII character, or a tab, and no quote is wanted"),
    ({}, {"delimiter": '"'}, "no quote is wanted"),
    ({}, {"delimiter": "\n"}, "one printable ASCII character"),
    ({}, {"classes": ["low", "high", "low"]}, "'low' is told twice"),
    ({}, {"columns": [AGE, {"name": "city", "values": ["Oslo", "Oslo"]}]}, "a value is told twice"),
    ({"age": {9: "x" * 3000}}, {}, "is no number"),
    ({"city": {9: "x" * 3000}}, {"columns": [AGE, {"name": "city", "values": list("abc")}]}, "is none of the known"),
    ({"city": {9: "Rome,more" + "x" * 3000}}, {}, "cannot be read as a table"),
    ({}, {"classes": [f"class {number}" for number in range(240)]}, "class 7 and 232 more"),
]


@pytest.mark.parametrize(("changes", "table", "said"), BAD)
def test_a_bad_table_is_told_in_one_line(tmp_path: Path, changes: Any, table: dict[str, Any], said: str) -> None:
    path = written(tmp_path, changes)
    with pytest.raises(InputError) as told:
        read(path, **table)
    line = str(told.value).partition("\n")[0]
    assert said in line and len(line) < 600


def test_a_value_that_only_test_rows_have(tmp_path: Path) -> None:
    train, test = written(tmp_path, {}), written(tmp_path, {"city": {9: "Paris"}}, "test.csv")
    with pytest.raises(InputError, match=r"row 9 of \S+test.csv, column 'city': 'Paris' is none of the known"):
        read(train, test_path=str(test))
    data = read(train, test_path=str(test), unknown="other")
    assert cell_texts(data.columns, data.x_test[8].flatten().numpy())[1] == "(other)"
    assert not data.x_train[..., -1].any() and len(data.x_test) == COUNT


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.csv.gz"
    path.write_bytes(gzip.compress(b"age,city,income\n" + b"1,Rome,low\n" * 100_000))
    tree = {"name": "csv", "path": str(path), "memory": 4, "table": {"label": "income", "columns": [AGE]}}
    with pytest.raises(InputError, match=r"data.memory = 4 allows 4"):
        load_dataset(validated(DataConfig, tree, ""), 0)


def test_numbers_lie_within_their_estimated_bounds(tmp_path: Path) -> None:
    tree = {"name": "csv", "path": str(written(tmp_path, {})), "table": {"label": "income"}}
    found = private_bounds(place_of(validated(DataConfig, tree, "")), 1000.0, NOISE)
    ages = rows()["age"]
    low, high = found.low_high["age"]
    assert low <= min(ages) and max(ages) <= high == 130.0
    with pytest.raises(InputError, match="too little for so few rows"):
        private_bounds(place_of(validated(DataConfig, tree, "")), 0.1, NOISE)


def test_replacing_a_row_moves_the_counts_by_two_at_most() -> None:
    values = np.array([-5e20, -3.0, -1.0, 0.0, 2.0**-12, 1.0, 7.5, 1e20, 0.5])
    counts = partial(bounds._counts, edges=EDGES)
    moved = [
        np.abs(counts(values) - counts(np.r_[values[:row], other, values[row + 1 :]])).sum()
        for row in range(len(values))
        for other in values
    ]
    assert max(moved) == 2
    for value in (*values[1:-2], values[-1]):
        (full,) = np.flatnonzero(counts(np.array([value])))
        assert EDGES[full] < value <= EDGES[full + 1]


def test_the_noise_is_two_sided_geometric() -> None:
    """False alarm 1e-6: chi-squared against P(k) = (1 - a) / (1 + a) a^|k|, a = exp(-epsilon)."""
    epsilon, count, most = 0.7, 100_000, 8
    noise = bounds._geometric(count, epsilon, NOISE.stream("test").numpy())
    ratio = np.exp(-epsilon)
    wanted = (1 - ratio) / (1 + ratio) * ratio ** np.abs(np.arange(-most, most + 1))
    seen = np.array([(noise == k).sum() for k in range(-most, most + 1)])
    rest = count - seen.sum(), count * (1 - wanted.sum())
    assert stats.chisquare([*seen, rest[0]], [*(count * wanted), rest[1]]).pvalue > 1e-6


def test_an_empty_bin_is_seldom_taken_for_a_full_one() -> None:
    """20 zeros are below the threshold; 1 in 100 columns errs at the most, so 12 of 400 have probability below 2e-3."""
    wrong = 0
    for run in range(400):
        try:
            estimated_bounds({"age": np.zeros(20)}, 0.5, Secret.of_seed(run))
            wrong += 1
        except InputError:
            pass
    assert wrong < 12


def test_adult_is_the_census(shared_data: Path) -> None:
    data = load_dataset(DataConfig(name="adult", root=str(shared_data)), 0)
    assert (data.shape, len(data.x_train), len(data.x_test)) == ((1, 1, 108), 32_561, 16_281)
    assert float(data.y_train.double().mean()) == pytest.approx(0.2408, abs=1e-4)
    first = cell_texts(data.columns, data.x_train[0].flatten().numpy())
    assert first[:5] == ("39", "State-gov", "77516", "Bachelors", "13") and first[10] == "2174"
