"""What a convolution got of one example, from the gradients of weights alone, up to a factor.

The gradient of a convolution with fewer positions than channels has a rank of as many as there are positions, and its
rows span the patches of the input. Patches overlap, and those at the border hold zeros: with a stride of 1, one input
alone fits. With a larger stride its shifts fit too. Which of their sums it was, the input of the next convolution
tells, since normalisation and bias change a channel by a factor and a summand, and ReLU leaves what is positive.
Nothing is searched for: both steps are eigenvectors, and a gap between eigenvalues proves that there is no other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.gradients import Vector

RANK = 1e-4  # of the least singular value of the patches: what is below comes from rounding
FITS = 1e-4  # share of an input's patches that may lie outside their span
APART = 1e-3  # the best of all sums explains so much better than the next
VECTORS = 6  # of the inputs that fit, whose shifts span them all
MOST = 256  # positions; the search is in a space of their square
POSITIVE = 1e-3  # of the largest number: what is above did pass a ReLU


@dataclass(frozen=True, eq=False)
class Activation:
    """What a convolution got, up to a factor."""

    layer: str  # its name
    values: Tensor  # (C, H, W)

    @property
    def apart(self) -> float:
        """The share of its square that is not that of its channels' means."""
        return float(
            (self.values - self.values.mean(dim=(1, 2), keepdim=True)).square().sum() / self.values.square().sum()
        )


@dataclass(frozen=True, eq=False)
class _Called:
    """A convolution as the network calls it."""

    name: str
    layer: nn.Conv2d
    given: torch.Size  # (C, H, W)
    made: torch.Size
    gradient: Tensor

    @property
    def patches(self) -> dict[str, Any]:
        return {name: getattr(self.layer, name) for name in ("kernel_size", "dilation", "padding", "stride")}


def read_activation(scene: Scene, victim: Victim) -> Activation | None:
    """Return what the first convolution got of which that can be told; ``None``: of none."""
    if victim.model.examples != 1 or victim.model.training is not None or max(victim.noise.variances, default=0.0):
        return None
    calls = _calls(scene, victim)
    for number, call in enumerate(calls):
        found = _inputs(call)
        if found is not None and len(found) > 1:
            found = _chosen(call, found, calls[number + 1 :])
        if found is not None:
            return Activation(call.name, found[0].to(scene.mean))
    return None


def _calls(scene: Scene, victim: Victim) -> list[_Called]:
    """The convolutions with overlapping patches, in the order of their calls."""
    model, calls = scene.network.model, []

    def write(name: str, layer: nn.Conv2d) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls.append(_Called(name, layer, inputs[0].shape[1:], output.shape[1:], victim.gradient[f"{name}.weight"]))

        return layer.register_forward_hook(hook)

    handles = [
        write(name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Conv2d and f"{name}.weight" in victim.gradient
        if layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        if all(size > step for size, step in zip(layer.kernel_size, layer.stride, strict=True))
    ]
    try:
        with torch.no_grad():
            scene.network.logits(victim.parameters, torch.zeros(1, *scene.shape).to(scene.mean))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _inputs(call: _Called) -> Tensor | None:
    """An orthonormal basis (K, C, H, W) of the inputs whose patches the gradient's rows span."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    matrix, positions = call.gradient.flatten(1).float().cpu(), call.made[1:].numel()
    if not 1 < positions < min(*matrix.shape, MOST + 1):
        return None
    _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
    if values[positions] > RANK * values[positions - 1]:
        return None
    span = rows[:positions]
    ones = torch.ones(1, *call.given)
    shared = F.fold(F.unfold(ones, **call.patches), call.given[1:], **call.patches).clamp(min=1)

    def image(mixing: Tensor) -> Tensor:
        return F.fold((mixing @ span).mT[None], call.given[1:], **call.patches) / shared

    def nearest(mixing: np.ndarray) -> np.ndarray:
        """The patches of an image are those that agree where they overlap."""
        mixed = torch.from_numpy(mixing).view(positions, positions)
        agreed: Tensor = F.unfold(image(mixed), **call.patches)[0].mT @ span.mT
        return np.asarray(agreed.flatten())

    strided = max(call.layer.stride) > 1
    operator = LinearOperator((positions**2,) * 2, matvec=nearest, dtype=np.float32)
    begin = np.random.default_rng(0).standard_normal(positions**2).astype(np.float32)
    fits, mixings = eigsh(operator, k=VECTORS if strided else 2, which="LA", v0=begin, tol=1e-6)
    images = [
        image(torch.from_numpy(mixing.copy()).view(positions, positions)) for mixing in mixings.T[fits > 1 - FITS]
    ]
    if not images or (not strided and len(images) > 1):
        return None
    return torch.cat(images) if not strided else _shifts(torch.cat(images), call)


def _shifts(images: Tensor, call: _Called) -> Tensor:
    """An orthonormal basis of the images and their shifts by strides, one for each position."""
    (height, width), (down, across) = call.given[1:], call.layer.stride
    shifted = torch.cat([
        F.pad(images, (left, 0, top, 0))[:, :, :height, :width]
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]).flatten(1)  # fmt: skip
    squares, mixings = torch.linalg.eigh((shifted @ shifted.mT).double())
    kept = slice(-call.made[1:].numel(), None)
    basis = torch.linalg.qr(shifted.mT @ (mixings[:, kept] / squares[kept].sqrt()).float()).Q
    inputs: Tensor = basis.mT.unflatten(1, call.given)
    return inputs


def _chosen(call: _Called, basis: Tensor, later: Sequence[_Called]) -> Tensor | None:
    """The one sum of a basis that the input of the next convolution goes with."""
    following = next((other for other in later if other.given == call.made), None)
    found = None if following is None else _inputs(following)
    if found is None or len(found) != 1:
        return None
    wanted = (found[0] * found.sum().sign()).flatten(1).double()[:, :, None]  # (channels, positions, 1)
    passed = (wanted > POSITIVE * wanted.max()).double()
    made = F.conv2d(basis, call.layer.weight.float().cpu(), None, call.layer.stride, call.layer.padding)
    made = made.flatten(2).permute(1, 2, 0).double() * passed
    # What a factor and a summand for each channel explain is taken off; the rest is zero for the sum in question.
    known = torch.cat([wanted * passed, passed], dim=2)
    along = known.mT @ made
    left = (made.mT @ made - along.mT @ torch.linalg.pinv(known.mT @ known, hermitian=True) @ along).sum(dim=0)
    misfits, mixings = torch.linalg.eigh(left)
    if misfits[0] > APART * misfits[1]:
        return None
    return torch.einsum("k,kchw->chw", mixings[:, 0].float(), basis)[None]


@dataclass(frozen=True, eq=False)
class Contrast:
    """What tells how strong an image is where a first convolution without bias before a GroupNorm hides it.

    It does but for the norm's epsilon: along a group's weights the gradient is that of the norm's own factors, times
    epsilon over the group's variance and epsilon.
    """

    first: nn.Conv2d
    weight: Tensor
    groups: int
    epsilon: float
    inner: Tensor  # (groups,), products of the convolution's weights and their gradients
    whole: Tensor  # (groups,), the same of the norm's

    def restored(self, images: Tensor) -> Tensor:
        """Return images (1, C, H, W) with the contrast that fits the gradient best."""
        with torch.no_grad():
            made = F.conv2d(images.double(), self.weight, None, self.first.stride, self.first.padding)
        parts = self.inner * made.view(self.groups, -1).var(dim=1, unbiased=False)
        told = float(parts @ parts)
        if told == 0:  # an image of one colour
            return images
        square = self.epsilon * float((self.whole - self.inner) @ parts) / told
        return images * math.sqrt(max(square, 0.0))


def read_contrast(network: Network, parameters: Vector, gradient: Vector) -> Contrast | None:
    """Return what tells the contrast; ``None``: the features do."""
    layers = [(name, layer) for name, layer in network.model.named_modules() if not list(layer.children())]
    (first, convolution), (second, norm) = layers[:2] if len(layers) > 1 else [("", None)] * 2
    if not isinstance(convolution, nn.Conv2d) or convolution.bias is not None or not isinstance(norm, nn.GroupNorm):
        return None
    products = (
        (parameters[f"{name}.weight"].detach().double() * gradient[f"{name}.weight"])
        .view(norm.num_groups, -1)
        .sum(dim=1)
        for name in (first, second)
    )
    return Contrast(convolution, parameters[f"{first}.weight"].detach().double(), norm.num_groups, norm.eps, *products)
