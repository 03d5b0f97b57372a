"""DAGER against true sentences: decoders, encoders, a Llama, adapters, batches; and what it refuses, by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.observation import TextFormat
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.attacks.texts.attention import find_probes, inputs_of
from fedpriv.attacks.texts.dager import Span, Unusable, likely_tokens, present_tokens, row_spaces, span_of
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.attacks.texts.uploads.gradients import DagerSettings
from fedpriv.mechanisms import mechanism_settings
from fedpriv.models.machinery.adapters import with_lora
from fedpriv.models.machinery.llama import Llama, _Sizes
from fedpriv.models.machinery.transformer import Encoder, Gpt, last_tokens
from fedpriv.models.texts import GptSettings
from tests.attacks.text_uploads import (
    LENGTH,
    PACKED,
    VOCABULARY,
    attacked,
    following,
    gradient,
    observed,
    packed,
    public_settings,
    read_off,
    sentences,
    true,
)
from tests.cases import in_one_test

WIDTH = 64


class Transposed(nn.Module):
    """A layer as GPT-2 of the library transformers has it: inputs times a weight (in, out)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.clone()), layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Twice(nn.Module):
    """A layer that is given a matrix first, as adapters of DoRA are."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = 0 * self.inner(torch.eye(self.inner.in_features)).sum()
        return self.inner(x) + shift  # type: ignore[no-any-return]


def wrapped(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if isinstance(child, nn.Linear) and child.bias is not None:
                setattr(layer, name, kind(child))
    return model


def network(kind: str, classes: int | None = 2, width: int = WIDTH, depth: int = 2) -> nn.Module:
    torch.manual_seed(1)
    if kind in ("gpt", "transposed", "twice"):
        plain = Gpt(VOCABULARY, LENGTH, width, depth, 4, classes)
        return plain if kind == "gpt" else wrapped(plain, Transposed if kind == "transposed" else Twice)
    if kind == "encoder":
        return Encoder(VOCABULARY, LENGTH, width, depth, 4, 2)
    model = Llama(_Sizes(width, 2 * width, depth, 4, 2, VOCABULARY, LENGTH))
    if classes is not None:
        model.classify(classes)
    return model


@in_one_test("batch", [1, 4])
@pytest.mark.parametrize("kind", ["gpt", "transposed", "twice", "encoder", "llama"])
def test_labelled_sentences_are_read_whole(kind: str, batch: int) -> None:
    model, tokens, labels = network(kind), sentences(batch), torch.arange(batch) % 2
    campaign = attacked("dager", model, gradient(model, tokens, labels), batch)
    assert read_off(campaign) == true(tokens, labels)
    assert "unexplained" in campaign.found[0].note and "missing" not in campaign.found[0].note
    assert campaign.found[0].loss is not None and campaign.found[0].loss < 1e-3


def test_more_sentences_than_a_deeper_row_space_holds() -> None:
    """Eighty positions fill the second block's 63 dimensions: the first attention tells which tokens stood together."""
    torch.manual_seed(1)
    model, tokens = Encoder(VOCABULARY, LENGTH, WIDTH, 2, 2, 2), sentences(6, seed=5, length=8)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:  # as if they had been trained
                value.add_(0.1 * torch.randn(value.shape))
    tokens[0, 3] = tokens[0, 5] = tokens[1, 2]  # twice in one sentence, and in another one
    labels = torch.arange(6) % 2
    campaign = attacked("dager", model, gradient(model, tokens, labels), 6, shape=(1, 1, 8), starts=1)
    assert read_off(campaign) == true(tokens, labels)
    assert "put together by the first attention" in campaign.found[0].note


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_next_tokens_are_read_whole(kind: str) -> None:
    model, tokens = network(kind, None), sentences(4)
    tokens[0, -2:] = 0  # so that all sentences end, and the last target is known
    inputs, targets = following(tokens)
    campaign = attacked("dager", model, gradient(model, inputs, targets), 4, "next")
    assert read_off(campaign) == true(tokens)
    assert (campaign.found[0].loss or 1.0) < 1e-3


@pytest.mark.parametrize("trained", ["gpt", "llama", "query+value", "query"])
def test_packed_sequences_begin_with_any_token(trained: str) -> None:
    """Queries do not show a first position, which attends to itself alone: values do, or all tokens are tried."""
    adapted = trained not in ("gpt", "llama")
    model, (inputs, targets) = network("gpt" if adapted else trained, None, depth=3), packed(2)
    if adapted:
        model = with_lora(model, GptSettings(lora_rank=24), trained.split("+"), "output")
    campaign = attacked("dager", model, gradient(model, inputs, targets), 2, "next", text=PACKED)
    assert read_off(campaign) == true(inputs)


MARK = (7, 9)
RESPONSES = TextFormat(VOCABULARY, "next", mark=MARK)


def responses(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the next token behind the mark, put at the fifth place from the end of texts."""
    tokens[:, -5:-3] = torch.tensor(MARK)
    inputs, targets = following(tokens)
    targets[:, : tokens.shape[1] - 4] = -100
    return inputs, targets


@in_one_test(("kind", "depth", "batch"), [("gpt", 3, 2), ("llama", 3, 2), ("gpt", 2, 1)])
def test_prompts_are_read_though_the_loss_counts_responses_alone(kind: str, depth: int, batch: int) -> None:
    """Of two blocks the last gets few errors, and holds no sentence; what stands at each place is known without it."""
    model, tokens = network(kind, None, depth=depth), sentences(2, seed=1)[:1].repeat(batch, 1)
    tokens[-1, 1:5] = torch.tensor([11, 12, 13, 14])
    tokens[:, -1] = 0
    campaign = attacked("dager", model, gradient(model, *responses(tokens)), batch, "next", text=RESPONSES)
    assert read_off(campaign) == true(tokens)
    assert (campaign.found[0].loss or 1.0) < 1e-3


def test_a_deeper_row_space_that_few_errors_reach_is_a_matter_of_rank() -> None:
    torch.manual_seed(1)
    model, tokens = Gpt(VOCABULARY, 24, WIDTH, 2, 4, None), sentences(2, length=24)[:1].repeat(2, 1)
    tokens[0, 1:3] = torch.tensor([11, 12])
    tokens[:, -3:] = 0
    upload = gradient(model, *responses(tokens))
    (reason,) = attacked("dager", model, upload, 2, "next", text=RESPONSES, shape=(1, 1, 24)).failures.values()
    assert reason.startswith("rank: 23 tokens kept at 21 positions") and "too few errors reach it" in reason


def test_one_block_that_predicts_the_next_token() -> None:
    model, (inputs, targets) = network("gpt", None, depth=1), following(sentences(3))
    assert read_off(attacked("dager", model, gradient(model, inputs, targets), 3, "next")) == true(sentences(3))


def test_repeated_sentences_and_beginnings_of_others_are_counted() -> None:
    tokens = sentences(4)
    tokens[1], tokens[2] = tokens[0], tokens[0]
    tokens[2, 5:] = 0
    labels = torch.tensor([0, 0, 1, 1])
    model = network("gpt")
    assert read_off(attacked("dager", model, gradient(model, tokens, labels), 4)) == true(tokens, labels)


@pytest.mark.parametrize("started", [False, True])
def test_adapters_whose_rank_is_above_the_positions(started: bool) -> None:
    settings, tokens, labels = GptSettings(lora_rank=24), sentences(2), torch.tensor([0, 1])
    model = with_lora(network("gpt", depth=3), settings, ("query", "value"), "output")
    if started:  # B is zero at first, and then A's gradient is
        for name, value in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(value, std=0.05)
    assert read_off(attacked("dager", model, gradient(model, tokens, labels), 2)) == true(tokens, labels)


@in_one_test(("kind", "rank", "sigma"), [("gpt", 4, 0.0), ("gpt", None, 1e-3), ("encoder", None, 1e-3)])
def test_tokens_are_likely_where_positions_have_a_table(kind: str, rank: int | None, sigma: float) -> None:
    """A token that did not occur is expected in one of the three uploads; all that occurred are found."""
    model, tokens = network(kind), sentences(1)
    if rank is not None:
        model = with_lora(model, GptSettings(lora_rank=rank), ("query", "value"), "output")
        for name, value in model.named_parameters():
            if "lora_B" in name:  # zero at first, and then A has no gradient
                nn.init.normal_(value, std=0.05)
    stream = torch.Generator().manual_seed(0)
    upload = gradient(model, tokens, torch.tensor([0]))
    length = sum(float(value.square().sum()) for value in upload.values()) ** 0.5
    upload = {
        name: value / length + sigma * torch.randn(value.shape, generator=stream) for name, value in upload.items()
    }
    noise = mechanism_settings({"name": "gaussian", "sigma": sigma} if sigma else {}).model_dump(
        mode="json", exclude_none=True
    )
    heard = observed(model, upload, public_settings(1, "classify", mechanism=noise))
    scene = TextScene.of(model, (1, 1, LENGTH), 2, TextFormat(VOCABULARY, "classify"), None)
    (victim,) = prepare_victims([heard], scene.names, scene.device)
    found = likely_tokens(scene, victim, scene.with_parameters(victim.parameters))
    assert found is not None
    assert {*tokens[0, 1:].tolist()} <= {*found.tolist()} and len(found) <= LENGTH


class _Everywhere(Llama):
    """As in transformers, the last layer gets every position, and the last one's logits are taken."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return last_tokens(self.lm_head(self.model(tokens)), tokens)


def test_a_last_layer_of_labels_holds_no_sentence() -> None:
    """Its gradient is of one position, and would drop all sentences but those of two tokens."""
    network_of_all = network("llama")
    network_of_all.__class__ = _Everywhere
    model = with_lora(network_of_all, GptSettings(lora_rank=24), ("q_proj", "v_proj"), "lm_head")
    model.get_submodule("base_model.model.lm_head").requires_grad_(True)
    campaign = attacked("dager", model, mean_of(model, 1), 1)
    assert "no deeper layer tells which belong together" in campaign.found[0].note
    # The likelihood tells the tokens, and the whole gradient their order.
    assert [one for one, _ in read_off(campaign)] == [one for one, _ in true(sentences(1))]


def test_two_steps_on_the_same_sentences() -> None:
    model, tokens, labels = network("gpt"), sentences(2), torch.tensor([0, 1])
    rate, total = 1e-3, {}
    trained = dict(model.named_parameters())
    start = {name: value.detach().clone() for name, value in trained.items()}
    for _ in range(2):
        step = gradient(model, tokens, labels)
        with torch.no_grad():
            for name, value in step.items():
                trained[name] -= rate * value
    total = {name: trained[name].detach() - start[name] for name in start}
    with torch.no_grad():
        for name, value in start.items():
            trained[name].copy_(value)
    change: dict[str, Any] = {"algorithm": "fedavg", "local_steps": 2, "learning_rate": rate, "client_examples": 2}
    assert [one for one, _ in read_off(attacked("dager", model, total, 2, **change))] == [
        one for one, _ in true(tokens)
    ]


def mean_of(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    return gradient(model, sentences(batch), torch.arange(batch) % 2)


def test_sentences_that_explain_nothing_are_refused() -> None:
    """No sum of gradients with weights of at least 0 is the negative of one, whose row spaces are the same."""
    model, (inputs, targets) = network("gpt", None), following(sentences(2))
    upload = {name: -value for name, value in gradient(model, inputs, targets).items()}
    (reason,) = attacked("dager", model, upload, 2, "next").failures.values()
    assert reason.endswith("the sentences found explain nothing of the upload")


def test_more_positions_than_dimensions_are_refused_by_rank() -> None:
    model = network("gpt", width=32)
    (reason,) = attacked("dager", model, mean_of(model, 16), 16).failures.values()
    assert reason.startswith("rank: the gradient of blocks.0.attention.query fills all its 31 dimensions")


def test_adapters_of_a_low_rank_are_refused_by_rank() -> None:
    model = with_lora(network("gpt"), GptSettings(lora_rank=4), ("query", "value"), "output")
    (reason,) = attacked("dager", model, mean_of(model, 2), 2).failures.values()
    assert reason.startswith("rank: the gradient of ") and "fills all its 4" in reason


def test_noise_is_refused_by_its_edge() -> None:
    model = network("gpt")
    noise = mechanism_settings({"name": "gaussian", "sigma": 1.0}).model_dump(mode="json", exclude_none=True)
    stream = torch.Generator().manual_seed(0)
    noisy = {name: value + torch.randn(value.shape, generator=stream) for name, value in mean_of(model, 1).items()}
    (reason,) = attacked("dager", model, noisy, 1, mechanism=noise).failures.values()
    assert reason.startswith("noise edge: no singular value of the gradient of blocks.0.attention.query is above")
    # An adversary who does not know of the noise sees a full rank.
    (reason,) = attacked("dager", model, noisy, 1).failures.values()
    assert reason.startswith("rank:") and "noise that is not public" in reason


def test_little_noise_is_seen_through() -> None:
    """The deviation is far below what the sentence leaves: it is read, and the note has the noise's edge."""
    model, tokens = network("gpt"), sentences(1)
    sigma = 1e-4
    settings = {"name": "gaussian", "sigma": sigma, "clip_norm": 1e3}
    noise = mechanism_settings(settings | {"sigma": sigma / 1e3}).model_dump(mode="json", exclude_none=True)
    stream = torch.Generator().manual_seed(0)
    noisy = {
        name: value + sigma * torch.randn(value.shape, generator=stream) for name, value in mean_of(model, 1).items()
    }
    campaign = attacked("dager", model, noisy, 1, mechanism=noise)
    assert [one for one, _ in read_off(campaign)] == [one for one, _ in true(tokens)]
    assert "noise edge" in campaign.found[0].note


def test_a_network_without_such_layers_is_refused() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.last(self.table(tokens).mean(dim=1))

    torch.manual_seed(0)
    model = Bag()
    (reason,) = attacked("dager", model, mean_of(model, 2), 2).failures.values()
    assert reason.startswith("no trained linear layer of the network gets single tokens")


def test_dropped_numbers_are_the_reason_where_no_token_fits() -> None:
    model = network("gpt")
    model.embedding = nn.Sequential(model.get_submodule("embedding"), nn.Dropout(0.5))
    (reason,) = attacked("dager", model, mean_of(model, 2), 2).failures.values()
    assert reason.startswith("rank: no token at the first position") and reason.endswith("drops numbers at random")


def test_too_many_tokens_are_refused() -> None:
    model = network("gpt")
    (reason,) = attacked("dager", model, mean_of(model, 4), 4, most_tokens=1).failures.values()
    assert "adversary.dager.most_tokens = 1 at most" in reason


@in_one_test(("kind", "deeper"), [("gpt", "prefix"), ("encoder", "sequence"), ("llama", "prefix")])
def test_probes_know_what_they_see(kind: str, deeper: str) -> None:
    model = network(kind)
    for length in (2, 3, LENGTH):
        probes = find_probes(model, [name for name, _ in model.named_parameters()], length, VOCABULARY)
        assert len(probes[0].weights) == 3 and probes[0].reach == "token"
        assert {probe.reach for probe in probes[1:]} == {deeper}


def test_a_row_space_holds_its_inputs_and_no_others() -> None:
    """Of 4,000 other directions none is held: FALSE_TOKENS = 1e-2 bounds the chance of any."""
    model = network("gpt")
    probe = find_probes(model, [name for name, _ in model.named_parameters()], LENGTH, VOCABULARY)[0]
    tokens = sentences(3)
    upload = mean_of(model, 3)
    inputs = inputs_of(model, [probe], tokens)[probe.layer][tokens != 0]
    stacked = torch.cat([upload[name] for name in probe.weights])
    stream = torch.Generator().manual_seed(3)
    others = torch.randn(4000, WIDTH, generator=stream)
    span = span_of(probe, stacked, 0.0, 0.0, others)
    assert isinstance(span, Span)
    assert span.spectrum.examples == len(inputs.unique(dim=0))
    assert bool(span.holds(inputs, 4000).all()) and not bool(span.holds(others, 4000).any())
    assert isinstance(span_of(probe, 0 * stacked, 0.0, 0.0, others), Unusable)


def test_a_refused_upload_repeats_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(scene: TextScene, victim: Any, config: DagerSettings, seed: int, progress: Any) -> Any:
        asked.append(victim.client)
        return row_spaces(scene, victim, config, seed, progress)

    monkeypatch.setattr("fedpriv.attacks.texts.dager.row_spaces", counted)
    model, upload = network("gpt"), mean_of(network("gpt"), 1)
    silent = {name: 0 * value for name, value in upload.items()}
    heard = [observed(model, each, public_settings(1, "classify")) for each in (upload, silent, upload)]
    job = AttackJob("dager", [replace(each, client=n) for n, each in enumerate(heard)], model, DagerSettings(), 0)
    found = attack_each(job)
    assert asked == [0, 1, 2] and sorted(found.found) == [0, 2] and "is zero" in found.failures[1]


def test_settings_name_the_paper() -> None:
    assert "NeurIPS 2024" in DagerSettings.reference and DagerSettings.is_text


@in_one_test(("rows", "deviation", "least"), [(8, 0.0, 12), (8, 0.02, 9), (64, 0.1, 11)])
def test_few_tokens_are_found_in_few_rows_and_in_noise(rows: int, deviation: float, least: int) -> None:
    """Twelve of 300 tokens, in 48 dimensions: more than there are rows, so that no row space holds them."""
    stream = torch.Generator().manual_seed(rows)
    inputs = torch.randn(300, 48, generator=stream, dtype=torch.float64)
    occurring = torch.randperm(300, generator=stream)[:12]
    errors = torch.randn(rows, 12, generator=stream, dtype=torch.float64) / 48**0.5
    noise = torch.randn(rows, 48, generator=stream, dtype=torch.float64)
    found = present_tokens(errors @ inputs[occurring] + deviation * noise, inputs, deviation).tolist()
    assert len({*found} & {*occurring.tolist()}) >= least
    assert len({*found} - {*occurring.tolist()}) <= (3 if deviation else 0)  # one is expected
    assert len(present_tokens(noise, inputs, 1.0)) <= 4
