"""Filters: what hides some numbers of an upload and adds no noise. Nothing is proven about them.

An adversary who knows the filter knows more than a number of what it hides: a zero says that the number was small, a
plateau that it was large. An attack looks for examples whose update lies where the upload says
(:meth:`FilterSettings.within`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Integer, Real
from fedpriv.mechanisms.machinery.base import ClipNorm, Mechanism, MechanismSettings

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import GradientOperator, Vector
    from fedpriv.mechanisms.machinery.law import Noise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


# Sizes differ by this share of the largest where weights are sent and the update is a difference of float32.
_ALIKE = 1e-4
_ENOUGH = 100  # numbers that are not zero: of fewer chance may make many alike
_MOST_BITS = 16
_OFF_LEVEL = 0.01  # of a step: rounding is less, and of a hundred numbers chance puts none so near
_PLATEAU = 0.02  # share of the numbers that have the largest size: rounding alone gives next to none


class FilterSettings(MechanismSettings):
    """A filter: a fixed function of a whole upload's numbers, laid end to end."""

    filters: ClassVar[bool] = True

    unit: Literal["update"] = Field("update", description="a filter acts on whole uploads, once a round")

    @classmethod
    def recognise(cls, numbers: Tensor) -> Self | None:
        """Return the filter's settings if an upload's numbers (K,) look as if they had gone through it."""
        return None

    @abstractmethod
    def filtered(self, numbers: Tensor) -> Tensor:
        """Return what leaves of the numbers (K,)."""

    @abstractmethod
    def within(self, released: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value (K,) that each number had, by what left of it (K,)."""

    def on_scale(self, numbers: Tensor, released: Tensor) -> Tensor:
        """Return numbers (K,) with the length that the release tells, where it tells it in other ways."""
        return numbers

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        return Filter(self)


@dataclass(frozen=True)
class Filter(Mechanism):
    """A filter as a mechanism, which adds no noise."""

    constrains: ClassVar[bool] = True

    settings: FilterSettings

    @property
    @override
    def name(self) -> str:
        return self.settings.name

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        import torch

        ones = torch.full((gradients.examples,), 1 / batch_size, dtype=gradients.dtype, device=gradients.device)
        return self.expected(gradients.combine(ones))

    @override
    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        return float("inf")

    @override
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        from fedpriv.mechanisms.machinery.law import Noise

        return Noise((sum(tensors),), (0.0,))

    @override
    def expected(self, gradient: Vector) -> Vector:
        from fedpriv.mechanisms.machinery.whole_numbers import split

        return split(self.settings.filtered(_flat(gradient)), gradient)

    @override
    def fitted(self, gradient: Vector, released: Vector) -> Vector:
        """Return the release, off by what the gradient has outside of what the release allows; differentiable."""
        import torch

        from fedpriv.mechanisms.machinery.whole_numbers import split

        told = _flat(released)
        least, most = self.settings.within(told)
        numbers = self.settings.on_scale(_flat(gradient), told)
        return split(told + numbers - torch.minimum(torch.maximum(numbers, least), most), gradient)


def _flat(vector: Vector) -> Tensor:
    import torch

    return torch.cat([value.flatten() for value in vector.values()])


def recognised(upload: Vector) -> FilterSettings | None:
    """Return the filter that an upload seems to have gone through; ``None``: its numbers look like any update's."""
    numbers = _flat(upload)
    if int((numbers != 0).sum()) < _ENOUGH:
        return None
    seen = (kind.recognise(numbers) for kind in MECHANISMS.values() if kind.filters)
    return next((settings for settings in seen if settings is not None), None)


def _is_plateau(numbers: Tensor) -> bool:
    """Whether many numbers (K,) have the same size, the largest."""
    sizes = numbers.abs()
    return bool((sizes >= sizes.max() * (1 - _ALIKE)).double().mean() > _PLATEAU)


def _is_one_size(numbers: Tensor) -> bool:
    """Whether all numbers (K,) that are not zero have the same size."""
    sizes = numbers[numbers != 0].abs()
    return bool((sizes >= sizes.max() * (1 - _ALIKE)).all())


def _is_cut(numbers: Tensor) -> bool:
    """Whether numbers (K,) were made zero for being small: then the others' sizes do not reach down to zero."""
    sizes = numbers[numbers != 0].abs()
    return len(sizes) < len(numbers) and float(sizes.min() / sizes.median()) * len(sizes) > 10.0


def _levels_of(numbers: Tensor) -> int | None:
    """Return the least number of bits, from 2 to 16, with which all numbers (K,) are on even levels; ``None``: none."""
    sizes = numbers.abs() / numbers.abs().max()
    for bits in range(2, _MOST_BITS + 1):
        places = sizes * (2 ** (bits - 1) - 1)
        if bool(((places - places.round()).abs() < _OFF_LEVEL).all()):
            return bits
    return None


def _around_zeros(released: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
    """The values as they are; zeros lie as far from it as the smallest of the others that are ``told`` exactly."""
    import torch

    kept = released != 0
    least = torch.where(kept & told, released.abs(), float("inf")).amin()
    return torch.where(kept, released, -least), torch.where(kept, released, least)


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
        if not _is_plateau(numbers) or _is_one_size(numbers) or _levels_of(numbers) is not None:
            return None
        zeros = float((numbers == 0).double().mean()) if _is_cut(numbers) else 0.0
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

        plateau = self.gamma * (1 - _ALIKE)
        least, most = _around_zeros(released, released.abs() < plateau)
        far = torch.full_like(released, float("inf"))
        return torch.where(released <= -plateau, -far, least), torch.where(released >= plateau, far, most)


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
        bits = None if _is_one_size(numbers) else _levels_of(numbers)  # one level a sign is the filter of signs
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
        return cls() if _is_one_size(numbers) else None

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
        if _is_plateau(numbers) or not _is_cut(numbers) or _levels_of(numbers) is not None:
            return None
        return cls(share=float((numbers != 0).double().mean()))

    @override
    def filtered(self, numbers: Tensor) -> Tensor:
        import torch

        least = numbers.abs().topk(max(1, math.ceil(self.share * len(numbers)))).values[-1]
        return torch.where(numbers.abs() >= least, numbers, 0.0)

    @override
    def within(self, released: Tensor) -> tuple[Tensor, Tensor]:
        return _around_zeros(released, released != 0)
