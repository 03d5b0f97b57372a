"""Aggregation rules, from the uploads of a round to one: their base; they import numpy, torch, Flower lazily."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.core.world import State
    from fedpriv.gradients import Vector
    from fedpriv.server.uploads import Upload

__all__ = ["CoordinateRule", "Rule"]


class Rule(Settings):
    """The keys of ``[federation]`` that one rule reads; a rule is a subclass with a name, entered in ``RULES``."""

    name: ClassVar[str]  # as in `federation.aggregation`
    needs_each: ClassVar[bool] = True  # whether it needs each upload; their weighted mean is enough otherwise

    @abstractmethod
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        """Put the uploads of a round together, at least :attr:`needed`, weighted by ``examples`` or ``uniform``."""

    @property
    def needed(self) -> int:
        """Uploads without which it cannot be computed."""
        return 1

    def check(self, clients: int) -> None:
        """Refuse rounds of fewer clients than :attr:`needed` by a ``ValueError``."""

    def warnings(self, clients: int) -> list[str]:
        """Say where a single wrong upload upsets it all the same, since a round has so few clients."""
        return []


class CoordinateRule(Rule):
    """A rule that puts uploads together coordinate by coordinate; every client counts once."""

    @abstractmethod
    def combine(self, rows: "np.ndarray") -> "np.ndarray":
        """Return one tensor from the rows (n, *shape) of n uploads."""

    @override
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        import numpy as np
        import torch

        from fedpriv.core.world import State

        def combined(vectors: "Sequence[Vector]") -> "Vector":
            rows = {name: np.stack([vector[name].numpy() for vector in vectors]) for name in vectors[0]}
            return {
                name: torch.as_tensor(self.combine(row), dtype=vectors[0][name].dtype) for name, row in rows.items()
            }

        states = [upload.state for upload in uploads]
        return State(combined([each.parameters for each in states]), combined([each.buffers for each in states]))
