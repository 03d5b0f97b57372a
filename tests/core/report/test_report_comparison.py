"""The comparison of many trials: estimates, fronts, plots and the page."""

import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp
from test_report_page import parse

from benchmarks.comparison import synthetic_records as synthetic
from fedpriv.core.errors import InputError
from fedpriv.sweep.comparison import (
    Chosen,
    choose_attacks,
    columns_of,
    estimate,
    pareto_front,
    settings_of,
    sources_of,
)
from fedpriv.sweep.page import PROVEN, draw_tradeoff, render_comparison, tradeoff_plot, tradeoffs, write_comparison
from fedpriv.sweep.record import TrialRecord

CHOSEN = Chosen("iga", {"membership": "lira-online"})


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_fronts_are_those_of_brute_force(count: int) -> None:
    rng = np.random.default_rng(count)
    for distinct in (3, 1000):
        points = [(float(a), float(b)) for a, b in rng.integers(0, distinct, (count, 2))]
        wanted = {
            i
            for i, (cost, gain) in enumerate(points)
            if not any(c <= cost and g >= gain and (c < cost or g > gain) for c, g in points)
        }
        front = pareto_front(points)
        assert set(front) == wanted and len(front) == len(wanted)
        assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


def test_from_three_seeds_on_the_interval_is_students() -> None:
    values = [0.71, 0.74, 0.70, 0.79]
    found = estimate([(value, 0.0, 1.0) for value in values])
    assert found is not None
    wanted = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))
    assert found.value == pytest.approx(statistics.fmean(values))


@pytest.mark.parametrize(
    ("values", "most", "ends"),
    [
        ([0.033, 0.086, 0.061], 1.0, (0.0, None)),
        ([0.99, 0.95, 1.0], 1.0, (None, 1.0)),
        ([0.01, 0.9, 1.7], math.inf, (0.0, None)),
    ],
)
def test_an_interval_does_not_leave_the_figures_range(
    values: list[float], most: float, ends: tuple[float | None, float | None]
) -> None:
    """No accuracy below 0 or above 1, no negative MSE; an end inside of the range stays Student's."""
    found = estimate([(value, None, None) for value in values], most)
    assert found is not None
    wanted = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found.low == pytest.approx(wanted.low if ends[0] is None else ends[0])
    assert found.high == pytest.approx(wanted.high if ends[1] is None else ends[1])
    assert wanted.low < 0 or wanted.high > most


def test_of_fewer_seeds_the_interval_is_the_runs_own() -> None:
    found = estimate([(0.7, 0.6, 0.8), (0.8, 0.75, 0.85)])
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(0.75), 0.6, 0.85)
    lacking = estimate([(0.7, None, None), (0.8, 0.75, 0.85)])
    assert lacking is not None and (lacking.low, lacking.high) == (None, None)
    assert estimate([(None, None, None)]) is None
    assert estimate([]) is None


def test_trials_that_differ_in_their_seed_only_are_one_setting() -> None:
    records = synthetic(40, seeds=4)
    same = [record.model_copy(update={"mechanism": "none", "blocks": None}) for record in records]
    settings = settings_of(same, CHOSEN)
    assert [len(setting.records) for setting in settings] == [4] * 10
    failed = [records[0].model_copy(update={"status": "failed"}), *records[1:]]
    assert sum(len(setting.records) for setting in settings_of(failed, CHOSEN)) == 39


def test_a_run_made_again_is_no_other_seed() -> None:
    """Three copies would have an interval of no length after Student."""
    one = synthetic(1)[0]
    copies = [one.model_copy(update={"trial": number}) for number in (1, 2, 3)]
    other = one.model_copy(update={"trial": 4, "seed": one.seed + 1})
    found = settings_of([*copies, other], CHOSEN)
    assert [[record.trial for record in setting.records] for setting in found] == [[1, 4], [2], [3]]


def test_a_whole_number_is_the_same_setting_with_a_point_and_without() -> None:
    """The table of a sweep over 1 and 0.5 gives both back as fractions."""
    one = synthetic(1)[0]
    levels = (("a", 1), ("a", 1.0), ("a", 2), ("a", "1"), ("b", 1))
    records = [
        one.model_copy(update={"trial": place, "seed": place, "settings": {key: value}})
        for place, (key, value) in enumerate(levels)
    ]
    found = settings_of(records, CHOSEN)
    assert [[record.trial for record in setting.records] for setting in found] == [[0, 1], [2], [3], [4]]


def test_the_strongest_attack_on_average_is_plotted_for_all() -> None:
    records = synthetic(20)
    assert choose_attacks(records) == CHOSEN
    assert choose_attacks(records, attacks={"membership": "attack-r"}) == Chosen("iga", {"membership": "attack-r"})
    assert choose_attacks([]) == Chosen()
    with pytest.raises(InputError, match="no trial has a membership attack 'rmia'; there are: attack-p, attack-r"):
        choose_attacks(records, attacks={"membership": "rmia"})


def test_a_lucky_attack_in_few_trials_is_not_the_strongest() -> None:
    first, *rest = synthetic(5)
    lucky = first.memberships[0].model_copy(update={"attack": "lucky", "auc": 1.0})
    assert choose_attacks([first.model_copy(update={"memberships": (*first.memberships, lucky)}), *rest]) == CHOSEN


@pytest.mark.parametrize("number", range(3))
def test_each_mechanism_has_a_colour_and_a_marker_of_its_own(number: int) -> None:
    records = synthetic(40)
    settings = [one for one in settings_of(records, CHOSEN) if one.facet[1] == "lenet"]
    series = list(dict.fromkeys(setting.series for setting in settings))
    plot = tradeoff_plot(settings, tradeoffs(columns_of(records, CHOSEN))[number], series)
    assert plot is not None
    light, dark = plot.light.decode(), plot.dark.decode()
    shown = {"#0072b3", "#d55e00"} | ({"#1d2127"} if number < 2 else set())
    assert set(re.findall("#[0-9a-f]{6}", light)) >= shown
    assert not {colour.lower() for colour in re.findall("#[0-9a-fA-F]{6}", dark)} & shown
    # Markers of the three kinds of blocks: as many shapes as series in the legend.
    paths = re.findall(r'<path id="m[0-9a-f]+" d="([^"]+)"', light)
    assert len({path for path in paths if path.count("\n") > 2}) >= len(series) - (number == 2)
    assert "directional (VMF), whole gradient" in light


@pytest.mark.parametrize("least", [0.1, 3.0, 7.96, 8.0, 99_999.0])
@pytest.mark.parametrize("factor", [1.0, 1.0001, 1.01, 1.3, 1.99, 2.0, 4.0, 900.0, 1e6])
def test_the_ticks_of_proven_epsilon_are_distinct(least: float, factor: float) -> None:
    proven = [one for one in settings_of(synthetic(24), CHOSEN) if one.epsilon and one.accuracy][:2]
    pair = [replace(one, epsilon=epsilon) for one, epsilon in zip(proven, (least, least * factor), strict=True)]
    axes = Figure().subplots()
    draw_tradeoff(axes, pair, PROVEN, [one.series for one in pair])
    left, right = axes.get_xlim()
    shown = [tick for tick in axes.xaxis.get_majorticklocs() if left <= tick <= right]
    labels = axes.xaxis.get_major_formatter().format_ticks(shown)
    assert left < least <= least * factor < right
    assert len(labels) == len(set(labels)) > 0


def test_settings_without_both_figures_have_no_plot() -> None:
    bare = [record for record in synthetic(10) if record.mechanism == "none"]
    assert tradeoff_plot(settings_of(bare, CHOSEN), PROVEN, [("none", "")]) is None


def test_the_page_names_every_setting_and_its_fronts() -> None:
    records = synthetic(30)
    root = parse(render_comparison(records, CHOSEN, "A <b> title", "fedpriv sweep x.toml"))
    rows = [row for table in root.find("table", "wide") for row in table.find("tr")[1:]]
    assert {int(row.find("th")[0].text) for row in rows} == set(range(1, 31))
    assert root.find("h1")[0].text == "A <b> title"
    assert len(root.find("picture")) == 2 * 3
    # The best accuracy of a facet is on every front it has a cost for.
    lenet = [record for record in records if record.model == "lenet" and record.epsilon is not None]
    best = max(lenet, key=lambda record: record.accuracy or 0)
    row = next(row for row in rows if row.find("th")[0].text == str(best.trial))
    assert "ε" in row.find("td")[-2].text


def test_a_refused_attack_is_named_where_it_leaves_no_figure() -> None:
    reason = "attack iga refused, round 1, client 0: for a reason"
    refused = {"reconstructions": (), "refusals": (reason,)}
    first, *others = synthetic(6)
    page = render_comparison([first.model_copy(update=refused), *others], CHOSEN, "Refused", "fedpriv compare")
    root = parse(page)
    (row,) = [
        row
        for table in root.find("table", "wide")
        for row in table.find("tr")[1:]
        if row.find("th")[0].text == str(first.trial) and len(row.find("td")) > 8
    ]
    assert "attack refused, see below" in [cell.text.strip() for cell in row.find("td")]
    assert page.count("attack refused, see below") == 1
    assert reason in root.text


def test_trials_are_traced_to_their_folders() -> None:
    folders = ["sweeps/a/trials/0001", "sweeps/a/trials/0002", "runs/b", "runs/c", "/d/trials/0001"]
    records = [record.model_copy(update={"folder": at}) for record, at in zip(synthetic(5), folders, strict=True)]
    wanted = ["trials 1-2: sweeps/a", "trial 3: runs/b", "trial 4: runs/c", "trial 5: /d"]
    assert sources_of(records) == wanted
    assert "; ".join(wanted) in parse(render_comparison(records, CHOSEN, "t")).text
    assert sources_of(records[:2]) == sources_of(synthetic(3)) == sources_of([]) == []


def test_the_page_of_an_unfinished_sweep_says_so() -> None:
    records = synthetic(3)
    assert "3 of 1,000 trials finished, 0 failed" in render_comparison(records, CHOSEN, "t", planned=1000)
    for planned in (0, 3):
        assert "3 trials, 0 failed" in render_comparison(records, CHOSEN, "t", planned=planned)


def test_the_same_records_give_the_same_bytes() -> None:
    records = synthetic(10)
    assert render_comparison(records, CHOSEN, "t") == render_comparison(records, CHOSEN, "t")


@pytest.mark.parametrize("records", [[], synthetic(1), [synthetic(1)[0].model_copy(update={"status": "failed"})]])
def test_little_makes_a_page_too(records: list[TrialRecord]) -> None:
    assert parse(render_comparison(records, choose_attacks(records), "little"))


@pytest.mark.slow
def test_a_thousand_trials_make_a_file_below_10_megabytes(tmp_path: Path) -> None:
    path = write_comparison(synthetic(1000), tmp_path / "report.html", title="many")
    assert path.stat().st_size < 10_000_000


@pytest.mark.slow
def test_the_page_is_shown_whole_and_without_complaint(tmp_path: Path, browser: Browser) -> None:
    path = write_comparison(synthetic(60), tmp_path / "report.html", title="many")
    for width in (360, 1280):
        for scheme in ("light", "dark"):
            browser.open(path, width, scheme)
            browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert browser.evaluate("document.images.length") == 6
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            table = "document.querySelector('.scroller')"
            assert width < 1280 or browser.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")
            assert browser.complaints() == []
            assert browser.requests() == [path.resolve().as_uri()]
