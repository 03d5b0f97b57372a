"""A network of somebody else: a bottleneck."""

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from fedpriv.core.settings import Count
from fedpriv.models import ModelSettings


class NarrowSettings(ModelSettings):
    """Two linear layers with few units between them."""

    name: Literal["narrow"] = Field("narrow", description="network")
    units: Count = Field(4, description="between the two layers")

    def network(self, shape: tuple[int, int, int], classes: int) -> nn.Module:
        inputs = torch.Size(shape).numel()
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, self.units), nn.Tanh(), nn.Linear(self.units, classes))
