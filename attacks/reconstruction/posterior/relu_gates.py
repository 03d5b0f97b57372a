"""Which units of a ReLU network are on, as unknowns of their own next to the image.

A gradient jumps where a unit goes on or off, and an image that is slightly off has some units wrong: the likelihood
takes each for strong evidence, so that searches over images alone end far off, with lucky units. But the upload itself
says which units are on: those whose rows are more than noise. So the units are unknowns too. Each has a gate, the
probability that it is on; the network multiplies with gates where it would compare with zero, which leaves an objective
without jumps, and a gate that contradicts the image costs what the contradiction is worth (the Kullback-Leibler
divergence between two coins). Once the gates are decided, what is left is a network without kinks.

The image is the mean of a normal distribution fitted to the posterior
(``posterior.averaging``), of a prior whose contrast is free: where little is seen of an
image, the most probable one is too pale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks.reconstruction.dummy_gradients.relus import ReluMode, kink_inputs
from fedpriv.attacks.reconstruction.dummy_gradients.routes import ghost_obstacle
from fedpriv.attacks.reconstruction.matching.matcher import Matcher
from fedpriv.attacks.reconstruction.posterior.averaging import fit_cloud
from fedpriv.attacks.reconstruction.posterior.likelihood import Whitening, misfit
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["Gated", "can_be_gated", "read_gated"]

FIRST = 8.0  # logits of the gates at first, of a unit whose input is as large as their root mean square
MOST = 6.0  # of these logits
SHARP = 32.0  # how sure an image is of its units: logits, for an input as large as their root mean square
GATE_RATE = 4.0  # the learning rate of gates over that of images
CONTRAST_RATE = 0.4  # the same for the contrast
LEAST_SPREAD = 0.05  # of the logarithm of the contrast


class Gated(ReluMode):
    """Within this context the ReLUs, in the order in which they are called, multiply with gates of their inputs' shape.

    Attributes:
        inputs: what they got.
    """

    def __init__(self, gates: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self._gates = gates

    @override
    def relu(self, inputs: Tensor) -> Tensor:
        self.inputs.append(inputs)
        return inputs * self._gates[len(self.inputs) - 1]


def can_be_gated(scene: Scene, victim: Victim) -> bool:
    """Whether the dummies go through the network once, row by row, so that gates can be told apart."""
    one_pass = victim.model.training is None and not victim.more
    noisy = victim.model.mechanism.protects  # without noise closed forms are exact
    return one_pass and noisy and not ghost_obstacle(scene.network, torch.Size(scene.shape), scene.classes)


def read_gated(
    scene: Scene, victims: Sequence[Victim], labels: Tensor, coordinates: Tensor, steps: int, rate: float
) -> Tensor:
    """Infer which units are on, and the images with them.

    Args:
        scene: what is public.
        victims: one a row; of the same parameters and upload model.
        labels: int64 (n, B).
        coordinates: (n, B, C, H, W), in the prior's coordinates: images that were read, where it starts.
        steps: of Adam: half of them for the units, half for the images given these.
        rate: its learning rate.

    Returns:
        Coordinates (n, B, C, H, W) of the posterior's mean; the given ones where these are more probable with the same
        units, as they may be where so little noise was added that rounding is more.
    """
    whitening = Whitening(scene.prior, scene.shape)
    inputs = kink_inputs(scene.network, victims[0].parameters, whitening.images(coordinates).flatten(0, 1))
    sizes = [_size(values) for values in inputs]
    first = [(FIRST * values / size).clamp(-MOST, MOST) for values, size in zip(inputs, sizes, strict=True)]
    matcher = Matcher(scene.network, victims, misfit)
    spread = max(scene.prior.contrast / 2, LEAST_SPREAD)
    posterior = _Posterior(matcher, whitening, F.one_hot(labels, scene.classes).to(scene.mean), spread, sizes)
    even = coordinates.new_zeros(len(coordinates))
    rates = (CONTRAST_RATE * rate, *[GATE_RATE * rate] * len(first))
    basis = scene.prior.basis
    searched = fit_cloud(posterior.searched, coordinates, (even, *first), basis, steps // 2, rate, rates)
    gates = [(logits > 0).to(coordinates) for logits in searched.others[1:]]
    ended = fit_cloud(posterior.given(gates), coordinates, (even,), basis, steps - steps // 2, rate, rates[:1])
    mean = _contrasted(ended.middle, ended.others[0])
    with torch.no_grad():
        decided = posterior.given(gates)
        better = decided(mean, even) <= decided(coordinates, even)
    return torch.where(better[:, None, None, None, None], mean, coordinates)


@dataclass(frozen=True, eq=False)
class _Posterior:
    """Minus the logarithm of the posterior (n,), but for constants.

    Attributes:
        matcher: gives minus the log-likelihood.
        whitening: of the prior.
        labels: probabilities (n, B, classes).
        spread: standard deviation of the logarithm of the contrast.
        sizes: of the inputs of each ReLU, (n * B, 1, ...).
    """

    matcher: Matcher
    whitening: Whitening
    labels: Tensor
    spread: float
    sizes: Sequence[Tensor]

    def searched(self, coordinates: Tensor, contrast: Tensor, *logits: Tensor) -> Tensor:
        """Of images, the logarithm of their contrast (n,), and the gates' logits."""
        with Gated([gate.sigmoid() for gate in logits]) as gated:
            total = self._misfits(coordinates, contrast) + self._energies(coordinates, contrast)
        for values, size, gate in zip(gated.inputs, self.sizes, logits, strict=True):
            costs = _coins_differ(gate, SHARP * values / size).flatten(1).sum(dim=1)
            total = total + costs.view(len(total), -1).sum(dim=1)
        return total

    def given(self, gates: Sequence[Tensor]) -> Callable[..., Tensor]:
        """The same with gates that are decided."""

        def posterior(coordinates: Tensor, contrast: Tensor) -> Tensor:
            return self.misfits(coordinates, contrast, gates) + self._energies(coordinates, contrast)

        return posterior

    def misfits(self, coordinates: Tensor, contrast: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Minus the log-likelihood alone, with gates that are decided."""
        with Gated(gates):
            return self._misfits(coordinates, contrast)

    def _misfits(self, coordinates: Tensor, contrast: Tensor) -> Tensor:
        return self.matcher(self.whitening.images(_contrasted(coordinates, contrast)), self.labels)

    def _energies(self, coordinates: Tensor, contrast: Tensor) -> Tensor:
        return (coordinates.square().flatten(1).sum(dim=1) + (contrast / self.spread).square()) / 2


def _contrasted(coordinates: Tensor, contrast: Tensor) -> Tensor:
    return contrast.exp()[:, None, None, None, None] * coordinates


def _size(values: Tensor) -> Tensor:
    """The root mean square of each row's values (R, ...), as (R, 1, ...)."""
    squares = values.square().flatten(1).mean(dim=1)
    return squares.sqrt().clamp(min=1e-30).reshape(-1, *[1] * (values.ndim - 1))


def _coins_differ(first: Tensor, second: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of coins with these logits."""
    heads = first.sigmoid() * (F.logsigmoid(first) - F.logsigmoid(second))
    return heads + (-first).sigmoid() * (F.logsigmoid(-first) - F.logsigmoid(-second))
