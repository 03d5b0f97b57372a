"""The paper's tables with ours: ``python -m studies paper table2 sweeps/table2-small`` prints one as CSV.

The paper's figures are those printed in Tables 2 to 5 of "Applying Directional Noise to Deep Learning" (Faustini,
Fernandes, Tonni, McIver and Dras). Ours are read from the folder of the sweep ``configs/paper/TABLE.toml``, or from
what is kept of it (see :mod:`studies.kept`). Table 5, the differences in Tables 3 and 4, is read from one that has both
attacks or from one for each.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpriv.core.errors import InputError
from fedpriv.sweep.comparison import Chosen, Setting, settings_of
from studies.arguments import StudyParser, listed
from studies.kept import records_of
from studies.results import Table, in_percent, published, with_interval

# Levels of noise, in the order of the paper's rows.
GAUSSIAN = (0.8, 1.0, 2.0, 3.0, 8.0, 50.0)
VMF = (1.0, 5.0, 10.0, 50.0, 500.0, 300_000.0)
ROWS = (("none", None), *(("gaussian", level) for level in GAUSSIAN), *(("vmf", level) for level in VMF))

# (table, data set, network) -> the paper's column in the order of ROWS.
PAPER: dict[tuple[str, str, str], tuple[float, ...]] = {
    (name, data, model): tuple(map(float, figures))
    for name, data, model, *figures in (row.values() for row in published("directional-noise"))
}
# Table 5: (data set, network, level) -> differences of MIA-R's AUC in percent and of IGA's MSE. Its caption says
# Gaussian minus VMF for both; by Tables 3 and 4 it is VMF minus Gaussian, and so is ours. LFW has no Table 3.
DIFFERENCES = {
    (row["data"], row["model"], float(row["level"])): (float(row["auc"]), float(row["mse"]))
    for row in published("directional-noise-differences")
}
TABLES = ("table2", "table3", "table4", "table5")
SIGMA = {1.236: 0.8, 1.076: 1.0, 0.7724: 2.0, 0.6768: 3.0, 0.5231: 8.0, 0.339: 50.0}


class TableRow(NamedTuple):
    """One row of a table, in the order of ROWS."""

    place: int
    setting: Setting


def main() -> None:
    """Print one table."""
    parser = StudyParser("studies.paper", __doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("folder", type=Path, nargs="+", help="of the sweep, or a file of what is kept of it")
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default="rows",
        help="rows: one a setting; levels: by networks, as in the paper; blocks: of directional noise, by blocks",
    )
    parser.add_argument(
        "--mechanisms",
        type=listed(("none", "gaussian", "vmf")),
        help="only rows of these, such as none,vmf; default: all",
    )
    with parser.parsed() as asked:
        # The paper's accuracy on LFW is the top-10 one.
        top_10 = "lfw" if asked.table == "table2" else ""
        records = [record for path in asked.folder for record in records_of(path, top_10)]
        settings = settings_of(records, Chosen("iga", {"membership": "attack-r"}))
        if asked.mechanisms:
            settings = [setting for setting in settings if setting.series[0] in asked.mechanisms]
        if not any(_has(asked.table, row.setting) for row in _rows(settings)):
            raise InputError(f"none of {len(records)} trials is a row of {asked.table} with a figure")
        print(differences(settings) if asked.table == "table5" else SHAPES[asked.shape](asked.table, settings), end="")


def table(name: str, settings: Sequence[Setting]) -> Table:
    """Return the rows of every network and data set in the paper's order."""
    heads = ("network, data", "noise", "m", "kappa or sigma", "nominal epsilon", "proven epsilon", "paper", "here")
    lines = []
    for facet in _facets(name, settings):
        column = _column(name, facet)
        rows = sorted(_rows([setting for setting in settings if setting.facet == facet]), key=_order)
        for row in rows:
            paper = "" if column is None else f"{column[row.place]:g}"
            lines.append([*_noise(row.setting), paper, _figure(name, row.setting)])
    return Table(heads, lines)


def brief(name: str, settings: Sequence[Setting]) -> Table:
    """Return rows as the paper prints them, a row a level and a column a network: its figure / ours."""
    facets = _facets(name, settings)
    rows = []
    if name == "table4":
        guesses = [
            _normalised([setting for setting in settings if setting.facet == facet], "guess-mean") for facet in facets
        ]
        rows.append(["guess: the mean public image", *(f"{guess:.2f}" for guess in guesses)])
    by_name = _by_name(settings)
    for label in dict.fromkeys(_name(row.setting) for row in sorted(_rows(settings), key=_order)):
        rows.append([label, *(_beside(name, by_name.get((facet, label))) for facet in facets)])
    return Table(["noise", *(f"{model}, {data}" for data, model in facets)], rows)


def by_blocks(name: str, settings: Sequence[Setting]) -> Table:
    """Return rows of directional noise: each network's reading of blocks that has a level, a column a level."""
    lines = []
    by_name = _by_name(settings)
    readings = sorted({setting.series[1] for setting in settings if setting.series[0] == "vmf"}, key=_size)
    for facet in _facets(name, settings):
        column, where = _column(name, facet), ", ".join(reversed(facet))
        if column is not None:
            lines.append([where, "the paper", *(f"{figure:g}" for figure in column[-len(VMF) :])])
        for blocks in readings:
            found = [by_name.get((facet, f"VMF {level:g}, {blocks}")) for level in VMF]
            if any(found):
                lines.append([where, blocks, *("" if each is None else _plain(name, each) for each in found)])
    return Table(["network, data", "blocks", *(f"ε_V = {level:g}" for level in VMF)], lines)


SHAPES = {"rows": table, "levels": brief, "blocks": by_blocks}


def _facets(name: str, settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """The data sets and networks of settings: the paper's in its order, then others in the order of settings."""
    keys = list(PAPER)
    found = dict.fromkeys(setting.facet for setting in settings)
    return sorted(found, key=lambda facet: keys.index(key) if (key := _key(name, facet)) in PAPER else len(keys))


def _column(name: str, facet: tuple[str, str]) -> tuple[float, ...] | None:
    return PAPER.get(_key(name, facet))


def _by_name(settings: Sequence[Setting]) -> dict[tuple[tuple[str, str], str], Setting]:
    """Settings that are rows of the paper, by data set and network, and by the row's name."""
    found: dict[tuple[tuple[str, str], str], Setting] = {}
    for _, setting in _rows(settings):
        key = (setting.facet, _name(setting))
        if key in found:
            data, model = setting.facet
            raise InputError(f"{key[1]} with {model} on {data} is there twice: give one sweep of it, or --shape rows")
        found[key] = setting
    return found


def _key(name: str, facet: tuple[str, str]) -> tuple[str, str, str]:
    """Where the paper's column for a data set, by whichever name it is loaded, and a network stands."""
    data, model = facet
    return name, data.removesuffix("-complete"), model


def _order(row: TableRow) -> tuple[int, tuple[int, int], int]:
    """No noise, Gaussian, then VMF by the size of its blocks from large to small."""
    mechanism, blocks = row.setting.series
    return ("none", "gaussian", "vmf").index(mechanism), _size(blocks), row.place


def _size(blocks: str) -> tuple[int, int]:
    """Blocks from large to small: whole gradients, tensors, then by the numbers in one."""
    kind, _, numbers = blocks.partition(":")
    return ("", "whole", "layer", "size").index(kind), -int(numbers or 0)


def _beside(name: str, setting: Setting | None) -> str:
    if setting is None:
        return ""
    column = _column(name, setting.facet)
    row = next(_rows([setting]))
    return _plain(name, setting) if column is None else f"{column[row.place]:g} / {_plain(name, setting)}"


def _plain(name: str, setting: Setting) -> str:
    if name == "table4":
        error = _normalised([setting])
        return "" if math.isnan(error) else f"{error:.2f}"
    return in_percent(setting.accuracy if name == "table2" else setting.figures["AUC"])


def differences(settings: Sequence[Setting]) -> Table:
    """Return rows of VMF minus Gaussian, in AUC (percent) and in MSE."""
    heads = ("network, data", "level", "blocks", "AUC, paper", "AUC, here", "MSE, paper", "MSE, here")
    lines = []
    alike: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        alike.setdefault((setting.facet, _level(setting), setting.series), []).append(setting)
    places = _facets("table4", settings)
    for (facet, level, series), settings_here in sorted(alike.items(), key=lambda item: places.index(item[0][0])):
        _, data, model = _key("table5", facet)
        printed = DIFFERENCES.get((data, model, level or 0.0))
        others = alike.get((facet, level, ("gaussian", "")))
        if series[0] != "vmf" or printed is None or others is None:
            continue
        auc, mse = _auc(settings_here) - _auc(others), _normalised(settings_here) - _normalised(others)
        figures = (*_pair(printed[0], auc, 1), *_pair(printed[1], mse, 2))
        lines.append([", ".join(reversed(facet)), f"{level:g}", series[1], *figures])
    return Table(heads, lines)


def _pair(paper: float, here: float, places: int) -> tuple[str, ...]:
    return tuple("" if math.isnan(value) else f"{value:+.{places}f}" for value in (paper, here))


def _auc(settings: Sequence[Setting]) -> float:
    """MIA-R's area in percent; NaN where no trial was audited."""
    values = [100 * setting.figures["AUC"].value for setting in settings if setting.figures["AUC"]]
    return sum(values) / len(values) if values else math.nan


def _rows(settings: Sequence[Setting]) -> Iterator[TableRow]:
    for setting in settings:
        key = (setting.series[0], _level(setting))
        if key in ROWS:
            yield TableRow(ROWS.index(key), setting)


def _level(setting: Setting) -> float | None:
    """The paper's epsilon of a row."""
    given = setting.first.settings
    value = given.get("mechanism.target_epsilon", given.get("mechanism.epsilon"))
    if value is None and setting.series[0] == "gaussian":
        return SIGMA.get(given.get("mechanism.sigma", 0.0))
    return None if value is None else float(value)


def _name(setting: Setting) -> str:
    mechanism, blocks = setting.series
    level = _level(setting)
    if level is None:
        return "none"
    return f"VMF {level:g}, {blocks}" if mechanism == "vmf" else f"Gaussian {level:g}"


def _noise(setting: Setting) -> list[str]:
    """What the first columns of a row say: network and data, and the noise."""
    first = setting.first
    return [
        f"{first.model}, {first.data}",
        _name(setting),
        "" if first.draws is None else f"{first.draws:,}",
        "" if first.noise is None else f"{first.noise:.4g}",
        "" if first.nominal_epsilon is None else f"{first.nominal_epsilon:.4g}",
        "" if setting.epsilon is None else f"{setting.epsilon:.4g}",
    ]


def _figure(name: str, setting: Setting) -> str:
    if name == "table2":
        return with_interval(setting.accuracy)
    if name == "table3":
        return with_interval(setting.figures["AUC"])
    attacks = dict.fromkeys(line.attack for record in setting.records for line in record.reconstruction)
    return "; ".join(f"{attack} {_errors(setting, attack)}" for attack in attacks)


def _has(name: str, setting: Setting) -> bool:
    """Whether a table has a figure of a setting; a difference needs either attack's."""
    attacked = any(record.reconstruction for record in setting.records)
    audited = setting.figures["AUC"] is not None
    # Networks whose uploads are attacked are hardly trained.
    trained = setting.accuracy is not None and not attacked
    figures = {"table2": trained, "table3": audited, "table4": attacked}
    return figures.get(name, audited or attacked)


def _errors(setting: Setting, attack: str) -> str:
    """An attack's error on the scale of the network's input; on that from 0 to 1, and how many images it recovered."""
    lines = [line for record in setting.records for line in record.reconstruction if line.attack == attack]
    errors = [line.mse for line in lines if line.mse is not None]
    error = sum(errors) / len(errors) if errors else math.nan
    recovered, victims = (sum(getattr(line, key) for line in lines) for key in ("recovered", "victims"))
    return f"{_normalised([setting], attack):.2f} ({error:.3f}, {recovered} of {victims})"


def _normalised(settings: Sequence[Setting], attack: str = "iga") -> float:
    """The MSE of an attack or a guess on the scale of the network's input; NaN where it did not run."""
    values = [
        figures.mse_normalised
        for setting in settings
        for record in setting.records
        for figures in (*record.reconstruction, *record.guesses)
        if figures.attack == attack and figures.mse_normalised is not None
    ]
    return sum(values) / len(values) if values else math.nan


if __name__ == "__main__":
    main()
