"""Whole runs under a server that lies: who is sent what, what becomes of model and ledger, what is said of it."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpriv.attacks.observation import read_observation
from fedpriv.clients.app import client_app, identify
from fedpriv.core.config import Experiment, load_experiment
from fedpriv.core.errors import InputError, RunInterruptedError
from fedpriv.core.lab import attack_run, resume_run, start_run, tune_attack
from fedpriv.core.lab import run as lab_run
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.wire import unpack
from fedpriv.core.world import build_world
from fedpriv.gradients import Vector
from fedpriv.server import rounds as server_rounds
from fedpriv.server.evaluation import Evaluation
from tests.integration.small import experiment
from tests.integration.test_determinism import fingerprint

MODEL = {"name": "mlp", "hidden": [200, 12], "activation": "relu"}
ACTIVE = {"threat_model": "malicious-server", "attacks": ["imprint"], "victims": 2, "rounds": [1, 3]}
BOTH = {**ACTIVE, "attacks": ["iga", "imprint"], "iga": {"iterations": 3}}
SUM = {**ACTIVE, "threat_model": "malicious-secure-aggregation"}
GAUSSIAN = {"name": "gaussian", "sigma": 1e-3}


def active(adversary: dict[str, object] = ACTIVE, **sections: dict[str, object]) -> Experiment:
    return experiment(adversary=adversary, **{"model": MODEL, **sections})


SETTINGS = {
    "alone": active(),
    "both, gaussian": active(BOTH, mechanism=GAUSSIAN),
    "sum, vmf": active(SUM, mechanism={"name": "vmf", "kappa": 1e6}),
    "fedavg of one step, adam on the server": active(
        federation={"algorithm": "fedavg", "server_optimizer": "adam", "clients_per_round": 3},
        data={"train_examples": 64},
        training={"batch_size": 16},
    ),
}


class Spy:
    """The real ClientApp, which writes down what each client was sent in each round."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], Vector] = {}
        self.uploads: dict[tuple[int, int], Vector] = {}

    def client_app(self, secret: Secret | None) -> ClientApp:
        real, bound = client_app(secret), ClientApp()
        bound.query()(identify)

        @bound.train()
        def spied(message: Message, context: Context) -> Message:
            key = int(str(message.content.config_records["task"]["round"])), int(context.node_config["partition-id"])
            self.sent[key] = unpack(message.content.array_records["parameters"])
            reply = real(message, context)
            self.uploads[key] = unpack(reply.content.array_records["upload"])
            return reply

        return bound


def spied_run(settings: Experiment, path: Path, monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(lab_run, "client_app", spy.client_app)
    start_run(settings, path, "", Silent())
    return spy


def equal(one: Vector, other: Vector) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_attacked_clients_get_made_parameters_and_all_others_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is followed by hand: SGD on the mean upload of the clients that were not deceived."""
    settings = active(BOTH)
    spy = spied_run(settings, tmp_path / "run", monkeypatch)
    world = build_world(settings)
    model = {name: value.clone() for name, value in world.initial.parameters.items()}
    for number in (1, 2, 3):
        deceived = (0, 1) if number in (1, 3) else ()
        honest = [client for client in range(4) if client not in deceived]
        for client in range(4):
            assert equal(spy.sent[number, client], model) == (client not in deceived)
        weights = torch.tensor([float(len(world.partitions[client])) for client in honest])
        shares = (weights / weights.sum()).tolist()
        for name, value in model.items():
            mean = sum(share * spy.uploads[number, client][name] for share, client in zip(shares, honest, strict=True))
            value -= settings.server_learning_rate * mean
        if number < 3:
            after = spy.sent[number + 1, 3]
            for name, value in model.items():
                torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-5)
            model = {name: value.clone() for name, value in after.items()}
    records = RunFolder.open(tmp_path / "run").rounds()
    assert [record.crafted for record in records] == [(), (0, 1), (), (0, 1)]
    assert [record.used for record in records] == [(), (2, 3), (0, 1, 2, 3), (2, 3)]


@pytest.mark.parametrize("settings", [SETTINGS["both, gaussian"], SETTINGS["alone"]], ids=["both", "alone"])
def test_observations_hold_the_parameters_that_were_sent(
    settings: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = spied_run(settings, tmp_path / "run", monkeypatch)
    paths = sorted((tmp_path / "run" / "observations").glob("*.safetensors"))
    assert [path.stem for path in paths] == [f"{number:04d}-{client:04d}" for number in (1, 3) for client in range(4)]
    for path in paths:
        heard = read_observation(path)
        assert equal(heard.parameters, spy.sent[heard.round, heard.client])
        assert equal(heard.upload, spy.uploads[heard.round, heard.client])
        rows = heard.parameters["hidden1.weight"]
        assert bool((rows == rows[:1]).all()) == (heard.client < 2)


def test_a_round_whose_clients_were_all_deceived_leaves_the_model(tmp_path: Path) -> None:
    start_run(active(SUM), tmp_path / "run", "", Silent())
    records = RunFolder.open(tmp_path / "run").rounds()
    assert [record.used for record in records] == [(), (), (0, 1, 2, 3), ()]
    losses = [record.loss for record in records]
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_deceived_clients_take_part_in_the_ledger(tmp_path: Path) -> None:
    """They released something, whatever became of it: the ledger is that of a run without the attack."""
    vmf = {"name": "vmf", "kappa": 40.0}
    for name, settings in (("active", active(mechanism=vmf)), ("passive", active({"attacks": []}, mechanism=vmf))):
        start_run(settings, tmp_path / name, "", Silent())
    one, other = ((tmp_path / name / "ledger.json").read_bytes() for name in ("active", "passive"))
    assert one == other
    assert json.loads(one)["worst"]["participations"] >= 1


Whole = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder of an uninterrupted inline run."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        start_run(SETTINGS[name], folder, "", Silent())
        return folder

    return run


@pytest.mark.parametrize("name", SETTINGS)
def test_twice_inline_gives_the_same_bytes(name: str, whole: Whole, tmp_path: Path) -> None:
    start_run(SETTINGS[name], tmp_path / "again", "", Silent())
    assert fingerprint(tmp_path / "again") == fingerprint(whole(name))


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C in the evaluation of a round: what was done in it is lost, and it is asked for again."""
    calls: list[int] = []
    evaluate: Callable[..., Evaluation] = server_rounds.evaluate_round

    def stopped(*arguments: object) -> Evaluation:
        calls.append(1)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(server_rounds, "evaluate_round", stopped)


@pytest.mark.parametrize(("name", "after"), [("alone", 1), ("sum, vmf", 2), ("both, gaussian", 3)])
def test_an_interrupted_run_is_finished_with_the_same_bytes(
    name: str, after: int, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in an attacked round (the first and the third) and in the one between."""
    with monkeypatch.context() as patched:
        interrupt(patched, after)
        with pytest.raises(RunInterruptedError):
            start_run(SETTINGS[name], tmp_path / "cut", "", Silent())
    resume_run(tmp_path / "cut", Silent())
    assert fingerprint(tmp_path / "cut") == fingerprint(whole(name))
    one, other = (RunFolder.open(folder).rounds() for folder in (tmp_path / "cut", whole(name)))
    assert [(record.used, record.crafted) for record in one] == [(record.used, record.crafted) for record in other]


def test_images_are_recovered_and_active_results_stand_alone(tmp_path: Path) -> None:
    summary = start_run(active(BOTH, mechanism=GAUSSIAN), tmp_path / "run", "", Silent())
    rows = {(row.attack, row.upload): row for row in summary.attacks}
    assert rows["imprint", "unprotected"].victims == rows["iga", "unprotected"].victims == 16
    assert (
        rows["imprint", "unprotected"].recovered >= 12
    )  # 8 images on 200 bins: 5 in 6 uploads are without a collision
    assert all(row.active == (row.attack == "imprint") for row in summary.attacks)
    assert all(row.missing == 0 for row in summary.attacks)
    passive, worst = summary.verdict[0], next(text for text in summary.verdict if "Worst case" in text)
    assert f"recovers {rows['iga', 'unprotected'].recovered} of 16 images, with gaussian" in passive
    assert "eavesdropper" in passive
    assert (
        f"recovers {rows['imprint', 'unprotected'].recovered} of 16 images without protection, "
        f"{rows['imprint', 'protected'].recovered} of 16 images with gaussian." in worst
    )
    page = write_report(tmp_path / "run").read_text()
    assert "Worst case, active server: images recovered without protection" in page
    assert "Worst case, active server: images recovered with Gaussian noise" in page
    assert "Images recovered without protection" in page
    assert page.count("active, worst case") == 2
    assert "Robbing the Fed" in page


def test_alone_it_says_nothing_of_an_eavesdropper(tmp_path: Path) -> None:
    summary = start_run(active(), tmp_path / "run", "", Silent())
    assert not any("eavesdropper" in text for text in summary.verdict)
    assert summary.verdict[0].startswith("Worst case")
    page = write_report(tmp_path / "run").read_text()
    assert "Images recovered without protection" not in page
    assert summary.warnings == ()


@pytest.mark.parametrize("mechanism", [{"name": "none"}, GAUSSIAN])
def test_the_sum_of_several_clients_is_read(mechanism: dict[str, object], tmp_path: Path) -> None:
    summary = start_run(active(SUM, mechanism=mechanism), tmp_path / "run", "", Silent())
    row = next(row for row in summary.attacks if (row.attack, row.upload) == ("imprint", "unprotected"))
    assert row.victims == 32  # two rounds, four clients of four images
    assert row.recovered >= 24
    assert any("had only sums of uploads" in text for text in summary.verdict)


def test_in_much_noise_the_worst_case_has_a_row_of_nothing(tmp_path: Path) -> None:
    loud = {"name": "gaussian", "sigma": 10.0}
    summary = start_run(active(mechanism=loud), tmp_path / "run", "", Silent())
    row = next(row for row in summary.attacks if (row.attack, row.upload) == ("imprint", "protected"))
    assert (row.recovered, row.victims, row.label_accuracy) == (0, 16, None)
    assert "0 of 16 images with gaussian" in summary.verdict[0]
    assert "<dt>Label</dt><dd>not guessed" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("adversary", "says"),
    [
        (
            {**ACTIVE, "threat_model": "honest-but-curious-server"},
            "only listens; allowed: malicious-server, malicious-",
        ),
        ({**ACTIVE, "threat_model": "network-plaintext"}, "only listens"),
        ({**ACTIVE, "threat_model": "secure-aggregation"}, "only listens"),
        ({**ACTIVE, "knows_public_data": False}, "knows_public_data = false withholds"),
        ({**ACTIVE, "knows_batch_size": False}, "knows_batch_size = false withholds"),
        ({**SUM, "attacks": ["dlg", "imprint"]}, "leaves dlg none; make them in runs of their own"),
        ({**BOTH, "victims": 4}, "of 4 that leaves iga none"),
        ({**ACTIVE, "imprint": {"bins": 1}}, "adversary.imprint.bins = 1:"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_they_are_read(
    adversary: dict[str, object], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.toml"
    text = active().to_toml()
    lines = [f"adversary.{key}={json.dumps(value)}" for key, value in adversary.items() if not isinstance(value, dict)]
    lines += [
        f"adversary.{key}.{inner}={json.dumps(value)}"
        for key, section in adversary.items()
        if isinstance(section, dict)
        for inner, value in section.items()
    ]
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load_experiment(file, lines)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"model": {"name": "lenet"}},
            "model.name = 'lenet': imprint needs a ReLU and another Linear layer right after output",
        ),
        ({"model": {**MODEL, "activation": "tanh"}}, "imprint needs a ReLU and another Linear layer right after"),
        ({"adversary": {**ACTIVE, "imprint": {"bins": 201}}}, "imprint.bins = 201: .* has 200 rows"),
        ({"federation": {"algorithm": "fedavg"}}, "imprint reads one gradient; the clients train for .* local step"),
    ],
)
def test_what_cannot_be_attacked_is_refused_before_anything_is_written(
    sections: dict[str, dict[str, object]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        start_run(active(**{"adversary": ACTIVE, **sections}), tmp_path / "run", "", Silent())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def later(path: Path, *names: str, overrides: tuple[str, ...] = (), victims: tuple[str, ...] = ()) -> None:
    attack_run(path, names, victims, overrides, None, "fedpriv attack", Silent())


def test_what_clients_were_sent_cannot_be_changed_afterwards(tmp_path: Path) -> None:
    quick = {"attacks": ["iga"], "victims": 2, "iga": {"iterations": 3}, "threat_model": "malicious-server"}
    start_run(active(quick), tmp_path / "honest", "", Silent())
    before = (tmp_path / "honest" / "summary.json").read_bytes()
    with pytest.raises(InputError, match="the clients of this run were sent the model, not parameters that were made"):
        later(tmp_path / "honest", "imprint")
    assert (tmp_path / "honest" / "summary.json").read_bytes() == before
    start_run(active(SUM), tmp_path / "sum", "", Silent())
    with pytest.raises(InputError, match="the uploads are of parameters that an active server made"):
        later(tmp_path / "sum", "iga", overrides=("adversary.iga.iterations=3",))
    with pytest.raises(InputError, match="its settings decided what the clients were sent"):
        later(tmp_path / "sum", "imprint", overrides=("adversary.imprint.bins=20",))
    with pytest.raises(InputError, match="active attack"):
        tune_attack(tmp_path / "sum", "imprint", (), 2, (), Silent())


def test_later_attacks_go_to_the_uploads_that_suit_them(tmp_path: Path) -> None:
    start_run(active(), tmp_path / "run", "", Silent())
    later(tmp_path / "run", "iga", overrides=("adversary.iga.iterations=3",))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "reconstructions" / "scores.jsonl").read_text().splitlines()
    ]
    clients = {(line["attack"].partition(",")[0], line["client"]) for line in lines if line["upload"] != "none"}
    assert clients == {("imprint", 0), ("imprint", 1), ("iga", 2), ("iga", 3)}
    sentences = json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"]
    assert sentences[0].startswith("Without protection the eavesdropper recovers")
    assert sentences[1].startswith("Worst case, not eavesdropping")
    assert "Images recovered without protection" in write_report(tmp_path / "run").read_text()
    later(tmp_path / "run", "imprint")
    with pytest.raises(InputError, match="were sent the model"):
        later(tmp_path / "run", "imprint", victims=("1-3",))
