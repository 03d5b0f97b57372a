"""Features of images for the certified convex model behind an endpoint: public ones, or those of a frozen network.

What is proven of the convex model takes features to be a fixed function of the image, of length R at most, and asks no
more of them: with R fixed, the sensitivity is the same for any such function.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.data.datasets import Dataset
from fedpriv.gradients.calls import until_the_end

_AT_ONCE = 256  # images of one forward pass
_TRIED = 5  # random images that are shown twice
_TRIAL = 20261125  # their seed; it decides nothing else

Array = NDArray[np.float64]

Features = Callable[[Tensor], Array]
"""Images (n, C, H, W), bytes or on [0, 1] -> features (n, d) float64, of length R, or 0."""


def pixels(images: Tensor) -> Array:
    """Return images (n, C, H, W), bytes or on [0, 1], as float64 on [0, 1]: one array for one picture."""
    values: Array = images.double().cpu().numpy()
    return values / 255 if images.dtype == torch.uint8 else values


def public_features(size: int | None, norm: float) -> Features:
    """Return :func:`pooled_features` of images as a data set or a question has them."""
    return lambda images: pooled_features(pixels(images), size, norm)


def pooled_features(images: Array, size: int | None, norm: float) -> Array:
    """Return public features (n, d) of images: pixels, averaged over squares, scaled to one length."""
    count, channels, height, width = images.shape
    if size is not None:
        if height % size or width % size:
            raise InputError(
                key="service.features",
                given=f"pooled:{size}",
                allowed=f"images of {height} x {width} are no multiple of it",
            )
        squares = images.reshape(count, channels, size, height // size, size, width // size)
        images = squares.mean(axis=(3, 5))
    return _scaled(images.reshape(count, -1), norm)


def learnt_features(network: nn.Module, dataset: Dataset, norm: float, *, at_once: int = _AT_ONCE) -> Features:
    """Return the input of a network's last linear layer, flat, of one length; zeros if not finite."""

    def features(images: Tensor) -> Array:
        flat = np.concatenate([_heard(network, dataset, part) for part in images.split(at_once)])
        return _scaled(np.where(np.isfinite(flat).all(axis=1, keepdims=True), flat, 0), norm)

    return features


def check_fixed(network: nn.Module, dataset: Dataset) -> None:
    """Refuse a network whose features are no fixed function of an image, as far as random images show it."""
    images, _ = dataset.random(_TRIED, torch.Generator().manual_seed(_TRIAL))
    there = [_heard(network, dataset, image) for image in images.split(1)]
    back = [_heard(network, dataset, image) for image in reversed(images.split(1))]
    if any(not np.array_equal(one, other, equal_nan=True) for one, other in zip(there, reversed(back), strict=True)):
        raise InputError(
            "its network gives other features each time, also in evaluation mode: noise in the forward pass, or "
            "something that it keeps; features have to be a fixed function of the image"
        )


def _heard(network: nn.Module, dataset: Dataset, images: Tensor) -> Array:
    """What the last linear layer that gives (n, classes) is fed, (n, d)."""
    first = next(network.parameters())
    fed: list[Tensor] = []

    def hear(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        if output.shape == (len(images), dataset.classes):
            fed.append(given[0])

    hooks = [each.register_forward_hook(hear) for each in network.modules() if isinstance(each, nn.Linear)]
    with until_the_end(hooks), torch.no_grad():
        network(dataset.normalise(images.to(first.device), first.dtype))
    if not fed:
        raise InputError("its network has no linear layer that gives the logits, and so no features before one")
    return fed[-1].flatten(1).double().cpu().numpy()


def _scaled(flat: Array, norm: float) -> Array:
    """Rows (n, d) scaled to one length; those of length 0 stay."""
    lengths = np.sqrt((flat**2).sum(axis=1, keepdims=True))
    return norm * flat / np.where(lengths > 0, lengths, 1)
