"""The first layer, if it is linear in the image: then its gradient contains the image.

With ``y = W x + b`` the gradient of W is ``e x^T`` and that of b is ``e``, the derivative with respect to y.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.gradients import Vector

PROBE = 20240311  # the seed of the images that tell which tensor is the first; it decides nothing else
TOLERANCE = 1e-6  # of logits that should be equal, relative to the change that shows that they are not just constant


@dataclass(frozen=True)
class InputLayer:
    """The parameters of a first layer that multiplies the image."""

    weight: str  # name of the matrix
    bias: str | None  # name of the vector that is added to the product; None: there is none
    transposed: bool  # whether the matrix is (pixels, outputs) rather than (outputs, pixels)

    def gradients(self, vector: Vector) -> tuple[Tensor, Tensor | None]:
        """Return what a vector, such as an upload, holds for the matrix (outputs, pixels) and the bias (outputs,)."""
        weight = vector[self.weight]
        return weight.mT if self.transposed else weight, None if self.bias is None else vector[self.bias]


def find_input_layer(network: Network, parameters: Vector, shape: tuple[int, int, int]) -> InputLayer | None:
    """Find the layer by what it does, so that own networks need no naming convention; among parameters that are given.

    The image enters through ``W x`` alone if mirroring the rows of W and the image at a random plane changes nothing. A
    bias is a vector to which adding ``W d`` does what adding d to the image does.
    """
    wide = torch.float32 if network.device.type == "mps" else torch.float64
    network = network.cast(wide)
    parameters = {name: value.to(wide) for name, value in parameters.items()}
    pixels = shape[0] * shape[1] * shape[2]
    generator = torch.Generator().manual_seed(PROBE)
    images, plane, step = (
        torch.randn(*size, generator=generator).to(network.device, wide) for size in ((4, *shape), (pixels,), (pixels,))
    )
    trial = _Trial(network, parameters, images, plane / plane.norm(), 0.1 * step)
    for name, value in parameters.items():
        for transposed in (False, True):
            if value.ndim == 2 and value.shape[0 if transposed else 1] == pixels and trial.multiplies(name, transposed):
                return InputLayer(name, trial.bias(name, transposed), transposed)
    return None


class _Trial:
    """Whether changes of parameters and images cancel."""

    def __init__(self, network: Network, parameters: Vector, images: Tensor, plane: Tensor, step: Tensor) -> None:
        self._network = network
        self._parameters = parameters
        self._images = images
        self._plane = plane
        self._step = step

    def multiplies(self, name: str, transposed: bool) -> bool:
        value = self._parameters[name]
        flat = self._images.flatten(1)
        mirrored = flat - 2 * (flat @ self._plane)[:, None] * self._plane
        if transposed:
            changed = value - 2 * self._plane[:, None] * (self._plane @ value)
        else:
            changed = value - 2 * (value @ self._plane)[:, None] * self._plane
        return self._cancel({name: changed}, mirrored.view_as(self._images))

    def bias(self, name: str, transposed: bool) -> str | None:
        weight = self._parameters[name]
        change = self._step @ weight if transposed else weight @ self._step
        moved = self._images - self._step.view(self._images.shape[1:])
        for other, value in self._parameters.items():
            if value.shape == change.shape and self._cancel({other: value + change}, moved):
                return other
        return None

    def _cancel(self, changes: Vector, images: Tensor) -> bool:
        """Whether the changes of parameters undo that of the images, which alone has an effect."""
        with torch.no_grad():
            before = self._network.logits(self._parameters, self._images)
            alone = self._network.logits(self._parameters, images)
            both = self._network.logits({**self._parameters, **changes}, images)
        effect = float((alone - before).abs().max())
        tolerance = TOLERANCE if both.dtype == torch.float64 else 1e-3
        return effect > 0 and float((both - before).abs().max()) <= tolerance * effect
