#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: a frozen BatchNorm passes the validator, and per-sample gradients depend on the batch.
#
# Guess: PrivacyEngine refuses each BatchNorm in training, as its message says: a sample's value depends on its peers.
# Seen: only layers with trained parameters are looked at. A network whose head alone is trained, as with a pretrained
# one, is accepted and "fixed" as it is; in training its BatchNorm still takes mean and variance of the batch. Without
# the eighth sample the per-sample gradients of the seven others change by up to 0.85; none is above 0.72. Those
# of the same network with the BatchNorm in evaluation do not change.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
body, norm, head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
for value in [*body.parameters(), *norm.parameters()]:
    value.requires_grad_(False)
network = nn.Sequential(body, norm, nn.ReLU(), head)
x, labels = torch.randn(8, 4), torch.randint(0, 2, (8,))
x[7] *= 10
assert ModuleValidator.validate(network, strict=False) == []
assert isinstance(ModuleValidator.fix(network)[1], nn.BatchNorm1d)
private, _, _ = PrivacyEngine().make_private(
    module=network,
    optimizer=torch.optim.SGD(network.parameters(), 0.1),
    data_loader=DataLoader(TensorDataset(x, labels), batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)


def per_sample(count):
    private.zero_grad()
    nn.functional.cross_entropy(private(x[:count]), labels[:count]).backward()
    return head.weight.grad_sample[:7].clone()


for frozen_statistics in (False, True):
    norm.train(not frozen_statistics)
    seven, eight = per_sample(7), per_sample(8)
    moved, largest = (seven - eight).abs().max().item(), eight.abs().max().item()
    print(f"statistics {'kept' if frozen_statistics else 'of the batch'}: change {moved:.2f}, largest number {largest:.2f}")
    assert moved < 1e-5 if frozen_statistics else moved > 0.5
END
