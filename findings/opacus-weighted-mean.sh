#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: with class weights one example moves the sum of "clipped" gradients by 22 times the bound.
#
# Guess: each example's gradient is clipped to max_grad_norm, so that adding one example moves their sum by that at
# most, whatever the loss.
# Seen: CrossEntropyLoss(weight=...) divides by the weights of the batch. The modes "hooks" and "functorch" read each
# example's gradient out of that loss, so that one example of a rare class makes those of all others smaller, before
# they are clipped: 32 gradients of length 0.71 become 0.02. The sum moves by 21.9, where the bound is 1 and the noise
# is made for 1. A mean over tokens (ignore_index, padded texts) does the same. Nothing warns. Ghost clipping takes the
# losses without the mean: its sum moves by 1.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

BOUND = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 1}


def network():
    net = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(net.weight)
    return net


def clipped_sum(mode, criterion, inputs, targets):
    if mode == "ghost":
        net = GradSampleModuleFastGradientClipping(network(), max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD(net.parameters(), lr=1.0), **BOUND)
        DPLossFastGradientClipping(net, optimizer, criterion)(net(inputs), targets).backward()
        optimizer.accumulate()
    else:
        net = wrap_model(network(), grad_sample_mode=mode)
        optimizer = DPOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), **BOUND)
        output = net(inputs)
        criterion(output.flatten(0, -2), targets.flatten()).backward()
        optimizer.clip_and_accumulate()
    return next(net.parameters()).summed_grad


def moved(mode, criterion, others, added):
    """How far the sum moves when one example comes to 32 others: inputs and targets of both."""
    both = [torch.cat(pair) for pair in zip(others, added)]
    return (clipped_sum(mode, criterion, *both) - clipped_sum(mode, criterion, *others)).norm().item()


common, rare = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1000.0]))
classes = (common.expand(32, 2), torch.zeros(32, dtype=torch.long)), (rare, torch.ones(1, dtype=torch.long))
short = torch.full((32, 1000), -100)
short[:, 0] = 0
texts = (common.expand(32, 1000, 2), short), (rare.expand(1, 1000, 2), torch.ones(1, 1000, dtype=torch.long))
for mode in ("hooks", "functorch", "ghost"):
    far = moved(mode, weighted, *classes)
    print(f"{mode}: class weights move the sum by {far:.2f}")
    assert far < 1.001 if mode == "ghost" else far > 20
for mode in ("hooks", "functorch"):
    far = moved(mode, nn.CrossEntropyLoss(), *texts)
    print(f"{mode}: a mean over tokens moves the sum by {far:.2f}")
    assert far > 20
END
