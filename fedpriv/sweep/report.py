"""The page of a comparison: trade-offs, every setting, every attack; put into comparison.html."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedpriv.core.files import write_whole
from fedpriv.core.finding import Part
from fedpriv.core.registry import ATTACKS
from fedpriv.core.report.drawing import Plot
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
from fedpriv.sweep.tradeoffs import Tradeoff, series_name, tradeoff_plot, tradeoffs

_NONE: Mapping[str, str] = MappingProxyType({})


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
    attacks: Mapping[str, str] = _NONE,
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
        placed = [
            (setting.first.trial, sign * cost.value, setting.accuracy.value)
            for setting in settings
            if setting.accuracy is not None and (cost := tradeoff.cost(setting)) is not None
        ]
        for index in pareto_front([(cost, gain) for _, cost, gain in placed]):
            places.setdefault(placed[index][0], []).append(tradeoff.short)
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
