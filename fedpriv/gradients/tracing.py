"""Where a forward pass uses its trained parameters, seen from the functions of torch that it calls.

A parameter, or what is computed from parameters alone, meets the examples in one of two ways. A layer (a product with a
matrix, a convolution, a table, a norm) is recorded: its input, and the edge of autograd's graph at its output. In an
operation that lays its tensors over one another (a sum, a product of numbers, a mask), a copy for each example takes
the parameter's place, so that autograd itself returns a gradient for each. Which axis counts the examples is seen in
passes with other numbers of them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from threading import Lock
from types import new_class
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from fedpriv.gradients.recurrent import RECURRENT
from fedpriv.gradients.rules import OPERATIONS, Operation

# Operations that lay their tensors over one another, by their names in torch without underscores.
OVERLAID = re.compile(
    "[ri]?(add|sub|mul|div|truediv|pow)|addcmul|addcdiv|lerp|where|maximum|minimum|matmul|scaled_dot_product_attention"
)
EINSUM = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")
STRETCHED = frozenset(("expand", "expand_as", "broadcast_to", "repeat"))

# What is asked of a tensor, whatever it was computed from.
ASKED = frozenset(("__get__", "__set__", "__len__", "detach", "size", "dim", "numel", "is_floating_point"))


class Step(NamedTuple):
    """What happens in a call that is given a parameter, or what is computed from parameters alone."""

    function: str
    way: str  # "alone": without the examples; "layer", "overlaid", "stretched"; else why gradients do not follow
    axes: tuple[tuple[int, int], ...] = ()  # that may count the examples, and how many entries an example has
    dimensions: int = 0  # of the tensor that these are axes of

    @property
    def ruled(self) -> bool:
        """Whether gradients follow."""
        return self.way in ("alone", "layer", "overlaid", "stretched")

    def common(self, other: "Step") -> "Step | None":
        """Return what is true of both; ``None``: nothing is."""
        axes = tuple(axis for axis in self.axes if axis in other.axes)
        same = self._replace(axes=axes) == other._replace(axes=axes) and (axes or not self.axes)
        return self._replace(axes=axes[:1]) if same else None


class Source(NamedTuple):
    """A parameter, or a tensor that is computed from parameters alone."""

    value: Tensor
    roots: tuple[str, ...]  # names of the parameters
    operation: Operation | None = None  # that made it of parameters


class Use(NamedTuple):
    """A layer that was applied to the examples."""

    operation: Operation  # without autograd's graph
    sources: Mapping[str, Source]  # by their roles in the operation
    edge: GradientEdge  # of its output
    entry: GradientEdge | None  # of its input, with stand-ins
    place: int  # the axis of the input that counts the examples
    version: int  # of the input; it counts changes in place


class Otherwise(Exception):
    """A model calls other functions than those that were planned."""


_TRACER: ContextVar["Tracer | None"] = ContextVar("tracer", default=None)

# Tracers in several threads may look at one model: the last one gives its tensors back their classes. By its number,
# how many look at a tensor beside the first.
_MORE: dict[int, int] = {}
_LOCK = Lock()


class _Watched:
    """What is mixed into the class of a tensor while a tracer looks: torch hands over the calls that are given it.

    A mode would be handed all others, too, which takes as long as many of them.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = _TRACER.get()
        if tracer is not None and torch.is_grad_enabled():
            return tracer.called(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@cache
def _watched(kind: type[Tensor]) -> type[Tensor]:
    return new_class(kind.__name__, (_Watched, kind))


def _watch(values: Iterable[Tensor]) -> None:
    """Have torch hand over the calls that are given these tensors."""
    with _LOCK:
        for value in values:
            kind = type(value)
            if issubclass(kind, _Watched):
                _MORE[id(value)] = _MORE.get(id(value), 0) + 1
            else:
                value.__class__ = _watched(kind)


def _unwatch(values: Iterable[Tensor]) -> None:
    """Undo what :func:`_watch` did."""
    with _LOCK:
        for value in values:
            more = _MORE.pop(id(value), 0) if _MORE else 0
            if not more:
                value.__class__ = type(value).__bases__[1]
            elif more > 1:
                _MORE[id(value)] = more - 1


class Tracer:
    """Notes what happens to parameters inside the block, or does what a plan says.

    Attributes:
        steps: without a plan: what happened.
        blamed: without a plan: names of parameters whose gradients do not follow -> why.
        uses: with a plan: the layers that were applied to the examples.
        copies: with a plan: of sources, for each example, (B, *shape), leaves of autograd's graph.
        stand_ins: what layers were given in place of sources, if asked for: leaves of autograd's graph that are reached
            only where a parameter is used in another way than was seen.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        examples: int,
        plan: Sequence[Step] | None = None,
        *,
        with_stand_ins: bool = False,
    ) -> None:
        self._with_stand_ins = with_stand_ins
        self._sources: dict[int, Source] = {}
        self._parameters = parameters
        self._examples = examples
        self._plan = plan
        self._number = 0
        self._watching: list[Tensor] = []
        self.steps: list[Step] = []
        self.blamed: dict[str, str] = {}
        self.uses: list[Use] = []
        self.copies: dict[int, tuple[Source, Tensor]] = {}
        self.stand_ins: list[tuple[Source, Tensor]] = []

    def __enter__(self) -> Self:
        self._token = _TRACER.set(self)
        self._sources = {id(value): Source(value, (name,)) for name, value in self._parameters.items()}
        self._watching = list(self._parameters.values())
        _watch(self._watching)
        return self

    def __exit__(self, *raised: object) -> None:
        _TRACER.reset(self._token)
        _unwatch(self._watching)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what is to be done in a call that is given a source."""
        if func in REWRITTEN and (rewritten := REWRITTEN[func](*args, **kwargs)) is not None:
            return rewritten()
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in ASKED:
                made = func(*args, **kwargs)
                return self._followed(made, args, kwargs, None) if isinstance(made, Tensor) else made
            return (self._noted if self._plan is None else self._planned)(func, args, kwargs)

    @property
    def complete(self) -> bool:
        """Whether all that was planned has happened."""
        return self._plan is None or self._number == len(self._plan)

    def _given(self, args: Any, kwargs: Any) -> list[Source]:
        return [self._sources[id(value)] for value in _leaves((args, kwargs)) if id(value) in self._sources]

    def _followed(self, made: Any, args: Any, kwargs: Any, operation: Operation | None) -> Any:
        """Remember what was computed from parameters alone, and return it."""
        for value in (made,) if isinstance(made, Tensor) else _leaves(made):
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in self._sources:
                self._sources[id(value)] = Source(value, _roots(self._given(args, kwargs)), operation)
                self._watching.append(value)
                _watch((value,))
        return made

    # ---- without a plan ---------------------------------------------------------------------------------------------

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        operation = _operation(func, args, kwargs)
        made = func(*args, **kwargs)
        results = [value for value in _leaves(made) if isinstance(value, Tensor) and value.requires_grad]
        step = self._step(func.__name__, args, kwargs, results, operation)
        self.steps.append(step)
        if step.way == "alone":
            return self._followed(made, args, kwargs, operation)
        if not step.ruled:
            self.blamed |= dict.fromkeys(_roots(self._given(args, kwargs)), step.way)
        return made

    def _step(self, name: str, args: Any, kwargs: Any, results: Sequence[Tensor], operation: Operation | None) -> Step:
        given = [value for value in _leaves((args, kwargs)) if isinstance(value, Tensor)]
        others = [value for value in given if id(value) not in self._sources]
        if not any(map(self._axes, results)):
            apart = not results or not any(map(self._axes, others))
            return Step(name, "alone" if apart else f"{name} is computed of all examples")
        if operation is not None and id(operation.input) not in self._sources and self._takes_sources(operation):
            axes = [axis for axis in self._axes(operation.input) if operation.allows(axis[0])]
            if axes:
                return Step(name, "layer", tuple(axes), operation.input.ndim)
        plain = name.strip("_")
        if len(results) == 1 and (OVERLAID.fullmatch(plain) or name in STRETCHED):
            like = args[0] if plain == "scaled_dot_product_attention" else results[0]
            inner = 2 if plain in ("matmul", "scaled_dot_product_attention") else 0
            sources = [source.value for source in self._given(args, kwargs)]
            axes = [axis for axis in self._axes(like) if all(_fits(value, like, axis[0], inner) for value in sources)]
            if name == "repeat":
                axes = [axis for axis in axes if _is_stretched(sources[0], like, axis[0])]
            if axes:
                return Step(name, "stretched" if name in STRETCHED else "overlaid", tuple(axes), like.ndim)
        return Step(name, f"{name} has no rule")

    def _takes_sources(self, operation: Operation) -> bool:
        trained = [value for value in operation.parameters.values() if value is not None and value.requires_grad]
        return all(id(value) in self._sources for value in trained)

    def _axes(self, value: Tensor) -> list[tuple[int, int]]:
        """The axes of a tensor that may count the examples, and how many entries an example has."""
        sizes = enumerate(value.shape)
        return [(axis, size // self._examples) for axis, size in sizes if size and size % self._examples == 0]

    # ---- with a plan ------------------------------------------------------------------------------------------------

    def _planned(self, func: Any, args: Any, kwargs: Any) -> Any:
        plan = self._plan or ()
        step = plan[self._number] if self._number < len(plan) else None
        self._number += 1
        if step is None or step.function != func.__name__:
            raise Otherwise(f"it calls {func.__name__}")
        if step.way == "alone":
            operation = _operation(func, args, kwargs)
            return self._followed(func(*args, **kwargs), args, kwargs, operation)
        if step.way == "layer":
            return self._layer(step, func, args, kwargs)
        if step.way == "stretched":
            return self._laid_over(args[0], step).expand(func(*args, **kwargs).shape)
        return func(
            *[self._laid_over(value, step) for value in args],
            **{name: self._laid_over(value, step) for name, value in kwargs.items()},
        )

    def _layer(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        operation = _operation(func, args, kwargs)
        ((place, share),) = step.axes
        if operation is None or operation.input.ndim != step.dimensions:
            raise Otherwise(f"{func.__name__} is given something else")
        given = operation.input
        if given.shape[place] != share * self._examples:
            raise Otherwise(f"the input of {func.__name__} does not grow with the batch")
        roles = operation.parameters.items()
        sources = {role: self._sources[id(value)] for role, value in roles if id(value) in self._sources}
        if self._with_stand_ins:
            args, kwargs = self._replaced(sources.values(), args, kwargs)
        made = func(*args, **kwargs)
        entry = get_gradient_edge(given) if self._with_stand_ins and given.requires_grad else None
        edge = GradientEdge(made.grad_fn, made.output_nr)  # as torch makes it, in a third of the time
        self.uses.append(Use(operation.detached(), sources, edge, entry, place, given._version))
        return made

    def _replaced(self, sources: Iterable[Source], args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        stand_ins = {id(source.value): source.value.detach().requires_grad_() for source in sources}
        self.stand_ins += [(source, stand_ins[id(source.value)]) for source in sources]
        named = {name: stand_ins.get(id(value), value) for name, value in kwargs.items()}
        return [stand_ins.get(id(value), value) for value in args], named

    def _laid_over(self, value: Any, step: Step) -> Any:
        """Return a copy of a source for each example, laid along the axis that counts the examples."""
        source = self._sources.get(id(value))
        if source is None:
            return value
        ((place, share),) = step.axes
        if id(value) not in self.copies:
            copy = source.value.detach().expand(self._examples, *source.value.shape).requires_grad_()
            self.copies[id(value)] = source, copy
        copy = self.copies[id(value)][1]
        full = copy.reshape(self._examples, *(1,) * (step.dimensions - source.value.ndim), *source.value.shape)
        if full.ndim != 1 + step.dimensions or full.shape[1 + place] != 1:
            raise Otherwise(f"{step.function} is given something else")
        laid = full.squeeze(1 + place).movedim(0, place)
        if share == 1:
            return laid
        repeated = laid.unsqueeze(place + 1)
        return repeated.expand(*laid.shape[: place + 1], share, *laid.shape[place + 1 :]).flatten(place, place + 1)


def _leaves(values: Any) -> list[Any]:
    """What tuples, lists and dictionaries hold, laid end to end."""
    if isinstance(values, dict):
        values = list(values.values())
    return [leaf for value in values for leaf in _leaves(value)] if isinstance(values, tuple | list) else [values]


def _roots(sources: Iterable[Source]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(root for source in sources for root in source.roots))


def _operation(func: Any, args: Any, kwargs: Any) -> Operation | None:
    """What a function computes if it is one of a layer."""
    bound = OPERATIONS.get(func)
    return None if bound is None else bound(*args, **kwargs)


def _fits(value: Tensor, like: Tensor, axis: int, inner: int) -> bool:
    """Tell whether a tensor that is laid over another one is the same along an axis before the ``inner`` last ones."""
    if inner and (value.ndim < inner or axis >= like.ndim - inner):
        return False
    own = axis - (like.ndim - value.ndim)
    return own < 0 or value.shape[own] == 1


def _is_stretched(value: Tensor, like: Tensor, axis: int) -> bool:
    """Tell whether a tensor came about by repeating axes of length 1, and perhaps the one that counts the examples."""
    sizes = (1,) * (like.ndim - value.ndim) + tuple(value.shape)
    pairs = enumerate(zip(sizes, like.shape, strict=True))
    return all(size in (1, long) for place, (size, long) in pairs if place != axis)


# Functions that are computed as several, in which parameters are seen one at a time.


def _prelu(input: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    def rewritten() -> Tensor:
        channels = weight.view(-1, *(1,) * (input.ndim - 2)) if input.ndim > 1 else weight
        return torch.where(input > 0, input, channels * input)

    return rewritten


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *others: Any,
    **named: Any,
) -> Callable[[], Tensor] | None:
    def rewritten() -> Tensor:
        values = functional.instance_norm(input, running_mean, running_var, None, None, *others, **named)
        wide = (-1, *(1,) * (input.ndim - 2))
        values = values if weight is None else values * weight.view(wide)
        return values if bias is None else values + bias.view(wide)

    return None if weight is None and bias is None else rewritten


def _embedding_bag(
    input: Tensor,  # (B, T)
    weight: Tensor,
    *,
    max_norm: float | None,
    scale_grad_by_freq: bool,
    mode: str,
    per_sample_weights: Tensor | None,
    padding_idx: int | None,
    **others: Any,
) -> Callable[[], Tensor] | None:
    if input.ndim != 2 or max_norm is not None or scale_grad_by_freq or mode == "max":
        return None
    counted = torch.ones_like(input) if padding_idx is None else input != padding_idx % len(weight)
    shares = counted if per_sample_weights is None else counted * per_sample_weights

    def rewritten() -> Tensor:
        total = (functional.embedding(input, weight) * shares[:, :, None]).sum(dim=1)
        return total if mode == "sum" else total / counted.sum(dim=1, keepdim=True).clamp(min=1)

    return rewritten


def _attention(
    query: Tensor,  # (T, B, width)
    key: Tensor,  # (S, B, width)
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,  # (T, S) or (B heads, T, S)
    use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **others: Any,
) -> Callable[[], tuple[Tensor, Tensor | None]] | None:
    """Torch's multi-head attention (Vaswani et al. 2017)."""
    unusual = bias_k is not None or add_zero_attn or use_separate_proj_weight or any(map(_is_given, others.values()))
    if in_proj_weight is None or unusual or query.ndim != 3:
        return None
    weight, bias = in_proj_weight, in_proj_bias

    def projected() -> Sequence[Tensor]:
        if query is key and key is value:
            return functional.linear(query, weight, bias).chunk(3, dim=2)
        weights, biases = weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
        return [functional.linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]

    def rewritten() -> tuple[Tensor, Tensor | None]:
        q, k, v = (part.unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3) for part in projected())
        mask, weights = _mask(attn_mask, key_padding_mask, q), None
        drops = dropout_p if training else 0.0
        if need_weights:
            scores = (q * q.shape[3] ** -0.5) @ k.mT
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(dim=3), drops)
            heads = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            heads = functional.scaled_dot_product_attention(q, k, v, mask, drops)
        return functional.linear(heads.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), weights

    return rewritten


def _einsum(equation: Any, *operands: Any) -> Callable[[], Tensor] | None:
    """A product of examples and of what is computed from parameters, as one of matrices."""
    match = EINSUM.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) and len(operands) == 2 else None
    if match is None or _holds(operands[0]) is _holds(operands[1]):
        return None
    (x, given), (weight, own) = sorted(zip(operands, match.groups(), strict=False), key=lambda pair: _holds(pair[0]))
    result = match[3]
    alone, shared = ([axis for axis in given if axis in result and (axis in own) is also] for also in (False, True))
    inner = [axis for axis in given if axis in own and axis not in result]
    outer = [axis for axis in own if axis in result and axis not in given]
    single = {*given, *own} == {*alone, *shared, *inner, *outer} and len({*given}) + len({*own}) == len(given + own)
    if not single or not alone:
        return None
    rows = alone[1:] if shared else alone  # the first one may count the examples
    first = alone[:1] if shared else []

    def rewritten() -> Tensor:
        sizes = dict(zip(given + own, (*x.shape, *weight.shape), strict=True))
        axes, others = [*first, *shared, *rows, *inner], [*shared, *inner, *outer]
        inside = math.prod(sizes[axis] for axis in inner)
        kept = [sizes[axis] for axis in (*first, *shared)]
        long = [math.prod(sizes[axis] for axis in rows)] if shared else [sizes[axis] for axis in rows]
        left = x.permute([given.index(axis) for axis in axes]).reshape(*kept, *long, inside)
        right = weight.permute([own.index(axis) for axis in others])
        made: Tensor = left @ right.reshape(*[sizes[axis] for axis in shared], inside, -1)
        axes = [*first, *shared, *rows, *outer]
        laid: Tensor = made.reshape([sizes[axis] for axis in axes])
        return laid.permute([axes.index(axis) for axis in result])

    return rewritten


def _holds(value: Any) -> bool:
    return isinstance(value, _Watched)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _mask(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores (B, heads, T, S), in a shape that extends to that."""
    total = None
    if mask is not None:
        total = _added(mask, q)
        total = total.view(len(q), -1, *mask.shape[1:]) if mask.ndim == 3 else total
    if padding is not None:
        added = _added(padding, q)[:, None, None, :]
        total = added if total is None else total + added
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    return mask.to(like.dtype) if mask.dtype != torch.bool else like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)


REWRITTEN: dict[Any, Callable[..., Callable[[], Any] | None]] = {
    functional.multi_head_attention_forward: _attention,
    functional.instance_norm: _instance_norm,
    functional.prelu: _prelu,
    functional.embedding_bag: _embedding_bag,
    torch.einsum: _einsum,
    **RECURRENT,
}
