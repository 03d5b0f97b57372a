"""The page of a comparison: trade-offs, every setting, every attack; put into report.html.

Plots show accuracy against what leaks and what is proven: one mark a setting, told apart by colour and marker.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fedpriv.core.figure import Interval
from fedpriv.core.files import write_whole
from fedpriv.core.finding import Column, Part
from fedpriv.core.numbers import figure
from fedpriv.core.registry import ATTACKS, MECHANISMS
from fedpriv.core.report.drawing import LIGHT, Plot, dress, plot, styled
from fedpriv.core.report.filters import template
from fedpriv.sweep.comparison import (
    Chosen,
    Setting,
    choose_attacks,
    columns_of,
    differing_keys,
    pareto_front,
    settings_of,
    sources_of,
    statements,
)
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import TrialRecord

# An axis whose figures differ by less than this factor is widened to it on either side.
_NARROW = 2.0
_BLOCK_MARKERS = ("^", "v", "<", ">", "p", "h", "*", "d")


@dataclass(frozen=True)
class Tradeoff:
    """What one plot shows on its horizontal axis."""

    name: str  # in the page's words
    short: str  # in a list of fronts
    axis: str  # the axis' title
    cost: Callable[[Setting], Interval | None]  # of a setting, with its interval; `None`: it has none
    less_is_better: bool  # for whoever wants privacy
    logarithmic: bool  # the axis
    absent: str  # what settings without a cost are called
    reference: Callable[[Sequence[Setting]], float | None]  # the cost of an attacker who guesses; `None`: not known


def _guess_error(settings: Sequence[Setting]) -> float | None:
    """The mean over trials of the best guess' MSE: of pictures that never saw an upload."""
    best = [
        min(errors)
        for setting in settings
        for record in setting.records
        if (errors := [guess.mse for guess in record.guesses if guess.mse is not None])
    ]
    return statistics.fmean(best) if best else None


def _epsilon(setting: Setting) -> Interval | None:
    if setting.epsilon is None or setting.epsilon <= 0:
        return None
    return Interval(setting.epsilon, None, None)


MSE = Tradeoff(
    "Accuracy and reconstruction", "MSE", "MSE of the reconstruction (more: less is seen)",
    lambda setting: setting.figures["MSE"], False, False, "not attacked", _guess_error,
)  # fmt: skip
PROVEN = Tradeoff(
    "Accuracy and proven privacy", "ε", "proven ε of the whole run, at δ",
    _epsilon, True, True, "nothing proven", lambda _: None,
)  # fmt: skip


def tradeoffs(columns: Sequence[Column]) -> list[Tradeoff]:
    """Return what is plotted against accuracy: what findings measured, the error of reconstructions, proven epsilon."""
    return [*(_measured(column) for column in columns if column.axis), MSE, PROVEN]


def _measured(column: Column) -> Tradeoff:
    return Tradeoff(
        column.name, column.title, column.axis, lambda setting: setting.figures[column.title], True, False,
        "not audited", lambda _: column.guess,
    )  # fmt: skip


def series_name(series: tuple[str, str]) -> str:
    """Return the name of a mechanism and its blocks."""
    mechanism, blocks = series
    name = (MECHANISMS[mechanism].label if mechanism in MECHANISMS else "") or mechanism
    if not blocks:
        return name
    unit = {"whole": "whole gradient", "layer": "a block a tensor"}.get(blocks, f"blocks of {blocks.partition(':')[2]}")
    return f"{name}, {unit}"


@styled()
def tradeoff_plot(settings: Sequence[Setting], tradeoff: Tradeoff, series: Sequence[tuple[str, str]]) -> Plot | None:
    """Draw one trade-off of one data set and network; ``None`` where no setting has both figures."""
    present = Counter(setting.series for setting, _, _ in _points(settings, tradeoff))
    if not present:
        return None

    drawing = Figure(figsize=(5.6, 4.0), layout="constrained")
    draw_tradeoff(drawing.subplots(), settings, tradeoff, series)
    drawing.legend(
        loc="outside lower center", ncols=2, frameon=False, fontsize=8.5, labelcolor=LIGHT.text, handlelength=1.4
    )

    data, model = settings[0].facet
    names = ", ".join(series_name(each) for each in present)
    alt = f"{tradeoff.name} of {model} on {data}: {present.total()} settings of {names}."
    return plot(drawing, alt, dict(kind.colours for kind in MECHANISMS.values()))


def draw_tradeoff(
    axes: Axes, settings: Sequence[Setting], tradeoff: Tradeoff, series: Sequence[tuple[str, str]]
) -> None:
    """Draw one trade-off into axes."""
    points = _points(settings, tradeoff)
    dress(axes)
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    _scale(axes, tradeoff, [cost.value for _, cost, _ in points])
    for name in dict.fromkeys(setting.series for setting, _, _ in points):
        own = [(cost, accuracy) for setting, cost, accuracy in points if setting.series == name]
        _draw_series(axes, own, name, _marker(name, series), tradeoff)
    _draw_absent(axes, settings, tradeoff)
    _draw_reference(axes, tradeoff.reference(settings))
    axes.set_xlabel(tradeoff.axis, color=LIGHT.muted)
    axes.set_ylabel("test accuracy", color=LIGHT.muted)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))


def _points(settings: Sequence[Setting], tradeoff: Tradeoff) -> list[tuple[Setting, Interval, Interval]]:
    """The settings that have both figures, with cost and accuracy."""
    return [
        (setting, cost, setting.accuracy)
        for setting in settings
        if setting.accuracy is not None and (cost := tradeoff.cost(setting)) is not None
    ]


def _scale(axes: Axes, tradeoff: Tradeoff, costs: Sequence[float]) -> None:
    if tradeoff.logarithmic:
        axes.set_xscale("log")
        wide = max(costs) > 1e3 * min(costs)
        if max(costs) < _NARROW * min(costs):
            # Else ticks would differ in digits that are not shown.
            middle = math.sqrt(min(costs) * max(costs))
            axes.set_xlim(middle / _NARROW, middle * _NARROW)
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        # Long numbers in a row would run into each other.
        largest = 1e4 if wide else 1e7
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value, 2, largest)))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_series(
    axes: Axes, points: Sequence[tuple[Interval, Interval]], series: tuple[str, str], marker: str, tradeoff: Tradeoff
) -> None:
    colour = MECHANISMS[series[0]].colours[0] if series[0] in MECHANISMS else LIGHT.line
    for horizontal in (True, False):
        _draw_intervals(axes, points, colour, horizontal=horizontal)
    costs = [cost.value for cost, _ in points]
    gains = [accuracy.value for _, accuracy in points]
    sign = 1 if tradeoff.less_is_better else -1
    front = pareto_front([(sign * cost, gain) for cost, gain in zip(costs, gains, strict=True)])
    if len(front) > 1:
        # In the order of rising cost: the accuracy at this cost holds up to the next point.
        axes.step(
            [costs[index] for index in front], [gains[index] for index in front], where="post", color=colour,
            linewidth=1.2, alpha=0.75,
        )  # fmt: skip
    axes.scatter(costs, gains, s=34, marker=marker, color=colour, linewidths=0.6, label=series_name(series), zorder=3)


def _draw_intervals(axes: Axes, points: Sequence[tuple[Interval, Interval]], colour: str, *, horizontal: bool) -> None:
    lines = []
    for cost, accuracy in points:
        ends = cost.ends if horizontal else accuracy.ends
        if ends is not None:
            lines.append([(end, accuracy.value) if horizontal else (cost.value, end) for end in ends])
    if lines:
        # One path for all: a thousand settings would be a thousand artists else. NaN lifts the pen.
        gap = np.full((len(lines), 1, 2), np.nan)
        path = np.concatenate([np.array(lines), gap], axis=1).reshape(-1, 2)
        axes.plot(path[:, 0], path[:, 1], color=colour, linewidth=1, alpha=0.45)


def _draw_absent(axes: Axes, settings: Sequence[Setting], tradeoff: Tradeoff) -> None:
    """The accuracy of runs without a mechanism, where they have no place on the axis."""
    bare = [
        setting.accuracy.value
        for setting in settings
        if setting.series[0] == "none" and setting.accuracy is not None and tradeoff.cost(setting) is None
    ]
    if not bare:
        return
    best = max(bare)
    axes.axhline(best, color=LIGHT.muted, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        f"no mechanism ({tradeoff.absent})", (0, best), (2, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", va="bottom", color=LIGHT.muted, fontsize=8.5,
    )  # fmt: skip


def _draw_reference(axes: Axes, cost: float | None) -> None:
    if cost is None:
        return
    axes.axvline(cost, color=LIGHT.muted, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        "guess", (cost, 1), (-3, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
        rotation=90, va="top", ha="right", color=LIGHT.muted, fontsize=8.5,
    )  # fmt: skip


def _marker(series: tuple[str, str], compared: Sequence[tuple[str, str]]) -> str:
    mechanism, blocks = series
    if not blocks:
        return MECHANISMS[mechanism].marker if mechanism in MECHANISMS else "P"
    known = [other for name, other in compared if name == mechanism]
    return _BLOCK_MARKERS[known.index(blocks) % len(_BLOCK_MARKERS)]


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facet:
    """One data set and network: its plots, and the settings that no other one beats in each trade-off."""

    title: str
    plots: tuple[tuple[Plot, str], ...]
    settings: tuple[Setting, ...]
    fronts: Mapping[int, str]


def write_sweep_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a sweep from its finished trials, and return its path.

    Raises:
        InputError: it is not the folder of a sweep.
        WriteError: the report cannot be written.
    """
    sweep = SweepFolder.open(folder)
    return write_comparison(
        sweep.records(), folder / "report.html", title=sweep.name, command=sweep.given_command(), planned=sweep.planned
    )


def write_comparison(
    records: Sequence[TrialRecord],
    path: Path,
    reconstruction: str = "",
    attacks: Mapping[str, str] = MappingProxyType({}),
    *,
    title: str,
    command: str = "",
    planned: int = 0,
) -> Path:
    """Write the report about these trials and return its path.

    Args:
        records: the trials.
        path: of the file; it is written atomically.
        reconstruction: attack to plot; empty: the strongest.
        attacks: the attack to plot for each audit: name of the audit -> attack.
        title: heading.
        command: the command that repeats it; may be empty.
        planned: the number of trials of the sweep; 0: as many as ``records``.

    Raises:
        InputError: no trial has such an attack.
        WriteError: the file cannot be written.
    """
    chosen = choose_attacks(records, reconstruction, attacks)
    write_whole(path, render_comparison(records, chosen, title, command, planned).encode())
    return path


def render_comparison(
    records: Sequence[TrialRecord], chosen: Chosen, title: str, command: str = "", planned: int = 0
) -> str:
    """Return the comparison as one HTML document that needs no network and no script."""
    settings, columns = settings_of(records, chosen), columns_of(records, chosen)
    return template("sweep/report.html", attack_name=_attack_name, series_name=series_name).render(
        title=title,
        command=command,
        records=records,
        planned=planned,
        sources=sources_of(records),
        chosen=chosen,
        facets=_facets(settings, tradeoffs(columns)),
        keys=differing_keys(settings),
        columns=columns,
        parts=_parts(records),
        refuted=[(record, *alarm) for record in records for alarm in record.alarms],
        statements=statements(records),
    )


def _facets(settings: Sequence[Setting], shown: Sequence[Tradeoff]) -> list[_Facet]:
    series = list(dict.fromkeys(setting.series for setting in settings))
    groups: dict[tuple[str, str], list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.facet, []).append(setting)
    return [
        _Facet(
            title=f"{model} on {data}",
            plots=tuple(
                (plot, tradeoff.name) for tradeoff in shown if (plot := tradeoff_plot(group, tradeoff, series))
            ),
            settings=tuple(group),
            fronts=_fronts(group, shown),
        )
        for (data, model), group in groups.items()
    ]


def _fronts(settings: Sequence[Setting], shown: Sequence[Tradeoff]) -> dict[int, str]:
    """Trial of a setting -> the trade-offs on whose front, over all mechanisms, it is."""
    places: dict[int, list[str]] = {}
    for tradeoff in shown:
        sign = 1 if tradeoff.less_is_better else -1
        points = _points(settings, tradeoff)
        for index in pareto_front([(sign * cost.value, accuracy.value) for _, cost, accuracy in points]):
            places.setdefault(points[index][0].first.trial, []).append(tradeoff.short)
    return {trial: ", ".join(names) for trial, names in places.items()}


def _parts(records: Sequence[TrialRecord]) -> dict[type[Part], list[tuple[int, Part]]]:
    """Each kind of line that findings show of every trial, with the number of the trial."""
    kinds: dict[type[Part], list[tuple[int, Part]]] = {}
    for record in records:
        for part in record.lines():
            if part.titles:
                kinds.setdefault(type(part), []).append((record.trial, part))
    return kinds


def _attack_name(label: str) -> str:
    name, _, settings = label.partition(",")
    title = ATTACKS[name].title if name in ATTACKS else name
    return f"{title} ({settings.replace(',', ', ')})" if settings else title
