"""Clients that fail are named and left out; a run that cannot go on says why and keeps what it has."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message

from fedpriv.core.errors import RunFailedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.lab import run as lab_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import reported, write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State
from fedpriv.server.rules.mean import Mean
from tests.integration.small import LEAVER, MISBEHAVIOURS, experiment, misbehaving


@pytest.mark.parametrize("kind", MISBEHAVIOURS)
def test_a_failing_client_is_named_with_its_round_and_left_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, words = MISBEHAVIOURS[kind]
    monkeypatch.setattr(lab_run, "client_app", misbehaving(how, {1, 2}))
    summary = start_run(experiment(), tmp_path / "run", "fedpriv run x", Silent())
    assert summary.status == "completed"
    for record in RunFolder.open(tmp_path / "run").rounds()[1:]:
        assert record.clients == (0, 1, 2, 3)
        assert record.used == (0, 3)
        assert [failure.client for failure in record.failures] == [1, 2]
        assert all(words in failure.reason for failure in record.failures)


@pytest.mark.parametrize("bound", ["the mechanism's", "the setting's"])
def test_an_upload_100_times_too_large_is_refused_and_in_the_report(
    bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_run, "client_app", misbehaving(_hundredfold, {2}))
    settings = (
        experiment(mechanism={"name": "gaussian", "sigma": 1.0})
        if bound == "the mechanism's"
        else experiment(federation={"max_update_norm": 10.0})
    )
    assert start_run(settings, tmp_path / "run", "", Silent()).status == "completed"
    for record in RunFolder.open(tmp_path / "run").rounds()[1:]:
        assert record.used == (0, 1, 3)
        (failure,) = record.failures
        assert re.fullmatch(r"sent an upload of norm [0-9.e+]+; at most [0-9.]+ is allowed", failure.reason)
        assert failure.reason in write_report(tmp_path / "run").read_text()


def _changed(state: State, **parameters: object) -> State:
    return State({**state.parameters, **parameters}, state.buffers)  # type: ignore[dict-item]


ODD_RULES: dict[str, tuple[Callable[[State], object], str]] = {
    "nothing": (lambda state: None, "returned NoneType, expected a State"),
    "raises": (lambda state: {}["a"], "failed: KeyError: 'a'"),
    "a tensor less": (lambda state: State({}, {}), "left out"),
    "a tensor more": (lambda state: _changed(state, extra=torch.ones(1)), "added extra"),
    "another shape": (
        lambda state: _changed(state, **{name: value[:1] for name, value in state.parameters.items()}),
        r"returned \(1, .*, expected a tensor of shape",
    ),
    "no tensor": (
        lambda state: _changed(state, **dict.fromkeys(state.parameters)),
        "returned NoneType for .*, expected a tensor",
    ),
    "NaN": (
        lambda state: _changed(state, **{name: value * torch.nan for name, value in state.parameters.items()}),
        "returned NaN or infinity in",
    ),
}


@pytest.mark.parametrize("odd", ODD_RULES)
def test_a_rule_that_misbehaves_is_named_and_what_there_is_stays(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = ODD_RULES[odd]
    monkeypatch.setattr(Mean, "aggregate", lambda _, uploads, weighting: make(uploads[0].state))
    with pytest.raises(RunFailedError, match=f"aggregation rule mean {words}") as caught:
        start_run(experiment(), tmp_path / "run", "", Silent())
    assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["reason"] == str(caught.value)
    assert (tmp_path / "run" / "ledger.json").exists()


def test_too_few_uploads_for_krum_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "client_app", misbehaving(MISBEHAVIOURS["nan"][0], {1}))
    settings = experiment(federation={"clients": 5, "aggregation": "krum"})
    with pytest.raises(RunFailedError, match=r"round 1: 4 usable uploads, uploads that krum needs = 5: client 1 sent"):
        start_run(settings, tmp_path / "run", "", Silent())


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
def test_a_robust_rule_trains_where_one_upload_ruins_the_mean(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_run, "client_app", misbehaving(_hundredfold, {2}))
    training = {"clients": 6, "rounds": 15}
    robust = start_run(experiment(federation={**training, "aggregation": rule}), tmp_path / "a", "", Silent())
    ruined = start_run(experiment(federation=training), tmp_path / "b", "", Silent())
    assert robust.test_loss is not None
    assert ruined.test_loss is not None
    assert robust.test_loss < 2.2 < 5 < ruined.test_loss
    assert all(record.used == tuple(range(6)) for record in RunFolder.open(tmp_path / "a").rounds()[1:])


def test_left_out_clients_do_not_change_what_the_others_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways of failing give the same bytes."""
    checkpoints = []
    for kind in ("raises", "nan"):
        monkeypatch.setattr(lab_run, "client_app", misbehaving(MISBEHAVIOURS[kind][0], {1}))
        start_run(experiment(), tmp_path / kind, "", Silent())
        checkpoints.append((tmp_path / kind / "checkpoint" / "server.safetensors").read_bytes())
    assert checkpoints[0] == checkpoints[1]


@pytest.mark.parametrize(("failing", "needed"), [({0, 1, 2, 3}, 1), ({1, 2}, 3)])
def test_too_few_uploads_fail_the_run_and_say_why(
    failing: set[int], needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_run, "client_app", misbehaving(MISBEHAVIOURS["raises"][0], failing))
    settings = experiment(federation={"min_clients": needed})
    with (
        pytest.raises(RunFailedError, match=r"round 1: .* client 1 raised an error: .*camera unplugged"),
        reported(tmp_path / "run"),
    ):
        start_run(settings, tmp_path / "run", "", Silent())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "client 1 raised an error" in summary["reason"]
    assert html.escape(summary["reason"]) in (tmp_path / "run" / "report.html").read_text()
    assert RunFolder.open(tmp_path / "run").load_checkpoint() is not None


def test_what_was_written_before_a_failure_stays_and_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = experiment(federation={"rounds": 6})
    good = lab_run.client_app
    whole = tmp_path / "whole"
    start_run(settings, whole, "", Silent())

    calls = {"n": 0}

    def fails_in_round_4(reply: object) -> object:
        calls["n"] += 1
        if calls["n"] > 3 * 4:
            raise RuntimeError("power cut")
        return reply

    broken = tmp_path / "broken"
    monkeypatch.setattr(lab_run, "client_app", misbehaving(fails_in_round_4, {0, 1, 2, 3}))  # type: ignore[arg-type]
    with pytest.raises(RunFailedError, match="round 4"):
        start_run(settings, broken, "", Silent())
    assert [record.round for record in RunFolder.open(broken).rounds()] == [0, 1, 2, 3]

    monkeypatch.setattr(lab_run, "client_app", good)
    assert resume_run(broken, Silent()).status == "completed"
    for name in ("checkpoint/server.safetensors", "ledger.json"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_a_model_that_ends_the_process_costs_its_client_that_round(tmp_path: Path) -> None:
    """On Ray it leaves the same behind: ``test_on_ray.py``."""
    assert start_run(experiment(model=LEAVER), tmp_path / "run", "", Silent()).status == "completed"
    records = RunFolder.open(tmp_path / "run").rounds()[1:]
    assert [record.used for record in records] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    reasons = {failure.reason for record in records for failure in record.failures}
    assert reasons == {"raised an error: RuntimeError: the model's code raises SystemExit: licence expired"}


def _huge(reply: Message) -> Message:
    arrays = {name: torch.full_like(value, 3e38) for name, value in _upload(reply).items()}
    reply.content["upload"] = ArrayRecord(torch_state_dict=arrays)
    return reply


def _hundredfold(reply: Message) -> Message:
    arrays = {name: 100 * value for name, value in _upload(reply).items()}
    reply.content["upload"] = ArrayRecord(torch_state_dict=arrays)
    return reply


def _upload(reply: Message) -> dict[str, torch.Tensor]:
    return dict(reply.content.array_records["upload"].to_torch_state_dict())


def test_one_huge_upload_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "client_app", misbehaving(_huge, {2}))
    with pytest.raises(
        RunFailedError, match=r"diverged: the upload of client 2 has the norm .*e\+39, .*e\+\d+ times the"
    ):
        start_run(experiment(), tmp_path / "run", "", Silent())


def test_where_no_upload_stands_out_the_learning_rate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "client_app", misbehaving(_huge, {0, 1, 2, 3}))
    with pytest.raises(RunFailedError, match=r"no upload stands out .* try a smaller learning rate"):
        start_run(experiment(), tmp_path / "run", "", Silent())
