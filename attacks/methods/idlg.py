"""Improved Deep Leakage from Gradients (Zhao et al. 2020): labels first."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.attacks.methods.dlg import DlgSettings
from fedpriv.attacks.settings import Recipe
from fedpriv.core.registry import ATTACKS


@ATTACKS.register
class IdlgSettings(DlgSettings):
    """Labels are read off the last layer; then as DLG."""

    name: ClassVar[str] = "idlg"
    title: ClassVar[str] = "Improved Deep Leakage from Gradients"
    label: ClassVar[str] = "iDLG"
    reference: ClassVar[str] = "Zhao, Mopuri and Bilen: iDLG: Improved Deep Leakage from Gradients, 2020"

    @classmethod
    @override
    def methods(cls) -> tuple[Recipe, ...]:
        return (Recipe("squared-distance", "lbfgs", variables="decorrelated"),)
