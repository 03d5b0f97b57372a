"""Show measured figures on the site: a link to results/NAME.csv on a line of its own becomes the table itself.

Without the site the link leads to the file itself. ``results/measurements.csv`` says how each one was made.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_LINK = re.compile(r"^\[([^\]\n]+)\]\(results/([\w-]+)\.csv\)$", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?%|x)?")


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of results/NAME.csv."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put each table in the place of its link."""
    return _LINK.sub(lambda found: f"{_table(found[2])}\n\n{_origin(found[1], found[2])}", markdown)


def _table(name: str) -> str:
    rows = rows_of(name) if name != "measurements" else list(map(_linked, rows_of(name)))
    sides = {head: "--:" if _is_numeric(row[head] for row in rows) else "---" for head in rows[0]}
    lines = (sides, sides.values(), *(row.values() for row in rows))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _linked(row: dict[str, str]) -> dict[str, str]:
    """A measurement with links to its figures and its page, which shows the command below them."""
    file, page = f"[{row['what']}](results/{row['file']}.csv)", f"[{row['page']}]({row['page']}.md)"
    return {"what": file, "page": page, **{key: row[key] for key in ("date", "versions", "device")}}


def _is_numeric(cells: Iterable[str]) -> bool:
    return all(_NUMBER.match(cell) or not cell for cell in cells)


def _origin(title: str, name: str) -> str:
    """Say under a table how it was made."""
    made = {row["file"]: row for row in rows_of("measurements")}.get(name)
    link = f"[{title}, as CSV](results/{name}.csv)"
    if made is None:
        return link
    parts = (link, f"`{made['command']}`" if made["command"] else "", made["date"], made["versions"], made["device"])
    return f"<small>{'; '.join(part for part in parts if part)}</small>"
