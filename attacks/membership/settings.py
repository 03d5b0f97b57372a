"""The section ``[audit]`` of sweeps: membership inference on every trial."""

from pydantic import Field, field_validator

from fedpriv.core.errors import InputError
from fedpriv.core.settings import Count, Settings


class AuditConfig(Settings):
    """Membership inference on every trial, as ``fedpriv audit`` does it."""

    references: Count = Field(32, description="reference models to train for each trial; an even number from 6")
    pairs: Count = Field(1000, ge=2, description="members, and as many non-members, to tell apart; at least 2")

    @field_validator("references")
    @classmethod
    def _in_twos(cls, references: int) -> int:
        if references < 6 or references % 2:
            raise InputError("expected an even number from 6")
        return references
