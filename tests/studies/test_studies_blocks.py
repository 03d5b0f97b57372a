"""What is kept of the sweeps over block sizes gives the table and the figure in the documentation again."""

from pathlib import Path
from statistics import fmean

import pytest

from fedpriv.core.report.drawing import to_svg
from studies.blocks import Study, drawn, small_tables, study_of, table
from studies.kept import records_of
from tests.drawings import numbers_of_svg

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of([records_of(path) for path in sorted((DOCS / "results").glob("blocks-*.csv.gz"))])


def test_the_kept_results_give_the_tables_of_the_pages(study: Study) -> None:
    names = ("blocks", "blocks-accuracy-percent", "blocks-epsilon", "blocks-membership-auc", "blocks-reconstruction")
    for name, made in zip(names, (table(study), *small_tables(study)), strict=True):
        assert str(made) == (DOCS / "results" / f"{name}.csv").read_text(encoding="utf-8")


def test_the_kept_results_give_the_figure(study: Study) -> None:
    """Every number of the drawing, to half a pixel: another matplotlib may round otherwise."""
    made = to_svg(drawn(study), transparent=False)[0]
    kept = (DOCS / "images" / "blocks.svg").read_bytes()
    assert numbers_of_svg(made) == pytest.approx(numbers_of_svg(kept), abs=0.5)


def test_rows_of_the_page_say_what_the_files_say(study: Study) -> None:
    """One row, put together here from the records themselves."""
    key = ("size:16", 10.0)
    trained, audited = study.accuracy[key].records, study.membership["attack-r"][key].records
    (attacked,) = study.uploads["iga"][key].records
    (row,) = [row for row in table(study).rows if row[:2] == ("16", "10")]
    accuracies = [each.accuracy for each in trained if each.accuracy is not None]
    epsilons = {each.epsilon for each in trained if each.epsilon is not None}
    assert (len(accuracies), len(epsilons)) == (3, 1)
    assert row[3].startswith(f"{100 * fmean(accuracies):.1f} (") and row[4] == f"{epsilons.pop():.4g}"
    areas = [one.auc for each in audited for one in each.memberships if one.attack == "attack-r"]
    assert len(areas) == 5
    area = 100 * fmean(areas)
    learnt = 100 * fmean(each.accuracy for each in audited if each.accuracy is not None)
    (one,) = [one for one in attacked.reconstruction if one.attack == "iga"]
    assert row[row.index(f"{learnt:.1f}") - 1].startswith(f"{area:.1f} (")
    assert f"{one.mse:.3f} ({one.recovered})" in row
