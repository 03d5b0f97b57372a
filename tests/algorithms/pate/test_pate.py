"""PATE from votes to student: recomputed outside the app, the same on every engine, across kills, and under masks."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from scipy.stats import binomtest

from fedpriv.accounting import gaussian_epsilon
from fedpriv.accounting.aggregators import ConfidentMax
from fedpriv.algorithms.pate import server as server_module
from fedpriv.algorithms.pate.client import asked_about, teachers_votes
from fedpriv.algorithms.pate.ledger import votes_ledger
from fedpriv.algorithms.pate.records import Knowledge, VotedAnswer, kept_poll, read_answers
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.algorithms.pate.teachers import asked_rows, questions, teachers
from fedpriv.attacks.membership.audit import audit_run
from fedpriv.clients.app import client_app, identify
from fedpriv.clients.training import answer_secret
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError
from fedpriv.core.figure import CONFIDENCE
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.lab import run as lab_run
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.records import COMPLETED
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.mechanisms.machinery.whole_numbers import noisy_counts, quantised, restored, votes_limit
from fedpriv.server import exchange as exchange_module
from fedpriv.service.opening import open_service
from fedpriv.service.records import Referee
from fedpriv.service.settings import ServiceConfig
from fedpriv.sweep.record import read_record
from tests.integration.small import BASE, experiment, left_behind

PATE = {
    "queries": 24,
    "local_epochs": 3,
    "student_epochs": 5,
    "target_epsilon": 40.0,
    "threshold": 0.5,
    "sigma1": 0.3,
    "sigma2": 0.3,
}


def votes(pate: dict[str, object] | None = None, **sections: dict[str, object]) -> Experiment:
    """Six clients and their votes on digits."""
    federation = {"algorithm": "pate", "clients": 6, "rounds": 1, **sections.pop("federation", {})}
    training = {"batch_size": 16, "learning_rate": 0.1, **sections.pop("training", {})}
    return experiment(federation=federation, training=training, pate={**PATE, **(pate or {})}, **sections)


MASKED = votes(
    {"aggregator": "gnmax", "noise_at": "clients", "queries": 12, "target_epsilon": 60.0},
    federation={"clients": 4, "secure_aggregation": True},
)


def read(path: Path, name: str) -> Any:
    return json.loads((path / name).read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pate") / "run"
    start_run(votes(), path, "fedpriv run x", Silent())
    return path


def world_of(path: Path) -> World:
    folder = RunFolder.open(path)
    return build_world(folder.experiment(), folder.secret(folder.experiment()))


# ---- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.essential
def test_votes_and_answers_are_recomputed_outside_the_app(finished: Path) -> None:
    folder, world = RunFolder.open(finished), world_of(finished)
    poll = kept_poll(folder)
    assert poll is not None
    votes_again = torch.cat([teachers_votes(world, client, questions(world)) for client in range(6)]).numpy()
    assert np.array_equal(poll.votes, votes_again)
    assert poll.counts.sum(axis=1).tolist() == [6.0] * 24
    secret = server_module._secret(world, poll)
    aggregator = ConfidentMax(0.5 * 6, 0.3 * 6, 0.3 * 6)
    for number, answer in enumerate(read_answers(folder)):
        assert answer.query == int(asked_rows(world)[number])
        assert answer.label == aggregator.decide(poll.counts[number], secret.stream("question", number).numpy())


def test_the_knowledge_is_what_the_answers_say(finished: Path) -> None:
    folder, world = RunFolder.open(finished), world_of(finished)
    knowledge, answers = folder.read(Knowledge), read_answers(folder)
    assert knowledge is not None
    given = [answer for answer in answers if answer.answered]
    assert (knowledge.asked, knowledge.answered) == (len(answers), len(given))
    assert 0 < len(given) < len(answers)
    right = [int(world.dataset.y_test[answer.query]) == answer.label for answer in given]
    assert knowledge.right == pytest.approx(np.mean(right))
    assert knowledge.evaluated == len(world.dataset.y_test) - 24
    mu = np.sqrt(len(answers) / 1.8**2 + 2 * len(given) / 1.8**2)
    assert knowledge.spent == pytest.approx(gaussian_epsilon(1e-5, mu))
    assert knowledge.spent <= 40
    summary = folder.final_summary()
    assert summary.test_accuracy == knowledge.student
    assert "24 questions were put" in summary.verdict[0]


def test_the_student_is_measured_on_images_that_it_has_not_learnt(finished: Path) -> None:
    world = world_of(finished)
    asked, measured = set(asked_rows(world).tolist()), set(world.measured_rows.tolist())
    assert len(asked) == 24
    assert not asked & measured
    assert asked | measured == set(range(len(world.dataset.y_test)))
    folder = RunFolder.open(finished)
    knowledge, record = folder.read(Knowledge), read_record(folder, "run")
    assert knowledge is not None
    right = round(knowledge.student * len(measured))
    interval = binomtest(right, len(measured)).proportion_ci(CONFIDENCE, method="wilson")
    assert (record.accuracy_low, record.accuracy_high) == pytest.approx((interval.low, interval.high))
    assert (record.votes_asked, record.votes_answered) == (knowledge.asked, knowledge.answered)
    assert (record.votes_right, record.votes_spent) == (knowledge.right, knowledge.spent)


def test_its_endpoint_is_measured_on_the_same_images(finished: Path, tmp_path: Path) -> None:
    path = shutil.copytree(finished, tmp_path / "run")
    folder = RunFolder.open(path)
    open_service(folder, ServiceConfig(), Silent()).close()
    referee, knowledge = folder.read(Referee), folder.read(Knowledge)
    assert referee is not None and knowledge is not None
    assert (referee.tested, referee.accuracy.value) == (knowledge.evaluated, pytest.approx(knowledge.student))


def test_nothing_that_is_shown_depends_on_votes_but_as_proven(finished: Path) -> None:
    """Plurality, counts and how good teachers are stay in the private folder."""
    keys = {"aggregator", "noise_at", "teachers", "voted", "planned", "asked", "answered", "right", "student"}
    keys |= {"evaluated", "budget", "spent", "delta", "sanitised"}
    assert set(read(finished, "knowledge.json")) == keys
    assert read(finished, "knowledge.json")["sanitised"] is None
    assert set(json.loads((finished / "answers.jsonl").read_text().splitlines()[0])) == {"query", "answered", "label"}
    assert (finished / "private" / "votes.npz").stat().st_mode & 0o777 == 0o600
    assert (finished / "private").stat().st_mode & 0o777 == 0o700


def test_the_budget_is_the_claim_and_asking_stops_before_it(tmp_path: Path) -> None:
    start_run(votes({"target_epsilon": 8.0}), tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    knowledge, ledger = folder.read(Knowledge), folder.final_ledger()
    assert knowledge is not None
    assert knowledge.asked < 24
    assert knowledge.spent is not None
    assert knowledge.spent <= 8.0
    answered = knowledge.answered + 1
    assert ConfidentMax(3, 1.8, 1.8).claim(knowledge.asked + 1, answered, 1e-5).epsilon > 8.0
    assert {line.epsilon for line in ledger.clients} == {8.0}
    assert (ledger.unit, [line.members for line in ledger.clients]) == ("client", ["0-2", "3-5"])
    assert ledger.worst.adjacency.startswith("replace-one-client")


# ---- engines, kills -------------------------------------------------------------------------------------------------


def test_twice_gives_the_same_bytes_and_another_seed_others(finished: Path, tmp_path: Path) -> None:
    start_run(votes(), tmp_path / "again", "fedpriv run x", Silent())
    assert left_behind(tmp_path / "again") == left_behind(finished)
    start_run(votes().model_copy(update={"seed": 4}), tmp_path / "other", "", Silent())
    assert (tmp_path / "other" / "answers.jsonl").read_bytes() != (finished / "answers.jsonl").read_bytes()


@pytest.mark.parametrize("step", ["keep_poll", "write", "append_round", "save_checkpoint"])
def test_a_killed_run_goes_on_with_the_same_bytes(
    finished: Path, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(server_module if step == "keep_poll" else RunFolder, step, killed)
        if step == "append_round":  # the line before training is one, too
            patched.setattr(server_module, "take_up", lambda *_: 0)
        with pytest.raises(RunInterruptedError):
            start_run(votes(), tmp_path / "run", "fedpriv run x", Silent())
    asked = []
    monkeypatch.setattr(exchange_module, "find_clients", lambda *given: asked.append(1) or _found(*given))
    resume_run(tmp_path / "run", Silent())
    assert left_behind(tmp_path / "run") == left_behind(finished)
    assert len(asked) == (step == "keep_poll"), "clients are asked once"


_found = exchange_module.find_clients


def test_settings_that_decide_what_is_claimed_cannot_change(finished: Path, tmp_path: Path) -> None:
    start_run(votes(), tmp_path / "run", "", Silent())
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("sigma2 = 0.3", "sigma2 = 3.0"))
    with pytest.raises(InputError, match=r"config\.toml was changed"):
        resume_run(tmp_path / "run", Silent())


def test_damaged_votes_are_one_line(finished: Path, tmp_path: Path) -> None:
    start_run(votes(), tmp_path / "run", "", Silent())
    (tmp_path / "run" / "private" / "votes.npz").write_bytes(b"PK\x03\x04 torn")
    (tmp_path / "run" / "checkpoint" / "server.safetensors").unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"votes\.npz"):
        resume_run(tmp_path / "run", Silent())


# ---- the report -----------------------------------------------------------------------------------------------------


def voted(finished: Path, folder: Path, *, sanitised: float | None = None) -> Path:
    """Copy a run's folder and change what was asked and answered."""
    shutil.copytree(finished, folder)
    run = RunFolder.open(folder)
    answers = [VotedAnswer(7, True, 1), VotedAnswer(3, False, None), VotedAnswer(5, True, 1)]
    run.write_jsonl("answers.jsonl", [asdict(answer) for answer in answers])
    run.write(
        Knowledge(
            aggregator="confident", noise_at="server", teachers=4, voted=3, planned=9, asked=3, answered=2, right=0.5,
            student=0.75, evaluated=20, budget=3.0, spent=2.5, delta=1e-5, sanitised=sanitised,
        )
    )  # fmt: skip
    return folder


def shown(page: str) -> str:
    """The words of a report."""
    return " ".join(re.sub("<[^>]+>", " ", page).split())


def section(folder: Path) -> str:
    """The words of the report's section about votes."""
    return shown(render_page(load_view(folder)).partition('aria-labelledby="knowledge"')[2].partition("</section>")[0])


def test_the_report_shows_what_was_asked_and_learnt(finished: Path, tmp_path: Path) -> None:
    text = section(voted(finished, tmp_path / "run"))
    for words in ("3 of 4 voted", "9 test images", "3, 2 answered", "50.0%", "75.0% of the other 20", "ε 2.5", "ε 3"):
        assert words in text
    assert "must be trusted" in text
    assert "budget is the claim" in text
    assert "anitised" not in text
    assert "Questions answered by vote 2" in shown(render_page(load_view(tmp_path / "run")))


def test_the_report_calls_a_data_dependent_figure_an_estimate(finished: Path, tmp_path: Path) -> None:
    text = section(voted(finished, tmp_path / "run", sanitised=1.87))
    assert "about ε 1.87: an estimate, no bound" in text
    assert "above or below the true figure" in text


@pytest.mark.parametrize("line", ['{"query": 1, "answered": true, "label": null}', '{"query": -1}'])
def test_damaged_answers_are_refused(finished: Path, tmp_path: Path, line: str) -> None:
    folder = voted(finished, tmp_path / "run")
    (folder / "answers.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1 is damaged"):
        load_view(folder)


# ---- noise at the clients -------------------------------------------------------------------------------------------


def test_masked_votes_leave_the_sum_of_noisy_counts_to_the_last_bit(tmp_path: Path) -> None:
    start_run(MASKED, tmp_path / "run", "", Silent())
    folder, world = RunFolder.open(tmp_path / "run"), world_of(tmp_path / "run")
    poll, knowledge = kept_poll(folder), folder.read(Knowledge)
    assert poll is not None
    assert knowledge is not None
    assert poll.votes.shape == (0, 12), "nobody has votes"
    images, sigma = questions(world), 0.3 * 4
    received, limit = asked_about(world, images), votes_limit(1, sigma, 4)
    words = np.zeros(12 * world.dataset.classes, dtype=np.uint32)
    for client in range(4):
        noise = answer_secret(world.secret, client, 1, received).stream("votes")
        counts = noisy_counts(teachers_votes(world, client, images), world.dataset.classes, sigma, 4, noise)
        words = words + quantised(counts.flatten(), limit)
    assert np.array_equal(restored(words, 4, limit).numpy().reshape(poll.counts.shape), poll.counts)
    assert [answer.label for answer in read_answers(folder)] == poll.counts.argmax(axis=1).tolist()
    # All counts are released at once: twelve questions, answered.
    epsilon = folder.final_ledger().worst.epsilon
    assert epsilon == pytest.approx(gaussian_epsilon(1e-5, np.sqrt(2 * 12) / sigma))
    assert any("rounded" in note for note in folder.final_ledger().worst.notes)
    read_off = replace(world, dataset=replace(world.dataset, notes=("The classes were read off.",)))
    assert votes_ledger(read_off, folder).worst.notes[-1] == "The classes were read off."
    assert (knowledge.asked, knowledge.answered) == (12, 12)


# ---- clients --------------------------------------------------------------------------------------------------------


def lying(change: Callable[[Message], Message], clients: set[int]) -> Callable[[Secret | None], ClientApp]:
    def make(secret: Secret | None) -> ClientApp:
        honest, app = client_app(secret), ClientApp()
        app.query()(identify)

        @app.train("votes")
        def vote(message: Message, context: Context) -> Message:
            reply = honest(message, context)
            return change(reply) if int(context.node_config["partition-id"]) in clients else reply

        return app

    return make


def beyond(reply: Message) -> Message:
    from flwr.app import ArrayRecord

    reply.content["upload"] = ArrayRecord(torch_state_dict={"votes": torch.full((1, 24), 10, dtype=torch.uint8)})
    return reply


def unplugged(reply: Message) -> Message:
    raise RuntimeError("camera unplugged")


@pytest.mark.parametrize(("change", "said"), [(beyond, "voted for a class that is none of 10"), (unplugged, "camera")])
def test_a_client_that_lies_or_fails_is_left_out_and_named(
    change: Callable[[Message], Message], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_run, "client_app", lying(change, {2}))
    summary = start_run(votes(), tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    record, knowledge = folder.rounds()[-1], folder.read(Knowledge)
    assert summary.status == COMPLETED
    assert knowledge is not None
    assert knowledge.voted == 5
    assert record.used == (0, 1, 3, 4, 5)
    assert [failure.client for failure in record.failures] == [2]
    assert said in record.failures[0].reason


def test_too_few_voters_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "client_app", lying(unplugged, {0, 1, 2}))
    with pytest.raises(RunFailedError, match="3 usable uploads"):
        start_run(votes(federation={"min_clients": 4}), tmp_path / "run", "", Silent())


# ---- figures of other settings --------------------------------------------------------------------------------------


def test_a_client_with_two_teachers_is_twice_as_exposed(tmp_path: Path) -> None:
    settings = votes({"teachers_per_client": 2, "aggregator": "gnmax", "target_epsilon": 500.0, "queries": 5})
    start_run(settings, tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    poll = kept_poll(folder)
    assert poll is not None
    assert poll.votes.shape == (12, 5)
    assert poll.clients.tolist() == [client for client in range(6) for _ in range(2)]
    expected = gaussian_epsilon(1e-5, 2 * np.sqrt(2 * 5) / (0.3 * 12))
    assert folder.final_ledger().worst.epsilon == pytest.approx(expected)


def test_laplace_votes_are_pure(tmp_path: Path) -> None:
    settings = votes({"aggregator": "lnmax", "scale": 1.0, "queries": 5, "target_epsilon": 5.0})
    start_run(settings, tmp_path / "run", "", Silent())
    worst = RunFolder.open(tmp_path / "run").final_ledger().worst
    assert worst.pure_epsilon == pytest.approx(2 * 5 / 6)
    assert worst.epsilon is not None
    assert worst.epsilon <= worst.pure_epsilon


def test_a_sanitised_figure_is_shown_and_counted(tmp_path: Path) -> None:
    settings = votes({"sanitised": True, "sanitised_order": 4.0, "sigma1": 1.0, "sigma2": 1.0})
    start_run(settings, tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    knowledge, worst, summary = folder.read(Knowledge), folder.final_ledger().worst, folder.final_summary()
    assert knowledge is not None
    assert knowledge.sanitised is not None
    assert knowledge.spent is not None
    assert worst.epsilon is not None
    assert worst.epsilon > knowledge.spent
    assert "sanitised figure" in worst.theorem["epsilon"]
    assert any(sentence.startswith("Sanitised: ") for sentence in summary.verdict)


def test_a_sanitised_figure_is_of_those_who_voted(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that failed has no vote, so that the largest count may be any number up to that of the others."""
    settings = votes({"sanitised": True, "sanitised_order": 4.0, "sigma1": 1.0, "sigma2": 1.0})
    world, poll = build_world(settings), kept_poll(RunFolder.open(finished))
    assert poll is not None
    fewer = np.stack([np.bincount(column, minlength=10) for column in poll.votes[1:].T]).astype(np.float64)
    poll, asked = replace(poll, votes=poll.votes[1:], clients=poll.clients[1:], counts=fewer), []

    def counted(*given: Any) -> tuple[float, Any]:
        asked.append(given[-1])
        return 0.0, np.zeros(given[-1])

    monkeypatch.setattr(server_module, "data_dependent_cost", counted)
    server_module.sanitised_epsilon(world, poll, ())
    assert asked == [teachers(world) - 1]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pate", "sections", "said"),
    [
        ({}, {"federation": {"rounds": 2}}, "pate has one round"),
        ({}, {"adversary": {"attacks": ["dlg"]}}, "clients upload votes"),
        ({}, {"mechanism": {"name": "gaussian", "sigma": 1.0}}, "the noise is that of"),
        ({}, {"federation": {"clients_per_round": 3}}, "federation.clients_per_round: under pate clients upload votes"),
        ({}, {"federation": {"aggregation": "median"}}, "federation.aggregation: under pate clients upload votes"),
        ({}, {"federation": {"secure_aggregation": True}}, "set noise_at = 'clients' and secure_aggregation"),
        ({"noise_at": "clients", "aggregator": "gnmax"}, {}, "set noise_at = 'clients' and secure_aggregation"),
        ({"noise_at": "clients"}, {"federation": {"secure_aggregation": True}}, "'gnmax' only"),
        ({"sanitised": True, "aggregator": "lnmax"}, {}, "no smooth sensitivity"),
        ({"sanitised": True, "teachers_per_client": 2}, {}, "one vote a client"),
        ({"sanitised": True, "sanitised_order": 30.0}, {}, "below 1 / (2 beta)"),
        ({"queries": 0}, {}, "pate.queries = 0"),
        ({"sigma2": 0.0}, {}, "pate.sigma2 = 0.0"),
    ],
)
def test_combinations_without_a_proof_are_refused(
    pate: dict[str, object], sections: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(ValueError) as error:
        votes(pate, **sections)
    assert said.replace("pate.queries = 0", "queries").replace("pate.sigma2 = 0.0", "sigma2") in str(error.value)


def test_the_section_is_for_votes_only() -> None:
    with pytest.raises(ValueError, match="read with federation"):
        Experiment.model_validate({**BASE, "pate": {}})
    assert experiment().pate is None
    assert "pate" not in experiment().model_dump()
    tree = {**BASE, "federation": {"algorithm": "pate", "clients": 4, "rounds": 1}}
    assert PateConfig.required(Experiment.model_validate(tree)).queries == 640


@pytest.mark.parametrize(
    ("pate", "said"),
    [
        ({"queries": 360}, "360 test images"),
        ({"teachers_per_client": 400}, "a client has 239 examples only"),
        ({"target_epsilon": 0.01}, "allows no answer"),
        ({"sanitised": True, "sigma2": 0.05, "target_epsilon": 500.0}, "the conditions of its proof fail"),
        ({"sanitised": True, "sigma2": 0.05, "target_epsilon": None}, "the conditions of its proof fail"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_written(
    pate: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        start_run(votes(pate), tmp_path / "run", "", Silent())
    assert not (tmp_path / "run").exists()


def test_a_budget_below_all_that_clients_release_is_refused(tmp_path: Path) -> None:
    pate = PateConfig.required(MASKED).model_copy(update={"target_epsilon": 20.0})
    with pytest.raises(InputError, match="all counts are released at once"):
        start_run(MASKED.model_copy(update={"pate": pate}), tmp_path / "run", "", Silent())


def test_an_audit_says_why_it_cannot_be(finished: Path) -> None:
    with pytest.raises(InputError, match="learnt from votes"):
        audit_run(RunFolder.open(finished), 6, 10, Silent())


def test_warnings_say_what_misleads(finished: Path) -> None:
    warnings = RunFolder.open(finished).final_summary().warnings
    for words in ("the server sees every vote", "6 teachers: below about 100", "more than a quarter of the 6 teachers"):
        assert any(words in line for line in warnings)
