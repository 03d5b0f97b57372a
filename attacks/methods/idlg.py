"""Improved Deep Leakage from Gradients (Zhao et al. 2020): labels first."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from attacks.settings import MatchingSettings
from fedpriv.registry import ATTACKS
from fedpriv.settings import Count

if TYPE_CHECKING:
    from attacks.reconstruction.recipes.parts import Recipe

__all__ = ["IdlgSettings"]


@ATTACKS.register
class IdlgSettings(MatchingSettings):
    """Labels are read off the last layer; then as DLG."""

    name: ClassVar[str] = "idlg"
    title: ClassVar[str] = "Improved Deep Leakage from Gradients"
    label: ClassVar[str] = "iDLG"
    reference: ClassVar[str] = "Zhao, Mopuri and Bilen: iDLG: Improved Deep Leakage from Gradients, 2020"
    smooth: ClassVar[bool] = True

    iterations: Count = Field(300, description="L-BFGS iterations")
    restarts: Count = Field(8, description="random starts; the one with the lowest loss of its own is kept")

    @classmethod
    @override
    def methods(cls) -> "tuple[Recipe, ...]":
        from attacks.reconstruction.recipes.parts import Recipe

        return (Recipe("squared-distance", "lbfgs", variables="decorrelated"),)
