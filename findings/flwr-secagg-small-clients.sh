#!/usr/bin/env bash
# flwr 1.42.0: SecAgg+ rounds the mean of clients with few examples far more coarsely than that of clients with many.
#
# Guess: a value is rounded to the grid of clipping_range and quantization_range, steps of 3.8e-6 as they come, whatever
# the number of examples.
# Seen: clients multiply their parameters by num-examples / max_weight, 1000 as it comes, before they round, and the server
# divides by it again. Of four clients with 1,000 examples each the mean is off by 0.8e-6 (root mean square), with 100 by
# 8e-6, with 5 by 1.6e-4: as much as a small learning rate changes parameters in a round. Nothing warns. max_weight of the
# largest client's number of examples, or num-examples = max_weight for all where a plain mean is wanted, avoids it.
PYTHONPATH="$(cd "$(dirname "$0")" && pwd)" && export PYTHONPATH
. "$PYTHONPATH/packages.bash"
packages 'flwr[simulation]==1.42.0' numpy==2.4.6
python -W ignore - <<'END'
import numpy as np
from secagg import mean

sent = np.random.default_rng(0).normal(scale=0.05, size=20_000).astype(np.float32)
errors = {examples: np.sqrt(np.square(mean([sent], examples)[0] - sent).mean()) for examples in (1000, 100, 5)}
for examples, found in errors.items():
    print(f"{examples} examples a client: the mean is off by {found:.2g}")
assert errors[1000] < 2e-6 and 8 < errors[100] / errors[1000] < 12 and 150 < errors[5] / errors[1000] < 250
END
