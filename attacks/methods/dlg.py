"""Deep Leakage from Gradients (Zhu et al. 2019), and with labels first (iDLG, Zhao et al. 2020)."""

from typing import ClassVar

from pydantic import Field

from fedpriv.attacks.settings import MatchingSettings, Recipe, Restarts
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count


@ATTACKS.register
class DlgSettings(MatchingSettings):
    """L-BFGS on the squared distance of gradients."""

    name: ClassVar[str] = "dlg"
    title: ClassVar[str] = "Deep Leakage from Gradients"
    label: ClassVar[str] = "DLG"
    reference: ClassVar[str] = "Zhu, Liu and Han: Deep Leakage from Gradients, NeurIPS 2019"
    smooth: ClassVar[bool] = True
    made_of: ClassVar[tuple[Recipe, ...]] = (
        Recipe("squared-distance", "lbfgs", variables="decorrelated", labels=("known", "optimised")),
        Recipe("squared-distance", "lbfgs", variables="pixels", labels=("known", "optimised")),
    )

    iterations: Count = Field(300, description="L-BFGS iterations")
    restarts: Restarts = 8


@ATTACKS.register
class IdlgSettings(DlgSettings):
    """Labels are read off the last layer; then as DLG."""

    name: ClassVar[str] = "idlg"
    title: ClassVar[str] = "Improved Deep Leakage from Gradients"
    label: ClassVar[str] = "iDLG"
    reference: ClassVar[str] = "Zhao, Mopuri and Bilen: iDLG: Improved Deep Leakage from Gradients, 2020"
    made_of: ClassVar[tuple[Recipe, ...]] = (Recipe("squared-distance", "lbfgs", variables="decorrelated"),)
