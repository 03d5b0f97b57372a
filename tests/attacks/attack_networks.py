"""Networks for the engine's tests: what the ghost route takes, and what it must leave to vmap."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from attack_victims import OwnHead, lenet, mlp
from torch import Tensor, nn

SHAPE = (2, 9, 8)
CLASSES = 5


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return make().double()


def convolution(**changes: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        settings = {"kernel_size": 3, **changes}
        return nn.Sequential(nn.Conv2d(2, 4, **settings), nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES))

    return make


class Residual(nn.Module):
    """Sums around layers, two kinds of pooling, and an activation that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.last = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.first(x))
        x = F.max_pool2d(x + torch.sigmoid(self.second(x)), 2)
        return self.last(torch.flatten(x + x.square(), 1))


class Lines(nn.Module):
    """Conv1d over the lines of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(18, 6, 3, stride=2, padding=1, groups=3)
        self.last = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1, 2))).flatten(1))


class Words(nn.Module):
    """A Linear at many positions, then norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x.flatten(1, 2)))).mean(dim=1))


class Grouped(nn.Module):
    """Its norm's output is changed in place, and its second kernel meets a single place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 16, 3, stride=4, bias=False)
        self.norm = nn.GroupNorm(2, 16)
        self.second = nn.Conv2d(16, 24, 3, padding=1, stride=2)
        self.last = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.second(torch.tanh_(self.norm(self.first(x))))).flatten(1))


class Partly(nn.Module):
    """A frozen layer, a layer that is not used, and one whose output the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(144, 12).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.idle = nn.Linear(12, 4)
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x.flatten(1)))
        self.idle(x)
        return self.last(x)


GHOST: dict[str, Callable[[], nn.Module]] = {
    "softmax regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, CLASSES)),
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(144, 7), nn.Sigmoid(), nn.Linear(7, 6, bias=False), nn.GELU(), nn.Linear(6, CLASSES)
    ),
    "groups of units": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(144, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    ),
    "convolution": convolution(),
    "without bias": convolution(bias=False),
    "stride and padding": convolution(stride=2, padding=(1, 2)),
    "dilation": convolution(dilation=2, padding="same"),
    "groups": convolution(groups=2, stride=(1, 2)),
    "reflected": convolution(padding=1, padding_mode="reflect"),
    "residual": Residual,
    "lines": Lines,
    "words": Words,
    "grouped": Grouped,
    "partly": Partly,
}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 144)
        self.last = nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x.flatten(1))))))


class Functional(nn.Module):
    """A layer's weight is also used without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 10)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        return self.last(hidden) + 0.1 * (hidden @ self.first.weight).square()[:, :CLASSES]


class Bare(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(144))
        self.last = nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.scale * x.flatten(1)))


class Temperature(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(144, CLASSES)
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.last(torch.tanh(self.factor * x.flatten(1)))


class Changed(nn.Module):
    """The input of a layer is changed after the layer has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 10)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1) * 1.0
        hidden = self.first(x)
        x.mul_(2)
        return self.last(torch.tanh(hidden) + x[:, :10])


class Mixing(nn.Module):
    """The code itself, not a layer, mixes the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 10)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.last(torch.tanh(self.first(x - x.mean(dim=0))))


class Normalised(nn.Module):
    """BatchNorm and dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 20)
        self.norm = nn.BatchNorm1d(20)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.sigmoid(self.norm(self.first(x.flatten(1))))))


class OtherKind(nn.Linear):
    """A layer of a kind of its own, which may do anything."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.sum()


class Deciding(nn.Module):
    """What it does is decided by the numbers of each example, which torch cannot map."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 10)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = [torch.tanh(row) if bool(row[0] > 0) else row.sin() for row in self.first(x.flatten(1))]
        return self.last(torch.stack(rows)) * (1 + 0.1 * self.last.bias[0])


VMAP: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "twice": (Twice, "do not follow"),
    "functional": (Functional, "do not follow"),
    "bare": (Bare, "no rule"),
    "temperature": (Temperature, "no rule"),
    "changed": (Changed, "inplace operation"),
    "mixing": (Mixing, "alone"),
    "normalised": (Normalised, "norm mixes"),
    "deciding": (Deciding, "do not follow"),
    "other kind": (lambda: nn.Sequential(nn.Flatten(), OtherKind(144, CLASSES)), "no rule"),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)),
        "no rule",
    ),
}


def network(name: str) -> nn.Module:
    """A network of either table, in float64, with all lazy layers made."""
    make = GHOST[name] if name in GHOST else VMAP[name][0]
    model = seeded(make)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model.eval()(torch.zeros(2, *SHAPE).double())
    return model.train()


DIGITS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "mlp": lambda: mlp("tanh"),
    "own": OwnHead,
    "without hidden layer": lambda: mlp(hidden=()),
}
