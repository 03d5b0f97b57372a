#!/usr/bin/env bash
# transformers 5.24.0: a training pass of Reformer seeds torch's global generator anew, from the operating system.
#
# Guess: after torch.manual_seed(0) a training run with the same data gives the same numbers again.
# Seen: each layer asks torch.seed() for the seed of its dropout, which is the function that replaces the generator's seed
# by an unpredictable one. What is drawn after a pass, for batches, dropout or noise, differs from run to run, as does the
# gradient of the second pass; evaluation leaves the generator alone. BERT's passes draw the same in every run.
. "$(dirname "$0")/packages.bash"
packages transformers==5.24.0 torch==2.15.0
python -W ignore - <<'END'
import torch
from transformers import BertConfig, BertForSequenceClassification, ReformerConfig, ReformerForSequenceClassification

REFORMER = ReformerConfig(
    attn_layers=["local", "local"], hidden_size=16, feed_forward_size=32, num_attention_heads=2, attention_head_size=8,
    axial_pos_embds=False, vocab_size=40, max_position_embeddings=32, local_attn_chunk_length=8, is_decoder=False,
)  # fmt: skip
BERT = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=40)
tokens = torch.arange(32)[None] % 40


def drawn_after(kind, config, training):
    """Two numbers that are drawn after a pass, from the same seed."""
    torch.manual_seed(0)
    model = kind(config).train(training)
    torch.manual_seed(1)
    model(input_ids=tokens)
    return tuple(torch.randint(1 << 40, (2,)).tolist())


for name, kind, config, training, same in (
    ("Reformer, training", ReformerForSequenceClassification, REFORMER, True, False),
    ("Reformer, evaluation", ReformerForSequenceClassification, REFORMER, False, True),
    ("BERT, training", BertForSequenceClassification, BERT, True, True),
):
    first, again = (drawn_after(kind, config, training) for _ in range(2))
    print(f"{name}: {first} and {again} after the same seed")
    assert (first == again) is same, name
END
