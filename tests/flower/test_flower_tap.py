"""What the tap writes of any app: order and form of replies, what PyTorch did, and messages that train nothing.

The networks are trained by the apps themselves; what the tap says of them is compared with autograd, here once more.
"""

import importlib
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from safetensors.torch import load_file
from torch import Tensor, nn

from fedpriv.attacks.observation import Observation, list_observations, read_observation
from fedpriv.attacks.own_model import named_vector
from fedpriv.core.progress import Silent
from fedpriv.core.registry import MECHANISMS
from fedpriv.engines.inline import run_server
from fedpriv.flower import privatise, tap
from fedpriv.flower._tap import described
from fedpriv.flower.arrays import rescaled, round_of
from fedpriv.flower.attack import attack_tapped
from fedpriv.flower.folder import Exchange, Tapped, imported, read_exchanges
from fedpriv.mechanisms import mechanism_settings
from studies.noise_in_sum import OneProcess
from tests.cases import in_one_test
from tests.flower.apps import Old, client, context, question, settings

RATE = 0.1


class Net(nn.Module):
    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def one_logit() -> nn.Module:
    return Net(1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path / "runs"))
    return tmp_path


@dataclass(frozen=True)
class Trained:
    """A network that an app trains, the batch, and the message."""

    net: nn.Module
    images: Tensor
    labels: Tensor
    sent: ArrayRecord

    def loss(self, rows: slice = slice(None)) -> Tensor:
        return F.cross_entropy(self.net(self.images[rows]), self.labels[rows])

    def sgd(self, **keys: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=RATE, **keys)


def plain(case: Trained) -> None:
    optimizer = case.sgd()
    case.loss().backward()
    optimizer.step()


def state(case: Trained) -> ArrayRecord:
    return ArrayRecord(case.net.state_dict())


def listed(case: Trained) -> ArrayRecord:
    return ArrayRecord([value.numpy() for value in case.net.state_dict().values()])


def asked(
    home: Path,
    train: Callable[[Trained], None] = plain,
    reply: Callable[[Trained], ArrayRecord] = state,
    part: str = "",
    as_list: bool = False,
    outputs: int = 10,
    keys: str = "",
) -> tuple[Exchange, Observation | None, nn.Module, Trained]:
    """Have a client train a network once, and return what the tap wrote, the network before, and the case."""
    torch.manual_seed(0)
    before, net = Net(outputs), Net(outputs)
    net.load_state_dict(before.state_dict())
    kept = {name: value for name, value in before.state_dict().items() if name.startswith(part)}
    sent = ArrayRecord([value.numpy() for value in kept.values()]) if as_list else ArrayRecord(kept)
    case = Trained(net, torch.rand(4, 1, 4, 4), torch.tensor([3, 1, 4, 1]), sent)
    name = "Net" if outputs == 10 else "one_logit"
    app = ClientApp(mods=[tap(settings(home, f'[tap]\nmodel = "{__name__}:{name}"\n{keys}'))])

    @app.train()
    def train_round(message: Message, _: Any) -> Message:
        train(case)
        content = RecordDict({"arrays": reply(case), "metrics": MetricRecord({"num-examples": 4})})
        return Message(content, reply_to=message)

    message = question({})
    message.content["arrays"] = sent
    app(message, context())
    (exchange,) = read_exchanges(home / "runs" / "tap-1")
    paths = list_observations(home / "runs" / "tap-1" / "observations")
    return exchange, read_observation(paths[0]) if paths else None, before, case


def sends(form: str) -> Callable[[Trained], ArrayRecord]:
    def reply(case: Trained) -> ArrayRecord:
        if form == "gradient":
            return ArrayRecord({name: value.grad for name, value in case.net.named_parameters()})
        start = case.sent.to_torch_state_dict()
        sign = {"update": 1, "negated update": -1}[form]
        return ArrayRecord({name: sign * (value - start[name]) for name, value in case.net.state_dict().items()})

    return reply


def gradients(net: nn.Module, case: Trained) -> dict[str, Tensor]:
    F.cross_entropy(net(case.images), case.labels).backward()
    return {name: value.grad for name, value in net.named_parameters()}


@pytest.mark.parametrize("form", ["weights", "update", "negated update", "gradient"])
def test_the_form_of_a_reply_is_told_and_the_upload_is_the_same(home: Path, form: str) -> None:
    exchange, observation, before, case = asked(home, reply=state if form == "weights" else sends(form))
    assert (exchange.form, exchange.source) == (form, "compared with the network that was watched")
    assert observation is not None
    factor = 1.0 if form == "gradient" else -RATE
    assert observation.settings.algorithm == ("fedsgd" if form == "gradient" else "fedavg")
    for name, value in gradients(before, case).items():
        torch.testing.assert_close(observation.upload[name], factor * value, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("form", ["weights", "update"])
def test_without_pytorch_the_distance_tells_the_form(home: Path, form: str) -> None:
    """Parameters lie near those that were sent, an update near zero."""
    start = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    app = client([tap(home)], lambda given: {"0": given["0"] * (form == "weights") + np.float32(0.01)})
    app(question({"0": start}), context())
    (exchange,) = read_exchanges(home / "runs" / "tap-1")
    assert (exchange.form, exchange.order) == (form, ("0",))
    assert exchange.source.startswith("by its distance") and "PyTorch was not seen" in exchange.unattacked


def test_a_list_of_arrays_is_that_of_the_network(home: Path) -> None:
    """Two layers have the same shape; each array is attacked as the one that it is."""
    exchange, observation, before, case = asked(home, reply=listed, as_list=True)
    assert observation is not None and [*observation.parameters] == ["0", "1", "2", "3"] == [*exchange.order]
    for value, upload in zip(gradients(before, case).values(), observation.upload.values(), strict=True):
        torch.testing.assert_close(upload, -RATE * value, atol=1e-6, rtol=1e-4)
    named = named_vector(observation.upload, before, "upload")
    for name, value in case.net.named_parameters():
        torch.testing.assert_close(named[name], value - before.get_parameter(name), atol=1e-6, rtol=1e-4)


def two_optimisers(case: Trained) -> None:
    optimizers = [torch.optim.SGD(part.parameters(), lr=RATE) for part in case.net.children()]
    case.loss().backward()
    for optimizer in optimizers:
        optimizer.step()


def micro_batches(case: Trained) -> None:
    optimizer = case.sgd()
    for row in range(4):
        (case.loss(slice(row, row + 1)) / 4).backward()
    optimizer.step()


def groups(case: Trained) -> None:
    rates = zip(case.net.children(), (0.01, 0.1), strict=True)
    parts = [{"params": part.parameters(), "lr": rate} for part, rate in rates]
    optimizer = torch.optim.SGD(parts, lr=RATE, weight_decay=0.1)
    case.loss().backward()
    optimizer.step()


@pytest.mark.parametrize("train", [plain, two_optimisers, micro_batches, groups])
def test_one_step_of_four_is_seen_however_it_is_written(
    home: Path, train: Callable[[Trained], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the attack is given is what one plain step of SGD makes."""
    exchange, observation, before, case = asked(home, train)
    assert observation is not None
    public = observation.settings
    assert (public.batch_size, public.local_steps, public.learning_rate, public.examples) == (4, 1, RATE, 4)
    assert any("weight decay" in text for text in exchange.remarks) is (train is groups)
    assert any("0.01, 0.1" in text for text in exchange.remarks) is (train is groups)
    attack = importlib.import_module("fedpriv.flower.attack")
    for name, value in gradients(before, case).items():
        given = attack._as_of_one_rate(observation, exchange).upload[name]
        torch.testing.assert_close(given, -RATE * value, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("clipping", ["norm", "value", "none"])
def test_clipped_gradients_are_said(home: Path, clipping: str) -> None:
    def train(case: Trained) -> None:
        optimizer = case.sgd()
        case.loss().backward()
        if clipping == "norm":
            nn.utils.clip_grad_norm_(case.net.parameters(), 0.01)
        if clipping == "value":
            nn.utils.clip_grad_value_(case.net.parameters(), 0.001)
        optimizer.step()

    exchange, *_ = asked(home, train)
    assert any("clipped" in text for text in exchange.remarks) is (clipping != "none")


@in_one_test("name", ["percentile", "top-k", "sign", "quantise"])
def test_a_filter_in_an_app_is_recognised_and_attacked_as_such(home: Path, name: str) -> None:
    """The app applies it to its update, as NVFlare's filters do, and sends weights; nothing tells the tap of it."""

    def train(case: Trained) -> None:
        plain(case)
        start = case.sent.to_torch_state_dict()
        update = {key: value - start[key] for key, value in case.net.state_dict().items()}
        sizes = torch.cat([value.flatten() for value in update.values()]).abs()
        keys = {"percentile": {"gamma": float(sizes.quantile(0.8))}, "top-k": {"share": 0.3}}.get(name, {})
        sent = mechanism_settings({"name": name, **keys}).mechanism().expected(update)
        case.net.load_state_dict({key: start[key] + value for key, value in sent.items()})

    asked(home, train)
    summary = attack_tapped(home / "runs" / "tap-1", ["iga"], [], ["adversary.iga.iterations=2"], Silent())
    (home / "runs" / "tap-1").rename(home / "runs" / f"done-{name}")
    said = [text for text in (*summary.warnings, *summary.verdict) if "filter" in text]
    words = f"looks as if a filter ({MECHANISMS[name].title}) had been applied; attacked as such"
    assert any(words in text for text in said)


@in_one_test("known", ["keep_images = true", "keep_images = false"])
def test_steps_of_adam_are_not_taken_for_a_filter(home: Path, known: str) -> None:
    """Its first step has numbers of one size, next to smaller ones and those of dead units, as percentiles leave."""

    def train(case: Trained) -> None:
        optimizer = torch.optim.Adam(case.net.parameters(), lr=RATE, eps=1e-6)
        case.loss().backward()
        optimizer.step()

    asked(home, train, keys=known)
    folder = home / "runs" / "tap-1"
    summary = attack_tapped(folder, ["iga"], [], ["adversary.iga.iterations=2"], Silent())
    folder.rename(home / "runs" / known[-5:])
    assert not any("filter" in text for text in (*summary.warnings, *summary.verdict))


@pytest.mark.parametrize("levels", [127, 7, 0])
def test_whole_numbers_get_the_scale_that_the_server_has(levels: int) -> None:
    """Of each array its own; numbers that are none of the update's stay as they are."""
    stream = torch.Generator().manual_seed(1)
    update = {name: torch.randn(400, generator=stream) * size for name, size in (("w", 1e-3), ("b", 10.0))}
    sent = {name: (value / value.abs().max() * levels).round().to(torch.int8) for name, value in update.items()}
    other = {name: torch.randint(-9, 9, (400,), generator=stream, dtype=torch.int8) for name in update}
    made, form = rescaled(sent if levels else other, {"weights": other, "update": update})
    if not levels:
        assert (form, made["w"].dtype) == ("weights", torch.float32)
        return
    assert form == "update"
    for name, value in update.items():
        half = float(value.abs().max()) / levels / 2
        torch.testing.assert_close(made[name], value, atol=half * 1.2, rtol=0)
    assert rescaled(other, {"update": update}) == (other, None)


@pytest.mark.parametrize("how", ["adapter", "frozen", "in no optimizer"])
def test_an_adapter_is_attacked_on_the_frozen_rest(home: Path, how: str) -> None:
    """Only the head is in the message, or only the head is trained; the body is what it was, and no random one."""

    def train(case: Trained) -> None:
        case.net.body.requires_grad_(how == "in no optimizer")
        case.loss().backward()
        (torch.optim.SGD(case.net.head.parameters(), lr=RATE) if how == "in no optimizer" else case.sgd()).step()

    def head(case: Trained) -> ArrayRecord:
        return ArrayRecord({name: value for name, value in case.net.state_dict().items() if name in case.sent})

    exchange, observation, before, case = asked(home, train, head, part="head" if how == "adapter" else "")
    assert observation is not None and [*observation.parameters] == ["head.weight", "head.bias"]
    expected = gradients(before, case)
    for name, upload in observation.upload.items():
        torch.testing.assert_close(upload, -RATE * expected[name], atol=1e-6, rtol=1e-4)
    attack = importlib.import_module("fedpriv.flower.attack")
    folder = home / "runs" / "tap-1"
    network = attack._network(attack.read_tapped(folder), folder, observation, exchange)
    assert torch.equal(network.body[1].weight, before.body[1].weight)
    assert [value.requires_grad for value in network.parameters()] == [False, False, True, True]
    summary = attack_tapped(folder, ["iga"], [], ["adversary.iga.iterations=5"], Silent())
    assert summary.attacks[0].victims == 4


def test_one_logit_is_two_classes(home: Path) -> None:
    def train(case: Trained) -> None:
        optimizer = case.sgd()
        F.binary_cross_entropy_with_logits(case.net(case.images), (case.labels > 2).float()[:, None]).backward()
        optimizer.step()

    _, observation, *_ = asked(home, train, outputs=1)
    assert observation is not None and observation.settings.classes == 2
    summary = attack_tapped(
        home / "runs" / "tap-1", ["iga"], [], ["adversary.iga.iterations=300", "adversary.iga.restarts=1"], Silent()
    )
    assert (summary.attacks[0].victims, summary.attacks[0].recovered) == (4, 4) or summary.attacks[0].mse < 0.1


def test_clients_without_a_partition_have_the_number_of_their_node(home: Path) -> None:
    app = client([tap(home)], dict)
    for node in (11, 2**62 + 1):
        own = context()
        own.node_config, own.node_id = {"dataset-path": f"/data/{node}"}, node
        app(question({"w": np.zeros(3, np.float32)}), own)
    assert [exchange.client for exchange in read_exchanges(home / "runs" / "tap-1")] == [11, 2**62 + 1]


@pytest.mark.parametrize("kind", ["query", "query.times", "evaluate", "train"])
def test_every_message_and_record_is_kept(home: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Times of patients, metrics, configs and bytes: whatever leaves."""
    app = ClientApp(mods=[tap(home)])
    times = np.array([13.0, 7.0, 101.0])
    category, _, action = kind.partition(".")

    @getattr(app, category)(action or "default")
    def answer(message: Message, _: Any) -> Message:
        content = RecordDict({"survival": ArrayRecord([times]), "about": MetricRecord({"n": 3, "mean": [1.5]})})
        content["model"] = ConfigRecord({"tree": b"split", "name": "x"})
        return Message(content, reply_to=message)

    message = question({}, kind)
    del message.content["arrays"]
    app(message, context())
    (exchange,) = read_exchanges(home / "runs" / "tap-1")
    assert (exchange.type, exchange.node, exchange.client, exchange.round) == (kind, 4, 3, 1)
    assert exchange.sent == {"config": {"lr": 0.1, "server-round": 1}}
    assert exchange.replied == {
        "survival": {"0": "float64 (3,)"},
        "about": {"n": 3, "mean": [1.5]},
        "model": {"tree": "5 bytes", "name": "x"},
    }
    left = home / "runs" / "tap-1" / "messages" / f"{exchange.stem}.safetensors"
    arrays = load_file(left)
    assert arrays["reply/survival/0"].tolist() == times.tolist()
    assert bytes(arrays["bytes/model/tree"].tolist()) == b"split"
    assert "no gradient attack fits" in caplog.text


def test_a_tap_that_is_given_twice_says_so_and_writes_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = client([tap(home), tap(home)], dict)
    app(question({"w": np.ones(3, np.float32)}), context())
    assert len(read_exchanges(home / "runs" / "tap-1")) == 1 and "given twice" in caplog.text


@pytest.mark.parametrize("order", ["tap first", "privatise first"])
def test_a_tap_writes_what_leaves_in_either_order(home: Path, order: str) -> None:
    """Inside the mechanism, too, it is the release that is written, with its ledger."""
    text = f'[mechanism]\nname = "gaussian"\nsigma = 9.0\n[privatise]\nfolder = "{home / "privacy"}"\n'
    path = settings(home, f"{text}[tap]\nshape = [1, 1, 3]\nclasses = 2\nbatch_size = 1\nlocal_steps = 1\n{_KNOWN}")
    mods = [tap(path), privatise(path)]
    app = client(mods if order == "tap first" else mods[::-1], lambda given: {"w": given["w"] + 1})
    reply = app(question({"w": np.zeros(3, np.float32)}), context())
    (path,) = list_observations(home / "runs" / "tap-1" / "observations")
    observation = read_observation(path)
    assert torch.equal(observation.upload["w"], torch.tensor(reply.content["arrays"]["w"].numpy()))
    assert observation.settings.mechanism["name"] == "gaussian"
    assert json.loads((home / "runs" / "tap-1" / "ledger" / "0001-0003.json").read_text())["participations"] == 1


_KNOWN = 'learning_rate = 0.1\noptimizer = "sgd"\n'


@pytest.mark.parametrize("mods", ["tap", "privatise tap", "tap before"])
def test_secure_aggregation_is_recognised_and_its_mean_is_attacked(home: Path, mods: str) -> None:
    """The mod's own stages are all of type train: the tap after it hears the one that trains, and sums uploads."""
    noise = f'[mechanism]\nname = "gaussian"\nsigma = 1e-6\nclip_norm = 9.0\n[privatise]\nfolder = "{home / "p"}"\n'
    path = settings(home, f"{noise}[tap]\nshape = [1, 1, 2]\nclasses = 2\nbatch_size = 1\nlocal_steps = 1\n{_KNOWN}")
    after = [secaggplus_mod, *([privatise(path)] if "privatise" in mods else []), tap(path)]
    order = [tap(path), secaggplus_mod] if mods == "tap before" else after
    app = ClientApp(client_fn=lambda _: Old().to_client(), mods=order)
    server, ended = ServerApp(), []

    @server.main()
    def main(grid: Any, own: Any) -> None:
        start = ndarrays_to_parameters([np.zeros((2, 2), np.float32)])
        strategy = OldFedAvg(fraction_evaluate=0.0, initial_parameters=start)
        legacy = LegacyContext(context=own, config=ServerConfig(num_rounds=1), strategy=strategy)
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(grid, legacy)
        ended.append(own.state.array_records["parameters"]["0"].numpy())

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_server(server, OneProcess(app, 3))
    np.testing.assert_allclose(ended[0], 0.3, atol=5e-3)  # it is quantised
    exchanges = read_exchanges(home / "runs" / "tap-1")
    attack = importlib.import_module("fedpriv.flower.attack")
    if mods == "tap before":
        assert {each.unattacked for each in exchanges} == {
            "this is a stage of secure aggregation; a tap that comes after secaggplus_mod sees what is summed"
        }
        assert not attack._heard(home / "runs" / "tap-1", exchanges)
        return
    assert [(each.client, each.summed, each.form) for each in exchanges] == [(k, True, "weights") for k in range(3)]
    (upload,) = attack._heard(home / "runs" / "tap-1", exchanges)
    assert (upload.name, upload.observation.settings.batch_size) == ("1-sum", 3)
    assert (upload.line is not None) is ("privatise" in mods)
    torch.testing.assert_close(upload.observation.upload["0"], torch.full((2, 2), 0.3), atol=1e-4, rtol=0)


def test_a_sum_is_that_of_one_round_all_of_which_was_written_down() -> None:
    """With one message of each client, who is written down in the second round was not in the first; others may be."""
    attack = importlib.import_module("fedpriv.flower.attack")
    groups = ("3", "", "third")  # older strategies tell the round so
    assert [round_of(Message(RecordDict(), 4, "train", group_id=group)) for group in groups] == [3, None, None]

    def uploads(*clients: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(exchange=SimpleNamespace(client=client)) for client in clients]

    assert [*attack._complete({2: uploads(2), 1: uploads(0, 1)})] == [1]
    assert [*attack._complete({1: uploads(0, 1), 2: uploads(0, 1), 3: uploads(2)})] == [1, 2]


def test_the_network_is_found_where_the_apps_folder_has_the_name_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``flwr new wards`` makes it, wards/wards/task.py, seen from the folder above."""
    package = tmp_path / "wards" / "wards"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "task.py").write_text("class Net:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert imported(Tapped(None, str(tmp_path / "wards"), ""), "wards.task:Net", "tap.model").__name__ == "Net"


def test_arrays_of_older_clients_are_described_by_their_bytes() -> None:
    arrays = ArrayRecord()
    arrays["0"] = Array("", (), "numpy.ndarray", Array(np.zeros((2, 3), np.float32)).data)
    arrays["trees"] = Array("", (), "", b"no array")
    assert described(RecordDict({"fitres.parameters": arrays})) == {
        "fitres.parameters": {"0": "float32 (2, 3)", "trees": "8 bytes"}
    }
