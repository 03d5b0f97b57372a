"""Projected gradient descent from random starts (Madry et al. 2018)."""

from typing import ClassVar

from fedpriv.attacks.evasion.table import EVASIONS, EvasionAttack


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
