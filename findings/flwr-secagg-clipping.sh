#!/usr/bin/env bash
# flwr 1.42.0: SecAgg+ clips parameters, not updates, at a limit that depends on the client's number of examples.
#
# Guess: clipping_range, 8 as it comes, bounds what a client adds to the sum, and what is clipped is said.
# Seen: a parameter of 30, such as a running variance of BatchNorm, arrives as 30 from clients with 100 examples, as 8
# from clients with 1,000, and as 2.67 from clients with 3,000: it is multiplied by num-examples / max_weight, clipped,
# and divided again, so that the limit is clipping_range * max_weight / num-examples. A client with more than max_weight
# examples logs that its weight may overflow; that values were cut is said nowhere.
PYTHONPATH="$(cd "$(dirname "$0")" && pwd)" && export PYTHONPATH
. "$PYTHONPATH/packages.bash"
packages 'flwr[simulation]==1.42.0' numpy==2.4.6
python -W ignore - <<'END'
import numpy as np
from secagg import mean

sent = [np.array([30.0], dtype=np.float32)]
means = {examples: mean(sent, examples)[0].item() for examples in (100, 1000, 3000)}
for examples, found in means.items():
    print(f"30 from clients with {examples} examples arrives as {found:.2f}")
assert np.allclose(list(means.values()), [30, 8, 8 / 3], atol=1e-3)
END
