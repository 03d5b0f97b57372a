"""The network as the adversary runs it, and the cheapest way to compute the gradients of many dummy batches.

Three routes give the same numbers. *ghost* keeps the inputs and output gradients of Linear layers and convolutions,
*vmap* writes out the gradients of any network, and ordinary autograd serves a single batch.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fedpriv.attacks.reconstruction.dummy_gradients.convolution import (
    Kept,
    by_patches,
    kernel_gradients,
    patches,
    run_convolution,
)
from fedpriv.attacks.reconstruction.dummy_gradients.factors import DummyFactor, DummyGradients, DummyOuter, Written
from fedpriv.attacks.reconstruction.results import AttackRefused, is_lack_of_memory
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied, coupled_layers
from fedpriv.gradients.ghost import Entangled, ghost_gradients
from fedpriv.gradients.operator import first_line

# Layers that write down what they get and give, from which the gradients of their parameters follow.
#
# The gradient of a Linear weight is the sum over positions of outer products of output gradient and input. What is
# written down stays in autograd's graph: what follows from it can be differentiated with respect to the dummy images.


@dataclass(frozen=True, eq=False)
class Entry:
    """What one layer got and gave."""

    name: str  # of the layer in the network
    layer: Any  # itself
    kept: Any  # what its rule needs of its input
    output: GradientEdge  # of what it gave, (R, ...) for R images; what follows may change that in place
    shape: torch.Size  # of the output


# A kernel's gradient is not written out where patches and errors have so many times fewer numbers.
FEWER = 4


class LayerRule(NamedTuple):
    """How a kind of layer runs, and what the gradients of its parameters are."""

    run: Callable[[Any, Tensor], tuple[Any, Tensor]]  # (layer, input) -> what is kept, and output, (R, ...) each
    # (layer, what was kept, gradients of the output (R, ...), (N, U)) -> the gradients of weight and bias of N rows of
    # U units; the R images are spread over the units in order
    factors: Callable[[Any, Any, Tensor, tuple[int, int]], tuple[DummyFactor, DummyFactor]]


def taped_forward(name: str, layer: nn.Module, entries: list[Entry]) -> Callable[[Tensor], Tensor]:
    """Return what a layer does, with a line in ``entries`` for each call."""

    def forward(x: Tensor) -> Tensor:
        kept, output = RULES[type(layer)].run(layer, x)
        entries.append(Entry(name, layer, kept, get_gradient_edge(output), output.shape))
        return output

    return forward


def _run(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, type(layer).forward(layer, x)


def _linear(layer: nn.Linear, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[DummyFactor, DummyFactor]:
    inputs = x.to(error.dtype).reshape(*units, -1, layer.in_features)
    errors = error.reshape(*units, -1, layer.out_features)
    return DummyOuter(inputs, errors, layer.weight.shape), Written(errors.sum(dim=2))


def _convolution(layer: Any, kept: Kept, error: Tensor, units: tuple[int, int]) -> tuple[DummyFactor, DummyFactor]:
    biases = _of_units(error.flatten(2).sum(dim=2), units)
    positions = len(error) // math.prod(units) * error[0, 0].numel()
    wide, tall = layer.weight[0].numel(), layer.out_channels
    if layer.groups == 1 and positions * (wide + tall) * FEWER < wide * tall:
        inputs = patches(kept).to(error.dtype).reshape(*units, -1, wide)
        errors = error.flatten(2).mT.reshape(*units, -1, tall)
        return DummyOuter(inputs, errors, layer.weight.shape), Written(biases)
    kernels = _of_units(kernel_gradients(kept, error).reshape(len(error), -1), units)
    return Written(kernels.reshape(*units, *layer.weight.shape)), Written(biases)


def _of_units(rows: Tensor, units: tuple[int, int]) -> Tensor:
    """The sums (N, U, n) over each unit's images of rows (R, n)."""
    each = rows.reshape(*units, -1, rows.shape[1])
    return each.squeeze(2) if each.shape[2] == 1 else each.sum(dim=2)


def _layer_norm(
    layer: nn.LayerNorm, x: Tensor, error: Tensor, units: tuple[int, int]
) -> tuple[DummyFactor, DummyFactor]:
    normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (*units, -1, *layer.normalized_shape)
    return Written((error * normal).reshape(shape).sum(dim=2)), Written(error.reshape(shape).sum(dim=2))


def _group_norm(
    layer: nn.GroupNorm, x: Tensor, error: Tensor, units: tuple[int, int]
) -> tuple[DummyFactor, DummyFactor]:
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
    weight, bias = (part.reshape(*x.shape[:2], -1).sum(dim=2) for part in (error * normal, error))
    shape = (*units, -1, layer.num_channels)
    return Written(weight.reshape(shape).sum(dim=2)), Written(bias.reshape(shape).sum(dim=2))


RULES: dict[type[nn.Module], LayerRule] = {
    nn.Conv1d: LayerRule(run_convolution, _convolution),
    nn.Conv2d: LayerRule(run_convolution, _convolution),
    nn.GroupNorm: LayerRule(_run, _group_norm),
    nn.LayerNorm: LayerRule(_run, _layer_norm),
    nn.Linear: LayerRule(_run, _linear),
}


Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> losses (B,)."""

twice_differentiable = partial(sdpa_kernel, SDPBackend.MATH)
"""A context, or a decorator, in which attention uses the only kernel that torch can differentiate twice."""


class _SecondDerivatives(TorchFunctionMode):
    """Within this context functions of which torch lacks the second derivative are computed by others that have it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_hardsigmoid if func is F.hardsigmoid else func)(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    made = F.hardtanh(input + 3, 0.0, 6.0) / 6
    return input.copy_(made) if inplace else made


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy (B,) of logits with label probabilities, both (B, classes)."""
    return -(labels * F.log_softmax(logits, dim=1)).sum(dim=1)


class Network:
    """A network as the adversary runs it: no dropout, BatchNorm with the statistics of the dummy batch itself."""

    def __init__(self, model: nn.Module, loss: Loss = soft_cross_entropy) -> None:
        # Parameters that are not trained do not travel; they are part of the public architecture.
        self.names = tuple(name for name, value in model.named_parameters() if value.requires_grad)
        self.size = sum(value.numel() for value in model.parameters() if value.requires_grad)
        frozen = copied(model).eval()
        self.is_plain = loss is soft_cross_entropy and is_plain(model)
        self.coupled = coupled_layers(frozen)  # names of the layers that mix the examples of a batch
        # Whether it raises on a single example, of which each channel has one number.
        self.needs_batches = any(isinstance(layer, nn.BatchNorm1d) for layer in frozen.modules())
        replace_all_batch_norm_modules_(frozen)
        self.trainable = copy.deepcopy(frozen)  # with parameters that ask for derivatives; not to be changed
        self._model = frozen.requires_grad_(False)
        first = next(frozen.parameters())
        self.device, self.dtype = first.device, first.dtype
        self._loss = loss
        self._alone = _patched(frozen)
        self._places = _places(self._alone, self.names)
        self._entries: list[Entry] = []
        self._taped = _taped(frozen, self._entries)
        # (shape of an image, classes) -> why the ghost route is closed, once that was tried
        self.obstacles: dict[tuple[torch.Size, int], str] = {}
        self._casts: dict[torch.dtype, Network] = {self.dtype: self}
        self._is_unmappable = False  # whether torch cannot map it over batches, once that was tried

    def cast(self, dtype: torch.dtype) -> "Network":
        """Return the same network with parameters and buffers of another floating type."""
        if dtype not in self._casts:
            self._casts[dtype] = Network(copy.deepcopy(self.trainable).to(dtype), self._loss)
        return self._casts[dtype]

    def widened(self) -> "Network":
        """Return the same network in float64, where its device has that."""
        return self.cast(torch.float32 if self.device.type == "mps" else torch.float64)

    @property
    def model(self) -> nn.Module:
        """The network itself, with the parameters that it came with; not to be changed."""
        return self._model

    def logits(self, parameters: Vector, images: Tensor) -> Tensor:
        """Run normalised images (B, C, H, W) through the network with other parameters: (B, classes)."""
        with _SecondDerivatives():
            logits: Tensor = functional_call(self._model, parameters, (images,))
        return logits

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss (B,) of each example, from logits and label probabilities, both (B, classes)."""
        return self._loss(logits, labels)

    def loss(self, parameters: Vector, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of images (B, C, H, W) with label probabilities (B, classes)."""
        return self._loss(self.logits(parameters, images), labels).mean()

    def loss_alone(self, parameters: Vector, images: Tensor, labels: Tensor) -> Tensor:
        """As :meth:`loss`, of one batch on its own (no ``vmap``): parameters are put in place in the least time."""
        for layer, local, name in self._places:
            layer._parameters[local] = parameters[name]  # type: ignore[assignment]
        with _SecondDerivatives():
            logits = self._alone(images)
        return self._loss(logits, labels).mean()

    def follow(self, parameters: Vector, images: Tensor) -> tuple[Tensor, list[Entry]]:
        """Run images (R, C, H, W): logits (R, classes), and what each layer with a rule got and gave."""
        self._entries.clear()
        try:
            with _SecondDerivatives():
                logits: Tensor = functional_call(self._taped, parameters, (images,))
            return logits, list(self._entries)
        finally:
            self._entries.clear()

    def gradients(
        self,
        parameters: Vector,
        images: Tensor,
        labels: Tensor,
        *,
        shared: bool,
        each: bool,
        of: Sequence[str] | None = None,
    ) -> Vector:
        """Gradients of the loss with respect to parameters, all or some, for many batches, written out (``vmap``).

        They are (N, B, *shape) of the examples where ``each``, else (N, *shape) of the batches' means. Parameters are
        (*shape,) where ``shared``, else (N, *shape); images (N, B, C, H, W), normalised; labels probabilities
        (N, B, classes).
        """
        gradient = partial(self._gradient, of=parameters if of is None else of)
        of_batch = vmap(partial(_of_one, gradient), in_dims=(None, 0, 0)) if each else gradient
        if not self._is_unmappable:
            try:
                return vmap(of_batch, in_dims=(None if shared else 0, 0, 0))(parameters, images, labels)
            except Exception as error:
                if is_lack_of_memory(error):
                    raise
        try:
            gradients = self._one_by_one(parameters, images, labels, shared=shared, each=each)
        except (RuntimeError, ValueError) as error:
            if is_lack_of_memory(error):
                raise
            reason = first_line(error)
            raise AttackRefused(f"gradients of dummy images through this network fail: {reason}") from error
        self._is_unmappable = True  # such as one that decides by its numbers
        return gradients if of is None else {name: gradients[name] for name in of}

    def _one_by_one(self, parameters: Vector, images: Tensor, labels: Tensor, *, shared: bool, each: bool) -> Vector:
        """As :meth:`gradients`, by ordinary autograd."""
        batches = []
        for row in range(len(images)):
            own = parameters if shared else {name: value[row] for name, value in parameters.items()}
            parts = zip(
                *(values[row].split(1 if each else len(values[row])) for values in (images, labels)), strict=True
            )
            made = [plain_gradients(self.loss, own, *part) for part in parts]
            batches.append({name: torch.stack([one[name] for one in made]) for name in made[0]} if each else made[0])
        return {name: torch.stack([one[name] for one in batches]) for name in batches[0]}

    def _gradient(self, parameters: Vector, images: Tensor, labels: Tensor, of: Iterable[str]) -> Vector:
        def loss(some: Vector) -> Tensor:
            return self.loss({**parameters, **some}, images, labels)

        return grad(loss)({name: parameters[name] for name in of})


def _of_one(gradient: Callable[..., Vector], parameters: Vector, image: Tensor, label: Tensor) -> Vector:
    return gradient(parameters, image[None], label[None])


def _places(model: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str, str]]:
    """Each place of a network that holds one of the parameters: layer, name in it, the parameter's name."""
    named = {id(value): name for name, value in model.named_parameters() if name in names}
    return [
        (layer, local, named[id(value)])
        for layer in model.modules()
        for local, value in layer._parameters.items()
        if id(value) in named
    ]


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the network's layers that hold the same parameters and buffers."""
    return copy.deepcopy(model, {id(value): value for value in (*model.parameters(), *model.buffers())})


def _patched(model: nn.Module) -> nn.Module:
    """A copy of the network, with the same parameters, for a few images: see :func:`by_patches`."""
    patched = _twin(model)
    for layer in patched.modules():
        if (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        ):
            layer.forward = by_patches(layer)  # type: ignore[assignment]
    return patched


def _taped(model: nn.Module, entries: list[Entry]) -> nn.Module:
    """A copy of the network, with the same parameters, whose layers write down what they get and give."""
    taped = _twin(model)
    for name, layer in taped.named_modules():
        if type(layer) in RULES:
            layer.forward = taped_forward(name, layer, entries)
    return taped


KINKED = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


class ReluMode(TorchFunctionMode, ABC):
    """Within this context every ReLU, of a layer or a function, is :meth:`relu`."""

    @abstractmethod
    def relu(self, inputs: Tensor) -> Tensor:
        """Return what stands in for the ReLU of these inputs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in KINKED:
            return self.relu(args[0] if args else (kwargs or {})["input"])
        return func(*args, **(kwargs or {}))


class _Watched(ReluMode):
    """Within this context what ReLUs get is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    @override
    def relu(self, inputs: Tensor) -> Tensor:
        self.inputs.append(inputs.clone())
        return torch.relu(inputs)


def kink_inputs(network: Network, parameters: Vector, images: Tensor) -> list[Tensor]:
    """What the ReLUs get for images (R, C, H, W), tensors (R, ...) in the order of the calls; empty without ReLUs."""
    with torch.no_grad(), _Watched() as watched:
        network.logits(parameters, images)
    return watched.inputs


# Up to so many parameters the gradient of a single dummy batch is computed by ordinary autograd, without any batching.
SMALL = 2**18
PROBE = 20240301  # the seed of the images and parameters that a network is tried with; it decides nothing else
PROBED = 11  # images in one such batch: a prime that is no usual length of an axis
COMPARED = 3  # of them are also gone through one at a time
TOLERANCE = 1e-6  # of gradients in float64, relative to the largest number of a tensor


def dummy_gradients(
    network: Network,
    parameters: Vector,
    images: Tensor,  # (N, B, C, H, W), normalised
    labels: Tensor,  # probabilities (N, B, classes)
    *,
    each: bool,
    often: bool = True,  # whether to try which routes are open, which takes seconds
) -> DummyGradients:
    """Gradients of the loss for many dummy batches with the same parameters, by the route that is open."""
    alone = len(images) * (images.shape[1] if each else 1) == 1
    if alone and (network.size <= SMALL or not often):
        return plain_dummies(network, parameters, images, labels)
    if not ghost_obstacle(network, images.shape[2:], labels.shape[2]):
        return ghost_dummies(network, parameters, images, labels, each=each)
    return written_dummies(network, parameters, images, labels, each=each)


def ghost_obstacle(network: Network, shape: torch.Size, classes: int) -> str:
    """Try on random images (C, H, W) why gradients cannot be computed layer by layer; empty: they can."""
    key = (shape, classes)
    if key not in network.obstacles:
        network.obstacles[key] = _obstacle(network, shape, classes)
    return network.obstacles[key]


def written_dummies(
    network: Network, parameters: Vector, images: Tensor, labels: Tensor, *, each: bool
) -> DummyGradients:
    """Compute the gradients of (N, B, C, H, W) by ``vmap``: N * U * K numbers."""
    gradients = network.gradients(parameters, images, labels, shared=True, each=each)
    return DummyGradients({name: Written(value if each else value[:, None]) for name, value in gradients.items()})


def plain_dummies(network: Network, parameters: Vector, images: Tensor, labels: Tensor) -> DummyGradients:
    """Compute the gradient of one dummy batch (1, B, C, H, W) by ordinary autograd, the cheapest for small networks."""
    own = {name: parameters[name].detach() for name in network.names}
    gradients = plain_gradients(network.loss_alone, own, images[0], labels[0])
    joined = torch.cat([value.reshape(-1) for value in gradients.values()])
    factors = {name: Written(value.view(1, 1, *value.shape)) for name, value in gradients.items()}
    return DummyGradients(factors, Written(joined.view(1, 1, -1)))


def plain_gradients(
    loss: Callable[[Vector, Tensor, Tensor], Tensor], parameters: Vector, images: Tensor, labels: Tensor
) -> Vector:
    """The gradient of one batch by ordinary autograd, which can be differentiated again."""
    with torch.enable_grad():
        leaves = {
            name: value if value.requires_grad else value.detach().requires_grad_()
            for name, value in parameters.items()
        }
        gradients = torch.autograd.grad(
            loss(leaves, images, labels),
            list(leaves.values()),
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    return dict(zip(leaves, gradients, strict=True))


def ghost_dummies(
    network: Network,
    parameters: Vector,
    images: Tensor,  # (N, B, C, H, W), normalised
    labels: Tensor,  # probabilities (N, B, classes)
    *,
    each: bool,
) -> DummyGradients:
    """Compute the gradients layer by layer; right for networks whose ``route`` says so."""
    rows, examples = images.shape[:2]
    units = (rows, examples if each else 1)
    # Errors are derivatives with respect to the layers' outputs, which are in a graph only if their images are.
    images = images if images.requires_grad else images.detach().requires_grad_()
    with torch.enable_grad():
        logits, entries = network.follow(parameters, images.flatten(0, 1))
        total = network.losses(logits.to(images.dtype), labels.flatten(0, 1)).sum()
        trained = [entry for entry in entries if not set(_names(entry)).isdisjoint(network.names)]
        outputs = [entry.output for entry in trained]
        mean = total if each else total / examples
        errors = torch.autograd.grad(mean, outputs, create_graph=True, allow_unused=True)
        factors: dict[str, DummyFactor] = {}
        for entry, error in zip(trained, errors, strict=True):
            felt = logits.new_zeros(entry.shape) if error is None else error
            made = RULES[type(entry.layer)].factors(entry.layer, entry.kept, felt.to(images.dtype), units)
            factors |= dict(zip(_names(entry), made, strict=True))
    unused = {name: parameters[name] for name in network.names if name not in factors}
    factors |= {name: Written(value.new_zeros(*units, *value.shape)) for name, value in unused.items()}
    return DummyGradients({name: factors[name] for name in network.names})


def _names(entry: Entry) -> tuple[str, str]:
    prefix = f"{entry.name}." if entry.name else ""
    return f"{prefix}weight", f"{prefix}bias"


def _obstacle(network: Network, shape: torch.Size, classes: int) -> str:
    if network.coupled:
        return f"{network.coupled[0]} mixes the examples of a batch"
    if network.is_plain:
        return ""  # the trial would take as long as 30 steps
    network = network.widened()
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(PROBED, *shape, generator=generator).to(network.device, network.dtype)
    labels = torch.randn(PROBED, classes, generator=generator).softmax(dim=1).to(network.device, network.dtype)
    model = copy.deepcopy(network.trainable)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator).to(value)
            value.add_(noise, alpha=0.1 if value.requires_grad else 0.0)
    try:
        gradients = ghost_gradients(model, network.losses, images, labels)
    except RuntimeError as error:
        return f"the network cannot be followed: {first_line(error)}"
    if isinstance(gradients, Entangled):
        return gradients.reason
    for name, route in gradients.routes.items():
        method, _, kind = route.partition(": ")
        if method == "dense" or (method == "ghost" and kind not in {layer.__name__ for layer in RULES}):
            return f"{name or 'the model'} ({kind}) has no rule"
    try:
        return _disagreement(network, model, images[:COMPARED], labels[:COMPARED])
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"the network cannot be differentiated twice: {first_line(error)}"


def is_plain(model: nn.Module) -> bool:
    """Whether a model is nothing but layers of torch one after the other, whose gradients follow layer by layer."""
    layers = list(model._modules.values())
    counts = (len(list(model.named_parameters(remove_duplicate=same))) for same in (True, False))
    return (
        type(model) is nn.Sequential
        and all(map(_is_simple, [model, *layers]))
        and all(type(layer) in _SIMPLE for layer in layers)
        and len({id(layer) for layer in layers}) == len(layers)
        and len(set(counts)) == 1
    )


def _is_simple(layer: nn.Module | None) -> bool:
    """Whether a layer's options and hooks leave each example alone and what is kept as it is."""
    if layer is None or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    usual = {"inplace": False, "padding_mode": "zeros", "start_dim": 1, "return_indices": False}
    return not any(hooks) and all(getattr(layer, name, value) == value for name, value in usual.items())


_SIMPLE = (nn.Linear, nn.Conv2d, nn.ReLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten)


def _disagreement(network: Network, model: nn.Module, images: Tensor, labels: Tensor) -> str:
    """Compare the gradients of single images with those of ordinary autograd; the reason if they differ."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    single, targets = images[:, None], labels[:, None]
    ghost = ghost_dummies(network, parameters, single, targets, each=False).rows()
    alone = [plain_dummies(network, parameters, single[[k]], targets[[k]]).rows() for k in range(len(images))]
    for name, value in ghost.items():
        wanted = torch.cat([rows[name] for rows in alone]).detach()
        scale = float(wanted.abs().max())
        tolerance = (TOLERANCE if wanted.dtype == torch.float64 else 1e-3) * scale
        if not float((value.detach() - wanted).abs().max()) <= tolerance:
            return f"the gradients of {name} do not follow from its layer's input and output alone"
    return ""
