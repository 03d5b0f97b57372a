"""What a certificate takes for granted about a network, tried on random images.

All that the network makes of the image goes through the noise, once, and what gets there is affine in the image. A few
images cannot prove it, but networks that break it do so on any.
"""

import torch
from torch import Tensor, nn

from fedpriv.core.randomness import seeded_generators
from fedpriv.robustness.noise import RobustnessNoise, noise_layers

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
            made: Tensor = network(batch)
            return made

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
    handle = layer.register_forward_hook(lambda *_: calls.append(None))
    try:
        with torch.no_grad():
            network(images)
    finally:
        handle.remove()
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
