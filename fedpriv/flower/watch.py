"""Watch PyTorch while a client answers: the batches shown to the network, and the optimisers' steps.

PyTorch has hooks for every module and every optimiser of a process. So the tap needs no line in anybody's training: it
learns the task, the batch size, the steps and the learning rates, which an adversary is taken to know, and keeps the
examples apart, by which attacks are scored and which they never see.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, set_stance
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedpriv.attacks.observation import in_order
from fedpriv.core.reading import Record
from fedpriv.core.records import LedgerLine
from fedpriv.flower.arrays import Form
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import until_the_end
from fedpriv.mechanisms import MechanismSettings
from fedpriv.models.machinery.logits import logits_in

MOST_IMAGES = 512
"""Of so many images at most an upload is kept for scoring, and attacked."""

Task = Literal["classes", "one logit", "one probability", "next", "values", "itself"]
"""What a network learns of an example: a class, one of two, the next of its tokens, numbers, or the example itself."""

OWN_LOSS = ("values", "itself")
"""Tasks without classes: what is attacked is the network's own loss."""

# What computes losses, and how users call it; and what every clipping of gradients calls.
_LOSSES = {
    (torch._C._nn, "cross_entropy_loss"): "cross_entropy",
    (torch._C._nn, "nll_loss_nd"): "nll_loss",
    (torch, "binary_cross_entropy_with_logits"): "binary_cross_entropy_with_logits",
    (torch._C._nn, "binary_cross_entropy"): "binary_cross_entropy",
    (torch._C._nn, "mse_loss"): "mse_loss",
    (torch._C._nn, "l1_loss"): "l1_loss",
    (torch._C._nn, "smooth_l1_loss"): "smooth_l1_loss",
    (torch._C._nn, "huber_loss"): "huber_loss",
}
_BINARY: Mapping[str, Task] = {
    "binary_cross_entropy_with_logits": "one logit",
    "binary_cross_entropy": "one probability",
}
_CLIPPING = "_group_tensors_by_device_and_dtype"
# What peft leaves out of the names that it sends; of DoRA, the weight's as well.
_PEFT = re.compile(r"(?<=lora_magnitude_vector)\.default\.weight$|\.(modules_to_save\.)?default(?=\.|$)")
_BESIDES = ("labels", "label", "attention_mask", "token_type_ids", "position_ids")  # what is given with an example


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


@dataclass(eq=False)
class Batch:
    """Examples that a network was shown together."""

    examples: Tensor  # (B, ...), as the network was given them
    target: Tensor | None = None  # what a loss compared its output with; `None`: no loss was seen
    state: Tensor | None = None  # of torch's generator before the network ran


@dataclass
class Seen:
    """All that was seen while one message was answered."""

    shapes: Mapping[str, tuple[int, ...]]  # of the arrays in the message
    for_tap: bool = True  # whether a tap watches
    parts: dict[str, nn.Module] = field(default_factory=dict)  # what was run, by its name in the network, in its order
    names: dict[str, str] = field(default_factory=dict)  # array of the message -> array of the network
    inputs: tuple[str, tuple[int, ...]] | None = None  # type and shape of the first batch
    batches: list[Batch] = field(default_factory=list)  # shown in training mode, up to MOST_IMAGES examples
    batch_sizes: list[int] = field(default_factory=list)  # of all of these batches
    step_sizes: list[int] = field(default_factory=list)  # examples behind each step, of one or several batches
    classes: int = 0  # that the network tells apart; 0: it was not seen
    loss: str = ""  # what was minimised first, as torch.nn.functional calls it; empty: none of its losses
    optimizers: list[str] = field(default_factory=list)  # in lower case, each once
    changed: bool = False  # whether a rate was another one in a later step
    clipped: bool = False  # whether gradients were clipped
    released: ReleasedUpdate | None = None  # by our own mechanism, if it acted
    _calls: int = 0  # of optimisers
    _pending: int = 0  # examples shown since the last step
    _moved: dict[int, tuple[Tensor, Rates]] = field(default_factory=dict)
    _matches: dict[nn.Module, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    _inside: nn.Module | None = None
    _state: Tensor | None = None
    _early: Tensor | None = None  # target of a loss that the network itself computes
    _last: int | None = None  # where what the part before gave is kept

    @property
    def examples(self) -> int:
        """Distinct examples that the network was shown; of more than are attacked, all count as distinct."""
        if not self.is_whole:
            return sum(self.batch_sizes)
        shown = (batch.examples.contiguous().flatten(1).numpy() for batch in self.batches if len(batch.examples))
        return len({row.tobytes() for rows in shown for row in rows})

    @property
    def is_whole(self) -> bool:
        """Whether all examples were kept."""
        return sum(self.batch_sizes) == sum(len(batch.examples) for batch in self.batches)

    @property
    def step_count(self) -> int:
        """How many steps there were; several optimisers that step on the same batches are one."""
        return len(self.step_sizes) or self._calls

    @property
    def task(self) -> Task | None:
        """What was learnt; ``None``: no loss of PyTorch was seen."""
        first = self.batches[0] if self.batches else None
        if first is None or first.target is None:
            return None
        target, size = first.target, len(first.examples)
        if self.loss in ("cross_entropy", "nll_loss"):
            if target.numel() == size and not target.is_floating_point():
                return "classes"
            return "next" if not first.examples.is_floating_point() else None
        if self.loss in _BINARY and target.numel() == size:
            return _BINARY[self.loss]
        same = (target.numel(), target.dtype) == (first.examples.numel(), first.examples.dtype)
        return "itself" if same and torch.equal(target.flatten(), first.examples.flatten()) else "values"

    @property
    def network(self) -> str | None:
        """Import path of what was trained; ``None``: it was not seen, or is defined within a function or a notebook."""
        kinds = [type(module) for part, module in self.parts.items() if not part]
        paths = (f"{kind.__module__}:{kind.__qualname__}" for kind in kinds if "." not in kind.__qualname__)
        return next((path for path in paths if not path.startswith(("torch.", "__main__"))), None)

    @property
    def own(self) -> Vector:
        """The network's own tensors, by its names."""
        return {
            f"{part}.{name}" if part else name: value
            for part, module in self.parts.items()
            for name, value in module.state_dict(keep_vars=True).items()
        }

    @property
    def rates(self) -> dict[str, Rates]:
        """How the arrays of the message were moved; of those that were not there is none."""
        own = self.own
        wanted = {name: own[there] for name, there in self.names.items() if there in own}
        moved = {name: self._moved[id(value)][1] for name, value in wanted.items() if id(value) in self._moved}
        return {name: rates for name, rates in moved.items() if wanted[name].requires_grad}

    @property
    def trained(self) -> tuple[str, ...]:
        """Names, as in the message, of what was trained, each tensor once."""
        own, copies = self.own, {name for group in self.tied for name in group[1:]}
        needed = [name for name, there in self.names.items() if there in own and own[there].requires_grad]
        return tuple(name for name in self.rates or needed if name not in copies)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Names, as in the message, of arrays that are one tensor of the network."""
        groups: dict[int, list[str]] = {}
        own = self.own
        for name, there in self.names.items():
            groups.setdefault(id(own[there]), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    @property
    def local(self) -> tuple[str, ...]:
        """Names, as in the network, of what an optimiser moves and the message has not."""
        own = self.own
        kept = self._moved.keys() - {id(own[there]) for there in self.names.values() if there in own}
        return tuple(name for name, value in own.items() if value.requires_grad and id(value) in kept)

    @property
    def base(self) -> Vector:
        """What training leaves as it is, by the network's names: parameters, and of other tensors those not sent."""
        sent, own = set(self.names.values()), self.own
        still = {name: value for name, value in own.items() if not value.requires_grad or self._is_left_out(value)}
        kept = {name: value for name, value in still.items() if isinstance(value, nn.Parameter) or name not in sent}
        return {name: value.detach().cpu() for name, value in kept.items()}

    def _is_left_out(self, value: Tensor) -> bool:
        """Whether optimisers were seen, and none has this tensor."""
        return bool(self._moved) and id(value) not in self._moved

    def after(self) -> Vector:
        """The network's tensors that were trained, by the names of the message, as they are now."""
        own = self.own
        return {name: own[self.names[name]].detach().cpu() for name in self.trained}

    def candidates(self, before: Vector) -> dict[Form, Vector]:
        """What a reply of each form would hold of what was trained."""
        if not self.trained:
            return {}
        own, after = self.own, self.after()
        change = {name: value - before[name] for name, value in after.items()}
        slopes = {name: own[self.names[name]].grad for name in after}
        found: dict[Form, Vector] = {"weights": after, "update": change}
        found["negated update"] = {name: -value for name, value in change.items()}
        found["gradient"] = {name: slope.detach().cpu() for name, slope in slopes.items() if slope is not None}
        return {form: values for form, values in found.items() if values}

    def enter(self, module: nn.Module) -> None:
        """Note the outermost module that has arrays of the message: all of them, or those under one name."""
        if self._inside is not None or not (module.training and torch.is_grad_enabled()):
            return
        if module not in self._matches:
            self._matches[module] = part_of(module, self.shapes)
        part, names = self._matches[module]
        if not names:
            return
        self._inside, self._early = module, None
        self._state = torch.get_rng_state() if self.for_tap and sum(self.batch_sizes) <= MOST_IMAGES else None
        if self.parts.get(part) is not module:
            kept = {name: there for name, there in self.names.items() if part and name not in names}
            self.parts = {name: own for name, own in self.parts.items() if part and name and name != part}
            self.parts[part], self.names = module, kept | dict(names)

    def leave(self, module: nn.Module, given: Mapping[str, Any], output: Any) -> None:
        """Note a batch that the network was shown."""
        if module is not self._inside:
            return
        self._inside = None
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.ndim}
        batch = next((value for key, value in tensors.items() if key not in _BESIDES), None)
        if batch is None or output is None or not _is_kept(batch):
            return
        made = logits_in(output)
        goes_on = self._last is not None and batch.untyped_storage().data_ptr() == self._last
        self._last = made.untyped_storage().data_ptr() if isinstance(made, Tensor) and "" not in self.parts else None
        self.classes = max(2, int(made.shape[-1])) if isinstance(made, Tensor) and made.ndim in (2, 3) else 0
        if goes_on:
            return
        self.inputs = self.inputs or (str(batch.dtype).removeprefix("torch."), tuple(batch.shape))
        self.batch_sizes.append(len(batch))
        self._pending += len(batch)
        if sum(self.batch_sizes) <= MOST_IMAGES:
            images = batch.detach().cpu()
            images = images[:, None] if images.ndim == 1 else images
            told = next((tensors[key].detach().cpu() for key in _BESIDES[:2] if key in tensors), self._early)
            self.batches.append(Batch(images.clone(), told, self._state))

    def step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimiser."""
        self._calls += 1
        self._last = None
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

    def hear_loss(self, name: str, target: Any) -> None:
        """Note what a loss compares the output of the latest batch with."""
        if not (torch.is_grad_enabled() and isinstance(target, Tensor) and target.ndim):
            return
        few = sum(self.batch_sizes) <= MOST_IMAGES
        self._last = None if self._inside is None else self._last
        if self._inside is not None:
            self.loss, self._early = self.loss or name, target.detach().cpu().clone() if few else None
        elif few and self.batches and self.batches[-1].target is None:
            self.loss = self.loss or name
            self.batches[-1].target = target.detach().cpu().clone()


def _is_kept(batch: Tensor) -> bool:
    """Whether a tensor holds a number at each place: it is not sparse, ragged, without memory, or a batch of nobody."""
    dense = batch.layout == torch.strided and not batch.is_nested and not batch.is_meta
    return dense and batch.numel() > 0


def part_of(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, Mapping[str, str]]:
    """Return where a module is in the network of a message, empty for the whole one, and the network's names."""
    if names := names_in(module, shapes):
        return "", names
    own = {name: tuple(value.shape) for name, value in module.state_dict(keep_vars=True).items()}
    first = next(iter(own), "")
    for part in (key.removesuffix(f".{first}") for key in shapes if first and key.endswith(f".{first}")):
        there = {f"{part}.{name}": shape for name, shape in own.items()}
        if all(shapes.get(name) == shape for name, shape in there.items()):
            return part, {name: name for name in there}
    return "", {}


def names_in(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
    """Return a module's own names of a message's arrays, by name or as a list in order; empty: not its."""
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    parameters = dict(module.named_parameters())
    needed = {name: value for name, value in parameters.items() if value.requires_grad}
    adapters = {_PEFT.sub("", name): name for name in state}
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


def seen_here() -> Seen | None:
    """Return what is seen by whoever watches this; ``None``: nobody does."""
    return _SEEN.get()


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
    """Watch the network that has arrays of these names and shapes, and every optimiser; nothing runs compiled."""
    seen = Seen(shapes, for_tap)
    plain = torch._C.DisableTorchFunctionSubclass  # some kinds of parameters, such as Opacus', refuse to be looked at

    def entered(module: nn.Module, _: Any) -> None:
        if not _is_traced():
            with plain():
                seen.enter(uncompiled(module))

    # Where forward raises, PyTorch gives no keywords.
    def left(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any] | None, output: Any = None) -> None:
        if not _is_traced():
            given = {**{str(place): value for place, value in enumerate(inputs)}, **(named or {})}
            with plain():
                seen.leave(uncompiled(module), given, output)

    def compared(usual: str, _: Any, *given: Any, **named: Any) -> None:
        if not _is_traced():
            seen.hear_loss(usual, (*given, *named.values())[1])

    hooks = (
        register_module_forward_pre_hook(entered),
        register_module_forward_hook(left, with_kwargs=True, always_call=True),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.step(optimizer)),
    )
    with ExitStack() as stack:
        stack.enter_context(until_the_end(hooks))
        stack.callback(_SEEN.reset, _SEEN.set(seen))
        stack.enter_context(running_eagerly())
        for (owner, name), usual in _LOSSES.items():
            stack.enter_context(after_each(owner, name, partial(compared, usual)))
        stack.enter_context(after_each(clip_grad, _CLIPPING, lambda *_, **__: setattr(seen, "clipped", True)))
        yield seen


def _is_traced() -> bool:
    """Whether a network is run to read its code, or by ``torch.func``, whose tensors cannot be kept."""
    reads = is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return reads or torch._C._functorch.maybe_current_level() is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """The network inside what ``torch.compile`` has returned."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Run what is compiled, before or inside, as it is written: compiled code calls no hooks."""
    with ExitStack() as stack:

        def eager(*_: Any, **__: Any) -> None:
            stack.enter_context(set_stance("force_eager"))

        if "torch._dynamo" in sys.modules:  # which takes a second to import, and compiling does
            eager()
        stack.enter_context(after_each(torch, "compile", eager))
        yield


@contextmanager
def after_each(owner: Any, name: str, told: Callable[..., None]) -> Iterator[None]:
    """Have a function of a module or class tell its result and arguments after each call, however it is imported.

    That is cheaper than a TorchFunctionMode.
    """
    function = getattr(owner, name)

    def heard(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        if not _is_traced():
            told(result, *given, **named)
        return result

    with patch.object(owner, name, heard):
        yield


def frames() -> Iterator[Any]:
    """Yield the frames of Python that have called this, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
