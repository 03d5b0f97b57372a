"""Test whether the gradient of an example depends on any other example.

Noise on a sum of clipped gradients is made for what one example can change in it, twice the clipping norm at most. That
holds if an example changes its own gradient only: no other one of its batch, and none of a later batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import generator_states, seeded_generators
from fedpriv.core.threads import cpu_threads
from fedpriv.gradients.calls import copied, hidden_parameters, plain_gradient, reached
from fedpriv.gradients.dense import FactoredGradients, Loss
from fedpriv.gradients.factors import Factor, Sizes
from fedpriv.gradients.ghost import Route
from fedpriv.gradients.operator import GradientOperator
from fedpriv.gradients.per_example import (
    OtherRoute,
    find_route,
    layer_of,
    per_example_gradients,
    refuse_changes,
    refuse_coupled,
    versions,
)

# Between batches of the same size rounding changes nothing in the gradient of an example: whatever stands in the other
# rows, the kernels do the same sums for it. Between batches of different sizes, and in sums, it does: by up to this
# share of the longest tensor, and, where a network enlarges what is rounded, by a few times as much as a gradient moves
# when its parameters and inputs are rounded anew. In float64 that is a few roundings of float32, because there are
# layers that compute in float32 whatever they are given.
ROUNDED = {torch.float32: 1e-3, torch.float64: 1e-6}
MOVED = 4

# Gradients of single examples add up to the batch's, but for this share of the sum of their lengths, and for rounding.
OTHER_SUM = 1e-3

# The smallest number of examples to try: a first, a middle and a last one, and others between them.
FEWEST = 5

# A large number that most networks can still compute with.
EXTREME = 1e4

RRELU = (functional.rrelu, torch.rrelu)

# What torch's functions may draw, of their arguments; with such numbers nothing is dropped, and no layer is left out.
_LIKELY = 0.6
_ATEN = torch.ops.aten
_STEADY: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
    _ATEN.rand: lambda given: _LIKELY,
    _ATEN.rand_like: lambda given: _LIKELY,
    _ATEN.uniform_: lambda given: _LIKELY * given.get("to", 1.0) + (1 - _LIKELY) * given.get("from", 0.0),
    _ATEN.randn: lambda given: _LIKELY,
    _ATEN.randn_like: lambda given: _LIKELY,
    _ATEN.normal: lambda given: _LIKELY,
    _ATEN.normal_: lambda given: _LIKELY,
    _ATEN.log_normal_: lambda given: _LIKELY,
    _ATEN.cauchy_: lambda given: _LIKELY,
    _ATEN.exponential_: lambda given: _LIKELY / given.get("lambd", 1.0),
    _ATEN.geometric_: lambda given: 1,
    _ATEN.poisson: lambda given: given["self"].ceil(),
    _ATEN.bernoulli: lambda given: given.get("p", given["self"]) > 0,
    _ATEN.bernoulli_: lambda given: given.get("p", 0.5) > 0,
    _ATEN.multinomial: lambda given: given["self"].argmax(dim=-1, keepdim=True),
    _ATEN.randint: lambda given: _whole(given.get("low", 0), given["high"]),
    _ATEN.randint_like: lambda given: _whole(given.get("low", 0), given["high"]),
}
_MANY = 10_000  # calls; a model that draws more often may wait for a number that is never drawn (rejection sampling)


def _whole(low: int, high: int) -> int:
    return low + int(_LIKELY * (high - low))


def refuse_mixed_examples(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, blank: Sequence[Tensor] = ()) -> None:
    """Refuse a model or a loss that mixes the examples of a batch: then no noise on gradients protects one of them.

    One example of a batch is replaced: by zeros, ones, large numbers, NaN, a copy of another one, and a blank one;
    and one among blank ones by another one. The random numbers stay the same: torch's, numpy's and Python's global
    generators are seeded anew for each pass. The gradients of all other examples have to stay the same, bit for
    bit. The passes follow one another on one copy of the model, so that what it keeps from pass to pass, in
    whatever form, shows as a difference, too.

    Gradients in a batch are also compared with those of single examples, up to rounding: this shows a model that
    depends on the number of examples. Dropout layers are off for it. A batch draws other random numbers than a single
    example: a model that still draws some is compared with torch drawing the same number each time, unless numpy or
    Python draws for each example or it waits for another number, and once more in evaluation mode, unless it draws
    even then.
    Likewise the gradients are added up and compared with those of a backward pass of the batch, in float64 where the
    model can be computed in it: this shows a model whose gradients are not those with which it trains.

    What a trial finds out holds for what was tried. A model that mixes examples rarely, in larger batches only, after
    more passes or on other images may pass.

    Args:
        model: in the mode in which it is trained. It is copied and left as it is, and so are the global generators.
        loss: (outputs, targets) -> losses of shape (B,).
        x: inputs, (B, ...), on the CPU, B at least 2. The first few are tried, and more of them where a size in the
            model is the same number: then ``per_example_gradients`` cannot tell which axis counts the examples.
        y: targets, (B, ...).
        blank: examples without content, (...) each, such as a black image.

    Raises:
        InputError: the gradients differ (the first such layer is named), the model cannot be copied or computed, or
            what ``per_example_gradients`` refuses.
        ValueError: fewer than two examples.
    """
    if len(x) < 2:
        raise ValueError(f"{len(x)} examples; it takes two to be mixed")
    with cpu_threads(1), seeded_generators(0, x.device):  # one thread: several may add up in any order
        first = _first_pass(model, loss, x, y)
        x, y = x[: first.examples], y[: first.examples]
        with _refused(f"{type(model).__name__} cannot compute gradients"):
            route = find_route(_copy(model), loss, x.clone(), y)
        batch = _Batch(loss, route, x, y)
        # Where each example is computed alone, it reaches those alone that are computed after it.
        places = [0] if route.dense else batch.positions
        flat = replace(batch, x=_with_flat(x, blank))
        # Padding alone, as of short texts: a model that cuts off what all of them have calls other functions there.
        empty = replace(batch, x=flat.x[1:2].expand_as(x).clone())
        alike = replace(batch, x=x[:1].expand_as(x).clone(), y=y[:1].expand_as(y).clone())
        tried = _copy(model)
        with _SlopesForEach() if first.slopes else nullcontext():
            _refuse_influence(model, lambda: tried, batch, list(_changes(batch, blank, places)))
            # What a model keeps from the first examples that it ever sees shows on fresh copies only.
            for shown, fresh in ((flat, lambda: tried), (empty, lambda: tried), (alike, partial(_copy, model))):
                changes = [shown.changed("another image", place, x[1], y[1]) for place in places]
                _refuse_influence(model, fresh, shown, changes)
        for tried, still in _without_chance(_copy(model), batch):
            _refuse_other_numbers(tried, still)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Examples, and how their gradients are computed."""

    loss: Loss
    route: Route
    x: Tensor  # (B, ...)
    y: Tensor  # (B, ...)

    @property
    def positions(self) -> list[int]:
        """The first, the middle and the last example."""
        return sorted({0, len(self.x) // 2, len(self.x) - 1})

    def run(self, model: nn.Module, seed: int, what: str = "cannot compute gradients") -> "_Pass":
        """Compute the gradients of a model, with random numbers of a seed."""
        with seeded_generators(seed, self.x.device), _refused(f"{type(model).__name__} {what}"):
            start = generator_states()
            gradients = per_example_gradients(model, self.loss, self.x.clone(), self.y, route=self.route)
            end = generator_states()
        return _Pass(gradients, start != end, end)

    def alone(self, row: int) -> "_Batch":
        """One of the examples."""
        return replace(self, x=self.x[[row]], y=self.y[[row]])

    def changed(self, what: str, position: int, one_x: Tensor, one_y: Tensor, natural: bool = True) -> "_Change":
        """Replace one of the examples."""
        x, y = self.x.clone(), self.y.clone()
        x[position], y[position] = one_x, one_y
        return _Change(what, position, replace(self, x=x, y=y), natural)


class _Pass(NamedTuple):
    """What one pass gave."""

    gradients: FactoredGradients
    drew: bool  # whether a global generator moved
    states: tuple[object, ...]  # of the global generators at the end


# ---- one example is replaced ----------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """A batch in which one example was replaced."""

    what: str  # took its place, for people
    position: int  # of the example
    batch: _Batch
    natural: bool  # whether data may hold such an example


def _with_flat(x: Tensor, blank: Sequence[Tensor]) -> Tensor:
    """The same with every second example flat: a model may give such ones something of the others."""
    x = x.clone()
    x[1::2] = blank[0] if blank else torch.zeros_like(x[0])
    return x


def _changes(batch: _Batch, blank: Sequence[Tensor], places: Sequence[int]) -> Iterator[_Change]:
    x, y = batch.x, batch.y
    for position in places:
        neighbour = (position + 1) % len(x)
        replaced = partial(batch.changed, position=position, one_y=y[neighbour])
        yield replaced("a copy of another one", one_x=x[neighbour])
        yield replaced("all zeros", one_x=torch.zeros_like(x[position]))
        yield replaced("all ones", one_x=torch.ones_like(x[position]))
        for image in blank:
            yield replaced("a blank image", one_x=image)
        if x.is_floating_point():
            yield replaced(f"all {EXTREME:g}", one_x=torch.full_like(x[position], EXTREME), natural=False)
            yield replaced("all NaN", one_x=torch.full_like(x[position], torch.nan), natural=False)


def _refuse_influence(
    model: nn.Module, tried: Callable[[], nn.Module], batch: _Batch, changes: Sequence[_Change]
) -> None:
    """Refuse if another gradient than the replaced example's changes; each change has random numbers of its own."""
    kept: _Pass | None = None
    for seed, change in enumerate(changes):
        before = kept or batch.run(tried(), seed)
        kept = None if before.drew else before
        after = _after(model, tried(), change, seed)
        different = after and _difference(before, after, change.position)
        if different:
            raise InputError(_reason(model, batch, change, seed, layer_of(different, model)))


def _after(model: nn.Module, tried: nn.Module, change: _Change, seed: int) -> _Pass | None:
    """The pass with the replaced example; nothing if the model fails on one that data cannot hold."""
    what = f"cannot compute a batch in which an example is {change.what}"
    try:
        return change.batch.run(tried, seed, what)
    except OtherRoute as error:
        raise InputError(f"{error}; one example, {change.what}, decides whether the others' count") from error
    except InputError as error:
        if not change.natural:
            return None  # a model that checks its input
        change.batch.run(_copy(model), seed, what)
        raise InputError(
            f"{type(model).__name__} keeps something of earlier passes, so that a later one fails ({error})"
        ) from error


def _reason(model: nn.Module, batch: _Batch, change: _Change, seed: int, layer: str) -> str:
    """Why gradients differ, for people: found out on copies that have not seen any example yet."""
    first, again, changed = (each.run(_copy(model), seed) for each in (batch, batch, change.batch))
    different = _difference(first, again)
    if different and first.states != again.states:
        return (
            f"{type(model).__name__} sets the seed of a global generator anew in each pass (as torch.seed does), so "
            "that its random numbers cannot be held fixed to see whether it mixes examples"
        )
    if different or not _difference(first, changed, change.position):
        return (
            f"the gradient of layer {layer} changes from pass to pass with the same examples and the same random "
            f"numbers: {type(model).__name__} keeps something of earlier passes, which no noise protects, or draws "
            "from another generator than the global ones"
        )
    seen = f"example {change.position + 1} of {len(batch.x)} replaced by {change.what}"
    depends = f"the gradient of layer {layer} for one example depends on the others of its batch"
    if first.states != changed.states:
        return f"{depends}: they decide how many random numbers are drawn, which shifts those that it gets ({seen})"
    return f"{depends}, so that no noise can protect one of them ({seen})"


# ---- examples alone, and their sum ----------------------------------------------------------------------------------


def _without_chance(model: nn.Module, batch: _Batch) -> Iterator[tuple[nn.Module, _Batch]]:
    """Yield networks that draw nothing, and how the batch is computed with each; none if chance cannot be kept out."""
    for layer in model.modules():
        if isinstance(layer, _DropoutNd | nn.RReLU):
            layer.eval()
    if not _random(model, batch):
        yield model, batch
        return
    with _SlopesForEach(), _SteadyDraws(_MANY) as draws:
        alike = _draws_alike(model, batch) and draws.left > 0
    if alike:
        with _SlopesForEach(), _SteadyDraws():
            yield _copy(model), batch
    model.eval()
    with _refused(f"{type(model).__name__} cannot compute gradients in evaluation mode"):
        batch = replace(batch, route=find_route(model, batch.loss, batch.x.clone(), batch.y))
    if not _random(model, batch):
        yield model, batch


def _draws_alike(model: nn.Module, batch: _Batch) -> bool:
    """Tell whether a batch, its backward pass as in training and one example alone draw the same random numbers."""
    together, alone = (each.run(model, 0).states for each in (batch, batch.alone(0)))
    with seeded_generators(0, batch.x.device):
        batch.loss(model(batch.x.clone()), batch.y)
        return together == alone == generator_states()


def _random(model: nn.Module, batch: _Batch) -> bool:
    """Tell whether other random numbers give other gradients."""
    first = batch.run(model, 0)
    return first.drew and bool(_difference(first, batch.run(model, 1)))


def _refuse_other_numbers(model: nn.Module, batch: _Batch) -> None:
    """Refuse if gradients in a batch are not those of single examples, or do not add up to what the batch trains with.

    In float64, which rounds least, or in the type of the model where it takes no other.
    """
    own = next(value.dtype for value in model.parameters() if value.requires_grad)
    precise = replace(batch, x=batch.x.double()) if batch.x.is_floating_point() else batch
    try:
        reason = _disagreement(model.double(), precise)
    except (InputError, RuntimeError, TypeError, ValueError):
        reason = _disagreement(model.to(own), batch)
    if reason:
        raise InputError(reason)


def _disagreement(model: nn.Module, batch: _Batch) -> str:
    """Why gradients are not those of single examples, or do not add up; empty if they are and do."""
    gradients = batch.run(model, 0).gradients
    rounding = _Rounding(model, batch, gradients)
    for row in batch.positions:
        alone = batch.alone(row).run(model, 0, "cannot compute one example alone").gradients
        for name in gradients.shapes:
            off = _apart(gradients.rows(row, row + 1, (name,))[name], alone.rows(0, 1, (name,))[name])
            if not off <= rounding.share * rounding.longest and not off <= rounding.moves(name)[row]:
                return (
                    f"the gradient of layer {layer_of(name, model)} for one example depends on the others of its "
                    "batch, so that no noise can protect one of them (alone it is another one)"
                )
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with seeded_generators(0, batch.x.device), torch.enable_grad():
        total = batch.loss(model(batch.x.clone()), batch.y).sum()
        wanted = plain_gradient(total, trained) if total.requires_grad else {}
    sums = gradients.combine(torch.ones_like(gradients.norms()))
    for name, value in wanted.items():
        off, size = _apart(sums[name], value), rounding.sizes[name]
        allowed = OTHER_SUM * size + rounding.share * max(rounding.sizes.values())
        if not off <= allowed and not off <= float(rounding.moves(name).sum()):
            return (
                f"the gradients of layer {layer_of(name, model)} for single examples do not add up to that of "
                "loss.backward() for their batch, so that a mechanism would protect others than those that train; an "
                "embedding must not have scale_grad_by_freq, and a function with a backward pass of its own has to be "
                "right under torch.func.vmap, or without setup_context"
            )
    return ""


class _Rounding:
    """What rounding may do to the gradients of a batch."""

    def __init__(self, model: nn.Module, batch: _Batch, gradients: GradientOperator) -> None:
        norms = {name: gradients.norms((name,)) for name in gradients.shapes}
        self.share = ROUNDED[gradients.dtype]
        self.sizes = {name: float(value.sum().nan_to_num()) for name, value in norms.items()}
        self.longest = max(float(value.nan_to_num(posinf=0.0).max()) for value in norms.values())
        self._model, self._batch, self._gradients = model, batch, gradients

    def moves(self, name: str) -> Tensor:
        """A few times what a parameter's gradients (B,) move when parameters and inputs are rounded to float32."""
        pairs = (each.rows(0, each.examples, (name,))[name] for each in (self._gradients, self._other))
        return MOVED * torch.tensor([_apart(one, other) for one, other in zip(*pairs, strict=True)])

    @cached_property
    def _other(self) -> GradientOperator:
        """The gradients where each number of parameters and inputs is rounded up or down as in float32."""
        model, x, stream = _copy(self._model), self._batch.x, torch.Generator().manual_seed(0)

        def rounded(value: Tensor) -> Tensor:
            up = torch.randint(2, value.shape, generator=stream).to(value) * 2 - 1
            return value * (1 + torch.finfo(torch.float32).eps / 2 * up)

        with torch.no_grad():
            for value in model.parameters():
                if value.is_floating_point():
                    value.copy_(rounded(value))
        return replace(self._batch, x=rounded(x) if x.is_floating_point() else x).run(model, 0).gradients


def _apart(one: Tensor, other: Tensor) -> float:
    """The distance of two gradients; the same numbers, NaN and infinity among them, are not apart."""
    off = float(torch.linalg.vector_norm(one - other))
    if math.isfinite(off):
        return off
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.linalg.vector_norm((one - other).masked_fill(same, 0)))


# ---- passes are compared --------------------------------------------------------------------------------------------


def _difference(left: _Pass, right: _Pass, without: int | None = None) -> str:
    """The first parameter of which another gradient is not the same, bit for bit; empty: there is none."""
    kept = [row for row in range(left.gradients.examples) if row != without]
    parts = [[each.gradients.part(row, row + 1) for each in (left, right)] for row in kept]
    return next((name for name in left.gradients.shapes if not all(_same(name, *pair) for pair in parts)), "")


def _same(name: str, one: FactoredGradients, other: FactoredGradients) -> bool:
    """Compare what two gradients are made of and, where that differs, their numbers."""
    if _alike(one.factor(name), other.factor(name)):
        return True
    left, right = (each.rows(0, 1, (name,))[name] for each in (one, other))
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two things of which a single example's factor is made are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Sizes):
        return True  # it follows from the rest
    if isinstance(one, Factor):
        return vars(one).keys() == vars(other).keys() and all(map(_alike, vars(one).values(), vars(other).values()))
    if hasattr(one, "shape"):  # inputs that are computed where they are asked for
        return torch.equal(one[slice(0, 1)], other[slice(0, 1)])
    return bool(one == other)


def _copy(model: nn.Module) -> nn.Module:
    with _refused(f"{type(model).__name__} cannot be copied, and only a copy can be tried before training"):
        return copied(model)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Say in one line what code that is not ours raises."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from error


class _First(NamedTuple):
    """What a first look shows."""

    examples: int  # how many to try: no other size in the model, if there are enough
    slopes: bool  # whether the model draws slopes (RReLU)


def _first_pass(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> _First:
    refuse_coupled(dict(model.named_modules()))
    tried, originals = _copy(model), dict(model.named_parameters())
    modules = dict(tried.named_modules())
    before = versions(modules)
    with _refused(f"{type(model).__name__} cannot be trained on examples of shape {tuple(x.shape[1:])}"):
        with torch.enable_grad(), _Calls() as seen:
            total = loss(tried(x[:2].clone()), y[:2]).sum()
        nodes, leaves = reached(total, {})
        hidden = hidden_parameters(total, {name: value for name, value in originals.items() if value.requires_grad})
    deforming = ("deform_conv2d", "DeformConv2d")  # as newer and older torchvisions name it
    if any(name in node.name() for node in nodes for name in deforming):
        raise InputError(
            f"{type(model).__name__} calls torchvision's deform_conv2d, which ends the process where an offset is not "
            "finite: that a client is gone would tell of its data"
        )
    if hidden or any(id(value) in leaves for value in originals.values()):
        raise InputError(
            f"a copy of {type(model).__name__} uses the parameters of the original, so that it cannot be tried before "
            "training; TorchScript does that, and a function that holds on to a layer (let forward find it in self)"
        )
    refuse_changes(modules, before)
    taken = seen.sizes.union(x.shape[1:])
    examples = next((number for number in range(FEWEST, len(x)) if number not in taken), len(x))
    return _First(examples, not seen.functions.isdisjoint(RRELU))


class _Calls(TorchFunctionMode):
    """Collects the functions of torch that are called inside the block, and what sizes all axes but the first have."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()
        self.sizes: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(func)
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.sizes.update(made.shape[1:])
        return made


class _SlopesForEach(TorchFunctionMode):
    """Draws a slope for each input of RReLU inside the block, as torch does on a GPU.

    On the CPU it draws for negative inputs only, so that an example shifts later ones' slopes: no leak, but it looks
    so.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_rrelu if func in RRELU else func)(*args, **(kwargs or {}))


class _SteadyDraws(TorchDispatchMode):
    """Has torch draw the same likely number each time inside the block, however many are asked for.

    Its generator stays as it is, but for functions that are not listed here, and after as many calls as are given.
    """

    def __init__(self, calls: float = math.inf) -> None:
        super().__init__()
        self.left = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = _STEADY.get(func.overloadpacket)
        self.left -= drawn is not None
        if drawn is None or self.left <= 0:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        with torch.random.fork_rng(devices=()):
            made = func(*args, **(kwargs or {}))
        return made.copy_(torch.as_tensor(drawn(dict(zip(names, args, strict=False)) | (kwargs or {}))))


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training:
        return functional.rrelu(input, lower, upper, training, inplace)
    slopes = lower + (upper - lower) * torch.rand_like(input)
    factors = torch.where(input.detach() > 0, 1.0, slopes)
    return input.mul_(factors) if inplace else input * factors
