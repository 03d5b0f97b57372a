"""Where the noise goes: sqrt(K r) for public shares r of its power, shaped as one example's value at the place.

Any public, fixed r is sound (Phan et al. 2019, Theorem 3: divide by sqrt(K r), add even noise, multiply again). So the
shares are of the initial parameters and of public images, which are kept out of what is certified; the paper takes them
from a network that was trained on the private data.

For Euclidean balls no r beats even noise on the image. For the largest change of a pixel uneven noise can: with less of
it where images vary, and more where they do not, which is the opposite of the paper's rule.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.errors import InputError
from fedpriv.robustness.norms import FirstLayer, unit_images

EVEN = 0.1
"""The share of the power that is spread evenly, so that no coordinate is without noise."""

_HALVINGS = 200


def uniform_spread(first: FirstLayer) -> Tensor:
    """Even shares: 1 for each coordinate; on the image, of each pixel before it is normalised."""
    return _at_the_place(first, torch.ones_like(_value(first)))


def vulnerable_spread(first: FirstLayer, images: Tensor, labels: Tensor, inflation: float) -> Tensor:
    """More noise where the loss reacts: r in proportion to |mean over images of dL/dh_k| ** beta (Phan et al., 9)."""
    network, layer = first.network, first.layer
    with torch.enable_grad():
        inputs = first.normalise(images)
        z = layer.value_at(network, inputs).detach().requires_grad_()
        loss = functional.cross_entropy(layer.onwards(network, z, inputs), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, z)
    slope = gradient.double().cpu().mean(dim=0).abs()
    if layer.place == "input":
        slope = slope * _scale(first)  # by the pixel, not by what the network is fed
    return _at_the_place(first, shares_spread(slope, inflation))


def row_spread(first: FirstLayer, inflation: float) -> Tensor:
    """More noise where the layer's rows are long: r in proportion to |W_k|_2 ** (2 beta); for 1, A's rows are even."""
    exact = first.exact()
    squares = torch.zeros_like(_value(exact))
    with torch.no_grad():
        zero = exact(exact.blank())
        for images in unit_images(exact):
            squares += (exact(images) - zero).square().sum(dim=0)
    return shares_spread(squares, inflation)


def informative_spread(first: FirstLayer, images: Tensor, sigma: float) -> Tensor:
    """Less noise on pixels that vary: precisions by water-filling, t_i = max(0, 1/lambda - 1/v_i), a tenth even.

    The sum of t is d / sigma^2, as for even noise of the deviation sigma, so that S_infinity is the same.
    """
    variances = images.double().cpu().var(dim=0, correction=0)
    if not bool((variances > 0).any()):
        raise InputError(
            key="robustness.redistribution", given="informative", allowed="the public images are all the same"
        )
    budget = variances.numel() / sigma**2
    precisions = _filled(variances, (1 - EVEN) * budget) + EVEN * budget / variances.numel()
    return _at_the_place(first, precisions.rsqrt())


def shares_spread(sensitivity: Tensor, inflation: float) -> Tensor:
    """Return sqrt(K r) for r in proportion to sensitivity ** beta, a tenth of the power even."""
    largest = float(sensitivity.max())
    if not bool(torch.isfinite(sensitivity).all()):
        raise InputError("robustness.redistribution: the network's derivatives are NaN or infinite")
    if largest == 0:
        return torch.ones_like(sensitivity)
    powers = (sensitivity / largest).pow(inflation)
    return ((1 - EVEN) * powers.numel() * powers / powers.sum() + EVEN).sqrt()


def _filled(variances: Tensor, budget: float) -> Tensor:
    """Water-filling: the level 1/lambda at which the precisions sum to the budget, by halving; see above."""
    floors = torch.where(variances > 0, 1 / variances, torch.inf)
    low, high = float(floors.min()), float(floors.min()) + budget
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        filled = float((level - floors).clamp(min=0).sum())
        low, high = (level, high) if filled < budget else (low, level)
    return (high - floors).clamp(min=0)


def _value(first: FirstLayer) -> Tensor:
    """One example's value at the place of the noise, in float64."""
    with torch.no_grad():
        return first(first.blank())[0].double().cpu()


def _at_the_place(first: FirstLayer, spread: Tensor) -> Tensor:
    """What is on the image is in pixels; the network is fed normalised ones."""
    return spread * _scale(first) if first.layer.place == "input" else spread


def _scale(first: FirstLayer) -> Tensor:
    """By how much a pixel's change is multiplied when images are normalised, (C, H, W)."""
    black = torch.zeros(1, *first.shape, dtype=torch.float64)
    return (first.normalise(black + 1) - first.normalise(black))[0]
