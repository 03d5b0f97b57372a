"""Noise in the forward pass: the layer that draws it.

With noise N(0, Sigma) at one place of a network, z = h(x) + N(0, Sigma), whatever follows is a randomised classifier.
:mod:`fedpriv.robustness.certify` proves that small perturbations do not change its vote (Lecuyer et al. 2019;
Cohen et al. 2019; Phan et al. 2019, Algorithm 1). h is affine in the image, and nothing of the image goes past z.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from fedpriv.gradients.calls import RandomLayer

Place = Literal["hidden", "input"]


class RobustnessNoise(RandomLayer):
    """Gaussian noise behind a layer, or before it; fresh for every example of every forward pass.

    It draws while training and inside :meth:`drawing`, and is silent in plain evaluation. Without ``deviations`` it is
    the layer alone.

    Attributes:
        deviations: standard deviation of each coordinate, shaped as one example's value at the place; ``None``: no
            noise. No buffer, because floating-point buffers are part of what clients upload.
    """

    def __init__(self, layer: nn.Module, place: Place = "hidden") -> None:
        super().__init__()
        self.layer, self.place = layer, place
        self.deviations: Tensor | None = None
        self._stream: torch.Generator | None = None
        self._sampling = False
        self._halts = False
        self._given: Tensor | None = None

    @property
    def draws(self) -> bool:
        """Whether there is noise to draw."""
        return self.deviations is not None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to what the layer returns, (B, ...), with noise behind or before it."""
        if self.place == "input":
            return self.layer(self._value(lambda: x))
        return self._value(lambda: self.layer(x))

    @contextmanager
    def drawing(self, stream: torch.Generator | None) -> Iterator[None]:
        """Draw fresh noise from a stream inside the block."""
        self._sampling, self._stream = True, stream
        try:
            yield
        finally:
            self._sampling, self._stream = False, None

    def value_at(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return h(x), the noiseless value at the place of the noise, (B, ...); what follows is not computed."""
        self._halts = True
        try:
            network(x)
        except _ReachedError as reached:
            return reached.value
        finally:
            self._halts = False
        raise ValueError("the network does not call its noise layer")

    def onwards(self, network: nn.Module, z: Tensor, x: Tensor) -> Tensor:
        """Return the logits (B, classes) that follow from z (B, ...) at the place of the noise, which is silent here.

        They do not depend on the images x unless something goes past the noise.
        """
        self._given = z
        try:
            return network(x)
        finally:
            self._given = None

    def drawn(self, value: Tensor, count: int, stream: torch.Generator) -> Tensor:
        """Return ``count`` noisy copies of each value (B, ...) at the place, (count B, ...): all first copies first."""
        return self._noise((count, *value.shape), value, stream).add_(value).flatten(0, 1)

    def _value(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._given is not None:
            return self._given
        value = compute()
        if self._halts:
            raise _ReachedError(value)
        if self.deviations is None or not (self.training or self._sampling):
            return value
        return value + self._noise(tuple(value.shape), value, self._stream)

    def _noise(self, shape: tuple[int, ...], like: Tensor, stream: torch.Generator | None) -> Tensor:
        """Noise in float32 at least; autocast would round it to bfloat16."""
        if self.deviations is None:
            raise ValueError("the noise layer has no deviations")
        dtype = torch.promote_types(like.dtype, torch.float32)
        noise = torch.randn(shape, generator=stream, dtype=dtype, device=like.device)
        return noise.mul_(self.deviations.to(like.device, dtype))


class _ReachedError(Exception):
    """The forward pass is at the noise, and goes no further."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("the noise is reached")
        self.value = value


def noise_layers(network: nn.Module) -> tuple[RobustnessNoise, ...]:
    """Return the noise layers of a network, in its order."""
    return tuple(layer for layer in network.modules() if isinstance(layer, RobustnessNoise))
