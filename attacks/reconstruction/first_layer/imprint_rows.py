"""Rows of an imprint layer's gradient, the steps between them, and the noise in these (see ``imprint_reading``)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.imprint import ImprintLayers
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["Rows", "StepNoise", "Steps"]

MEDIAN = 0.6745  # of the absolute value of a standard normal number
OUTER = 4  # the two outer bins have no end; how wide they are taken to be, over the widest other one


@dataclass(frozen=True, eq=False)
class Steps:
    """Differences of the mean of some rows and of the mean of those after them.

    Attributes:
        weight: (N, P).
        bias: (N,).
        measured: (N,): for an image alone its brightness times its amplitude.
        variances: (N,) of the noise, relative to that in a step between two single rows.
    """

    weight: Tensor
    bias: Tensor
    measured: Tensor
    variances: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """The gradient of the first layer, in float64, and what the server knows of its bins.

    Attributes:
        weight: (bins, P).
        bias: (bins,).
        brightness: (P,), the measurement.
        cuts: (bins,), the lower ends of the bins.
    """

    weight: Tensor
    bias: Tensor
    brightness: Tensor
    cuts: Tensor

    @staticmethod
    def of(victim: Victim, layers: ImprintLayers) -> "Rows":
        """Read a victim's upload; rows that are no bins let nothing through and hold nothing."""
        upload, parameters = victim.gradient, victim.parameters
        return Rows(
            upload[layers.weight].double(),
            upload[layers.bias].double(),
            parameters[layers.weight][0].double(),
            -parameters[layers.bias].double(),
        )

    @property
    def steps(self) -> Steps:
        """What each row has and the next has not; after the last row comes zero."""
        places = torch.arange(len(self.bias), device=self.bias.device)
        return self.between(places - 1, places, places + 1)

    def between(self, start: Tensor, middle: Tensor, end: Tensor) -> Steps:
        """The mean of rows after ``start`` up to ``middle`` minus that of the rows after it up to ``end``, (N,) each.

        Rows after the last one are zero, and without noise.
        """
        before, after = (middle - start).double(), (end - middle).double()
        rows = torch.cat([self.weight, self.bias[:, None]], dim=1)
        sums = torch.cat([torch.zeros_like(rows[:1]), rows.cumsum(dim=0)])
        last = len(self.bias)
        there = (end + 1).clamp(max=last)
        first = (sums[middle + 1] - sums[start + 1]) / before[:, None]
        steps = first - (sums[there] - sums[middle + 1]) / after[:, None]
        noisy = (there - middle - 1).double() / after.square()
        weight = steps[:, :-1]
        return Steps(weight, steps[:, -1], weight @ self.brightness, (1 / before + noisy) / 2)

    @property
    def middles(self) -> Tensor:
        """The measurement of a typical image of each bin, (bins,): the outer bins have no end of their own."""
        width = self.cuts[1:] - self.cuts[:-1]
        middles = torch.cat([self.cuts[:-1] + width / 2, self.cuts[-1:]])
        middles[0] = self.cuts[1]
        return middles

    @property
    def widths(self) -> Tensor:
        """By how much images of one bin differ in their measurement, (bins,)."""
        inner = self.cuts[2:] - self.cuts[1:-1]
        outer = OUTER * inner.max().expand(1)
        return torch.cat([outer, inner, outer])

    def in_bin(self, flat: Tensor, bins: Tensor, slack: float) -> Tensor:
        """Whether images (R, P) measure what their bins (R,) say, but for ``slack`` on the scale of the input."""
        upper = torch.cat([self.cuts[1:], self.cuts.new_full((1,), torch.inf)])
        measured, room = flat @ self.brightness, slack * float(self.brightness.sum())
        return (measured > self.cuts[bins] - room) & (measured < upper[bins] + room)


@dataclass(frozen=True)
class StepNoise:
    """The noise in a step between two single rows, most of which hold nothing else.

    Attributes:
        bias: its standard deviation in the bias.
        measured: its standard deviation in the measurement.
        length: the squared length that it gives the weight.
        spread: the standard deviation of that.
        weight: its standard deviation in a number of the weight.
    """

    bias: float
    measured: float
    length: float
    spread: float
    weight: float

    @staticmethod
    def of(steps: Steps) -> "StepNoise":
        """Read it off medians over the bins."""
        lengths = steps.weight.square().sum(dim=1)
        usual = lengths.median()
        return StepNoise(
            _deviation(steps.bias),
            _deviation(steps.measured),
            float(usual),
            _deviation(lengths - usual),
            float((usual / steps.weight.shape[1]).sqrt()),
        )


def _deviation(values: Tensor) -> float:
    """A standard deviation around zero that few large values do not change."""
    return float(values.abs().median()) / MEDIAN
