"""Vectors in any form in which they may be given: by name, in the order of parameters, or as Flower has them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.core import errors
from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion
from fedpriv.gradients import Vector

Arrays = Mapping[str, Any] | Iterable[Any]
"""Tensors or numpy arrays: by name, or in the order of the model's parameters (or of its ``state_dict``)."""


def trained(model: nn.Module) -> Vector:
    """Return the trained parameters, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def present(model: nn.Module) -> Vector:
    """Return a copy of the trained parameters, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in trained(model).items()}


def named_vector(given: Arrays, model: nn.Module, what: str) -> Vector:
    """Bring tensors in any of the accepted forms into a mapping of the trained parameters' names, on the CPU."""
    parameters = trained(model)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(
            key=what, given=given, allowed="tensors or arrays are wanted, by name or in the order of the model's"
        )
    if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
        raise InputError(f"{what}: its keys are {list(given)[:3]}; names of the model's parameters are wanted")
    if isinstance(given, Mapping) and set(given) != {str(number) for number in range(len(given))}:
        values = _by_name(given, model, what)
    else:
        values = _in_order(list(given.values()) if isinstance(given, Mapping) else list(given), model, what)
    return {name: _tensor(values[name], like, f"{what}: {name}") for name, like in parameters.items()}


def _by_name(given: Mapping[str, Any], model: nn.Module, what: str) -> Mapping[str, Any]:
    parameters = trained(model)
    known = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    if unknown := [name for name in given if name not in known]:
        close = suggestion(unknown[0], tuple(parameters))
        raise InputError(f"{what}: the model has no layer with {unknown[0]!r}{close}")
    if missing := [name for name in parameters if name not in given]:
        raise InputError(f"{what}: {missing[0]!r} is missing")
    return given


def _in_order(given: Sequence[Any], model: nn.Module, what: str) -> Mapping[str, Any]:
    """Name a list by the model's trained parameters, all its parameters, or its ``state_dict``, as it fits."""
    if given and all(value is None for value in given):
        raise InputError(f"{what}: every entry is None; call loss.backward() first")
    orders: list[Mapping[str, Tensor]] = [trained(model), dict(model.named_parameters()), model.state_dict()]
    fitting = [order for order in orders if len(order) == len(given)]
    if not fitting:
        counts = ", ".join(dict.fromkeys(str(len(order)) for order in orders))
        raise InputError(
            f"{what}: a list of {len(given)} arrays; the model's trained parameters, parameters and state_dict have "
            f"{counts}"
        )
    matching = (order for order in fitting if _fits(given, order))
    return dict(zip(next(matching, fitting[0]), given, strict=True))


def _fits(given: Sequence[Any], order: Mapping[str, Tensor]) -> bool:
    pairs = zip(given, order.values(), strict=True)
    return all(value is None or tuple(np.shape(value)) == tuple(like.shape) for value, like in pairs)


def _tensor(given: Any, like: Tensor, what: str) -> Tensor:
    if given is None:
        return torch.zeros(like.shape, dtype=like.dtype)  # a parameter without a part in the loss
    try:
        value = given.detach().cpu().to_dense() if isinstance(given, Tensor) else torch.from_numpy(to_array(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} is not an array of numbers: {one_line(error)}") from None
    if not value.is_floating_point():
        raise InputError(f"{what} has the type {value.dtype}; floating-point numbers are wanted")
    if value.shape != like.shape:
        raise InputError(f"{what} has the shape {tuple(value.shape)}, in the model {tuple(like.shape)}")
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{what} has a NaN or infinity")
    return value.to(like.dtype).clone()


def to_array(given: Any) -> np.ndarray:
    """A numpy array of anything that is one or can say so, such as the ``Array`` of Flower."""
    convert = getattr(given, "numpy", None)
    return np.array(convert() if callable(convert) else given)


def one_line(error: Exception) -> str:
    """What an error says, in one line that is not too long."""
    return errors.one_line(error)[:200]
