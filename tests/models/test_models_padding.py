"""Networks with an attention mask: padding changes neither logits nor gradients, nor how other texts are computed."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import twice_differentiable
from fedpriv.attacks.texts.soft import soft_network
from fedpriv.core.federated import example_losses
from fedpriv.core.names import END, PAD, START
from fedpriv.gradients import Vector, find_route, per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.models.machinery.logits import LogitsOf
from tests.cases import in_one_test

VOCABULARY, LENGTH, LENGTHS = 20, 8, (8, 5, 1, 0, 3)  # the fourth text is empty
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed (fedpriv[oracles])"
)
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
SIZES: dict[str, Any] = {
    **COMMON, "max_position_embeddings": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "num_labels": 3,
}  # fmt: skip
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    **COMMON, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "num_labels": 3,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DISTIL: dict[str, Any] = {
    **COMMON, "max_position_embeddings": 16, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "num_labels": 3,
    "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
}  # fmt: skip
NARROW: dict[str, Any] = {"local_attention": 4, "classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2}
ALBERT: dict[str, Any] = {
    "num_hidden_layers": 1,
    "embedding_size": 8,
    "classifier_dropout_prob": 0.0,
}  # layers are shared
GEMMA: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4}
LABELS = "ForSequenceClassification"
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", LABELS, {**SIZES, **STILL}),
    "bert, eager": ("Bert", LABELS, {**SIZES, **STILL, "attn_implementation": "eager"}),
    "distilbert": ("DistilBert", LABELS, DISTIL),
    "roberta": ("Roberta", LABELS, {**SIZES, **STILL}),
    "electra": ("Electra", LABELS, {**SIZES, **STILL, "embedding_size": 8}),
    "albert": ("Albert", LABELS, {**SIZES, **STILL, **ALBERT}),
    "megatron": ("MegatronBert", LABELS, {**SIZES, **STILL}),  # without sdpa
    "modernbert": ("ModernBert", LABELS, {**SIZES, **NARROW}),  # sees few positions, and reads the mean
    "gpt2, labels": ("GPT2", LABELS, GPT2),
    "gpt2, another padding": ("GPT2", LABELS, {**GPT2, "pad_token_id": 5}),
    "gpt2, no padding": ("GPT2", LABELS, {**GPT2, "pad_token_id": None}),
    "llama, labels": ("Llama", LABELS, SIZES),
    "gemma2, labels": ("Gemma2", LABELS, {**SIZES, **GEMMA}),
    "gpt2, next": ("GPT2", "LMHeadModel", GPT2),
    "llama, next": ("Llama", "ForCausalLM", SIZES),
}
DENSE_LAYERS = {"dense: LlamaRMSNorm", "dense: Gemma2RMSNorm", "dense: Gemma2TextScaledWordEmbedding"}  # no rule
IS_NEXT = {name for name in NETWORKS if name.endswith("next")}


def theirs(name: str) -> nn.Module:
    """A network of transformers, float64, whose numbers are large enough for what it sees to matter."""
    import transformers

    kind, task, sizes = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network: nn.Module = getattr(transformers, kind + task)(getattr(transformers, f"{kind}Config")(**sizes))
        with torch.no_grad():
            for value in network.parameters():
                value.add_(0.2 * torch.randn_like(value))
    return network.double().eval()


def texts(is_next: bool) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    drawn = torch.randint(END + 1, VOCABULARY, (len(LENGTHS), LENGTH + 1), generator=draws)
    drawn[:, 0] = START
    x = torch.where(torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None], drawn[:, :-1], PAD)
    following = torch.cat([x[:, 1:], torch.full((len(x), 1), PAD)], dim=1)
    return x, torch.where(following == PAD, -100, following) if is_next else torch.arange(len(x)) % 3


def alone(network: nn.Module, row: Tensor, length: int) -> Tensor:
    """The oracle: a text by itself, without its padding; an empty one is a single padding token."""
    tokens = row[None, : max(1, length)]
    return network(tokens, attention_mask=torch.ones_like(tokens)).logits


def gradients_alone(network: nn.Module, x: Tensor, y: Tensor, is_next: bool) -> Vector:
    """Plain autograd on each text by itself, (B, *shape)."""
    names, trained = zip(*network.named_parameters(), strict=True)
    rows = []
    for row, target, length in zip(x, y, LENGTHS, strict=True):
        loss = example_losses(alone(network, row, length), target[None, : max(1, length)] if is_next else target[None])
        rows.append(torch.autograd.grad(loss.sum(), trained, allow_unused=True, materialize_grads=True))
    return {f"network.{name}": torch.stack(each) for name, each in zip(names, zip(*rows, strict=True), strict=True)}


def check_equal(found: Vector, expected: Vector) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Norms, rotary positions and some softmaxes of transformers compute in float32.
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-6), name


@pytest.mark.slow
@needs_transformers
@in_one_test("name", NETWORKS)
def test_padding_changes_no_logits(name: str) -> None:
    network, (x, _) = theirs(name), texts(name in IS_NEXT)
    for row, length, logits in zip(x, LENGTHS, LogitsOf(network)(x), strict=True):
        seen = logits[: max(1, length)] if name in IS_NEXT else logits
        assert torch.allclose(seen, alone(network, row, length)[0], rtol=1e-9, atol=1e-12), length


@pytest.mark.slow
@needs_transformers
@in_one_test("name", NETWORKS)
def test_padding_changes_no_gradients_and_they_stay_layer_by_layer(name: str) -> None:
    network, (x, y) = theirs(name), texts(name in IS_NEXT)
    model = LogitsOf(network)
    route = find_route(model, example_losses, torch.zeros_like(x), torch.zeros_like(y))
    made = per_example_gradients(model, example_losses, x, y, route=route)
    assert {way for way in made.routes.values() if way.startswith("dense")} <= DENSE_LAYERS
    check_equal(dict(made.rows(0, len(x))), gradients_alone(network, x, y, name in IS_NEXT))


@pytest.mark.slow
@needs_transformers
@in_one_test("name", NETWORKS)
def test_torch_maps_networks_over_examples(name: str) -> None:
    network, (x, y) = theirs(name), texts(name in IS_NEXT)
    made = dense_gradients(LogitsOf(network), example_losses, x, y, "to be seen")
    assert list(made.routes.values()) == ["dense: to be seen"]  # and not one example after the other
    check_equal(dict(made.rows(0, len(x))), gradients_alone(network, x, y, name in IS_NEXT))


@pytest.mark.slow
@needs_transformers
@in_one_test("name", [name for name in NETWORKS if name not in IS_NEXT])
def test_attacks_map_soft_networks_over_guesses(name: str) -> None:
    network, (x, y) = theirs(name), texts(is_next=False)
    expected = gradients_alone(network, x, y, is_next=False)
    soft = soft_network(LogitsOf(network), VOCABULARY, "probabilities")
    guesses = F.one_hot(x, VOCABULARY).double()[None, :, None].requires_grad_()
    parameters = {key: value.detach() for key, value in soft.trainable.named_parameters()}
    with twice_differentiable():
        found = soft.gradients(parameters, guesses, F.one_hot(y, 3).double()[None], shared=True, each=False)
        (again,) = torch.autograd.grad(sum(value.square().sum() for value in found.values()), guesses)
    assert again.isfinite().all() and again[0, 0].any()
    check_equal({key: value[0].detach() for key, value in found.items()}, {k: v.mean(0) for k, v in expected.items()})


@pytest.mark.slow
@needs_transformers
def test_no_text_chooses_how_the_others_are_computed() -> None:
    network, (x, _) = theirs("bert"), texts(is_next=False)
    masks: list[Tensor | None] = []
    network.get_submodule("bert.encoder.layer.0").register_forward_pre_hook(
        lambda _, given: masks.append(given[1])  # hidden states, mask, ...
    )
    full = torch.where(x == PAD, END, x)
    LogitsOf(network)(x)
    LogitsOf(network)(full)
    network(full, attention_mask=torch.ones_like(full))  # for others transformers leaves out what hides nothing
    assert [None if mask is None else mask.shape for mask in masks] == [(len(x), 1, LENGTH, LENGTH)] * 2 + [None]


# ---- without transformers -------------------------------------------------------------------------------------------


class Seeing(nn.Module):
    """Returns how often each text attends, and has a parameter to be a network."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None and attention_mask.shape == input_ids.shape
        return self.weight * attention_mask


class Blind(Seeing):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.weight * tokens


def test_a_network_is_given_the_mask_that_it_takes() -> None:
    x, _ = texts(is_next=False)
    expected = torch.arange(LENGTH) < torch.tensor([max(1, length) for length in LENGTHS])[:, None]
    assert torch.equal(LogitsOf(Seeing())(x), expected.float())
    assert torch.equal(LogitsOf(Blind())(x), x.float())


@pytest.mark.slow
def test_compiled_and_traced_networks_are_given_what_they_take() -> None:
    x, _ = texts(is_next=False)
    compiled: Any = torch.compile(Seeing(), backend="eager")
    assert torch.equal(LogitsOf(compiled)(x), LogitsOf(Seeing())(x))
    traced: Any = torch.jit.trace(Blind(), x)
    assert torch.equal(LogitsOf(traced)(x), x.float())
