"""Gradients of many dummy batches at once, as an operator that can be differentiated.

Rows are dummy batches, one for each restart of each victim. Their gradients are asked for norms and inner products, and
are written out only when somebody needs the numbers themselves. ``dummy_gradients.routes``
computes them.
"""

from collections.abc import Mapping

from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.factors import Factor, Written
from fedpriv.attacks.reconstruction.dummy_gradients.targets import Targets
from fedpriv.gradients import Block, Vector
from fedpriv.gradients.operator import total

__all__ = ["DummyGradients"]


class DummyGradients:
    """The gradients of N rows of U units: U = B examples, or one mean over a dummy batch.

    Every call takes a ``block``: the names of the parameters it is about; ``None`` means all of them. Everything can be
    differentiated with respect to the dummy images and label probabilities.

    Args:
        factors: parameter's name -> the gradients with respect to it, in the network's order.
        joined: all of them side by side, if that is there already.
    """

    def __init__(self, factors: Mapping[str, Factor], joined: Written | None = None) -> None:
        self._factors = dict(factors)
        self._squared: dict[Block, Tensor] = {}
        self._dots: dict[tuple[int, Block], Tensor] = {}
        self._joined: dict[Block, Written] = {} if joined is None else {tuple(factors): joined}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self._factors)

    def dimension(self, block: Block | None = None) -> int:
        """Return the number of coordinates."""
        return sum(self._factors[name].size for name in block or self.names)

    def squared(self, block: Block | None = None) -> Tensor:
        """Return the squared norms, (N, U)."""
        block = block or self.names
        if block not in self._squared:
            self._squared[block] = total([factor.squared() for _, factor in self._parts(block)])
        return self._squared[block]

    def gram(self, block: Block | None = None) -> Tensor:
        """Return the inner products of each row's units, (N, U, U)."""
        return total([factor.gram() for _, factor in self._parts(block or self.names)])

    def dot(self, targets: Targets, block: Block | None = None) -> Tensor:
        """Return the inner products with each row's target, (N, U)."""
        key = (id(targets), block or self.names)
        if key not in self._dots:
            self._dots[key] = total([factor.dot(targets, names) for names, factor in self._parts(key[1])])
        return self._dots[key]

    def rows(self, block: Block | None = None) -> Vector:
        """Return the gradients written out, tensors (N, U, *shape)."""
        return {name: self._factors[name].rows() for name in block or self.names}

    def _parts(self, block: Block) -> list[tuple[Block, Factor]]:
        """The block's factors with their names; all that are written out as one."""
        written = {name: factor for name in block if isinstance(factor := self._factors[name], Written)}
        parts: list[tuple[Block, Factor]] = [((name,), self._factors[name]) for name in block if name not in written]
        if written:
            names = tuple(written)
            if names not in self._joined:
                self._joined[names] = Written.joined(list(written.values()))
            parts.append((names, self._joined[names]))
        return parts
