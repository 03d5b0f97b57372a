"""What is kept of the sweeps at equal privacy gives the documentation's tables and figure again."""

from pathlib import Path

import pytest

from fedpriv.core.report.drawing import to_svg
from studies.equal_privacy import drawn, of_batches, table
from studies.kept import records_of
from tests.drawings import numbers_of_svg

DOCS = Path(__file__).parents[2] / "docs"
KEPT = DOCS / "results"


@pytest.mark.parametrize(
    ("kept", "name"),
    [("equal-privacy", "equal-privacy-accuracy"), ("equal-privacy-rates", "equal-privacy-learning-rates")],
)
def test_the_kept_results_give_the_tables_of_the_page(kept: str, name: str) -> None:
    assert str(table(of_batches(KEPT / f"{kept}.csv.gz"))) == (KEPT / f"{name}.csv").read_text("utf-8")


def test_the_kept_results_give_the_figure() -> None:
    """Every number of the drawing, to half a pixel: another matplotlib may round otherwise."""
    settings = of_batches(KEPT / "equal-privacy.csv.gz")
    made = to_svg(drawn(settings), transparent=False)[0]
    kept = (DOCS / "images" / "equal-privacy.svg").read_bytes()
    assert numbers_of_svg(made) == pytest.approx(numbers_of_svg(kept), abs=0.5)


def test_means_of_the_table_are_of_five_runs() -> None:
    """One row, put together here from the records themselves."""
    records = [
        record
        for record in records_of(KEPT / "equal-privacy.csv.gz")
        if record.mechanism == "vmf" and record.settings["training.batch_size"] == 1
    ]
    assert sorted(record.seed for record in records) == [2, 3, 4, 5, 6]
    mean = sum(record.accuracy or 0.0 for record in records) / 5
    rows = table(of_batches(KEPT / "equal-privacy.csv.gz")).rows
    (row,) = [row for row in rows if row[0] == "1" and row[1].startswith("directional")]
    assert row[-1].startswith(f"{100 * mean:.1f} (")


@pytest.mark.parametrize("batch", [1, 16, 256])
@pytest.mark.parametrize("mechanism", ["gaussian", "vmf"])
def test_each_rate_was_the_best_and_not_at_an_end_of_those_tried(mechanism: str, batch: int) -> None:
    def rated(name: str) -> dict[float, float]:
        return {
            float(record.settings["training.learning_rate"]): record.accuracy or 0.0
            for record in records_of(KEPT / f"{name}.csv.gz")
            if record.mechanism == mechanism and record.settings["training.batch_size"] == batch
        }

    tried, (chosen,) = rated("equal-privacy-rates"), rated("equal-privacy")
    assert chosen == max(tried, key=lambda rate: tried[rate])
    assert min(tried) < chosen < max(tried)
