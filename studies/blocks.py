"""What block sizes of directional noise give: ``python -m studies blocks docs/results/blocks-*.csv.gz``.

The files, or the folders of sweeps, are those of ``configs/paper/blocks.toml``: accuracy, membership and uploads, in
any order. Printed are one row for each kind of block and nominal epsilon, small tables of one figure each, and how far
each kind is from the paper's column. ``--plot FILE.svg`` draws all of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fedpriv.attacks.membership.report import MembershipColumns
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Interval
from fedpriv.core.report.drawing import LIGHT, dress, level, styled, to_svg
from fedpriv.sweep.comparison import Setting, choose_attacks, settings_of
from fedpriv.sweep.record import TrialRecord
from studies.arguments import StudyParser
from studies.kept import beside_noise, records_of
from studies.paper import PAPER, ROWS
from studies.results import Table, in_percent, with_interval

BLOCKS = ("size:1", "size:2", "size:4", "size:16", "size:64", "size:256", "layer", "whole")
MIA_R = "attack-r"
MAP, IGA = "map", "iga"
RECONSTRUCTIONS = (MAP, "closed_form", IGA)
STYLES = ("-", (0, (1, 1)), (0, (4, 2)))
COLOURS = ("#0072B2", "#D55E00", "#009E73")
MARKERS = ("o", "^", "s")

Key = tuple[str, float]  # blocks, nominal epsilon


@dataclass(frozen=True)
class Study:
    """The three sweeps: key -> setting."""

    accuracy: dict[Key, Setting]  # trained on all data; the setting without a mechanism has the key ("", 0)
    # audited; attack -> the settings with its AUC. The first attack is the strongest on average, the last the paper's;
    # they may be one.
    membership: dict[str, dict[Key, Setting]]
    uploads: dict[str, dict[Key, Setting]]  # attack -> the settings with its error


def main() -> None:
    """Print the tables, and draw the plot."""
    parser = StudyParser("studies.blocks", __doc__)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of the three sweeps, or what is kept of them")
    parser.add_argument("--plot", type=Path)
    with parser.parsed() as asked:
        study = study_of([records_of(path) for path in asked.sweeps])
        print(table(study), *small_tables(study), sep="\n", end="")
        if asked.plot is not None:
            asked.plot.write_bytes(to_svg(drawn(study), transparent=False)[0])


def study_of(sweeps: Sequence[Sequence[TrialRecord]]) -> Study:
    """Tell the three sweeps apart by what their trials have."""
    audited = next((records for records in sweeps if records and records[0].of(MembershipColumns).memberships), None)
    attacked = next((records for records in sweeps if records and records[0].reconstructions), None)
    trained = next((records for records in sweeps if records is not audited and records is not attacked), None)
    if not (audited and attacked and trained and len(sweeps) == 3 and all(map(_is_ours, sweeps))):
        raise InputError(
            "give one sweep of accuracy, one of membership and one of uploads, as configs/paper/blocks.toml"
        )
    strongest = choose_attacks(audited).attacks["membership"]
    return Study(
        _by_key(trained),
        {attack: _by_key(audited, membership=attack) for attack in (strongest, MIA_R)},
        {attack: _by_key(attacked, reconstruction=attack) for attack in RECONSTRUCTIONS},
    )


def _is_ours(records: Sequence[TrialRecord]) -> bool:
    """Whether only noise and seeds differ, there is none, too, and the paper has a column for data and network."""
    found = {(record.data, record.model, *sorted(beside_noise(record))) for record in records}
    bare = any(record.mechanism == "none" for record in records)
    return bare and len(found) == 1 and ("table2", *found.pop()) in PAPER


def _by_key(records: Sequence[TrialRecord], reconstruction: str = "", membership: str = "") -> dict[Key, Setting]:
    settings = settings_of(records, choose_attacks(records, reconstruction, {"membership": membership}))
    return {
        (setting.first.blocks or "", float(setting.first.settings.get("mechanism.epsilon", 0))): setting
        for setting in settings
    }


def table(study: Study) -> Table:
    """Return a row for each kind of block and epsilon, the largest blocks last."""
    heads = ["blocks", "ε_V", "m", "accuracy, %", "proven ε", *(f"{attack}: AUC, %" for attack in study.membership)]
    heads += ["audited: accuracy, %"]
    heads += [f"{attack}: MSE (recovered)" for attack in study.uploads] + ["guess: MSE"]
    keys = [("", 0.0), *((blocks, level) for blocks in BLOCKS for level in levels(study))]
    return Table(heads, [_cells(study, key) for key in keys if key in study.accuracy])


def _cells(study: Study, key: Key) -> list[str]:
    trained, (blocks, level) = study.accuracy[key], key
    attacked = study.uploads[RECONSTRUCTIONS[0]].get(key)
    return [
        names_of(blocks),
        f"{level:g}" if level else "",
        "" if trained.first.draws is None else f"{trained.first.draws:,}",
        with_interval(trained.accuracy),
        "" if trained.epsilon is None else f"{trained.epsilon:.4g}",
        *(with_interval(_of(settings, key, "AUC")) for settings in study.membership.values()),
        in_percent(_accuracy_of(study.membership[MIA_R], key)),
        *(_error(settings, key, attack) for attack, settings in study.uploads.items()),
        "" if attacked is None else f"{guess(attacked):.3f}",
    ]


def small_tables(study: Study) -> list[Table]:
    """Return four tables, levels by kinds of block: accuracy, proven epsilon, membership, uploads (`map`, `iga`)."""
    return [
        _small(study, {"": lambda key: in_percent(study.accuracy[key].accuracy)}, distances(study)),
        _small(study, {"": lambda key: _significant(study.accuracy[key].epsilon)}),
        _small(study, {f", {name}": partial(_area, settings) for name, settings in study.membership.items()}),
        _small(study, {f", {name}": partial(_error, study.uploads[name], attack=name) for name in (MAP, IGA)}),
    ]


def _small(study: Study, figures: Mapping[str, Callable[[Key], str]], more: Iterable[Sequence[str]] = ()) -> Table:
    """A row for each level and figure, by what its name ends with."""
    rows = [
        [f"ε_V = {level:g}{name}", *cells]
        for level in levels(study)
        for name, figure in figures.items()
        if any(cells := [figure((blocks, level)) for blocks in BLOCKS])
    ]
    return Table(["numbers in a block", *map(names_of, BLOCKS)], [*rows, *more])


def _area(settings: Mapping[Key, Setting], key: Key) -> str:
    return in_percent(_of(settings, key, "AUC"))


def _error(settings: Mapping[Key, Setting], key: Key, attack: str) -> str:
    """An attack's error, and how many images it recovered."""
    estimate = _of(settings, key, "MSE")
    if estimate is None:
        return ""
    recovered = sum(line.recovered for line in settings[key].first.reconstruction if line.attack == attack)
    return f"{estimate.value:.3f} ({recovered})"


def _significant(value: float | None) -> str:
    return "" if value is None else f"{float(f'{value:.3g}'):,.10g}"


def levels(study: Study) -> list[float]:
    """The nominal epsilons."""
    return sorted({level for _, level in study.accuracy} - {0.0})


def _of(settings: Mapping[Key, Setting], key: Key, figure: str) -> Interval | None:
    setting = settings.get(key)
    return setting.figures[figure] if setting is not None else None


def _accuracy_of(settings: Mapping[Key, Setting], key: Key) -> Interval | None:
    setting = settings.get(key)
    return setting.accuracy if setting is not None else None


def names_of(blocks: str) -> str:
    """Blocks in words."""
    return {"": "no mechanism", "whole": "whole", "layer": "a tensor"}.get(blocks, blocks.partition(":")[2])


def guess(setting: Setting) -> float:
    """The smallest error of a guess that never saw an upload."""
    return min(line.mse for line in setting.first.guesses if line.mse is not None)


def distances(study: Study) -> list[tuple[str, ...]]:
    """Return two rows: how far each kind of block is from the paper's column, in points of accuracy.

    The second figure compares what noise costs, accuracy without a mechanism minus accuracy with it, so that a network
    that is smaller or trained for less does not count as noise.
    """
    data, model = next(iter(study.accuracy.values())).facet
    column = PAPER["table2", data, model]
    printed = {level: column[ROWS.index(("vmf", level))] for level in levels(study)}
    bare = study.accuracy.get(("", 0.0))
    columns: list[tuple[str, str]] = []
    for blocks in BLOCKS:
        here = {
            level: _accuracy(study.accuracy[blocks, level]) for level in printed if (blocks, level) in study.accuracy
        }
        if not here or bare is None:
            columns.append(("", ""))
            continue
        plain = fmean(abs(here[level] - printed[level]) for level in here)
        cost = fmean(abs((_accuracy(bare) - here[level]) - (column[0] - printed[level])) for level in here)
        columns.append((f"{plain:.1f}", f"{cost:.1f}"))
    rows = zip(("distance from the paper", "distance of what noise costs"), *columns, strict=True)
    return list(rows)


def _accuracy(setting: Setting) -> float:
    if setting.accuracy is None:
        raise ValueError(f"trial {setting.first.trial} has no accuracy")
    return 100 * setting.accuracy.value


@styled()
def drawn(study: Study) -> Figure:
    """Draw accuracy, proven epsilon, membership and reconstruction over the size of blocks."""
    drawing = Figure(figsize=(13.5, 7.6), layout="constrained", facecolor="white")
    accuracy, proven, member, error = drawing.subplots(2, 2).flat
    _lines(accuracy, study, lambda key: _accuracy_of(study.accuracy, key))
    accuracy.set_title("test accuracy", fontsize=10)
    if (bare := study.accuracy["", 0.0].accuracy) is not None:
        level(accuracy, bare.value, "no mechanism")
    _lines(proven, study, lambda key: _proven(study.accuracy[key]))
    _logarithmic(proven)
    proven.set_title("proven ε of that run, at δ = 1e-5 (more: less is proven)", fontsize=10)
    for style, settings in zip(STYLES[::2], study.membership.values(), strict=False):
        _lines(member, study, partial(_of, settings, figure="AUC"), style)
    attacks = [name for name in study.membership if name != MIA_R]
    member.set_title(
        f"AUC of membership inference: {''.join(f'{each}; dashed: ' for each in attacks)}MIA-R", fontsize=10
    )
    level(member, 0.5, "guess")
    for style, settings in zip(STYLES, study.uploads.values(), strict=True):
        _lines(error, study, partial(_of, settings, figure="MSE"), style)
    _logarithmic(error)
    error.set_title("MSE of reconstruction: map (dotted: closed form, dashed: Inverting Gradients)", fontsize=10)
    attacked = next(iter(study.uploads[RECONSTRUCTIONS[0]].values()))
    level(error, guess(attacked), "guess")
    handles, labels = accuracy.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=LIGHT.text)
    return drawing


def _proven(setting: Setting) -> Interval | None:
    return None if setting.epsilon is None else Interval(setting.epsilon, None, None)


def _lines(axes: Axes, study: Study, figure: Callable[[Key], Interval | None], style: Any = STYLES[0]) -> None:
    """One line for each nominal epsilon."""
    dress(axes)
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    for number, epsilon in enumerate(levels(study)):
        found = {
            place: estimate
            for place, blocks in enumerate(BLOCKS)
            if (blocks, epsilon) in study.accuracy and (estimate := figure((blocks, epsilon))) is not None
        }
        curve(axes, number, found, f"nominal ε_V = {epsilon:g}", style=style)
    axes.set_xticks(range(len(BLOCKS)), [names_of(blocks) for blocks in BLOCKS])
    axes.set_xlabel("numbers in a block", color=LIGHT.muted)


def curve(
    axes: Axes, number: int, points: Mapping[int, Interval], label: str, factor: float = 1, style: Any = STYLES[0]
) -> None:
    """Draw the line of a number through estimates times a factor; a solid one has their intervals, where there are."""
    axes.plot(
        list(points), [factor * estimate.value for estimate in points.values()], color=COLOURS[number],
        marker=MARKERS[number], markersize=5, linewidth=1.2, linestyle=style, label=label,
    )  # fmt: skip
    for place, estimate in points.items():
        if estimate.ends is not None and style == STYLES[0]:
            ends = [factor * end for end in estimate.ends]
            axes.plot([place, place], ends, color=COLOURS[number], linewidth=1, alpha=0.45)


def _logarithmic(axes: Axes) -> None:
    """Ticks as plain numbers: powers in mathematical notation are not set in an SVG's own text."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


if __name__ == "__main__":
    main()
