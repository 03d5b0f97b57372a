"""Secure aggregation: the server learns the sum and nothing else, exactly, and clients may vanish at any step."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from scipy.stats import kstest, uniform

from fedpriv.algorithms.secure_aggregation import server as server_module
from fedpriv.algorithms.secure_aggregation.client import QUERIES, give_shares
from fedpriv.algorithms.secure_aggregation.secrets import mask
from fedpriv.algorithms.secure_aggregation.server import ask_for_sum
from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.clients import app as client_module
from fedpriv.clients.cohort import CohortApp, Stack
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunFailedError
from fedpriv.core.federated import masked_weights
from fedpriv.core.lab import run as lab_run
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.engines.inline import InlineGrid, assume_server_identity
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.whole_numbers import LEVELS, least_survivors, quantised, restored
from fedpriv.server import exchange as exchange_module
from fedpriv.server.exchange import Federation, question
from fedpriv.server.uploads import Upload
from tests.integration.small import experiment

CHECKPOINT = Path("checkpoint") / "server.safetensors"
STEPS = ("query.keys", "query.shares", "train.masked", "query.unmask")


def secure(**sections: dict[str, object]) -> Experiment:
    federation = {"clients": 4, "rounds": 2, "secure_aggregation": True, **sections.pop("federation", {})}
    return experiment(federation=federation, **sections)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(folder).load_checkpoint()
    assert checkpoint is not None
    return {key: value for key, value in checkpoint.tensors.items() if key.startswith("parameters/")}


@pytest.mark.parametrize("limit", [1e-3, 1.0, 8.0, 1e6])
def test_quantisation_is_within_half_a_level_and_sums_are_exact(limit: float) -> None:
    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.uniform(-1.2 * limit, 1.2 * limit, (1000, 50)))
    words = [quantised(row, limit) for row in values]
    total = np.zeros(50, dtype=np.uint32)
    for each in words:
        total = total + each + mask(bytes(32), 50)
    for _ in words:
        total = total - mask(bytes(32), 50)
    clipped = values.clamp(-limit, limit)
    for row, word in zip(clipped, words, strict=True):
        assert float((restored(word, 1, limit) - row).abs().max()) <= limit / LEVELS * (1 + 1e-6)
    assert int(total.max()) < 2**32
    exact = np.sum([each.astype(np.int64) for each in words], axis=0)
    assert (total.astype(np.int64) == exact).all()
    error = restored(total, len(words), limit) - clipped.sum(dim=0)
    assert float(error.abs().max()) <= 1000 * limit / LEVELS


def test_what_is_not_finite_is_not_masked() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantised(torch.tensor([0.0, torch.nan], dtype=torch.float64), 1.0)


def test_weights_and_survivors() -> None:
    assert masked_weights([10, 40], "examples") == [0.25, 1.0]
    assert masked_weights([10, 40], "uniform") == [1.0, 1.0]
    assert [least_survivors(n) for n in (2, 3, 4, 6, 9, 100)] == [2, 3, 3, 5, 7, 67]


@pytest.mark.parametrize("mechanism", [{"name": "none"}, {"name": "gaussian", "sigma": 1.0}], ids=["none", "gaussian"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_model_is_that_of_the_plain_run_but_for_rounding(
    mechanism: dict[str, object], weighting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of themselves two settings have two noises, and so have parameters that differ in the last digits.
    monkeypatch.setattr(
        "fedpriv.clients.answering.answer_secret", lambda secret, *asked: secret.derived("test", *asked[:2])
    )
    sections = {"mechanism": mechanism, "data": {"partition": "dirichlet", "alpha": 0.5}, "training": {"batch_size": 2}}
    start_run(secure(federation={"weighting": weighting}, **sections), tmp_path / "a", "", Silent())
    start_run(
        secure(federation={"weighting": weighting, "secure_aggregation": False}, **sections),
        tmp_path / "b",
        "",
        Silent(),
    )
    mine, plain = parameters(tmp_path / "a"), parameters(tmp_path / "b")
    for key, value in plain.items():
        assert not torch.equal(mine[key], value) or value.numel() < 20
        assert float((mine[key] - value).abs().max()) < 1e-5
    assert (tmp_path / "a" / "ledger.json").read_text() == (tmp_path / "b" / "ledger.json").read_text()


def test_two_runs_give_the_same_bytes_though_masks_are_random(tmp_path: Path) -> None:
    for name in ("a", "b"):
        start_run(secure(), tmp_path / name, "", Silent())
    assert (tmp_path / "a" / CHECKPOINT).read_bytes() == (tmp_path / "b" / CHECKPOINT).read_bytes()


def app_where(kind: str, clients: set[int], how: Callable[[Message], Message]) -> Callable[[Secret | None], ClientApp]:
    """What makes the real app, except that some clients answer one kind of message otherwise."""

    def make(secret: Secret | None) -> ClientApp:
        honest, app = client_module.client_app(secret), CohortApp()
        app.cohort = honest.cohort
        app.query()(client_module.identify)
        for name in STEPS:
            category, action = name.split(".")

            def answer(message: Message, context: Context, name: str = name) -> Message:
                reply = honest(message, context)
                return how(reply) if name == kind and int(context.node_config["partition-id"]) in clients else reply

            getattr(app, category)(action)(answer)
        return app

    return make


def vanish(reply: Message) -> Message:
    raise RuntimeError("battery empty")


@pytest.mark.parametrize("kind", STEPS)
def test_a_client_may_vanish_at_any_step(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its masked upload it is left out and named; after it, it is in the sum."""
    settings = secure(federation={"rounds": 1})
    monkeypatch.setattr(lab_run, "client_app", app_where(kind, {1}, vanish))
    start_run(settings, tmp_path / "run", "", Silent())
    (record,) = RunFolder.open(tmp_path / "run").rounds()[1:]
    used = (0, 1, 2, 3) if kind == "query.unmask" else (0, 2, 3)
    assert record.used == used
    assert [failure.client for failure in record.failures] == [one for one in range(4) if one not in used]
    assert all("battery empty" in failure.reason for failure in record.failures)
    world = build_world(settings)
    uploads = [local_upload(world, client, world.initial, 1).parameters for client in used]
    sizes = np.array([len(world.partitions[client]) for client in used], dtype=np.float64)
    for name, value in world.initial.parameters.items():
        mean = sum(n * upload[name].double() for n, upload in zip(sizes, uploads, strict=True)) / sizes.sum()
        expected = value.double() - settings.training.learning_rate * mean
        assert float((parameters(tmp_path / "run")[f"parameters/{name}"] - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "mechanism",
    [{"name": "none"}, {"name": "gaussian", "sigma": 1.0}, {"name": "distributed", "sigma": 0.5, "clip_norm": 0.4}],
    ids=["none", "gaussian", "distributed"],
)
def test_a_stack_of_clients_masks_the_sum_that_inline_clients_do(
    mechanism: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them vanishes after it was trained with the others.

    Uploads that differ by 1e-15 are rounded to other whole numbers once in 10^9 runs.
    """
    groups: list[list[int]] = []
    train = Stack.uploads

    def noted(stack: Stack, clients: Sequence[int], *rest: Any) -> Any:
        groups.append(list(clients))
        return train(stack, clients, *rest)

    monkeypatch.setattr(Stack, "uploads", noted)
    monkeypatch.setattr(lab_run, "client_app", app_where("train.masked", {1}, vanish))
    for name in ("inline", "stacked"):
        engine = {"name": name, "precision": "float64"}
        federation: dict[str, object] = {"rounds": 1, "weighting": "uniform"}
        start_run(secure(mechanism=mechanism, engine=engine, federation=federation), tmp_path / name, "", Silent())
    assert groups == [[0, 1, 2, 3]]
    (inline, stacked) = (parameters(tmp_path / name) for name in ("inline", "stacked"))
    for key, value in inline.items():
        torch.testing.assert_close(stacked[key], value, rtol=0, atol=1e-12)
    records = [RunFolder.open(tmp_path / name).rounds()[1] for name in ("inline", "stacked")]
    assert [(record.used, [failure.client for failure in record.failures]) for record in records] == [
        ((0, 2, 3), [1]),
        ((0, 2, 3), [1]),
    ]
    assert (tmp_path / "inline" / "ledger.json").read_text() == (tmp_path / "stacked" / "ledger.json").read_text()


@pytest.mark.parametrize("kind", STEPS)
def test_too_few_clients_are_not_unmasked(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "client_app", app_where(kind, {1, 2}, vanish))
    with pytest.raises(
        RunFailedError, match=r"round 1: 2 clients have .* secure aggregation needs 3 of them: client 1 .*battery"
    ):
        start_run(secure(), tmp_path / "run", "", Silent())


@pytest.mark.parametrize("kind", STEPS)
def test_no_sum_of_fewer_clients_than_the_noise_is_whole_with(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that vanishes once it has sent its upload is in the sum, with its share."""
    monkeypatch.setattr(lab_run, "client_app", app_where(kind, {1}, vanish))
    settings = shared_by_all_four()
    if kind == "query.unmask":
        start_run(settings, tmp_path / "run", "", Silent())
        assert RunFolder.open(tmp_path / "run").rounds()[1].used == (0, 1, 2, 3)
        return
    with pytest.raises(
        RunFailedError, match=r"round 1: 3 clients have .* secure aggregation needs 4 of them: client 1"
    ):
        start_run(settings, tmp_path / "run", "", Silent())


def test_a_server_that_is_content_with_fewer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require = server_module._Round.require
    monkeypatch.setattr(
        server_module._Round, "require", lambda self, there, needed, what: require(self, there, min(needed, 3), what)
    )
    monkeypatch.setattr(lab_run, "client_app", app_where("train.masked", {1}, vanish))
    with pytest.raises(RunFailedError, match="the sum of 3 clients is not unmasked"):
        start_run(shared_by_all_four(), tmp_path / "run", "", Silent())


def shared_by_all_four() -> Experiment:
    mechanism = {"name": "distributed", "sigma": 0.5, "clip_norm": 0.4, "survivors": 4}
    return secure(mechanism=mechanism, federation={"rounds": 1, "weighting": "uniform"})


def test_one_client_alone_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_run, "client_app", app_where("query.keys", {1, 2, 3}, vanish))
    with pytest.raises(RunFailedError, match=r"round 1: 1 client has sent keys, and secure aggregation needs 3"):
        start_run(secure(), tmp_path / "run", "", Silent())


def test_answers_that_do_not_fit_leave_their_client_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(reply: Message) -> Message:
        reply.content["answer"] = ConfigRecord({"to": [7], "ciphertexts": [b"x"]})
        return reply

    monkeypatch.setattr(lab_run, "client_app", app_where("query.shares", {3}, nonsense))
    start_run(secure(federation={"rounds": 1}), tmp_path / "run", "", Silent())
    (record,) = RunFolder.open(tmp_path / "run").rounds()[1:]
    assert record.used == (0, 1, 2)
    assert [(one.client, one.reason) for one in record.failures] == [(3, "sent no shares of its secrets")]


def test_a_server_that_asks_for_both_shares_gets_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the seed's and the key's share of one client the server could unmask its upload alone."""

    def greedy(message: Message, context: Context) -> Message:
        asked = message.content.config_records["asked"]
        everybody = [*asked["survivors"], *asked["dropped"]]  # type: ignore[misc]
        message.content["asked"] = ConfigRecord({"survivors": everybody, "dropped": everybody})
        return give_shares(message, context)

    monkeypatch.setitem(QUERIES, "unmask", greedy)
    with pytest.raises(RunFailedError, match="every client that is masked towards either survived or dropped out"):
        start_run(secure(), tmp_path / "run", "", Silent())


class AskedAgain:
    """A server that asks for the sum of a round more than once, of clients that remember."""

    def __init__(self) -> None:
        assume_server_identity(1)
        self.world = build_world(secure(federation={"clients": 3, "rounds": 2}))
        self.grid = InlineGrid(client_module.client_app(Secret(bytes(32))), 3)

    def sum_of(self, clients: Sequence[int], number: int = 1) -> Vector:
        text = self.world.experiment.model_dump_json()
        nodes = {client: client + 1 for client in clients}
        federation = Federation(self.grid, nodes, self.world, text)
        replies = ask_for_sum(federation, number, dict.fromkeys(clients, self.world.initial))
        assert replies.mean is not None
        return replies.mean.parameters


def test_one_round_has_one_set_of_clients() -> None:
    """The difference of two sums would be the upload of the client that is in one of them."""
    server = AskedAgain()
    first = server.sum_of([0, 1, 2])
    with pytest.raises(RunFailedError, match=r"client 0 raised an error: RefusedError: .* round 1 had other clients"):
        server.sum_of([0, 1])
    assert all(torch.equal(value, first[name]) for name, value in server.sum_of([0, 1, 2]).items())
    server.sum_of([0, 1], number=2)


def test_one_round_has_one_set_of_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same set again, and this time one of its clients is said to have dropped out."""
    server = AskedAgain()
    monkeypatch.setattr("fedpriv.algorithms.secure_aggregation.server.least_survivors", lambda clients: 2)
    monkeypatch.setattr("fedpriv.algorithms.secure_aggregation.client.least_survivors", lambda clients: 2)
    server.sum_of([0, 1, 2])
    masked = server_module._masked

    def without_the_last(*asked: Any) -> tuple[Upload, ...]:
        return masked(*asked)[:-1]

    monkeypatch.setattr(server_module, "_masked", without_the_last)
    with pytest.raises(RunFailedError, match="round 1 had other survivors before"):
        server.sum_of([0, 1, 2])


def test_keys_of_a_round_mask_its_uploads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the upload of round 1 could be asked for under the keys of round 2, among other clients."""
    server = AskedAgain()
    server.sum_of([0, 1, 2])
    monkeypatch.setattr(exchange_module, "question", lambda state, task, number: question(state, task, 1))
    with pytest.raises(RunFailedError, match="the keys of round 2 mask no upload of another round"):
        server.sum_of([0, 1], number=2)


ATTACKED: dict[str, object] = {"attacks": ["closed_form"], "victims": 2, "counterfactual": False}


def test_masked_uploads_are_heard_and_say_nothing(tmp_path: Path) -> None:
    """The closed form reads every image of the plain uploads, of batches of one; of the masked ones none.

    The masked words are uniform (Kolmogorov and Smirnov; a false alarm once in a million).
    """
    sections = {"training": {"batch_size": 1}, "model": {"activation": "relu"}}
    server = {**ATTACKED, "threat_model": "honest-but-curious-server"}
    plain = start_run(
        secure(federation={"secure_aggregation": False, "rounds": 1}, adversary=server, **sections),
        tmp_path / "plain",
        "",
        Silent(),
    )
    masked = start_run(
        secure(federation={"rounds": 1}, adversary=server, **sections), tmp_path / "masked", "", Silent()
    )
    recovered = [sum(attack.recovered for attack in one.attacks if attack.upload != "none") for one in (plain, masked)]
    assert recovered == [2, 0]
    assert any("observed masked" in text for text in masked.warnings)
    assert any("From masked uploads" in text for text in masked.verdict)
    for path in list_observations(tmp_path / "masked" / "observations"):
        heard = np.concatenate([value.numpy().ravel() for value in read_observation(path).upload.values()])
        assert kstest(heard / 8, uniform(-1, 2).cdf).pvalue > 1e-6
    scores = [json.loads(line) for line in (tmp_path / "masked/reconstructions/scores.jsonl").read_text().splitlines()]
    attacked = [score["mse"] for score in scores if score["attack"] == "closed_form"]
    guessed = [score["mse"] for score in scores if score["upload"] == "none"]
    assert min(attacked) >= 0.9 * min(guessed)


def test_the_sum_is_attacked_instead(tmp_path: Path) -> None:
    """That is what happens unless the experiment names another threat model."""
    adversary = {**ATTACKED, "attacks": ["iga"], "iga": {"iterations": 3}}
    summary = start_run(
        secure(federation={"rounds": 1, "clients": 2}, adversary=adversary, training={"batch_size": 1}),
        tmp_path / "run",
        "",
        Silent(),
    )
    (path,) = list_observations(tmp_path / "run" / "observations")
    heard = read_observation(path)
    assert path.stem == "0001-sum"
    assert heard.settings.clients == 2
    before = build_world(secure(federation={"rounds": 1, "clients": 2}, training={"batch_size": 1})).initial
    for name, value in parameters(tmp_path / "run").items():
        step = before.parameters[name.removeprefix("parameters/")] - value
        assert torch.allclose(step, 0.5 * heard.upload[name.removeprefix("parameters/")], atol=1e-6)
    assert any("secure aggregation was carried out" in text for text in summary.verdict)
    assert [attack.attack for attack in summary.attacks if attack.upload != "none"] == ["iga"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"federation": {"aggregation": "median"}}, "hides each upload, and aggregation = 'median' needs it"),
        ({"federation": {"max_update_norm": 1.0}}, "max_update_norm cannot be checked"),
        ({"federation": {"clients_per_round": 1}}, "2 to 1000 clients a round, not of 1"),
        ({"federation": {"clients": 1001}}, "2 to 1000 clients a round, not of 1001"),
        (
            {"adversary": {"attacks": ["imprint"], "threat_model": "malicious-server"}},
            "use malicious-secure-aggregation",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        secure(**sections)


def test_an_active_server_reads_the_sum_of_what_it_made(tmp_path: Path) -> None:
    adversary = {"attacks": ["imprint"], "threat_model": "malicious-secure-aggregation"}
    settings = secure(
        federation={"clients": 2, "rounds": 1}, adversary=adversary, model={"hidden": [64, 8], "activation": "relu"}
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    (record,) = RunFolder.open(tmp_path / "run").rounds()[1:]
    assert (record.used, record.crafted) == ((), (0, 1))
    assert sum(attack.recovered for attack in summary.attacks if attack.attack == "imprint") > 0
