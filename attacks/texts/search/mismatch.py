"""How far gradients of vectors are from what was heard, tensor by tensor; one number a row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.matching import Comparison, Objective, squared_distance
from fedpriv.gradients import flattened

__all__ = ["squared_and_absolute", "tensor_angle"]

ROUNDING = 1e-6  # of the longest tensor


def tensor_angle(comparison: Comparison) -> Tensor:
    """One minus the cosine, the mean over tensors, as in Balunović et al. 2022: (N,), from 0 to 2.

    Tensors that hold rounding errors alone, such as the gradient of a bias of keys, are left out.
    """
    expected, heard = comparison.expected(), comparison.upload()
    lengths = {name: float(value.norm()) for name, value in heard.items()}
    told = [name for name, length in lengths.items() if length >= ROUNDING * max(lengths.values())]
    cosines = [F.cosine_similarity(flattened(expected[name]), flattened(heard[name]), dim=1) for name in told]
    return 1 - torch.stack(cosines).mean(dim=0)


def squared_and_absolute(alpha: float) -> Objective:
    """Return the squared distance plus alpha times the absolute one, (N,), as in Deng et al. 2021.

    The absolute distance weighs 1 in the first tensor, and in a line less towards the last, which does not count.
    """

    def objective(comparison: Comparison) -> Tensor:
        expected, heard = comparison.expected(), comparison.upload()
        last = max(len(expected) - 1, 1)
        absolute = [
            (1 - number / last) * flattened(expected[name] - heard[name]).abs().sum(dim=1)
            for number, name in enumerate(expected)
        ]
        return squared_distance(comparison) + alpha * torch.stack(absolute).sum(dim=0)

    return objective
