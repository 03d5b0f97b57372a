"""The networks: of each its settings and what builds it.

All take normalised images (B, C, H, W) and give logits. These files are read whenever an experiment is, so they import
torch where they use it.
"""

from fedpriv.models.machinery.settings import MODEL, ModelSettings, model_settings, recorded_model

__all__ = ["MODEL", "ModelSettings", "model_settings", "recorded_model"]
