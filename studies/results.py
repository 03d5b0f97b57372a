"""Tables of the studies: CSV for docs/results, figures with their intervals, and numbers that papers have published."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t

from fedpriv.core.figure import Interval

_PUBLISHED = Path(__file__).parent / "published"


class Table:
    """Rows of text under their heads; as a string it is CSV, as docs/results keeps it."""

    def __init__(self, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        self.heads, self.rows = tuple(heads), tuple(map(tuple, rows))

    def __str__(self) -> str:
        """Return CSV."""
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows((self.heads, *self.rows))
        return written.getvalue()


def with_interval(estimate: Interval | None) -> str:
    """Return a share in percent with one decimal, and its interval where there is one; empty without one."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return in_percent(estimate)
    return f"{100 * estimate.value:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def student(values: Sequence[float | None], places: str = ".1%", factor: float = 1.0) -> str:
    """Return a mean with its 95 % interval (Student's t), each number in this format after multiplication."""
    numbers = factor * np.array(values, np.float64)
    half = t.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / len(numbers) ** 0.5
    middle, low, high = (format(numbers.mean() + off, places) for off in (0, -half, half))
    return f"{middle} [{low}, {high}]"


def in_percent(estimate: Interval | None) -> str:
    """Return a share in percent with one decimal; empty without one."""
    return "" if estimate is None else f"{100 * estimate.value:.1f}"


def published(name: str) -> list[dict[str, str]]:
    """Return the rows of published/NAME.csv."""
    with (_PUBLISHED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
