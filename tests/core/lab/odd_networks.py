"""Networks that attacks cannot simulate, as users write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropping(nn.Module):
    """Dropout by a function, behind the first layer."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 12), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(torch.tanh(self.first(x.flatten(1))), 0.5, self.training))


class Running(Dropping):
    """A norm by the batch's second moment while it trains, by a running one later."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(inputs, classes)
        self.register_buffer("moment", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        moment = hidden.square().mean(dim=0) if self.training else self.moment
        return self.last(hidden / (moment + 0.1).sqrt())


def dropping(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Dropping(torch.Size(shape).numel(), classes)


def running(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Running(torch.Size(shape).numel(), classes)
