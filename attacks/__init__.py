"""The adversary: what it sees, what it tries, and how well it did.

The adversary works from :class:`~attacks.observation.Observation` objects alone. Only the referee sees the truth, which
its caller rebuilds; nothing flows from the referee back into an attack.

:func:`reconstruct` attacks a gradient or an update of your own model.
"""

from attacks.own_model import AttackWarning, reconstruct
from attacks.reconstruction.results import Reconstruction

__all__ = ["AttackWarning", "Reconstruction", "reconstruct"]
