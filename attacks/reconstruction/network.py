"""A network as the adversary runs it, and which way the gradients of its dummy images are had."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap

from attacks.reconstruction.convolution import by_patches
from attacks.reconstruction.dummies import DummyGradients, ghost_dummies, plain_dummies, written_dummies
from attacks.reconstruction.errors import AttackRefused
from attacks.reconstruction.layers import RULES, Entry, taped_forward
from fedpriv.gradients import Vector
from fedpriv.gradients.ghost import Entangled, ghost_gradients
from fedpriv.models import coupled_layers

__all__ = ["Loss", "Network", "Route", "soft_cross_entropy"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> losses (B,)."""

# Up to so many parameters the gradient of a single dummy batch is had by ordinary autograd, without any batching.
SMALL = 2**18
PROBE = 20240301  # the seed of the images and parameters that a network is tried with; it decides nothing else
PROBED = 11  # images in one such batch: a prime that is no usual length of an axis
COMPARED = 3  # of them are also gone through one at a time
TOLERANCE = 1e-6  # of gradients in float64, relative to the largest number of a tensor


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy (B,) of logits with label probabilities, both (B, classes)."""
    return -(labels * F.log_softmax(logits, dim=1)).sum(dim=1)


@dataclass(frozen=True)
class Route:
    """How gradients of dummy images are had.

    Attributes:
        ghost: layer by layer from inputs and output gradients; else written out with ``vmap``.
        reason: why not the ghost route; empty where it is taken.
    """

    ghost: bool
    reason: str


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
    """

    def __init__(self, model: nn.Module, loss: Loss = soft_cross_entropy) -> None:
        self.names = tuple(name for name, value in model.named_parameters() if value.requires_grad)
        self.size = sum(value.numel() for value in model.parameters() if value.requires_grad)
        frozen = copy.deepcopy(model).eval()
        self._coupled = coupled_layers(frozen)
        replace_all_batch_norm_modules_(frozen)
        self._trained = copy.deepcopy(frozen)
        self._model = frozen.requires_grad_(False)
        first = next(frozen.parameters())
        self.device, self.dtype = first.device, first.dtype
        self._loss = loss
        self._alone = _patched(frozen)
        self._places = _places(self._alone, self.names)
        self._entries: list[Entry] = []
        self._taped = _taped(frozen, self._entries)
        self._routes: dict[tuple[torch.Size, int], Route] = {}
        self._casts: dict[torch.dtype, Network] = {self.dtype: self}

    def cast(self, dtype: torch.dtype) -> "Network":
        """Return the same network with parameters and buffers of another floating type."""
        if dtype not in self._casts:
            self._casts[dtype] = Network(copy.deepcopy(self._trained).to(dtype), self._loss)
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

    def dummy_gradients(
        self,
        parameters: Vector,
        images: Tensor,
        labels: Tensor,
        *,
        each: bool,
        autocast: torch.dtype | None = None,
    ) -> DummyGradients:
        """Gradients of the loss for many dummy batches with the same parameters, by the route that is open.

        Args:
            parameters: of the network, shared by all rows.
            images: (N, B, C, H, W), normalised.
            labels: probabilities (N, B, classes).
            each: whether each example is a unit; else the mean over the batch is the only one.
            autocast: the type in which the network itself runs, where it is not that of the parameters; the ghost route
                only, ``vmap`` does without.

        Raises:
            AttackRefused: the network cannot be differentiated this way.
        """
        alone = len(images) * (images.shape[1] if each else 1) == 1
        if alone and autocast is None and self.size <= SMALL:
            return plain_dummies(self, parameters, images, labels)
        if self.route(images.shape[2:], labels.shape[2]).ghost:
            return ghost_dummies(self, parameters, images, labels, each=each, autocast=autocast)
        return written_dummies(self, parameters, images, labels, each=each)

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
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise AttackRefused(f"gradients of dummy images through this network fail: {reason}") from error
        return gradients

    def route(self, shape: torch.Size, classes: int) -> Route:
        """Find out, by trying it, which way gradients of images (C, H, W) can be had.

        The ghost route needs every parameter to be used once, by its own Linear or convolution, and every image to go
        through on its own. That is read off what the network does with random images and parameters, and the numbers
        are compared with those of ordinary autograd, one image at a time.
        """
        key = (shape, classes)
        if key not in self._routes:
            reason = self._obstacle(shape, classes)
            self._routes[key] = Route(not reason, reason)
        return self._routes[key]

    def _gradient(self, parameters: Vector, images: Tensor, labels: Tensor) -> Vector:
        gradient: Vector = grad(self.loss)(parameters, images, labels)
        return gradient

    def _gradient_of_one(self, parameters: Vector, image: Tensor, label: Tensor) -> Vector:
        return self._gradient(parameters, image[None], label[None])

    def _obstacle(self, shape: torch.Size, classes: int) -> str:
        """Why the ghost route is closed; empty if it is open."""
        if self._coupled:
            return f"{self._coupled[0]} mixes the examples of a batch"
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        network = self.cast(wide)
        generator = torch.Generator().manual_seed(PROBE)
        images = torch.randn(PROBED, *shape, generator=generator).to(self.device, wide)
        labels = torch.randn(PROBED, classes, generator=generator).softmax(dim=1).to(self.device, wide)
        model = copy.deepcopy(network._trained)
        with torch.no_grad():
            for value in model.parameters():
                noise = torch.randn(value.shape, generator=generator).to(value)
                value.add_(noise, alpha=0.1 if value.requires_grad else 0.0)
        try:
            found = ghost_gradients(model, self._loss, images, labels)
        except RuntimeError as error:
            return f"the network cannot be followed: {str(error).strip().splitlines()[0]}"
        if isinstance(found, Entangled):
            return found.reason
        for name, route in found.routes.items():
            method, _, kind = route.partition(": ")
            if method == "dense" or (method == "ghost" and kind not in {layer.__name__ for layer in RULES}):
                return f"{name or 'the model'} ({kind}) has no rule"
        try:
            return _disagreement(network, model, images[:COMPARED], labels[:COMPARED])
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return f"the network cannot be differentiated twice: {str(error).strip().splitlines()[0]}"


def _disagreement(network: Network, model: nn.Module, images: Tensor, labels: Tensor) -> str:
    """Compare the gradients of single images with those of ordinary autograd; the reason if they differ."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    single, targets = images[:, None], labels[:, None]
    found = ghost_dummies(network, parameters, single, targets, each=False).rows()
    alone = [plain_dummies(network, parameters, single[[k]], targets[[k]]).rows() for k in range(len(images))]
    for name, value in found.items():
        wanted = torch.cat([rows[name] for rows in alone]).detach()
        scale = float(wanted.abs().max())
        tolerance = (TOLERANCE if wanted.dtype == torch.float64 else 1e-3) * scale
        if not float((value.detach() - wanted).abs().max()) <= tolerance:
            return f"the gradients of {name} do not follow from its layer's input and output alone"
    return ""


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
