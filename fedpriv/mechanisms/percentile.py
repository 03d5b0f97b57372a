"""NVFlare's percentile filter: small numbers of an upload become zero, large ones a plateau. Nothing is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Real
from fedpriv.mechanisms.machinery.base import ClipNorm
from fedpriv.mechanisms.machinery.filters import (
    ALIKE,
    FilterSettings,
    around_zeros,
    is_cut,
    is_one_size,
    is_plateau,
    levels_of,
)

if TYPE_CHECKING:
    from torch import Tensor


@MECHANISMS.register
class PercentileSettings(FilterSettings):
    """Zero the smallest numbers, cut off the largest."""

    title: ClassVar[str] = "percentile filter"
    label: ClassVar[str] = "percentile"
    colours: ClassVar[tuple[str, str]] = ("#A50026", "#F46D43")
    marker: ClassVar[str] = "v"

    name: Literal["percentile"] = Field("percentile", description="privacy mechanism")
    percentile: Annotated[Real, Field(ge=0, le=100)] = Field(
        10.0, description="numbers whose size is at most this percentile of all sizes become zero"
    )
    gamma: ClipNorm = Field(0.01, description="larger numbers are cut off at this size")

    @classmethod
    @override
    def recognise(cls, numbers: Tensor) -> Self | None:
        sizes = numbers.abs()
        if not is_plateau(numbers) or is_one_size(numbers) or levels_of(numbers) is not None:
            return None
        zeros = float((numbers == 0).double().mean()) if is_cut(numbers) else 0.0
        return cls(percentile=100 * zeros, gamma=float(sizes.max()))

    @override
    def filtered(self, numbers: Tensor) -> Tensor:
        import torch

        sizes = numbers.abs().sort().values
        # As numpy interpolates between the two sizes next to the percentile.
        place = self.percentile / 100 * (len(sizes) - 1)
        low = sizes[int(place)]
        cutoff = low + (place - int(place)) * (sizes[min(int(place) + 1, len(sizes) - 1)] - low)
        return torch.where(numbers.abs() > cutoff, numbers.clamp(-self.gamma, self.gamma), 0.0)

    @override
    def within(self, released: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        plateau = self.gamma * (1 - ALIKE)
        least, most = around_zeros(released, released.abs() < plateau)
        far = torch.full_like(released, float("inf"))
        return torch.where(released <= -plateau, -far, least), torch.where(released >= plateau, far, most)
