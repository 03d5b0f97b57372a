"""A network as the adversary runs it."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedpriv.attacks.reconstruction.dummy_gradients.convolution import by_patches
from fedpriv.attacks.reconstruction.dummy_gradients.layers import RULES, Entry, taped_forward
from fedpriv.attacks.reconstruction.errors import AttackRefused, is_lack_of_memory
from fedpriv.gradients import Vector
from fedpriv.gradients.coupled import coupled_layers
from fedpriv.gradients.operator import first_line

__all__ = ["Loss", "Network", "soft_cross_entropy", "twice_differentiable"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> losses (B,)."""

twice_differentiable = partial(sdpa_kernel, SDPBackend.MATH)
"""A context, or a decorator, in which attention uses the only kernel that torch can differentiate twice."""


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy (B,) of logits with label probabilities, both (B, classes)."""
    return -(labels * F.log_softmax(logits, dim=1)).sum(dim=1)


class Network:
    """A network as the adversary runs it: no dropout, BatchNorm with the statistics of the dummy batch itself.

    Args:
        model: maps normalised images (B, C, H, W) to logits (B, classes); it is copied, not changed.
        loss: what the clients minimise, for label probabilities.

    Attributes:
        names: of the trained parameters, in order. Those that are not trained do not travel; they are part of the
            public architecture.
        size: K, their numbers.
        device: where they are.
        dtype: of them.
        coupled: the names of layers that mix the examples of a batch.
        trainable: the network itself with parameters that ask for derivatives; not to be changed.
        obstacles: (shape of an image, classes) -> why the ghost route is closed, once that was tried (see ``routes``).
    """

    def __init__(self, model: nn.Module, loss: Loss = soft_cross_entropy) -> None:
        self.names = tuple(name for name, value in model.named_parameters() if value.requires_grad)
        self.size = sum(value.numel() for value in model.parameters() if value.requires_grad)
        frozen = copy.deepcopy(model).eval()
        self.coupled = coupled_layers(frozen)
        replace_all_batch_norm_modules_(frozen)
        self.trainable = copy.deepcopy(frozen)
        self._model = frozen.requires_grad_(False)
        first = next(frozen.parameters())
        self.device, self.dtype = first.device, first.dtype
        self._loss = loss
        self._alone = _patched(frozen)
        self._places = _places(self._alone, self.names)
        self._entries: list[Entry] = []
        self._taped = _taped(frozen, self._entries)
        self.obstacles: dict[tuple[torch.Size, int], str] = {}
        self._casts: dict[torch.dtype, Network] = {self.dtype: self}

    def cast(self, dtype: torch.dtype) -> "Network":
        """Return the same network with parameters and buffers of another floating type."""
        if dtype not in self._casts:
            self._casts[dtype] = Network(copy.deepcopy(self.trainable).to(dtype), self._loss)
        return self._casts[dtype]

    @property
    def model(self) -> nn.Module:
        """The network itself, with the parameters that it came with; not to be changed."""
        return self._model

    def logits(self, parameters: Vector, images: Tensor) -> Tensor:
        """Run normalised images (B, C, H, W) through the network with other parameters: (B, classes)."""
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
        return self._loss(self._alone(images), labels).mean()

    def follow(self, parameters: Vector, images: Tensor) -> tuple[Tensor, list[Entry]]:
        """Run images (R, C, H, W): logits (R, classes), and what each layer with a rule got and gave."""
        self._entries.clear()
        try:
            logits: Tensor = functional_call(self._taped, parameters, (images,))
            return logits, list(self._entries)
        finally:
            self._entries.clear()

    def gradients(self, parameters: Vector, images: Tensor, labels: Tensor, *, shared: bool, each: bool) -> Vector:
        """Gradients of the loss with respect to the parameters, for many batches, written out (``vmap``).

        Args:
            parameters: of shape (*shape,) where ``shared``, else (N, *shape).
            images: (N, B, C, H, W), normalised.
            labels: probabilities (N, B, classes).
            shared: whether all batches use the same parameters.
            each: whether to return each example's own gradient.

        Returns:
            Tensors (N, B, *shape) of the examples where ``each``, else (N, *shape) of the batches' means.

        Raises:
            AttackRefused: the network cannot be differentiated this way.
        """
        of_batch = vmap(self._gradient_of_one, in_dims=(None, 0, 0)) if each else self._gradient
        try:
            gradients: Vector = vmap(of_batch, in_dims=(None if shared else 0, 0, 0))(parameters, images, labels)
        except (RuntimeError, ValueError) as error:
            if is_lack_of_memory(error):
                raise
            reason = first_line(error)
            raise AttackRefused(f"gradients of dummy images through this network fail: {reason}") from error
        return gradients

    def _gradient(self, parameters: Vector, images: Tensor, labels: Tensor) -> Vector:
        gradient: Vector = grad(self.loss)(parameters, images, labels)
        return gradient

    def _gradient_of_one(self, parameters: Vector, image: Tensor, label: Tensor) -> Vector:
        return self._gradient(parameters, image[None], label[None])


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
