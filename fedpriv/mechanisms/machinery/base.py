"""What a mechanism is: it turns the gradients of a batch into one vector that may leave the client."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import Block, GradientOperator, StackedGradients, Vector
    from fedpriv.mechanisms.machinery.law import Noise


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

    def release_each(self, gradients: StackedGradients, batch_size: int, noises: Sequence[NoiseStream]) -> Vector:
        """Return one noisy mean gradient for each of M models, (M, *shape): what :meth:`release` draws for it alone.

        Here one after the other. A mechanism that does the same to every number calls :meth:`_release_at_once`.

        Args:
            gradients: of all models.
            batch_size: the public number by which each noisy sum is divided, at least 1.
            noises: a stream for each model.

        Raises:
            ValueError: ``batch_size`` is not positive.
        """
        import torch

        pairs = zip(gradients.each(), noises, strict=True)
        released = [self.release(own, batch_size, noise) for own, noise in pairs]
        return {name: torch.stack([vector[name] for vector in released]) for name in gradients.shapes}

    def _release_at_once(self, gradients: StackedGradients, batch_size: int, noises: Sequence[NoiseStream]) -> Vector:
        """As :meth:`release_each`, all models together."""
        from fedpriv.core.randomness import NoiseStreams

        return self.release(gradients, batch_size, NoiseStreams(noises))

    @abstractmethod
    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        """Return one noisy mean gradient of gradients that are finite; batch_size is positive."""

    def _admitted(self, gradients: GradientOperator) -> GradientOperator:
        """The gradients, with zeros in place of those that are not finite."""
        from fedpriv.gradients.rounding import reaches

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

    def draw_products(
        self,
        grams: NDArray[np.float64],
        dimensions: Sequence[int],
        variances: Sequence[float],
        sources: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> NDArray[np.float64] | None:
        """Draw the inner products of releases of some expected releases with all of them, (m, draws, N).

        ``None``: they do not follow from inner products, or nobody wrote down how; releases are drawn whole then.

        Args:
            grams: (m, N, N), the inner products of N expected releases of a batch of one, standardised, in each of the
                m blocks of :meth:`directions`.
            dimensions: coordinates of each block.
            variances: of :meth:`noise`.
            sources: of which expected release each draw is made, (draws,).
            rng: source of randomness; not one that protects anybody.
        """
        return None

    def blocks_of(self, names: Block) -> tuple[Block, ...]:
        """The groups of tensors that share one factor; empty where it changes within a tensor."""
        return (names,)

    def directions(self, names: Block) -> tuple[Block, ...]:
        """The groups of tensors whose directions the noise turns independently of each other."""
        return (names,)

    def deviations(self, names: Block) -> Vector:
        """By what :meth:`standardise` divides each tensor: numbers of its shape, or (1,)."""
        import torch

        return dict.fromkeys(names, torch.ones(1))

    def scales(self, names: Block) -> Mapping[str, float] | None:
        """Return what :meth:`standardise` multiplies each tensor with.

        ``None`` where the mechanism does more to an expected gradient than to multiply each block with a factor that
        follows from its Euclidean norm (see :class:`BlockMechanism`), or divides a tensor by different numbers: then
        gradients have to be written out.
        """
        return None

    @abstractmethod
    def expected(self, gradient: Vector) -> Vector:
        """Return the mean of what :meth:`release` returns for a batch of one with this gradient; differentiable."""

    def standardise(self, released: Vector) -> Vector:
        """Divide each coordinate by a public number such that the noise is as large in all of them.

        Args:
            released: a release, an expected one, or many of them: tensors (*shape) or (N, *shape).
        """
        return released


class BlockMechanism(Mechanism):
    """A mechanism whose expected release is each block of the gradient times a factor that follows from its norm.

    Attacks need no gradients of single examples for it, only their norms and inner products.
    """

    @abstractmethod
    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        """Return the expected factor of one gradient's block, one of those of :meth:`blocks_of`; differentiable.

        Args:
            squared: squared norms of the block after :meth:`standardise`, of any shape; that of the result.
            dimension: coordinates of the block.
            blocks: how many blocks the gradient has.
        """

    @override
    def scales(self, names: Block) -> Mapping[str, float] | None:
        deviations = self.deviations(names)
        even = all(bool((value == value.flatten()[0]).all()) for value in deviations.values())
        if not (even and self.blocks_of(names)):
            return None
        return {name: 1 / float(value.flatten()[0]) for name, value in deviations.items()}

    @override
    def expected(self, gradient: Vector) -> Vector:
        import torch

        standard, blocks = self.standardise(gradient), self.blocks_of(tuple(gradient))
        expected: Vector = {}
        for block in blocks:
            squared = torch.stack([standard[name].square().sum() for name in block]).sum()
            factor = self.weight(squared, sum(gradient[name].numel() for name in block), len(blocks))
            expected |= {name: factor * gradient[name] for name in block}
        return expected


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
