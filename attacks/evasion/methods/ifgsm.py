"""Many small steps along the gradient's sign (Kurakin et al. 2017)."""

from typing import ClassVar

from fedpriv.attacks.evasion.table import EVASIONS, EvasionAttack


@EVASIONS.register
class Ifgsm(EvasionAttack):
    """Steps of an equal share of the size, from the image."""

    name: ClassVar[str] = "ifgsm"
    title: ClassVar[str] = "Iterated fast gradient sign"
    reference: ClassVar[str] = (
        "Kurakin, Goodfellow and Bengio: Adversarial Examples in the Physical World, ICLR Workshop 2017"
    )
