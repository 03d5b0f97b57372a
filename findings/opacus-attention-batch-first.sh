#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: attention with batch_first=True that ModuleValidator.fix replaces is another function.
#
# Guess: DPMultiheadAttention is a drop-in replacement, as the validator's message says; its outputs are those of
# nn.MultiheadAttention with the same weights.
# Seen: with batch_first=True and more than one head, heads and positions are exchanged before the last projection:
# outputs differ by about as much as they are large. With one head, or batch_first=False, they are equal. PrivacyEngine
# asks for the replacement, so a pretrained encoder starts from another function without a word, and is another network
# again where the trained weights are loaded into nn.MultiheadAttention.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus.validators import ModuleValidator
from torch import nn

torch.manual_seed(0)
for batch_first in (False, True):
    for heads in (1, 2, 4):
        theirs = nn.MultiheadAttention(8, heads, batch_first=batch_first).eval()
        nn.init.normal_(theirs.in_proj_weight)
        replaced = ModuleValidator.fix(nn.Sequential(theirs))[0].eval()
        x = torch.randn(3, 5, 8)
        expected = theirs(x, x, x)[0]
        largest = (replaced(x, x, x)[0] - expected).abs().max().item()
        size = expected.abs().max().item()
        print(f"batch_first={batch_first}, heads {heads}: difference {largest:.1e} of outputs up to {size:.1f}")
        assert largest > 0.3 * size if batch_first and heads > 1 else largest < 1e-5
END
