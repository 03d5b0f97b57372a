#!/usr/bin/env bash
# torch 2.15.0: Module.to(torch.float64) makes complex parameters real; Module.double() leaves them complex.
#
# Guess: net.to(torch.float64) and net.double() do the same.
# Seen: to() drops the imaginary parts of complex parameters, as layers that filter in Fourier space have (GFNet,
# Fourier neural operators); a UserWarning speaks of casting, and training goes on with half of the layer. double(),
# float() and half() pass complex parameters by, so that those keep complex64 next to float64.
. "$(dirname "$0")/packages.bash"
packages torch==2.15.0 numpy==2.4.6
python -W ignore - <<'END'
import torch
from torch import nn


def network():
    net = nn.Linear(2, 2)
    net.filter = nn.Parameter(torch.full((2,), 1 + 2j))
    return net


moved, doubled = network().to(torch.float64), network().double()
print(f"to(float64): {moved.filter.data}; double(): {doubled.filter.data}")
assert moved.filter.dtype == torch.float64 and moved.filter.tolist() == [1, 1]
assert doubled.filter.dtype == torch.complex64 and doubled.filter.tolist() == [1 + 2j, 1 + 2j]
assert moved.weight.dtype == doubled.weight.dtype == torch.float64
END
