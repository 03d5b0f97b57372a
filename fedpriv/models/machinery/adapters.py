"""Adapters on a frozen network: LoRA, and any configuration of the library peft, with the files that it saves."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line, reason_of, some_of
from fedpriv.core.names import END, START
from fedpriv.core.registry import suggestion
from fedpriv.core.settings import Table
from fedpriv.gradients.calls import until_the_end

if TYPE_CHECKING:
    from fedpriv.models.machinery.settings import TextModelSettings


_KEY = "model.peft"
_WEIGHTS = "adapter_model.safetensors"
_TOKENS = ("trainable_token_indices", "token_indices", "cpt_token_ids")  # numbers in peft's configurations
_OWN = "own_tokens"


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """Where the tokens of a network of transformers are in the tables of the network that was saved."""

    rows: Tensor  # what each row began as: nothing, beginning and end first, if numbers of tokens have moved
    count: int  # rows that were saved
    marks: int  # by how much numbers have moved
    # what the tables, and adapters that are a start, have of tokens that the data lack, by the end of a tensor's name
    unknown: dict[str, Tensor]

    def hold(self, network: nn.Module) -> None:
        """Have the network know this; so does what peft makes of it."""
        setattr(network, _OWN, self)


def with_adapters(network: nn.Module, given: str | Table, classes: int, task: str) -> nn.Module:
    """Return the network, frozen but for its last layer, with peft's adapters by configuration or saved folder."""
    if find_spec("peft") is None:
        raise InputError(key=_KEY, given=_shown(given), allowed="needs peft: pip install 'fedpriv[zoo]'")
    import peft

    try:
        if isinstance(given, str):
            config, tensors = _saved(peft, Path(given))
        else:
            config, tensors = _configuration(peft, given.plain(), network, classes, task), None
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.startswith("pissa_niter"):  # findings/peft-pissa-base.sh
            allowed = (
                "'pissa': this one changes the frozen weights at random, and its adapter fits no other copy of them"
            )
            raise InputError(key=f"{_KEY}.init_lora_weights", given=start, allowed=allowed)
        with (
            warnings.catch_warnings(action="ignore", category=FutureWarning),  # about what peft calls in transformers
            _text_looked_up(network, config),
        ):
            adapted: nn.Module = peft.get_peft_model(network, _renumbered(config, _moved(network)))
        _check_unknown(adapted, _adapters(peft, adapted))
        if tensors is not None:
            _load(peft, adapted, tensors, str(given))
        return adapted
    except InputError:
        raise
    except Exception as error:
        layers = sorted({name.rpartition(".")[2] for name, layer in network.named_modules() if _is_layer(layer)})
        if type(error).__name__ == "NoMatchingPeftModuleError":
            wanted = given if isinstance(given, str) else given.plain().get("target_modules")
            allowed = f"matches no layer of the network, which has {some_of(layers, 12)}"
            raise InputError(key=f"{_KEY}.target_modules", given=wanted, allowed=allowed) from error
        allowed = f"peft does not adapt a network with layers {some_of(layers, 12)}: {reason_of(error)[:300]}"
        raise InputError(key=_KEY, given=_shown(given), allowed=allowed) from error


def save_adapters(network: nn.Module, folder: Path) -> None:
    """Write the adapters into a folder, as peft does, and the running statistics, which training moves too.

    peft loads whatever tensors of the network its file has.
    """
    import peft

    (adapted,) = (layer for layer in network.modules() if isinstance(layer, peft.PeftModel))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _adapters(peft, adapted) | _statistics(adapted)
    for name, axis, marks in _token_axes(adapted, tensors):
        known = tensors[name].index_select(axis, _saved_rows(adapted, marks))
        tensors[name] = torch.cat([known, _unknown_rows(adapted, name, known, axis)], axis)
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, folder / _WEIGHTS)  # none shared
    config = _renumbered(adapted.peft_config[adapted.active_adapter], -_moved(adapted))
    for key, value in vars(config).items():
        if isinstance(value, set):  # whose order another process would write otherwise
            setattr(config, key, sorted(value))
    config.save_pretrained(str(folder))


def _saved(peft: Any, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    if not (folder / _WEIGHTS).is_file():
        raise InputError(key=_KEY, given=folder, allowed=f"a folder with {_WEIGHTS}, as peft saves it")
    config = peft.PeftConfig.from_pretrained(str(folder))
    if config.peft_type == "P_TUNING" or getattr(config, "prefix_projection", False):
        allowed = f"no {config.peft_type.value} with an encoder: peft saves what it gives, and it cannot be trained on"
        raise InputError(key=_KEY, given=folder, allowed=allowed)
    config.inference_mode = False
    return config, load_file(folder / _WEIGHTS)


def _load(peft: Any, adapted: nn.Module, tensors: dict[str, Tensor], folder: str) -> None:
    wanted = _adapters(peft, adapted)
    for name, axis, _ in _token_axes(adapted, wanted):
        own: OwnTokens = getattr(adapted, _OWN)
        if name in tensors and tensors[name].ndim == wanted[name].ndim and tensors[name].shape[axis] == own.count:
            lacking = torch.arange(len(own.rows) - own.marks, own.count)
            own.unknown[name] = tensors[name].index_select(axis, lacking)
            tensors[name] = tensors[name].index_select(axis, own.rows)
    wanted |= {name: value for name, value in _statistics(adapted).items() if name in tensors}
    if reason := _misfit(wanted, tensors):
        raise InputError(key=_KEY, given=folder, allowed=f"{_WEIGHTS}{reason}")
    peft.set_peft_model_state_dict(adapted, tensors)


def _misfit(wanted: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """Say how saved tensors are not those that a network wants; empty: they are."""
    for name in sorted(wanted.keys() | saved.keys()):
        if name not in wanted or name not in saved:
            return f" {'lacks' if name in wanted else 'has'} {name}"
        if saved[name].shape != wanted[name].shape:
            return f": {name} has shape {tuple(saved[name].shape)}, and in the network {tuple(wanted[name].shape)}"
    return ""


def _moved(network: nn.Module) -> int:
    """By how much a token's number is larger than in the network that was saved."""
    own: OwnTokens | None = getattr(network, _OWN, None)
    return 0 if own is None else own.marks


def _renumbered(config: Any, by: int) -> Any:
    """Return a configuration of peft with other numbers of its tokens."""
    moved = copy(config)
    for key in _TOKENS:
        if given := getattr(config, key, None):
            setattr(moved, key, tree_map(lambda number: number + by, given))  # of one table, or by its name
    return moved


def _text_looked_up(network: Any, config: Any) -> AbstractContextManager[None]:
    """Inside the block the table of tokens is asked for numbers of the saved network, as peft asks for a prompt's."""
    by = _moved(network)
    if not by or getattr(config, "prompt_tuning_init", None) != "TEXT":
        return nullcontext()
    return until_the_end([network.get_input_embeddings().register_forward_pre_hook(lambda _, given: (given[0] + by,))])


def _token_axes(adapted: Any, tensors: dict[str, Tensor]) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Yield an adapter's tensors with numbers for each token: name, axis, and marks by their weight, the last wins."""
    own, network = getattr(adapted, _OWN, None), adapted.get_base_model()
    if own is None:
        return
    for table, marks in (
        (network.get_input_embeddings(), (END, START)),
        (network.get_output_embeddings(), (START, END)),
    ):
        path = next((name for name, layer in network.named_modules() if layer is table), None)
        for name, value in tensors.items():
            if path is not None and f".{path}." in name and len(own.rows) in value.shape:
                yield name, value.shape.index(len(own.rows)), marks


def _saved_rows(adapted: Any, marks: tuple[int, int]) -> Tensor:
    """The row of each token of the saved network; that of beginning and end is the one which was trained."""
    own: OwnTokens = getattr(adapted, _OWN)
    chosen = torch.arange(own.marks, len(own.rows))
    config = adapted.get_base_model().config
    for mark in marks:
        given = getattr(config, {START: "bos_token_id", END: "eos_token_id"}[mark])
        if given is not None and own.rows[mark] < len(chosen):
            chosen[own.rows[mark]] = mark
    return chosen


def _unknown_rows(adapted: Any, name: str, known: Tensor, axis: int) -> Tensor:
    """What an adapter has of tokens that the data lack: what it began with; of LoRA's new factors that is zero."""
    own: OwnTokens = getattr(adapted, _OWN)
    for ending, rows in reversed(own.unknown.items()):
        if name.endswith(ending):
            return rows.to(known)
    shape = [*known.shape]
    shape[axis] = own.count - shape[axis]
    return known.new_zeros(shape)


def _check_unknown(adapted: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse adapters of which nobody can tell what they are to have of tokens that the data lack."""
    for name, _, _ in _token_axes(adapted, tensors):
        own: OwnTokens = getattr(adapted, _OWN)
        lacking = own.count + own.marks - len(own.rows)
        if lacking and not re.search(r"\.lora_(embedding_)?[AB]\b", name) and not name.endswith((*own.unknown,)):
            allowed = f"{name} has a number for each token, and the tokenizer lacks {lacking} of the network's"
            raise InputError(key=_KEY, given=name.rpartition(".")[2], allowed=allowed)


def _adapters(peft: Any, adapted: nn.Module) -> dict[str, Tensor]:
    return peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)


def _statistics(adapted: nn.Module) -> dict[str, Tensor]:
    """The saved buffers of the network's own layers; those of peft's are an adapter's, which peft saves itself."""
    state = adapted.state_dict()
    own = (name for name, layer in adapted.named_modules() if not type(layer).__module__.startswith("peft."))
    names = (f"{name}.{local}".lstrip(".") for name in own for local in adapted.get_submodule(name)._buffers)
    return {name: state[name] for name in names if name in state}


def _configuration(peft: Any, keys: dict[str, Any], network: nn.Module, classes: int, task: str) -> Any:
    kinds = {str(getattr(kind, "value", kind)): each for kind, each in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = keys.pop("peft_type", "")
    if name not in kinds:
        close = suggestion(str(name), tuple(kinds))
        raise InputError(key=f"{_KEY}.peft_type", given=name, allowed=f"peft knows no such kind{close}")
    fields = kinds[name].__dataclass_fields__
    for key in keys:
        if key not in fields:
            raise InputError(f"{_KEY}: {name} has no key {key}{suggestion(key, tuple(fields), most=3)}")
    if task:
        keys.setdefault("task_type", task)
    elif "modules_to_save" in fields:
        keys.setdefault("modules_to_save", _heads(network, classes))
    return kinds[name](**keys)


def _heads(network: nn.Module, classes: int) -> list[str] | None:
    """The layer that gives the logits, by name: the last one of so many outputs."""
    named = [name for name, layer in network.named_modules() if _is_layer(layer) and len(layer.weight) == classes]
    return named[-1:] or None


def _is_layer(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)) or type(layer).__name__ == "Conv1D"


def _shown(given: str | Table) -> object:
    return given if isinstance(given, str) else given.plain()


ADAPTER = "default"  # peft's name of an adapter that has none


class LoraLinear(nn.Module):
    """A frozen Linear layer with an adapter: W x + b + (alpha / rank) B A x, B being zero at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        narrow = nn.Linear(base.in_features, rank, bias=False)
        wide = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(narrow.weight, a=math.sqrt(5))
        nn.init.zeros_(wide.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER: narrow}), nn.ModuleDict({ADAPTER: wide})
        self._scale = alpha / rank

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        base: Tensor = self.base_layer(x)
        adapter: Tensor = self.lora_B[ADAPTER](self.lora_A[ADAPTER](x))
        return base + self._scale * adapter


class _Held(nn.Module):
    """A network under the name that peft gives it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Adapted(nn.Module):
    """A network with adapters; its parameters' names begin as in peft."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.base_model = _Held(network)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """As the network."""
        return self.base_model.model(tokens)


def with_lora(network: nn.Module, settings: "TextModelSettings", layers: Sequence[str], head: str) -> Adapted:
    """Return the network with adapters beside some of its Linear layers, all else frozen."""
    network.requires_grad_(False)
    linear = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in layers}
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise settings.refusal(f"lora_layers = {list(layers)}: its Linear layers are {some_of(known)}")
    for name, layer in chosen.items():
        rank = settings.lora_rank or 1
        if rank > min(layer.in_features, layer.out_features):
            raise settings.refusal(
                f"lora_rank = {rank}: layer {name} has {layer.in_features} inputs and {layer.out_features} outputs"
            )
        parent, _, local = name.rpartition(".")
        setattr(network.get_submodule(parent), local, LoraLinear(layer, rank, settings.lora_alpha))
    last = linear[head]
    if last.bias is not None and head not in chosen:
        last.requires_grad_(True)
    adapted = Adapted(network)
    if settings.adapter:
        _load_lora(adapted, settings)
    return adapted


def _load_lora(adapted: Adapted, settings: "TextModelSettings") -> None:
    """Copy the numbers of an adapter that peft has saved; there its names lack that of the adapter."""
    try:
        saved = load_file(settings.adapter)
    except (OSError, SafetensorError) as error:
        raise settings.refusal(f"adapter = {settings.adapter!r} cannot be read: {one_line(error)}") from None
    part = f".{ADAPTER}."
    wanted = {name.replace(part, "."): value for name, value in adapted.named_parameters() if part in name}
    if reason := _misfit(wanted, saved):
        raise settings.refusal(f"adapter = {settings.adapter!r}{reason}")
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(saved[name])
