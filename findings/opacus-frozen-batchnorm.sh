#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: BatchNorm that is not trained is accepted, mixes examples, and keeps their statistics.
#
# Guess: BatchNorm is refused, since it mixes the examples of a batch; freezing its weight does not change that.
# Seen: ModuleValidator finds nothing in a frozen BatchNorm in training mode, and make_private takes it; with the same
# layer trained both refuse. So whoever trains the head of a pretrained network alone gets per-sample gradients that
# depend on the other examples, and running statistics that no noise protects: one example more moves the sum of 64
# gradients, each clipped to 1, by 17. net.eval() for the frozen part helps.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn


def network(frozen):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[0].weight.data = torch.eye(4)
    net[:2].requires_grad_(not frozen)
    return net


def private(frozen, examples):
    net = network(frozen)
    data = torch.utils.data.TensorDataset(examples, torch.zeros(len(examples), dtype=torch.long))
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=len(examples))
    engine = PrivacyEngine(accountant="rdp")
    return engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )


def clipped_sum(examples):
    net, optimizer, _ = private(True, examples)
    nn.functional.cross_entropy(net(examples), torch.zeros(len(examples), dtype=torch.long)).backward()
    optimizer.clip_and_accumulate()
    sums = torch.cat([each.summed_grad.flatten() for each in optimizer.params])
    return sums, net._module[1].running_mean.clone()


trained, frozen = (len(ModuleValidator.validate(network(each), strict=False)) for each in (False, True))
print(f"errors of ModuleValidator: trained {trained}, frozen {frozen}")
assert (trained, frozen) == (1, 0)
examples = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) * 0.01 + 1
more = torch.cat([examples, torch.full((1, 4), 100.0)])
(before, mean), (after, moved) = clipped_sum(examples), clipped_sum(more)
far, shift = (after - before).norm().item(), (moved - mean).abs().max().item()
print(f"one example more moves the sum of gradients by {far:.1f} (bound 1), the running mean by {shift:.2f}")
assert far > 10 and shift > 0.1
END
