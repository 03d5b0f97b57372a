"""The folder that the tap writes: messages, observations, how to build the network, and the truth, apart.

``tap.json``; ``messages/`` with all that was sent and replied; ``observations/`` of uploads that a gradient attack
fits; ``base.safetensors`` with what a network has besides an adapter; ``truth/`` with what clients trained on;
``ledger/`` with what was proven of them.
"""

import importlib
import inspect
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedpriv.attacks.observation import observation_stem, observation_title
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.files import write_whole
from fedpriv.core.records import read_file
from fedpriv.core.records.reading import Record
from fedpriv.flower.arrays import Form
from fedpriv.flower.watch import Rates, Seen
from fedpriv.gradients import Vector

ABOUT, BASE, MESSAGES, TRUTH, LEDGER = "tap.json", "base.safetensors", "messages", "truth", "ledger"

MADE = "privatise made it"
"""What tells the form of a reply that is a release of our own mechanism."""


@dataclass(frozen=True)
class Tapped(Record):
    """What ``tap.json`` says."""

    model: str | None  # import path of what returns the network; `None`: it is not known
    app: str  # the folder of the app's module
    loss: str  # import path of what is minimised


@dataclass(frozen=True)
class Exchange(Record):
    """What ``messages/ROUND-CLIENT.json`` says: a message, its reply, and what was seen meanwhile."""

    round: int
    client: int
    node: int  # Flower's number of it
    type: str  # of the message: train, evaluate, query, with its action
    sent: dict[str, dict[str, Any]]  # records of the message: their keys and values, of arrays type and shape
    replied: dict[str, dict[str, Any]]  # of the reply
    record: str = ""  # the reply's ArrayRecord with the parameters; empty: there is none
    order: tuple[str, ...] = ()  # of its arrays
    form: Form | None = None  # of the reply; `None`: there are no parameters in it
    source: str = ""  # what tells the form
    clients: int = 1  # whose replies are averaged
    summed: bool = False  # whether secure aggregation shows the server the sum alone
    optimizers: tuple[str, ...] = ()  # that PyTorch was seen to take, in lower case
    rates: dict[str, Rates] = field(default_factory=dict)  # how optimisers moved the arrays
    changed: bool = False  # whether something changed what the network had become, which nothing explains
    noise: str = ""  # what added noise to the reply; empty: nothing that is known
    unattacked: str = ""  # why no gradient attack fits; empty: one does
    remarks: tuple[str, ...] = ()  # what makes an attack mean less, and what else is to be known

    @property
    def protected(self) -> bool:
        """Whether a mechanism made the reply, ours or another library's."""
        return self.source == MADE or bool(self.noise)

    @property
    def name(self) -> str:
        """As users name its upload."""
        return f"{self.round}-{self.client}"

    @property
    def stem(self) -> str:
        """The name of its files, without ending."""
        action = "" if self.type == "train" else f"-{self.type}"
        return f"{observation_stem(self.round, self.client, 1)}{action}"

    @property
    def title(self) -> str:
        """What it is, for a person."""
        return f"{self.type} of {observation_title(self.round, self.client, 1)}"


@dataclass(frozen=True, eq=False)
class TrainedOn:
    """What a client trained on in one round."""

    images: Tensor  # (N, ...) as the network was shown them, each once
    labels: Tensor  # int64 (N,), -1 where no label was seen


_TAPPED, _EXCHANGE = TypeAdapter(Tapped), TypeAdapter(Exchange)


def read_tapped(folder: Path) -> Tapped | None:
    """Return what ``tap.json`` says; ``None``: this is not the folder of a tap."""
    return read_file(folder / ABOUT, _TAPPED)


def write_exchange(folder: Path, exchange: Exchange, arrays: Vector) -> None:
    """Write a message and its reply; ``arrays`` are those that no observation has."""
    path = folder / MESSAGES / f"{exchange.stem}.json"
    write_whole(path, f"{json.dumps(asdict(exchange), indent=2, allow_nan=False)}\n".encode())
    if arrays:
        write_whole(
            path.with_suffix(".safetensors"), save({name: value.contiguous() for name, value in arrays.items()})
        )


def read_exchanges(folder: Path) -> tuple[Exchange, ...]:
    """Return what was heard, by round and client; a folder of an earlier version has none."""
    found = (read_file(path, _EXCHANGE) for path in sorted((folder / MESSAGES).glob("*.json")))
    return tuple(exchange for exchange in found if exchange is not None)


def read_arrays(path: Path) -> Vector:
    """Return the arrays of a file, by name; none where there is no file."""
    try:
        arrays: Vector = load(path.read_bytes()) if path.is_file() else {}
        return arrays
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


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


def built(tapped: Tapped, shape: tuple[int, int, int] | None, classes: int | None) -> nn.Module:
    """Return the network; its maker is told ``shape`` and ``classes`` if it takes them."""
    if tapped.model is None:
        raise InputError('the network is not known: tap.model = "package.module:Name" in fedpriv.toml names it')
    maker = imported(tapped, tapped.model)
    takes, known = inspect.signature(maker).parameters, {"shape": shape, "classes": classes}
    try:
        network = maker(**{key: value for key, value in known.items() if key in takes and value is not None})
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
