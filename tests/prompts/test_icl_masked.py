"""Votes of prompts under masks: the sum is of votes and shares of noise and nothing else, and clients may disappear."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from scipy import stats

from fedpriv.accounting import gaussian_epsilon
from fedpriv.clients.training import answer_secret
from fedpriv.core.config import validated
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.engines.inline import answered, simulated
from fedpriv.mechanisms.machinery.whole_numbers import LEVELS, least_survivors, quantised, restored, votes_limit
from fedpriv.mechanisms.machinery.whole_numbers import noisy_counts as share
from fedpriv.prompts import masked
from fedpriv.prompts.classify import answers, noise_of
from fedpriv.prompts.masked import Prompter, ask_prompters, noisy_counts, prompter_app
from fedpriv.prompts.report import write_icl_report
from fedpriv.prompts.run import resume_icl, start_icl
from fedpriv.prompts.settings import IclConfig, Prompting
from fedpriv.server.exchange import Reached
from tests.prompts.worlds import classifier, fruits

CLIENTS, SIGMA = 6, 1.5
CONFIG = IclConfig(
    unit="client", clients=CLIENTS, noise_at="clients", shots=2, prompts=3, queries=8, compare=(), calibrated=False
)
QUESTIONS = [question.text for question in fruits().questions[:8]]


def test_the_sum_is_of_votes_and_shares_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes are those of a server that sees them; each share of the noise is made again outside the app."""
    one, asked = classifier(CONFIG), []
    digest = masked.sha256

    def noted(content: bytes) -> object:
        asked.append(digest(content).digest())
        return digest(content)

    monkeypatch.setattr(masked, "sha256", noted)
    found = noisy_counts(one, QUESTIONS, SIGMA)
    assert (found.clients, found.failures, len(set(asked))) == (tuple(range(CLIENTS)), (), 1)
    limit, total = votes_limit(3, SIGMA, CLIENTS), np.zeros(16, dtype=np.uint32)
    for client in range(CLIENTS):
        named = [one.votes(number, text)[3 * client : 3 * client + 3] for number, text in enumerate(QUESTIONS)]
        noise = answer_secret(one.secret, client, 1, asked[0]).stream("votes")
        total = total + quantised(share(torch.tensor(np.array(named)).T, 2, SIGMA, CLIENTS, noise).flatten(), limit)
    assert np.array_equal(np.array(found.counts), restored(total, CLIENTS, limit).reshape(8, 2).numpy())


def test_all_shares_but_noise_are_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise the sum is the counts that a server sees, up to the rounding of each client's levels."""
    one = classifier(CONFIG)
    found = np.array(noisy_counts(one, QUESTIONS, 1e-9).counts)
    votes = np.array([one.votes(number, text) for number, text in enumerate(QUESTIONS)])
    counts = np.stack([(votes == label).sum(axis=1) for label in (0, 1)], axis=1)
    assert np.abs(found - counts).max() <= CLIENTS * 2 * votes_limit(3, 1e-9, CLIENTS) / LEVELS
    assert (found.argmax(axis=1) == answers(votes, 2, 0.0, one.secret, 0)).mean() > 0.7  # ties aside


def reached(app: ClientApp, clients: int) -> Reached:
    grid = simulated(app, clients)
    return Reached(grid, grid.nodes_by_partition(), [10] * clients)


def prompter(clients: int, sigma: float, votes: Callable[[int, object], torch.Tensor] | None = None) -> Prompter:
    return Prompter(votes or (lambda client, texts: torch.zeros(1, 40, dtype=torch.int64)), [10] * clients, 2, sigma,
                    Secret.drawn())  # fmt: skip


def dropping(app: ClientApp, gone: dict[int, str]) -> ClientApp:
    """Clients that fail at one kind of message, by partition."""

    def answer(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if gone.get(client) == message.metadata.message_type:
            raise RuntimeError("gone")
        return answered(app, message, context)

    return answer  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["query.keys", "query.shares", "train.masked_votes", "query.unmask"])
def test_clients_may_disappear_at_any_step(kind: str) -> None:
    """What is left still has the noise that is accounted for: its variance, chi-squared, beyond 6 but once in 1e9."""
    clients, left = 7, 5
    app = dropping(prompter_app(prompter(clients, SIGMA)), dict.fromkeys(range(left, clients), kind))
    counts, replies = ask_prompters(reached(app, clients), ["?"] * 40, 2, 1, SIGMA)
    there = clients if kind == "query.unmask" else left
    assert replies.clients == tuple(range(there))
    assert [failure.client for failure in replies.failures] == ([] if there == clients else [5, 6])
    noise = counts - np.array([there, 0])
    variance = SIGMA**2 * there / least_survivors(clients)
    assert variance >= SIGMA**2
    assert 1e-9 < stats.chi2(noise.size).cdf((noise**2).sum() / variance) < 1 - 1e-9


def test_too_few_clients_are_no_sum() -> None:
    app = dropping(prompter_app(prompter(7, SIGMA)), dict.fromkeys(range(4, 7), "train.masked_votes"))
    with pytest.raises(RunFailedError, match="4 clients have sent masked uploads, and secure aggregation needs 5"):
        ask_prompters(reached(app, 7), ["?"] * 40, 2, 1, SIGMA)


def test_a_client_that_fails_says_nothing_of_its_examples() -> None:
    def votes(client: int, texts: object) -> torch.Tensor:
        if client == 2:
            raise ValueError("the secret text of an example")
        return torch.zeros(1, 40, dtype=torch.int64)

    _, found = ask_prompters(reached(prompter_app(prompter(4, SIGMA, votes)), 4), ["?"] * 40, 2, 1, SIGMA)
    assert [failure.client for failure in found.failures] == [2]
    assert "secret text" not in found.failures[0].reason and "log says why" in found.failures[0].reason


def test_a_client_votes_once_and_in_one_round() -> None:
    app, context = prompter_app(prompter(3, SIGMA)), Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    simulated(app, 3)

    def ask(questions: object, number: int) -> str:
        task = ConfigRecord({"questions": questions, "round": number})  # type: ignore[dict-item]
        message = Message(RecordDict({"task": task}), 1, "train.masked_votes", group_id="1")
        return str(answered(app, message, context).error.reason)

    assert "failed; the client's own log says why" in ask(["one"], 1)  # out of turn: no keys were agreed on
    assert "round 1 was answered before" in ask(["another"], 1)
    assert "prompts vote once, in round 1" in ask(["one"], 2)
    assert "on a list of questions" in ask([], 1)


# ---- a run ----------------------------------------------------------------------------------------------------------


def settings(folder: Path, **keys: object) -> Prompting:
    rows = [f"{question.text},{question.label}" for question in fruits(300, 0).examples]
    (folder / "own.csv").write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    icl = {**CONFIG.model_dump(), "clients": 20, "queries": 30, "target_epsilon": 40.0, **keys}
    data = {"name": "csv", "path": str(folder / "own.csv"), "labels": ["no", "yes"]}
    return Prompting.model_validate({"seed": 3, "data": data, "icl": icl, "leaks": {"pairs": 0}})


def test_a_run_releases_what_its_ledger_proves_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    found = start_icl(settings(tmp_path), run, Silent())
    (level,), ledger = found.levels, json.loads((run / "ledger.json").read_text())["worst"]
    assert (level.epsilon, level.released, found.one_prompt, found.together) == (40.0, True, None, None)
    assert (found.noise_at, found.voted, found.clients, found.failures) == ("clients", 20, 20, ())
    mu = 3 * np.sqrt(2 * 30) / level.sigma  # 3 votes, 30 questions, two counts each
    assert ledger["epsilon"] == pytest.approx(gaussian_epsilon(1e-4, mu)) and ledger["epsilon"] <= 40.0
    assert ledger["adjacency"].startswith("replace-one-client: all examples of one client")
    notes = " ".join(ledger["notes"])
    for words in ("holds against a server that follows the protocol", "whole with 14 of 20", "rounded, and cut off"):
        assert words in notes
    assert {path.name for path in (run / "private").iterdir()} == {"counts.json", "secret.key", "origin.json"}
    counts = np.array(json.loads((run / "private" / "counts.json").read_text())["counts"])
    said = [json.loads(line)["answer"] for line in (run / "answers.jsonl").read_text().splitlines()]
    assert said == [("no", "yes")[label] for label in counts.argmax(axis=1)]
    write_icl_report(run)
    assert "20 of 20 clients voted under masks" in (run / "report.html").read_text()
    before = {name: (run / name).read_bytes() for name in ("answers.jsonl", "ledger.json", "private/counts.json")}
    (run / "icl.json").unlink()
    monkeypatch.setattr(masked, "ask_prompters", None)  # nobody is asked again
    assert resume_icl(run, Silent()).levels == found.levels
    assert {name: (run / name).read_bytes() for name in before} == before
    (run / "private" / "counts.json").write_text(json.dumps({"counts": [[1.0]], "clients": [0]}))
    with pytest.raises(InputError, match=r"counts.json is damaged: expected 30 questions of 2 counts"):
        resume_icl(run, Silent())


def test_noise_under_masks_is_that_of_votes_that_the_server_sees() -> None:
    seen = CONFIG.model_copy(update={"noise_at": "server"})
    assert noise_of(CONFIG, 60, 3.0) == noise_of(seen, 60, 3.0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"compare": [1.0]}, r"set compare = \[\]"),
        ({"unit": "example", "clients": 1}, "noise_at = 'clients' with clients = 1: allowed are 2 to 1000"),
        ({"clients": 1001}, "allowed are 2 to 1000"),
        ({"noise_at": "nobody"}, "noise_at"),
    ],
)
def test_masks_that_cannot_be_are_refused(keys: dict[str, object], said: str) -> None:
    tree = {"icl": {**CONFIG.model_dump(mode="json"), **keys}}
    with pytest.raises(InputError, match=said):
        validated(Prompting, tree, "icl.toml")


def test_runs_that_were_begun_before_there_were_masks_go_on() -> None:
    """What such a run wrote down of its settings has no such key."""
    before, now = Prompting(), Prompting.model_validate({"icl": CONFIG.model_dump(mode="json")})
    assert "noise_at" not in before.decisive()["icl"] and now.decisive()["icl"]["noise_at"] == "clients"
