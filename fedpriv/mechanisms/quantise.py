"""Quantisation: each number of an upload is rounded to one of a few levels. Nothing is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Integer
from fedpriv.mechanisms.machinery.filters import FilterSettings, is_one_size, levels_of

if TYPE_CHECKING:
    from torch import Tensor


@MECHANISMS.register
class QuantiseSettings(FilterSettings):
    """Round to levels between the largest number and its opposite."""

    title: ClassVar[str] = "quantisation"
    label: ClassVar[str] = "quantised"
    colours: ClassVar[tuple[str, str]] = ("#01665E", "#80CDC1")
    marker: ClassVar[str] = ">"

    name: Literal["quantise"] = Field("quantise", description="privacy mechanism")
    bits: Annotated[Integer, Field(ge=2, le=16)] = Field(
        8, description="of each number; 2^(bits - 1) - 1 levels a sign"
    )

    @classmethod
    @override
    def recognise(cls, numbers: Tensor) -> Self | None:
        bits = None if is_one_size(numbers) else levels_of(numbers)  # one level a sign is the filter of signs
        return None if bits is None else cls(bits=bits)

    @override
    def filtered(self, numbers: Tensor) -> Tensor:
        step = self._step(numbers)
        return (numbers / step).round() * step

    @override
    def within(self, released: Tensor) -> tuple[Tensor, Tensor]:
        half = self._step(released) / 2  # the largest number is a level, and leaves as it is
        return released - half, released + half

    def _step(self, numbers: Tensor) -> Tensor:
        step: Tensor = numbers.abs().max() / (2 ** (self.bits - 1) - 1)
        return step.clamp(min=1e-30)
