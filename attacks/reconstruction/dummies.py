"""Gradients of many dummy batches at once, as an operator that can be differentiated.

Rows are dummy batches, one for each restart of each victim. Their gradients are asked for norms and inner products, and
are written out only when somebody needs the numbers themselves. Two routes give the same numbers: *ghost* keeps the
inputs and output gradients of Linear layers and convolutions, *vmap* writes out the gradients of any network.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attacks.reconstruction.factors import Factor, Written
from attacks.reconstruction.layers import RULES, Entry
from attacks.reconstruction.targets import Targets
from fedpriv.gradients import Block, Vector

if TYPE_CHECKING:
    from attacks.reconstruction.network import Network

__all__ = ["DummyGradients", "ghost_dummies", "plain_dummies", "written_dummies"]


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
            self._squared[block] = _sum([factor.squared() for _, factor in self._parts(block)])
        return self._squared[block]

    def norms(self, block: Block | None = None) -> Tensor:
        """Return the norms, (N, U); the derivative at a norm of zero is zero."""
        squared = self.squared(block)
        positive = squared > 0
        return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)

    def gram(self, block: Block | None = None) -> Tensor:
        """Return the inner products of each row's units, (N, U, U)."""
        return _sum([factor.gram() for _, factor in self._parts(block or self.names)])

    def dot(self, targets: Targets, block: Block | None = None) -> Tensor:
        """Return the inner products with each row's target, (N, U)."""
        key = (id(targets), block or self.names)
        if key not in self._dots:
            self._dots[key] = _sum([factor.dot(targets, names) for names, factor in self._parts(key[1])])
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


def written_dummies(
    network: "Network", parameters: Vector, images: Tensor, labels: Tensor, *, each: bool
) -> DummyGradients:
    """Compute the gradients by ``vmap``: N * U * K numbers, for any network that ``vmap`` can take.

    Args:
        network: the network.
        parameters: shared by all rows.
        images: (N, B, C, H, W), normalised.
        labels: probabilities (N, B, classes).
        each: whether each example is a unit; else the mean over the batch is the only one.

    Raises:
        AttackRefused: the network cannot be differentiated this way.
    """
    gradients = network.gradients(parameters, images, labels, shared=True, each=each)
    return DummyGradients({name: Written(value if each else value[:, None]) for name, value in gradients.items()})


def plain_dummies(network: "Network", parameters: Vector, images: Tensor, labels: Tensor) -> DummyGradients:
    """Compute the gradient of a single dummy batch by ordinary autograd: for a small network nothing costs less.

    Args:
        network: the network.
        parameters: of it.
        images: (1, B, C, H, W), normalised.
        labels: probabilities (1, B, classes).
    """
    with torch.enable_grad():
        leaves = {name: parameters[name].detach().requires_grad_() for name in network.names}
        loss = network.loss_alone(leaves, images[0], labels[0])
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
        joined = torch.cat([value.reshape(-1) for value in gradients])
    factors = {name: Written(value.view(1, 1, *value.shape)) for name, value in zip(leaves, gradients, strict=True)}
    return DummyGradients(factors, Written(joined.view(1, 1, -1)))


def ghost_dummies(
    network: "Network",
    parameters: Vector,
    images: Tensor,
    labels: Tensor,
    *,
    each: bool,
    autocast: torch.dtype | None = None,
) -> DummyGradients:
    """Compute the gradients layer by layer; right for networks whose ``route`` says so.

    Args:
        network: the network.
        parameters: shared by all rows.
        images: (N, B, C, H, W), normalised.
        labels: probabilities (N, B, classes).
        each: whether each example is a unit; else the mean over the batch is the only one.
        autocast: the type in which the network runs, where it is not that of the parameters.
    """
    rows, examples = images.shape[:2]
    units = (rows, examples if each else 1)
    lower = nullcontext() if autocast is None else torch.autocast(images.device.type, dtype=autocast)
    # Errors are derivatives with respect to the layers' outputs, which are in a graph only if their images are.
    images = images if images.requires_grad else images.detach().requires_grad_()
    with torch.enable_grad(), lower:
        logits, entries = network.follow(parameters, images.flatten(0, 1))
    with torch.enable_grad():
        total = network.losses(logits.to(images.dtype), labels.flatten(0, 1)).sum()
        trained = [entry for entry in entries if not set(_names(entry)).isdisjoint(network.names)]
        outputs = [entry.output for entry in trained]
        mean = total if each else total / examples
        errors = torch.autograd.grad(mean, outputs, create_graph=True, allow_unused=True)
        factors: dict[str, Factor] = {}
        for entry, error in zip(trained, errors, strict=True):
            felt = torch.zeros_like(entry.output) if error is None else error
            made = RULES[type(entry.layer)].factors(entry.layer, entry.kept, felt.to(images.dtype), units)
            factors |= dict(zip(_names(entry), made, strict=True))
    unused = {name: parameters[name] for name in network.names if name not in factors}
    factors |= {name: Written(value.new_zeros(*units, *value.shape)) for name, value in unused.items()}
    return DummyGradients({name: factors[name] for name in network.names})


def _names(entry: Entry) -> tuple[str, str]:
    prefix = f"{entry.name}." if entry.name else ""
    return f"{prefix}weight", f"{prefix}bias"


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
