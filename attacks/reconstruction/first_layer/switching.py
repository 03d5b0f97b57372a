"""The unmixing made exact where units switch: each example's errors are zero where its image switches units off.

Images that are roughly right, with the public weights, say which units they switch off. The example's errors are the
combination of the gradient's left factors that is smallest there: in absolute values, so that units that are guessed
wrong do not matter (as SPEAR++ for sparse errors, but started from images and without drawing rows). Better errors
give better images, and these a better guess; where the certificate reaches 1 that ends at the truth.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.certificate import Certificate, certify
from fedpriv.attacks.reconstruction.first_layer.spectrum import Spectrum

__all__ = ["FirstLayer", "Switched", "images_of", "scaled", "settle_switches"]

KEPT = (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0)  # of the units that seem off, the clearest; in each turn
WEIGHTINGS = 4  # of the rows, in one turn
SHRINKING = 0.3  # of what counts as zero, from one weighting to the next
FAINT = 0.3  # of an example's largest errors in a round: below that it seems not to be in the round
GAP = 10.0  # between its errors in rounds with it and in rounds without it, once these are nearly zero
RIDGE = 1e-13  # relative to the trace, so that a system can be solved

Outputs = Callable[[Tensor], Tensor]
"""Images (B, P) -> the first layer's outputs (B, rows) in all rounds."""


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """The public first layer, of several rounds one below the other; float64 on the CPU.

    Attributes:
        weight: (rows, P).
        bias: (rows,).
        rounds: in how many equal parts the rows fall.
        other_batches: whether an example may be missing from rounds.
    """

    weight: Tensor
    bias: Tensor
    rounds: int = 1
    other_batches: bool = False

    def outputs(self, images: Tensor) -> Tensor:
        """(B, rows), before the activation, of images (B, P)."""
        return images @ self.weight.mT + self.bias


@dataclass(frozen=True, eq=False)
class Switched:
    """A mixing (B, B) of the left factors, errors = left @ mixing, and how far zeros and images agree."""

    mixing: Tensor
    certificate: Certificate


def scaled(spectrum: Spectrum, mixing: Tensor) -> Tensor | None:
    """Scale the columns of a mixing (B, B) such that each image ends in a one; ``None`` where it cannot be inverted."""
    ones, failed = torch.linalg.solve_ex(mixing, spectrum.scaled[:, -1])
    usable = not int(failed) and bool(torch.isfinite(ones).all()) and bool((ones != 0).all())
    return mixing * ones if usable else None


def images_of(spectrum: Spectrum, mixing: Tensor) -> Tensor:
    """The images (B, P) of a scaled mixing (B, B)."""
    images: Tensor = torch.linalg.solve(mixing, spectrum.scaled)[:, :-1]
    return images


def settle_switches(spectrum: Spectrum, mixing: Tensor, layer: FirstLayer, *, switching: bool = True) -> Switched:
    """Take turns of images and errors until they agree; return the turn in which they agreed best.

    Args:
        spectrum: of the gradient.
        mixing: (B, B), scaled, roughly right.
        layer: the public first layer.
        switching: whether its units switch; else only rounds without an example show zeros.
    """
    best = Switched(mixing, _certificate(spectrum, mixing, layer))
    for kept in KEPT:
        certain = best.certificate.disagreeing == 0
        off = _off(spectrum, mixing, layer, 1.0 if certain else kept, switching=switching)
        turned = scaled(spectrum, _smallest(spectrum, mixing, off))
        if turned is None:
            break
        mixing = turned
        certificate = _certificate(spectrum, mixing, layer)
        if not switching or certificate.disagreeing <= best.certificate.disagreeing:
            best = Switched(mixing, certificate)
        if certain:
            break
    return best


def _certificate(spectrum: Spectrum, mixing: Tensor, layer: FirstLayer) -> Certificate:
    noise = spectrum.noise_of(mixing.mT)
    outputs = layer.outputs(images_of(spectrum, mixing))
    return certify(spectrum.left @ mixing, noise, outputs, layer.rounds if layer.other_batches else 1)


def _off(spectrum: Spectrum, mixing: Tensor, layer: FirstLayer, kept: float, *, switching: bool) -> Tensor:
    """Which rows (B, rows) seem to be zero in each example's errors: units switched off, or rounds without it."""
    if switching:
        depth = layer.outputs(images_of(spectrum, mixing)) / layer.weight.norm(dim=1).clamp(min=1e-30)
        wanted = kept * (depth <= 0).sum(dim=1, keepdim=True)
        off: Tensor = depth.argsort(dim=1).argsort(dim=1) < wanted
        return off
    parts = (spectrum.left @ mixing).mT.unflatten(1, (layer.rounds, -1))
    sizes = parts.norm(dim=2).clamp(min=1e-30)
    absent = sizes < (FAINT * sizes.amax(dim=1, keepdim=True) if kept < 1 else _least_present(sizes))
    missing: Tensor = absent[:, :, None].expand_as(parts).flatten(1)
    return missing


def _least_present(sizes: Tensor) -> Tensor:
    """The least size (B, 1) of each example's errors (B, rounds) above the first wide gap from the top."""
    ordered = sizes.sort(dim=1, descending=True).values
    wide = torch.cat([ordered[:, :-1] > GAP * ordered[:, 1:], torch.ones_like(ordered[:, :1], dtype=torch.bool)], dim=1)
    least: Tensor = ordered.gather(1, wide.int().argmax(dim=1, keepdim=True))
    return least


def _smallest(spectrum: Spectrum, mixing: Tensor, off: Tensor) -> Tensor:
    """Mixing (B, B) whose errors are smallest, in absolute values, in rows (B, rows) that seem to be zero.

    Least squares with weights, the same for all examples at once; each column keeps its share of where it started.
    """
    start = (mixing / mixing.norm(dim=0)).mT
    vectors, counted = start, off.to(start)
    ridge = RIDGE * torch.eye(len(start), dtype=start.dtype)
    for weighting in range(WEIGHTINGS):
        sizes = (vectors @ spectrum.left.mT).abs()
        typical = (sizes * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        least = torch.maximum(typical * SHRINKING**weighting, spectrum.noise_of(vectors))[:, None]
        weights = counted / (sizes.square() + least.square()).sqrt().clamp(min=1e-30)
        products = torch.stack([(spectrum.left * row[:, None]).mT @ spectrum.left for row in weights])
        traces = products.diagonal(dim1=1, dim2=2).sum(dim=1).clamp(min=1e-30)
        solved, _ = torch.linalg.solve_ex(products + traces[:, None, None] * ridge, start[:, :, None])
        vectors = solved[:, :, 0] / solved[:, :, 0].norm(dim=1, keepdim=True).clamp(min=1e-30)
    turned: Tensor = vectors.mT
    return turned
