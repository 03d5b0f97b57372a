"""Networks of the library transformers, and adapters that the library peft has saved."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedpriv.core.federated import example_losses
from fedpriv.gradients import find_route
from tests.models.test_models_texts import (
    LABELS,
    NEXT,
    STORIES,
    compared_with_autograd,
    examples,
    needs_stories,
    network,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# They are imported where they are needed: it takes seconds, and everybody collects these tests.
pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed (fedpriv[zoo])")
        for name in ("transformers", "peft")
    ),
]


def gpt2(length: int, vocabulary: int, classes: int) -> nn.Module:
    """Its embedding is its last layer, too, and its layers are no Linear ones."""
    import transformers

    words = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_positions=length, n_embd=8, n_layer=2, n_head=2, **words, **still("_pdrop"))
    return transformers.GPT2LMHeadModel(config)


def bert(length: int, vocabulary: int, classes: int) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        num_labels=classes,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **sizes,
    )
    return transformers.BertForSequenceClassification(config)


def still(suffix: str) -> dict[str, float]:
    return {f"{place}{suffix}": 0.0 for place in ("resid", "embd", "attn")}


def llama(length: int, vocabulary: int, classes: int) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **sizes))


@pytest.mark.parametrize(("name", "sequences"), [("gpt2", NEXT), ("llama", NEXT), ("bert", LABELS)])
def test_gradients_of_networks_of_transformers(name: str, sequences: Any) -> None:
    model = network({"name": f"{__name__}:{name}"}, sequences).double()
    route = find_route(model, example_losses, *examples(sequences))
    made = compared_with_autograd(model, sequences, route)
    dense = {route for route in made.routes.values() if not route.startswith(("ghost: ", "unused: "))}
    assert dense <= {"dense: LlamaRMSNorm"}


@needs_stories
@pytest.mark.parametrize("layers", [("q_proj", "v_proj"), ALL], ids=len)
def test_an_adapter_of_peft(layers: tuple[str, ...], tmp_path: Path) -> None:
    import peft
    import transformers

    plain = network({"name": "llama"}, STORIES)
    weights = {name: value.detach() for name, value in plain.named_parameters()}
    theirs = transformers.LlamaForCausalLM(like(weights))
    assert theirs.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]  # the table of words
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(layers), task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(theirs, lora).eval()
    draws = torch.Generator().manual_seed(1)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            value.data.copy_(torch.randn(value.shape, generator=draws) / 8)
    adapted.save_pretrained(tmp_path)
    file = str(tmp_path / "adapter_model.safetensors")
    settings = {"name": "llama", "lora_rank": 4, "lora_alpha": 12, "lora_layers": list(layers), "adapter": file}
    ours = network(settings, STORIES).eval()
    x, _ = examples(STORIES)
    assert torch.allclose(ours(x), adapted(x).logits, atol=1e-3)
    assert not torch.allclose(ours(x), plain(x), atol=1e-1)
    trained = [{key for key, value in each.named_parameters() if value.requires_grad} for each in (ours, adapted)]
    assert trained[0] == trained[1]


def like(weights: dict[str, torch.Tensor]) -> Any:
    """The shape of the stories' Llama, in the words of transformers."""
    import transformers

    words, hidden = weights["model.embed_tokens.weight"].shape
    keys = len(weights["model.layers.0.self_attn.k_proj.weight"])
    return transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=len(weights["model.layers.0.mlp.gate_proj.weight"]),
        num_hidden_layers=sum("q_proj" in name for name in weights),
        num_attention_heads=8,
        num_key_value_heads=8 * keys // hidden,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
