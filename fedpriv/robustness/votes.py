"""Votes of a network with noise in it: how often each class wins, over fresh draws for one image at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.core.randomness import torch_stream
from fedpriv.core.threads import keep_freed_memory
from fedpriv.robustness.noise import RobustnessNoise, Smoothing

# Votes that are cast at once make no layer write more numbers than these: a processor's cache has room for them.
_PIECE = 1 << 19


@dataclass(frozen=True, eq=False)
class SmoothedNetwork:
    """A network that adds fresh noise in every forward pass, asked for votes."""

    network: nn.Module  # in evaluation mode; the whole one, from normalised images to logits
    smoothing: Smoothing  # its noise, scaled; its weights do not change any more
    # (B, C, H, W), floating point on [0, 1] -> what the network is fed, of the same type and device
    normalise: Callable[[Tensor], Tensor]
    classes: int  # number of logits
    seed: int  # what streams of votes are made of. Votes convince nobody who lets the attacker know it.

    @property
    def layer(self) -> RobustnessNoise:
        """Where the noise is."""
        return self.smoothing.layer

    def predictions(self, images: Tensor) -> Tensor:
        """Return the class (B,) of images (B, C, H, W) on [0, 1], without noise."""
        with torch.inference_mode():
            logits: Tensor = self.network(self.normalise(self._moved(images)))
            return logits.argmax(dim=1).cpu()

    def noisy_logits(self, images: Tensor, draws: int, stream: torch.Generator) -> Tensor:
        """Return logits (draws, B, classes) with fresh noise in each, differentiable, the first layer computed once."""
        inputs = self.normalise(images)
        value = self.layer.value_at(self.network, inputs)
        logits = self._onwards(self.layer.drawn(value, draws, stream), inputs)
        return logits.view(draws, len(images), -1)

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Return how often each class won, (B, classes), int64, on the CPU; the first layer runs once an image."""
        keep_freed_memory()
        with torch.inference_mode():
            step = max(1, _PIECE // self._widest(images[:1]))
            return torch.stack(
                [self._votes(image[None], count, step, purpose, row) for image, row in zip(images, rows, strict=True)]
            )

    def _votes(self, image: Tensor, count: int, step: int, purpose: str, row: int) -> Tensor:
        inputs = self.normalise(self._moved(image))
        value = self.layer.value_at(self.network, inputs)
        stream = torch_stream(self.seed, purpose, row, device=value.device)
        won = torch.zeros(self.classes, dtype=torch.int64)
        for start in range(0, count, step):
            taken = min(step, count - start)
            z = self.layer.drawn(value, taken, stream)
            won += torch.bincount(self._onwards(z, inputs).argmax(dim=1).cpu(), minlength=self.classes)
        return won

    def _onwards(self, z: Tensor, inputs: Tensor) -> Tensor:
        """The logits from z; a network may look at how many images it is given, and at nothing else of them."""
        return self.layer.onwards(self.network, z, inputs[:1].detach().expand(len(z), -1, -1, -1))

    def _widest(self, image: Tensor) -> int:
        """The most numbers that a layer makes of one image (1, C, H, W)."""
        sizes = [self.smoothing.spread.numel()]

        def note(layer: nn.Module, given: object, made: object) -> None:
            sizes.append(made.numel() if isinstance(made, Tensor) else 0)

        hooks = [layer.register_forward_hook(note) for layer in self.network.modules()]
        try:
            self.network(self.normalise(self._moved(image)))
        finally:
            for hook in hooks:
                hook.remove()
        return max(sizes)

    def _moved(self, images: Tensor) -> Tensor:
        first = next(self.network.parameters())
        return images.to(first.device, first.dtype)
