"""The first Linear layer in closed form (Phong et al. 2018; batches: SPEAR, Dimitrov et al. 2024)."""

from typing import ClassVar

from fedpriv.attacks.settings import AttackSettings, PriorFile
from fedpriv.core.registry import ATTACKS


@ATTACKS.register
class ClosedFormSettings(AttackSettings):
    """The first Linear layer's gradient read without optimisation."""

    name: ClassVar[str] = "closed_form"
    title: ClassVar[str] = "First Linear layer in closed form"
    label: ClassVar[str] = "Closed form"
    reference: ClassVar[str] = (
        "Phong, Aono, Hayashi, Wang and Moriai: Privacy-Preserving Deep Learning via Additively Homomorphic "
        "Encryption, 2018; batches: Dimitrov, Baader, Müller and Vechev: SPEAR, NeurIPS 2024"
    )
    stacks: ClassVar[bool] = True
    simulates: ClassVar[bool] = False
    iterations: ClassVar[int] = 1
    restarts: ClassVar[int] = 1
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.reconstruction.first_layer.closed_form:run_closed_form",)

    prior: PriorFile = ""
