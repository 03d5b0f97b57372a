"""Whole runs under each threat model: what is attacked, what is refused, and what is said about it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedpriv.attacks.campaign import Campaign, attack_each
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.core.lab import attack_stage, resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import Summary
from fedpriv.core.report import write_report
from fedpriv.core.world import State, build_world
from fedpriv.server.uploads import Upload
from tests.integration.small import experiment

QUICK = {"attacks": ["iga"], "victims": 2, "iga": {"iterations": 3}}


def run(path: Path, **sections: dict[str, object]) -> Summary:
    adversary = {**QUICK, **sections.pop("adversary", {})}
    return start_run(experiment(adversary=adversary, **sections), path, "", Silent())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "reconstructions" / "scores.jsonl").read_text().splitlines()]


def test_behind_tls_nothing_is_attacked_and_the_run_says_so(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", adversary={"threat_model": "network-tls"})
    assert summary.status == "completed"
    assert "cannot read the uploads" in summary.verdict[0]
    assert sum("attack iga refused: iga needs" in text for text in summary.warnings) == 1
    assert summary.attacks == ()
    assert list((tmp_path / "run" / "observations").iterdir()) == []
    page = write_report(tmp_path / "run").read_text()
    assert "cannot read the uploads" in page
    assert "how many bytes they have" in page


def test_a_withheld_batch_size_refuses_attacks_that_need_it(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", adversary={"knows_batch_size": False})
    assert summary.status == "completed"
    assert any("adversary.knows_batch_size = false" in text for text in summary.warnings)
    assert summary.attacks == ()


@pytest.mark.parametrize("mechanism", [{"name": "none"}, {"name": "vmf", "kappa": 300.0}])
def test_the_sum_is_attacked_as_one_upload_of_all_clients(mechanism: dict[str, object], tmp_path: Path) -> None:
    summary = run(
        tmp_path / "run",
        adversary={"threat_model": "secure-aggregation"},
        mechanism=mechanism,
        training={"batch_size": 3},
    )
    kinds = {"unprotected"} | ({"protected"} if mechanism["name"] != "none" else set())
    attacked = [line for line in lines(tmp_path / "run") if line["upload"] in kinds]
    for kind in kinds:
        places = [(line["client"], line["image"]) for line in attacked if line["upload"] == kind]
        assert sorted(places) == [(client, image) for client in range(4) for image in range(3)]
    assert {line["clients"] for line in lines(tmp_path / "run")} == {4}
    assert all((row.victims, row.missing) == (12, 0) for row in summary.attacks)
    assert any("secure aggregation is assumed here, not carried out" in text for text in summary.verdict)
    assert {path.name for path in (tmp_path / "run" / "observations").iterdir()} == {
        "0001-sum.json",
        "0001-sum.safetensors",
    }
    names = {path.name for path in (tmp_path / "run" / "reconstructions").glob("*-original-*.png")}
    assert names == {f"0001-{client:04d}-original-{image}.png" for client in range(4) for image in range(3)}
    # One sum is one upload: there is nothing to draw an interval of a median from.
    assert all(set(row.intervals) == {"recovered", "identified"} for row in summary.attacks)


@pytest.mark.slow
def test_the_attack_on_a_sum_finds_what_is_in_it(tmp_path: Path) -> None:
    """Clients of one example each, no mechanism: the sum is a batch of four, and IGA recovers every one of them."""
    summary = run(
        tmp_path / "run",
        adversary={"threat_model": "secure-aggregation", "iga": {"iterations": 400, "tv": 0.0}},
        model={"hidden": [128], "activation": "tanh"},
        training={"batch_size": 1},
    )
    (row, *_) = summary.attacks
    assert (row.recovered, row.victims, row.label_accuracy) == (4, 4, 1.0)


def test_a_sum_of_unequal_clients_says_what_is_simplified(tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        adversary={"threat_model": "secure-aggregation"},
        data={"partition": "dirichlet", "alpha": 0.5},
        training={"batch_size": 1},
    )
    notes = {line["note"] for line in lines(tmp_path / "run") if line["attack"] == "iga"}
    assert notes == {"the clients' weights differ, and the attack takes them for equal"}


def test_known_labels_reach_the_attack_and_raise_the_bar(tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        adversary={"knows_labels": True},
        mechanism={"name": "vmf", "kappa": 0.0},
        training={"batch_size": 1},
    )
    found = [line for line in lines(tmp_path / "run") if line["attack"] == "iga" and line["upload"] == "protected"]
    assert found
    assert all(line["label_correct"] for line in found)  # from noise alone nobody reads a label
    assert {line["attack"] for line in lines(tmp_path / "run")} >= {"guess-class"}
    assert (tmp_path / "run" / "reconstructions" / "0001-0000-guess-class.png").is_file()
    assert "Guess: mean of the class" in write_report(tmp_path / "run").read_text()


def test_unknown_labels_do_not_reach_the_attack(tmp_path: Path) -> None:
    """The other half: with the same noise and labels withheld, they are guessed no better than by chance."""
    run(
        tmp_path / "run",
        adversary={"victims": 8},
        federation={"clients": 8},
        mechanism={"name": "vmf", "kappa": 0.0},
        training={"batch_size": 1},
    )
    found = [line for line in lines(tmp_path / "run") if line["attack"] == "iga" and line["upload"] == "protected"]
    # 8 of 8 right by chance: 1e-8; more than 4: 4e-4.
    assert sum(line["label_correct"] for line in found) <= 4


@pytest.mark.parametrize("granted", [True, False])
def test_public_images_reach_attacks_where_they_are_granted(
    granted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the test images, none of a client's; withheld, nothing of the kind gets there."""
    known: list[Tensor | None] = []

    def listened(job: AttackJob) -> Campaign:
        known.append(job.public_images)
        return attack_each(job)

    monkeypatch.setattr(attack_stage, "attack_each", listened)
    settings = {"knows_public_data": granted, "victims": 1}
    run(tmp_path / "run", adversary=settings)
    world = build_world(experiment(adversary={**QUICK, **settings}))
    (images,) = known
    if granted:
        assert images is not None
        assert torch.equal((255 * images).round().to(torch.uint8), world.dataset.x_test)
    else:
        assert images is None


def test_an_unknown_mechanism_is_no_part_of_the_attack(tmp_path: Path) -> None:
    run(tmp_path / "run", adversary={"knows_mechanism": False}, mechanism={"name": "gaussian", "sigma": 0.123456})
    for path in (tmp_path / "run" / "observations").glob("*.json"):
        assert "0.123456" not in path.read_text()
    assert any(line["upload"] == "protected" for line in lines(tmp_path / "run"))


def test_the_attack_stage_can_be_done_again(tmp_path: Path) -> None:
    """A resumed run that was already finished attacks again and writes the same scores."""
    run(tmp_path / "run", adversary={"threat_model": "secure-aggregation"})
    path = tmp_path / "run" / "reconstructions" / "scores.jsonl"
    before = path.read_bytes()
    resume_run(tmp_path / "run", Silent())
    assert path.read_bytes() == before


@pytest.mark.parametrize("clients", range(1, 8))
@pytest.mark.parametrize("rule", [("median", 0.2), *(("trimmed-mean", trim) for trim in (0.0, 0.2, 0.34, 0.49))])
def test_a_robust_rule_that_one_upload_upsets_is_a_warning(rule: tuple[str, float], clients: int) -> None:
    chosen = experiment(federation={"clients": clients, "aggregation": rule[0], "trim": rule[1]}).federation.rule
    sent = [torch.tensor([0.0]) for _ in range(clients - 1)] + [torch.tensor([1000.0])]
    uploads = [Upload(client, 10, State({"w": value}, {})) for client, value in enumerate(sent)]
    is_upset = bool(chosen.aggregate(uploads, "examples").parameters["w"] != 0)
    assert bool(chosen.warnings(clients)) == is_upset
