"""Stacked models: many models of one network, each with its own parameters and batch, computed as one batch.

The network runs once, on the examples of all M models, B each, one after the other. Only its layers with parameters
work otherwise than alone: each takes the examples of a model with that model's own weights. All between them (a view,
an activation, a sum of two branches) treats examples separately, so it does the same to M B of them as to B.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import NoiseStream, NoiseStreams
from fedpriv.gradients.calls import copied, coupled_layers, dropout_layers
from fedpriv.gradients.dense import DenseGradients, FactoredGradients, Loss, check_losses
from fedpriv.gradients.factors import Memory
from fedpriv.gradients.ghost import Entangled, Graph, Route, gradients_of, problem_of_model
from fedpriv.gradients.normal import fill_normal
from fedpriv.gradients.operator import Block, GradientOperator, Vector
from fedpriv.gradients.rules import LAYERS, padded, patches
from fedpriv.gradients.tracing import Source, Use

Convolution = nn.Conv1d | nn.Conv2d
Layer = Callable[[Any, Tensor, Vector], Tensor]
"""(layer, input (M B, ...), its parameters (M, *shape) by their names in it) -> output (M B, ...)."""


def _linear(layer: nn.Linear, x: Tensor, own: Vector) -> Tensor:
    weight = own["weight"]
    rows = x.reshape(len(weight), -1, layer.in_features)
    bias = own.get("bias")
    value = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return value.view(*x.shape[:-1], layer.out_features)


def _convolution(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """Many convolutions, as fits the device: by groups on a GPU, in turn on a CPU, of one channel by patches."""
    if x.device.type == "cpu" and layer.in_channels == 1 and len(own["weight"]) > 1 and not x.requires_grad:
        return of_patches(layer, x, own)
    x = x if layer.padding_mode == "zeros" else padded(layer, x)
    return one_by_one(layer, x, own) if x.device.type == "cpu" else as_groups(layer, x, own)


def one_by_one(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """Apply each model's convolution to its own examples, (M B, ...), padded where the layer does not pad with 0."""
    weight, bias = own["weight"], own.get("bias")
    biases = [None] * len(weight) if bias is None else bias
    parts = zip(x.chunk(len(weight)), weight, biases, strict=True)
    values = [_convolved(layer, layer.groups, *one) for one in parts]
    return values[0] if len(values) == 1 else torch.cat(values)


def of_patches(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """As :func:`one_by_one`, of one channel that takes no gradient, by one product of weights and patches."""
    weight, bias = own["weight"].flatten(2), own.get("bias")
    found = patches(layer, padded(layer, x).contiguous())
    positions = found.shape[2 + len(layer.kernel_size) :]
    values = weight[:, None] @ found.reshape(len(weight), -1, weight.shape[2], positions.numel())
    values = values if bias is None else values + bias[:, None, :, None]
    return values.reshape(len(x), layer.out_channels, *positions)


def as_groups(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """As :func:`one_by_one`, by one convolution whose groups of channels are the models."""
    weight, bias = own["weight"], own.get("bias")
    models = len(weight)
    together = x.unflatten(0, (models, -1)).transpose(0, 1).flatten(1, 2)
    flat = None if bias is None else bias.flatten()
    values = _convolved(layer, models * layer.groups, together, weight.flatten(0, 1), flat)
    apart: Tensor = values.unflatten(1, (models, -1)).transpose(0, 1)
    return apart.flatten(0, 1)


def _convolved(layer: Convolution, groups: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    run: Callable[..., Tensor] = functional.conv1d if isinstance(layer, nn.Conv1d) else functional.conv2d
    padding = layer.padding if layer.padding_mode == "zeros" else 0
    return run(x, weight, bias, stride=layer.stride, padding=padding, dilation=layer.dilation, groups=groups)


def _group_norm(layer: nn.GroupNorm, x: Tensor, own: Vector) -> Tensor:
    normal = functional.group_norm(x, layer.num_groups, eps=layer.eps)
    return _scaled(normal, own, (layer.num_channels, *(1 for _ in x.shape[2:])))


def _layer_norm(layer: nn.LayerNorm, x: Tensor, own: Vector) -> Tensor:
    return _scaled(functional.layer_norm(x, layer.normalized_shape, eps=layer.eps), own, layer.normalized_shape)


def _scaled(x: Tensor, own: Vector, shape: Sequence[int]) -> Tensor:
    """Multiply each model's examples by its weight and add its bias, laid along the last axes."""
    weight = own["weight"]
    between = (1 for _ in range(x.ndim - len(shape)))
    wide = (len(weight), *between, *shape)
    value: Tensor = x.unflatten(0, (len(weight), -1)) * weight.view(wide)
    return (value + own["bias"].view(wide) if "bias" in own else value).flatten(0, 1)


STACKED_LAYERS: Mapping[type[nn.Module], Layer] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
}


class StackedGradients(GradientOperator):
    """The gradients of M models, B examples each, for mechanisms that do the same to every model.

    What an operator says of its examples, (B,), is (M, B) here, and so are weights; a vector in parameter space has a
    first axis of M. Only what takes a range of examples, or groups of them, counts all M B.

    Args:
        flat: of all examples, model after model.
        models: M.
    """

    def __init__(self, flat: FactoredGradients, models: int) -> None:
        super().__init__(flat.examples // models, flat.shapes, flat.dtype, flat.device, flat.routes, flat.chunk_bytes)
        self.flat = flat
        self.models = models

    def each(self, sizes: Sequence[int] | None = None) -> Iterator[GradientOperator]:
        """Return the gradients of one model after the other; ``sizes`` (M,): of its first examples only."""
        for number, start in enumerate(range(0, self.flat.examples, self.examples)):
            size = self.examples if sizes is None else sizes[number]
            yield self.flat.part(start, start + size) if size else _no_gradients(self)

    @override
    def norms(self, block: Block | None = None) -> Tensor:
        return self._cut(self.flat.norms(block))

    @override
    def absolute_sums(self, block: Block | None = None) -> Tensor:
        return self._cut(self.flat.absolute_sums(block))

    @override
    def weighted_norms(self, weights: Vector, block: Block | None = None) -> Tensor:
        return self._cut(self.flat.weighted_norms(weights, block))

    @override
    def magnitudes(self, block: Block | None = None) -> Tensor:
        return self._cut(self.flat.magnitudes(block))

    @override
    def roundings(self, block: Block | None = None) -> Tensor:
        return self._cut(self.flat.roundings(block))

    @override
    def combine(self, weights: Tensor, block: Block | None = None) -> Vector:
        return self.flat.combine_each(weights, block)

    @override
    def add_combination(self, vector: Vector, scale: float, weights: Tensor, block: Block | None = None) -> None:
        self.flat.add_to_each(vector, scale, weights, block)

    @override
    def masked(self, keep: Tensor) -> "StackedGradients":
        return StackedGradients(self.flat.masked(keep.flatten()), self.models)

    @override
    def numbers(self, noise: NoiseStream, block: Block | None = None) -> Tensor:
        """Return a standard normal vector for each model, (M, K), from a stream of its own among ``NoiseStreams``."""
        if not isinstance(noise, NoiseStreams) or len(noise.each) != self.models:
            raise ValueError(f"{self.models} models draw from as many streams")
        numbers = torch.empty(self.models, self.dimension(block), dtype=self.dtype, device=self.device)
        for row, stream in zip(numbers, noise.each, strict=True):
            fill_normal(row, stream)
        return numbers

    @override
    def grams(self, groups: int, block: Block | None = None, *, precise: bool = True) -> Tensor:
        return self.flat.grams(groups, block, precise=precise)

    @override
    def rows(self, start: int, stop: int, block: Block | None = None) -> Vector:
        return self.flat.rows(start, stop, block)

    @override
    def dots(self, vectors: Vector, block: Block | None = None) -> Tensor:
        return self.flat.dots(vectors, block)

    @override
    def part(self, start: int, stop: int) -> GradientOperator:
        return self.flat.part(start, stop)

    @override
    def pair_products(self, block: Block | None = None, *, precise: bool = True) -> int:
        return self.flat.pair_products(block, precise=precise)

    def _cut(self, values: Tensor) -> Tensor:
        return values.view(self.models, -1)


Objective = Callable[[Tensor, Tensor], Tensor]
"""(outputs (M B, ...), targets (M B,)) of M models -> the sum of what each minimises."""


class _LinearCall(NamedTuple):
    """What a Linear layer was given, (M B, ..., in), and what it returned, as an edge of autograd's graph."""

    names: Mapping[str, str]  # of its trained parameters
    given: Tensor
    output: GradientEdge

    def of_models(self, error: Tensor, models: int) -> tuple[Tensor, Tensor]:
        """Return an error (M B, ..., out) of the output, and the input, as those of models, (M, N, numbers) each."""
        return error.reshape(models, -1, error.shape[-1]), self.given.reshape(models, -1, self.given.shape[-1])


class StackedModel:
    """A network whose numbers are given with every call, for M models at once; made by :func:`stacked_model`."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self._model = model
        self._numbers: Vector = {}
        self._generators: tuple[torch.Generator, ...] = ()
        self._calls: list[_LinearCall] | None = None
        self._uses: list[Use] | None = None
        self._sources = {name: Source(value, (name,)) for name, value in model.named_parameters()}
        self._others: list[str] = []
        for place, layer in layers.items():
            trained = [own for own, value in layer.named_parameters() if value.requires_grad]
            names = {own: f"{place}.{own}" if place else own for own in trained}
            _replace(layer, partial(self._layer, layer, names))
            self._others += names.values() if type(layer) is not nn.Linear else ()
        dropouts = [layer for layer in model.modules() if isinstance(layer, nn.Dropout) and layer.p > 0]
        for layer in dropouts:
            _replace(layer, partial(self._dropout, layer))
        self.draws = bool(dropouts)

    def outputs(self, parameters: Vector, x: Tensor, generators: Sequence[torch.Generator] = ()) -> Tensor:
        """Return the outputs (M B, ...) of all models for examples (M, B, ...) of their own, differentiable."""
        self._numbers, self._generators = dict(parameters), tuple(generators)
        return self._model(_laid_out(x))

    def gradients(
        self,
        parameters: Vector,
        x: Tensor,  # (M, B, ...)
        y: Tensor,  # targets (M, B)
        objective: Objective,
        generators: Sequence[torch.Generator] = (),
    ) -> Vector:
        """Return each model's gradient of the objective of its batch, name -> (M, *shape)."""
        calls, found = self._backward(parameters, x, y, objective, generators)
        for call, error in calls:
            for local, name in call.names.items():
                errors, given = call.of_models(error, len(parameters[name]))
                own = torch.bmm(errors.mT, given) if local == "weight" else errors.sum(dim=1)
                found[name] = found[name] + own if name in found else own
        return {name: found[name] if name in found else torch.zeros_like(value) for name, value in parameters.items()}

    def descend(
        self,
        parameters: Vector,
        x: Tensor,
        y: Tensor,
        objective: Objective,
        rate: float,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        """Take one plain step in place; Linear weights move by the product itself, in half the time."""
        calls, others = self._backward(parameters, x, y, objective, generators)
        for call, error in calls:
            for local, name in call.names.items():
                errors, given = call.of_models(error, len(parameters[name]))
                if local == "weight":
                    parameters[name].baddbmm_(errors.mT, given, alpha=-rate)
                else:
                    parameters[name].sub_(errors.sum(dim=1), alpha=rate)
        for name, gradient in others.items():
            parameters[name].sub_(gradient, alpha=rate)

    def _backward(
        self, parameters: Vector, x: Tensor, y: Tensor, objective: Objective, generators: Sequence[torch.Generator]
    ) -> tuple[list[tuple["_LinearCall", Tensor]], Vector]:
        """Return Linear layers' calls with their outputs' gradients, and the gradients of all other parameters."""
        calls: list[_LinearCall] = []
        self._calls = calls
        try:
            with torch.enable_grad():
                others = {name: parameters[name].detach().requires_grad_() for name in self._others}
                total = objective(self.outputs(parameters | others, x, generators), y.flatten())
        finally:
            self._calls = None
        wanted = [*(call.output for call in calls), *map(get_gradient_edge, others.values())]
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        of_calls = [pair for pair in zip(calls, gradients, strict=False) if pair[1] is not None]
        of_others = zip(others, gradients[len(calls) :], strict=True)
        return of_calls, {name: value for name, value in of_others if value is not None}

    def operator(
        self,
        parameters: Vector,
        x: Tensor,  # (M, B, ...)
        y: Tensor,  # targets (M, B)
        loss: Loss,  # (outputs, targets) -> one loss an example
        chunk_bytes: int,
        generators: Sequence[torch.Generator] = (),
    ) -> StackedGradients | Entangled:
        """Return the per-example gradients of all models, for a mechanism, or why they cannot be computed so."""
        # Autograd follows outputs of layers only from numbers that have gradients; those are not computed.
        numbers = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        uses: list[Use] = []
        self._uses = uses
        try:
            with torch.enable_grad():
                losses = loss(self.outputs(numbers, x, generators), y.flatten())
        finally:
            self._uses = None
        check_losses(losses, y.numel())
        trained = {name: source.value for name, source in self._sources.items() if source.value.requires_grad}
        graph = Graph(losses.sum(), trained, uses)
        flat = gradients_of(self._model, graph, y.numel(), Memory(chunk_bytes, len(x)), Route())
        return flat if isinstance(flat, Entangled) else StackedGradients(flat, len(x))

    def operators(
        self, parameters: Vector, x: Tensor, y: Tensor, loss: Loss, chunk_bytes: int, sizes: Sequence[int]
    ) -> Iterator[GradientOperator]:
        """Return each model's per-example gradients, of as many of its first examples as ``sizes`` (M,) says."""
        gradients = self.operator(parameters, x, y, loss, chunk_bytes)
        if isinstance(gradients, Entangled):
            raise InputError(gradients.reason)
        return gradients.each(sizes)

    def _layer(self, layer: nn.Module, names: Mapping[str, str], x: Tensor) -> Tensor:
        own = {local: self._numbers[name] for local, name in names.items()}
        if len(own) < len(layer._parameters):
            models = len(next(iter(own.values())))
            frozen = ((local, value) for local, value in layer.named_parameters() if local not in own)
            own |= {local: value.expand(models, *value.shape) for local, value in frozen}
        value = STACKED_LAYERS[type(layer)](layer, x, own)
        if self._calls is not None and type(layer) is nn.Linear:
            value = value if value.requires_grad else value.requires_grad_()
            self._calls.append(_LinearCall(names, x.detach(), get_gradient_edge(value)))
        if self._uses is not None and (operation := LAYERS[type(layer)](layer, x)) is not None:
            sources = {local: self._sources[name] for local, name in names.items()}
            edge = get_gradient_edge(value)
            self._uses.append(Use(operation.detached(), sources, edge, None, 0, operation.input._version))
        return value

    def _dropout(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        """Drop what each model alone would: the same numbers of its own generator."""
        if not layer.training:
            return x
        masks = torch.empty_like(x, memory_format=torch.contiguous_format)
        for mask, generator in zip(masks.chunk(len(self._generators)), self._generators, strict=True):
            mask.bernoulli_(1 - layer.p, generator=generator)
        return x * masks.div_(1 - layer.p)


class MappedModel:
    """A network of any layers, whose numbers are given with every call, for M models at once (``torch.func.vmap``)."""

    def __init__(self, model: nn.Module) -> None:
        self._base = copy.deepcopy(model).train()

    def outputs(self, parameters: Vector, x: Tensor) -> Tensor:
        """Return every model's outputs (M, B, classes) for the same inputs (B, ...)."""
        with torch.no_grad():
            outputs: Tensor = vmap(self._outputs, in_dims=(0, None))(parameters, x)
        return outputs

    def gradients(self, parameters: Vector, x: Tensor, y: Tensor, objective: Objective) -> Vector:
        """As those of :class:`StackedModel`."""
        tracked = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        total = objective(vmap(self._outputs)(tracked, x).flatten(0, 1), y.flatten())
        gradients = torch.autograd.grad(total, tuple(tracked.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(tracked, gradients, strict=True))

    def descend(self, parameters: Vector, x: Tensor, y: Tensor, objective: Objective, rate: float) -> None:
        """Take one step of plain gradient descent in place."""
        for name, value in self.gradients(parameters, x, y, objective).items():
            parameters[name].sub_(value, alpha=rate)

    def operators(
        self, parameters: Vector, x: Tensor, y: Tensor, loss: Loss, chunk_bytes: int, sizes: Sequence[int]
    ) -> Iterator[GradientOperator]:
        """Return each model's per-example gradients, written out."""

        def one_loss(numbers: Vector, image: Tensor, label: Tensor) -> Tensor:
            return loss(self._outputs(numbers, image.unsqueeze(0)), label.unsqueeze(0)).squeeze(0)

        rows = vmap(vmap(grad(one_loss), in_dims=(None, 0, 0)))(parameters, x, y)
        for number, size in enumerate(sizes):
            yield DenseGradients({name: value[number, :size] for name, value in rows.items()}, "stacked models")

    def _outputs(self, parameters: Vector, x: Tensor) -> Tensor:
        return functional_call(self._base, parameters, (x,))


# What acts on each number alone does so on a stack, too.
_ELEMENTWISE = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh)


def is_chain(model: nn.Module) -> bool:
    """Whether a network is nothing but Flatten, then Linear and elementwise layers, each with weights of its own.

    A weight that is frozen, or shared by layers, makes it none: all that is trained has to be of one Linear layer each.
    """
    if type(model) is not nn.Sequential or any(_is_peculiar(module) for module in model.modules()):
        return False
    # Not named_children(), which leaves out a layer's second place.
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    kinds = [type(layer) for _, layer in layers if type(layer) not in _ELEMENTWISE]
    owned = [f"{name}.{own}" for name, layer in layers for own, _ in layer.named_parameters()]
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    return len(kinds) > 1 and kinds == [nn.Flatten] + [nn.Linear] * (len(kinds) - 1) and owned == trained


def _is_peculiar(module: nn.Module) -> bool:
    """Whether a layer does more than its kind says, flattens otherwise, or writes over what its neighbour keeps."""
    flattens = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1)
    return bool(flattens or module._forward_hooks or module._forward_pre_hooks or getattr(module, "inplace", False))


def stacked_model(model: nn.Module) -> StackedModel | Entangled:
    """Return a network as a stack, or say why its models have to be trained one after the other.

    Whether the network's own code does what it does alone is seen only where both are compared.
    """
    for what, names in (
        ("mixes the examples of a batch", coupled_layers(model)),
        ("keeps numbers of the examples", [name for name, _ in model.named_buffers()]),
        ("draws in another way than dropout", [name for name in dropout_layers(model) if not _is_dropout(model, name)]),
    ):
        if names:
            return Entangled(f"{names[0]} {what}")
    base = copied(model)
    layers = {name: layer for name, layer in base.named_modules() if _holds_trained(layer)}
    names = [name for name, value in base.named_parameters(remove_duplicate=False) if value.requires_grad]
    if problem := problem_of_model(base):
        return Entangled(problem)
    if len(names) > len([value for value in base.parameters() if value.requires_grad]):
        return Entangled("layers share a parameter")
    unknown = [name for name, layer in layers.items() if not _is_plain(layer)]
    if unknown:
        kind = type(layers[unknown[0]]).__name__
        return Entangled(f"{unknown[0] or 'the model'} ({kind}) has no rule for many models")
    return StackedModel(base, layers)


def _holds_trained(layer: nn.Module) -> bool:
    return any(value is not None and value.requires_grad for value in layer._parameters.values())


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer is of a kind that is known here, and nothing is hung on it that its kind does not have."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) in STACKED_LAYERS and not any(hooks) and "forward" not in vars(layer)


def _is_dropout(model: nn.Module, name: str) -> bool:
    layer = model.get_submodule(name)
    return type(layer) is nn.Dropout and not layer.inplace


def _laid_out(x: Tensor) -> Tensor:
    """Put examples (M, B, ...) in one batch (M B, ...); one model's images with channels last on a CPU, for speed."""
    batch = x.flatten(0, 1)
    if batch.ndim == 4 and len(x) == 1 and batch.device.type == "cpu":
        return batch.contiguous(memory_format=torch.channels_last)
    return batch


def _replace(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Have a layer compute something else; hooks see what it is given and returns."""
    object.__setattr__(layer, "forward", forward)


def _no_gradients(like: GradientOperator) -> DenseGradients:
    empty = {name: torch.zeros(0, *shape, dtype=like.dtype, device=like.device) for name, shape in like.shapes.items()}
    return DenseGradients(empty, "the batch is empty")
