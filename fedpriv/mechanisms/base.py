"""What a mechanism is: it turns the gradients of a batch into one vector that may leave the client."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedpriv.gradients import Block, GradientOperator, Vector
from fedpriv.gradients.rounding import ACCURACY, reaches
from fedpriv.mechanisms.law import Noise
from fedpriv.randomness import NoiseStream

__all__ = [
    "Mechanism",
    "check_batch_size",
    "check_clip_norm",
    "check_noise",
    "clip_factor",
    "clip_factors",
    "inverse_norm",
    "normal_norm",
]

# The share of a norm by which what is combined may be longer without being clipped for it.
NEGLIGIBLE = 1e-5


class Mechanism(ABC):
    """A privacy mechanism; subclasses are frozen dataclasses of public numbers.

    Attributes:
        name: as in the settings.
        protects: whether a release is anything but the mean gradient itself.
    """

    name: ClassVar[str]
    protects: ClassVar[bool] = True

    def release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        """Return one noisy mean gradient.

        A gradient that is not finite, in any of its parameters, counts as zero: an error would tell the receiver, with
        no noise at all, that one is among them. So nothing depends on the gradients' values but what is returned.

        Args:
            gradients: the batch; it may be empty, and its size may be private.
            batch_size: the public number by which the noisy sum is divided, at least 1.
            noise: the only source of randomness.

        Raises:
            ValueError: ``batch_size`` is not positive.
        """
        check_batch_size(batch_size)
        return self._release(self._admitted(gradients), batch_size, noise)

    @abstractmethod
    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        """Return one noisy mean gradient of gradients that are finite; batch_size is positive."""

    def _admitted(self, gradients: GradientOperator) -> GradientOperator:
        """The gradients, with zeros in place of those that are not finite."""
        finite = reaches(gradients.magnitudes())
        return gradients if bool(finite.all()) else gradients.masked(finite)

    @abstractmethod
    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        """Return a Euclidean norm that a release exceeds with probability ``tail`` at most; infinite where none holds.

        Args:
            examples: the most examples that the batch can hold.
            batch_size: the public number by which the noisy sum is divided.
            tensors: the number of coordinates of each parameter tensor, in the model's order.
            tail: above 0, below 1.
        """

    @abstractmethod
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        """Return how a release scatters around its expectation, in standardised coordinates.

        Args:
            tensors: the number of coordinates of each parameter tensor, in the model's order.
            examples: gradients in the sum.
            divisor: the number by which the noisy sum is divided, above 0.
        """

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        """Return the expected factor of one gradient's block, one of those of :meth:`blocks_of`; differentiable.

        Args:
            squared: squared norms of the block after :meth:`standardise`, of any shape; that of the result.
            dimension: coordinates of the block.
            blocks: how many blocks the gradient has.
        """
        raise NotImplementedError(f"the factor of {self.name} does not follow from Euclidean norms")

    def blocks_of(self, names: Block) -> tuple[Block, ...]:
        """The groups of tensors that share one factor; empty where it changes within a tensor."""
        return (names,)

    def directions(self, names: Block) -> tuple[Block, ...]:
        """The groups of tensors whose directions the noise turns independently of each other."""
        return (names,)

    def deviations(self, names: Block) -> Vector:
        """By what :meth:`standardise` divides each tensor: numbers of its shape, or (1,)."""
        return dict.fromkeys(names, torch.ones(1))

    def scales(self, names: Block) -> Mapping[str, float] | None:
        """Return what :meth:`standardise` multiplies each tensor with.

        ``None`` where the mechanism does more to an expected gradient than to multiply each block with its
        :meth:`weight`, or divides a tensor by different numbers: then gradients have to be written out.
        """
        deviations = self.deviations(names)
        even = all(bool((value == value.flatten()[0]).all()) for value in deviations.values())
        if not (even and self.blocks_of(names)):
            return None
        return {name: 1 / float(value.flatten()[0]) for name, value in deviations.items()}

    def expected(self, gradient: Vector) -> Vector:
        """Return the mean of what :meth:`release` returns for a batch of one with this gradient; differentiable.

        Each block times its :meth:`weight`; a mechanism for which that does not hold says here what does.
        """
        standard, blocks = self.standardise(gradient), self.blocks_of(tuple(gradient))
        expected: Vector = {}
        for block in blocks:
            squared = torch.stack([standard[name].square().sum() for name in block]).sum()
            factor = self.weight(squared, sum(gradient[name].numel() for name in block), len(blocks))
            expected |= {name: factor * gradient[name] for name in block}
        return expected

    def standardise(self, released: Vector) -> Vector:
        """Divide each coordinate by a public number such that the noise is as large in all of them.

        Args:
            released: a release, an expected one, or many of them: tensors (*shape) or (N, *shape).
        """
        return released


def check_noise(name: str, value: float) -> None:
    """Raise ValueError unless a noise parameter (zero: no noise) is a finite number, at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} = {value} is not allowed: it is a finite number, at least 0")


def check_clip_norm(clip_norm: float) -> None:
    """Raise ValueError unless the bound of a gradient's norm is a finite number above 0."""
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm = {clip_norm} is not allowed: it is a finite number above 0")


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a public batch size below 1."""
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} is not allowed: it divides the sum, so it is at least 1")


def clip_factors(norms: Tensor, roundings: Tensor, clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / norm) for norms (B,), smaller where rounding may make a gradient longer than its norm.

    With r the bound of the rounding (see :meth:`GradientOperator.roundings`), what is combined of a gradient of norm n
    has at most the norm n + 2 r: the norm and the combination may be off by r each. So a gradient is clipped by that,
    and by r / ACCURACY at least, so that what is summed to make it, too, is not much longer than clip_norm: else noise
    that is added to it would be rounded away. Where 2 r is below a hundred-thousandth of n, as in most batches, it is
    left out. A norm too large for its type gives 0.

    Args:
        norms: (B,), not negative; infinite or NaN where their squares were.
        roundings: (B,), in the same norm.
        clip_norm: above 0.
    """
    doubtful = 2 * roundings > NEGLIGIBLE * norms
    if bool(doubtful.any()):
        longest = torch.maximum(norms + 2 * roundings, roundings / ACCURACY)
        norms = torch.where(doubtful, longest, norms)
    # Next to nothing (7e-12 in float32): of shorter ones squares may be 0.
    return (clip_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny ** 0.3)).clamp_(max=1).nan_to_num_(nan=0.0)


def clip_factor(squared: Tensor, clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / norm) from one squared norm; differentiable, also at zero."""
    clipped = squared > clip_norm**2
    # The branch that is not taken is kept away from the derivative of the root at 0.
    return torch.where(clipped, clip_norm * torch.where(clipped, squared, 1.0).rsqrt(), 1.0)


def inverse_norm(squared: Tensor) -> Tensor:
    """Return 1 / norm from squared norms, and 0 where the norm is next to nothing; differentiable, also at zero.

    Next to nothing (7e-12 in float32) is what the derivative, a power of -3/2, would overflow at.
    """
    known = squared > torch.finfo(squared.dtype).tiny ** 0.6
    return torch.where(known, torch.where(known, squared, 1.0).rsqrt(), 0.0)


def normal_norm(dimension: float, steepest: float, tail: float) -> float:
    """Return what the norm of a normal vector exceeds with probability ``tail`` at most.

    Gaussian concentration (Boucheron, Lugosi and Massart 2013, Theorem 5.6) of the norm, whose mean is at most the root
    of the summed variances and which changes by at most the largest deviation times the change of a standard normal.

    Args:
        dimension: the sum of the coordinates' variances.
        steepest: the largest standard deviation of a coordinate.
        tail: above 0, below 1.
    """
    return math.sqrt(dimension) + steepest * math.sqrt(2 * math.log(1 / tail))
