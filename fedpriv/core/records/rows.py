"""The records of a table's rows that attacks read out of uploads, cell by cell."""

from dataclasses import dataclass

from fedpriv.core.records.reading import Record

NUMBER_TOLERANCE = 0.01
"""By how much of its column's range a number may be off in a row that counts as recovered."""


@dataclass(frozen=True)
class RowScore(Record):
    """How well the cells of one row of a table were read.

    Attributes:
        categories: name of a column of categories -> whether its value is right.
        numbers: name of a column of numbers -> the error as a share of the column's range, from 0 to 1; 1 where a
            number is told and there is none, or the other way round.
    """

    categories: dict[str, bool]
    numbers: dict[str, float]

    @property
    def share_right(self) -> float | None:
        """Of the categories."""
        return sum(self.categories.values()) / len(self.categories) if self.categories else None

    @property
    def mean_error(self) -> float | None:
        """Of the numbers."""
        return sum(self.numbers.values()) / len(self.numbers) if self.numbers else None

    @property
    def is_recovered(self) -> bool:
        """Whether every category is right, and every number within :data:`NUMBER_TOLERANCE` of its column's range."""
        return all(self.categories.values()) and all(error <= NUMBER_TOLERANCE for error in self.numbers.values())


@dataclass(frozen=True)
class RowResult(Record):
    """What an attack read of all rows, column by column.

    Attributes:
        categories: name of a column of categories -> the share of rows in which its value is right.
        numbers: name of a column of numbers -> the median error as a share of the column's range.
        share_right: of all categories of all rows; ``None`` where there are none.
        median_error: of the rows' mean errors; ``None`` where there are no numbers.
    """

    categories: dict[str, float]
    numbers: dict[str, float]
    share_right: float | None
    median_error: float | None
