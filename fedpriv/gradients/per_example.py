"""Build the operator of per-example gradients from a model and a batch."""

from collections.abc import Container, Mapping
from itertools import zip_longest
from operator import is_
from threading import Lock, RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from fedpriv.core.errors import InputError
from fedpriv.gradients.dense import FactoredGradients, Loss, dense_gradients
from fedpriv.gradients.ghost import Entangled, Route, ghost_gradients, traced_route
from fedpriv.gradients.operator import DEFAULT_CHUNK_BYTES


class OtherRoute(InputError):
    """The model does not call on a batch what its route says: examples decide how those next to them are computed."""


def find_route(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Route:
    """Return how the gradients of batches of this size are to be computed, found out on examples that tell nothing.

    The arguments are those of :func:`per_example_gradients`.
    """
    with _lock_of(model):
        return traced_route(model, loss, x, y, chunk_bytes) if len(x) else Route()


def per_example_gradients(
    model: nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    *,
    route: Route | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    often: bool | None = None,
) -> FactoredGradients:
    """Return the gradients of a batch's losses, one an example, as an operator.

    Layer by layer where the model allows it (see the module ``ghost``), else dense; the operator's ``routes`` say which
    layer went which way. Each way rounds, and draws, in its own manner: where no example may choose it for the others,
    it is fixed beforehand. In both cases each example has to be computed on its own: that layers of the BatchNorm
    family are refused does not show that the model's own code does not mix examples.

    Args:
        model: maps (B, ...) to (B, ...), each example on its own; left as it is (mode, buffers, ``.grad``).
        loss: (outputs, targets) -> losses of shape (B,), such as ``partial(cross_entropy, reduction="none")``.
        x: inputs, (B, ...); B may be 0.
        y: targets, (B, ...).
        route: the way, from :func:`find_route`; ``None``: found out on the batch itself.
        chunk_bytes: what making the operator and each of its calls may take beyond a forward and backward pass of the
            batch and beyond what is returned: work that takes more is cut into pieces, of at least one example or of
            one row of a weight matrix. Dense gradients, of the model or of a layer without a rule, are what is
            returned: B numbers a parameter are held, however many they are.
        often: whether more than norms and a sum will be asked for. Of what is cheaper to compute once and keep, as
            much is kept then as ``chunk_bytes`` allows; else as many bytes as the parameters take. If not, magnitudes
            of gradients that are written out are their norms. ``None``: as little is kept, and all bounds are known.

    Raises:
        InputError: the model has no parameter that is trained, has parameters of several types or devices or of
            another type than float32 and float64, has a layer whose output for one example depends on the others
            (BatchNorm, tracked InstanceNorm), or changes its input or what it holds while it runs; or it cannot be
            taken apart layer by layer on these examples, as the route asks.
    """
    with _lock_of(model):
        modules = dict(model.named_modules())
        refuse_coupled(modules)
        trained = _trained_parameters(modules)
        if len(x) != len(y):
            raise InputError(f"the batch has {len(x)} inputs and {len(y)} targets")
        if not len(x):
            return dense_gradients(model, loss, x, y, "the batch is empty", chunk_bytes)
        before, version = versions(modules), x._version
        gradients: FactoredGradients | Entangled
        if route is not None and route.dense:
            gradients = Entangled(route.dense)
        else:
            gradients = ghost_gradients(model, loss, x, y, chunk_bytes, route=route, often=often, trained=trained)
            if route is not None and isinstance(gradients, Entangled):
                raise OtherRoute(f"{type(model).__name__} works otherwise on these examples: {gradients.reason}")
        if isinstance(gradients, Entangled) and x._version == version:
            gradients = dense_gradients(model, loss, x, y, gradients.reason, chunk_bytes)
        refuse_changes(modules, before)
        if isinstance(gradients, Entangled) or x._version != version:
            raise InputError(f"{type(model).__name__} changes its input in place; let it work on a copy")
        return gradients


# Dense ways put stand-ins in the place of a model's parameters while they run, which other threads would see.
_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
_EACH = Lock()


def _lock_of(model: nn.Module) -> RLock:
    """The lock of a model: one thread at a time computes with it."""
    with _EACH:
        return _LOCKS.setdefault(model, RLock())


def _trained_parameters(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The trained parameters of all modules of a model by name; refuse a model without any, or with several kinds."""
    trained: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, layer in modules.items():
        for local, value in layer._parameters.items():
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            name = f"{prefix}.{local}" if prefix else local
            if is_lazy(value):
                raise InputError(f"layer {layer_of(name, modules[''])} has no shape yet: run the model once")
            if value.requires_grad:
                trained[name] = value
    kind = type(modules[""]).__name__
    if not trained:
        raise InputError(f"{kind} has no parameter that is trained: there is no gradient to privatise")
    kinds = {(value.dtype, value.device) for value in trained.values()}
    if len(kinds) > 1:
        several = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(f"{kind} has parameters of several kinds: {several}; allowed: one")
    ((dtype, _),) = kinds
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"{kind} has parameters of {dtype}; allowed: torch.float32, torch.float64")
    return trained


class Versions(NamedTuple):
    """All parameters and buffers of modules, and how often each was changed in place."""

    tensors: list[Tensor]  # held: another one that takes its place would get its number, once it is gone
    changes: list[int]

    def each(self, aside: Container[int]) -> list[tuple[int, int]]:
        """Return of each tensor its number and its changes, but for some numbers, whose changes do not count."""
        pairs = zip(map(id, self.tensors), self.changes, strict=True)
        return [(number, 0 if number in aside else count) for number, count in pairs]


def versions(modules: Mapping[str, nn.Module]) -> Versions:
    """Return all that modules hold, and how often it was changed in place."""
    held = [values for layer in modules.values() for values in (layer._parameters, layer._buffers) if values]
    tensors = [value for values in held for value in values.values() if value is not None]
    return Versions(tensors, [value._version for value in tensors])


def _put_aside(modules: Mapping[str, nn.Module]) -> set[int]:
    """Frozen parameters that peft's adapters of experts take out of their layer while it runs and put back last.

    torch counts that as a change: it sets them to themselves.
    """
    wrappers: list[Any] = [layer for layer in modules.values() if type(layer).__name__ == "ParamWrapper"]
    return {id(layer.get_param()) for layer in wrappers if not layer.get_param().requires_grad}


def refuse_changes(modules: Mapping[str, nn.Module], before: Versions) -> None:
    """Refuse a model that has changed parameters or buffers since :func:`versions` counted their changes."""
    after = versions(modules)
    if after.changes == before.changes and all(map(is_, after.tensors, before.tensors)):
        return
    aside = _put_aside(modules)
    now, then = after.each(aside), before.each(aside)
    if now == then or (aside and sorted(now) == sorted(then)):
        return
    names = [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, layer in modules.items()
        for held in (layer._parameters, layer._buffers)
        for name, value in held.items()
        if value is not None
    ]
    # The first that differs was changed, replaced or added; or one before it was taken away.
    name = next((name for name, one, other in zip_longest(names, now, then) if name and one != other), names[-1])
    raise InputError(
        f"layer {layer_of(name, modules[''])} changes {name} while it runs, and no noise protects what it "
        "may keep of the examples"
    )


def layer_of(name: str, model: nn.Module) -> str:
    """The layer that holds a parameter or buffer, for people."""
    layer = name.rpartition(".")[0]
    return f"{layer or '(the model)'} ({type(model.get_submodule(layer)).__name__})"


def refuse_coupled(modules: Mapping[str, nn.Module]) -> None:
    """Refuse layers that share statistics between examples."""
    for name, layer in modules.items():
        if not isinstance(layer, _NormBase):
            continue
        tracks = isinstance(layer, _InstanceNorm) and layer.track_running_stats
        if tracks or (isinstance(layer, _BatchNorm) and not isinstance(layer, _InstanceNorm)):
            raise InputError(
                f"layer {name or '(the model)'} ({type(layer).__name__}) shares statistics between the examples of a "
                "batch, or keeps those of earlier ones; use GroupNorm or LayerNorm"
            )
