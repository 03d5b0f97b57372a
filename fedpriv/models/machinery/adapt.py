"""Change a network that others have written: GroupNorm in place of BatchNorm, and logits out of what it returns."""

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import remove_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import override

from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.registry import suggestion
from fedpriv.gradients.calls import until_the_end
from fedpriv.models.machinery.adapters import with_adapters
from fedpriv.models.machinery.layers import sequence
from fedpriv.models.machinery.logits import LogitsOf, give_logits, logits_in
from fedpriv.models.machinery.settings import OpenModelSettings, SequenceShape, Shape

_GROUPS = (32, 16, 8, 4, 2, 1)
_SIDES = (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 512)  # that networks are made for
_STEPS = (4, 7, 8, 14, 16, 32)  # of patches, of which sides are multiples


class NotTakenError(InputError):
    """A network does not take data of this size."""


def adapted(settings: OpenModelSettings, network: Any, inputs: Shape | SequenceShape, classes: int) -> nn.Module:
    """Return the network as the settings ask for it."""
    if not isinstance(network, nn.Module):
        builder = settings.name.partition(":")[2] or settings.name
        raise settings.refusal(f"{builder} returns {type(network).__name__}; expected a torch.nn.Module")
    after = next((name for name, value in network.named_parameters() if value._post_accumulate_grad_hooks), "")
    if after:
        why = f"{after} has a hook behind its gradient (register_post_accumulate_grad_hook)"
        raise settings.refusal(f"{why}, which private steps leave out; register_hook changes gradients")
    _make_real(network)
    network.train().to(device="cpu", dtype=torch.float32)
    whole = network
    if isinstance(inputs, SequenceShape):
        whole, blank = LogitsOf(network), torch.zeros(2, inputs.length, dtype=torch.int64)
    else:
        blank = torch.zeros(2, *inputs)
    norms = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)] if settings.norm else []
    try:
        returned, maps = _tried(settings, whole, blank, norms)
    except NotTakenError:
        if norms or settings.peft is not None or not settings.is_code:
            raise
        returned, maps = blank, {}  # it stays as it is: what trains it says what it needs
    if norms:
        _replace_norms(settings, network, maps)
    if not isinstance(logits_in(returned), Tensor):
        raise settings.refusal(
            f"gives {type(returned).__name__} in training; expected logits, or what has them as logits"
        )
    if not isinstance(returned, Tensor):
        give_logits(network)
    if settings.peft is not None:
        network = with_adapters(network, settings.peft, classes, _task(network, inputs))
    if settings.freeze is not None:
        _freeze(network, settings.freeze)
    return LogitsOf(network) if isinstance(inputs, SequenceShape) else network


def _task(network: nn.Module, inputs: Shape | SequenceShape) -> str:
    """What peft calls the task; empty: it has a name for networks of transformers alone."""
    if not isinstance(inputs, SequenceShape) or not hasattr(network, "get_input_embeddings"):
        return ""
    return "CAUSAL_LM" if inputs.is_next else "SEQ_CLS"


def taken_side(settings: OpenModelSettings, shape: Shape, classes: int) -> int | None:
    """Return the side of square images that the network takes, larger ones than these where there is one."""
    channels, *sides = shape
    larger = {(max(sides) // step + 1) * step for step in _STEPS} | {side for side in _SIDES if side > max(sides)}
    for side in (*sorted(larger), *reversed([side for side in _SIDES if side < min(sides)])):
        try:
            with torch.no_grad():
                settings.built((channels, side, side), classes).train()(torch.zeros(2, channels, side, side))
        except Exception:  # noqa: BLE001 - this size it does not take either
            continue
        return side
    return None


def take_channels(network: nn.Module, channels: int) -> None:
    """Have the first convolution take another number of channels; it sees a grey image as before."""
    name, first = next(each for each in network.named_modules() if isinstance(each[1], nn.Conv2d))
    old, first.in_channels = first.in_channels, channels
    first.weight = nn.Parameter(first.weight.detach().sum(dim=1, keepdim=True).repeat(1, channels, 1, 1) / channels)
    while name:  # modules around it may check what they are given
        name = name.rpartition(".")[0]
        around = network.get_submodule(name)
        if getattr(around, "num_channels", None) == old:
            setattr(around, "num_channels", channels)  # noqa: B010 (modules take tensors and modules only, says mypy)


def _tried(
    settings: OpenModelSettings, network: nn.Module, blank: Tensor, norms: Sequence[nn.Module]
) -> tuple[Any, dict[nn.Module, int]]:
    """Return what it gives for blank examples in training, and how many places the maps of each norm have."""
    maps: dict[nn.Module, int] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        maps[layer] = given[0][0, 0].numel()

    kept = {name: value.clone() for name, value in network.named_buffers()}
    try:
        with until_the_end([layer.register_forward_pre_hook(note) for layer in norms]), torch.no_grad():
            returned = network(blank)
            for name, value in network.named_buffers():
                if name in kept:
                    value.copy_(kept[name])
    except (Exception, SystemExit) as error:
        what = f"{'images' if blank.is_floating_point() else 'sequences'} of shape {tuple(blank.shape)}"
        refusal = settings.refusal(f"cannot take {what} in training: {reason_of(error)}")
        raise NotTakenError(key=refusal.key, given=refusal.given, allowed=refusal.allowed) from error
    return returned, maps


def _replace_norms(settings: OpenModelSettings, network: nn.Module, maps: dict[nn.Module, int]) -> None:
    """Put a GroupNorm in the place of each BatchNorm, with its weight and bias."""
    made: dict[nn.Module, nn.Module] = {}
    for name, layer in list(network.named_modules(remove_duplicate=False)):
        if isinstance(layer, _BatchNorm):
            parent, _, local = name.rpartition(".")
            if not name:
                raise settings.refusal("norm = 'group': the network itself is a BatchNorm")
            made.setdefault(layer, _group_norm(layer, maps.get(layer, 0)))
            setattr(network.get_submodule(parent), local, made[layer])


def _group_norm(norm: _BatchNorm, places: int) -> nn.Module:
    """Return what stands in for BatchNorm; on maps of 1 x 1 one group, as GroupNorm refuses one value a group."""
    channels = norm.num_features
    groups = 1 if places == 1 else next(count for count in _GROUPS if channels % count == 0)
    group = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    group.weight, group.bias = norm.weight, norm.bias
    after = {name: layer for name, layer in norm.named_children() if not isinstance(layer, nn.Identity)}
    return sequence(norm=group, **after) if after else group


class _Pair(nn.Module):
    """A complex number as the pair of real ones that are trained."""

    @override
    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.real.clone(), value.imag.clone()


def _make_real(network: nn.Module) -> None:
    """Hold complex numbers as pairs of real ones, and numbers made under ``torch.inference_mode`` as usual ones.

    ``Module.to`` drops imaginary parts, what was made under inference mode can be neither trained nor changed, and a
    layer with torch's first weight norm cannot be copied: it gets the second.
    """
    usual: dict[int, Any] = {}  # a tied weight has two names
    for layer in list(network.modules()):
        for norm in [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]:
            weight_norm(remove_weight_norm(layer, norm.name), norm.name, norm.dim)
        for held in (layer._parameters, layer._buffers):
            numbers = [(name, value) for name, value in held.items() if value is not None and not is_lazy(value)]
            for name, value in numbers:
                if value.is_inference():
                    copied = value.detach().clone()
                    trained = nn.Parameter(copied, value.requires_grad) if held is layer._parameters else copied
                    held[name] = usual.setdefault(id(value), trained)
                if value.is_complex():
                    register_parametrization(layer, name, _Pair())


def _freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter whose name one of the patterns describes."""
    parameters = dict(network.named_parameters())
    for pattern in patterns:
        named = fnmatch.filter(parameters, pattern)
        if not named:
            inside = [f"{pattern}.*"] if any(name.startswith(f"{pattern}.") for name in parameters) else [*parameters]
            close = suggestion(pattern, inside, else_known=False, most=3)
            raise InputError(key="model.freeze", given=pattern, allowed=f"no parameter has such a name{close}")
        for name in named:
            parameters[name].requires_grad_(False)
