"""A privacy target that is reached: clients stop, the run goes on or ends, and everything says so."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fedpriv.core.cli.display import Display
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunInterruptedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.lab import run as lab_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from tests.integration.small import MISBEHAVIOURS, experiment, misbehaving

VMF = {"name": "vmf", "kappa": 40.0}
ATTACKED = {"attacks": ["iga"], "rounds": [1, 25], "victims": 1, "iga": {"iterations": 3}}


def settings(**federation: object) -> Experiment:
    """Clients of 233, 671, 319 and 214 examples in batches of 32: passes of 7, 20, 9 and 6 rounds."""
    return experiment(
        mechanism=VMF,
        data={"partition": "dirichlet"},
        training={"batch_size": 32},
        federation={"rounds": 30, **federation},
        adversary=ATTACKED,
    )


def read(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / name).read_text())


def test_clients_stop_and_the_others_go_on(tmp_path: Path) -> None:
    """The target lies between two passes (epsilon 23.6) and three (31)."""
    summary = start_run(settings(target_epsilon=30.0), tmp_path / "run", "", Silent())
    assert (summary.status, summary.reason, summary.rounds) == ("completed", None, 30)
    assert [(stop.client, stop.round) for stop in summary.stops] == [(3, 12), (0, 14), (2, 18)]
    assert all(stop.epsilon < 30 < (stop.next_epsilon or 0) for stop in summary.stops)
    asked = {line.round: line.clients for line in RunFolder.open(tmp_path / "run").asked()}
    assert [asked[number] for number in (12, 13, 15, 19, 30)] == [(0, 1, 2, 3), (0, 1, 2), (1, 2), (1,), (1,)]
    ledger = read(tmp_path / "run", "ledger.json")["clients"]
    assert isinstance(ledger, list)
    assert [line["participations"] for line in ledger] == [2, 2, 2, 2]
    assert all(line["epsilon"] <= 30 for line in ledger)
    assert "3 of 4 clients stopped between rounds 12 and 18" in " ".join(summary.verdict)
    assert summary.to_json()["stops"][0]["client"] == 3
    page = write_report(tmp_path / "run").read_text()
    assert "3 of 4 clients stopped for that reason" in page
    assert "Stopped after round" in page


def test_the_metrics_tell_what_is_proven_so_far(tmp_path: Path) -> None:
    start_run(settings(target_epsilon=30.0), tmp_path / "run", "", Silent())
    epsilons = [record.epsilon for record in RunFolder.open(tmp_path / "run").rounds()]
    worst = read(tmp_path / "run", "ledger.json")["worst"]
    assert isinstance(worst, dict)
    assert epsilons[0] == 0.0
    assert epsilons[1] == epsilons[6] < epsilons[7] == epsilons[30]
    # The final ledger composes numerically, which is a little tighter.
    assert 0.9 * epsilons[30] < worst["epsilon"] <= epsilons[30]


def test_a_used_up_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    summary = start_run(settings(target_epsilon=30.0, min_clients=2), tmp_path / "run", "", Silent())
    assert (summary.status, summary.rounds) == ("completed", 18)
    assert summary.reason is not None
    assert summary.reason.startswith("the run ended after round 18 of 30 because the privacy budget is used up: 1 of 4")
    assert "The run ended after round 18 of 30" in summary.verdict[-1]
    assert any("round 25 of adversary.rounds will not happen" in text for text in summary.warnings)
    assert {score["round"] for score in map(json.loads, _lines(tmp_path / "run/reconstructions/scores.jsonl"))} == {1}
    again = resume_run(tmp_path / "run", Silent())
    assert (again.rounds, again.reason, again.stops) == (summary.rounds, summary.reason, summary.stops)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_target_that_allows_no_round_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target_epsilon = 1 allows no round: the first would take 4 of 4 clients"):
        start_run(settings(target_epsilon=1.0), tmp_path / "run", "", Silent())
    assert not (tmp_path / "run").exists()


def test_a_client_that_fails_has_taken_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its upload could be used or not, it may have released something."""
    whole = start_run(settings(target_epsilon=30.0), tmp_path / "whole", "", Silent())
    monkeypatch.setattr("fedpriv.core.lab.run.client_app", misbehaving(MISBEHAVIOURS["nan"][0], {3}))
    failing = start_run(settings(target_epsilon=30.0), tmp_path / "failing", "", Silent())
    assert failing.stops == whole.stops
    failed, went = (
        [(line.round, line.clients) for line in RunFolder.open(tmp_path / name).asked()]
        for name in ("failing", "whole")
    )
    assert failed == went


def test_clients_stop_before_a_ceiling(tmp_path: Path) -> None:
    """Two passes are allowed, three are not; a run that stops so is killed and resumed in test_determinism.py."""
    own = experiment(
        mechanism=VMF,
        data={"partition": "dirichlet"},
        training={"batch_size": 32},
        federation={"rounds": 16, "target_ceiling": 0.4},
    )
    console = Console(record=True, width=80, force_terminal=False, file=io.StringIO())
    with Display(console) as display:
        whole = start_run(own, tmp_path / "whole", "", display)
    assert whole.stops
    assert all((stop.ceiling or 1) <= 0.4 < (stop.next_ceiling or 0) for stop in whole.stops)
    assert "stops at federation.target_ceiling" in console.export_text()
    ledger = read(tmp_path / "whole", "ledger.json")["clients"]
    assert isinstance(ledger, list)
    assert all(line["ceilings"]["told"]["gamma"] <= 0.4 for line in ledger)
    assert "above federation.target_ceiling = 0.4" in " ".join(whole.verdict)
    page = write_report(tmp_path / "whole").read_text()
    assert "the ceiling of attacks on it above" in " ".join(page.split())


def test_a_target_ceiling_is_named_without_attacks(tmp_path: Path) -> None:
    noise = {"name": "gaussian", "target_ceiling": 0.3, "candidates": 10}
    summary = start_run(experiment(mechanism=noise, federation={"rounds": 1}), tmp_path / "run", "", Silent())
    ledger = read(tmp_path / "run", "ledger.json")["clients"]
    assert isinstance(ledger, list)
    assert all(line["ceilings"]["target"]["k0"] == 0.1 for line in ledger)
    highest = max(line["ceilings"]["target"]["gamma"] for line in ledger)
    assert 0.298 < highest <= 0.3
    said = f"no attack picks an example out of candidates in more than {highest:.2%} of cases, where a guess without"
    page = " ".join(write_report(tmp_path / "run").read_text().split())
    assert said in " ".join(summary.verdict) and said in page


def test_the_terminal_says_who_stops_in_80_columns(tmp_path: Path) -> None:
    console = Console(record=True, width=80, force_terminal=False, file=io.StringIO())
    with Display(console) as display:
        start_run(settings(target_epsilon=30.0), tmp_path / "run", "", display)
    text = console.export_text()
    assert "round 13: client 3 stops at federation.target_epsilon; 3 left" in text
    assert "ε ≤ 23.6" in text
    rounds = [line for line in text.splitlines() if line.startswith("round ")]  # which nothing wraps here
    assert len(rounds) >= 13 and max(map(len, rounds)) <= 80


def test_an_interruption_is_answered_before_what_there_is_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final ledger takes seconds."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab_run, "run_engine", interrupted)
    console = Console(record=True, width=200, force_terminal=False, file=io.StringIO())

    def writes(_: object, name: str, *__: object) -> None:
        if name == "ledger.json":
            assert "interrupted: writing the ledger" in console.export_text(clear=False)

    monkeypatch.setattr(RunFolder, "write_json", writes)
    with Display(console) as display, pytest.raises(RunInterruptedError, match="finish it with: fedpriv run --resume"):
        start_run(settings(target_epsilon=30.0), tmp_path / "run", "", display)
