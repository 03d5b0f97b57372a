"""Layers that write down what they get and give, from which the gradients of their parameters follow.

The gradient of a Linear weight is the sum over positions of outer products of output gradient and input. What is
written down stays in autograd's graph: what follows from it can be differentiated with respect to the dummy images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.convolution import kernel_gradients, run_convolution
from fedpriv.attacks.reconstruction.dummy_gradients.factors import Factor, Outer, Written

__all__ = ["RULES", "Entry", "Rule", "taped_forward"]


@dataclass(frozen=True, eq=False)
class Entry:
    """What one layer got and gave.

    Attributes:
        name: of the layer in the network.
        layer: itself.
        kept: what its rule needs of its input.
        output: (R, ...), for R images.
    """

    name: str
    layer: Any
    kept: Any
    output: Tensor


class Rule(NamedTuple):
    """How a kind of layer runs, and what the gradients of its parameters are.

    Attributes:
        run: (layer, input (R, ...)) -> what is kept of the input, and the output (R, ...).
        factors: (layer, what was kept, gradients of the output (R, ...), (N, U)) -> the gradients of weight and bias of
            N rows of U units; the R images are spread over the units in order.
    """

    run: Callable[[Any, Tensor], tuple[Any, Tensor]]
    factors: Callable[[Any, Any, Tensor, tuple[int, int]], tuple[Factor, Factor]]


def taped_forward(name: str, layer: nn.Module, entries: list[Entry]) -> Callable[[Tensor], Tensor]:
    """Return what a layer does, with a line in ``entries`` for each call."""

    def forward(x: Tensor) -> Tensor:
        kept, output = RULES[type(layer)].run(layer, x)
        entries.append(Entry(name, layer, kept, output))
        return output

    return forward


def _run(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, type(layer).forward(layer, x)


def _linear(layer: nn.Linear, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    inputs = x.to(error.dtype).reshape(*units, -1, layer.in_features)
    errors = error.reshape(*units, -1, layer.out_features)
    return Outer(inputs, errors, layer.weight.shape), Written(errors.sum(dim=2))


def _convolution(layer: Any, kept: Any, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    kernels = kernel_gradients(kept, error).reshape(*units, -1, layer.weight.numel())
    biases = error.flatten(2).sum(dim=2).reshape(*units, -1, layer.out_channels)
    kernels, biases = (value.squeeze(2) if value.shape[2] == 1 else value.sum(dim=2) for value in (kernels, biases))
    return Written(kernels.reshape(*units, *layer.weight.shape)), Written(biases)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (*units, -1, *layer.normalized_shape)
    return Written((error * normal).reshape(shape).sum(dim=2)), Written(error.reshape(shape).sum(dim=2))


def _group_norm(layer: nn.GroupNorm, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
    weight, bias = ((part.flatten(2).sum(dim=2)) for part in (error * normal, error.reshape(*x.shape[:2], -1)))
    shape = (*units, -1, layer.num_channels)
    return Written(weight.reshape(shape).sum(dim=2)), Written(bias.reshape(shape).sum(dim=2))


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv1d: Rule(run_convolution, _convolution),
    nn.Conv2d: Rule(run_convolution, _convolution),
    nn.GroupNorm: Rule(_run, _group_norm),
    nn.LayerNorm: Rule(_run, _layer_norm),
    nn.Linear: Rule(_run, _linear),
}
