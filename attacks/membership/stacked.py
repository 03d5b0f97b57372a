"""Many copies of one network, each with numbers of its own, computed at once (``torch.func.stack_module_state``).

A stack has M models; their parameters are tensors (M, *shape). Where a network is a chain of Linear layers and
elementwise functions each layer is one batched product, and the gradients follow from the layers' inputs and output
gradients, as in the operator of one model; any other network goes through autograd, and for per-example gradients one
example at a time, vectorised.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedpriv.accounting.response import Response
from fedpriv.core.errors import InputError
from fedpriv.core.federated import batch_loss, example_losses
from fedpriv.core.world import tracked_buffers, trained_parameters
from fedpriv.gradients import DenseGradients, GradientOperator, Vector
from fedpriv.gradients.calls import coupled_layers, dropout_layers
from fedpriv.gradients.dense import FactoredGradients
from fedpriv.gradients.factors import Dyads, Factor, Memory, Rows

# What acts on each number alone does so on a stack, too.
_ELEMENTWISE = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh)


class Pair(NamedTuple):
    """What makes up a Linear layer's gradients: its inputs (M, B, in) and its outputs' gradients (M, B, out)."""

    inputs: Tensor
    errors: Tensor


class StackedNetwork:
    """A network whose numbers are given with every call."""

    def __init__(
        self, model: nn.Module, memory: int, tilt: float | None = None, forward: Response | None = None
    ) -> None:
        _refuse_unsuited(model)
        self._base = copy.deepcopy(model).train()
        self._memory, self._tilt, self._forward = memory, tilt, forward
        self._shapes = {name: value.shape for name, value in trained_parameters(model).items()}
        self._chain = _chain(self._base)

    def outputs(self, parameters: Vector, x: Tensor) -> Tensor:
        """Return every model's outputs (M, B, classes) for the same inputs (B, ...)."""
        with torch.no_grad():
            run = vmap(lambda numbers, image: functional_call(self._base, numbers, (image,)), in_dims=(0, None))
            logits: Tensor = run(parameters, x)
        return logits

    def gradients(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor) -> Vector:
        """Return each model's gradient of the objective of its batch, name -> (M, *shape).

        Args:
            x: (M, B, ...), each model's own batch.
            y: (M, B).
            weights: (M, B).
        """
        if self._chain:
            gradients_of: Vector = {}
            for name, pair in self._pairs(parameters, x, y, weights).items():
                gradients_of[f"{name}.weight"] = torch.bmm(pair.errors.mT, pair.inputs)
                gradients_of[f"{name}.bias"] = pair.errors.sum(dim=1)
            return {name: gradients_of[name] for name in self._shapes}
        tracked = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        outputs = vmap(lambda numbers, image: functional_call(self._base, numbers, (image,)))(tracked, x)
        total = self._loss(outputs, y, weights)
        gradients = torch.autograd.grad(total, tuple(tracked.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(tracked, gradients, strict=True))

    def descend(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor, rate: float) -> None:
        """Take one step of plain gradient descent in place; the arguments are those of :meth:`gradients`.

        Linear layers are moved by the product itself: no gradient is written out and read again, which is what most of
        the time of a small network's step goes into.
        """
        if not self._chain:
            for name, value in self.gradients(parameters, x, y, weights).items():
                parameters[name].sub_(value, alpha=rate)
            return
        for name, pair in self._pairs(parameters, x, y, weights).items():
            parameters[f"{name}.weight"].baddbmm_(pair.errors.mT, pair.inputs, alpha=-rate)
            if f"{name}.bias" in parameters:
                parameters[f"{name}.bias"].sub_(pair.errors.sum(dim=1), alpha=rate)

    def operators(self, parameters: Vector, x: Tensor, y: Tensor, sizes: Sequence[int]) -> Iterator[GradientOperator]:
        """Return for one model after the other the operator of its per-example gradients, for a mechanism.

        Args:
            x: (M, B, ...).
            y: (M, B).
            sizes: (M,), how many of the first examples of its batch count for a model.
        """
        ones = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
        if self._chain:
            pairs = self._pairs(parameters, x, y, ones)
            for number, size in enumerate(sizes):
                own = {name: Pair(pair.inputs[number], pair.errors[number]) for name, pair in pairs.items()}
                yield self._factored(own, size) if size else self._none(x)
            return
        one_gradient = grad(self._one_loss)
        of_batch = vmap(vmap(one_gradient, in_dims=(None, 0, 0)))
        rows = of_batch(parameters, x, y)
        for number, size in enumerate(sizes):
            yield DenseGradients({name: value[number, :size] for name, value in rows.items()}, "stacked models")

    def _loss(self, outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The sum over models of the objective of each one's batch, for outputs (M, B, classes)."""
        each = example_losses(outputs.flatten(0, 1), y.flatten(), self._forward)
        if self._tilt is None:
            return torch.dot(each, weights.flatten())
        return batch_loss(each.view(y.shape), weights, self._tilt).sum()

    def _one_loss(self, parameters: Vector, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self._base, parameters, (x.unsqueeze(0),))
        return example_losses(outputs, y.unsqueeze(0), self._forward).squeeze(0)

    def _pairs(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Pair]:
        """Run forward and back to the outputs of the Linear layers; what their weights get is not multiplied out."""
        inputs: Vector = {}
        outputs: Vector = {}
        value = x
        for name, layer in self._chain:
            if isinstance(layer, nn.Linear):
                inputs[name] = value.detach()
                value = _linear(value, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
                outputs[name] = value if value.requires_grad else value.requires_grad_()
            else:
                value = value.flatten(2) if isinstance(layer, nn.Flatten) else layer(value)
        errors = torch.autograd.grad(self._loss(value, y, weights), tuple(outputs.values()))
        return {name: Pair(inputs[name], error) for name, error in zip(outputs, errors, strict=True)}

    def _factored(self, pairs: dict[str, Pair], size: int) -> FactoredGradients:
        scratch = Memory(self._memory).scratch
        factors: dict[str, Factor] = {}
        for name, pair in pairs.items():
            bias = Rows(pair.errors[:size], scratch, side=True)
            factors |= {f"{name}.weight": Dyads(pair.inputs[:size], bias, scratch), f"{name}.bias": bias}
        first = next(iter(pairs.values())).errors
        ordered = {name: factors[name] for name in self._shapes}
        routes = dict.fromkeys(pairs, "ghost, stacked models")
        return FactoredGradients(ordered, size, dict(self._shapes), first.dtype, first.device, routes, self._memory)

    def _none(self, like: Tensor) -> DenseGradients:
        empty = {
            name: torch.zeros(0, *shape, dtype=like.dtype, device=like.device) for name, shape in self._shapes.items()
        }
        return DenseGradients(empty, "the batch is empty")


def _chain(base: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Return the layers, by name, of a network that is nothing but Flatten, Linear and elementwise layers, else ().

    A weight that is frozen, or shared by layers, makes it none: all that is trained has to be of one Linear layer each.
    """
    if type(base) is not nn.Sequential or any(_is_peculiar(module) for module in base.modules()):
        return ()
    # Not named_children(), which leaves out a layer's second place.
    layers = tuple((name, layer) for name, layer in base._modules.items() if layer is not None)
    kinds = [type(layer) for _, layer in layers if type(layer) not in _ELEMENTWISE]
    owned = [f"{name}.{own}" for name, layer in layers for own, _ in layer.named_parameters()]
    if kinds != [nn.Flatten] + [nn.Linear] * (len(kinds) - 1) or owned != list(trained_parameters(base)):
        return ()
    return layers if len(kinds) > 1 else ()


def _is_peculiar(module: nn.Module) -> bool:
    """Whether a layer does more than its kind says, flattens otherwise, or writes over what its neighbour keeps."""
    flattens = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1)
    return bool(flattens or module._forward_hooks or module._forward_pre_hooks or getattr(module, "inplace", False))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(M, B, in), (M, out, in) and (M, out) to (M, B, out)."""
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _refuse_unsuited(model: nn.Module) -> None:
    for what, names in (
        ("mixes the examples of a batch", coupled_layers(model)),
        ("is random while training", dropout_layers(model)),
        ("keeps running numbers", tuple(tracked_buffers(model))),
    ):
        if names:
            raise InputError(
                f"reference models: {names[0]} of the network {what}, and such models are not trained together; "
                "allowed: networks without BatchNorm, dropout and noise"
            )
