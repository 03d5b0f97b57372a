"""An evasion attack of somebody else: steps that move the pixels with the largest gradients, and leave the others."""

from typing import ClassVar

from torch import Tensor

from fedpriv.attacks.evasion.methods import EvasionAttack


class Few(EvasionAttack):
    """Follows what is at least half as large as the largest."""

    name: ClassVar[str] = "few"
    title: ClassVar[str] = "Few pixels"
    reference: ClassVar[str] = "nobody, 2026"

    @classmethod
    def followed(cls, before: Tensor | None, gradient: Tensor) -> Tensor:
        sizes = gradient.abs()
        return gradient.where(sizes >= sizes.amax(dim=(1, 2, 3), keepdim=True) / 2, 0)
