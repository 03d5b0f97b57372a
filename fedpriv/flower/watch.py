"""Watch PyTorch while a client answers: the batches shown to the network, and the optimisers' steps.

PyTorch has hooks for every module and every optimiser of a process. So the tap needs no line in anybody's training: it
learns the batch size, the steps and the learning rates, which an adversary is taken to know, and keeps the images
apart, by which attacks are scored and which they never see.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedpriv.attacks.observation import in_order
from fedpriv.core.records import LedgerLine
from fedpriv.core.records.reading import Record
from fedpriv.flower.arrays import Form
from fedpriv.gradients import Vector
from fedpriv.mechanisms import MechanismSettings

MOST_IMAGES = 512
"""Of so many images at most an upload is kept for scoring, and attacked."""

# What computes cross-entropies, and what every clipping of gradients calls.
_LOSSES = ((torch._C._nn, "cross_entropy_loss"), (torch, "binary_cross_entropy_with_logits"))
_CLIPPING = "_group_tensors_by_device_and_dtype"


@dataclass(frozen=True)
class ReleasedUpdate:
    """What :func:`fedpriv.flower.privatise`, or the noise of another library, did to a reply."""

    config: MechanismSettings  # the mechanism, with the noise itself
    line: LedgerLine  # of the ledger, with this release in it
    form: Form | None  # of the reply; `None`: this does not tell
    by: str = "privatise"  # what added the noise


@dataclass(frozen=True)
class Rates(Record):
    """How an optimiser moves a parameter."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass
class Seen:
    """All that was seen while one message was answered."""

    shapes: Mapping[str, tuple[int, ...]]  # of the arrays in the message
    for_tap: bool = True  # whether a tap watches
    network: nn.Module | None = None  # whose arrays these are; `None`: no such network was trained
    names: Mapping[str, str] = field(default_factory=dict)  # array of the message -> array of the network
    inputs: tuple[str, tuple[int, ...]] | None = None  # type and shape of the first batch
    # batches that the network was shown in training mode, up to MOST_IMAGES examples
    images: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)  # batches that a loss was given meanwhile
    batch_sizes: list[int] = field(default_factory=list)  # of all of these batches
    step_sizes: list[int] = field(default_factory=list)  # examples behind each step, of one or several batches
    classes: int = 0  # that the network tells apart; 0: it was not seen
    optimizers: list[str] = field(default_factory=list)  # in lower case, each once
    changed: bool = False  # whether a rate was another one in a later step
    clipped: bool = False  # whether gradients were clipped
    released: ReleasedUpdate | None = None  # by our own mechanism, if it acted
    _calls: int = 0  # of optimisers
    _pending: int = 0  # examples shown since the last step
    _moved: dict[int, tuple[Tensor, Rates]] = field(default_factory=dict)
    _rows: set[int] = field(default_factory=set)
    _matches: dict[nn.Module, Mapping[str, str]] = field(default_factory=dict)
    _inside: nn.Module | None = None

    @property
    def examples(self) -> int:
        """Distinct images that the network was shown."""
        return len(self._rows)

    @property
    def is_whole(self) -> bool:
        """Whether all images were kept."""
        return sum(self.batch_sizes) == sum(map(len, self.images))

    @property
    def step_count(self) -> int:
        """How many steps there were; several optimisers that step on the same batches are one."""
        return len(self.step_sizes) or self._calls

    @property
    def is_partial(self) -> bool:
        """Whether the message has a part of the network only, such as an adapter."""
        own = dict(self.network.named_parameters()) if self.network is not None else {}
        return not set(own) <= set(self.names.values())

    @property
    def rates(self) -> dict[str, Rates]:
        """How the arrays of the message were moved; of those that were not there is none."""
        own = dict(self.network.named_parameters()) if self.network is not None else {}
        wanted = {name: own[there] for name, there in self.names.items() if there in own}
        moved = {name: self._moved[id(value)][1] for name, value in wanted.items() if id(value) in self._moved}
        return {name: rates for name, rates in moved.items() if wanted[name].requires_grad}

    @property
    def trained(self) -> tuple[str, ...]:
        """Names, as in the message, of what was trained."""
        own = dict(self.network.named_parameters()) if self.network is not None else {}
        needed = [name for name, there in self.names.items() if there in own and own[there].requires_grad]
        return tuple(self.rates or needed)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Names, as in the message, of arrays that are one tensor of the network."""
        groups: dict[int, list[str]] = {}
        own = self.network.state_dict(keep_vars=True) if self.network is not None else {}
        for name, there in self.names.items():
            groups.setdefault(id(own[there]), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    @property
    def base(self) -> Vector:
        """The network's own tensors, by its names, that the message has not and training leaves as they are."""
        own = self.network.state_dict(keep_vars=True) if self.network is not None else {}
        kept = {name: value for name, value in own.items() if name not in self.names.values()}
        return {name: value.detach().cpu() for name, value in kept.items() if not value.requires_grad}

    def candidates(self, before: Vector) -> dict[Form, Vector]:
        """What a reply of each form would hold of what was trained."""
        if self.network is None or not self.trained:
            return {}
        own = self.network.state_dict(keep_vars=True)
        after = {name: own[self.names[name]].detach().cpu() for name in self.trained}
        change = {name: value - before[name] for name, value in after.items()}
        slopes = {name: own[self.names[name]].grad for name in after}
        found: dict[Form, Vector] = {"weights": after, "update": change}
        found["negated update"] = {name: -value for name, value in change.items()}
        found["gradient"] = {name: slope.detach().cpu() for name, slope in slopes.items() if slope is not None}
        return {form: values for form, values in found.items() if values}

    def enter(self, module: nn.Module) -> None:
        """Note the outermost module that has the arrays of the message."""
        if self._inside is not None or not (module.training and torch.is_grad_enabled()):
            return
        if module not in self._matches:
            self._matches[module] = names_in(module, self.shapes)
        if names := self._matches[module]:
            self._inside = module
            if self.network is not module:
                self.network, self.names = module, names

    def leave(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Note a batch that the network was shown."""
        if module is not self._inside:
            return
        self._inside = None
        batch = next((value for value in given if isinstance(value, Tensor) and value.ndim), None)
        if batch is None or output is None:
            return
        images = batch.detach().cpu()
        self.inputs = self.inputs or (str(images.dtype).removeprefix("torch."), tuple(images.shape))
        self.classes = max(2, int(output.shape[1])) if isinstance(output, Tensor) and output.ndim == 2 else 0
        self.batch_sizes.append(len(images))
        self._pending += len(images)
        rows = images.contiguous().flatten(1).numpy() if len(images) and images.ndim > 1 else images.numpy()
        self._rows |= {hash(row.tobytes()) for row in rows}
        if sum(self.batch_sizes) <= MOST_IMAGES:
            self.images.append(images.clone())

    def step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimiser."""
        self._calls += 1
        if self._pending:
            self.step_sizes.append(self._pending)
            self._pending = 0
        kind = type(optimizer).__name__.lower()
        if kind not in self.optimizers:
            self.optimizers.append(kind)
        for group in optimizer.param_groups:
            keys = (group["lr"], group.get("momentum", 0.0), group.get("weight_decay", 0.0))
            now = Rates(*map(float, keys))
            for parameter in group["params"]:
                _, first = self._moved.setdefault(id(parameter), (parameter, now))
                self.changed = self.changed or first != now

    def hear_labels(self, target: Any) -> None:
        """Note labels that a loss is given."""
        few = torch.is_grad_enabled() and sum(self.batch_sizes) <= MOST_IMAGES
        if few and isinstance(target, Tensor) and target.ndim and target.numel() == len(target):
            self.labels.append(target.detach().cpu().flatten().long())


def names_in(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
    """Return a module's own names of a message's arrays; empty: they are not its.

    They are its by name, all or a part of them, or as a list in the order of its ``state_dict`` or parameters.
    """
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    parameters = dict(module.named_parameters())
    needed = {name: value for name, value in parameters.items() if value.requires_grad}
    adapters = {name.replace(".default.", "."): name for name in state}  # as peft sends them
    numbered = in_order(shapes)
    ways: list[dict[str, str]] = [{name: name for name in shapes}, {name: adapters.get(name, "") for name in shapes}]
    ways += [dict(zip(numbered, own, strict=True)) for own in (state, parameters, needed) if len(own) == len(numbered)]
    for number, way in enumerate(ways):
        fits = all(there in state and tuple(state[there].shape) == shapes[name] for name, there in way.items())
        if way and fits and (number < 2 or numbered == [str(place) for place in range(len(shapes))]):
            return way
    return {}


_SEEN: ContextVar[Seen | None] = ContextVar("seen", default=None)
_WAITING: ContextVar[list[Callable[[Any, ReleasedUpdate], None]] | None] = ContextVar("waiting", default=None)


def note_release(release: ReleasedUpdate) -> None:
    """Note what a mechanism did, where a client is watched."""
    if (seen := _SEEN.get()) is not None:
        seen.released = release


def is_tapped() -> bool:
    """Whether a tap is around this."""
    return (seen := _SEEN.get()) is not None and seen.for_tap


def waiting() -> list[Callable[[Any, ReleasedUpdate], None]] | None:
    """Return what is to be called with the reply that leaves; ``None``: no mechanism is around this."""
    return _WAITING.get()


@contextmanager
def releasing() -> Iterator[list[Callable[[Any, ReleasedUpdate], None]]]:
    """Collect what is to be called with the reply that a mechanism makes of what is answered inside."""
    calls: list[Callable[[Any, ReleasedUpdate], None]] = []
    token = _WAITING.set(calls)
    try:
        yield calls
    finally:
        _WAITING.reset(token)


@contextmanager
def watching(shapes: Mapping[str, tuple[int, ...]], for_tap: bool = True) -> Iterator[Seen]:
    """Watch the network that has arrays of these names and shapes, and every optimiser."""
    seen = Seen(shapes, for_tap)

    def left(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        seen.leave(module, (*inputs, *named.values()), output)

    hooks = (
        register_module_forward_pre_hook(lambda module, _: seen.enter(module)),
        register_module_forward_hook(left, with_kwargs=True, always_call=True),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.step(optimizer)),
    )
    token = _SEEN.set(seen)
    try:
        with ExitStack() as stack:
            for owner, name in _LOSSES:
                stack.enter_context(_overheard(owner, name, lambda _, target, *rest: seen.hear_labels(target)))
            stack.enter_context(_overheard(clip_grad, _CLIPPING, lambda *_: setattr(seen, "clipped", True)))
            yield seen
    finally:
        _SEEN.reset(token)
        for hook in hooks:
            hook.remove()


@contextmanager
def _overheard(owner: Any, name: str, told: Callable[..., None]) -> Iterator[None]:
    """Have a function of PyTorch tell its arguments before it is computed, however an app has imported what calls it.

    A TorchFunctionMode would hear all functions, and take longer than a small network's training.
    """
    function = getattr(owner, name)

    def overheard(*given: Any, **named: Any) -> Any:
        told(*given, *named.values())
        return function(*given, **named)

    setattr(owner, name, overheard)
    try:
        yield
    finally:
        setattr(owner, name, function)
