"""Privacy mechanisms, a file for each or for a family: settings, release, proof, and descriptions.

Loading an experiment imports these files, so they import torch and scipy only where they use them.
"""

from fedpriv.mechanisms.machinery.base import (
    MECHANISM,
    MechanismSettings,
    NoisySettings,
    mechanism_settings,
    noise_keys,
    recorded_mechanism,
)

__all__ = ["MECHANISM", "MechanismSettings", "NoisySettings", "mechanism_settings", "noise_keys", "recorded_mechanism"]
