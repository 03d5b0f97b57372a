"""What is proven of the trial that a comparison's reader chooses for its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting import ORDERS, Release
from fedpriv.accounting.proofs import Proof
from fedpriv.accounting.selection import Selection, selections
from fedpriv.core.errors import InputError
from fedpriv.core.names import AGAINST
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
    trials = [*done, *(record for record in records if record not in done and _has_begun(record))]
    runs = [_TrialRun.of(record) for record in trials]
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        told = " and ".join(sorted(map(_worded, kinds)))
        raise InputError(f"--private-selection: trials prove statements of different kinds ({told}); allowed: of one")
    delta, *_, bounds = runs[0].kind
    found = selections([run.rdp() for run in runs], delta)
    priced = tuple(replace(each, epsilon=each.epsilon + bounds) for each in found)
    best = max(done, key=lambda record: record.accuracy or 0.0)
    return ChosenTrial(best.trial, best.epsilon or 0.0, delta, best.adjacency or "", priced)


def _worded(kind: tuple[float, str, str, float]) -> str:
    delta, adjacency, unit, bounds = kind
    return f"delta = {delta:g}, {adjacency}, {unit}" + (f", bounds_epsilon = {bounds:g}" if bounds else "")


def _has_begun(record: TrialRecord) -> bool:
    """Whether a trial that failed, or has no accuracy, released anything."""
    return bool(RunFolder(Path(record.folder)).asked())


@dataclass(frozen=True)
class _TrialRun:
    """What the clients of a trial have released."""

    trial: int
    releases: tuple[Release, ...]  # one of each kind of client
    bounds: float  # epsilon of the bounds of a table's columns, which were estimated once, before all trials

    @classmethod
    def of(cls, record: TrialRecord) -> Self:
        """Read it from the trial's folder."""
        folder = RunFolder.open(Path(record.folder))
        if folder.ledger() is None or folder.summary() is None:
            raise InputError(
                f"--private-selection: trial {record.trial} failed once it had begun, and what it released counts, "
                f"too: run it again, or name folders without {record.folder}"
            )
        experiment, ledger, tensors = folder.experiment(), folder.final_ledger(), folder.final_summary().model.tensors
        releases: dict[Release, None] = {}
        for line in ledger.clients:
            if line.epsilon is None or line.noise is None or tensors is None or line.examples is None:
                raise InputError(f"--private-selection: nothing is proven of trial {record.trial} ({record.folder})")
            plan = draft_plan(experiment, line.client, line.examples, tensors)
            noisy = replace(plan, config=experiment.mechanism.with_noise(line.noise))
            releases[replace(noisy.accounted(()), participations=line.participations)] = None
        return cls(record.trial, tuple(releases), experiment.data.bounds_epsilon)

    @property
    def kind(self) -> tuple[float, str, str, float]:
        """What the statements of trials must have in common."""
        release = self.releases[0]
        against = AGAINST[MECHANISMS[release.mechanism].noise_at]
        return float(release.delta), release.adjacency, release.unit + against, self.bounds

    def rdp(self) -> NDArray[np.float64]:
        """Renyi privacy at ORDERS of any client: which of them has the most depends on the order."""
        curves = [self._rdp(release) for release in self.releases if release.participations]
        return np.max([np.zeros_like(ORDERS), *curves], axis=0)

    def _rdp(self, release: Release) -> NDArray[np.float64]:
        curve = MECHANISMS[release.mechanism].proof()(release).run_rdp()
        if curve is None:
            names = ", ".join(n for n, k in MECHANISMS.items() if k.proof().run_rdp is not Proof.run_rdp)
            raise InputError(
                f"--private-selection: no Renyi privacy of trial {self.trial} (mechanism {release.mechanism}) is "
                f"known; allowed: {names}"
            )
        return curve
