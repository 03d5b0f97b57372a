#!/usr/bin/env bash
# torch 2.15.0: of all activations with a gradient, Hardsigmoid alone has no second derivative.
#
# Guess: every activation can be differentiated twice, as ReLU and Hardswish can, so that gradient inversion works on
# MobileNetV3, which has Hardsigmoid in its squeeze-and-excitation.
# Seen: "derivative for aten::hardsigmoid_backward is not implemented"; every other activation with default arguments has
# one. clamp(x / 6 + 0.5, 0, 1) is the same function, and has it.
. "$(dirname "$0")/packages.bash"
packages torch==2.15.0
python -W ignore - <<'END'
import torch
from torch import nn

SHAPED = {"Softmax2d", "MultiheadAttention", "GLU"}  # they want inputs of another shape
failing = []
for name in sorted(vars(nn)):
    kind = getattr(nn, name)
    if getattr(kind, "__module__", "") != "torch.nn.modules.activation" or name in SHAPED | {"Threshold"}:
        continue
    values = torch.linspace(-2.9, 2.9, 7)[:, None].repeat(1, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(kind()(values).square().sum(), values, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        failing.append(name)
        print(f"{name}: {error}")
assert failing == ["Hardsigmoid"]
values = torch.linspace(-4, 4, 33)
assert torch.allclose((values / 6 + 0.5).clamp(0, 1), nn.functional.hardsigmoid(values))
END
