"""The section [data.table]: what the columns of a file of your own are."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.settings import Epsilon, Real, Settings, absent

_SHARE = Annotated[Real, Field(gt=0, lt=1)]


class ColumnConfig(Settings):
    """One column, ``[[data.table.columns]]``; what is not told is inferred."""

    name: str = Field(description="as in the file's header")
    kind: Literal["category", "number", "ignore"] | None = Field(
        None, description="unset: number if most cells are numbers, else category; ignore: the column is not read"
    )
    values: tuple[str, ...] = Field((), description="all values of a category; none: the values of the training rows")
    low: Real | None = Field(None, description="number that is scaled to 0, a public constant; smaller ones are cut")
    high: Real | None = Field(None, description="number that is scaled to 1, a public constant; larger ones are cut")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise InputError(f"column {self.name!r}: give low and high together")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise InputError(f"column {self.name!r}: low = {self.low:g} is not below high = {self.high:g}")
        if self.low is not None and self.high is not None and not math.isfinite(self.high - self.low):
            raise InputError(f"column {self.name!r}: high - low is no finite number")
        if self.values and (self.low is not None or self.kind not in (None, "category")):
            raise InputError(f"column {self.name!r}: values are of categories, low and high of numbers")
        if self.low is not None and self.kind not in (None, "number"):
            raise InputError(f"column {self.name!r}: low and high are of numbers; given kind = {self.kind!r}")
        if len(set(self.values)) < len(self.values):
            raise InputError(f"column {self.name!r}: a value is given twice")
        return self


class TableConfig(Settings):
    """How rows of a CSV or Parquet file become numbers."""

    label: str = Field(description="the column that is predicted")
    classes: tuple[str, ...] = Field(
        (), description="values of the label; none: the values of the training rows, sorted"
    )
    columns: tuple[ColumnConfig, ...] = Field((), description="settings of columns; others are inferred")
    test_path: str = Field("", description="file with the test rows; empty: test_share of the rows, drawn once for all")
    test_share: _SHARE = Field(0.2, description="share of the rows that is the test set, without test_path")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(",", description="of the cells of a CSV file")
    empty: tuple[str, ...] | None = Field(
        None,
        exclude_if=absent,
        description="texts that mean that a cell is empty; unset: none at all, and where a column is numbers otherwise "
        "NA, N/A, NaN, nan, NULL, ? and .",
    )
    missing: Literal["refuse", "own"] = Field(
        "refuse", description="empty cells. own: a value of its own; for a number, also a second feature that says so"
    )
    unknown: Literal["refuse", "other"] = Field(
        "refuse", description="values of a category that are not listed or not in the training rows. other: one value"
    )
    bounds_epsilon: Epsilon | None = Field(
        None, description="pure epsilon of low and high here, if fedpriv data --bounds made them of the rows"
    )

    @field_validator("delimiter")
    @classmethod
    def _is_read_as_one_byte(cls, delimiter: str) -> str:
        if delimiter != "\t" and (not " " <= delimiter <= "~" or delimiter in "\"'"):
            raise InputError("expected one printable ASCII character, or a tab, and no quote")
        return delimiter

    @field_validator("classes")
    @classmethod
    def _each_class_once(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for number, name in enumerate(classes) if name in classes[:number]]
        if twice:
            raise InputError(f"{twice[0]!r} is told twice")
        return classes

    @model_validator(mode="after")
    def _each_column_once(self) -> Self:
        names = [column.name for column in self.columns]
        twice = [name for number, name in enumerate(names) if name in names[:number]]
        if twice:
            raise InputError(f"column {twice[0]!r} is told twice")
        if self.label in names:
            raise InputError(f"column {self.label!r} is the label; give its values as classes")
        return self
