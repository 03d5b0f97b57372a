"""A trial: does the gradient of an example depend on the other examples of its batch?"""

import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.gradients.dense import Loss
from fedpriv.gradients.operator import Vector, first_line
from fedpriv.gradients.per_example import layer_of, per_example_gradients

__all__ = ["refuse_mixed_examples"]

# Rounding makes the gradient of one example differ by no more than this share of the largest one.
TOLERANCE = 1e-3


def refuse_mixed_examples(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> None:
    """Refuse a model or a loss that mixes the examples of a batch: then no noise on gradients protects one of them.

    Compared are the gradients of a few examples in one batch with those of each alone. A model that draws random
    numbers while it trains is compared in evaluation mode. What a trial finds out holds for these examples: a model
    that mixes examples only now and then may pass.

    Args:
        model: left as it is.
        loss: (outputs, targets) -> losses of shape (B,).
        x: inputs, (B, ...), B at least 2, best no number that is also a size in the model; a few are enough.
        y: targets, (B, ...).

    Raises:
        InputError: the gradients differ (the first such layer is named), the model fails on one example alone, or what
            ``per_example_gradients`` refuses.
        ValueError: fewer than two examples.
    """
    if len(x) < 2:
        raise ValueError(f"{len(x)} examples; it takes two to be mixed")
    together = _gradients(model, loss, x, y)
    if _different(together, _gradients(model, loss, x, y)):
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            _refuse(model, loss, x, y, _gradients(model, loss, x, y))
        finally:
            for module, training in modes:
                module.training = training
    else:
        _refuse(model, loss, x, y, together)


def _refuse(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, together: Vector) -> None:
    try:
        each = [_gradients(model, loss, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    except InputError:
        raise
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{type(model).__name__} cannot compute one example alone: {first_line(error)}") from error
    different = _different(together, {name: torch.cat([one[name] for one in each]) for name in together})
    if different:
        raise InputError(
            f"the gradient of layer {layer_of(different, model)} for one example depends on the others of its batch, "
            "so that no noise can protect one of them"
        )


def _gradients(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Vector:
    return per_example_gradients(model, loss, x, y).rows(0, len(x))


def _different(left: Vector, right: Vector) -> str:
    """The first parameter whose gradients differ; empty if none does."""
    largest = max(float(value.abs().max()) for value in left.values())
    for name, value in left.items():
        if not torch.allclose(value, right[name], rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True):
            return name
    return ""
