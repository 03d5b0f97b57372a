"""Runs in a notebook: start one, look at its figures and pictures, attack it, audit it.

>>> import fedpriv
>>> run = fedpriv.run("configs/quickstart.toml", mechanism={"name": "gaussian", "sigma": 0.1})  # doctest: +SKIP
>>> run.epsilon, run.accuracy  # doctest: +SKIP
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpriv.attacks.commands import Audit, chosen_audit
from fedpriv.core.cli.terminal import command_of, default_folder, shown
from fedpriv.core.config import Experiment, load_experiment, parse_override
from fedpriv.core.config.file import leaves
from fedpriv.core.errors import InputError, optional
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.lab import attack_command, attack_run, resume_run, start_run
from fedpriv.core.reading import GrowingRecord
from fedpriv.core.records import Summary
from fedpriv.core.registry import OPTIONS, suggestion
from fedpriv.core.report import load_view, render_card, reported, write_report
from fedpriv.core.runs import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Run:
    """A run's results, which notebooks show; ``Run("runs/x")`` opens the folder of an earlier run."""

    path: Path  # of the folder

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        RunFolder.open(self.path)

    @property
    def experiment(self) -> Experiment:
        """The resolved settings."""
        return RunFolder(self.path).experiment()

    @property
    def summary(self) -> Summary:
        """The run's results, as in summary.json.

        Raises:
            InputError: the run has not ended.
        """
        return RunFolder(self.path).final_summary()

    @property
    def accuracy(self) -> float | None:
        """The share of test examples that the model classifies correctly, from 0 to 1; ``None``: not evaluated."""
        return self.summary.test_accuracy

    @property
    def epsilon(self) -> float | None:
        """The proven epsilon of the worst client at ``summary.ledger.delta``; ``None``: nothing is proven."""
        ledger = self.summary.ledger
        return None if ledger is None else ledger.epsilon

    @property
    def report(self) -> Path:
        """The path of report.html, which is written if it is not there."""
        path = self.path / "report.html"
        return path if path.is_file() else write_report(self.path)

    @property
    def rounds(self) -> "DataFrame":
        """One row a round, as in metrics.jsonl."""
        return _frame((record.to_json() for record in RunFolder(self.path).rounds()), "round")

    @property
    def scores(self) -> "DataFrame":
        """One row for each reconstruction or guess, as in reconstructions/scores.jsonl."""
        return _frame(score.to_json() for score in RunFolder(self.path).scores())

    @property
    def ledger(self) -> "DataFrame":
        """Proven guarantees: one row for clients with the same guarantee, the worst first, as in ledger.json."""
        return _frame(asdict(line) for line in RunFolder(self.path).final_ledger().clients)

    def attack(
        self,
        name: str | None = None,
        *,
        victims: Sequence[str] = (),
        out: str | Path | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> "Run":
        """Attack the observed uploads as ``fedpriv attack DIR --attack NAME`` does; return the run with the results.

        Args:
            name: of an attack; ``None``: the run's attacks.
            victims: uploads to attack, such as ``"1-3"`` for round 1, client 3; none: all.
            out: write to a copy in this folder; ``None``: add to the run's folder.
            quiet: show warnings only.
            settings: of the attack, such as ``tv=0.001``.

        Raises:
            InputError: the attack, an upload or a setting is not known.
        """
        if settings and name is None:
            raise InputError(f"{next(iter(settings))} is a setting of an attack: name the attack")
        names = () if name is None else (name,)
        overrides = _overrides({"adversary": {name: settings}}) if settings else ()
        copy = None if out is None else Path(out)
        path = copy or self.path
        command = attack_command(self.path, names, victims, overrides)
        with shown(quiet) as progress, reported(path):
            attack_run(self.path, names, victims, overrides, copy, command, progress)
        return Run(path)

    def audit(self, *, quiet: bool = False, **options: Any) -> GrowingRecord:
        """Infer membership, or measure a language model's memorisation, as ``fedpriv audit DIR`` does.

        Args:
            quiet: show warnings only.
            options: of the command, such as ``references=32``.

        Returns:
            The audit's results, such as a ``Membership`` with ``attacks`` and ``epsilon_bound``.

        Raises:
            InputError: an option is not known or not allowed.
            RunFailedError: an attack exceeds what is proven.
        """
        kinds: list[type[Any]] = [kind for kind in OPTIONS.values() if issubclass(kind, Audit)]
        known = {each.name: kind for kind in kinds for each in fields(kind)}
        if unknown := next((name for name in options if name not in known), None):
            raise InputError(f"audit has no option {unknown!r}{suggestion(unknown, tuple(known))}")
        folder = RunFolder.open(self.path)
        made = [kind(**{name: value for name, value in options.items() if known[name] is kind}) for kind in kinds]
        chosen = chosen_audit(folder, made)
        with shown(quiet) as progress, reported(self.path):
            found: GrowingRecord = chosen.made(folder, progress)
        refuse_exceeded(chosen.figures(found))
        return found

    def _repr_html_(self) -> str:
        """Key figures, pictures and the verdict, for a notebook."""
        return render_card(load_view(self.path))


def run(file: str | PathLike[str], *, out: str | Path | None = None, quiet: bool = False, **settings: Any) -> Run:
    """Run an experiment as ``fedpriv run FILE`` does, and return its results; the folder has the same bytes.

    Args:
        file: an experiment file, or the folder of an interrupted run, which is finished.
        out: folder of the run; ``None``: runs/NAME-TIME.
        quiet: show warnings only.
        settings: override the file's: sections as dicts, such as ``mechanism={"name": "gaussian", "sigma": 0.1}``, or
            keys, such as ``seed=3``.

    Raises:
        InputError: a setting is not allowed, or does not fit the data, the network or this machine.
        RunFailedError: the run could not be finished (the folder says why), or an attack exceeds what is proven.
    """
    if not isinstance(file, str | PathLike):
        raise InputError(
            key="file", given=file, allowed="expected the path of an experiment file; its sections are keywords"
        )
    source = Path(file)
    if source.is_dir():
        if out is not None or settings:
            raise InputError(f"{source} is the folder of a run, which keeps its settings and its place")
        with shown(quiet) as progress, reported(source):
            resume_run(source, progress)
        return Run(source)
    overrides = _overrides(settings)
    experiment = load_experiment(source, overrides)
    path = default_folder(experiment.name) if out is None else Path(out)
    with shown(quiet) as progress, reported(path):
        start_run(experiment, path, command_of("run", source, overrides), progress)
    return Run(path)


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    """The settings as ``--set`` takes them."""
    named = [(".".join(keys), value) for keys, value in leaves(settings)]
    return [f"{key}={_written(key, value)}" for key, value in named]


def _written(key: str, value: Any) -> str:
    """A value in TOML; a text as it is where that is understood."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(value, str | Path):
        text = str(value)
        return text if parse_override(f"{key}={text}")[1] == text else json.dumps(text)
    if not isinstance(value, bool | int | float | list | tuple):
        raise InputError(key=key, given=value, allowed="a number, a text, true or false, or a list of them")
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What a list holds, such as numbers of numpy, as JSON has it."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _frame(rows: Iterable[Mapping[str, Any]], index: str | None = None) -> "DataFrame":
    pandas = optional("pandas", "notebook", "a frame of a run")
    frame: DataFrame = pandas.DataFrame(list(rows))
    return frame if index is None or frame.empty else frame.set_index(index)
