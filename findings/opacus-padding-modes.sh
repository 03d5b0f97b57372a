#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: per-sample gradients of convolutions that pad by reflecting, wrapping or repeating are wrong
# in the default mode, and "clipped" gradients are longer than the bound.
#
# Guess: Conv2d is supported, so padding_mode makes no difference; or it is refused, as BatchNorm is.
# Seen: against autograd one example at a time the error is below 1e-12 with padding_mode "zeros", and above 0.1 with
# "reflect", "circular" and "replicate", in the mode "hooks" (the default). The mode "functorch" is right. Nothing warns.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus.grad_sample.utils import wrap_model
from torch import nn

torch.set_default_dtype(torch.float64)


def network(padding):
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, 3, padding=1, padding_mode=padding)
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(192, 2), nn.Tanh())


def one_at_a_time(net, images):
    return [torch.autograd.grad(net(image[None]).sum(), list(net.parameters())) for image in images]


images = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(1))
for mode in ("hooks", "functorch"):
    for padding in ("zeros", "reflect", "circular", "replicate"):
        right = one_at_a_time(network(padding), images)
        wrapped = wrap_model(network(padding), grad_sample_mode=mode, loss_reduction="sum")
        wrapped(images).sum().backward()
        error = max(
            (parameter.grad_sample[row] - gradients[place]).abs().max().item()
            for row, gradients in enumerate(right)
            for place, parameter in enumerate(wrapped.parameters())
        )
        print(f"{mode}, {padding}: error {error:.1e}")
        assert error > 0.1 if mode == "hooks" and padding != "zeros" else error < 1e-12
END
