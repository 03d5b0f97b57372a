"""Attacks: what the adversary observes, its attacks, and their scores.

The adversary sees only :class:`~fedpriv.attacks.observation.Observation` objects. Only the referee, which computes the
scores, sees the true data; attacks get nothing from the referee.

:func:`reconstruct` attacks a gradient or an update of your own model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.attacks.own_model import AttackWarning, reconstruct
    from fedpriv.attacks.reconstruction.results import Reconstruction

__all__ = ["AttackWarning", "Reconstruction", "reconstruct"]


def __getattr__(name: str) -> Any:
    """Import a name of this package when it is first used: settings are here, too, and are read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedpriv.attacks import own_model

    return getattr(own_model, name)
