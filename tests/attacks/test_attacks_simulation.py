"""An attack's simulation of a client is compared with the client: networks that agree, that do not, and that draw."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import settings
from text_uploads import LENGTH, VOCABULARY, public_settings, sentences
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.own_model import OwnClient
from fedpriv.attacks.reconstruction.dummy_gradients.network import twice_differentiable
from fedpriv.attacks.simulation import Mismatch, Sent, SimulationCheck
from fedpriv.attacks.texts.soft import lookup_parameters, soft_network, table_factor, token_vectors
from fedpriv.core.columns import ColumnSpec
from fedpriv.core.federated import example_losses
from fedpriv.core.names import END, PAD
from fedpriv.core.randomness import generator_states, seeded_generators
from fedpriv.core.registry import ATTACKS
from fedpriv.gradients import Vector
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.llama import Llama, _Sizes
from fedpriv.models.machinery.transformer import Encoder, Gpt
from tests.cases import in_one_test

CPU = torch.device("cpu")
IMAGES = [name for name, attack in ATTACKS.items() if not attack.is_text]
TEXTS = [name for name, attack in ATTACKS.items() if attack.is_text]
WAYS: dict[str, dict[str, Any]] = {
    "fedsgd": {"algorithm": "fedsgd", "local_steps": 1},
    "one step": {"algorithm": "fedavg", "local_steps": 1},
    "sgd": {"algorithm": "fedavg", "local_steps": 3},
    "momentum": {"algorithm": "fedavg", "local_steps": 2, "momentum": 0.9},
    "adam": {"algorithm": "fedavg", "local_steps": 2, "optimizer": "adam"},
    "two passes": {"algorithm": "fedavg", "local_steps": 3, "client_examples": 2},
}


class PlainClient:
    """The oracle: plain autograd on the network as it trains, and torch's own optimisers."""

    def __init__(self, model: nn.Module, public: PublicSettings) -> None:
        self.model, self.public = model, public

    def __call__(self, parameters: Vector, batches: Sequence[tuple[Tensor, Tensor]], draw: int) -> Sent:
        model = copy.deepcopy(self.model).to(next(iter(parameters.values())).dtype)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        model.load_state_dict({**model.state_dict(), **parameters})
        public = self.public
        if public.optimizer == "adam" and public.algorithm == "fedavg":
            optimizer: torch.optim.Optimizer = torch.optim.Adam(trained.values(), public.learning_rate)
        else:
            rate = 1.0 if public.algorithm == "fedsgd" else public.learning_rate
            optimizer = torch.optim.SGD(trained.values(), rate, public.momentum if public.algorithm == "fedavg" else 0)
        with seeded_generators(draw + 1, CPU):
            start = generator_states()
            for inputs, labels in batches:
                optimizer.zero_grad()
                example_losses(model(inputs), labels).mean().backward()
                optimizer.step()
            drew = generator_states() != start
        sign = -1 if public.algorithm == "fedsgd" else 1
        return Sent({name: sign * (value.detach() - parameters[name]) for name, value in trained.items()}, drew)


def found(attack: str, model: nn.Module, public: PublicSettings) -> Mismatch | None:
    trained = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    return SimulationCheck(PlainClient(model, public), model, 7).at(ATTACKS[attack].simulation(), trained, public)


# ---- networks that attacks simulate ---------------------------------------------------------------------------------

PICTURES = ("mlp", "lenet", "convnet", "resnet", "strided", "logistic")
COLUMNS = (ColumnSpec("kind", "category", ("a", "b", "c")), ColumnSpec("flag", "flag", ("no", "yes")))


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A network of the project, and what is public of its data."""
    config = model_settings({"name": name})
    if name == "embedding":
        about = {"columns": COLUMNS, "shape": (1, 1, 4), "mean": (0.5,), "std": (0.5,)}
        return build_model(config, (1, 1, 4), 10, 1, COLUMNS), about
    return build_model(config, (1, 16, 16), 10, 1), {"shape": (1, 16, 16)}


@pytest.mark.slow
@in_one_test("name", [*PICTURES, "embedding"])
def test_every_network_for_images_and_rows_is_simulated(name: str) -> None:
    model, about = built(name)
    small = sum(value.numel() for value in model.parameters()) < 20_000
    for way in WAYS if small else ("fedsgd", "adam"):
        public = settings(batch_size=2, **{**about, **WAYS[way]})
        for dtype in (torch.float32, torch.float64) if small else (torch.float32,):
            assert found("iga", model.to(dtype), public) is None, (way, dtype)


def test_all_attacks_on_images_are_checked() -> None:
    model = own(nn.Identity())
    assert len({ATTACKS[attack].simulation() for attack in IMAGES}) == 1
    assert found("iga", model, settings()) is None


def text_network(kind: str, classes: int | None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind == "encoder":
            return Encoder(VOCABULARY, LENGTH, 8, 1, 2, 2)
        if kind == "llama":
            model = Llama(_Sizes(8, 16, 1, 2, 2, VOCABULARY, LENGTH))
            if classes is not None:
                model.classify(classes)
            return model
        return Gpt(VOCABULARY, LENGTH, 8, 1, 2, classes)


RUNS = ("dager", "tag", "text_map")  # the network itself, on vectors, and on probabilities


@pytest.mark.slow
@in_one_test(("kind", "classes"), [("encoder", 2), ("gpt", 2), ("gpt", None), ("llama", 2), ("llama", None)])
def test_every_network_for_texts_is_simulated_by_every_attack(kind: str, classes: int | None) -> None:
    model, task = text_network(kind, classes), "next" if classes is None else "classify"
    for attack in RUNS:
        assert found(attack, model, public_settings(2, task)) is None, attack
    assert {ATTACKS[name].simulation() for name in TEXTS} == {ATTACKS[name].simulation() for name in RUNS}


@pytest.mark.slow
@in_one_test("way", ["one step", "adam", "momentum"])
def test_local_steps_on_texts_are_simulated_but_for_vectors_of_tokens(way: str) -> None:
    """Those move with the table in the steps after the first: what is recovered counts, and a failure does not."""
    model, public = text_network("gpt", 2), public_settings(2, "classify", **WAYS[way])
    assert found("dager", model, public) is found("text_map", model, public) is None
    mismatch = found("tag", model, public)
    assert (mismatch is None) == (public.local_steps == 1)
    if mismatch is not None:
        assert mismatch.kind == "steps" and not mismatch.bars(ATTACKS["tag"]) and "2 local steps" in mismatch.of_failure


def test_frozen_parameters_and_batch_statistics_are_simulated() -> None:
    model = own(nn.BatchNorm1d(12))
    model[1].weight.requires_grad_(False)
    assert found("iga", model, settings(batch_size=3)) is None


# ---- networks that draw, and others ---------------------------------------------------------------------------------


class Functional(nn.Module):
    """Dropout by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Skipped(nn.Module):
    """A layer that is left out now and then, and not scaled where it is not."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(12, 12), share

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand([])) < self.share:
            return x
        return x + self.layer(x)


class Patches(nn.Module):
    """Half of the places are dropped while it trains, and none later."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.randperm(x.shape[1])[:6] if self.training else torch.arange(x.shape[1])
        return torch.zeros_like(x).index_copy(1, kept, x[:, kept])


class Running(nn.Module):
    """A norm by the batch's variance while it trains, by the running one later (as EvoNorm-B0)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x / (self.variance + 1e-5).sqrt()
        variance = x.var(dim=0, unbiased=False)
        with torch.no_grad():
            self.variance.lerp_(variance.to(self.variance), 0.1)
        return x / (variance + 1e-5).sqrt()


class Longer(nn.Module):
    """Its output is twice as large while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def own(middle: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), middle, nn.Linear(12, 10)).train()


@in_one_test(
    "layer",
    [
        nn.Dropout(0.5), Functional(), StochasticDepth(0.5, "row"), StochasticDepth(0.5, "batch"),
        Skipped(0.5), Patches(),
    ],
)  # fmt: skip
def test_networks_that_draw_are_found_by_what_they_do(layer: nn.Module) -> None:
    for way in ("fedsgd", "sgd"):
        mismatch = found("iga", own(layer), settings(**WAYS[way]))
        assert mismatch is not None and mismatch.kind == "random"
        assert not any(mismatch.bars(attack) for attack in ATTACKS.values())
        assert "draws random numbers while clients train" in mismatch.of_failure


@in_one_test("layer", [nn.Dropout(0.0), Skipped(0.0), StochasticDepth(0.0, "row")])
def test_numbers_that_are_drawn_without_effect_are_no_reason(layer: nn.Module) -> None:
    assert found("iga", own(layer), settings()) is None


@in_one_test("layer", [Running(), Longer()])
def test_another_network_bars_attacks_that_simulate_it_and_no_others(layer: nn.Module) -> None:
    for name in ("iga", "candidate", "closed_form", "fishing", "imprint"):
        mismatch = found(name, own(layer), settings(batch_size=3))
        assert mismatch is not None and mismatch.kind == "wrong"
        assert mismatch.text.startswith("not attacked: its simulation of a client computes another upload")
        assert mismatch.bars(ATTACKS[name]) == (name not in ("closed_form", "fishing", "imprint"))


def test_what_cannot_be_simulated_is_a_reason_and_unexpected_errors_keep_their_traceback() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise KeyError("evaluation")
            return x

    mismatch = found("iga", own(Fails()), settings())
    assert mismatch is not None and mismatch.kind == "wrong"
    assert mismatch.text == "not attacked: its simulation of a client fails: KeyError: 'evaluation'"
    assert "in forward" in mismatch.traceback


def test_each_comparison_is_made_once() -> None:
    model, calls = own(nn.Identity()), 0
    plain = PlainClient(model, settings())

    def counted(*arguments: Any) -> Sent:
        nonlocal calls
        calls += 1
        return plain(*arguments)

    check = SimulationCheck(counted, model, 7)
    trained = {name: value.detach().clone() for name, value in model.named_parameters()}
    for attack in ("iga", "map", "dlg"):
        assert check.at(ATTACKS[attack].simulation(), trained, settings()) is None
        assert (
            check.at(
                ATTACKS[attack].simulation(), dict(trained), settings(mechanism={"name": "gaussian", "sigma": 1.0})
            )
            is None
        )
    assert calls == 1


def test_nothing_global_is_drawn_and_the_network_stays_as_it_is() -> None:
    model = own(nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.5)))
    before, states = copy.deepcopy(model.state_dict()), generator_states()
    found("iga", model, settings(batch_size=3))
    assert generator_states() == states and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@in_one_test("way", list(WAYS))
def test_the_client_of_an_own_model_is_the_plain_one(way: str) -> None:
    model, public = own(nn.BatchNorm1d(12)), settings(batch_size=3, **WAYS[way])
    stream = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(3, 1, 8, 8, generator=stream).double(), torch.randint(10, (3,), generator=stream))
        for _ in range(public.local_steps)
    ]
    start = {name: value.detach().double() for name, value in model.named_parameters()}
    plain = PlainClient(model, public)(start, batches, 0).upload
    for loss, sums in ((F.cross_entropy, False), (nn.CrossEntropyLoss(reduction="sum"), True)):
        given = OwnClient(model, loss, sums, public)(start, batches, 0)
        assert not given.drew
        for name, value in plain.items():
            torch.testing.assert_close(given.upload[name], value, rtol=1e-9, atol=1e-12)


# ---- tables of tokens -----------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """As Gemma's and MBart's tables."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3.0 * super().forward(tokens)


class Adapted(nn.Module):
    """As peft wraps a table: the layer itself, and what an adapter adds to its vectors."""

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = layer
        self.base_layer.requires_grad_(False)
        self.low, self.high = nn.Parameter(torch.randn(VOCABULARY, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        low = F.embedding(tokens, self.low, self.base_layer.padding_idx)
        return self.base_layer(tokens) + low @ self.high


class Words(nn.Module):
    """A bag of words with a table of some kind, known by one name or two; ``masked``: padding is read off tokens."""

    def __init__(self, table: nn.Module, *, twice: bool = False, masked: bool = False, around: bool = False) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"words": table})
        if twice:
            self.words = table
        self.hidden, self.output = nn.Linear(8, 8), nn.Linear(8, 2)
        self.masked, self.around = masked, around

    def forward(self, tokens: Tensor) -> Tensor:
        table: Any = self.words if hasattr(self, "words") else self.inner["words"]
        vectors = F.embedding(tokens, table.weight) if self.around else table(tokens)
        states = torch.tanh(self.hidden(vectors))
        if self.masked:
            states = states * (tokens != PAD)[:, :, None].to(states)
        return self.output(states.mean(dim=1))


class Turned(Words):
    """Looks up positions first, as XLNet does."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.inner["words"](tokens.T))).mean(dim=0))


class Coded(Words):
    """An encoder of texts with an end, and a decoder of the same shifted, whose tables are one, as T5 and BART have."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCABULARY, 8))
        self.other = nn.Embedding(VOCABULARY, 8)
        self.other.weight = self.inner["words"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        ends = F.pad(tokens, (0, 1), value=PAD).scatter(1, (tokens != PAD).sum(dim=1, keepdim=True), END)
        shifted = F.pad(ends[:, :-1], (1, 0), value=END)
        states = torch.tanh(self.hidden(self.inner["words"](ends))) * self.other(shifted).cos()
        rows = [row[tokens_of != PAD].mean(dim=0) for row, tokens_of in zip(states, ends, strict=True)]
        return self.output(torch.stack(rows))


def words(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        tables: dict[str, Callable[[], nn.Module]] = {
            "plain": lambda: Words(nn.Embedding(VOCABULARY, 8)),
            "padded": lambda: Words(nn.Embedding(VOCABULARY, 8, padding_idx=PAD)),
            "scaled": lambda: Words(Scaled(VOCABULARY, 8, padding_idx=PAD)),
            "two names": lambda: Words(nn.Embedding(VOCABULARY, 8), twice=True),
            "adapted": lambda: Words(Adapted(nn.Embedding(VOCABULARY, 8, padding_idx=PAD))),
            "masked": lambda: Words(nn.Embedding(VOCABULARY, 8), masked=True),
            "turned": lambda: Turned(nn.Embedding(VOCABULARY, 8)),
            "coded": Coded,
            "around": lambda: Words(nn.Embedding(VOCABULARY, 8), around=True),
        }
        return tables[kind]().double()


@in_one_test("kind", ["plain", "padded", "scaled", "two names", "adapted", "masked", "turned", "coded"])
def test_soft_networks_have_the_gradients_and_the_values_of_the_networks_own_tables(kind: str) -> None:
    model, tokens, labels = words(kind), sentences(3), torch.tensor([1, 0, 1])
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    exact = torch.autograd.grad(example_losses(model(tokens), labels).mean(), list(trained.values()))
    gradient = dict(zip(trained, exact, strict=True))
    targets = F.one_hot(labels, 2).double()
    table = token_vectors(model, VOCABULARY)
    givens = {
        "probabilities": F.one_hot(tokens, VOCABULARY).double()[:, None],
        "vectors": (table[tokens] * (tokens != PAD)[:, :, None])[:, None],
    }
    left_out = lookup_parameters(model, VOCABULARY)
    for way, given in givens.items():
        soft = soft_network(model, VOCABULARY, way)  # type: ignore[arg-type]
        names = [name for name in trained if way == "probabilities" or name not in left_out]
        assert soft.names == tuple(names)
        with twice_differentiable():
            batch = given[None], targets[None]
            start = {name: trained[name].detach() for name in names}
            made = soft.gradients(start, *batch, shared=True, each=False)
        for name in names:
            torch.testing.assert_close(made[name][0], gradient[name], rtol=1e-9, atol=1e-12)
    # Of a mixture it is the same mixture of the vectors that the network's own layer gives.
    shares = torch.rand(1, 1, LENGTH, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shares[..., PAD] = 0
    soft = soft_network(model, VOCABULARY, "probabilities")
    vectors = soft_network(model, VOCABULARY, "vectors")
    mixed = {name: value.detach() for name, value in model.named_parameters()}
    torch.testing.assert_close(soft.logits(mixed, shares), vectors.logits({}, shares @ table), rtol=1e-9, atol=1e-12)


@in_one_test("kind", ["plain", "scaled", "two names", "adapted", "masked", "turned", "coded"])
def test_attacks_on_texts_simulate_such_networks(kind: str) -> None:
    assert [found(attack, words(kind), public_settings(2, "classify")) for attack in RUNS] == [None] * len(RUNS)


def test_a_table_that_is_read_around_its_layer_bars_the_attacks_that_replace_its_output() -> None:
    barred = [
        attack
        for attack in TEXTS
        if (mismatch := found(attack, words("around"), public_settings(2, "classify")))
        and mismatch.bars(ATTACKS[attack])
    ]
    assert sorted(barred) == ["lamp", "tag", "text_map"]


@in_one_test(("kind", "factor"), [("plain", 1.0), ("scaled", 3.0), ("adapted", None)])
def test_factors_of_tables(kind: str, factor: float | None) -> None:
    assert table_factor(words(kind), VOCABULARY) == (factor if factor is None else pytest.approx(factor, rel=1e-12))
