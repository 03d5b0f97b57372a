"""From the section ``[robustness]`` to a network with noise in it, and the test images that each purpose may use."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.names import NormName
from fedpriv.core.randomness import numpy_stream, seeded_generators, torch_stream
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import precision_of
from fedpriv.data.datasets import Dataset, unit_scale
from fedpriv.gradients.calls import evaluating, until_the_end
from fedpriv.robustness.noise import Place, RobustnessNoise, noise_layers
from fedpriv.robustness.norms import FirstLayer, estimated_norm, unit_images
from fedpriv.robustness.settings import RobustnessConfig

PublicExamples = Callable[[int], tuple[Tensor, Tensor]]
"""How many -> images (B, C, H, W) on [0, 1] in the network's numbers and on its device, and labels (B,)."""

_AFFINE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def with_noise(network: nn.Module, place: Place, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """Return the network with a silent noise layer: around it, or where it has one, or at its first layer.

    It is tried on random images (C, H, W) of the seed.
    """
    hidden, stream = place == "hidden", torch_stream(seed, "robustness-trial")
    if hidden and not noise_layers(network):
        network = _around_the_first(network)
    try:
        with evaluating(network):
            reason = bypass(network, shape, stream) if hidden else None
            mixed = mixes(network, shape, stream)
    except (Exception, SystemExit) as error:
        raise InputError(f"robustness: the network cannot be tried on random images: {reason_of(error)}") from error
    if reason is not None:
        raise InputError(key="robustness.place", given="hidden", allowed=f"{reason}; or use place = 'input'")
    if mixed:
        raise InputError(
            "robustness: what the network says of an image depends on the others of its batch; its votes prove nothing"
        )
    return network if hidden else RobustnessNoise(network, "input")


def _around_the_first(network: nn.Module) -> nn.Module:
    """Put the noise layer around the first affine layer that the network names."""
    for name, layer in network.named_modules():
        if isinstance(layer, _AFFINE):
            if not name:
                return RobustnessNoise(layer)
            network.set_submodule(name, RobustnessNoise(layer))
            return network
    raise InputError(
        key="robustness.place",
        given="hidden",
        allowed="the network has no Conv or Linear layer",
        hint="use place = 'input'",
    )


@dataclass(frozen=True, eq=False)
class Smoothing:
    """How much noise there is, public and the same for all clients: Sigma^(1/2) = sigma S_p(W; r) sqrt(K r).

    S_p is the norm, from perturbations of the image to h over sqrt(K r), of the layer as it is (gradients do not flow
    into it). So a margin m certifies the radius sigma m in every step, and training cannot outgrow the noise by
    inflating W.
    """

    first: FirstLayer  # h, and where the noise is added
    sigma: float  # above 0, in pixels from 0 to 1
    norm: NormName  # of perturbations
    spread: Tensor  # sqrt(K r), shaped as one example's value at the place; float64, positive

    def fitted(self, norm: float | None = None) -> Self:
        """Scale the noise to the network's weights as they are, by S_p or a quick estimate of it; return the same."""
        known = estimated_norm(self.first, self.spread, self.norm) if norm is None else norm
        self.first.layer.deviations = (self.sigma * known * self.spread).float()
        return self

    def drawing(self, seed: int, *numbers: int, evaluates: bool = False) -> AbstractContextManager[None]:
        """See :class:`fedpriv.core.sections.NoiseInPass`."""
        purpose = "robustness-evaluation" if evaluates else "robustness-noise"
        return self.fitted().first.layer.drawing(
            torch_stream(seed, purpose, *numbers, device=self.first.blank().device)
        )


def first_layer(dataset: Dataset, model: nn.Module) -> FirstLayer:
    """Return how images of a data set reach the noise of a network, which is put into evaluation mode."""
    model.eval()
    return FirstLayer(
        model, noise_layers(model)[0], lambda pixels: dataset.normalise(pixels, pixels.dtype), dataset.shape
    )


def scaled_smoothing(config: RobustnessConfig, experiment: Experiment, dataset: Dataset, model: nn.Module) -> Smoothing:
    """Share the noise out and scale it, from the initial parameters and public images."""
    first = first_layer(dataset, model)

    def public(wanted: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(public_rows(experiment.seed, len(dataset.x_test), wanted))
        images = unit_scale(dataset.x_test[rows], precision_of(experiment))
        return images.to(first.blank().device), dataset.y_test[rows].to(first.blank().device)

    with cpu_threads(experiment.engine.threads):
        return build_smoothing(config, first, public)


def build_smoothing(config: RobustnessConfig, first: FirstLayer, public: PublicExamples) -> Smoothing:
    """Share the noise out and scale it to the network's weights as they are."""
    return Smoothing(first, config.sigma, config.norm, _spread(config, first, public)).fitted()


def even_smoothing(first: FirstLayer, sigma: float) -> Smoothing:
    """Return even noise of the deviation sigma, in pixels, on the image."""
    return Smoothing(first, sigma, "l2", uniform_spread(first)).fitted()


def _spread(config: RobustnessConfig, first: FirstLayer, public: PublicExamples) -> Tensor:
    match config.redistribution:
        case "vulnerable":
            return vulnerable_spread(first, *public(config.public_images), config.inflation)
        case "rows":
            return row_spread(first, config.inflation)
        case "informative":
            images, _ = public(config.public_images)
            # In Euclidean terms: even noise of this deviation has the same norm from the largest change of a pixel.
            wide = images[0].numel() ** 0.5 if config.norm == "linf" else 1.0
            return informative_spread(first, images, config.sigma * wide)
        case _:
            return uniform_spread(first)


def public_rows(seed: int, test_images: int, wanted: int) -> np.ndarray:
    """Return which test images the shares of the noise are computed from, ascending; a function of the seed."""
    if wanted >= test_images:
        raise InputError(
            key="robustness.public_examples",
            given=wanted,
            allowed=f"there are {test_images} test images, and public ones cannot be certified",
        )
    return np.sort(_order(seed, test_images)[:wanted])


def certified_rows(seed: int, test_images: int, wanted: int, public: int, key: str = "certify.examples") -> np.ndarray:
    """Return which test images are certified, ascending, none of them public; a function of the seed."""
    if not 1 <= wanted <= test_images - public:
        kept = f", {public} of them public ones that the noise is shared out by" if public else ""
        raise InputError(
            key=key,
            given=wanted,
            allowed=f"allowed is from 1 to {test_images - public}; there are {test_images} test images{kept}",
        )
    return np.sort(_order(seed, test_images)[test_images - wanted :])


def _order(seed: int, test_images: int) -> np.ndarray:
    return numpy_stream(seed, "robustness-images").permutation(test_images)


# Any public, fixed r is sound (Phan et al. 2019, Theorem 3: divide by sqrt(K r), add even noise, multiply again). So
# the shares are of the initial parameters and of public images, which are kept out of what is certified; the paper
# takes them from a network that was trained on the private data.
#
# For Euclidean balls no r beats even noise on the image. For the largest change of a pixel uneven noise can: with less
# of it where images vary, and more where they do not, which is the opposite of the paper's rule.


EVEN = 0.1
"""The share of the power that is spread evenly, so that no coordinate is without noise."""


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
        slope = slope * first.scale  # by the pixel, not by what the network is fed
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
    """Water-filling: precisions that sum to the budget, from floors 1/v_i up to one level 1/lambda."""
    floors = 1 / variances
    ascending = floors.flatten().sort().values
    # The level if the lowest floors alone were under water: the highest of those floors that are tells how many are.
    levels = (budget + ascending.cumsum(dim=0)) / torch.arange(1, len(ascending) + 1)
    return (levels[ascending < levels][-1] - floors).clamp(min=0)


def _value(first: FirstLayer) -> Tensor:
    """One example's value at the place of the noise, in float64."""
    with torch.no_grad():
        return first(first.blank())[0].double().cpu()


def _at_the_place(first: FirstLayer, spread: Tensor) -> Tensor:
    """What is on the image is in pixels; the network is fed normalised ones."""
    return spread * first.scale if first.layer.place == "input" else spread


# All that the network makes of the image goes through the noise, once, and what gets there is affine in the image. A
# few images cannot prove it, but networks that break it do so on any.


_IMAGES = 3
# Of the values' size: float32 has seven digits, and a layer sums up thousands of terms.
_ROUNDING = 1e-4


def bypass(network: nn.Module, shape: tuple[int, int, int], stream: torch.Generator) -> str | None:
    """Say why the noise of a network proves nothing, or return ``None``; ``shape``: (C, H, W) of an image."""
    layers = noise_layers(network)
    if len(layers) != 1:
        return f"it has {len(layers)} RobustnessNoise layers; expected exactly one, around its first affine layer"
    (layer,) = layers
    images = torch.randn(2 * _IMAGES, *shape, generator=stream)
    first, others = images.split(_IMAGES)
    calls = _calls(network, layer, first)
    if calls != 1:
        return f"its noise layer is called {calls} times in a forward pass; expected once"
    if not _is_affine(network, layer, first, others):
        return "what reaches the noise layer is not affine in the image; put it around the first affine layer"
    if _goes_past(network, layer, first, others):
        return "something of the image goes past the noise layer; no certificate would hold"
    return None


def mixes(network: nn.Module, shape: tuple[int, int, int], stream: torch.Generator) -> bool:
    """Return whether the answer for an image depends on the others of its batch: then votes are not independent."""
    weights = next(network.parameters())
    first, others = torch.randn(2 * _IMAGES, *shape, generator=stream).to(weights).split(_IMAGES)

    def answers(batch: Tensor) -> Tensor:
        with torch.no_grad(), seeded_generators(0, weights.device):
            return network(batch)

    together = answers(first)
    # Each in turn: the layers in which images meet may be silent for one of them.
    for at in range(_IMAGES):
        batch = others.clone()
        batch[at] = first[at]
        alone = answers(batch)[at]
        if bool((together[at] - alone).abs().max() > _ROUNDING * together[at].abs().max()):
            return True
    return False


def _calls(network: nn.Module, layer: RobustnessNoise, images: Tensor) -> int:
    calls: list[None] = []
    with until_the_end([layer.register_forward_hook(lambda *_: calls.append(None))]), torch.no_grad():
        network(images)
    return len(calls)


def _is_affine(network: nn.Module, layer: RobustnessNoise, x: Tensor, y: Tensor) -> bool:
    """f(x) + f(y) = f(x + y) + f(0), for images on both sides of every kink."""
    with torch.no_grad():
        parts = [layer.value_at(network, images) for images in (x, y, x + y, torch.zeros_like(x))]
    if any(len(part) != len(x) for part in parts):
        return False
    error = (parts[0] + parts[1] - parts[2] - parts[3]).abs().max()
    return bool(error <= _ROUNDING * max(float(part.abs().max()) for part in parts))


def _goes_past(network: nn.Module, layer: RobustnessNoise, x: Tensor, y: Tensor) -> bool:
    """Whether logits change with the image, or have a gradient to it, while the value at the noise is held."""
    with torch.no_grad():
        z = layer.value_at(network, x)
        if not torch.equal(layer.onwards(network, z, x), layer.onwards(network, z, y)):
            return True
    with torch.enable_grad():
        images = x.clone().requires_grad_()
        logits = layer.onwards(network, z, images)
        if not logits.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(logits.sum(), images, allow_unused=True)
    return gradient is not None
