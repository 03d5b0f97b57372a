"""What the columns of a table are, how a row becomes numbers from 0 to 1, and how these are read back."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from fedpriv.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MISSING, OTHER = "(missing)", "(other)"
LEADS, SLENDER = 12, 4  # of time series: how many lie beside each other at most, and times their number the least steps

Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class ColumnSpec:
    """A public description of one column; nothing in it may be computed from the rows unless that is accounted for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str  # what it is called
    # category (one feature a value, one of them 1), flag (one feature, 0 or 1) or number (one feature, scaled from
    # `low` and `high` to 0 and 1, and cut there)
    kind: Literal["category", "flag", "number"]
    values: tuple[str, ...] = ()  # of a category, one a feature; of a flag, what 0 and 1 mean; of a number none
    low: Finite = 0.0  # the number that becomes 0
    high: Finite = 1.0  # the number that becomes 1, above `low`
    whole: bool = False  # whether numbers are integers
    # whether a number has a second feature, which is 1 where there is no number. The first is then 0.5.
    optional: bool = False

    def __post_init__(self) -> None:
        if self.kind == "category" and (len(self.values) < 1 or len(set(self.values)) < len(self.values)):
            raise InputError(f"column {self.name!r}: a category needs distinct values, at least one")
        if self.kind == "flag" and len(self.values) != 2:
            raise InputError(f"column {self.name!r}: a flag has two values")
        if self.kind == "number" and not self.low < self.high:
            raise InputError(f"column {self.name!r}: low = {self.low:g} is not below high = {self.high:g}")

    @property
    def width(self) -> int:
        """Features."""
        return len(self.values) if self.kind == "category" else 1 + self.optional

    @property
    def is_number(self) -> bool:
        """Whether an error has a size."""
        return self.kind == "number"

    @property
    def span(self) -> float:
        """From ``low`` to ``high``, in the column's own unit."""
        return self.high - self.low

    def text(self, code: float) -> str:
        """A decoded cell for a person: the value's name, or the number; see :func:`decode`."""
        if not self.is_number:
            return self.values[int(code)]
        if math.isnan(code):
            return MISSING
        return f"{code:z.0f}" if self.whole else f"{code:z.4g}"


def features_of(columns: Sequence[ColumnSpec]) -> int:
    """Numbers in one row."""
    return sum(column.width for column in columns)


def slices(columns: Sequence[ColumnSpec]) -> Iterator[tuple[ColumnSpec, slice]]:
    """Each column and its features."""
    begin = 0
    for column in columns:
        yield column, slice(begin, begin + column.width)
        begin += column.width


def groups(columns: Sequence[ColumnSpec]) -> tuple[slice, ...]:
    """The features of which exactly one is 1: those of each category."""
    return tuple(where for column, where in slices(columns) if column.kind == "category")


def decode(columns: Sequence[ColumnSpec], rows: "NDArray[np.floating]") -> "NDArray[np.float64]":
    """Read cells (N, columns) off rows on [0, 1], such as reconstructions; a number that is not told is NaN."""
    import numpy as np

    cells = np.empty((len(rows), len(columns)))
    for place, (column, where) in enumerate(slices(columns)):
        part = np.asarray(rows[:, where], dtype=np.float64)
        cells[:, place] = part.argmax(axis=1) if column.kind == "category" else _single(column, part)
    return cells


def _single(column: ColumnSpec, part: "NDArray[np.float64]") -> "NDArray[np.float64]":
    import numpy as np

    if column.kind == "flag":
        return (part[:, 0] >= 0.5).astype(np.float64)
    numbers = column.low + column.span * part[:, 0].clip(0, 1)
    if column.whole:
        numbers = np.rint(numbers)
    return np.where(part[:, -1] >= 0.5, np.nan, numbers) if column.optional else numbers


def cell_texts(columns: Sequence[ColumnSpec], row: "NDArray[np.floating]") -> tuple[str, ...]:
    """One row (features,) for a person, a text a column."""
    return tuple(column.text(code) for column, code in zip(columns, decode(columns, row[None])[0], strict=True))


def is_signal(height: int, width: int) -> bool:
    """Whether examples of this size are time series: one in each row or column, as many as an ECG has leads at most."""
    short, long = sorted((height, width))
    return short <= LEADS and long >= SLENDER * short


def signal_hint(shape: tuple[int, int, int]) -> str:
    """Say how a network takes signals and rows, where images of this shape (C, H, W) may be some; else nothing."""
    if not is_signal(*shape[1:]):
        return ""
    row = "a row of a table is (B, 1, 1, features): x.flatten(1) suits Linear; " if shape[:2] == (1, 1) else ""
    return row + (
        "a signal is (B, C, 1, T), of arrays (N, C, T) or (N, T, C) by data.channels: x.squeeze(2) suits Conv1d, "
        "x.squeeze(2).transpose(1, 2) an LSTM with batch_first"
    )


def worded(text: str, kind: str) -> str:
    """Return a sentence about images or pictures as one about examples of this kind: image, signal, row, sentence."""
    if kind == "image":
        return text
    return re.sub(r"\b(?P<article>[Aa]n )?(?:image|picture)(?P<many>s?)\b", partial(_as_kind, kind), text)


def _as_kind(kind: str, found: re.Match[str]) -> str:
    article = "" if found["article"] is None else found["article"].replace("n", "")
    return f"{article}{kind}{found['many']}"
