#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: 20 epochs over itertools.cycle(loader) lose epsilon 65 where get_epsilon says 10.
#
# Guess: a loop that takes its steps from itertools.cycle(loader) gets new Poisson batches in each epoch.
# Seen: cycle keeps the batches of the first epoch and gives the same tensors again, and the accountant, which is asked
# at each step, counts all as drawn anew. An example that is in one of the ten batches is in the same one 20 times, so
# there are ten Poisson draws whose noise is sqrt(20) times smaller. A list of the loader's batches does the same.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2 dp-accounting==0.6.0
python -W ignore - <<'END'
import logging
import math
from itertools import chain, cycle, islice, repeat

import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld
from opacus import PrivacyEngine
from torch import nn

logging.getLogger().setLevel("ERROR")
EXAMPLES, BATCH, SIGMA, EPOCHS, DELTA = 200, 20, 1.0, 20, 1e-5


def trained(endless):
    """What the engine says after so many epochs, and how many different batches there were."""
    data = torch.utils.data.TensorDataset(torch.arange(EXAMPLES).float()[:, None])
    engine, net = PrivacyEngine(accountant="prv"), nn.Linear(1, 1)
    net, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=SIGMA, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH),
    )
    batches = set()
    for (inputs,) in islice(endless(loader), EPOCHS * len(loader)):
        optimizer.zero_grad()
        net(inputs).mean().backward()
        optimizer.step()
        batches.add(tuple(inputs.flatten().tolist()))
    return engine.get_epsilon(DELTA), len(batches)


def composed(sigma, steps):
    event = PoissonSampledDpEvent(BATCH / EXAMPLES, GaussianDpEvent(sigma))
    return pld.PLDAccountant().compose(event, steps).get_epsilon(DELTA)


steps = EXAMPLES // BATCH
right = {"cycle(loader)": composed(SIGMA / math.sqrt(EPOCHS), steps), "one pass after another": composed(SIGMA, EPOCHS * steps)}
for what, endless in (
    ("cycle(loader)", cycle),
    ("one pass after another", lambda loader: chain.from_iterable(repeat(loader))),
):
    said, batches = trained(endless)
    print(f"{what}: {batches} different batches; get_epsilon says {said:.3f}, dp-accounting {right[what]:.3f}")
    assert batches == (steps if endless is cycle else EPOCHS * steps)
    assert (right[what] > 4 * said) == (endless is cycle)
END
