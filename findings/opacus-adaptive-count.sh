#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: with adaptive clipping get_epsilon says 4.7 where one step's clipping norm alone proves 9.7.
#
# Guess: noise_multiplier is shared between gradients and the count of unclipped examples as Andrew et al. (2021) prove.
# Seen: their count is of bits minus 1/2, which one example moves by 1/2; Opacus counts the bits themselves, which one
# example moves by 1, and shares as if it were 1/2. With multiplier 1 and a count's deviation of 0.51 (any above half of
# the multiplier is taken), two data sets that differ in an example give counts that are 1.96 deviations apart, as the
# next clipping norm shows, which is what noise is scaled to. Whoever chooses a deviation ten times the multiplier loses
# 2 %. The count is divided by the exact size of the batch, too, which one example changes and no noise covers.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2 scipy==1.17.1
python -W ignore - <<'END'
import math

import numpy as np
import torch
from opacus import PrivacyEngine
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

MULTIPLIER, DEVIATION, DELTA, STEPS, RATE = 1.0, 0.51, 1e-5, 3000, 0.2


def norms(short, long):
    """The clipping norms after steps on so many short and long gradients, each from a norm of 1; and epsilon of one."""
    inputs = torch.cat([torch.full((short, 1), 0.1), torch.full((long, 1), 9.0)])
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=len(inputs))
    engine, net = PrivacyEngine(accountant="rdp"), nn.Linear(1, 1, bias=False)
    net, optimizer, _ = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), data_loader=data, clipping="adaptive",
        noise_multiplier=MULTIPLIER, max_grad_norm=1.0, target_unclipped_quantile=0.5, clipbound_learning_rate=RATE,
        max_clipbound=9.0, min_clipbound=1e-3, unclipped_num_std=DEVIATION, poisson_sampling=False,
    )
    found, epsilon = [], 0.0
    for _ in range(STEPS):
        optimizer.max_grad_norm = torch.tensor(1.0)
        optimizer.zero_grad()
        net(inputs).mean().backward()
        optimizer.step()
        found.append(float(optimizer.max_grad_norm))
        epsilon = epsilon or engine.get_epsilon(DELTA)
    return np.array(found), epsilon


def proven(mu):
    """Epsilon of two normal laws so many deviations apart (Balle and Wang 2018)."""
    second = lambda epsilon: np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    return brentq(lambda epsilon: norm.cdf(mu / 2 - epsilon / mu) - second(epsilon) - DELTA, 0, 100)


# 100 long gradients, and one short one that is there or not.
(one, epsilon), (none, _) = norms(1, 100), norms(0, 100)
counts = [(0.5 - np.log(found) / RATE) * size for found, size in ((one, 101), (none, 100))]
moved, deviation = counts[0].mean() - counts[1].mean(), counts[1].std()
print(f"the norm tells a count of {counts[0].mean():.3f}, or {counts[1].mean():.3f}, with a deviation of {deviation:.3f}")
print(f"epsilon {epsilon:.3f} is said of a step; the norm alone has {proven(moved / deviation):.2f} at delta {DELTA:g}")
assert abs(moved - 1) < 6 * math.sqrt(2 / STEPS) * DEVIATION and abs(deviation / DEVIATION - 1) < 0.08
assert abs(epsilon - 4.729) < 0.3 and proven(1 / DEVIATION) > 9.5
END
