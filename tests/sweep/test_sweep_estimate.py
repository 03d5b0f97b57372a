"""What a sweep will cost, from short runs of one trial of each kind."""

import json
from pathlib import Path

import pytest

from fedpriv.core.config import Experiment
from fedpriv.sweep import run as rooms
from fedpriv.sweep.run import Cost, estimate, untimed
from tests.command_line import fedpriv
from tests.sweep import sweeps


def known(experiment: Experiment) -> Cost:
    """The law that is assumed, with figures that tell its parts apart."""
    rounds, passes = experiment.federation.rounds, experiment.training.local_epochs
    if experiment.federation.algorithm == "fedsgd":
        passes = 1
    assert not experiment.adversary.attacks
    return Cost(100 + 10 * rounds + rounds * passes, 1000 + 5 * rounds)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("rounds", [1, 2, 30])
@pytest.mark.parametrize("passes", [1, 7])
def test_whole_trials_from_short_ones(
    algorithm: str, rounds: int, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def timed(experiment: Experiment) -> Cost:
        lengths.append(experiment.federation.rounds * experiment.training.local_epochs)
        return known(experiment)

    monkeypatch.setattr(rooms, "_timed", timed)
    federation = {"clients": 2, "rounds": rounds, "algorithm": algorithm}
    training = {"local_epochs": passes} if algorithm == "fedavg" else {}
    asked = sweeps.sweep(tmp_path, set={"federation": federation, "training": training})
    kinds = list(estimate(asked))
    assert sorted(trial.number for kind in kinds for trial in kind.trials) == [trial.number for trial in asked.trials]
    assert len(kinds) < len(asked.trials)
    for kind in kinds:
        assert kind.each == known(kind.trials[0].experiment)
        assert kind.all == Cost(len(kind.trials) * kind.each.seconds, len(kind.trials) * kind.each.size)
    assert max(lengths) <= 2


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    assert untimed(sweeps.sweep(tmp_path)) == []
    attacked = sweeps.sweep(tmp_path, set={"adversary": {"attacks": ["dlg"]}}, audit={"references": 6, "pairs": 8})
    assert untimed(attacked) == ["attacks on uploads", "the audit"]


def test_the_command_runs_nothing_that_stays(tmp_path: Path) -> None:
    file = sweeps.write(tmp_path, set={"federation": {"clients": 2, "rounds": 40}})
    shown = json.loads(fedpriv("sweep", str(file), "--dry-run", "--json", cwd=tmp_path).stdout)
    assert sorted(number for kind in shown["kinds"] for number in kind["trials"]) == list(range(1, 7))
    assert all(kind["cpu_seconds_each"] > 0 and kind["bytes_each"] > 0 for kind in shown["kinds"])
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
