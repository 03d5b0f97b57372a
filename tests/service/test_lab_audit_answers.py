"""``fedpriv audit DIR --answers``: proven noise is not refuted, half of it is, and the published method is."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from fedpriv.service.audit import audit_answers
from fedpriv.service.opening import open_service
from fedpriv.service.records import AnswersAudit
from fedpriv.service.settings import ServiceConfig
from tests.integration.small import copied, finished

TILTED: dict[str, dict[str, object]] = {
    "data": {"train_examples": 120},
    "model": {"name": "mlp", "hidden": [16], "activation": "tanh"},
    "federation": {"clients": 2, "rounds": 2, "algorithm": "fedavg"},
    "training": {"local_epochs": 4, "loss": "risk-averting", "weight_decay": 0.001},
    "adversary": {"attacks": []},
    "mechanism": {"name": "none"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(tmp_path_factory.mktemp("audit") / "run", **TILTED)


def endpoint(run: RunFolder, path: Path, method: str, **keys: object) -> RunFolder:
    folder = copied(run, path / method)
    open_service(folder, ServiceConfig.model_validate({"method": method, **keys}), Silent())
    return folder


@pytest.mark.parametrize("method", ["model", "logits", "label", "label-confidence"])
def test_proven_answers_are_not_refuted(run: RunFolder, tmp_path: Path, method: str) -> None:
    """Wrong with probability 0.001 each."""
    folder = endpoint(run, tmp_path, method, target_epsilon=4.0, regularisation=0.05, answers=5)
    found = audit_answers(folder, 4, Silent())
    assert found.proven and found.replaced == 4 and 0.05 < found.moved <= 1 and found.above == 0
    assert found.bound is not None and found.claimed is not None and not found.refutes
    assert found == folder.read(AnswersAudit)
    refuse_exceeded(found.figures)
    page = render_page(load_view(folder.path))
    assert "0 of 5" in page and "Share of right answers by the number of answers" in page
    assert "Models moved, measured over bound" in page and "is not proven" not in page


def test_noise_that_is_much_too_small_is_refuted(run: RunFolder, tmp_path: Path) -> None:
    """A certificate that is wrong by a factor of fifty, and the noise that would follow from it."""
    folder = endpoint(run, tmp_path, "logits", target_epsilon=4.0, regularisation=0.05, answers=5)
    path = folder.path / "service" / "service.json"
    service = json.loads(path.read_text())
    service["head"]["sensitivity"] /= 50
    service["scale"] /= 50
    path.write_text(json.dumps(service))
    found = audit_answers(folder, 4, Silent())
    assert found.refutes and found.moved > 1 and found.above > 0
    with pytest.raises(RunFailedError, match=r"claimed: at most .*the implementation or the proof is wrong"):
        refuse_exceeded(found.figures)


def test_the_published_method_is_refuted_and_told_in_red(run: RunFolder, tmp_path: Path) -> None:
    folder = endpoint(run, tmp_path, "paper", epsilon_each=1.0)
    found = audit_answers(folder, 2, Silent())
    assert not found.proven and found.refutes and found.claimed == 1  # nothing that is claimed to be proven
    # 1000 trials of each kind decide; all of them are told right: log(0.9931 / 0.0069) at least.
    assert found.bound is not None and found.bound.epsilon >= 4
    assert found.recovered is not None and found.recovered > 0.5
    page = render_page(load_view(folder.path))
    assert "What is claimed about the answers is not proven" in page
    assert "Proven for all planned answers</dt><dd>nothing" in page
    assert "(nominal)" in page


def test_retraining_with_no_change_is_the_run(run: RunFolder) -> None:
    """The neighbours differ by the one example only: replacing it by itself changes nothing."""
    from fedpriv.core.world import build_world
    from fedpriv.service.audit import _with

    partitions = build_world(run.experiment()).partitions
    rows = np.concatenate(partitions)
    for at in (0, len(partitions[0]) - 1, len(partitions[0]), len(rows) - 1):
        changed = np.concatenate(_with(partitions, at, -1))
        assert changed[at] == -1 and (np.delete(changed, at) == np.delete(rows, at)).all()


def test_where_nothing_is_claimed_there_is_nothing_to_audit(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no endpoint yet: make it with fedpriv serve"):
        audit_answers(copied(run, tmp_path / "none-made"), 2, Silent())
    with pytest.raises(InputError, match="none claims nothing of its own that answers could refute"):
        audit_answers(endpoint(run, tmp_path, "none"), 2, Silent())
