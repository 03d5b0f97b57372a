"""Compare per-example gradients with autograd, one example at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import generator_states, seeded_generators, torch_stream
from fedpriv.diagnosis.records import Exactness
from fedpriv.gradients import (
    DenseGradients,
    GradientOperator,
    Vector,
    find_route,
    per_example_gradients,
    plain_gradient,
)
from fedpriv.gradients.dense import Loss
from fedpriv.gradients.per_example import layer_of

# From this error on it is compared with what rounding does to autograd's own gradients.
TINY = 1e-12

# Gradients of single examples that are held at once, at most.
MOST_BYTES = 1 << 30

# A parameter whose gradients are all below this share of the longest one has nothing but rounding in them, such as a
# bias of keys, which moves every score by the same; its sum is compared with that longest one.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}


def exactness(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Exactness:
    """Return the largest relative error on a batch, without dropout and in float64 if possible; changes the model."""
    try:
        return _compared(model.double(), loss, x.double() if x.is_floating_point() else x, y)
    except (InputError, RuntimeError, TypeError, ValueError):
        return _compared(model.float(), loss, x, y)


def _compared(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Exactness:
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    size = sum(value.nbytes for value in trained.values())
    count = max(2, min(len(x), MOST_BYTES // size))
    x, y = x[:count], y[:count]
    with _without_chance(model, x):
        route = find_route(model, loss, x, y)
        found = per_example_gradients(model, loss, x, y, route=route)
        rows = _one_by_one(model, loss, x, y)
        error, layer = _error(model, found, rows)
        rounding = None
        if error > TINY:
            _round_weights(model)
            again = _one_by_one(model, loss, x, y)
            stacked = {name: torch.stack([row[name] for row in again]) for name in trained}
            rounding, _ = _error(model, DenseGradients(stacked), rows)
    precision = str(found.dtype).removeprefix("torch.")
    return Exactness(error=error, examples=count, precision=precision, layer=layer, rounding=rounding)


def _one_by_one(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> list[Vector]:
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return [plain_gradient(_total(model, loss, x[[row]], y[[row]]), trained) for row in range(len(x))]


def _round_weights(model: nn.Module) -> None:
    """Change each weight by about a rounding, up or down."""
    stream = torch_stream(0, "rounding")
    with torch.no_grad():
        for value in model.parameters():
            signs = torch.randint(2, value.shape, generator=stream).mul_(2).sub_(1)
            value.add_(value * signs, alpha=torch.finfo(value.dtype).eps)


def _total(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        return loss(model(x), y).sum()


@contextmanager
def _without_chance(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Switch off what the model draws."""
    model.train()
    for layer in model.modules():
        if isinstance(layer, _DropoutNd | nn.RReLU):
            layer.eval()
    with seeded_generators(0, x.device):
        before = generator_states()
        with torch.no_grad():
            model(x)
        if generator_states() != before:
            model.eval()
        yield


def _error(model: nn.Module, found: GradientOperator, rows: list[Vector]) -> tuple[float, str]:
    """The largest relative error, and the layer whose sum is the furthest off."""
    names = list(rows[0])
    weights = torch.linspace(1.0, -0.5, len(rows), dtype=found.dtype)
    lengths = {name: torch.stack([torch.linalg.vector_norm(row[name]) for row in rows]) for name in names}
    norms = torch.linalg.vector_norm(torch.stack(list(lengths.values())), dim=0)
    products = torch.stack([torch.stack([_inner(one, other) for other in rows]) for one in rows])
    longest = float(norms.max())
    if not longest:
        raise InputError("the gradients of random examples are all zero")
    sums, off = found.combine(weights), {}
    for name in names:
        wanted = torch.stack([weight * row[name] for weight, row in zip(weights, rows, strict=True)]).sum(dim=0)
        off[name] = float(torch.linalg.vector_norm(sums[name] - wanted))
    own = {name: float(length.max()) for name, length in lengths.items()}
    scale = {name: size if size > ROUNDING[found.dtype] * longest else longest for name, size in own.items()}
    worst = max(names, key=lambda name: off[name] / scale[name])
    error = max(
        float(((found.norms() - norms).abs() / longest).max()),
        float((found.gram() - products).abs().max()) / longest**2,
        sum(value**2 for value in off.values()) ** 0.5 / longest,
        off[worst] / scale[worst],
    )
    return error, layer_of(worst, model)


def _inner(one: Vector, other: Vector) -> Tensor:
    return torch.stack([torch.dot(value.flatten(), other[name].flatten()) for name, value in one.items()]).sum()
