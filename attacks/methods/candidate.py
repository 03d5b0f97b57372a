"""The best decision among candidate records (after Hayes, Mahloujifar and Balle 2023)."""

from typing import ClassVar, Literal

from pydantic import Field

from fedpriv.attacks.settings import GRADIENT_MATCHING, Access, AttackSettings
from fedpriv.core.registry import ATTACKS


@ATTACKS.register
class CandidateSettings(AttackSettings):
    """Pick each image out of a list by the mechanism's own likelihood."""

    name: ClassVar[str] = "candidate"
    title: ClassVar[str] = "Most probable among candidate records"
    label: ClassVar[str] = "Candidate"
    reference: ClassVar[str] = (
        "after Hayes, Mahloujifar and Balle: Bounding Training Data Reconstruction in DP-SGD, NeurIPS 2023 "
        "(prior-aware attack)"
    )
    needs: ClassVar[tuple[Access, ...]] = (*GRADIENT_MATCHING, Access.CANDIDATES)
    iterations: ClassVar[int] = 1
    restarts: ClassVar[int] = 1
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.reconstruction.candidates:run_candidates",)

    labels: Literal["given", "unknown"] = Field(
        "given", description="whether the records come with their labels; unknown: all classes are weighed"
    )
