"""Images from the gradient and the examples' errors, by what images look like: the posterior's mean.

Given the errors E the gradient is ``E X`` plus normal noise, and images have a normal prior: then the mean of the
images given the gradient is linear in it (a Wiener filter that takes into account which images are mixed).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.spectrum import Spectrum
from fedpriv.attacks.reconstruction.priors import GaussianPrior

__all__ = ["denoised", "faint_scaled"]

FAINT = 3.0  # deviations of the noise below which a bias says nothing of an image's sign and contrast


def denoised(spectrum: Spectrum, mixing: Tensor, prior: GaussianPrior) -> Tensor:
    """Return the images (B, P).

    Args:
        spectrum: of the gradient; its left factors are orthonormal, so that the noise in what they see is white.
        mixing: (B, B): the errors are ``left @ mixing``.
        prior: of images.
    """
    prior, variance = prior.to(mixing), spectrum.deviation**2
    information = mixing.mT @ mixing / variance
    offsets = spectrum.scaled[:, :-1] - mixing.sum(dim=1, keepdim=True) * prior.mean
    offsets = mixing.mT @ offsets / variance
    strengths, turned = torch.linalg.eigh(information)
    heard = turned.mT @ offsets
    kept = 1 / (strengths.clamp(min=0)[:, None] + 1 / prior.variances)
    outside = 1 / (strengths.clamp(min=0)[:, None] + 1 / prior.rest)
    along = heard @ prior.basis
    shrunk = outside * heard + ((kept - outside) * along) @ prior.basis.mT
    images: Tensor = prior.mean + turned @ shrunk
    return images


def faint_scaled(spectrum: Spectrum, mixing: Tensor, prior: Callable[[], GaussianPrior]) -> Tensor:
    """Scale the columns of a mixing (B, B) such that each image ends in a one, or, faint ones, such that it is typical.

    Where noise covers what an image has at the bias, its length is the prior's, and its sign that which has more of the
    prior's mean.

    Args:
        spectrum: of the gradient.
        mixing: (B, B), its columns known but for their scale.
        prior: makes the prior of images, which takes time, where it is needed.
    """
    inverse = torch.linalg.inv(mixing)
    rows = inverse @ spectrum.scaled
    ones = rows[:, -1]
    faint = ones.abs() < FAINT * spectrum.deviation * inverse.norm(dim=1)
    lengths: Tensor = ones
    if not bool(faint.any()):
        return mixing * lengths
    fitted = prior().to(mixing)
    outside = fitted.pixels - len(fitted.variances)
    typical = (fitted.mean.square().sum() + fitted.variances.sum() + outside * fitted.rest).sqrt()
    sign = torch.where(rows[:, :-1] @ fitted.mean < 0, -1.0, 1.0)
    lengths = torch.where(faint, rows[:, :-1].norm(dim=1) / typical * sign, ones)
    return mixing * lengths
