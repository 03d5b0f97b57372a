"""Gradient matching: compare the expected uploads of dummy batches with observed uploads, in bounded memory."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from fedpriv.attacks.reconstruction.dummy_gradients.factors import DummyGradients, Targets
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, dummy_gradients, ghost_obstacle
from fedpriv.attacks.reconstruction.results import AttackRefused, is_lack_of_memory
from fedpriv.attacks.reconstruction.scene import Scene, time_left
from fedpriv.attacks.reconstruction.upload_model import UploadModel, Victim
from fedpriv.core.threads import keep_freed_memory
from fedpriv.gradients import Block, Vector, flattened
from fedpriv.gradients.operator import first_line, total, wide

Precision = Literal["float32", "float64"]
"""The type in which networks run and inner products are made."""


@dataclass(frozen=True, eq=False)
class Compared:
    """What N rows' dummies are expected to send, with what was heard; all in gradient space.

    Where a mechanism's noise differs between coordinates, both are divided by its standard deviation (hgm). Numbers are
    float64 where the device has that. Everything but ``heard`` can be differentiated.
    """

    dot: Tensor  # (N, m), inner products of expected and heard upload, one for each of the m blocks
    squared: Tensor  # (N, m), squared norms of the expected upload's blocks
    heard: Tensor  # (N, m), squared norms of the heard upload's blocks
    blocks: tuple[Block, ...]  # the names of each block's parameters
    model: UploadModel
    expected: Callable[[], Vector]  # writes out the expected uploads (N, *shape): N * K numbers and more
    targets: Targets

    def upload(self) -> Vector:
        """Write out the heard uploads, tensors (N, *shape)."""
        return self.targets.rows()


Objective = Callable[[Compared], Tensor]
"""What an attack minimises: one number a row, (N,)."""


class Matcher:
    """The mismatch between dummy batches and uploads, one row a (victim, restart), summed over a victim's uploads.

    Rows with the same parameters and the same kind of upload go through the network together; put them in one matcher.
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
        self._dtype = torch.float64 if given == "float64" else torch.float32
        self._network = network.cast(self._dtype)
        self._often = often
        self._objective = objective
        self._groups = [_VictimGroup.of(members, self._dtype, often) for members in _alike(rows)]

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

    def updates(self, images: Tensor, labels: Tensor) -> Iterator[Vector]:
        """Train on dummies and write out what they send, (n, *shape), of each group of rows."""
        for group in self._groups:
            dummies, given = (values[group.index].to(self._dtype) for values in (images, labels))
            yield group.model.trained(self._network, group.parameters, dummies, given, orders=group.orders)

    def select(self, rows: Tensor) -> "Matcher":
        """Return the matcher of some of the rows, by their numbers (n,)."""
        chosen, wanted = copy(self), rows.tolist()
        groups = (group.select(wanted) for group in self._groups)
        chosen._groups = [group for group in groups if len(group.targets)]
        return chosen

    def _compare(self, group: "_VictimGroup", images: Tensor, labels: Tensor) -> Compared:
        if group.model.training is not None:
            heard = group.targets.rows() if group.model.mechanism.constrains else None
            sent = group.model.trained(self._network, group.parameters, images, labels, heard, group.orders)
            return group.written(sent)
        gradients = dummy_gradients(
            self._network, group.parameters, images, labels, each=group.model.needs_examples, often=self._often
        )
        return group.compare(gradients)


@dataclass(frozen=True, eq=False)
class _VictimGroup:
    """Rows with the same parameters and upload model."""

    index: Tensor  # the rows' numbers in the matcher
    parameters: Vector  # what the clients started from
    model: UploadModel  # how the uploads come about
    targets: Targets  # the heard uploads, standardised
    heard: Tensor  # (N, m), their squared norms
    blocks: tuple[Block, ...]  # parameters that share a direction
    scales: Mapping[str, float] | None  # the mechanism's, of the tensors
    orders: Tensor | None  # int64 (N, steps, b), the dummies in each step's batch; None: taken in turn

    @staticmethod
    def of(members: Sequence[tuple[int, Victim]], dtype: torch.dtype, often: bool) -> "_VictimGroup":
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
        known = [victim.orders for _, victim in members if victim.orders is not None]
        orders = torch.stack(known).to(device) if known else None
        return _VictimGroup(index, _cast(first.parameters, dtype), first.model, targets, heard, blocks, scales, orders)

    def select(self, wanted: Sequence[int]) -> "_VictimGroup":
        """Keep some of the matcher's rows, and number them anew."""
        mine = {number: position for position, number in enumerate(self.index.tolist())}
        chosen = [(position, mine[number]) for position, number in enumerate(wanted) if number in mine]
        index = torch.tensor([position for position, _ in chosen], dtype=torch.long, device=self.index.device)
        rows = [row for _, row in chosen]
        orders = None if self.orders is None else self.orders[rows]
        targets, heard = self.targets.select(rows), self.heard[rows]
        return _VictimGroup(index, self.parameters, self.model, targets, heard, self.blocks, self.scales, orders)

    def compare(self, gradients: DummyGradients) -> Compared:
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

    def _written(self, gradients: DummyGradients) -> Compared:
        rows = gradients.rows()
        if not self.model.needs_examples:
            heard = self.targets.rows() if self.model.mechanism.constrains else None
            rows = self.model.expected({name: value[:, 0] for name, value in rows.items()}, heard)
        else:
            rows = self.model.expected_of_examples(rows)
        return self.written(rows)

    def written(self, rows: Vector) -> Compared:
        """Compare expected uploads (N, *shape) that are written out with what was heard."""
        expected, heard = self.model.mechanism.standardise(rows), self.targets.rows()
        dot = [total([_inner(expected[name], heard[name]) for name in block]) for block in self.blocks]
        squared = [total([_inner(expected[name], expected[name]) for name in block]) for block in self.blocks]
        return self._comparison(torch.stack(dot, dim=1), torch.stack(squared, dim=1), lambda: expected)

    def _comparison(self, dot: Tensor, squared: Tensor, write: Callable[[], Vector]) -> Compared:
        return Compared(wide(dot), wide(squared), wide(self.heard), self.blocks, self.model, write, self.targets)


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


SMALLEST = 1e-8  # added to squared differences: the root of zero has no derivative


def squared_distance(comparison: Compared) -> Tensor:
    """Squared Euclidean distance (N,) over all parameters, |g|^2 - 2 g.T + |T|^2 (Zhu et al. 2019, equation 3).

    Close to a match it cancels; an attack that goes there computes in float64.
    """
    return (comparison.squared - 2 * comparison.dot + comparison.heard).sum(dim=1)


def angle(comparison: Compared) -> Tensor:
    """One minus the cosine, the mean over blocks (Geiping et al. 2020, equation 4): (N,); zero is orthogonal to all."""
    lengths = comparison.squared * comparison.heard
    # The root of zero has no derivative, so a zero is replaced before the root is taken.
    zero = lengths == 0
    cosines = comparison.dot / torch.where(zero, 1.0, lengths).sqrt()
    return (1 - torch.where(zero, 0.0, cosines)).mean(dim=1)


def opponent_variation(images: Tensor) -> Tensor:
    """Mean length of differences of neighbours, in channels and their differences (Åström and Schnörr 2016)."""
    first, second = torch.triu_indices(images.shape[2], images.shape[2], 1, device=images.device)
    planes = torch.cat([images, images[:, :, first] - images[:, :, second]], dim=2)
    across = F.pad(planes.diff(dim=4), (0, 1))
    down = F.pad(planes.diff(dim=3), (0, 0, 0, 1))
    return (across.square() + down.square() + SMALLEST).sqrt().mean(dim=(1, 2, 3, 4))


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, across plus down; images (N, B, C, H, W), any C, give (N,)."""
    return _TotalVariation.apply(images)


class _TotalVariation(torch.autograd.Function):
    """The derivative is made of signs alone: fewer passes over the images than one difference after the other."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.save_for_backward(images)
        total = images.new_zeros(len(images))
        for axis, count in _neighbours(images):
            total += images.diff(dim=axis).abs_().sum(dim=(1, 2, 3, 4)) / count
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (images,) = ctx.saved_tensors
        felt = torch.zeros_like(images)
        for axis, count in _neighbours(images):
            pairs = images.shape[axis] - 1
            signs = images.diff(dim=axis).sign_()
            felt.narrow(axis, 1, pairs).add_(signs, alpha=1 / count)
            felt.narrow(axis, 0, pairs).sub_(signs, alpha=1 / count)
        return felt.mul_(gradient[:, None, None, None, None])


def _neighbours(images: Tensor) -> list[tuple[int, int]]:
    """The axes across and down, with the number of pairs of neighbours in one row's images; at least 1."""
    numbers = images[0].numel()
    return [(axis, max(numbers // images.shape[axis] * (images.shape[axis] - 1), 1)) for axis in (4, 3)]


# What one chunk of rows may take on a CPU. The number is fixed: results must not depend on what else runs.
CPU_BYTES = 2**30
# The share of a GPU's memory that one chunk may take.
GPU_SHARE = 0.5
# Bytes at the highest moment over those that are kept for the derivatives: these flow back next to them.
PEAK = 3
# The same for gradients that are written out: themselves, what is expected, what was heard, and their derivatives.
COPIES = 6
# Numbers of intermediate results for one pixel on the vmap route, a guess on the high side for small networks.
PER_PIXEL = 256
# Examples with which memory is measured; what more take follows in proportion.
MEASURED = 4096


def chunks(
    network: Network, rows: Sequence[Victim], shape: tuple[int, int, int], classes: int, *, written: bool = False
) -> Iterator[range]:
    """Cut rows of images (C, H, W) into consecutive ranges that fit into memory."""
    if not rows:
        return
    whole = _device_bytes(network.device)

    def largest(*, tried: bool) -> int:
        return max(
            len(victim.uploads) * row_bytes(network, victim, shape, classes, written=written, tried=tried)
            for victim in {(victim.model, len(victim.uploads)): victim for victim in rows}.values()
        )

    # A single row goes in one piece: where a guess on the high side fits, measuring would only take time.
    alone = len(rows) == 1
    each = largest(tried=not alone)
    if alone and each > whole and rows[0].model.examples > 1:
        each = largest(tried=True)
    if each > whole:
        examples = rows[0].model.examples
        raise AttackRefused(
            f"one dummy batch of {examples} image(s) through this network needs about {each / 2**30:.1f} GiB; "
            f"{network.device} has {whole / 2**30:.1f} GiB"
        )
    allowed = CPU_BYTES if network.device.type == "cpu" else int(GPU_SHARE * whole)
    size = max(1, allowed // each)
    for start in range(0, len(rows), size):
        yield range(start, min(start + size, len(rows)))


def compared(
    scene: Scene, rows: Sequence[Victim], objective: Objective, images: Tensor, labels: Tensor, *, written: bool = False
) -> Tensor:
    """Return the mismatches (N,) of images (N, B, C, H, W) with labels (N, B), some at a time, without derivatives."""
    given = F.one_hot(labels, scene.classes).to(images)
    parts = []
    alone = len(rows) == rows[0].model.examples == 1 and rows[0].model.training is None
    with torch.no_grad():
        # One gradient takes what its client had: measuring that takes longer than the comparison.
        for part in [range(1)] if alone else chunks(scene.network, rows, scene.shape, scene.classes, written=written):
            these = slice(part.start, part.stop)
            parts.append(Matcher(scene.network, rows[these], objective, often=False)(images[these], given[these]))
    return torch.cat(parts)


def row_bytes(
    network: Network,
    victim: Victim,
    shape: tuple[int, int, int],
    classes: int,
    *,
    written: bool = False,
    tried: bool = True,
) -> int:
    """Return about how much memory one row takes, measured on a blank one where the ghost route, tried, is open."""
    model = victim.model
    units = model.examples if model.needs_examples else 1
    number = torch.finfo(network.dtype).bits // 8
    measured = min(model.examples, MEASURED)
    images = torch.zeros(1, measured, *shape, dtype=network.dtype, device=network.device)
    ghost = tried and not ghost_obstacle(network, images.shape[2:], classes)
    if model.training is not None:
        # Each step's gradients are kept, and the parameters after it.
        units = model.training.clients * (model.training.batch_size if model.protects_examples else 1)
        used = model.training.steps * model.training.clients * model.training.batch_size
        return number * (COPIES * network.size * units * model.training.steps + used * images[0, 0].numel() * PER_PIXEL)
    out = (
        COPIES * network.size * units * number
        if written or not ghost or model.mechanism.scales(network.names) is None
        else 0
    )
    if not ghost:
        return out + model.examples * images[0, 0].numel() * PER_PIXEL * number
    labels = torch.full((1, measured, classes), 1 / classes, dtype=network.dtype, device=network.device)
    return out + PEAK * _saved_bytes(network, victim, images.requires_grad_(), labels) * model.examples // measured


def _saved_bytes(network: Network, victim: Victim, images: Tensor, labels: Tensor) -> int:
    """The bytes that autograd keeps for the derivatives of the dummies' norms."""
    fixed = {value.untyped_storage().data_ptr() for value in victim.parameters.values()}
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Any:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        gradients = dummy_gradients(network, victim.parameters, images, labels, each=victim.model.needs_examples)
        total = gradients.squared().sum()
    del total
    return sum(size for pointer, size in kept.items() if pointer not in fixed)


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


Losses = Callable[..., Tensor]
"""(variables...) -> losses (N,), one a row, that can be differentiated."""

Compiling = Literal["auto", "always", "never"]

# Compiling takes ten seconds to a minute and saves a tenth to a half: in a job of so many seconds it pays.
LONG = 300.0


class Evaluator:
    """Evaluates a loss and its gradients.

    With ``compiling = "auto"`` the first evaluations run in eager mode and are timed. Where all would take long,
    the whole computation, derivatives included, is traced and compiled (``torch.compile``), and kept if it is faster.
    Results are the same up to rounding. Where it cannot be compiled, for example without a C++ compiler, ``note`` says
    so, which belongs into the attack's notes, and everything runs in eager mode.
    """

    def __init__(self, losses: Losses, evaluations: int, compiling: Compiling = "auto") -> None:
        self.note = ""
        self.compiled = False
        self.compile_seconds = 0.0
        self._losses = losses
        self._evaluations = evaluations
        self._compiling = compiling
        self._run: Callable[..., tuple[Tensor, ...]] = self._eager
        self._seconds: list[float] = []
        self._settled = compiling == "never"
        keep_freed_memory()

    def __call__(self, *variables: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return losses (N,), detached, and the gradients of their sum with respect to each variable."""
        values = tuple(value.detach() for value in variables)
        if self._settled:
            loss, *gradients = self._run(*values)
        else:
            loss, *gradients = self._settle(values)
        return loss, tuple(gradients)

    def _eager(self, *variables: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in variables]
            losses = self._losses(*leaves)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return losses.detach(), *gradients

    def _settle(self, variables: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Evaluate, and decide whether to compile: at once, or after two evaluations of which the second is typical."""
        if self._compiling == "auto":
            seconds, results = _timed(self._eager, variables)
            self._seconds.append(seconds)
            if len(self._seconds) < 2:
                return results
            if min(seconds * self._evaluations, time_left()) < LONG:
                self._settled = True
                return results
        self._settled = True
        began = time.perf_counter()
        try:
            run = _compiled(self._eager, variables)
        except RuntimeError as error:
            if is_lack_of_memory(error):
                raise
            # No compiler, or an operator that cannot be traced: the numbers are the same without, only later.
            self.note = f"not compiled: {first_line(error)}"
            return self._eager(*variables)
        self.compile_seconds = time.perf_counter() - began
        seconds, results = _timed(run, variables)
        if self._compiling == "always" or seconds <= self._seconds[-1]:
            self._run, self.compiled = run, True
        return results


def _compiled(run: Callable[..., tuple[Tensor, ...]], variables: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Trace a computation with its derivatives into one graph of plain operators, and compile that."""
    run(*variables)  # what is prepared at the first call is no part of the graph
    graph = make_fx(run)(*variables)
    compiled = torch.compile(graph, dynamic=False)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            results: tuple[Tensor, ...] = tuple(compiled(*values))
        return results

    call(*variables)
    return call


def _timed(run: Callable[..., tuple[Tensor, ...]], variables: Sequence[Tensor]) -> tuple[float, tuple[Tensor, ...]]:
    began = time.perf_counter()
    results = run(*variables)
    if results[0].device.type == "cuda":
        torch.cuda.synchronize(results[0].device)
    return time.perf_counter() - began, results
