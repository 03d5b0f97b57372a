"""Attacks on texts simulate networks of transformers with tables of their own kinds, and adapters of peft on them."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_attacks_simulation import RUNS, found
from text_uploads import LENGTH, VOCABULARY, attacked, following, gradient, public_settings, read_off, sentences, true
from torch import nn

from fedpriv.core.registry import ATTACKS
from fedpriv.models.machinery.logits import LogitsOf

pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed (fedpriv[oracles])")
        for name in ("transformers", "peft")
    ),
]
SIZES = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 32, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_labels": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def gemma(**_: Any) -> nn.Module:
    import transformers as T

    config = T.Gemma2Config(**SIZES, intermediate_size=16, num_key_value_heads=1, head_dim=4)
    return T.Gemma2ForSequenceClassification(config)


def llama() -> nn.Module:
    import transformers as T

    return T.LlamaForSequenceClassification(T.LlamaConfig(**SIZES, intermediate_size=16))


def prompted() -> nn.Module:
    import peft

    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))


def adapted() -> nn.Module:
    import peft

    modules = ["embed_tokens", "q_proj"]
    return peft.get_peft_model(llama(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=modules))


def opt() -> nn.Module:
    """Dropout by a function."""
    import transformers as T

    sizes = {key: value for key, value in SIZES.items() if key != "num_labels"}
    return T.OPTForCausalLM(T.OPTConfig(**sizes, ffn_dim=16, word_embed_proj_dim=8, dropout=0.3, layerdrop=0.0))


def xlnet() -> nn.Module:
    import transformers as T

    ids = {key: SIZES[key] for key in ("vocab_size", "num_labels", "pad_token_id")}
    config = T.XLNetConfig(**ids, d_model=8, n_layer=1, n_head=2, d_inner=16, dropout=0.0, summary_last_dropout=0.0)
    return T.XLNetForSequenceClassification(config)


def bart() -> nn.Module:
    import transformers as T

    config = T.BartConfig(
        **{key: SIZES[key] for key in ("vocab_size", "num_labels", "max_position_embeddings", "pad_token_id")},
        **{f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
        d_model=8, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0,
    )  # fmt: skip
    return T.BartForSequenceClassification(config)


def t5() -> nn.Module:
    import transformers as T

    ids = {key: SIZES[key] for key in ("vocab_size", "num_labels", "pad_token_id")}
    config = T.T5Config(**ids, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    config.dropout_rate = config.classifier_dropout = 0.0
    return T.T5ForSequenceClassification(config)


def longformer() -> nn.Module:
    import transformers as T

    sizes = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return T.LongformerForSequenceClassification(T.LongformerConfig(**sizes, intermediate_size=16, attention_window=4))


def deberta() -> nn.Module:
    import transformers as T

    sizes = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 16}
    config = T.DebertaV2Config(**sizes, relative_attention=True, pos_att_type="p2c|c2p", type_vocab_size=0)
    return T.DebertaV2ForSequenceClassification(config)


TABLES: dict[str, Callable[[], nn.Module]] = {
    "gemma": gemma, "prompted": prompted, "adapted": adapted, "xlnet": xlnet, "bart": bart, "t5": t5,
    "longformer": longformer, "deberta": deberta,
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_libraries_are_simulated(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LogitsOf(TABLES[name]())
    for attack in RUNS:
        assert found(attack, model, public_settings(2, "classify", shape=(1, 1, LENGTH))) is None, attack


def test_dropout_by_a_function_in_a_library_is_found() -> None:
    mismatch = found("dager", LogitsOf(opt()), public_settings(2, "next"))
    assert mismatch is not None and mismatch.kind == "random"
    assert not mismatch.bars(ATTACKS["text_map"])


@pytest.mark.parametrize("task", ["classify", "next"])
def test_dager_reads_sentences_out_of_gpt2(task: str) -> None:
    import transformers as T

    ids = {key: SIZES[key] for key in ("vocab_size", "num_labels", "pad_token_id", "bos_token_id", "eos_token_id")}
    config = T.GPT2Config(**ids, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LogitsOf((T.GPT2LMHeadModel if task == "next" else T.GPT2ForSequenceClassification)(config))
    tokens, labels = sentences(3), torch.tensor([0, 1, 0]) if task == "classify" else None
    tokens[0, -2:] = 0  # so that all sentences end, and the last target is known
    x, y = following(tokens) if labels is None else (tokens, labels)
    assert read_off(attacked("dager", model, gradient(model, x, y), 3, task)) == true(tokens, labels)
