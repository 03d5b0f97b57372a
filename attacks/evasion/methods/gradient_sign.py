"""Attacks along the sign of the loss's gradient: one step, many, from random starts, and with momentum."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.evasion.methods import EVASIONS, EvasionAttack

if TYPE_CHECKING:
    from torch import Tensor


@EVASIONS.register
class Fgsm(EvasionAttack):
    """One step of the whole size."""

    name: ClassVar[str] = "fgsm"
    title: ClassVar[str] = "Fast gradient sign"
    reference: ClassVar[str] = (
        "Goodfellow, Shlens and Szegedy: Explaining and Harnessing Adversarial Examples, ICLR 2015"
    )
    single: ClassVar[bool] = True


@EVASIONS.register
class Ifgsm(EvasionAttack):
    """Steps of an equal share of the size, from the image."""

    name: ClassVar[str] = "ifgsm"
    title: ClassVar[str] = "Iterated fast gradient sign"
    reference: ClassVar[str] = (
        "Kurakin, Goodfellow and Bengio: Adversarial Examples in the Physical World, ICLR Workshop 2017"
    )


@EVASIONS.register
class Pgd(EvasionAttack):
    """Longer steps, from a uniformly random point of the ball."""

    name: ClassVar[str] = "pgd"
    title: ClassVar[str] = "Projected gradient descent"
    reference: ClassVar[str] = (
        "Madry, Makelov, Schmidt, Tsipras and Vladu: "
        "Towards Deep Learning Models Resistant to Adversarial Attacks, ICLR 2018"
    )
    far: ClassVar[float] = 2.5
    starts_anywhere: ClassVar[bool] = True


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
