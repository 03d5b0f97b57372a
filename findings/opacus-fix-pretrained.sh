#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: ModuleValidator.fix drops what BatchNorm has learned, and thaws weights that were frozen.
#
# Guess: the GroupNorm that replaces a BatchNorm keeps its weight and bias, as they mean the same there, and what does
# not require a gradient still does not.
# Seen: weight and bias are ones and zeros again; the log says only that BatchNorm becomes GroupNorm. Attention keeps
# its values, but all parameters of both replacements require gradients: of a network that is to train its biases alone
# (BitFit), 1,122 numbers are trained instead of 82, and take part in the norm that is clipped.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus.validators import ModuleValidator
from torch import nn

torch.manual_seed(0)
norm, attention, head = nn.BatchNorm1d(16), nn.MultiheadAttention(16, 1), nn.Linear(16, 2)
with torch.no_grad():
    norm.weight.fill_(3.0)
    norm.bias.fill_(-1.0)
network = nn.ModuleDict({"norm": norm, "attention": attention, "head": head})
for name, value in network.named_parameters():
    value.requires_grad_(name.endswith("bias"))
fixed = ModuleValidator.fix(network)


def trained(module):
    return sum(value.numel() for value in module.parameters() if value.requires_grad)


print(f"before: norm.weight {norm.weight[0]:.0f}, norm.bias {norm.bias[0]:.0f}; {trained(network)} numbers are trained")
norm = fixed["norm"]
print(f"after: norm.weight {norm.weight[0]:.0f}, norm.bias {norm.bias[0]:.0f}; {trained(fixed)} numbers are trained")
assert isinstance(norm, nn.GroupNorm) and (norm.weight == 1).all() and (norm.bias == 0).all()
assert fixed["attention"].out_proj.weight.equal(attention.out_proj.weight)
assert trained(network) == 82 and trained(fixed) == 1122
END
