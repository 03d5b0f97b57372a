"""Own models for the games: tiny ones, and those whose code does with some images what no mechanism expects.

They take normalised pixels from -1 to 1 and add 1, so that a blank image (all pixels 0) has a gradient of zero. With
all parameters zero the loss's gradient for label 1 is exactly the opposite of that for label 0.
"""

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]


class Heads(nn.Module):
    """Softmax regression in two Linear layers, one for each half of the pixels: a gradient of two tensors."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        pixels = shape[0] * shape[1] * shape[2]
        self.sizes = [pixels - pixels // 2, pixels // 2]
        self.first, self.second = (nn.Linear(size, classes, bias=False) for size in self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x.flatten(1) + 1).split(self.sizes, dim=1)
        return self.first(first) + self.second(second)


class Spike(nn.Module):
    """Logits (0, w.x): with one bright pixel the gradient has one coordinate, the worst case of the L1 norm."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0] * shape[1] * shape[2], 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logit = self.layer(x.flatten(1) + 1)
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


class Standardised(nn.Module):
    """Softmax regression on images scaled to mean 0 and deviation 1; a blank one becomes NaN. Parameters of its own."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape[0] * shape[1] * shape[2], classes))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        centred = flat - flat.mean(dim=1, keepdim=True)
        return centred / centred.square().mean(dim=1, keepdim=True).sqrt() @ self.weight


class Raising(Heads):
    """Refuses one image, as code does that checks what it is given; none that a model is tried with before a run."""

    def forward(self, x: Tensor) -> Tensor:
        odd = torch.nonzero((x.flatten(1) == torch.tensor([1.0, -1.0])).all(dim=1)).flatten().tolist()
        if odd:
            raise ValueError(f"image {odd[0]} of the batch is odd")
        return super().forward(x)


class RaisingTogether(Raising):
    """The same, but not on an image alone: what overflows in one kernel need not in another."""

    def forward(self, x: Tensor) -> Tensor:
        return Heads.forward(self, x) if len(x) == 1 else super().forward(x)


class Company(nn.Module):
    """A layer that turns a white image round if it is computed alone; on one image its numbers are large and hide it.

    The trial before a run has no batch with white images, so that it does not find it.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(shape[0] * shape[1] * shape[2]))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        odd = (flat == torch.tensor([1.0, -1.0])).all(dim=1, keepdim=True)
        white = (flat == 1).all(dim=1, keepdim=True)
        alone = torch.where(white, 4.0, 0.0) if len(x) == 1 else 0.0
        return torch.where(odd, 1e6, 1.0) * (flat + 1) * self.factor - alone


class Positions(nn.Module):
    """One Linear layer at each row of the image; the second half of the rows is subtracted from the first.

    Where the halves are alike, the gradient of the layer's weight is a sum of large terms that cancel, all but ``rest``
    of the last row's.
    """

    def __init__(self, shape: Shape, classes: int, rest: float = 0.0) -> None:
        super().__init__()
        rows, width = shape[1:]
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(width, width, bias=False)
        self.signs = torch.cat([torch.ones(rows // 2), -torch.ones(rows - rows // 2)])
        self.signs[-1] *= 1 - rest
        self.weights = 1e7 * (torch.rand(width, generator=generator) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, signs = self.weights.to(x), self.signs.to(x)
        logit = ((self.layer(x.flatten(1, 2) + 1) @ weights) * signs).sum(dim=1, keepdim=True)
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


class MixedInTraining(Heads):
    """Mixes each image with the batch's mean by a random share while it trains, and not in evaluation mode (mixup)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        share = 0.2 + 0.6 * torch.rand(())
        return super().forward(share * x + (1 - share) * x.mean(dim=0, keepdim=True))


def heads(shape: Shape, classes: int) -> nn.Module:
    return Heads(shape, classes)


def spike(shape: Shape, classes: int) -> nn.Module:
    return Spike(shape, classes)


def standardised(shape: Shape, classes: int) -> nn.Module:
    return Standardised(shape, classes)


def raising(shape: Shape, classes: int) -> nn.Module:
    return Raising(shape, classes)


def raising_together(shape: Shape, classes: int) -> nn.Module:
    return RaisingTogether(shape, classes)


def company(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(Company(shape, classes), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def positions(shape: Shape, classes: int) -> nn.Module:
    return Positions(shape, classes)


def nearly_cancelling(shape: Shape, classes: int) -> nn.Module:
    return Positions(shape, classes, rest=2.0**-24)


def mixed_in_training(shape: Shape, classes: int) -> nn.Module:
    return MixedInTraining(shape, classes)
