"""The folder that the tap writes: observations, how to build the network, and the truth, apart.

``tap.json``; ``observations/``; ``truth/`` with what clients trained on; ``ledger/`` with what was proven of them.
"""

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.files import write_whole
from fedpriv.core.records import read_file
from fedpriv.core.records.reading import Record
from fedpriv.flower.watch import Seen

ABOUT, TRUTH, LEDGER = "tap.json", "truth", "ledger"


@dataclass(frozen=True)
class Tapped(Record):
    """What ``tap.json`` says."""

    model: str  # import path of what returns the network
    app: str  # the folder of the app's module
    loss: str  # import path of what is minimised


@dataclass(frozen=True, eq=False)
class TrainedOn:
    """What a client trained on in one round."""

    images: Tensor  # (N, ...) as the network was shown them, each once
    labels: Tensor  # int64 (N,), -1 where no label was seen


_TAPPED = TypeAdapter(Tapped)


def read_tapped(folder: Path) -> Tapped | None:
    """Return what ``tap.json`` says; ``None``: this is not the folder of a tap."""
    return read_file(folder / ABOUT, _TAPPED)


def write_truth(path: Path, seen: Seen) -> None:
    """Write what a client trained on, each image once, readable by its owner alone."""
    images = torch.cat(seen.images)
    labels = torch.cat(seen.labels).long() if seen.labels else images.new_empty(0).long()
    told = labels if len(labels) == len(images) else torch.full((len(images),), -1)
    places: dict[bytes, int] = {}
    for number, row in enumerate(images.flatten(1).numpy()):
        places.setdefault(row.tobytes(), number)
    first = list(places.values())
    write_whole(path, save({"images": images[first].contiguous(), "labels": told[first].contiguous()}), mode=0o600)


def read_truth(path: Path) -> TrainedOn | None:
    """Return what a client trained on; ``None``: it was not kept."""
    if not path.is_file():
        return None
    try:
        tensors = load(path.read_bytes())
        return TrainedOn(tensors["images"], tensors["labels"])
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


def built(tapped: Tapped, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return the network; its maker is told ``shape`` and ``classes`` if it takes them."""
    maker = imported(tapped, tapped.model)
    takes = inspect.signature(maker).parameters
    try:
        network = maker(**{key: value for key, value in (("shape", shape), ("classes", classes)) if key in takes})
    except Exception as error:
        raise InputError(key="tap.model", given=tapped.model, allowed=reason_of(error)) from error
    if not isinstance(network, nn.Module):
        raise InputError(f"tap.model = {tapped.model!r} returns {type(network).__name__}, no torch.nn.Module")
    return network


def imported(tapped: Tapped, path: str) -> Any:
    """Return what an import path names, in the folder where this runs, in the app's, or in one above the app's."""
    module, _, name = path.partition(":")
    root = module.partition(".")[0]
    near = [Path.cwd(), Path(tapped.app), *Path(tapped.app).parents]
    has = next((each for each in near if (each / root).is_dir() or (each / f"{root}.py").is_file()), None)
    if has is not None and str(has) not in sys.path:
        sys.path.append(str(has))  # for good: the network's own code may import more later
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise InputError(f"{path!r}: module {module} has no {name}") from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{path!r}: module {module} cannot be imported: {reason_of(error)}") from error
