"""The unmixing made exact where units switch: each example's errors are zero where its image switches units off.

Images that are roughly right, with the public weights, say which units they switch off. The example's errors are the
combination of the gradient's left factors that is smallest there: in absolute values, so that units that are guessed
wrong do not matter (as SPEAR++ for sparse errors, but started from images and without drawing rows). Better errors
give better images, and these a better guess; where the certificate reaches 1 that ends at the truth.

Without such units, several rounds with other batches show zeros as well: an example's errors vanish in all rounds
without it, and they are the combination whose lengths in the rounds have the smallest sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.certificate import Certificate, certify
from fedpriv.attacks.reconstruction.first_layer.spectrum import Spectrum

__all__ = ["FirstLayer", "Switched", "images_of", "scaled", "settle_switches"]

KEPT = (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0)  # of the units that seem off, the clearest; in each turn
WEIGHTINGS = 4  # of the rows, in one turn
SHRINKING = 0.3  # of what counts as zero, from one weighting to the next
RIDGE = 1e-13  # relative to the trace, so that a system can be solved


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
    # Lengths of many orders of magnitude make a matrix singular that was nearly so.
    return mixing * ones if usable and not int(torch.linalg.inv_ex(mixing * ones).info) else None


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
    for turn, kept in enumerate(KEPT):
        certain = switching and best.certificate.disagreeing == 0
        if switching:
            off = _off(spectrum, mixing, layer, 1.0 if certain else kept)
            turned = scaled(spectrum, _smallest(spectrum, mixing, off))
        else:
            turned = scaled(spectrum, _fewest_rounds(spectrum, mixing, layer.rounds, turn))
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


def _off(spectrum: Spectrum, mixing: Tensor, layer: FirstLayer, kept: float) -> Tensor:
    """Which rows (B, rows) are zero in each example's errors, because it seems to switch the unit off."""
    depth = layer.outputs(images_of(spectrum, mixing)) / layer.weight.norm(dim=1).clamp(min=1e-30)
    wanted = kept * (depth <= 0).sum(dim=1, keepdim=True)
    off: Tensor = depth.argsort(dim=1).argsort(dim=1) < wanted
    return off


def _smallest(spectrum: Spectrum, mixing: Tensor, off: Tensor) -> Tensor:
    """Mixing (B, B) whose errors are smallest, in absolute values, in rows (B, rows) that seem to be zero."""
    vectors, counted = (mixing / mixing.norm(dim=0)).mT, off.to(mixing)
    start = vectors
    for weighting in range(WEIGHTINGS):
        sizes = (vectors @ spectrum.left.mT).abs()
        typical = (sizes * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        least = torch.maximum(typical * SHRINKING**weighting, spectrum.noise_of(vectors))[:, None]
        vectors = _weighted(spectrum, start, counted / (sizes.square() + least.square()).sqrt().clamp(min=1e-30))
    turned: Tensor = vectors.mT
    return turned


def _fewest_rounds(spectrum: Spectrum, mixing: Tensor, rounds: int, turn: int) -> Tensor:
    """Mixing (B, B) whose errors have the smallest sum of lengths over the rounds, so that they vanish in many."""
    vectors = start = (mixing / mixing.norm(dim=0)).mT
    for weighting in range(WEIGHTINGS):
        parts = (vectors @ spectrum.left.mT).unflatten(1, (rounds, -1))
        sizes = parts.norm(dim=2, keepdim=True)
        least = sizes.mean(dim=1) * SHRINKING ** (turn + weighting)
        least = torch.maximum(least, spectrum.noise_of(vectors)[:, None])[:, :, None]
        weights = 1 / (sizes.square() + least.square()).sqrt().clamp(min=1e-30)
        vectors = _weighted(spectrum, start, weights.expand_as(parts).flatten(1))
    turned: Tensor = vectors.mT
    return turned


def _weighted(spectrum: Spectrum, start: Tensor, weights: Tensor) -> Tensor:
    """Unit vectors (B, B) with the least weighted squares, by weights (B, rows), that keep their share of the start."""
    ridge = RIDGE * torch.eye(len(start), dtype=start.dtype)
    products = torch.stack([(spectrum.left * row[:, None]).mT @ spectrum.left for row in weights])
    traces = products.diagonal(dim1=1, dim2=2).sum(dim=1).clamp(min=1e-30)
    solved, _ = torch.linalg.solve_ex(products + traces[:, None, None] * ridge, start[:, :, None])
    vectors: Tensor = solved[:, :, 0] / solved[:, :, 0].norm(dim=1, keepdim=True).clamp(min=1e-30)
    return vectors
