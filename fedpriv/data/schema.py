"""Find out from all cells what the columns of a table hold, and what an experiment has to say of them.

What is told of a column is public. What is not told is read off the rows and taken as public: whether it holds numbers,
and the values of a category. Low and high of numbers are never read off. All that lacks is said at once, as the section
[data.table] that would be read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomli_w
from numpy.typing import NDArray
from pyarrow import types

from fedpriv.core.columns import MISSING, OTHER, ColumnSpec
from fedpriv.core.config.data import ColumnConfig, TableConfig
from fedpriv.core.errors import InputError, cut, printable, some_of
from fedpriv.data.files import Arrays, Keys
from fedpriv.data.own import FEW, split_rows, with_people
from fedpriv.data.tables import (
    MISSING_NUMBERS,
    Cells,
    are_numbers,
    encode,
    label_numbers,
    number_cells,
    rows_of,
    separators,
)

MOST_VALUES = 1000  # of a category that nobody has told
_MOST_ODD = 5  # texts among numbers that may mean that a cell is empty
_LEAST = 3  # different texts of a kind of its own
_SHOWN = 2  # of what is wrong for the same reason
_ROW_NAMES = ("", "unnamed: 0", "rownames", "row.names", "...1", "x", "x1", "index", "id")  # in capitals or not
_DAYS = "write numbers into the file, such as of days since the first"
_PLAIN = "write plain numbers into the file, or set kind = 'category'"
_WITH_UNIT = "numbers with a unit"
_NUMBER = r"[+-]?\d[\d.,]*"
# Texts that a person reads as numbers or times, and a network does not: what they are, a pattern, and what to do.
_OTHERS = (
    (
        "amounts of money",
        rf"^[-+(]?\s?([A-Z]{{0,3}}[$€£¥₹]|Rs\.?|[A-Z]{{3}}\s)[\s\pZ]?{_NUMBER}\)?$|^{_NUMBER}[\s\pZ]?[$€£¥₹]$",
        _PLAIN,
    ),
    ("percentages", rf"^{_NUMBER}[\s\pZ]?%$", _PLAIN),
    ("numbers with commas", r"^[+-]?\d{1,3}(,\d{2,3})+(\.\d+)?$|^[+-]?\d{1,3}(\.\d{3})+,\d+$|^[+-]?\d+,\d+$", _PLAIN),
    (
        "numbers in another notation",
        rf"^[+−-]?\d{{1,3}}([ _'’\pZ]\d{{3}})+([.,]\d+)?$|^−{_NUMBER}$|^\({_NUMBER}\)$|^\d[\d.]*-$"
        rf"|^{_NUMBER}[dD][+-]?\d+$",
        _PLAIN,
    ),
    (
        "dates",
        r"^(\pL{3,9}\.?,? )?(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}(\. |[-/. ])(\d{1,2}|\pL{3,9}\.?)[-/. ](\d{4}|\d{2})"
        r"|\pL{3,9}\.? \d{1,2},? (\d{1,2}:\d{2}:\d{2} )?\d{4})([ T].*)?$",
        _DAYS,
    ),
    (
        "times",
        r"^(\d+ days,? )?\d{1,3}:\d{2}(:\d{2})?(\.\d+)?( ?[AaPp][Mm]|Z|[+-]\d{2}:?\d{2})?$|^P(T?\d+(\.\d+)?[YMWDHS])+$",
        _DAYS,
    ),
    (_WITH_UNIT, rf"^{_NUMBER}([\s\pZ]+[^\d\s\pZ]\S*|kg|g|mg|km|m|cm|mm|lbs?|oz|ml|l|k|K|M|MB|GB)$", _PLAIN),
)
_UNIT = rf"^{_NUMBER}(?P<unit>[^\d.,\s\pZ].*)$"  # of a column in which it is the same everywhere


@dataclass(frozen=True)
class Contents:
    """What a column holds."""

    kind: Literal["number", "category", "other"]
    what: str = ""  # of others, or where its rows are named or numbered, so
    instead: str = ""  # of leaving out others
    odd: tuple[str, ...] = ()  # texts among numbers; of others one
    values: int = 0  # different ones, but for marks
    marks: tuple[str, ...] = ()  # texts that count as missing, or in a category might, though nobody says so
    whole: bool = False


@dataclass
class Advice:
    """What has to be said before a table can be read."""

    said: dict[str, list[str]] = field(default_factory=dict)  # sentences, by reason
    settings: dict[str, Any] = field(default_factory=dict)  # of data.table
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # of data.table.columns
    remarks: dict[str, str] = field(default_factory=dict)  # on columns, beside them

    def say(self, reason: str, sentence: str) -> None:
        """Add what is wrong; of the same reason the first few are shown."""
        self.said.setdefault(reason, []).append(sentence)

    def leave_out(self, name: str, what: str, instead: str = "") -> None:
        """Propose that a column is not read."""
        self.columns[name] = {"kind": "ignore"}
        self.remarks[name] = f"{what}: left out" + (f"; or {instead}" if instead else "")

    @property
    def line(self) -> str:
        """All that is wrong."""
        return "; ".join(
            ", ".join(each[:_SHOWN]) + (f" and {len(each) - _SHOWN:,} more such columns" if len(each) > _SHOWN else "")
            for each in self.said.values()
        )


@dataclass(frozen=True, eq=False)
class Schema:
    """What is told of a table, completed by what its rows show."""

    train: Cells
    test: Cells
    table: TableConfig
    key: str  # the column that says whose a row is, or empty
    owner: str = ""  # the column that says which person a row is of, or empty

    def arrays(self) -> Arrays:
        """Return the rows as numbers, if enough is told of them."""
        self.check()
        columns, classes = self.columns(), self.classes
        labels = [label_numbers(part, self.table.label, classes) for part in self.parts]
        rows = [encode(part, columns)[:, None] for part in self.parts]
        keys = Keys.of(*(_owners(part, self.key) for part in self.parts)) if self.key else None
        said = self.notes(), self.warnings()
        arrays = Arrays(rows[0], labels[0], rows[1], labels[1], classes, columns, *said, keys=keys)
        if self.owner:
            tested = self.owner != self.key and self.owner in self.test.names
            tests = _owners(self.test, self.owner, "owner") if tested else ()
            arrays = with_people(arrays, _owners(self.train, self.owner, "owner"), tests, self.train.where)
        return arrays

    @property
    def parts(self) -> tuple[Cells, Cells]:
        """Training and test rows."""
        return self.train, self.test

    @property
    def told(self) -> Mapping[str, ColumnConfig]:
        """What the experiment says, by name."""
        return {column.name: column for column in self.table.columns}

    @cached_property
    def read(self) -> tuple[ColumnConfig, ...]:
        """The columns that are read, in the order of the file."""
        no_feature = {self.table.label, *filter(None, (self.key, self.owner))}  # a column may have the empty name
        others = [name for name in self.train.names if name not in no_feature]
        named = (self.told.get(name, ColumnConfig(name=name)) for name in others)
        return tuple(config for config in named if config.kind != "ignore")

    @cached_property
    def contents(self) -> Mapping[str, Contents]:
        """What each column holds that is read."""
        return {config.name: _contents(self.parts, config) for config in self.read}

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Of the label."""
        return self.table.classes or _values(self.train, self.table.label)

    def columns(self) -> tuple[ColumnSpec, ...]:
        """All columns that are read."""
        return tuple(
            self._number(config) if self._is_number(config) else self._category(config) for config in self.read
        )

    def check(self) -> None:
        """Refuse a table of which not enough is told, with all that lacks."""
        advice = self.advice()
        if advice.said:
            text = f"{self.train.where}: {advice.line}"
            if not advice.settings and not advice.columns:
                raise InputError(text)
            raise InputError(text, hint="in place of the section [data.table]:", paste=self.section(advice))

    def _check_names(self) -> None:
        """Refuse a label or columns that a file lacks."""
        keys = [(what, name) for what, name in (("key", self.key), ("owner", self.owner)) if name]
        for what, name in (("table.label", self.table.label), *keys, *(("table.columns", name) for name in self.told)):
            if name not in self.train.names:
                hint = ""
                if len(self.train.names) == 1:
                    hint = separators(self.train.names[0])
                raise InputError(
                    f"data.{what}: {self.train.where} has no column {name!r}; its columns are "
                    f"{some_of(self.train.names)}",
                    hint=hint,
                )
        lacking = [config.name for config in self.read if config.name not in self.test.names]
        if lacking:
            raise InputError(f"{self.test.where}: lacks the columns {some_of(lacking)}")
        if not self.read:
            raise InputError(f"{self.train.where}: no column but the label is read")

    def advice(self) -> Advice:
        """What lacks."""
        self._check_names()
        advice = Advice()
        for config in self.read:
            found = self.contents[config.name]
            if found.kind == "other":
                what = found.what + "".join(f" ({self._where(config.name, one)})" for one in found.odd)
                advice.say("other", f"column {config.name!r} {what}")
                advice.leave_out(config.name, what, found.instead)
            elif self._is_number(config):
                self._check_number(config, found, advice)
            else:
                self._check_category(config, found, advice)
        if names := [name for name, entry in advice.columns.items() if "low" in entry]:
            column = f"column {names[0]!r} holds" if len(names) == 1 else f"columns {some_of(names)} hold"
            advice.say("bounds", f"{column} numbers: give low and high, which are public constants")
        for sentence in self._gaps(advice.columns) if self.table.missing == "refuse" else ():
            advice.say("missing", sentence)
            advice.settings["missing"] = "own"
        self._check_label(advice)
        return advice

    def _check_number(self, config: ColumnConfig, found: Contents, advice: Advice) -> None:
        name = config.name
        if config.kind is None and config.low is None and found.what and name.lower() in _ROW_NAMES:
            advice.leave_out(name, found.what, "set kind = 'number', low and high")
            advice.say("rows", f"column {name!r} {found.what}")
            return
        if found.odd:
            advice.say("odd", f"{self._where(name, found.odd[0])}, column {name!r}: {cut(found.odd[0])!r} is no number")
            shown = some_of([repr(text) for text in found.odd], _MOST_ODD)
            if config.kind is None and config.low is None and found.values <= FEW:
                advice.columns[name] = {"kind": "category"}
                advice.remarks[name] = f"a category, by {shown}; or kind = 'number', and data.table.empty names {shown}"
                self._check_category(config.model_copy(update={"kind": "category"}), found, advice)
                return
            if len(found.odd) > _MOST_ODD:
                advice.leave_out(name, f"{len(found.odd):,} texts are no numbers", "set kind = 'category'")
                return
            marks = [mark for mark in MISSING_NUMBERS if mark not in self.table.classes]
            marks = marks if self.table.empty is None else list(self.table.empty)
            advice.settings["empty"] = list(dict.fromkeys([*advice.settings.get("empty", marks), *found.odd]))
            advice.remarks[name] = f"{shown} counts as empty; or correct it, or set kind = 'category' or 'ignore'"
        if config.low is None:
            advice.columns[name] = {"low": "?", "high": "?"}

    def _check_category(self, config: ColumnConfig, found: Contents, advice: Advice) -> None:
        name = config.name
        values = config.values or _values(self.train, name)
        taken = [slot for slot in self._slots if slot in values]
        if taken:
            raise InputError(f"{self.train.where}: column {name!r} has a value {taken[0]!r}, which has a meaning")
        if len(values) > MOST_VALUES and not config.values:
            advice.say("values", f"column {name!r} has {len(values):,} different values")
            advice.leave_out(name, f"{len(values):,} different values", "tell its values")
            return
        if found.what and config.kind is None and not config.values:
            advice.leave_out(name, found.what, "set kind = 'category'")
        new = [text for part in self.parts for text in _values(part, name) if text not in values]
        if not new or self.table.unknown == "other":
            return
        if name in advice.columns:
            advice.say("values", f"column {name!r} {found.what}")
            return
        where, known = self._where(name, new[0]), some_of(values)
        advice.say("unknown", f"{where}, column {name!r}: {cut(new[0])!r} is none of the known values ({known})")
        advice.settings["unknown"] = "other"

    def _gaps(self, columns: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """Say where each column that is read, with what is proposed, has its first empty cell, if it has."""
        for config in self.read:
            name, found, kind = config.name, self.contents[config.name], columns.get(config.name, {}).get("kind")
            if kind == "ignore":
                continue
            is_number = self._is_number(config) and kind is None
            gaps = self._rows(name, (None,), is_number)
            if gaps:
                text = gaps[0].text
                why = "the cell is empty" if text is None else f"{text!r} means that the cell is empty"
                yield f"{gaps[0].where}, column {name!r}: {why}"
            elif is_number and found.odd:
                yield f"{self._where(name, found.odd[0])}, column {name!r}: the cell is empty, then"

    def _check_label(self, advice: Advice) -> None:
        name, classes = self.table.label, self.table.classes
        marks = [mark for mark in MISSING_NUMBERS if self.table.empty is None and mark not in classes]
        missing = self._rows(name, (None, *marks))
        if missing:
            what = "empty" if missing[0].text is None else repr(missing[0].text)
            advice.say(
                "label",
                f"{missing[0].where}, column {name!r}: the label is {what}, in {len(missing):,} rows in all: take them "
                "out of the file, or name it in data.table.classes",
            )
        known = self.classes
        every = in_order({text for part in self.parts for text in _values(part, name)} - set(marks))
        rows = len(self.train) + len(self.test) - len(missing)
        is_own = 2 * len(every) > rows and len(every) > _LEAST
        if not classes and (is_own or len(every) > FEW) and all_numbers(every):
            advice.say(
                "classes",
                f"the label {name!r} holds numbers with many values ({len(every):,}); fedpriv classifies: write "
                "ranges of them into the file, or name them in data.table.classes",
            )
        elif not classes and is_own and len(every) > FEW:
            advice.say("classes", f"the label {name!r} has {len(every):,} values in {rows:,} rows; fedpriv classifies")
        elif new := [text for text in every if text not in known]:
            told = "data.table.classes" if classes else "the training rows"
            advice.say("classes", f"{self._where(name, new[0])}, column {name!r}: the label {cut(new[0])!r} is none of "
                       f"{some_of(known)}, of {told}; data.table.classes names all")  # fmt: skip
            advice.settings["classes"] = [*classes, *new] if classes else list(every)

    def section(self, advice: Advice, bounds: Mapping[str, tuple[float, float]] = {}, **settings: Any) -> str:
        """Return the section [data.table] with what lacks, ``"?"`` where only a person knows."""
        entries = {name: column.model_dump(exclude_defaults=True) for name, column in self.told.items()}
        for name, entry in advice.columns.items():
            entries[name] = {"name": name, **({} if "kind" in entry else entries.get(name, {})), **entry}
        for name, (low, high) in bounds.items():
            entries[name] |= {"low": low, "high": high}
        table = self.table.model_dump(mode="json", exclude_defaults=True, exclude_none=True, exclude={"columns"})
        columns = [entries[name] for name in self.train.names if name in entries]
        text = tomli_w.dumps({"data": {"table": {**table, **advice.settings, **settings, "columns": columns}}})
        named = {printable(name) or "the column without a name": remark for name, remark in advice.remarks.items()}
        remarks = [f"# {name}: {remark}" for name, remark in named.items()]
        shown = (each if each.isprintable() or each == "\n" else f"\\U{ord(each):08x}" for each in text.strip())
        return "\n".join([*remarks, "".join(shown)])

    def open_numbers(self, advice: Advice) -> Mapping[str, NDArray[np.float64]]:
        """Columns of numbers whose bounds nobody has told: the training rows' numbers, NaN where there is none."""
        names = [name for name, entry in advice.columns.items() if "low" in entry]
        marked = advice.settings.get("empty", self.table.empty)
        train = Cells(self.train.table, self.train.where, self.train.numbers, None if marked is None else tuple(marked))
        return {name: number_cells(train, name) for name in names}

    def left_out(self, advice: Advice) -> Mapping[str, str]:
        """Why columns are not among :meth:`open_numbers`."""
        reasons = {config.name: "its low and high are given" for config in self.read if config.low is not None}
        reasons |= {config.name: "a category" for config in self.read if not self._is_number(config)}
        reasons |= {name: advice.remarks[name] for name, entry in advice.columns.items() if "kind" in entry}
        ignored = {column.name: "ignored" for column in self.table.columns if column.kind == "ignore"}
        return {**reasons, **ignored, self.table.label: "the label"}

    def notes(self) -> tuple[str, ...]:
        """What is taken as public though nobody has told it."""
        numbers = [config.name for config in self.read if self._is_number(config)]
        shown = [config.name for config in self.read if config.name not in numbers and not config.values]
        shown += [] if self.table.classes else [self.table.label]
        kinds = [
            config.name for config in self.read if config.kind is None and config.low is None and not config.values
        ]
        marks = sorted({mark for name in numbers for mark in self.contents[name].marks})
        marked = [name for name in numbers if self.contents[name].marks]
        notes = []
        if shown:
            notes.append(f"The values of {', '.join(shown)} were read off the training rows, and are taken as public.")
        if kinds or numbers:
            which = "" if not kinds else f"whether {some_of(kinds)} hold numbers"
            whole = "" if not numbers else f"whether numbers are whole in {some_of(numbers)}"
            said = " and ".join(text for text in (which, whole) if text)
            notes.append(f"{said[0].upper()}{said[1:]} was read off all rows, and is taken as public.")
        if marked:
            notes.append(
                f"Cells of {some_of(marked)} that hold {', '.join(map(repr, marks))} count as missing, by default: "
                "data.table.empty says otherwise."
            )
        return tuple(notes)

    def warnings(self) -> tuple[str, ...]:
        """What is read and is probably not meant."""
        lines = []
        for config in self.read:
            found = self.contents[config.name]
            if found.what:
                lines.append(f"column {config.name!r} {found.what}, not a feature: kind = 'ignore' leaves it out")
            if found.marks and not self._is_number(config):
                lines.append(
                    f"column {config.name!r} holds {found.marks[0]!r} as an ordinary value: if it means an empty cell, "
                    "list it in data.table.empty"
                )
            if config.low is not None and config.high is not None:
                cells = number_cells(self.test, config.name)  # test rows are public
                outside = int(((cells < config.low) | (cells > config.high)).sum())
                if 2 * outside > len(cells):
                    lines.append(
                        f"column {config.name!r}: {outside:,} of {len(cells):,} test rows lie outside low = "
                        f"{config.low:g} and high = {config.high:g}, and are clipped to them"
                    )
        named = {
            config.name: config.values or _values(self.train, config.name)
            for config in self.read
            if not self._is_number(config)
        }
        for name, values in named.items():
            if {"train", "test"} <= {value.lower() for value in values}:
                lines.append(
                    f"column {name!r} holds {some_of(values)}, and is a feature: if it says which rows are for "
                    "the test, write these into a file, data.table.test_path; kind = 'ignore' leaves it out"
                )
        for name, values in {**named, self.table.label: self.classes}.items():
            if alike := _alike(values):
                lines.append(f"column {name!r}: {alike} differ only in capitals, and count as different values")
        return tuple(lines)

    @property
    def _slots(self) -> tuple[str, ...]:
        return (MISSING,) * (self.table.missing == "own") + (OTHER,) * (self.table.unknown == "other")

    def _is_number(self, config: ColumnConfig) -> bool:
        return self.contents[config.name].kind == "number"

    def _category(self, config: ColumnConfig) -> ColumnSpec:
        values = config.values or _values(self.train, config.name)
        return ColumnSpec(config.name, "category", (*values, *self._slots))

    def _number(self, config: ColumnConfig) -> ColumnSpec:
        whole, optional = self.contents[config.name].whole, self.table.missing == "own"
        return ColumnSpec(config.name, "number", (), config.low or 0.0, config.high or 0.0, whole, optional)

    def _where(self, name: str, text: str) -> str:
        """Where a text stands first."""
        return self._rows(name, (text,))[0].where

    def _rows(self, name: str, texts: Sequence[str | None], is_number: bool = False) -> list["_Cell"]:
        """The cells that are one of these texts, in the order of the file, training rows first where they have one."""
        found = []
        for part in self.parts:
            hits = pc.is_in(part.column(name, is_number), pa.array(texts, pa.string())).to_numpy(zero_copy_only=False)
            raw = part.column(name).to_pylist() if hits.any() else []
            other = part.where != self.train.where
            found += [_Cell(other, int(part.numbers[row]), raw[row], part.where) for row in np.flatnonzero(hits)]
        return sorted(found, key=lambda cell: (cell.is_other, cell.number))


def schema_of(parts: Sequence[Cells], table: TableConfig, key: str, owner: str) -> Schema:
    """Return the schema of training and test rows; of one part, a share of rows, or persons, is drawn as test rows."""
    if len(parts) > 1:
        return Schema(parts[0], parts[1], table, key, owner)
    (cells,) = parts
    owners = _owners(cells, key) if key and key in cells.names else None  # a column may have the empty name
    people = _owners(cells, owner, "owner") if owner not in ("", key) and owner in cells.names else None
    train, test = split_rows(owners, len(cells), table.test_share, cells.where, "data.table.test_share", people)
    return Schema(rows_of(cells, train), rows_of(cells, test), table, key, owner)


def _owners(cells: Cells, key: str, setting: str = "key") -> list[str]:
    """Whose each row is."""
    owners: list[str | None] = cells.column(key).to_pylist()
    marks = MISSING_NUMBERS if cells.empty is None else ()
    missing = next((row for row, owner in enumerate(owners) if owner is None or owner.strip() in marks), None)
    if missing is not None:
        what = repr(owners[missing]) if owners[missing] else "empty"
        raise cells.refused(missing, key, f"the cell is {what}, and data.{setting} says whose a row is by it")
    return [owner or "" for owner in owners]


class _Cell(NamedTuple):
    is_other: bool  # in a file of test rows alone
    number: int  # of its row
    text: str | None
    file: str

    @property
    def where(self) -> str:
        return f"row {self.number:,}" + (f" of {self.file}" if self.is_other else "")


@dataclass(frozen=True, eq=False)
class _Texts:
    """The different texts of a column, (n,), and of each how often it occurs and what it is."""

    texts: pa.Array
    counts: NDArray[np.int64]
    marks: NDArray[np.bool_]  # of missing cells
    numbers: NDArray[np.bool_]
    rows: int  # of the column, empty cells included

    @classmethod
    def of(cls, cells: pa.ChunkedArray, has_marks: bool) -> Self:
        """Count the texts of a column; in some files only empty cells are missing."""
        counted = pc.value_counts(cells.drop_null())
        texts, counts = counted.field("values"), counted.field("counts").to_numpy()
        marks = pc.is_in(texts, pa.array(MISSING_NUMBERS)).to_numpy(zero_copy_only=False) & has_marks
        return cls(texts, counts, marks, are_numbers(texts).to_numpy(zero_copy_only=False), len(cells))

    @property
    def others(self) -> NDArray[np.bool_]:
        """Which are neither marks nor numbers."""
        return ~self.marks & ~self.numbers

    def listed(self, chosen: NDArray[np.bool_]) -> tuple[str, ...]:
        """Some of the texts."""
        return tuple(self.texts.filter(pa.array(chosen)).to_pylist())

    def are_most(self, chosen: NDArray[np.bool_]) -> bool:
        """Whether these are most of the cells that are there, or most of their texts."""
        cells, there = self.counts, ~self.marks
        return bool(2 * cells[chosen].sum() > cells[there].sum() or 2 * chosen.sum() > there.sum())


def _contents(parts: Sequence[Cells], config: ColumnConfig) -> Contents:
    """Look at all cells of a column."""
    name, kind = config.name, parts[0].type(config.name)
    told = config.kind or ("category" if config.values else "number" if config.low is not None else None)
    if told is None and (words := _worded(kind)):
        return Contents("other", f"holds {words[0]}", words[1])
    try:
        found = _Texts.of(pa.chunked_array([part.column(name) for part in parts]), parts[0].empty is None)
    except InputError as error:
        return Contents("other", f"cannot be read: {error}")
    if not len(found.texts):
        return Contents("other", "is empty in all rows")
    if told != "category" and (neither := _neither(found)) is not None:
        return neither
    if told == "number" and found.others.any() and not found.numbers.any():
        return Contents("other", "holds no number", "set kind = 'category'", odd=found.listed(found.others)[:1])
    if told == "number" or (told is None and found.are_most(found.numbers) and not _is_category(kind)):
        return _numbers(found, name)
    is_own = len(found.texts) > FEW and 2 * len(found.texts) > found.rows
    what = f"has {len(found.texts):,} values in {found.rows:,} rows" if is_own else "" if name else "has no name"
    return Contents("category", what, marks=found.listed(found.marks))


def _neither(found: _Texts) -> Contents | None:
    """A column that holds neither numbers nor categories; ``None``: it does."""
    if found.marks.all():
        return Contents("other", f"holds nothing but {', '.join(map(repr, found.listed(found.marks)))}")
    if found.others.sum() < _LEAST:  # of thousands of columns of numbers each pattern would take a minute
        return None
    for what, pattern, instead in _OTHERS:
        hits = pc.match_substring_regex(found.texts, pattern).to_numpy(zero_copy_only=False) & found.others
        if what == _WITH_UNIT:
            hits |= _same_unit(found.texts) & found.others
        if hits.sum() >= _LEAST and found.are_most(hits | found.numbers):
            one = found.listed(hits)[0]
            return Contents("other", f"holds {what} such as {cut(one)!r}", instead, odd=(one,))
    return None


def _numbers(found: _Texts, name: str) -> Contents:
    """A column of numbers; of whole ones that number the rows in any order, and of one without a name, that is said."""
    values = pc.cast(found.texts.filter(pa.array(found.numbers)), pa.float64()).to_numpy()
    whole = bool((values == np.rint(values)).all())
    is_rows = whole and len(values) == found.rows > 1 and np.ptp(values) == found.rows - 1
    what = "numbers the rows" if is_rows else "" if name else "has no name"
    marks, there = found.listed(found.marks), int((~found.marks).sum())
    return Contents("number", what, odd=found.listed(found.others), values=there, marks=marks, whole=whole)


def _same_unit(texts: pa.Array) -> NDArray[np.bool_]:
    """Which texts are a number and the same letters or signs behind it."""
    units = pc.struct_field(pc.extract_regex(texts, _UNIT), "unit")
    has: NDArray[np.bool_] = units.is_valid().to_numpy(zero_copy_only=False)
    return has & (len(units.unique().drop_null()) == 1)


def _worded(kind: pa.DataType) -> tuple[str, str] | None:
    """What the file's own type says that is neither a number nor a text, and what to do."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if types.is_timestamp(kind) or types.is_date(kind):
        return "dates" if types.is_date(kind) else "timestamps", _DAYS
    if types.is_duration(kind) or types.is_time(kind):
        return "durations" if types.is_duration(kind) else "times", _DAYS
    if types.is_nested(kind):
        return str(kind), "write a column for each number of it into the file"
    return None


def _is_category(kind: pa.DataType) -> bool:
    return bool(types.is_dictionary(kind) or types.is_boolean(kind))


def _values(cells: Cells, name: str) -> tuple[str, ...]:
    """All that a column holds, in order."""
    return in_order(text for text in cells.column(name).unique().to_pylist() if text is not None)


def in_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Sorted, as numbers where all are."""
    found = sorted(texts)
    return tuple(sorted(found, key=float) if all_numbers(found) else found)


def _alike(values: Iterable[str]) -> str:
    """The first values that are the same text but for capitals; empty: there are none."""
    alike: dict[str, list[str]] = {}
    for value in values:
        alike.setdefault(value.casefold(), []).append(value)
    return " and ".join(next((list(map(repr, each)) for each in alike.values() if len(each) > 1), ()))


def all_numbers(texts: Sequence[str]) -> bool:
    """Whether there are texts, each of which is a number."""
    return bool(texts) and bool(are_numbers(pa.array(texts, pa.string())).to_numpy(zero_copy_only=False).all())
