"""Models whose per-example gradients the tests compare, with their inputs."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 5
loss = partial(functional.cross_entropy, reduction="none")


class Head(nn.Module):
    """Flatten whatever comes and classify it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


class Tied(nn.Module):
    """A weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(torch.tanh(self.first(x))))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(torch.tanh(self.body(x))))


class UsedOutside(nn.Module):
    """A weight that is used by its layer and once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.linear(torch.tanh(self.body(x)), self.body.weight))


class OnlyByHand(nn.Module):
    """A layer that is called in vain, and whose weight is used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.out(functional.linear(x, self.body.weight))


class OwnParameter(nn.Module):
    """A model that holds a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.scale)


class Unused(nn.Module):
    """A layer that is never called and one whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.vain, self.out = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.vain(x)
        return self.out(x)


class Residual(nn.Module):
    """A sum of two paths, with an in-place ReLU after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1), Head(2 * 6 * 6)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first(x), inplace=True)
        return self.head(self.second(inner) + x)


class Gated(nn.Module):
    """Two layers that read the same input."""

    def __init__(self, wide: int, tall: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(wide, tall), nn.Linear(wide, tall, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.second(x)


class Temperature(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.factor * x)


class ChangesInput(nn.Module):
    """The input of a layer is changed in place after the layer has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.body.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.body(x)
        x.mul_(2)
        return self.out(y + x)


class SequenceFirst(nn.Module):
    """Layers that see (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x.transpose(0, 1))).mean(dim=0))


class Attention(nn.Module):
    """A module that returns a tuple and uses its child's weight by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.MultiheadAttention(4, 2, batch_first=True), Head(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, x, x, need_weights=False)[0])


class CrossAttention(nn.Module):
    """Queries from elsewhere than keys and values, and masks of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.MultiheadAttention(4, 2, bias=False, batch_first=True), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        others = torch.tanh(2 * x)
        causal = torch.ones(2, 7, dtype=torch.bool, device=x.device).triu(3)
        hidden = x[:, :, 0] > 1
        hidden[:, 0] = False
        attended, _ = self.body(x[:, :2], others, others, key_padding_mask=hidden, attn_mask=causal)
        return self.head(attended)


class LanguageModel(nn.Module):
    """A transformer block between an embedding and the same weight as the last layer (without a bias)."""

    def __init__(self, vocabulary: int = CLASSES, width: int = 6) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.norm, self.query, self.value = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.last_norm, self.last = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.places(torch.arange(x.shape[1], device=x.device).expand(len(x), -1))
        inner = self.norm(h)
        h = h + functional.scaled_dot_product_attention(self.query(inner), inner, self.value(inner), is_causal=True)
        return self.last(self.last_norm(h)).logsumexp(dim=1)[:, :CLASSES]


class Buffered(nn.Module):
    """A frozen layer, one of which only the bias is trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.partly, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES, bias=False)
        self.register_buffer("shift", torch.randn(6))
        self.frozen.requires_grad_(False)
        self.partly.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.partly(self.frozen(x)) + self.shift))


class Scale(nn.Module):
    """A layer without a rule: one factor a channel, and a buffer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(channels, 1, 1))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.factor * x + self.shift)


class NoisyPairs(nn.Bilinear):
    """A layer without a rule, with a dropout of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x, x), 0.5, self.training)


class NoisyScale(Scale):
    """The same, with a dropout of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


def images(channels: int = 2) -> Callable[[int], Tensor]:
    return lambda examples: torch.randn(examples, channels, 6, 6)


def vectors(*shape: int) -> Callable[[int], Tensor]:
    return lambda examples: torch.randn(examples, *shape)


def words(*shape: int) -> Callable[[int], Tensor]:
    return lambda examples: torch.randint(4, (examples, *shape))


def conv(out: int, width: int, **settings: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(2, out, 3, **settings), nn.Tanh(), Head(width))


def conv1d(width: int, **settings: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv1d(2, 4, 3, **settings), nn.Tanh(), Head(width))


# name -> (model, inputs, layer -> expected route of each layer that has one; None: the whole model is dense).
Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, str] | None]
GHOST: dict[str, str] = {}

CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(6, CLASSES), vectors(6), {"": "ghost: Linear"}),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES, bias=False)), vectors(6), GHOST),
    "sequence": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Head(32)), vectors(8, 3), GHOST),
    "short-sequence": (lambda: nn.Sequential(Gated(9, 8), Head(16)), vectors(2, 9), GHOST),
    "grid": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Head(24)), vectors(2, 3, 3), GHOST),
    "conv": (conv(3, 48), images(), GHOST),
    "conv-no-bias": (conv(3, 48, bias=False), images(), GHOST),
    "conv-stride": (conv(3, 27, stride=2, padding=1), images(), GHOST),
    "conv-groups": (conv(4, 64, groups=2), images(), GHOST),
    "conv-depthwise": (conv(6, 48, groups=2, stride=(1, 2), padding=(0, 1), dilation=(1, 2)), images(), GHOST),
    "conv-dilation": (conv(3, 12, dilation=2), images(), GHOST),
    "conv-same": (conv(3, 108, padding="same", dilation=2), images(), GHOST),
    "conv-valid": (conv(3, 48, padding="valid"), images(), GHOST),
    "conv-circular": (conv(3, 108, padding=1, padding_mode="circular"), images(), GHOST),
    "conv-reflect": (conv(3, 108, padding=(1, 1), padding_mode="reflect"), images(), GHOST),
    "conv-wide": (lambda: nn.Sequential(nn.Conv2d(2, 40, 5, 3), nn.Tanh(), Head(40)), images(), GHOST),
    "conv1d": (conv1d(16, stride=2), vectors(2, 9), GHOST),
    "conv1d-groups": (conv1d(36, groups=2, padding=2, dilation=2), vectors(2, 9), GHOST),
    "embedding": (lambda: nn.Sequential(nn.Embedding(4, 3), Head(24)), words(8), GHOST),
    "embedding-one": (lambda: nn.Sequential(nn.Embedding(4, 3), Head(3)), words(), GHOST),
    "embedding-padding": (lambda: nn.Sequential(nn.Embedding(4, 3, padding_idx=1), Head(24)), words(8), GHOST),
    "layer-norm": (lambda: nn.Sequential(nn.LayerNorm(6), Head(6)), vectors(6), GHOST),
    "layer-norm-positions": (lambda: nn.Sequential(nn.LayerNorm((2, 3)), Head(24)), vectors(4, 2, 3), GHOST),
    "layer-norm-no-bias": (lambda: nn.Sequential(nn.LayerNorm(6, bias=False), Head(6)), vectors(6), GHOST),
    "rms-norm": (lambda: nn.Sequential(nn.RMSNorm(3), Head(12)), vectors(4, 3), GHOST),
    "group-norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), Head(144)), images(4), GHOST),
    "frozen": (
        Buffered,
        vectors(6),
        {"frozen": "frozen: Linear", "partly": "ghost: Linear", "out": "ghost: Linear"},
    ),
    "unused": (Unused, vectors(6), {"idle": "unused: Linear", "vain": "unused: Linear", "out": "ghost: Linear"}),
    "residual": (Residual, images(), GHOST),
    "own-layer": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), Scale(3), Head(48)),
        images(),
        GHOST,
    ),
    "prelu": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.PReLU(7), Head(7)),
        vectors(6),
        GHOST,
    ),
    "temperature": (
        lambda: nn.Sequential(nn.Linear(6, 7), Temperature(), Head(7)),
        vectors(6),
        GHOST,
    ),
    "conv-transpose": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2), Head(98)),
        images(),
        {"0": "dense: ConvTranspose2d (conv_transpose2d has no rule)", "1.out": "ghost: Linear"},
    ),
    "weight-norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 7)), nn.Tanh(), Head(7)),
        vectors(6),
        GHOST,
    ),
    "tied": (Tied, vectors(6), GHOST),
    "twice": (Twice, vectors(6), GHOST),
    "used-outside": (UsedOutside, vectors(6), GHOST),
    "only-by-hand": (OnlyByHand, vectors(6), GHOST),
    "own-parameter": (OwnParameter, vectors(6), GHOST),
    "changes-input": (ChangesInput, vectors(6), None),
    "sequence-first": (SequenceFirst, vectors(8, 3), GHOST),
    "attention": (Attention, vectors(3, 4), GHOST),
    "cross-attention": (CrossAttention, vectors(7, 4), GHOST),
    "language-model": (LanguageModel, words(8), GHOST),
    "large-language-model": (lambda: LanguageModel(30, 24), words(3), GHOST),
}


def build(name: str, examples: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, its inputs and its labels; the same numbers every time."""
    make, inputs, _ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model, x, y = make().to(dtype), inputs(examples), torch.randint(CLASSES, (examples,))
    return model, x.to(dtype) if x.is_floating_point() else x, y


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The oracle: plain autograd, one example after the other, in float64. Rows of (B, *shape)."""
    model = model.double()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    rows = []
    for one_x, one_y in zip(x.double() if x.is_floating_point() else x, y, strict=True):
        value = loss(model(one_x.unsqueeze(0)), one_y.unsqueeze(0)).sum()
        rows.append(torch.autograd.grad(value, list(trained.values()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(trained)}
