"""Networks without kinks, for the first steps of a search.

The gradient with respect to a ReLU network's parameters jumps where a unit goes on or off, and its derivative with
respect to the image does not see the jumps: a search by derivatives never learns which units should be on. With
softplus in place of ReLU it does.
"""

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks.reconstruction.dummy_gradients.relus import ReluMode

__all__ = ["SmoothKinks"]


class SmoothKinks(ReluMode):
    """Within this context every ReLU is softplus: log(1 + exp(b x)) / b.

    Args:
        sharpness: b times the root mean square of an example's inputs to that ReLU, above 0; large: nearly ReLU.
    """

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self._sharpness = sharpness

    @override
    def relu(self, inputs: Tensor) -> Tensor:
        return _softplus(inputs, self._sharpness)


def _softplus(inputs: Tensor, sharpness: float) -> Tensor:
    squares = inputs.detach().square()
    scale = (squares.flatten(1).mean(dim=1) if inputs.ndim > 1 else squares.mean()).sqrt().clamp(min=1e-30)
    slope = sharpness / scale.reshape(-1, *[1] * (inputs.ndim - 1))
    return F.softplus(inputs * slope) / slope
