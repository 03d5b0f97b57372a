"""Pretrained weights of a local file or folder: safetensors, or numbers that torch has saved; never a pickle."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedpriv.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # in a folder the first kind that is there is read
_HELD_IN = ("state_dict", "model")  # names under which programs that train save a network
_KEY = "model.pretrained"
T = TypeVar("T")


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the files with weights: the file itself, or those of a folder."""
    if not path.is_dir():
        return (path,)
    of_kinds = (sorted(path.glob(f"*{suffix}")) for suffix in _SUFFIXES)
    return tuple(next((files for files in of_kinds if files), ()))


def read_weights(path: Path) -> "dict[str, Tensor]":
    """Return tensors by name."""
    files = weight_files(path)
    if not files:
        raise InputError(key=_KEY, given=path, allowed=f"the folder has no file {', '.join(_SUFFIXES)}")
    return {name: value for file in files for name, value in _read(file).items()}


def _read(path: Path) -> "dict[str, Tensor]":
    import torch
    from safetensors.torch import load_file

    is_tensors = path.suffix == ".safetensors"
    try:
        held = load_file(path) if is_tensors else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(key=_KEY, given=path, allowed=f"cannot be read: {error.strerror or error}") from None
    except Exception as error:
        kind = "safetensors" if is_tensors else "torch with numbers alone, such as a state_dict()"
        raise InputError(key=_KEY, given=path, allowed=f"is no file of {kind}") from error
    for name in _HELD_IN:
        held = held[name] if isinstance(held, Mapping) and isinstance(held.get(name), Mapping) else held
    tensors = held.items() if isinstance(held, Mapping) else ()
    found = {str(name).removeprefix("module."): value for name, value in tensors if isinstance(value, torch.Tensor)}
    if not found:
        raise InputError(key=_KEY, given=path, allowed="holds no tensors by name")
    return found


def unwrapped(given: "Mapping[str, T]", own: "Collection[str]") -> "dict[str, T]":
    """Name tensors as a network does, where what held it when they were stored put more in front of all its names.

    Such as ``model.`` of Lightning's modules, ``module.`` of DistributedDataParallel, ``_orig_mod.`` of torch.compile.
    """
    first = next(iter(own), "")
    fronts = (name.removesuffix(first) for name in given if first not in given and name.endswith(f".{first}"))
    front = next((front for front in fronts if all(name.startswith(front) for name in given)), "")
    return {name.removeprefix(front): value for name, value in given.items()}


def fill(network: "nn.Module", tensors: "Mapping[str, Tensor]", classes: int, path: str) -> None:
    """Copy all tensors into a network; a layer of so many classes stays new where the file has others, or none."""
    own = network.state_dict()
    new = set()
    for name in dict.fromkeys([*own, *tensors]):
        if name not in own:
            raise another_network(path, f"has {name}, which the network lacks")
        value, given = own[name], tensors.get(name)
        is_head = value.ndim > 0 and len(value) == classes
        if given is None:
            if not is_head and not name.endswith("num_batches_tracked"):  # which early versions of torch do not count
                raise another_network(path, f"lacks {name}")
        elif given.shape != value.shape:
            if not is_head or given.shape[1:] != value.shape[1:]:
                shapes = f"{tuple(given.shape)}, and in the network {tuple(value.shape)}"
                raise another_network(path, f"{name} has shape {shapes}")
            new.add(name)
    network.load_state_dict({name: value for name, value in tensors.items() if name not in new}, strict=False)


def another_network(path: str, what: str) -> InputError:
    """Return the error of weights that do not fit."""
    return InputError(key=_KEY, given=path, allowed=f"is of another network: {what}")
