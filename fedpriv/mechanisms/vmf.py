"""The directional mechanism: von Mises-Fisher noise on the direction of each gradient (DirDP-SGD, Algorithm 1)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, cast

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Epsilon, NonNegative
from fedpriv.mechanisms.machinery.base import (
    BlockMechanism,
    ClipNorm,
    Contender,
    Mechanism,
    NoisySettings,
    block_length,
    block_runs,
    block_sizes,
    check_batch_size,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import Block, GradientOperator, StackedGradients, Vector
    from fedpriv.mechanisms.machinery.law import Noise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution

MOST_KAPPA = 1e7


@MECHANISMS.register
class VmfSettings(NoisySettings):
    """Keep the direction alone, and turn it by a von Mises-Fisher draw."""

    title: ClassVar[str] = "directional noise (VMF)"
    label: ClassVar[str] = "directional (VMF)"
    summary: ClassVar[str] = (
        "Directional noise: gradients are scaled to length 1 and replaced by von Mises-Fisher draws (DirDP-SGD)."
    )
    colours: ClassVar[tuple[str, str]] = ("#D55E00", "#F5924A")
    marker: ClassVar[str] = "^"
    proven_by: ClassVar[str] = "fedpriv.accounting.pure_proof:DirectionalProof"
    parameter: ClassVar[str] = "kappa"
    nominal: ClassVar[str] = "the paper's, 2 kappa"

    name: Literal["vmf"] = Field("vmf", description="privacy mechanism")
    epsilon: Epsilon | None = Field(None, description="nominal, the paper's: 2 kappa")
    kappa: Annotated[NonNegative, Field(le=MOST_KAPPA)] | None = Field(
        None, description="concentration of each draw; small: more noise"
    )
    clip_norm: ClipNorm = Field(1.0, description="on updates: their public length")
    blocks: str = Field(
        "whole", description="one draw for the gradient, one a tensor (layer), or one each D numbers (size:D)"
    )

    @field_validator("blocks")
    @classmethod
    def _block_size(cls, blocks: str) -> str:
        if blocks not in ("whole", "layer") and not re.fullmatch(r"size:[1-9][0-9]{0,11}", blocks):
            raise ValueError("allowed: whole, layer, or size:D with a whole number D of 1 or more, such as size:256")
        return blocks

    @model_validator(mode="after")
    def _epsilon_fits(self) -> Self:
        if self.epsilon is not None and self.epsilon > 2 * MOST_KAPPA:
            raise self.wrong("epsilon", f"vmf allows up to {2 * MOST_KAPPA:g}, twice the largest kappa")
        return self

    @property
    def effective(self) -> tuple[str, ...]:
        """All but ``clip_norm`` on examples, whose directions have length 1."""
        return tuple(key for key in super().effective if key != "clip_norm" or self.unit == "update")

    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        """Return the mechanism; the directions of examples have length 1, those of updates ``clip_norm``."""
        return VmfMechanism(self.given_noise(), self.blocks, 1.0 if self.unit == "example" else self.clip_norm)

    @property
    def variant(self) -> str:
        """The blocks."""
        return self.blocks

    @override
    def dimensions(self, tensors: Sequence[int]) -> tuple[int, ...]:
        return block_sizes(self.blocks, tensors)

    @override
    def draws(self, tensors: Sequence[int]) -> int:
        return sum(count for count, _ in block_runs(self.blocks, tensors))

    @classmethod
    @override
    def contenders(cls, whole: tuple[int, ...], small: tuple[int, ...]) -> tuple[Contender, ...]:
        return (("vmf, whole", whole), (f"vmf, blocks of {max(small)}", small))


@dataclass(frozen=True)
class VmfMechanism(BlockMechanism):
    """Each block of each gradient is scaled (not clipped) to a public length and turned by a von Mises-Fisher draw.

    A gradient of zero has no direction and gets a uniform one. So does a gradient that is not finite, and one of which
    only rounding errors are left (see ``vmf_sampling``); that depends on the gradient alone. The sum over the
    batch is drawn exactly from the gradients' inner products, not from B draws of K numbers; for blocks of a given
    size, which cut through layers, from draws of the blocks (see the module ``block_sum``).
    """

    name: ClassVar[str] = "vmf"
    asks_often: ClassVar[bool] = True

    kappa: float  # concentration, from 0 (a uniform direction: no signal) to 1e7
    blocks: str = "whole"  # one draw for whole, a tensor (layer), or D coordinates (size:D)
    scale: float = 1.0  # the length of each block's draw, above 0
    least_draws: int = 0  # in each release: what it lacks of them are uniform directions

    def __post_init__(self) -> None:
        if not 0 <= self.kappa <= MOST_KAPPA:
            raise InputError(key="kappa", given=self.kappa, allowed=f"it is a number from 0 to {MOST_KAPPA:g}")
        block_length(self.blocks)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InputError(key="scale", given=self.scale, allowed="it is a finite number above 0")

    @override
    def padded(self, draws: int) -> Self:
        return replace(self, least_draws=draws)

    @override
    def release_each(self, gradients: StackedGradients, batch_size: int, noises: Sequence[NoiseStream]) -> Vector:
        from fedpriv.mechanisms.machinery.vmf_sampling import Draws, draw_sums

        if block_length(self.blocks) is not None or self.least_draws:
            return super().release_each(gradients, batch_size, noises)
        check_batch_size(batch_size)
        admitted = cast("StackedGradients", self._admitted(gradients))
        draws = [Draws(self.kappa, self.scale / batch_size, noise, noise.numpy()) for noise in noises]
        released: Vector = {}
        for block in self.directions(tuple(gradients.shapes)):
            released |= draw_sums(admitted, block, draws)
        return released

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        from fedpriv.gradients import zeros_like
        from fedpriv.mechanisms.machinery.block_sum import draw_block_sums
        from fedpriv.mechanisms.machinery.vmf_sampling import Draws, draw_sum

        draws = Draws(self.kappa, self.scale / batch_size, noise, noise.numpy())
        padding = max(0, self.least_draws - gradients.examples)
        released: Vector = {}
        if block_length(self.blocks) is None:
            for block in self.directions(tuple(gradients.shapes)):
                released |= draw_sum(gradients, block, draws, padding)
            return released
        runs = block_runs(self.blocks, [shape.numel() for shape in gradients.shapes.values()])
        released = draw_block_sums(gradients, runs, draws)
        if not padding:
            return released
        more = draw_block_sums(zeros_like(gradients, padding), runs, draws)
        return {name: value + more[name] for name, value in released.items()}

    def expected(self, gradient: Vector) -> Vector:
        """Return scale * A_K(kappa) * g / |g| per block, zero for a block that is zero; differentiable."""
        import torch

        tensors = [value.numel() for value in gradient.values()]
        runs = block_runs(self.blocks, tensors)
        flat = torch.cat([value.reshape(-1) for value in gradient.values()])
        parts = zip(runs, flat.split([count * size for count, size in runs]), strict=True)
        means = torch.cat([self._means(part.view(-1, size)).view(-1) for (_, size), part in parts]).split(tensors)
        return {name: mean.view(value.shape) for mean, (name, value) in zip(means, gradient.items(), strict=True)}

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        """Return the length of ``examples`` draws that all point in one direction; nothing exceeds it."""
        return (
            max(examples, self.least_draws)
            * self.scale
            * math.sqrt(len(block_sizes(self.blocks, tensors)))
            / batch_size
        )

    @override
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        from fedpriv.mechanisms.machinery.law import Noise

        runs = block_runs(self.blocks, tensors)
        padding, squared = max(0, self.least_draws - examples), (self.scale / divisor) ** 2
        variances = [squared * (examples * self._across(size) + padding / size) for _, size in runs]
        return Noise(tuple(count * size for count, size in runs), tuple(variances))

    @override
    def draw_products(
        self,
        grams: NDArray[np.float64],
        dimensions: Sequence[int],
        variances: Sequence[float],
        sources: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> NDArray[np.float64] | None:
        import numpy as np

        from fedpriv.mechanisms.machinery.vmf_sampling import directional_products

        lengths = np.sqrt(np.diagonal(grams, axis1=1, axis2=2))
        if self.kappa == 0:  # nothing is expected
            return np.zeros((len(grams), len(sources), grams.shape[1]))
        if block_length(self.blocks) is not None or self.least_draws > 1 or not np.all(lengths > 0):
            return None
        # The mean of a draw is shorter than the draw, by the mean cosine.
        drawn = lengths.mean(axis=1) / [self._length(size) / self.scale for size in dimensions]
        parts = zip(grams, dimensions, drawn, strict=True)
        return np.stack(
            [directional_products(gram, self.kappa, size, length, sources, rng) for gram, size, length in parts]
        )

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        """Return the length of the mean over that of the gradient; 0, and constant, where there is no direction."""
        from fedpriv.mechanisms.machinery.clipping import inverse_norm

        return self._length(dimension) * inverse_norm(squared)

    @override
    def blocks_of(self, names: Block) -> tuple[Block, ...]:
        return () if block_length(self.blocks) is not None else self.directions(names)

    @override
    def directions(self, names: Block) -> tuple[Block, ...]:
        return tuple((name,) for name in names) if self.blocks == "layer" else (names,)

    def _means(self, blocks: Tensor) -> Tensor:
        """The means of draws around blocks, both (m, d)."""
        from fedpriv.mechanisms.machinery.clipping import inverse_norm

        return self._length(blocks.shape[1]) * (inverse_norm(blocks.square().sum(dim=1, keepdim=True)) * blocks)

    def _length(self, dimension: int) -> float:
        from fedpriv.mechanisms.machinery.vmf_sampling import mean_cosine

        return self.scale * mean_cosine(self.kappa, dimension)

    def _across(self, dimension: int) -> float:
        """The variance of a draw in each coordinate across its mean direction (see the module ``law``)."""
        from fedpriv.mechanisms.machinery.vmf_sampling import mean_cosine

        return mean_cosine(self.kappa, dimension) / self.kappa if self.kappa else 1 / dimension
