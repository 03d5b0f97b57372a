"""What networks learn is seen, however they are written; attacks count where our model of the training is right."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from fedpriv.attacks import reconstruct
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.flower import tap
from fedpriv.flower.attack import TappedSummary, attack_tapped
from fedpriv.flower.folder import Exchange, TrainedOn, joined, read_exchanges
from fedpriv.flower.inference import Records, inferred
from fedpriv.flower.uploads import dense_layers, first_inputs
from fedpriv.flower.watch import Batch, names_in, uncompiled, watching
from tests.flower.apps import client, context, question, settings

FEATURES = 6


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path / "runs"))
    return tmp_path


class Rows(nn.Module):
    """Takes rows by any name, and gives as many numbers as it is told."""

    def __init__(self, outputs: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(FEATURES, 12), nn.Dropout(drop), nn.Linear(12, outputs)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.drop(torch.relu(self.hidden(values))))


class Boxed(Rows):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["values"])


class Normed(nn.Module):
    """Raises on a batch of one, and moves no bias of the layer before BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.hidden(values))))


class Ae(nn.Module):
    """Its parts are run one after the other by the training; its own forward is not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh())
        self.decoder = nn.Linear(4, FEATURES)


class Words(nn.Module):
    """Classifies tokens; the loss is its own, as transformers has it. It knows more places than tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(40, 16), nn.Linear(16, 2)
        self.places = nn.Embedding(64, 16)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        places = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        logits = self.out((self.table(input_ids) + places).mean(1))
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def one() -> nn.Module:
    return Rows(1)


def double() -> nn.Module:
    return Rows().double()


def dropping() -> nn.Module:
    return Rows(drop=0.5)


STREAM = torch.Generator().manual_seed(0)
VALUES, CLASSES = torch.randn(2, FEATURES, generator=STREAM), torch.tensor([0, 2])
Loss = Callable[[nn.Module], Tensor]


def told(home: Path, network: str, loss: Loss, steps: int = 1, extra: Any = None) -> tuple[Exchange, TappedSummary]:
    """Have a client take steps of SGD on a loss, and attack what it sends."""
    app = ClientApp(mods=[tap(settings(home, f'[tap]\nmodel = "{__name__}:{network}"\n'))])
    torch.manual_seed(0)
    net = uncompiled(globals()[network]())
    start = {name: value.clone() for name, value in net.state_dict().items()}

    @app.train()
    def train(message: Message, _: Any) -> Message:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net.train()).backward()
            optimizer.step()
        if extra is not None:
            extra(net)
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 2})})
        return Message(content, reply_to=message)

    message = question({})
    message.content["arrays"] = ArrayRecord(start)
    app(message, context())
    folder = home / "runs" / "tap-1"
    budget = ["adversary.iga.iterations=60", "adversary.text_map.iterations=2"]
    (exchange,) = read_exchanges(folder)
    names = [] if exchange.is_text else ["iga"]
    return exchange, attack_tapped(folder, names, [], budget[: 1 + exchange.is_text], Silent())


def classes(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(values=VALUES), CLASSES)


def log_classes(net: nn.Module) -> Tensor:
    return nn.NLLLoss()(net(VALUES.double()).log_softmax(1), CLASSES)


def logit(net: nn.Module) -> Tensor:
    return F.binary_cross_entropy_with_logits(net(VALUES)[:, 0], torch.tensor([0.0, 1.0]))


def probability(net: nn.Module) -> Tensor:
    return nn.BCELoss()(net(VALUES).sigmoid(), torch.tensor([[0.0], [1.0]]))


def numbers(net: nn.Module) -> Tensor:
    return F.smooth_l1_loss(net(VALUES), VALUES[:, :1])


def itself(net: nn.Module) -> Tensor:
    return F.mse_loss(net.decoder(net.encoder(VALUES)), VALUES)


def sentences(net: nn.Module) -> Tensor:
    tokens = torch.tensor([[5, 9, 11, 7], [4, 6, 8, 20]])
    return net(labels=torch.tensor([0, 1]), input_ids=tokens)["loss"]


CASES: list[tuple[str, Loss, str]] = [
    ("Rows", classes, "classes"),
    ("double", log_classes, "classes"),
    ("Normed", classes, "classes"),
    ("one", logit, "one logit"),
    ("one", numbers, "values"),
    ("Ae", itself, "itself"),
    ("Words", sentences, "classes"),
]


@pytest.mark.parametrize(
    ("network", "loss", "task", "steps"), [*((*case, 2) for case in CASES), ("Rows", classes, "classes", 1)]
)
def test_the_task_is_seen_and_repeated(home: Path, network: str, loss: Loss, task: str, steps: int) -> None:
    """The replay agrees with what the app's own code sent, so the attack is made and scored."""
    exchange, summary = told(home, network, loss, steps)
    assert exchange.task == task
    assert exchange.parts == (("encoder", "decoder") if network == "Ae" else ())
    assert exchange.is_text is (network == "Words")
    assert {result.victims for result in summary.attacks if result.upload != "none"} == {2}
    assert not any("not attacked" in text or "shows nothing" in text for text in summary.verdict)


def test_a_forward_that_raises_ends_nothing(home: Path) -> None:
    """As each one does that activation checkpointing computes again."""

    def after_an_error(net: nn.Module) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(VALUES[:, :2])
        return classes(net)

    exchange, _ = told(home, "Rows", after_an_error)
    assert (exchange.task, exchange.unattacked) == ("classes", "")


def in_place(net: nn.Module) -> Tensor:
    net.compile(backend="eager")
    return classes(net)


def compiled_rows() -> nn.Module:
    return torch.compile(Rows(), backend="eager")  # type: ignore[return-value]


COMPILED = {
    "network": lambda net: classes(torch.compile(net, backend="eager")),
    "in place": in_place,
    "loss": lambda net: torch.compile(classes, backend="eager")(net),  # with what it calls, as a whole training step
}


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("how", COMPILED)
def test_what_is_compiled_is_watched_as_anything_else(home: Path, how: str) -> None:
    exchange, summary = told(home, "Rows" if how == "loss" else "compiled_rows", COMPILED[how])
    assert (exchange.task, summary.attacks[0].victims) == ("classes", 2)


def changed(net: nn.Module) -> None:
    with torch.no_grad():
        net.out.weight += 0.05


@pytest.mark.parametrize("how", ["another loss", "afterwards", "dropout"])
def test_nothing_recovered_is_not_said_of_what_was_not_seen_right(home: Path, how: str) -> None:
    def doubled(net: nn.Module) -> Tensor:
        return classes(net) + net.out.weight.square().sum()

    network = "dropping" if how == "dropout" else "Rows"
    extra = changed if how == "afterwards" else None
    _, summary = told(home, network, doubled if how == "another loss" else classes, 1, extra)
    said = " ".join(summary.verdict)
    assert "recovered 0" not in said
    why = "draws random numbers" if how == "dropout" else "the training that was watched is another than ours"
    assert why in said


def test_an_own_loss_that_no_model_fits_is_named(home: Path) -> None:
    exchange, summary = told(home, "Rows", lambda net: net(VALUES).square().mean())
    assert exchange.task is None and "no loss of torch.nn.functional was seen" in exchange.unattacked
    assert not summary.attacks


class Sparse(Rows):
    def forward(self, values: Tensor) -> Tensor:
        return self.out(torch.relu(torch.sparse.mm(values, self.hidden.weight.T)))


@pytest.mark.parametrize("network", ["Boxed", "Sparse"])
def test_examples_in_no_dense_tensor_are_named(home: Path, network: str) -> None:
    """And the answer leaves: the tap changes nothing of it."""
    given: Any = {"values": VALUES} if network == "Boxed" else VALUES.to_sparse()
    exchange, _ = told(home, network, lambda net: F.cross_entropy(net(given), CLASSES))
    assert "the network is given no dense tensor of examples, but such as a dict" in exchange.unattacked


def test_batches_of_nobody_are_left_out(home: Path) -> None:
    """As Poisson sampling draws them."""
    exchange, summary = told(home, "Rows", lambda net: classes(net) + 0 * net(VALUES[:0]).sum())
    assert exchange.task == "classes" and not exchange.unattacked and summary.attacks


def test_parameters_of_another_kind_are_left_to_the_app() -> None:
    """Those of Opacus' expanded weights raise where they are asked for their shape."""
    net = Rows()
    with watching({name: tuple(value.shape) for name, value in net.state_dict().items()}) as seen:
        call_for_per_sample_grads(net)(VALUES).sum().backward()
    assert seen.batch_sizes == [2] and cast(Any, net.out.weight).grad_sample.shape == (2, 3, 12)


def test_a_time_budget_keeps_what_there_is(home: Path) -> None:
    net, loss = Rows(), F.cross_entropy
    slopes = torch.autograd.grad(classes(net), list(net.parameters()))
    learner = nn.Sequential(nn.Flatten(), net)
    found = reconstruct(learner, loss, slopes, (1, 1, FEATURES), batch_size=2, seconds=1e-6, iterations=50)
    assert found.images.shape == (2, 1, 1, FEATURES) and "stopped after 1 of 50 steps, since time was up" in found.note
    told(home, "Rows", classes)
    folder = home / "runs" / "tap-1"
    summary = attack_tapped(folder, ["iga", "closed_form"], [], [], Silent(), seconds=-1.0)
    assert sum("not run, time was up" in text for text in summary.verdict) == 2
    assert json.loads((folder / "attacks.json").read_text())["verdict"] == list(summary.verdict)


def test_batches_of_summed_clients_are_joined_step_by_step() -> None:
    """Two clients of two steps, the second's first one of two batches; without common steps there are none."""
    parts = [Batch(torch.full((count, 1), float(place))) for place, count in enumerate((2, 2, 1, 1, 2))]
    clients = [
        TrainedOn(torch.zeros(4, 1), torch.zeros(4), tuple(parts[:2]), (2, 2)),
        TrainedOn(torch.ones(4, 1), torch.ones(4), tuple(parts[2:]), (2, 2)),
    ]
    whole = joined(clients, 2)
    assert len(whole.images) == 8 and whole.sizes == (4, 4)
    assert whole.steps(2) == [[parts[0], parts[2], parts[3]], [parts[1], parts[4]]]
    assert not joined([clients[0], replace(clients[1], sizes=(4,))], 2).batches
    assert not joined([clients[0], replace(clients[1], after={"w": torch.zeros(1)})], 2).batches


@pytest.mark.parametrize("layout", ["bias first", "reversed", "biases last"])
def test_dense_layers_are_paired_in_any_layout(layout: str) -> None:
    """Of arrays of two layers the first one gives the input away, wherever it stands."""
    torch.manual_seed(0)
    image, net = torch.rand(1, 20), nn.Sequential(nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 5))
    F.cross_entropy(net(image), torch.tensor([2])).backward()
    w1, b1, w2, b2 = (value.grad.T if value.ndim == 2 else value.grad for value in net.parameters())
    order = {"bias first": (b1, w1, b2, w2), "reversed": (b2, w2, b1, w1), "biases last": (w1, w2, b1, b2)}[layout]
    update = {str(place): value for place, value in enumerate(order)}
    assert [len(layer.bias) for layer in dense_layers(update)] == ([5, 9] if layout == "reversed" else [9, 5])
    found = first_inputs(update)
    assert found is not None
    torch.testing.assert_close(found, image, atol=1e-4, rtol=1e-4)
    assert first_inputs({name: value * (value.ndim - 1) for name, value in update.items()}) is None  # no bias moved


def test_adapters_are_found_by_the_names_that_peft_sends() -> None:
    """LoRA, DoRA, LoRA of a table, and a head that is trained whole, as peft 0.21 names and sends each."""
    linear, default = nn.Linear(3, 2), lambda inner: nn.ModuleDict({"default": inner})
    mid = {"lora_A": default(linear), "lora_magnitude_vector": default(nn.Linear(1, 2, bias=False))}
    head = {"original_module": nn.Linear(3, 2), "modules_to_save": default(nn.Linear(3, 2))}
    table = nn.Module()
    table.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 9))})
    net = nn.ModuleDict({"mid": nn.ModuleDict(mid), "head": nn.ModuleDict(head), "table": table})
    sent = {
        "mid.lora_A.weight": (2, 3),
        "mid.lora_magnitude_vector": (2, 1),
        "head.weight": (2, 3),
        "head.bias": (2,),
        "table.lora_embedding_A": (2, 9),
    }
    assert [*names_in(net, sent).values()] == [
        "mid.lora_A.default.weight",
        "mid.lora_magnitude_vector.default.weight",
        "head.modules_to_save.default.weight",
        "head.modules_to_save.default.bias",
        "table.lora_embedding_A.default",
    ]


@pytest.mark.parametrize("named", [True, False])
def test_layers_that_stay_at_the_client_are_named(named: bool, home: Path) -> None:
    """An app with control variates whose clients keep a head: message and reply have two records each."""
    own = 'record = "shared"\nreply_record = "change"\n' if named else ""
    app, net = ClientApp(mods=[tap(settings(home, f"[tap]\n{own}"))]), Rows()
    start = {name: value.clone() for name, value in net.state_dict().items() if name.startswith("hidden")}

    @app.train()
    def train(message: Message, _: Any) -> Message:
        optimizer = torch.optim.SGD(net.train().parameters(), lr=0.1)
        F.cross_entropy(net(VALUES), CLASSES).backward()
        optimizer.step()
        change = ArrayRecord({name: net.state_dict()[name] - value for name, value in start.items()})
        return Message(RecordDict({"change": change, "change-of-control": change}), reply_to=message)

    message = question({})
    del message.content["arrays"]
    message.content["shared"] = message.content["control"] = ArrayRecord(start)
    app(message, context())
    (exchange,) = read_exchanges(home / "runs" / "tap-1")
    said = " ".join(attack_tapped(home / "runs" / "tap-1", ["iga"], [], [], Silent()).verdict)
    assert "labels of the client, if" not in said  # the bias that rose is no output
    if named:
        assert (exchange.form, exchange.local) == ("update", ("out.weight", "out.bias"))
        assert "cannot be repeated: the client keeps out.weight, out.bias, which it trains as well" in said
    else:
        assert "of control, shared the setting record names the one with parameters" in said


def test_members_lie_in_the_space_of_the_first_layer() -> None:
    """An oracle: five steps of a linear model on four records; others are drawn alike."""
    stream = np.random.default_rng(0)
    members, others = stream.normal(size=(4, 12)), stream.normal(size=(50, 12))
    weights = np.zeros((12, 6))
    for _ in range(5):
        weights += 0.1 * members.T @ stream.normal(size=(4, 6))
    said = inferred({"w": torch.tensor(weights)}, {}, [], Records(members, others))
    assert "measured 1.000" in said[0] and "measured 0.0%" in said[1]
    noise = inferred({"w": torch.tensor(stream.normal(size=(12, 6)))}, {}, [], Records(members, others))
    assert "measured 1.000" not in noise[0]
    whole = inferred({"w": torch.tensor(stream.normal(size=(12, 30)))}, {}, [], Records(members, others))
    assert "fills all dimensions" in whole[0]
    assert "no array has 12 columns" in inferred({"w": torch.zeros(3, 4)}, {}, [], Records(members, others))[0]
    trees = inferred({}, {0: list(members[:3, 0]), 5: [float(members[3, 5])]}, [], Records(members, others))
    assert "measured 1.000" in trees[0]


def broken(client: int) -> Any:
    return np.zeros((2, 3)), np.zeros((2, 4))


def test_wrong_records_are_named(home: Path) -> None:
    mods = [tap(settings(home, f'[tap]\nrecords = "{__name__}:broken"\n'))]
    client(mods, lambda given: {"0": given["0"] + 1})(question({"0": np.zeros((3, 2))}), context())
    with pytest.raises(InputError, match=r"tap\.records = .*: both arrays need rows, all of the same length"):
        attack_tapped(home / "runs" / "tap-1", [], [], [], Silent())
