"""Mods for anybody's Flower app: hear what leaves its clients, or have a mechanism act on it.

>>> from fedpriv.flower import privatise, tap
>>> app = ClientApp(mods=[tap(__file__), privatise(__file__)])  # doctest: +SKIP
"""

from fedpriv.flower.privatise import privatise
from fedpriv.flower.tap import tap

__all__ = ["privatise", "tap"]
