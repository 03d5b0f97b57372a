"""Privacy mechanisms, one file each: its settings, its release, what is proven about it, and its words for people.

These files are read whenever an experiment is, so they import torch and scipy where they use them.
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
