"""Mods for any Flower app: record what leaves its clients, or apply a mechanism to it.

>>> from fedpriv.flower import privatise, tap
>>> app = ClientApp(mods=[tap(__file__), privatise(__file__)])  # doctest: +SKIP
"""

from fedpriv.flower.privatise import privatise
from fedpriv.flower.tap import tap

__all__ = ["privatise", "tap"]
