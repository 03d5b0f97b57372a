"""``fedpriv audit`` on the folder of a run: what is written, what is refused, and when it cries out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from fedpriv.attacks.membership.attacks import Signals, label_logits
from fedpriv.attacks.membership.audit import audit_run
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import Guarantee
from fedpriv.core.report import reported, write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from tests.integration.small import experiment

SETTINGS: dict[str, dict[str, object]] = {
    "data": {"train_examples": 120},
    "federation": {"clients": 2, "rounds": 4},
    "training": {"batch_size": 20},
    "adversary": {"attacks": ["iga"], "rounds": [1, 3], "victims": 1, "iga": {"iterations": 2}},
}


def finished(folder: Path, **sections: dict[str, object]) -> RunFolder:
    start_run(experiment(**{**SETTINGS, **sections}), folder, "fedpriv run small.toml", Silent())
    return RunFolder.open(folder)


def test_results_are_added_and_the_rest_stays(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = json.loads((folder.path / "summary.json").read_text())
    with pytest.raises(InterruptedError, match=r"8 reference models; 120 pairs, .* all that the data have, not 1000"):
        audit_run(folder, 8, 1000, Stopped())
    found = audit_run(folder, 8, 40, Silent()).model_dump(mode="json")
    after = json.loads((folder.path / "summary.json").read_text())
    assert after.pop("membership") == found == json.loads((folder.path / "membership.json").read_text())
    assert after == before
    assert found["rounds"] == [2, 4]
    assert found["proven_epsilon"] is None
    assert {row["members"] for row in found["attacks"]} == {40}
    for row in found["attacks"]:
        assert 0 <= row["intervals"]["auc"][0] <= row["auc"] <= row["intervals"]["auc"][1] <= 1
    write_report(folder.path)


def test_the_targets_signals_are_those_of_the_final_model(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    audit_run(folder, 6, 30, Silent())
    signals = Signals(**np.load(folder.path / "membership" / "signals.npz"))
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    world = build_world(folder.experiment())
    with torch.no_grad():
        for name, value in world.model.named_parameters():
            value.copy_(checkpoint.tensors[f"parameters/{name}"])
        every = torch.cat([world.dataset.x_train, world.dataset.x_test])
        labels = torch.cat([world.dataset.y_train, world.dataset.y_test])
        wanted = label_logits(world.model(world.network_input(every)), labels).numpy()
    assert np.isin(signals.target[-1].round(4), wanted.round(4)).mean() > 0.95
    assert signals.target.shape == (2, 60)
    scores = np.load(folder.path / "membership" / "scores.npz")
    for row in json.loads((folder.path / "membership.json").read_text(encoding="utf-8"))["attacks"]:
        false, true, _ = roc_curve(scores["members"], scores[row["attack"]])
        assert row["auc"] == pytest.approx(roc_auc_score(scores["members"], scores[row["attack"]]), abs=1e-12)
        assert row["tpr_at_1_percent"] == pytest.approx(true[false <= 0.01].max(), abs=1e-12)


def test_a_private_run_is_compared_with_its_ledger(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", mechanism={"name": "gaussian", "sigma": 8.0, "clip_norm": 1.0})
    found = audit_run(folder, 8, 40, Silent()).model_dump(mode="json")
    assert found["proven_epsilon"] > found["epsilon_bound"]["epsilon"]


def test_a_ledger_that_claims_too_much_is_refuted(tmp_path: Path) -> None:
    """A run without noise under a ledger that says epsilon = 1e-9: the results are written, then it is an error."""
    memory = {
        "model": {"hidden": [128], "activation": "relu"},
        "federation": {"clients": 1, "rounds": 60, "algorithm": "fedavg"},
        "data": {"train_examples": 40},
        "training": {"batch_size": 10, "learning_rate": 0.5, "local_epochs": 3},
        "adversary": {"attacks": []},
    }
    folder = finished(tmp_path / "run", **memory)
    summary = json.loads((folder.path / "summary.json").read_text())
    claim = {**summary["ledger"], "epsilon": 1e-9}
    Guarantee(**{key: claim[key] for key in Guarantee.__dataclass_fields__})
    folder.write_json("summary.json", {**summary, "ledger": claim})
    with pytest.raises(RunFailedError, match="claimed: at most"), reported(folder.path):
        audit_run(folder, 16, 40, Silent())
    assert (folder.path / "membership.json").is_file()
    assert "The ledger is refuted" in (folder.path / "report.html").read_text()


def test_what_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", adversary={"attacks": []})
    for count in (4, 7):
        with pytest.raises(InputError, match="even number"):
            audit_run(folder, count, 40, Silent())
    (folder.path / "checkpoint" / "server.safetensors").unlink()
    with pytest.raises(InputError, match="nothing to audit"):
        audit_run(folder, 6, 40, Silent())
    (folder.path / "summary.json").unlink()
    with pytest.raises(InputError, match="has no summary"):
        audit_run(folder, 6, 40, Silent())


def test_resuming_a_finished_run_keeps_what_an_audit_found(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    found = audit_run(folder, 6, 20, Silent()).model_dump(mode="json")
    resume_run(folder.path, Silent())
    assert json.loads((folder.path / "summary.json").read_text())["membership"] == found
    assert audit_run(folder, 6, 20, Silent()).model_dump(mode="json") == found


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_an_unfinished_run_is_not_audited(tmp_path: Path, status: str) -> None:
    """It has a summary, too; its figures would be those of a model that the finished run no longer has."""
    folder = finished(tmp_path / "run", adversary={"attacks": []})
    summary = json.loads((folder.path / "summary.json").read_text())
    folder.write_json("summary.json", {**summary, "status": status})
    with pytest.raises(InputError, match=f"the run is {status}, not completed: finish it with fedpriv run --resume"):
        audit_run(folder, 6, 20, Silent())
    assert not (folder.path / "membership.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", b"{", "summary.json is damaged: Invalid JSON"),
        ("summary.json", b'{"status": "completed", "ledger": 3}', "summary.json is damaged: ledger: Input should be"),
        ("metrics.jsonl", b"{}\n", "metrics.jsonl, line 1 is damaged"),
        ("checkpoint/server.safetensors", b"x", "server.safetensors is damaged"),
    ],
)
def test_damage_is_told_before_references_are_trained(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    folder = finished(tmp_path / "run", adversary={"attacks": []})
    (folder.path / name).write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        audit_run(folder, 6, 20, Untrained())
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", adversary={"attacks": []})
    wider = experiment(**{**SETTINGS, "adversary": {"attacks": []}, "model": {"hidden": [9]}})
    folder.write_text("config.toml", wider.to_toml())
    summary = folder.summary()
    assert summary is not None
    folder.write_summary(summary.model_copy(update={"settings": folder.settings_digest()}))
    with pytest.raises(InputError, match="the checkpoint is not of this model"):
        audit_run(folder, 6, 20, Untrained())


class Stopped(Silent):
    """Ends with what is announced."""

    def stage(self, title: str) -> None:
        raise InterruptedError(title)


class Untrained(Silent):
    """Nobody watches, and no reference model is to be trained."""

    def stage(self, title: str) -> None:
        pytest.fail(title)
