"""Tables of the studies: Markdown, figures with their intervals, and the numbers that papers have published."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedpriv.core.records import Interval

_PUBLISHED = Path(__file__).parent / "published"


def markdown(heads: Sequence[str], kinds: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; ``kinds`` has l or r for each column, and its last one is for all others."""
    sides = [{"l": "---", "r": "--:"}[kind] for kind in kinds.ljust(len(heads), kinds[-1])]
    shown = ([cell.replace("|", "/") for cell in row] for row in rows)
    return [f"| {' | '.join(cells)} |" for cells in (heads, sides, *shown)]


def with_interval(estimate: Interval | None, factor: float, places: int) -> str:
    """Return an estimate times a factor, with its interval where there is one; empty without an estimate."""
    if estimate is None:
        return ""
    text = f"{factor * estimate.value:.{places}f}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({factor * estimate.low:.{places}f} to {factor * estimate.high:.{places}f})"


def in_percent(estimate: Interval | None) -> str:
    """Return a share in percent with one decimal; empty without one."""
    return "" if estimate is None else f"{100 * estimate.value:.1f}"


def published(name: str) -> list[dict[str, str]]:
    """Return the rows of published/NAME.csv."""
    with (_PUBLISHED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
