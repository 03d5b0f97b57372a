"""Many copies of one network, each with numbers of its own, computed at once (``torch.func.stack_module_state``).

A stack has M models; their parameters are tensors (M, *shape). Where all that is trained are Linear layers the
gradients are had from the layers' inputs and output gradients, as in the operator of one model; any other network goes
through autograd, and for per-example gradients one example at a time, vectorised.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from fedpriv.errors import InputError
from fedpriv.gradients import DenseGradients, GradientOperator, Vector
from fedpriv.gradients.factored import FactoredGradients
from fedpriv.gradients.factors import Dyads, Factor, Memory, Rows
from fedpriv.models import coupled_layers, dropout_layers
from fedpriv.world import tracked_buffers, trained_parameters

__all__ = ["StackedNetwork", "stack_models"]


class Pair(NamedTuple):
    """What makes up a Linear layer's gradients: its inputs (M, B, in) and its outputs' gradients (M, B, out)."""

    inputs: Tensor
    errors: Tensor


def stack_models(models: Sequence[nn.Module]) -> Vector:
    """Return the trained parameters of models of one kind as a stack: name -> (M, *shape), copies."""
    parameters, _ = stack_module_state(list(models))
    return {name: parameters[name].detach().clone() for name in trained_parameters(models[0])}


class StackedNetwork:
    """A network whose numbers are given with every call.

    Args:
        model: the network; copied.
        shape: of one input, such as (C, H, W).
        memory: bytes that the per-example gradients of one model's batch may take on the way.

    Raises:
        InputError: the network has layers that mix the examples of a batch, keep running numbers, or draw at random.
    """

    def __init__(self, model: nn.Module, shape: Sequence[int], memory: int) -> None:
        _refuse_unsuited(model)
        self._base = copy.deepcopy(model).train()
        self._memory = memory
        self._shapes = {name: value.shape for name, value in trained_parameters(model).items()}
        self._linear = _linear_layers(self._base)
        if self._linear and not self._pairs_are_right(tuple(shape)):
            self._linear = {}

    def outputs(self, parameters: Vector, x: Tensor) -> Tensor:
        """Return every model's outputs (M, B, classes) for the same inputs (B, ...)."""
        with torch.no_grad():
            run = vmap(lambda numbers, one: functional_call(self._base, numbers, (one,)), in_dims=(0, None))
            found: Tensor = run(parameters, x)
        return found

    def gradients(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor) -> Vector:
        """Return each model's gradient of the weighted sum of its cross entropies, name -> (M, *shape).

        Args:
            parameters: the stack.
            x: (M, B, ...), each model's own batch.
            y: (M, B).
            weights: (M, B).
        """
        if self._linear:
            pairs = self._pairs(parameters, x, y, weights)
            found: Vector = {}
            for name, pair in pairs.items():
                self._put(found, name, "weight", torch.bmm(pair.errors.mT, pair.inputs))
                self._put(found, name, "bias", pair.errors.sum(dim=1))
            return {name: found[name] for name in self._shapes}
        tracked = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        outputs = vmap(lambda numbers, one: functional_call(self._base, numbers, (one,)))(tracked, x)
        total = _weighted_loss(outputs, y, weights)
        gradients = torch.autograd.grad(total, tuple(tracked.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(tracked, gradients, strict=True))

    def descend(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor, rate: float) -> None:
        """Take one step of plain gradient descent in place; the arguments are those of :meth:`gradients`.

        Linear layers are moved by the product itself: no gradient is written out and read again, which is what most of
        the time of a small network's step goes into.
        """
        if not self._linear:
            for name, value in self.gradients(parameters, x, y, weights).items():
                parameters[name].sub_(value, alpha=rate)
            return
        for name, pair in self._pairs(parameters, x, y, weights).items():
            prefix = f"{name}." if name else ""
            parameters[f"{prefix}weight"].baddbmm_(pair.errors.mT, pair.inputs, alpha=-rate)
            if f"{prefix}bias" in parameters:
                parameters[f"{prefix}bias"].sub_(pair.errors.sum(dim=1), alpha=rate)

    def operators(self, parameters: Vector, x: Tensor, y: Tensor, sizes: Sequence[int]) -> Iterator[GradientOperator]:
        """Return for one model after the other the operator of its per-example gradients, for a mechanism.

        Args:
            parameters: the stack.
            x: (M, B, ...).
            y: (M, B).
            sizes: (M,), how many of the first examples of its batch count for a model.
        """
        ones = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
        if self._linear:
            pairs = self._pairs(parameters, x, y, ones)
            for number, size in enumerate(sizes):
                one = {name: Pair(pair.inputs[number], pair.errors[number]) for name, pair in pairs.items()}
                yield self._factored(one, size) if size else self._none(x)
            return
        one_gradient = grad(self._one_loss)
        of_batch = vmap(vmap(one_gradient, in_dims=(None, 0, 0)))
        rows = of_batch(parameters, x, y)
        for number, size in enumerate(sizes):
            yield DenseGradients({name: value[number, :size] for name, value in rows.items()}, "stacked models")

    def _one_loss(self, parameters: Vector, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self._base, parameters, (x.unsqueeze(0),))
        return functional.cross_entropy(outputs, y.unsqueeze(0))

    def _pairs(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Pair]:
        """Run forward and back to the outputs of the Linear layers; what their weights get is not multiplied out."""
        taps = {
            name: torch.zeros(*x.shape[:2], layer.out_features, dtype=x.dtype, device=x.device).requires_grad_()
            for name, layer in self._linear.items()
        }

        def run(numbers: Vector, tap: Vector, one: Tensor) -> tuple[Tensor, Vector]:
            return _tapped(self._base, self._linear, numbers, tap, one)

        outputs, inputs = vmap(run)(parameters, taps, x)
        total = _weighted_loss(outputs, y, weights)
        errors = torch.autograd.grad(total, tuple(taps.values()), allow_unused=True, materialize_grads=True)
        return {name: Pair(inputs[name].detach(), error) for name, error in zip(taps, errors, strict=True)}

    def _pairs_are_right(self, shape: tuple[int, ...]) -> bool:
        """Try out whether the gradients from the layers' inputs and outputs are autograd's, on made-up inputs.

        They are not where a weight is used in another way than by its own layer.
        """
        own = trained_parameters(self._base)
        stack = {name: value.detach().unsqueeze(0) for name, value in own.items()}
        first = next(iter(stack.values()))
        x = torch.linspace(-1, 1, 3 * math.prod(shape), dtype=first.dtype, device=first.device).view(1, 3, *shape).sin()
        y, weights = (
            torch.zeros(1, 3, dtype=torch.long, device=x.device),
            torch.ones(1, 3, dtype=x.dtype, device=x.device),
        )
        total = functional.cross_entropy(self._base(x[0]), y[0], reduction="sum")
        wanted = torch.autograd.grad(total, tuple(own.values()), allow_unused=True, materialize_grads=True)
        try:
            found = self.gradients(stack, x, y, weights)
        except _NotPlainError:
            return False
        return all(torch.allclose(found[name][0], value, 1e-3, 1e-5) for name, value in zip(own, wanted, strict=True))

    def _put(self, found: Vector, layer: str, kind: str, value: Tensor) -> None:
        name = f"{layer}.{kind}" if layer else kind
        if name in self._shapes:
            found[name] = value

    def _factored(self, pairs: dict[str, Pair], size: int) -> FactoredGradients:
        scratch = Memory(self._memory).scratch
        factors: dict[str, Factor] = {}
        for name, pair in pairs.items():
            bias = Rows(pair.errors[:size], scratch, side=True)
            both = {"weight": Dyads(pair.inputs[:size], bias, scratch), "bias": bias}
            prefix = f"{name}." if name else ""
            factors |= {f"{prefix}{kind}": factor for kind, factor in both.items() if f"{prefix}{kind}" in self._shapes}
        first = next(iter(pairs.values())).errors
        ordered = {name: factors[name] for name in self._shapes}
        routes = dict.fromkeys(pairs, "ghost, stacked models")
        return FactoredGradients(ordered, size, dict(self._shapes), first.dtype, first.device, routes, self._memory)

    def _none(self, like: Tensor) -> DenseGradients:
        empty = {
            name: torch.zeros(0, *shape, dtype=like.dtype, device=like.device) for name, shape in self._shapes.items()
        }
        return DenseGradients(empty, "the batch is empty")


def _tapped(
    base: nn.Module, layers: dict[str, nn.Linear], numbers: Vector, taps: Vector, x: Tensor
) -> tuple[Tensor, Vector]:
    """Run a network with a tap added to the output of each layer; return the outputs and the layers' inputs."""
    inputs: Vector = {}

    def listen(name: str, layer: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if name in inputs or given[0].ndim != 2:
                raise _NotPlainError
            inputs[name] = given[0]
            return output + taps[name]

        return layer.register_forward_hook(hook)

    handles = [listen(name, layer) for name, layer in layers.items()]
    try:
        outputs = functional_call(base, numbers, (x,))
    finally:
        for handle in handles:
            handle.remove()
    if len(inputs) < len(layers):
        raise _NotPlainError
    return outputs, inputs


class _NotPlainError(Exception):
    """A Linear layer is used several times, not at all, or on more than one vector an example."""


def _linear_layers(base: nn.Module) -> dict[str, nn.Linear]:
    """Return the Linear layers if their parameters, all of them, are all that is trained, else {}."""
    layers = {name: layer for name, layer in base.named_modules() if type(layer) is nn.Linear}
    owned = {
        f"{name}.{own}" if name else own: layer for name, layer in layers.items() for own, _ in layer.named_parameters()
    }
    trained = trained_parameters(base)
    frozen = [name for name in owned if name not in trained]
    if frozen or set(trained) - set(owned) or not layers:
        return {}
    return layers


def _weighted_loss(outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The sum over models and examples of the weighted cross entropies, for outputs (M, B, classes)."""
    each = functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
    return torch.dot(each, weights.flatten())


def _refuse_unsuited(model: nn.Module) -> None:
    for what, names in (
        ("mixes the examples of a batch", coupled_layers(model)),
        ("drops at random", dropout_layers(model)),
        ("keeps running numbers", tuple(tracked_buffers(model))),
    ):
        if names:
            raise InputError(
                f"reference models: {names[0]} of the network {what}, and such models are not trained together; "
                "allowed: networks without BatchNorm and dropout"
            )
