"""The base of evasion attacks, which its modules enter; they are read with settings, so none imports torch at once."""

from abc import ABC
from typing import TYPE_CHECKING, ClassVar

from fedpriv.attacks.settings import Access
from fedpriv.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


EVASIONS = Registry(
    "evasion attack",
    "fedpriv.attacks.evasion.methods",
    "fedpriv.evasions",
    "fedpriv.attacks.evasion.methods:EvasionAttack",
)
NOISELESS = "-noiseless"
"""What the name of an evasion attack ends with where it looks at the network without its noise."""


class EvasionAttack(ABC):
    """Steps along the loss's gradient at an image; a subclass with a name is an attack."""

    name: ClassVar[str]  # in experiment files and on the command line
    title: ClassVar[str]  # what it is called
    reference: ClassVar[str]  # the paper
    needs: ClassVar[tuple[Access, ...]] = (Access.MODEL,)
    single: ClassVar[bool] = False  # whether it makes one step of the whole size, however many are asked for
    far: ClassVar[float] = 1.0  # how many times the size all steps together go, for the largest change of a pixel
    # whether it starts at a random point of the ball, not at the image; restarts are for these
    starts_anywhere: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Refuse a name that reads like an attack's variant."""
        if str(getattr(cls, "name", "")).endswith(NOISELESS):
            raise TypeError(f"{cls.__qualname__} has the name {cls.name!r}; every attack has its own {NOISELESS}")

    @classmethod
    def followed(cls, before: "Tensor | None", gradient: "Tensor") -> "Tensor":
        """Return what the next step follows, (B, C, H, W): the loss's gradient, unless an attack remembers more."""
        return gradient


def named_evasion(name: str) -> tuple[type[EvasionAttack], bool]:
    """Return an attack, and whether it is the weaker variant that looks at the network without its noise."""
    kind: type[EvasionAttack] = EVASIONS[name.removesuffix(NOISELESS)]
    return kind, name.endswith(NOISELESS)


def noiseless_name(name: str) -> str:
    """Return the name of an attack's variant without the noise, which is what the paper's released code does."""
    return name.removesuffix(NOISELESS) + NOISELESS
