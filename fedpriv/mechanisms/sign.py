"""Signs: of each number of an upload only its sign leaves, and the mean size of all. Nothing is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms.machinery.filters import FilterSettings, is_one_size

if TYPE_CHECKING:
    from torch import Tensor


@MECHANISMS.register
class SignSettings(FilterSettings):
    """Keep the signs and the mean size."""

    title: ClassVar[str] = "signs"
    label: ClassVar[str] = "sign"
    colours: ClassVar[tuple[str, str]] = ("#8C510A", "#DFC27D")
    marker: ClassVar[str] = "<"

    name: Literal["sign"] = Field("sign", description="privacy mechanism")

    @classmethod
    @override
    def recognise(cls, numbers: Tensor) -> Self | None:
        return cls() if is_one_size(numbers) else None

    @override
    def filtered(self, numbers: Tensor) -> Tensor:
        return numbers.sign() * numbers.abs().mean()

    @override
    def within(self, released: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        far = torch.full_like(released, float("inf"))
        return torch.where(released < 0, -far, 0.0), torch.where(released > 0, far, 0.0)

    @override
    def on_scale(self, numbers: Tensor, released: Tensor) -> Tensor:
        return numbers * (released.abs().max() / numbers.abs().mean().clamp(min=1e-30))
