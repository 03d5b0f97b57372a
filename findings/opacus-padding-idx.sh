#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: the row of padding_idx, which torch never trains, has per-sample gradients.
#
# Guess: nn.Embedding(padding_idx=0) keeps row 0 as it is, as torch's documentation says.
# Seen: the per-sample gradients of row 0 are above 0.1 in the mode "hooks" (autograd: 0), take part in the
# norm that is clipped, and move the row. In the mode "functorch" they are 0.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus.grad_sample.utils import wrap_model
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.out = nn.Embedding(11, 5, padding_idx=0), nn.Linear(5, 2)

    def forward(self, texts):
        return self.out(torch.tanh(self.tokens(texts))).mean(dim=1)


texts = torch.tensor([[0, 0, 1, 2, 3], [0, 5, 6, 7, 8], [1, 2, 3, 4, 5]])
plain = Reader()
plain(texts).sum().backward()
assert plain.tokens.weight.grad[0].abs().max() == 0
for mode, moves in (("hooks", True), ("functorch", False)):
    wrapped = wrap_model(Reader(), grad_sample_mode=mode, loss_reduction="sum")
    wrapped(texts).sum().backward()
    largest = wrapped._module.tokens.weight.grad_sample[:, 0].abs().max().item()
    print(f"{mode}: largest per-sample gradient of the padding row {largest:.3f}")
    assert largest > 0.1 if moves else largest == 0
END
