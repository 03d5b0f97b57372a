"""Attacks on what a listener on the network has stored of a deployment's run, in a copy of the run's folder.

The run's own observations are the server's; those of the copy come from the traffic, and its threat model is the
network's: without TLS, or, where the listener heard nothing but TLS, with it.
"""

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.config import Experiment, validated
from fedpriv.errors import InputError
from fedpriv.files import stopped
from fedpriv.lab.attack_again import attack_run, copy_run, plan_attacks, write_attacked
from fedpriv.lab.attack_stage import Leakage
from fedpriv.listener import LISTENED, Listened, read_listened
from fedpriv.progress import Progress
from fedpriv.records import Summary
from fedpriv.runs import DEPLOYMENT, RunFolder

__all__ = ["attack_heard"]

# What a copy does not take over: what the server heard, and what came of it.
_LEFT_OUT = ("observations", "reconstructions", "report.html")


class _Deployed(BaseModel):
    run_id: str


_DEPLOYED = TypeAdapter(_Deployed)


@dataclass(frozen=True)
class _Stored:
    """One upload that the listener has stored: its tensor file, and what it is."""

    path: Path
    round: int
    client: int

    @staticmethod
    def read(path: Path) -> "_Stored":
        observation = read_observation(path)
        return _Stored(path, observation.round, observation.client)

    @property
    def name(self) -> str:
        """How a user names it."""
        return f"{self.round}-{self.client}"


def attack_heard(
    path: Path,
    heard: Path,
    names: Sequence[str],
    victims: Sequence[str],
    overrides: Sequence[str],
    out: Path,
    command: str,
    progress: Progress,
) -> Summary:
    """Attack what was heard of a run on the network.

    Args:
        path: the run's folder.
        heard: the listener's folder.
        names: of attacks; none: those of the run.
        victims: names of the uploads to attack, such as 1-3; none: all that were heard.
        overrides: ``key=value``, as for :func:`~fedpriv.lab.attack_again.attack_run`.
        out: the copy of the run's folder, made here.
        command: what repeats this, for the report.
        progress: told what happens.

    Returns:
        The copy's summary.

    Raises:
        InputError: one of the folders is not what it should be, the listener has heard another run, or an attack,
            victim or setting is not known.
        RunFailedError: the results cannot be written.
    """
    source = RunFolder.open(path)
    listened = read_listened(heard)
    before = source.experiment()
    plan_attacks(before, before, names)
    stored = _stored(heard, source, listened)
    experiment = _overheard(before, names, listened, stored)
    if not experiment.adversary.attacks:
        raise InputError(f"{path}: its settings name no attack; name one with --attack")
    folder = copy_run(source, out, _at_the_top(source.path))
    try:
        _put_in(folder, experiment, heard, stored)
        if not stored:
            return write_attacked(folder, experiment, folder.final_summary(), command, Leakage())
        progress.stage(listened.verdict)
        return attack_run(out, names, victims or [each.name for each in stored], overrides, None, command, progress)
    except InputError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    except OSError as error:
        # The copy is neither the run nor what was heard of it yet.
        shutil.rmtree(out, ignore_errors=True)
        raise stopped(error, command and f"{command} --out {shlex.quote(str(out))}") from None


def _stored(heard: Path, source: RunFolder, listened: Listened) -> tuple[_Stored, ...]:
    """The observations of this run among what the listener has stored."""
    path = source.path / DEPLOYMENT
    try:
        run_id = _DEPLOYED.validate_json(path.read_bytes()).run_id
    except FileNotFoundError:
        raise InputError(f"{source.path} is not the run of a deployment: it has no {DEPLOYMENT}") from None
    except (OSError, ValueError):
        raise InputError(f"{path} is damaged") from None
    every = [_Stored.read(each) for each in list_observations(heard / f"run-{run_id}" / "observations")]
    if not every and listened.uploads:
        others = {each.parent.name for each in heard.glob("run-*/observations") if any(each.iterdir())}
        known = f"it has heard {', '.join(sorted(others))}" if others else "the uploads that it has heard are gone"
        raise InputError(f"{heard} holds nothing of run {run_id}; {known}")
    answered = {record.round: {*record.used, *record.crafted} for record in source.rounds()}
    # The answers of a round that was cut off are in no line of the metrics.
    return tuple(one for one in every if one.client in answered.get(one.round, ()))


def _overheard(before: Experiment, names: Sequence[str], listened: Listened, stored: Sequence[_Stored]) -> Experiment:
    """The settings with the adversary on the network: everything but labels is in the messages."""
    rounds = tuple(sorted({each.round for each in stored}))
    changes = {
        "threat_model": "network-tls" if listened.is_encrypted else "network-plaintext",
        "attacks": tuple(names) or before.adversary.passive_attacks,
        "rounds": rounds or before.adversary.rounds,
        "victims": before.federation.clients,
        "knows_mechanism": True,
        "knows_batch_size": True,
        "knows_labels": False,
    }
    told = before.model_dump()
    return validated(Experiment, {**told, "adversary": {**told["adversary"], **changes}}, "a listener on the network")


def _put_in(folder: RunFolder, experiment: Experiment, heard: Path, stored: Sequence[_Stored]) -> None:
    """Put what was heard in the place of what the server heard."""
    folder.write_text("config.toml", experiment.to_toml())
    for one in stored:
        for each in (one.path, one.path.with_suffix(".json")):
            folder.write_bytes(f"observations/{each.name}", each.read_bytes())
    folder.write_bytes(LISTENED, (heard / LISTENED).read_bytes())


def _at_the_top(top: Path) -> Callable[[str, list[str]], Sequence[str]]:
    return lambda folder, names: _LEFT_OUT if Path(folder) == top else ()
