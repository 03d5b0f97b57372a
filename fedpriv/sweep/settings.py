"""The sweep file: a base experiment, the settings that vary, and the audits and resources of each trial.

::

    name = "noise"
    base = "../quickstart.toml"          # or a table: an experiment file's sections as they are
    seeds = [1, 2, 3]

    [set.federation]                     # for all trials
    rounds = 50

    [grid.mechanism]                     # every value with every other one
    kappa = [5, 50, 500]

    [[list.network]]                     # a named list is one axis: each trial takes one of its entries
    model = { name = "mlp", hidden = [64] }
    [[list.network]]
    model = { name = "lenet" }

    [audit]                              # leave out: no membership inference
    references = 16

    [set.robustness.certify]             # leave out of the trials' settings: no certificates
    votes = 1000

    [set.robustness.evade]               # leave out likewise: no evasion attacks
    steps = 20

    [resources]
    cpus = 0.5

    [scales.full]                        # replaces keys of this file with `--scale full`
    seeds = [1, 2, 3, 4, 5]

Trials are the product of seeds, lists and grid. All of them are validated before any starts.
"""

import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from typing_extensions import override as overriding

from fedpriv.core.config import Experiment, override, read_toml, validated
from fedpriv.core.config.file import FileKind, leaves
from fedpriv.core.errors import InputError
from fedpriv.core.finding import findings
from fedpriv.core.records import members_text
from fedpriv.core.registry import FILES
from fedpriv.core.settings import Integer, NonNegative, Positive, Settings
from fedpriv.mechanisms import MECHANISM
from fedpriv.models import MODEL


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    number: int  # from 1
    # its values of the settings that vary: key of the experiment file -> value, in the order of the file
    settings: Mapping[str, Any]
    seed: int  # of the experiment
    experiment: Experiment  # resolved; the engine is inline

    @property
    def asked(self) -> dict[str, str]:
        """The audits of its final model: description -> key in sweep.json, or empty."""
        every = (finding.asked_of_trials(self.experiment) for finding in findings())
        return {words: key for asked in every for words, key in asked.items()}


MOST_TRIALS = 100_000

# How many trials of one reason an error line names with their settings, and how many reasons.
_NAMED = 3
_REASONS = 3

Key = tuple[str, ...]
Values = tuple[tuple[Key, Any], ...]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ResourcesConfig(_Section):
    """Where trials run, and the share of a machine that one takes."""

    engine: Literal["ray", "inline"] = Field("ray", description="inline: one after the other in this process")
    cpus: Positive = Field(1.0, description="Ray's share of CPUs for one trial")
    gpus: NonNegative = Field(0.0, description="Ray's share of a GPU for one trial")
    address: str = Field("", description="a running Ray cluster, such as auto; empty: this machine")


class _File(_Section):
    name: str = Field("sweep", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    base: Any = ""
    seeds: tuple[Integer, ...] | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] | None = None
    list: Any = None
    audit: Any = None
    resources: ResourcesConfig = Field(default_factory=lambda: ResourcesConfig())


def _file_kind() -> type[_File]:
    """What a sweep file says, with the audit of whichever finding audits trials."""
    audit = next((finding.audit for finding in findings() if finding.audit is not None), None)
    kind: Any = None if audit is None else audit | None
    return create_model("_File", __base__=_File, audit=(kind, None))


@dataclass(frozen=True)
class Sweep:
    """A sweep file, resolved."""

    name: str  # names the folder
    source: str  # the file
    trials: tuple[Trial, ...]  # all trials of the sweep
    audit: BaseModel | None  # settings of each trial's membership inference; `None`: there is none
    resources: ResourcesConfig  # CPUs, GPUs and workers of the trials

    def identity(self) -> dict[str, Any]:
        """Everything that identifies this sweep, as JSON types without defaults: a folder never mixes two sweeps."""
        trials = [
            {
                "settings": dict(trial.settings),
                "experiment": _unusual(trial.experiment),
                **{key: True for key in trial.asked.values() if key},
            }
            for trial in self.trials
        ]
        return {"audit": None if self.audit is None else self.audit.model_dump(), "trials": trials}


def _unusual(experiment: Experiment) -> dict[str, Any]:
    """The settings that do not have their default; of a mechanism and a network the name, unless it is the default."""
    tree = experiment.model_dump(mode="json", exclude_defaults=True)
    for choice in (MECHANISM, MODEL):
        name = getattr(experiment, choice.section).name
        if name != choice.default:
            tree[choice.section] = {"name": name, **tree[choice.section]}
    return tree


def load_sweep(path: Path, scale: str = "") -> Sweep:
    """Read a sweep file and make its trials.

    Args:
        path: the TOML file; the path of its base file is relative to it.
        scale: the name of one of its ``[scales]``; empty: the file's key ``scale``, or the file as it is.

    Raises:
        InputError: the file cannot be read; a key does not exist; nothing varies; two trials are the same; or
            some trials have contradictory settings: the error names all of them.
    """
    tree = _scaled(_read(path), scale, str(path))
    file = validated(_file_kind() if "audit" in tree else _File, tree, str(path))
    base = _base(file.base, path)
    axes = _axes(file, str(path))
    override(base, _values(file.set, f"{path}: set"), f"{path}: set.")
    if file.seeds is not None and "seed" in file.set:
        raise InputError(f"{path}: seeds and set.seed exclude each other")
    seeds = _seeds(file.seeds, base, str(path))
    if not axes and len(seeds) < 2:
        raise InputError(f"{path}: nothing varies; give grid, list, or several seeds")
    count = len(seeds)
    for axis in axes.values():
        count *= len(axis)
    if count > MOST_TRIALS:
        raise InputError(f"{path}: {count} trials; at most {MOST_TRIALS} are allowed")
    trials = _trials(base, axes, seeds, str(path))
    _refuse_twins(trials, str(path))
    return Sweep(file.name, str(path), trials, file.audit, file.resources)


@FILES.register
class SweepFiles(FileKind):
    """Files of ``fedpriv sweep``."""

    name: ClassVar[str] = "base"
    command: ClassVar[str] = "fedpriv sweep"
    kept_as: ClassVar[str] = "sweep.json"
    preview: ClassVar[str] = "fedpriv sweep {} --list"
    results: ClassVar[str] = "sweeps/"
    report: ClassVar[str] = "fedpriv.sweep.page:write_sweep_report"

    @staticmethod
    @overriding
    def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
        raise InputError(f"{path} is a sweep, no experiment; run fedpriv sweep {path}")


def _read(path: Path) -> dict[str, Any]:
    tree = read_toml(path)
    if "base" not in tree and tree.keys() & (Experiment.model_fields.keys() - _File.model_fields.keys()):
        raise InputError(f"{path} is an experiment, no sweep: it names no base; run fedpriv run {path}")
    return tree


def plain_settings(settings: Mapping[str, Any]) -> str:
    """Settings in one line for people: ``mechanism.kappa=5, model.name=mlp``."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "the base settings"


def _scaled(tree: dict[str, Any], asked: str, source: str) -> dict[str, Any]:
    """The file's tables with those of one scale in their place."""
    scales = tree.pop("scales", {})
    usual = tree.pop("scale", "")
    name = asked or usual
    if not isinstance(scales, dict) or not all(isinstance(scale, dict) for scale in scales.values()):
        raise InputError(f"{source}: scales is a section of sections, such as [scales.small]")
    if not name:
        return tree
    if not isinstance(name, str):
        raise InputError(where=source, key="scale", given=name, allowed="the name of one of [scales]")
    if name not in scales:
        known = ", ".join(scales) or "none; the file has no [scales]"
        raise InputError(f"{source}: scale {name!r} is not known; known: {known}")
    merged = _merged(tree, scales[name])
    merged["name"] = f"{merged.get('name', 'sweep')}-{name}"
    return merged


def _merged(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with another's keys in their place; lists are replaced whole."""
    merged = dict(tree)
    for key, value in other.items():
        own = merged.get(key)
        merged[key] = _merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return merged


def _base(base: object, path: Path) -> dict[str, Any]:
    if isinstance(base, dict):
        return _merged({}, base)
    if isinstance(base, str):
        return read_toml(path.parent / base) if base else {}
    raise InputError(
        where=str(path), key="base", given=base, allowed="an experiment file, or its sections, such as [base.data]"
    )


def _seeds(seeds: tuple[int, ...] | None, base: Mapping[str, Any], source: str) -> tuple[int, ...]:
    if seeds is None:
        usual = base.get("seed", 0)
        if not isinstance(usual, int):
            raise InputError(where=source, key="the base's seed", given=usual, allowed="expected a number")
        return (usual,)
    if not seeds:
        raise InputError(f"{source}: seeds is empty: no trial would run")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{source}: seeds names a seed twice")
    return seeds


# ---- what varies -----------------------------------------------------------------------------------------------------


def _axes(file: _File, source: str) -> dict[str, tuple[Values, ...]]:
    """Name of an axis -> its positions, each the values that it sets; lists before the grid."""
    axes = _lists(file.list, source)
    if file.grid is not None and not file.grid:
        raise InputError(f"{source}: grid is empty: no trial would run")
    for keys, values in _values(file.grid or {}, f"{source}: grid"):
        name = f"grid.{'.'.join(keys)}"
        if not isinstance(values, list):
            raise InputError(
                where=source, key=name, given=values, allowed=f"expected a list of values, such as [{values!r}]"
            )
        axes[name] = tuple(((keys, value),) for value in values)
    holders: dict[Key, str] = {}
    for name, positions in axes.items():
        if not positions:
            raise InputError(f"{source}: {name} is empty: no trial would run")
        for keys in {keys for position in positions for keys, _ in position}:
            if keys == ("seed",):
                raise InputError(f"{source}: {name} sets seed; use seeds")
            if holders.setdefault(keys, name) != name:
                raise InputError(f"{source}: {'.'.join(keys)} varies twice, in {holders[keys]} and in {name}")
    return axes


def _lists(lists: object, source: str) -> dict[str, tuple[Values, ...]]:
    if lists is None:
        return {}
    named = {"list": lists} if isinstance(lists, list) else lists
    if not isinstance(named, dict):
        raise InputError(
            where=source, key="list", given=lists, allowed="entries [[list]], or [[list.NAME]] for each axis"
        )
    axes = {}
    for name, entries in named.items():
        title = name if named is not lists else f"list.{name}"
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{source}: {title} is not a list of tables; write [[{title}]] before each entry")
        axes[title] = tuple(_values(entry, f"{source}: an entry of {title}") for entry in entries)
    return axes


def _values(tree: Mapping[str, Any], where: str) -> Values:
    """The values in nested tables with their keys; a quoted key with dots is as good as nested tables."""
    values = tuple(leaves(tree))
    keys = [key for key, _ in values]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise InputError(f"{where} gives {'.'.join(twice)} twice")
    return values


# ---- trials ----------------------------------------------------------------------------------------------------------


Refused = tuple[int, Mapping[str, Any]]
"""The number and the settings of a trial that cannot run."""


def _trials(
    base: Mapping[str, Any], axes: Mapping[str, tuple[Values, ...]], seeds: Sequence[int], source: str
) -> tuple[Trial, ...]:
    """Every trial; the seeds vary slowest, so that a sweep that is cut off has each setting once."""
    refused: dict[str, list[Refused]] = {}
    trials = []
    for number, (seed, positions) in enumerate(itertools.product(seeds, itertools.product(*axes.values())), 1):
        settings = {".".join(keys): value for position in positions for keys, value in position}
        try:
            trials.append(Trial(number, MappingProxyType(settings), seed, _experiment(base, positions, seed, source)))
        except InputError as error:
            refused.setdefault(str(error.replaced(where="")), []).append((number, settings))
    total = len(trials) + sum(len(who) for who in refused.values())
    refuse_trials(refused, total, source)
    return tuple(trials)


def refuse_trials(refused: Mapping[str, Sequence[Refused]], total: int, source: str) -> None:
    """Raise one line that says how many trials cannot run, and which, by the first reasons."""
    if not refused:
        return
    count = sum(len(who) for who in refused.values())
    parts = [f"{reason}: trial{'s' if len(who) > 1 else ''} {_listed(who)}" for reason, who in refused.items()]
    if len(parts) > _REASONS:
        parts[_REASONS:] = [f"and {len(parts) - _REASONS} further reasons"]
    verb = "trial of" if count == 1 else "trials of"
    raise InputError(f"{source}: {count} {verb} {total} cannot run, so none was started: {'; '.join(parts)}")


def _listed(trials: Sequence[Refused]) -> str:
    """The first trials with their settings, the others by number."""
    first = ", ".join(f"{number} ({plain_settings(settings)})" for number, settings in trials[:_NAMED])
    rest = members_text(number for number, _ in trials[_NAMED:])
    return first + (f", and {rest}" if rest else "")


def _experiment(base: Mapping[str, Any], positions: Sequence[Values], seed: int, source: str) -> Experiment:
    tree = deepcopy(dict(base))
    # All at once: two noise parameters that exclude each other are both there then, and refused.
    override(tree, [pair for values in positions for pair in values], "")
    tree["seed"] = seed
    experiment = validated(Experiment, tree, source)
    if experiment.engine.name == "ray" or experiment.engine.address:
        key = "address" if experiment.engine.address else "name"
        raise InputError(f"engine.{key}: a trial runs in one process; the sweep's own Ray is set in [resources]")
    engine = experiment.engine.model_copy(update={"name": "inline"})
    return experiment.model_copy(update={"engine": engine})


def _refuse_twins(trials: Sequence[Trial], source: str) -> None:
    seen: dict[Experiment, int] = {}
    for trial in trials:
        first = seen.setdefault(trial.experiment, trial.number)
        if first != trial.number:
            raise InputError(
                f"{source}: trials {first} and {trial.number} ({plain_settings(trial.settings)}) are the same"
            )
