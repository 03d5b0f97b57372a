#!/usr/bin/env bash
# flwr 1.42.0, numpy 2.4.6: SecAgg+ returns a wrong mean of parameters without dimensions.
#
# Guess: under SecAgg+ FedAvg has the mean of the clients' parameters, as without it, but for rounding.
# Seen: clients that all send 0.25 get 0.25 back in the shapes (1,) and (2, 2). In the shape (), as of CLIP's
# logit_scale or a learnt temperature, it is 16.01 with 3 clients and 24.01 with 4: n (0.25 w + 8) - 8, the sum of n
# values with their weight w = 10 / 1000, shifted by the clipping range. The server takes shift and weight away in
# place, and arithmetic on a numpy array without dimensions returns a number, on which that has no effect. Nothing warns.
PYTHONPATH="$(cd "$(dirname "$0")" && pwd)" && export PYTHONPATH
. "$PYTHONPATH/packages.bash"
packages 'flwr[simulation]==1.42.0' numpy==2.4.6
python -W ignore - <<'END'
import numpy as np
from secagg import mean

SHAPES = ((), (1,), (2, 2))
sent = [np.full(shape, 0.25, np.float32) for shape in SHAPES]
for clients in (3, 4):
    plain, masked = (mean(sent, 10, clients, masked) for masked in (False, True))
    for shape, right, value in zip(SHAPES, plain, masked):
        print(f"{clients} clients, shape {shape}: FedAvg {right.flat[0]:.4f}, under SecAgg+ {value.flat[0]:.4f}")
        assert np.allclose(right, 0.25)
        assert np.allclose(value, 0.25, atol=1e-3) == (shape != ())
        assert shape != () or abs(float(value) - (clients * (0.25 * 10 / 1000 + 8) - 8)) < 1e-3
END
