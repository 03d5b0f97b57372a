#!/usr/bin/env bash
# torch 2.15.0: GroupNorm with one channel a group, on maps of 1 x 1, takes two examples and refuses one.
#
# Guess: GroupNorm does not look at the batch, so that one example is treated as it is among others. That is why it stands
# in for BatchNorm in private training.
# Seen: a batch of two gives zeros (each value is normalised by itself, so that nothing of the input is left); a batch of
# one raises "Expected more than 1 value per channel when training".
. "$(dirname "$0")/packages.bash"
packages torch==2.15.0 numpy==2.4.6
python - <<'END'
import torch
from torch import nn

norm = nn.GroupNorm(4, 4)
two = norm(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])[..., None, None])
print(f"two examples: largest output {two.abs().max().item():.1e}")
assert two.abs().max() < 1e-2
try:
    norm(torch.ones(1, 4, 1, 1))
except ValueError as error:
    print(f"one example: {error}")
else:
    raise SystemExit("one example is taken now")
END
