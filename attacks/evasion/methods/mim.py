"""Momentum on the gradient (Dong et al. 2018)."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.evasion.table import EVASIONS, EvasionAttack

if TYPE_CHECKING:
    from torch import Tensor


@EVASIONS.register
class Mim(EvasionAttack):
    """Steps along the sum of all gradients so far, each divided by its mean size (decay 1)."""

    name: ClassVar[str] = "mim"
    title: ClassVar[str] = "Momentum iterative method"
    reference: ClassVar[str] = (
        "Dong, Liao, Pang, Su, Zhu, Hu and Li: Boosting Adversarial Attacks with Momentum, CVPR 2018"
    )

    @classmethod
    @override
    def followed(cls, before: "Tensor | None", gradient: "Tensor") -> "Tensor":
        mean = gradient.abs().mean(dim=(1, 2, 3), keepdim=True)
        # A flat loss adds nothing; its own mean would make it NaN.
        share = gradient / mean.where(mean > 0, 1)
        return share if before is None else before + share
