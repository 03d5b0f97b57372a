"""Dummy batches against uploads: what each row's dummies are expected to send, with what was heard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.dummies import DummyGradients
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.dummy_gradients.routes import dummy_gradients
from fedpriv.attacks.reconstruction.dummy_gradients.targets import Targets
from fedpriv.attacks.reconstruction.upload_model.model import UploadModel, Victim
from fedpriv.gradients import Block, Vector, flattened
from fedpriv.gradients.operator import total, wide

__all__ = ["Comparison", "Matcher", "Objective", "Precision"]

Precision = Literal["bfloat16", "float32", "float64"]
"""The type in which networks run and inner products are made; with bfloat16 the latter are made in float32."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What N rows' dummies are expected to send, with what was heard; all in gradient space.

    Where a mechanism's noise differs between coordinates, both are divided by its standard deviation (hgm). Numbers are
    float64 where the device has that. Everything but ``heard`` can be differentiated.

    Attributes:
        dot: (N, m), inner products of expected and heard upload, one for each of the m blocks.
        squared: (N, m), squared norms of the expected upload's blocks.
        heard: (N, m), squared norms of the heard upload's blocks.
        blocks: the names of each block's parameters.
        model: how these uploads come about.
        expected: writes out the expected uploads, tensors (N, *shape): N * K numbers and more to differentiate them.
        targets: see :meth:`upload`.
    """

    dot: Tensor
    squared: Tensor
    heard: Tensor
    blocks: tuple[Block, ...]
    model: UploadModel
    expected: Callable[[], Vector]
    targets: Targets

    def upload(self) -> Vector:
        """Write out the heard uploads, tensors (N, *shape)."""
        return self.targets.rows()


Objective = Callable[[Comparison], Tensor]
"""What an attack minimises: one number a row, (N,)."""


class Matcher:
    """The mismatch between dummy batches and uploads, one row for each (victim, restart).

    Of a victim with several uploads it is the sum over these.

    Rows with the same parameters and the same kind of upload go through the network together; put them in one matcher.
    What a row gets does not depend on the others, up to the rounding of sums.

    Args:
        network: the network.
        rows: the victim of each row; all with the same number of examples.
        objective: compares expected and heard uploads.
        precision: the type to compute in; ``None``: that of the victims' parameters. Images, labels and results keep
            theirs.
        often: whether it will be called so often that preparing the uploads for that pays.
    """

    def __init__(
        self,
        network: Network,
        rows: Sequence[Victim],
        objective: Objective,
        precision: Precision | None = None,
        *,
        often: bool = True,
    ) -> None:
        parameters = next(iter(rows[0].parameters.values()))
        given = str(parameters.dtype).removeprefix("torch.") if precision is None else precision
        self._autocast = torch.bfloat16 if given == "bfloat16" else None
        self._dtype = torch.float64 if given == "float64" else torch.float32
        self._network = network.cast(self._dtype)
        self._objective = objective
        self._groups = [_Group.of(members, self._dtype, often) for members in _alike(rows)]

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mismatch (N,) of images (N, B, C, H, W) with label probabilities (N, B, classes)."""
        images, labels = images.to(self._dtype), labels.to(self._dtype)
        if len(self._groups) == 1:
            return self._objective(self._compare(self._groups[0], images, labels))
        losses = [
            self._objective(self._compare(group, images[group.index], labels[group.index])) for group in self._groups
        ]
        # A row with several uploads is in several groups, and in each of them once.
        total = torch.zeros(len(images), dtype=losses[0].dtype, device=losses[0].device)
        for group, values in zip(self._groups, losses, strict=True):
            total = total.index_add(0, group.index, values)
        return total

    def select(self, rows: Tensor) -> "Matcher":
        """Return the matcher of some of the rows, by their numbers (n,)."""
        chosen = object.__new__(Matcher)
        chosen.__dict__.update(self.__dict__)
        wanted = rows.tolist()
        groups = (group.select(wanted) for group in self._groups)
        chosen._groups = [group for group in groups if len(group.targets)]
        return chosen

    def _compare(self, group: "_Group", images: Tensor, labels: Tensor) -> Comparison:
        if group.model.training is not None:
            return group.written(group.model.trained(self._network, group.parameters, images, labels))
        gradients = dummy_gradients(
            self._network, group.parameters, images, labels, each=group.model.needs_examples, autocast=self._autocast
        )
        return group.compare(gradients)


@dataclass(frozen=True, eq=False)
class _Group:
    """Rows with the same parameters and upload model.

    Attributes:
        index: the rows' numbers in the matcher.
        parameters: what the clients started from.
        model: how the uploads come about.
        targets: the heard uploads, standardised.
        heard: (N, m), their squared norms.
        blocks: parameters that share a direction.
        scales: the mechanism's, of the tensors.
    """

    index: Tensor
    parameters: Vector
    model: UploadModel
    targets: Targets
    heard: Tensor
    blocks: tuple[Block, ...]
    scales: Mapping[str, float] | None

    @staticmethod
    def of(members: Sequence[tuple[int, Victim]], dtype: torch.dtype, often: bool) -> "_Group":
        """Prepare the rows of one parameter set and upload model."""
        victims = {id(victim): victim for _, victim in members}
        place = {key: number for number, key in enumerate(victims)}
        first = members[0][1]
        vectors = [first.model.mechanism.standardise(_cast(victim.gradient, dtype)) for victim in victims.values()]
        targets = Targets(vectors, [place[id(victim)] for _, victim in members], often)
        blocks = first.model.mechanism.directions(tuple(first.parameters))
        heard = torch.stack([total([targets.squared(name) for name in block]) for block in blocks], dim=1)
        device = next(iter(first.parameters.values())).device
        index = torch.tensor([number for number, _ in members], device=device)
        scales = first.model.mechanism.scales(tuple(first.parameters))
        return _Group(index, _cast(first.parameters, dtype), first.model, targets, heard, blocks, scales)

    def select(self, wanted: Sequence[int]) -> "_Group":
        """Keep some of the matcher's rows, and number them anew."""
        mine = {number: position for position, number in enumerate(self.index.tolist())}
        chosen = [(position, mine[number]) for position, number in enumerate(wanted) if number in mine]
        index = torch.tensor([position for position, _ in chosen], dtype=torch.long, device=self.index.device)
        rows = [row for _, row in chosen]
        return _Group(
            index, self.parameters, self.model, self.targets.select(rows), self.heard[rows], self.blocks, self.scales
        )

    def compare(self, gradients: DummyGradients) -> Comparison:
        """Compare the dummies' gradients with what was heard, without writing them out where that can be done."""
        if self.scales is None:
            return self._written(gradients)
        for block in self.blocks:
            gradients.dot(self.targets, block)  # the norms that the weights may need come with it
        weights = self.model.weights(gradients, self.scales)
        dot, squared = [], []
        for block in self.blocks:
            parts = [(names, weight) for names, weight in weights if set(names) <= set(block)]
            dot.append(total([(weight * gradients.dot(self.targets, names)).sum(dim=1) for names, weight in parts]))
            squared.append(total([_squared(gradients, names, weight) for names, weight in parts]))

        def write() -> Vector:
            return {
                name: _weighted(weight, rows)
                for names, weight in weights
                for name, rows in gradients.rows(names).items()
            }

        return self._comparison(torch.stack(dot, dim=1), torch.stack(squared, dim=1), write)

    def _written(self, gradients: DummyGradients) -> Comparison:
        rows = gradients.rows()
        if not self.model.needs_examples:
            rows = self.model.expected({name: value[:, 0] for name, value in rows.items()})
        else:
            rows = self.model.expected_of_examples(rows)
        return self.written(rows)

    def written(self, rows: Vector) -> Comparison:
        """Compare expected uploads (N, *shape) that are written out with what was heard."""
        expected, heard = self.model.mechanism.standardise(rows), self.targets.rows()
        dot = [total([_inner(expected[name], heard[name]) for name in block]) for block in self.blocks]
        squared = [total([_inner(expected[name], expected[name]) for name in block]) for block in self.blocks]
        return self._comparison(torch.stack(dot, dim=1), torch.stack(squared, dim=1), lambda: expected)

    def _comparison(self, dot: Tensor, squared: Tensor, write: Callable[[], Vector]) -> Comparison:
        return Comparison(wide(dot), wide(squared), wide(self.heard), self.blocks, self.model, write, self.targets)


def _alike(rows: Sequence[Victim]) -> list[list[tuple[int, Victim]]]:
    """The rows' uploads, with the rows' numbers, by parameter set and upload model."""
    groups: dict[tuple[int, UploadModel], list[tuple[int, Victim]]] = {}
    for number, row in enumerate(rows):
        for victim in row.uploads:
            groups.setdefault((id(victim.parameters), victim.model), []).append((number, victim))
    return list(groups.values())


def _squared(gradients: DummyGradients, block: Block, weights: Tensor) -> Tensor:
    """The squared norm (N,) of the sum of the units with weights (N, U)."""
    if weights.shape[1] == 1:
        return (weights.square() * gradients.squared(block)).sum(dim=1)
    return torch.einsum("nu,nuv,nv->n", weights, gradients.gram(block), weights)


def _weighted(weights: Tensor, rows: Tensor) -> Tensor:
    """The sum over the units of rows (N, U, *shape) with weights (N, U): (N, *shape)."""
    return torch.bmm(weights[:, None], flattened(rows, 2)).reshape(len(rows), *rows.shape[2:])


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return flattened(one * other).sum(dim=1)


def _cast(vector: Vector, dtype: torch.dtype) -> Vector:
    return {name: value.to(dtype) for name, value in vector.items()}
