"""What a comparison shows, computed from records: settings with their estimates over seeds, and Pareto fronts."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from scipy.stats import t as student

from fedpriv.attacks.settings import is_active
from fedpriv.core.config import describe
from fedpriv.core.errors import InputError
from fedpriv.core.figure import CONFIDENCE, Interval
from fedpriv.core.finding import Column, chosen_attack
from fedpriv.core.names import AGAINST
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.runs import RunFolder
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import TrialRecord, columned, read_record

# From so many seeds on their spread is shown; from fewer, what each run knows about its own figure.
SEEDS_FOR_SPREAD = 3

_SHOWN_ANYWAY = (
    "data.name",
    "model.name",
    *(f"mechanism.{key}" for key in ("name", "blocks", "kappa", "sigma", "scale")),
)
_NOT_SETTINGS = ("name", "seed", "report.", "engine.")


@dataclass(frozen=True)
class Chosen:
    """The attacks that are shown, the same for all trials."""

    reconstruction: str = ""  # the attack on uploads; empty: there is none
    attacks: Mapping[str, str] = field(default_factory=dict)  # name of a finding -> its attack


@dataclass(frozen=True)
class Setting:
    """Trials that differ in their seed only."""

    records: tuple[TrialRecord, ...]  # the trials, none of them failed
    accuracy: Interval | None  # after the last round
    epsilon: float | None  # proven, the largest of the trials
    figures: Mapping[str, Interval | None]  # title of a column -> what the trials have in it together
    alarms: frozenset[str] = frozenset()  # titles of columns in which a trial refutes a claim

    @property
    def first(self) -> TrialRecord:
        """The trial to show where all agree."""
        return self.records[0]

    @property
    def facet(self) -> tuple[str, str]:
        """Data and network: only within one are points compared."""
        return self.first.data, self.first.model

    @property
    def series(self) -> tuple[str, str]:
        """Mechanism and, for vmf, its blocks."""
        return self.first.mechanism, self.first.blocks or ""


def read_folders(paths: Sequence[Path]) -> list[TrialRecord]:
    """Read sweeps and single runs, numbered through; of single runs differing settings are what a sweep sets."""
    sweeps = [path for path in paths if (path / "sweep.json").is_file()]
    runs = [path for path in paths if path not in sweeps]
    _refuse_others(paths, runs)
    records = [
        record.model_copy(update={"folder": str(path / record.folder)})
        for path in sweeps
        for record in SweepFolder.open(path).records()
    ]
    records += _single_runs(runs)
    if not records:
        raise InputError(f"{', '.join(map(str, paths))}: no trial is over, so there is nothing to compare")
    return [record.model_copy(update={"trial": number}) for number, record in enumerate(records, 1)]


def _refuse_others(paths: Sequence[Path], runs: Sequence[Path]) -> None:
    for path in runs:
        if not (path / "config.toml").is_file():
            raise InputError(f"{path} is not the folder of a run or a sweep: it has no config.toml and no sweep.json")
    places = [path.resolve() for path in paths]
    for number, path in enumerate(paths):
        if places[number] in places[:number]:
            raise InputError(f"{path} is given twice")


def statements(records: Sequence[TrialRecord]) -> list[str]:
    """Return what the proven epsilons of trials are about: adjacency, and whom they hold against, each once."""
    claimed = [record for record in records if record.epsilon is not None]
    against = {name: AGAINST[kind.noise_at] for name, kind in MECHANISMS.items()}
    return list(dict.fromkeys(f"{each.adjacency}{against.get(each.mechanism, '')}" for each in claimed))


def sources_of(records: Sequence[TrialRecord]) -> list[str]:
    """Say which trials come from which sweep or run: ``trials 1-12: sweeps/noise``; nothing where all come from one."""
    sources = []
    for source, group in itertools.groupby(records, key=_source):
        numbers = [record.trial for record in group]
        span = f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {numbers[0]}-{numbers[-1]}"
        sources.append(f"{span}: {source}")
    return sources if len(sources) > 1 else []


def _source(record: TrialRecord) -> str:
    sweep, trials, _ = record.folder.rpartition("trials/")
    return sweep.rstrip("/") if trials else record.folder


def _single_runs(paths: Sequence[Path]) -> list[TrialRecord]:
    folders = [RunFolder.open(path) for path in paths]
    described = [list(describe(folder.experiment())) for folder in folders]
    common = set.intersection(*({key for key, *_ in each} for each in described)) if described else set()
    # A key that only some mechanisms have says nothing at its default.
    settings = [
        {key: value for key, value, default, _ in each if key in common or value != default} for each in described
    ]
    keys = dict.fromkeys(key for own in settings for key in own if not key.startswith(_NOT_SETTINGS))
    differing = [key for key in keys if len({repr(own.get(key)) for own in settings}) > 1]
    return [
        read_record(folder, str(folder.path), settings={key: own[key] for key in differing if own.get(key) is not None})
        for folder, own in zip(folders, settings, strict=True)
    ]


# ---- estimates -------------------------------------------------------------------------------------------------------


def choose_attacks(
    records: Sequence[TrialRecord], reconstruction: str = "", attacks: Mapping[str, str] = MappingProxyType({})
) -> Chosen:
    """Choose what the plots show: as asked, else the strongest attacks."""
    errors = [
        {
            result.attack: -result.mse
            for result in record.reconstruction
            if result.mse is not None and (result.attack == reconstruction or not is_active(result.attack))
        }
        for record in records
    ]
    chosen = {
        finding.name: finding.choose([record.of(kind) for record in records], attacks.get(finding.name, ""))
        for finding, kind in columned()
    }
    return Chosen(
        chosen_attack(errors, "reconstruction attack", reconstruction),
        {name: attack for name, attack in chosen.items() if attack},
    )


def columns_of(records: Sequence[TrialRecord], chosen: Chosen) -> list[Column]:
    """Return the columns of tables over trials: of reconstruction, then those of findings."""
    found = (
        finding.table([record.of(kind) for record in records], chosen.attacks.get(finding.name, ""))
        for finding, kind in columned()
    )
    return [_errors(records, chosen.reconstruction), *(column for columns in found for column in columns)]


def _errors(records: Sequence[TrialRecord], attack: str) -> Column:
    """The MSE of one attack; in the terminal the least of each trial."""
    return Column(
        "MSE",
        "MSE",
        "figure",
        tuple(_error_of(record, attack) for record in records),
        tuple(_least(record) for record in records),
    )


def _error_of(record: TrialRecord, attack: str) -> Interval | None:
    own = (each for each in record.reconstruction if each.attack == attack and each.mse is not None)
    return next((Interval(each.mse or 0.0, each.mse_low, each.mse_high) for each in own), None)


def _least(record: TrialRecord) -> str:
    errors = [result.mse for result in record.reconstruction if result.mse is not None]
    return f"{min(errors):.4f}" if errors else "refused" if record.refusals else ""


def settings_of(records: Sequence[TrialRecord], chosen: Chosen) -> list[Setting]:
    """Group trials that differ in their seed only, in the order of their first trial, without failed ones."""
    columns = columns_of(records, chosen)
    groups: dict[tuple[str, int], list[int]] = {}
    made: dict[tuple[str, int], int] = {}
    for place, record in enumerate(records):
        if not record.failed:
            key = _key(record)
            again = made.get((key, record.seed), 0)
            made[key, record.seed] = again + 1
            groups.setdefault((key, again), []).append(place)
    return [_setting([records[place] for place in places], places, columns) for places in groups.values()]


def _key(record: TrialRecord) -> str:
    # A table gives 1 back as 1.0 where another of its rows has 0.5.
    numbers = {key: float(value) for key, value in record.settings.items() if type(value) is int}
    own = sorted((key, repr(value)) for key, value in {**record.settings, **numbers}.items())
    # Two sweeps may differ in what is not among their settings.
    study = record.folder.rpartition("trials/")[0]
    return repr((record.data, record.model, record.mechanism, record.blocks, own, study))


def _setting(records: Sequence[TrialRecord], places: Sequence[int], columns: Sequence[Column]) -> Setting:
    return Setting(
        records=tuple(records),
        accuracy=estimate([(each.accuracy, each.accuracy_low, each.accuracy_high) for each in records], most=1.0),
        epsilon=max((each.epsilon for each in records if each.epsilon is not None), default=None),
        figures={column.title: _together([column.values[place] for place in places], column) for column in columns},
        alarms=frozenset(column.title for column in columns if any(map(column.alarm, places))),
    )


def _together(values: Sequence[Interval | None], column: Column) -> Interval | None:
    known = [value for value in values if value is not None]
    if column.largest:
        return max(known, key=lambda each: each.value, default=None)
    return estimate([(each.value, each.low, each.high) for each in known], column.most)


def estimate(
    figures: Iterable[tuple[float | None, float | None, float | None]], most: float = math.inf
) -> Interval | None:
    """Return the mean over seeds with a 95 % interval.

    From three seeds on the interval is Student's, of the mean over seeds. Below that it spans the runs' own intervals,
    which are about test examples, candidates or images, not about seeds. Student's ends are cut off at 0 and ``most``.
    """
    known = [figure for figure in figures if figure[0] is not None]
    values = [value for value, _, _ in known if value is not None]
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) >= SEEDS_FOR_SPREAD:
        half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values)
        half /= math.sqrt(len(values))
        return Interval(mean, max(0.0, mean - half), min(most, mean + half))
    lows, highs = [low for _, low, _ in known], [high for _, _, high in known]
    return Interval(mean, _end(lows, min), _end(highs, max))


def _end(ends: Sequence[float | None], pick: Callable[[Iterable[float]], float]) -> float | None:
    known = [end for end in ends if end is not None]
    return pick(known) if len(known) == len(ends) else None


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which of the points (cost, gain) no other one beats, in the order of rising cost."""
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    for index in order:
        cost, gain = points[index]
        if not front or gain > points[front[-1]][1] or (cost, gain) == points[front[-1]]:
            front.append(index)
    return front


def differing_keys(settings: Sequence[Setting]) -> list[str]:
    """The keys that the sweeps set and that differ, in order, without those that a page has columns for."""
    own = [setting.first.settings for setting in settings]
    keys = dict.fromkeys(key for each in own for key in each if key not in _SHOWN_ANYWAY)
    return [key for key in keys if len({repr(each[key]) if key in each else None for each in own}) > 1]
