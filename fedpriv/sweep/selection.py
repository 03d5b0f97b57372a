"""What is proven of the trial that a comparison's reader chooses for its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedpriv.accounting import Release
from fedpriv.accounting.proofs import Proof
from fedpriv.accounting.selection import Selection, selections
from fedpriv.core.errors import InputError
from fedpriv.core.plan import draft_plan
from fedpriv.core.records import shown_epsilon
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.runs import RunFolder
from fedpriv.sweep.record import TrialRecord


@dataclass(frozen=True)
class ChosenTrial:
    """The most accurate of several trials, with what is proven of it for having been chosen."""

    trial: int
    own_epsilon: float  # of this trial alone, as if nothing had been chosen
    delta: float
    adjacency: str
    selections: tuple[Selection, ...]

    def sentences(self) -> list[str]:
        """Say it in lines, the price of a fixed number of trials first."""
        at = f"at delta = {self.delta:g}, {self.adjacency.partition(':')[0]}"
        lines = [
            f"Trial {self.trial} is the most accurate. Epsilon of its training alone, as if it had not been chosen: "
            f"{shown_epsilon(self.own_epsilon)} {at}."
        ]
        lines += [
            f"Epsilon of the chosen trial, the number of trials being {each.number}: {shown_epsilon(each.epsilon)} "
            f"({each.theorem})."
            for each in self.selections
        ]
        return [*lines, _CONDITIONS]


_CONDITIONS = (
    "A drawn number has to be drawn before the trials are made, and kept secret as their results are; each trial draws "
    "one of the settings uniformly; the score comes from the trained model and data that are public. A Poisson law may "
    "give no trial."
)


def chosen_trial(records: Sequence[TrialRecord]) -> ChosenTrial:
    """Return the most accurate of the trials, with the price of choosing it."""
    done = [record for record in records if not record.failed and record.accuracy is not None]
    if not done:
        raise InputError("--private-selection: no trial has an accuracy to be chosen for")
    releases = [_release(record) for record in done]
    kinds = {(each.delta, each.adjacency, each.unit) for each in releases}
    if len(kinds) > 1:
        told = " and ".join(sorted(f"delta = {delta:g}, {adjacency}, {unit}" for delta, adjacency, unit in kinds))
        raise InputError(f"--private-selection: trials prove statements of different kinds ({told}); allowed: of one")
    curves = [_proof(release).run_rdp() for release in releases]
    known = [curve for curve in curves if curve is not None]
    if len(known) < len(curves):
        odd = done[[curve is None for curve in curves].index(True)]
        names = ", ".join(n for n, k in MECHANISMS.items() if k.proof().run_rdp is not Proof.run_rdp)
        raise InputError(
            f"--private-selection: no Renyi privacy of trial {odd.trial} (mechanism {odd.mechanism}) is known; "
            f"allowed: {names}"
        )
    best = max(done, key=lambda record: record.accuracy or 0.0)
    delta = float(releases[0].delta)
    return ChosenTrial(best.trial, best.epsilon or 0.0, delta, best.adjacency or "", selections(known, delta))


def _proof(release: Release) -> Proof:
    return MECHANISMS[release.mechanism].proof()(release)


def _release(record: TrialRecord) -> Release:
    """What the worst client of a trial has released."""
    folder = RunFolder.open(Path(record.folder))
    experiment, line, tensors = folder.experiment(), folder.final_ledger().worst, folder.final_summary().model.tensors
    if line.epsilon is None or line.noise is None or tensors is None or line.examples is None:
        raise InputError(f"--private-selection: nothing is proven of trial {record.trial} ({record.folder})")
    plan = draft_plan(experiment, line.client, line.examples, tensors)
    config = experiment.mechanism.with_noise(line.noise)
    return replace(replace(plan, config=config).accounted(()), participations=line.participations)
