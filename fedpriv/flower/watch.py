"""Watch PyTorch while a client answers: the images shown to the network, and the optimiser's steps.

PyTorch has hooks for every module and every optimiser of a process. So the tap needs no line in anybody's training: it
learns the batch size, the steps and the learning rate, which an adversary is taken to know, and keeps the images apart,
by which attacks are scored and which they never see.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from fedpriv.core.records import LedgerLine
from fedpriv.mechanisms import MechanismSettings

MOST_IMAGES = 512
"""Of so many images at most an upload is kept for scoring, and attacked."""


@dataclass(frozen=True)
class ReleasedUpdate:
    """What :func:`fedpriv.flower.privatise` did to a reply."""

    config: MechanismSettings  # the mechanism, with the noise itself
    line: LedgerLine  # of the ledger, with this release in it


@dataclass(frozen=True)
class Steps:
    """An optimiser's first step, as its settings were then."""

    kind: str
    learning_rate: float
    momentum: float


@dataclass
class Seen:
    """All that was seen while one message was answered."""

    # batches that the network was shown in training mode, up to MOST_IMAGES examples
    images: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)  # batches that a cross-entropy was given meanwhile
    batch_sizes: list[int] = field(default_factory=list)  # of all of these batches
    classes: int = 0  # logits of the network; 0: it was not seen
    trained: tuple[str, ...] = ()  # names of the parameters that were trained
    steps: Steps | None = None  # the first step; `None`: no optimiser of PyTorch stepped
    step_count: int = 0  # how many there were
    changed: bool = False  # whether the learning rate was another one later
    released: ReleasedUpdate | None = None  # by our own mechanism, if it acted
    _rows: set[bytes] = field(default_factory=set)

    @property
    def examples(self) -> int:
        """Distinct images that the network was shown."""
        return len(self._rows)

    @property
    def is_whole(self) -> bool:
        """Whether all images were kept."""
        return sum(self.batch_sizes) == sum(map(len, self.images))

    def show(self, module: nn.Module, batch: Tensor, output: Any) -> None:
        """Note a batch that the network was shown."""
        images = batch.detach().cpu()
        self.trained = tuple(name for name, value in module.named_parameters() if value.requires_grad)
        self.classes = int(output.shape[1]) if isinstance(output, Tensor) and output.ndim == 2 else 0
        self.batch_sizes.append(len(images))
        rows = images.contiguous().flatten(1).numpy() if len(images) else images.numpy()
        self._rows |= {blake2b(row.tobytes(), digest_size=16).digest() for row in rows}
        if sum(self.batch_sizes) <= MOST_IMAGES:
            self.images.append(images.clone())

    def step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimiser."""
        group = optimizer.param_groups[0]
        now = Steps(type(optimizer).__name__.lower(), float(group["lr"]), float(group.get("momentum", 0.0)))
        self.steps = self.steps or now
        self.changed = self.changed or now != self.steps
        self.step_count += 1


_SEEN: ContextVar[Seen | None] = ContextVar("seen", default=None)


def note_release(release: ReleasedUpdate) -> None:
    """Note what a mechanism did, where a client is watched."""
    if (seen := _SEEN.get()) is not None:
        seen.released = release


@contextmanager
def watching(names: frozenset[str]) -> Iterator[Seen]:
    """Watch the network whose ``state_dict`` has these names, and every optimiser."""
    seen = Seen()

    def shown(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        wanted = module.training and torch.is_grad_enabled() and inputs and isinstance(inputs[0], Tensor)
        if wanted and names == frozenset(module.state_dict(keep_vars=True)):
            seen.show(module, inputs[0], output)

    hooks = (
        register_module_forward_hook(shown),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.step(optimizer)),
    )
    token = _SEEN.set(seen)
    try:
        with _LabelWatch(seen):
            yield seen
    finally:
        _SEEN.reset(token)
        for hook in hooks:
            hook.remove()


class _LabelWatch(TorchFunctionMode):
    """Hears the labels that a cross-entropy is given."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is F.cross_entropy and torch.is_grad_enabled() and sum(self._seen.batch_sizes) <= MOST_IMAGES:
            target = args[1] if len(args) > 1 else given.get("target")
            if isinstance(target, Tensor) and target.ndim == 1 and not target.is_floating_point():
                self._seen.labels.append(target.detach().cpu().clone())
        return function(*args, **given)
