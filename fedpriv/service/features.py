"""Public features of images, for the certified convex model behind an endpoint."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError

__all__ = ["pooled_features"]

Array = NDArray[np.float64]


def pooled_features(images: Array, size: int | None, norm: float) -> Array:
    """Return public features (n, d) of images: pixels, averaged over squares, scaled to one length.

    Args:
        images: (n, C, H, W) on [0, 1].
        size: of the averaged image's sides; ``None``: as the images are.
        norm: the length of each example's features; a black image's are zero.

    Raises:
        InputError: the sides are not multiples of ``size``.
    """
    count, channels, height, width = images.shape
    if size is not None:
        if height % size or width % size:
            raise InputError(f"service.features = 'pooled:{size}': images of {height} x {width} are no multiple of it")
        squares = images.reshape(count, channels, size, height // size, size, width // size)
        images = squares.mean(axis=(3, 5))
    flat = images.reshape(count, -1)
    lengths = np.sqrt((flat**2).sum(axis=1, keepdims=True))
    features: Array = norm * flat / np.where(lengths > 0, lengths, 1)
    return features
