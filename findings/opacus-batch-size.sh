#!/usr/bin/env bash
# opacus 1.6.0: Poisson batches are smaller or larger than batch_size where that does not divide the examples.
#
# Guess: DataLoader(batch_size=64) over 100 examples becomes Poisson batches of 64 on average, a rate of 0.64.
# Seen: the rate is one over the number of batches of the loader. That is 2, so that batches have 50 examples; with
# drop_last=True, of which a warning says that it is ignored, it is 1, and every batch is the whole data set. Epsilon is
# that of these rates. On large data nothing is seen of it; a client of a federation has few batches.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def mean_batch(examples, batch_size, drop_last):
    """Examples in a batch, the mean of 200 passes, and what the engine divides a sum by."""
    data = TensorDataset(torch.randn(examples, 4), torch.arange(examples) % 2)
    model = nn.Linear(4, 2)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=batch_size, drop_last=drop_last),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    sizes = [len(labels) for _ in range(200) for _, labels in loader]
    return sum(sizes) / len(sizes), optimizer.expected_batch_size


for examples, asked, drop_last, right in (
    (100, 50, False, 50),
    (100, 64, False, 50),
    (100, 64, True, 100),
    (1000, 300, False, 250),
    (1000, 300, True, 333),
):
    mean, expected = mean_batch(examples, asked, drop_last)
    print(f"{examples} examples, batch_size={asked}, drop_last={drop_last}: {mean:.1f} on average, divided by {expected}")
    assert abs(mean - right) < 3 and expected == right
END
