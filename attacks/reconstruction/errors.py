"""Why an attack is not tried, or cannot go on."""

import torch

from fedpriv.errors import InputError

__all__ = ["AttackRefused", "is_lack_of_memory"]


class AttackRefused(InputError):
    """The attack's model of the upload does not hold for these settings: running it would measure nothing."""


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, which torch reports on a CPU as any other ``RuntimeError``."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory"))
