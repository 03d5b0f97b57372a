"""From the section ``[robustness]`` to a network with noise in it, and the test images that each purpose may use."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.names import NormName
from fedpriv.core.network import precision_of
from fedpriv.core.randomness import numpy_stream, torch_stream
from fedpriv.core.threads import cpu_threads
from fedpriv.data.datasets import Dataset, unit_scale
from fedpriv.robustness.check import bypass, mixes
from fedpriv.robustness.noise import Place, RobustnessNoise, Smoothing, noise_layers
from fedpriv.robustness.norms import FirstLayer, estimated_norm
from fedpriv.robustness.settings import RobustnessConfig
from fedpriv.robustness.shares import informative_spread, row_spread, uniform_spread, vulnerable_spread

PublicExamples = Callable[[int], tuple[Tensor, Tensor]]
"""How many -> images (B, C, H, W) on [0, 1] in the network's numbers and on its device, and labels (B,)."""

_AFFINE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def with_noise(network: nn.Module, place: Place, shape: tuple[int, int, int], stream: torch.Generator) -> nn.Module:
    """Return the network with a silent noise layer: around it, or where it has one, or at its first layer."""
    hidden = place == "hidden"
    if hidden and not noise_layers(network):
        network = _around_the_first(network)
    modes = {layer: layer.training for layer in network.modules()}
    try:
        reason = bypass(network.eval(), shape, stream) if hidden else None
        mixed = mixes(network, shape, stream)
    except (Exception, SystemExit) as error:
        raise InputError(f"robustness: the network cannot be tried on random images: {reason_of(error)}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
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


def network_with_noise(network: nn.Module, place: Place, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """Return :func:`with_noise`, tried on random images of an experiment's seed."""
    return with_noise(network, place, shape, torch_stream(seed, "robustness-trial"))


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
    smoothing = Smoothing(
        first.layer, config.sigma, config.norm, _spread(config, first, public), _estimate(first, config.norm)
    )
    smoothing.set_deviations(first.network)
    return smoothing


def even_smoothing(first: FirstLayer, sigma: float) -> Smoothing:
    """Return even noise of the deviation sigma, in pixels, on the image."""
    smoothing = Smoothing(first.layer, sigma, "l2", uniform_spread(first), _estimate(first, "l2"))
    smoothing.set_deviations(first.network)
    return smoothing


def _estimate(first: FirstLayer, norm: NormName) -> Callable[[nn.Module, RobustnessNoise, Tensor], float]:
    """The norm of whichever network has the layer: copies are measured as themselves."""

    def estimate(network: nn.Module, layer: RobustnessNoise, spread: Tensor) -> float:
        return estimated_norm(FirstLayer(network, layer, first.normalise, first.shape), spread, norm)

    return estimate


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


def certified_rows(seed: int, test_images: int, wanted: int, public: int) -> np.ndarray:
    """Return which test images are certified, ascending, none of them public; a function of the seed."""
    if not 1 <= wanted <= test_images - public:
        kept = f", {public} of them public ones that the noise is shared out by" if public else ""
        raise InputError(
            key="certify.examples",
            given=wanted,
            allowed=f"allowed is from 1 to {test_images - public}; there are {test_images} test images{kept}",
        )
    return np.sort(_order(seed, test_images)[test_images - wanted :])


def _order(seed: int, test_images: int) -> np.ndarray:
    return numpy_stream(seed, "robustness-images").permutation(test_images)
