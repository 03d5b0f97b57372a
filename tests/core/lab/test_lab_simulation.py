"""Whole runs whose clients an attack cannot simulate, or in which an attack breaks: what counts, and what is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.attacks import campaign
from fedpriv.attacks.reconstruction import AttackJob, Reconstruction, run_attack
from fedpriv.clients.training import local_upload, unprotected_upload
from fedpriv.core.errors import InputError
from fedpriv.core.finding import Finding
from fedpriv.core.lab import attack_run, start_run
from fedpriv.core.lab.preflight import simulation_check
from fedpriv.core.lab.results import is_above_guess
from fedpriv.core.lab.victims import targets
from fedpriv.core.progress import Silent
from fedpriv.core.records import LeakageRate, Summary
from fedpriv.core.registry import ATTACKS
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.server.tap import public_settings
from tests.cases import in_one_test
from tests.integration.small import experiment

OWN = "tests.core.lab.odd_networks"
ADVERSARY = {"attacks": ["iga", "closed_form"], "victims": 2, "rounds": [1], "iga": {"iterations": 3}}
NONE = {"batch_size": 1}


def run(path: Path, network: str, **sections: Any) -> Summary:
    adversary = {**ADVERSARY, **sections.pop("adversary", {})}
    settings: dict[str, Any] = {"federation": {"rounds": 1}, "training": NONE, **sections}
    given = experiment(adversary=adversary, **settings)
    if network:
        tree = given.model_dump()
        given = type(given).model_validate({**tree, "model": {"name": f"{OWN}:{network}"}})
    return start_run(given, path, "", Silent())


def attacks_in(folder: Path) -> set[str]:
    path = folder / "reconstructions" / "scores.jsonl"
    return {json.loads(line)["attack"] for line in path.read_text().splitlines()} if path.exists() else set()


def test_a_network_that_draws_is_warned_of_and_only_what_is_recovered_counts(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "dropping")
    assert any("the network draws random numbers while clients train" in text for text in summary.warnings)
    # The closed form reads the first layer, whatever is dropped behind it; iga makes three steps and recovers nothing.
    assert {row.attack for row in summary.attacks if row.upload != "none"} == {"closed_form"}
    assert any("Without protection the eavesdropper recovers 2 of 2" in text for text in summary.verdict)
    (refusal,) = [text for text in summary.refusals if "iga" in text]
    assert refusal.startswith("attack iga refused: not attacked: it recovered nothing above a guess; the network draws")
    assert any(text.startswith("Attack iga refused: not attacked") for text in summary.verdict)
    assert "iga" not in attacks_in(tmp_path / "run") and {rate.attack for rate in summary.rates} == {"closed_form"}
    assert not list((tmp_path / "run" / "reconstructions").glob("*iga*"))
    assert "not attacked: it recovered nothing above a guess" in write_report(tmp_path / "run").read_text()


def test_where_all_fail_nothing_is_measured(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "dropping", adversary={"attacks": ["iga"]})
    assert summary.attacks == () and summary.rates == () and attacks_in(tmp_path / "run") <= set()
    assert summary.verdict[0] == "No upload could be attacked, so nothing is said about what the uploads leak."


def test_another_network_is_refused_before_and_readers_of_the_first_layer_are_not(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "running", training={"batch_size": 2})
    assert any(text.startswith("attack iga will be refused: not attacked: its simulation") for text in summary.warnings)
    assert any(text.startswith("attack iga refused: not attacked: its simulation") for text in summary.refusals)
    assert "iga" not in attacks_in(tmp_path / "run") and "iga" not in summary.attack_seconds
    assert any(row.attack == "closed_form" and row.recovered for row in summary.attacks)


def test_earlier_results_of_what_is_not_attacked_any_more_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpriv.attacks.simulation.SimulationCheck.mismatch", lambda *_: None)
    run(tmp_path / "run", "dropping")
    assert "iga" in attacks_in(tmp_path / "run")
    monkeypatch.undo()
    summary = attack_run(tmp_path / "run", ["iga"], [], [], None, "", Silent())
    assert "iga" not in attacks_in(tmp_path / "run")
    assert {row.attack for row in summary.attacks if row.upload != "none"} == {"closed_form"}


def test_the_best_decision_is_not_computed_of_a_network_that_draws(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "run", "dropping", mechanism={"name": "gaussian", "sigma": 3.0}, adversary={"best_decision": True}
    )
    assert any(text.startswith("best decision: not computed: the network draws") for text in summary.refusals)
    assert all(rate.best is None for rate in summary.rates)
    # Behind noise the closed form fails; whether that is the noise's merit is not known, and said once.
    said = [text for text in summary.refusals if text.startswith("attack closed_form refused")]
    assert len(said) == 1 and said[0].startswith("attack closed_form refused, protected: not attacked: it recovered")
    assert any(text.startswith("Attack closed_form refused, protected: not attacked") for text in summary.verdict)
    assert any("No upload with gaussian was attacked" in text for text in summary.verdict)


def test_an_error_in_one_attack_is_its_refusal_and_the_traceback_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: AttackJob) -> list[Reconstruction]:
        if job.name == "iga":
            raise KeyError("padding_idx")
        return run_attack(job)

    monkeypatch.setattr(campaign, "run_attack", broken)
    summary = run(tmp_path / "run", "")
    assert summary.status == "completed"
    assert "attack iga refused: iga failed unexpectedly: KeyError: 'padding_idx'" in summary.refusals
    assert {row.attack for row in summary.attacks if row.upload != "none"} == {"closed_form"}
    kept = (tmp_path / "run" / "reconstructions" / "iga-traceback.txt").read_text()
    assert "in broken" in kept and kept.rstrip().endswith("KeyError: 'padding_idx'")


@in_one_test(
    ("federation", "training"),
    [
        ({"algorithm": "fedsgd"}, {}),
        ({"algorithm": "fedavg"}, {"local_epochs": 1}),
        ({"algorithm": "fedavg"}, {"momentum": 0.9}),
        ({"algorithm": "fedavg"}, {"optimizer": "adam"}),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_random_uploads_are_computed_as_clients_compute_theirs(
    precision: str, federation: dict[str, Any], training: dict[str, Any]
) -> None:
    clients = {"clients": 200}  # of seven images each, so that a round has two steps
    world = build_world(
        experiment(federation={**federation, **clients}, training=training, engine={"precision": precision})
    )
    plan = world.plans[1]
    batches = [world.examples(1, plan.batch(step)) for step in plan.steps(1)]
    upload, drew = unprotected_upload(world, world.initial, batches, 5)
    sent = local_upload(world, 1, world.initial, 1).parameters
    assert not drew and all(torch.equal(upload[name], value) for name, value in sent.items())


@in_one_test("engine", [{"precision": "float32"}, {"precision": "float64"}, {"precision": "bfloat16"}])
def test_the_usual_network_is_simulated_and_the_run_draws_what_it_drew(engine: dict[str, Any]) -> None:
    world = build_world(experiment(engine=engine, federation={"algorithm": "fedavg", "clients": 200}))
    before = {name: value.clone() for name, value in world.model.state_dict().items()}
    public = public_settings(world.experiment, world.dataset, world.plans[0])
    states = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    assert simulation_check(world).at(ATTACKS["iga"].simulation(), world.initial.parameters, public) is None
    assert (np.random.get_state()[1] == states[0]).all() and torch.equal(torch.get_rng_state(), states[1])  # noqa: NPY002
    assert all(torch.equal(value, before[name]) for name, value in world.model.state_dict().items())


def test_noise_in_the_forward_pass_is_random() -> None:
    world = build_world(experiment(robustness={"noise": 0.5}))
    mismatch = simulation_check(world).at(
        ATTACKS["iga"].simulation(),
        world.initial.parameters,
        public_settings(world.experiment, world.dataset, world.plans[0]),
    )
    assert mismatch is not None and mismatch.kind == "random"


def test_what_is_above_a_guess() -> None:
    rate = LeakageRate("told", "iga", "unprotected", 1, 8, (0.0, 1.0), 0.01)
    assert is_above_guess([replace(rate, hits=2)], [], [])
    assert not is_above_guess([rate], [], [])  # has a chance of 8 %
    assert not is_above_guess([replace(rate, hits=8, chance=1.0)], [], [])
    assert not is_above_guess([], [], [])


class Reading(Finding[int]):
    """It reads uploads that no run without attacks keeps, and then has a mistake."""

    name = "reading"
    rank = 1000

    def read(self, folder: RunFolder) -> int | None:
        return None

    def conclude(self, world: World, folder: RunFolder) -> None:
        assert targets(world, folder) == ()
        raise InputError("no upload was kept")


def test_a_finding_that_fails_is_named_with_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpriv.core.lab.run.findings", lambda: [Reading()])
    with pytest.raises(InputError, match=r"^finding reading: no upload was kept; when it is mended: fedpriv run --res"):
        run(tmp_path / "run", "", adversary={"attacks": []})
