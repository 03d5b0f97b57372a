"""One step along the gradient's sign (Goodfellow et al. 2015)."""

from typing import ClassVar

from fedpriv.attacks.evasion.table import EVASIONS, EvasionAttack


@EVASIONS.register
class Fgsm(EvasionAttack):
    """One step of the whole size."""

    name: ClassVar[str] = "fgsm"
    title: ClassVar[str] = "Fast gradient sign"
    reference: ClassVar[str] = (
        "Goodfellow, Shlens and Szegedy: Explaining and Harnessing Adversarial Examples, ICLR 2015"
    )
    single: ClassVar[bool] = True
