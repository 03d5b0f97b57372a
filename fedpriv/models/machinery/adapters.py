"""Adapters of the library peft on a frozen network: any of its configurations, and the files that it saves."""

import warnings
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedpriv.core.errors import InputError, reason_of, some_of
from fedpriv.core.registry import suggestion
from fedpriv.core.settings import Table

_KEY = "model.peft"
_WEIGHTS = "adapter_model.safetensors"


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
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # about what peft calls in transformers
            adapted: nn.Module = peft.get_peft_model(network, config)
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
    """Write the adapters into a folder, as peft does."""
    import peft

    (adapted,) = (layer for layer in network.modules() if isinstance(layer, peft.PeftModel))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / _WEIGHTS)
    config = copy(adapted.peft_config[adapted.active_adapter])
    for key, value in vars(config).items():
        if isinstance(value, set):  # whose order another process would write otherwise
            setattr(config, key, sorted(value))
    config.save_pretrained(str(folder))


def _saved(peft: Any, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    if not (folder / _WEIGHTS).is_file():
        raise InputError(key=_KEY, given=folder, allowed=f"a folder with {_WEIGHTS}, as peft saves it")
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    return config, load_file(folder / _WEIGHTS)


def _load(peft: Any, adapted: nn.Module, tensors: dict[str, Tensor], folder: str) -> None:
    wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in wanted or name not in tensors:
            allowed = f"{_WEIGHTS} {'lacks' if name in wanted else 'has'} {name}"
            raise InputError(key=_KEY, given=folder, allowed=allowed)
        if wanted[name].shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, and in the network {tuple(wanted[name].shape)}"
            raise InputError(key=_KEY, given=folder, allowed=f"{_WEIGHTS}: {name} has shape {shapes}")
    peft.set_peft_model_state_dict(adapted, tensors)


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
