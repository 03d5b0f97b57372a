"""Networks for texts: gradients against autograd one example at a time, padding, order, adapters and their names."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.names import END, PAD
from fedpriv.gradients import GradientOperator, Route, per_example_gradients
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.settings import SequenceShape
from tests.cases import in_one_test

ROOT = Path(os.environ.get("FEDPRIV_DATA", "data"))
needs_stories = pytest.mark.skipif(
    not (ROOT / "stories260k.npz").is_file(), reason="stories260k.npz is not in the data folder"
)
SMALL = {"width": 8, "depth": 2, "heads": 2}
NEXT = SequenceShape(6, 20, "byte", 20, is_next=True)
LABELS = SequenceShape(6, 20, "byte", 3, is_next=False)
STORIES = SequenceShape(6, 512, "llama", 512, is_next=True, folder=ROOT)


def network(settings: dict[str, Any], sequences: SequenceShape) -> nn.Module:
    config = model_settings(settings)
    return build_model(config, (1, 1, sequences.length), sequences.classes, 0, (), sequences)


def examples(sequences: SequenceShape, count: int = 6) -> tuple[Tensor, Tensor]:
    """As many as positions: which axis counts them cannot be seen. Some are padded, and one has no target."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randint(END + 1, sequences.vocabulary, (count, sequences.length), generator=draws)
    x[1, 4:] = PAD
    if not sequences.is_next:
        return x, torch.arange(count) % sequences.classes
    y = x.roll(-1, dims=1)
    y[1, 3:], y[2] = -100, -100
    return x, y


CASES: dict[str, tuple[dict[str, Any], SequenceShape]] = {
    "gpt": ({"name": "gpt", **SMALL}, NEXT),
    "gpt-labels": ({"name": "gpt", **SMALL}, LABELS),
    "gpt-lora": ({"name": "gpt", "lora_rank": 2, **SMALL}, NEXT),
    "encoder": ({"name": "encoder", **SMALL}, LABELS),
    "encoder-lora": ({"name": "encoder", "lora_rank": 2, "lora_layers": ["query", "down"], **SMALL}, LABELS),
    "llama": ({"name": "llama"}, STORIES),
    "llama-lora": ({"name": "llama", "lora_rank": 2}, STORIES),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_stories) if "llama" in n else n for n in CASES])
def test_gradients_are_those_of_one_example_at_a_time(name: str) -> None:
    settings, sequences = CASES[name]
    made = compared_with_autograd(network(settings, sequences).double(), sequences)
    assert not [route for route in made.routes.values() if route.startswith("dense")]


def compared_with_autograd(model: nn.Module, sequences: SequenceShape, route: Route | None = None) -> GradientOperator:
    """The gradients of some examples, after rows, inner products and norms were compared with one at a time."""
    x, y = examples(sequences)
    made = per_example_gradients(model, example_losses, x, y, route=route)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    rows = []
    for one_x, one_y in zip(x, y, strict=True):
        value = example_losses(model(one_x[None]), one_y[None]).sum()
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in found]))
    oracle = torch.stack(rows)
    whole = torch.cat([part.flatten(1) for part in made.rows(0, len(x)).values()], dim=1)
    assert torch.allclose(whole, oracle, rtol=1e-8, atol=1e-10)
    assert torch.allclose(made.gram(), oracle @ oracle.T, rtol=1e-8, atol=1e-10)
    assert torch.allclose(made.norms(), oracle.norm(dim=1), rtol=1e-8, atol=1e-10)
    return made


@pytest.mark.parametrize("name", ["gpt-labels", "encoder"])
def test_what_pads_a_text_is_not_read(name: str) -> None:
    model = network(*CASES[name]).eval()
    longer = network(CASES[name][0], SequenceShape(9, 20, "byte", 3, is_next=False)).eval()
    for key, value in longer.named_parameters():
        own = dict(model.named_parameters())[key]
        value.data[: len(own)] = own.data
    x, _ = examples(LABELS)
    padded = torch.cat([x, torch.full((len(x), 3), PAD)], dim=1)
    assert torch.allclose(model(x), longer(padded), atol=1e-6)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=needs_stories)])
def test_the_future_is_not_seen(name: str) -> None:
    settings, sequences = CASES[name]
    model, (x, _) = network(settings, sequences).eval(), examples(sequences)
    other = x.clone()
    other[:, 4:] = 5
    assert torch.allclose(model(x)[:, :4], model(other)[:, :4], atol=1e-5)
    assert not torch.allclose(model(x)[:, 4:], model(other)[:, 4:], atol=1e-2)


@needs_stories
def test_names_of_adapters_are_those_of_peft(tmp_path: Path) -> None:
    model = network({"name": "llama", "lora_rank": 2}, STORIES)
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert len(names) == 5 * 2 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    plain = network({"name": "llama"}, STORIES)
    x, _ = examples(STORIES)
    assert torch.allclose(plain(x), model(x), atol=1e-5)  # B is zero at first
    draws, shapes = torch.Generator().manual_seed(2), {k: v.shape for k, v in model.named_parameters()}
    saved = {name.replace(".default", ""): torch.randn(shapes[name], generator=draws) / 8 for name in names}
    save_file(saved, tmp_path / "adapter_model.safetensors")
    settings = {"name": "llama", "lora_rank": 2, "adapter": str(tmp_path / "adapter_model.safetensors")}
    loaded = network(settings, STORIES)
    assert tmp_path / "adapter_model.safetensors" in model_settings(settings).files(tmp_path)
    for name in names:
        assert torch.equal(dict(loaded.named_parameters())[name], saved[name.replace(".default", "")])
    # The oracle: weights to which the product of both matrices was added.
    merged = network({"name": "llama"}, STORIES)
    for name, value in merged.named_parameters():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in saved:
            value.data += 16 / 2 * saved[f"{stem}.lora_B.weight"] @ saved[f"{stem}.lora_A.weight"]
    assert torch.allclose(merged(x), loaded(x), atol=1e-3)
    assert not torch.allclose(plain(x), loaded(x), atol=1e-1)
    with pytest.raises(InputError, match="has shape"):
        network({**settings, "lora_rank": 3}, STORIES)


class Wrapped(nn.Module):
    """Returns more than logits, as networks of the library transformers do."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(vocabulary, 4), nn.Linear(4, classes)

    def forward(self, tokens: Tensor) -> Any:
        class Output:
            logits = self.out(self.table(tokens))

        return Output


def own_network(length: int, vocabulary: int, classes: int) -> nn.Module:
    return Wrapped(vocabulary, classes)


def test_an_own_network_may_return_more_than_logits() -> None:
    assert network({"name": f"{__name__}:own_network"}, NEXT)(examples(NEXT)[0]).shape == (6, 6, 20)


@in_one_test(
    ("settings", "sequences", "words"),
    [
        ({"name": "gpt", "context": 5}, NEXT, "data.text.length = 6 is longer than the 5 tokens"),
        ({"name": "gpt", "width": 9, "heads": 2}, NEXT, "width = 9 is no multiple of heads = 2"),
        ({"name": "encoder"}, NEXT, "sees the tokens that it would predict"),
        ({"name": "mlp"}, NEXT, "takes images or rows of a table, and the data are texts"),
        ({"name": "llama"}, NEXT, "tokens of data.text.tokenizer = 'llama'; given 'byte'"),
        ({"name": "gpt", "lora_rank": 9, **SMALL}, NEXT, "lora_rank = 9: layer .* has 8 inputs"),
        ({"name": "gpt", "lora_rank": 2, "lora_layers": ["q"], **SMALL}, NEXT, "its Linear layers are down"),
    ],
)
def test_what_does_not_fit_is_one_line(settings: dict[str, Any], sequences: SequenceShape, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        network(settings, sequences)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_layers": ["query"]}, "lora_layers says which layers get adapters; lora_rank says that there are any"),
        ({"adapter": "a.safetensors"}, "adapter is a file of adapters; lora_rank says that there are any"),
    ],
)
def test_adapters_need_a_rank(given: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        model_settings({"name": "gpt", **given})
