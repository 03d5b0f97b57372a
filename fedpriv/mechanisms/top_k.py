"""Top-k sparsification: only the largest numbers of an upload leave. Nothing is proven."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Real
from fedpriv.mechanisms.machinery.filters import FilterSettings, around_zeros, is_cut, is_plateau, levels_of

if TYPE_CHECKING:
    from torch import Tensor


@MECHANISMS.register
class TopSettings(FilterSettings):
    """Keep the largest numbers."""

    title: ClassVar[str] = "top-k sparsification"
    label: ClassVar[str] = "top-k"
    colours: ClassVar[tuple[str, str]] = ("#762A83", "#C2A5CF")
    marker: ClassVar[str] = "^"

    name: Literal["top-k"] = Field("top-k", description="privacy mechanism")
    share: Annotated[Real, Field(gt=0, le=1)] = Field(0.1, description="of the numbers that are kept, the largest")

    @classmethod
    @override
    def recognise(cls, numbers: Tensor) -> Self | None:
        if is_plateau(numbers) or not is_cut(numbers) or levels_of(numbers) is not None:
            return None
        return cls(share=float((numbers != 0).double().mean()))

    @override
    def filtered(self, numbers: Tensor) -> Tensor:
        import torch

        least = numbers.abs().topk(max(1, math.ceil(self.share * len(numbers)))).values[-1]
        return torch.where(numbers.abs() >= least, numbers, 0.0)

    @override
    def within(self, released: Tensor) -> tuple[Tensor, Tensor]:
        return around_zeros(released, released != 0)
