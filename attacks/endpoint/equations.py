"""Equation solving: recover a model whose logits are affine in the image from d + 1 answers.

The logarithm of a probability minus its mean over classes is affine in the image where the logits are. So d + 1 exact
answers give all K (d + 1) numbers, up to one that all classes share and no answer depends on (Tramer, Zhang, Juels,
Reiter and Ristenpart 2016, Section 4.1, for two classes and one against all).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import lstsq
from torch import Tensor

from fedpriv.attacks.scene import Network, ProbeScene, rounding_unit, uniform_images
from fedpriv.core.randomness import numpy_stream

Array = NDArray[np.float64]

# A probability of exactly 0 comes from logits that differ by more than float64 can show.
_SMALLEST = 1e-300
_AFFINE = 1e-9


@dataclass(frozen=True, eq=False)
class AffineScores:
    """Logits that are affine in the image, with a mean of 0 over the classes."""

    weights: Array  # (classes, d), of pixels on [0, 1]
    bias: Array  # (classes,)

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (n, classes) of images (n, C, H, W)."""
        return images.double().flatten(1) @ torch.from_numpy(self.weights).mT + torch.from_numpy(self.bias)

    def error(self, other: "AffineScores") -> float:
        """Return the largest difference of two numbers, as a share of the largest number of the other one."""
        differences = max(np.abs(self.weights - other.weights).max(), np.abs(self.bias - other.bias).max())
        return float(differences / max(np.abs(other.weights).max(), np.abs(other.bias).max()))


def is_affine(scene: ProbeScene) -> bool:
    """Return whether the architecture, which the adversary knows, has logits that are affine in the image."""
    network = scene.copy(scene.seed).eval()
    images = uniform_images(8, scene.shape, numpy_stream(scene.seed, "probe-affine"))
    with torch.no_grad():
        ends = network(scene.normalise(images))
        middle = network(scene.normalise((images[:4] + images[4:]) / 2))
    return bool(((ends[:4] + ends[4:]) / 2 - middle).abs().max() < _AFFINE * (1 + ends.abs().max()))


def affine_scores(network: Network, shape: tuple[int, int, int]) -> AffineScores:
    """Return the numbers of a network that is affine, from its logits of the black image and of single white pixels."""
    pixels = int(np.prod(shape))
    with torch.no_grad():
        black = network(torch.zeros((1, *shape), dtype=torch.float64))[0]
        lit = network(torch.eye(pixels, dtype=torch.float64).view(pixels, *shape))
    weights, bias = (lit - black).mT.double().numpy(), black.double().numpy()
    return AffineScores(weights - weights.mean(axis=0), bias - bias.mean())


def solved_scores(images: Tensor, shown: Array) -> AffineScores:
    """Solve for the logits that explain answers, by least squares of smallest norm; zeros are half a unit."""
    logs = np.log(np.maximum(shown, max(rounding_unit(shown) / 2, _SMALLEST)))
    targets = logs - logs.mean(axis=1, keepdims=True)
    flat = images.double().flatten(1).numpy()
    rows = np.hstack([flat, np.ones((len(flat), 1))])
    solution = lstsq(rows, targets, lapack_driver="gelsy")[0]
    return AffineScores(np.ascontiguousarray(solution[:-1].T), solution[-1].copy())
