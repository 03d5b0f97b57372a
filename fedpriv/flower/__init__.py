"""Mods for any Flower app: record its clients' replies, or apply a mechanism to them.

>>> from fedpriv.flower import privatise, tap
>>> app = ClientApp(mods=[tap(__file__), privatise(__file__)])  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.flower._privatise import privatise
    from fedpriv.flower._tap import tap

__all__ = ["privatise", "tap"]


def __getattr__(name: str) -> Any:
    """Import a mod when it is first used: both take PyTorch, which no command loads before it needs it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedpriv.flower._{name}"), name)
