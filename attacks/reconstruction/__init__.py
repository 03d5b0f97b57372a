"""Reconstruction: images and labels from uploads, by matching gradients.

``run_attack`` runs one attack on many observations as one batch. Attacks are the modules of ``attacks.methods``.
"""

from fedpriv.attacks.reconstruction.candidates import Optimum, best_decisions
from fedpriv.attacks.reconstruction.engine import AttackJob, run_attack
from fedpriv.attacks.reconstruction.results import AttackRefused, Reconstruction, Restart
from fedpriv.attacks.reconstruction.scene import Progress
from fedpriv.attacks.reconstruction.upload_model import (
    Heard,
    OtherBatches,
    other_batches,
    preflight,
    refusal,
    stackable,
)

__all__ = [
    "AttackJob",
    "AttackRefused",
    "Heard",
    "Optimum",
    "OtherBatches",
    "Progress",
    "Reconstruction",
    "Restart",
    "best_decisions",
    "other_batches",
    "preflight",
    "refusal",
    "run_attack",
    "stackable",
]
