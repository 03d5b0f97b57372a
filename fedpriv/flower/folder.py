"""The folder that the tap writes: messages, observations, how to build the network, and the truth, apart.

``tap.json``; ``messages/`` with all that was sent and replied; ``observations/`` of uploads that a gradient attack
fits; ``base.safetensors`` with what a network has besides an adapter; ``truth/`` with what clients trained on;
``ledger/`` with what was proven of them.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedpriv.attacks.observation import observation_stem, observation_title
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.files import as_json, write_whole
from fedpriv.core.own_code import own_object
from fedpriv.core.reading import Record, read_file
from fedpriv.flower.arrays import Form
from fedpriv.flower.watch import Batch, Rates, Seen, Task, uncompiled
from fedpriv.gradients import Vector

ABOUT, BASE, MESSAGES, TRUTH, LEDGER = "tap.json", "base.safetensors", "messages", "truth", "ledger"

COMPARED = "compared with the network that was watched"
MADE = "privatise made it"
"""What tells the form of a reply: what the network was seen to become, or our own mechanism's release."""


@dataclass(frozen=True)
class Tapped(Record):
    """What ``tap.json`` says."""

    model: str | None  # import path of what returns the network; `None`: it is not known
    app: str  # the folder of the app's module
    loss: str  # import path of what is minimised
    records: str | None = None  # import path of what returns a client's records, and others


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
    names: dict[str, str] = field(default_factory=dict)  # of those trained -> the network's own name
    network: str | None = None  # import path of what was trained
    parts: tuple[str, ...] = ()  # of a network whose parts are run one after the other; empty: it is run whole
    task: Task | None = None  # what it learns; `None`: it was not seen
    loss: str = ""  # what it minimises, as torch.nn.functional calls it
    example: tuple[int, ...] = ()  # shape of one, as the network is given it
    target: tuple[int, ...] = ()  # shape of the numbers that are learnt of one
    classes: int = 0  # that its output tells apart; 0: it was not seen
    local: tuple[str, ...] = ()  # arrays of the network that are trained and stay at the client
    vocabulary: int = 0  # of tokens; 0: examples are numbers
    bounds: tuple[float, float] | None = None  # within which all numbers of rows are; `None`: images on [0, 1]
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
    def is_text(self) -> bool:
        """Whether examples are sequences of tokens."""
        return self.vocabulary > 0

    @property
    def kind(self) -> str:
        """What an example is: image, row or sentence."""
        if self.is_text:
            return "sentence"
        return "image" if len(self.example) in (0, 3) and self.task != "values" else "row"

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

    images: Tensor  # (N, ...) examples as the network was shown them, each once
    labels: Tensor  # int64 (N,), -1 where no label was seen
    batches: tuple[Batch, ...] = ()  # as they were shown, in their order; none in the folder of an earlier version
    sizes: tuple[int, ...] = ()  # examples behind each step; none where no optimiser of PyTorch was seen
    after: Vector = field(default_factory=dict)  # the network's own arrays, where the reply has others

    def targets(self) -> Tensor:
        """The numbers that are learnt of each example, (N, m)."""
        shown = torch.cat([batch.examples for batch in self.batches]).flatten(1)
        told = torch.cat([batch.target for batch in self.batches if batch.target is not None]).flatten()
        places: dict[bytes, int] = {}
        for number, row in enumerate(shown.numpy()):
            places.setdefault(row.tobytes(), number)
        first = [places[row.tobytes()] for row in self.images.flatten(1).numpy()]
        return told.reshape(len(shown), -1)[first]

    def steps(self, count: int) -> list[list[Batch]]:
        """Batches by the step that they are behind; without steps that were seen, one each."""
        groups: list[list[Batch]] = [[]]
        left = [*self.sizes] or [len(batch.examples) for batch in self.batches]
        for batch in self.batches:
            groups[-1].append(batch)
            left[0] -= len(batch.examples)
            if left[0] <= 0:
                left.pop(0)
                if not left:
                    break
                groups.append([])
        return [group for group in groups if group][:count]


def joined(clients: Sequence[TrainedOn], steps: int) -> TrainedOn:
    """Return what several clients trained on as if one had: the batches of all behind each step."""
    images, labels = (torch.cat([getattr(each, key) for each in clients]) for key in ("images", "labels"))
    each_alone = [each.steps(steps) for each in clients]
    if any(each.after for each in clients) or len({len(own) for own in each_alone}) > 1:
        return TrainedOn(images, labels)  # the reply is none of the network's, or there is no common step
    together = [[batch for part in parts for batch in part] for parts in zip(*each_alone, strict=True)]
    sizes = tuple(sum(len(batch.examples) for batch in group) for group in together)
    return TrainedOn(images, labels, tuple(batch for group in together for batch in group), sizes)


def read_tapped(folder: Path) -> Tapped | None:
    """Return what ``tap.json`` says; ``None``: this is not the folder of a tap."""
    return read_file(folder / ABOUT, Tapped)


def write_exchange(folder: Path, exchange: Exchange, arrays: Vector) -> None:
    """Write a message and its reply; ``arrays`` are those that no observation has."""
    path = folder / MESSAGES / f"{exchange.stem}.json"
    write_whole(path, as_json(exchange))
    if arrays:
        write_whole(
            path.with_suffix(".safetensors"), save({name: value.contiguous() for name, value in arrays.items()})
        )


def read_exchanges(folder: Path) -> tuple[Exchange, ...]:
    """Return what was heard, by round and client; a folder of an earlier version has none."""
    found = (read_file(path, Exchange) for path in sorted((folder / MESSAGES).glob("*.json")))
    return tuple(exchange for exchange in found if exchange is not None)


def read_arrays(path: Path) -> Vector:
    """Return the arrays of a file, by name; none where there is no file."""
    try:
        return load(path.read_bytes()) if path.is_file() else {}
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


def write_truth(path: Path, seen: Seen, after: Vector) -> None:
    """Write what a client trained on, each example once, and the order of batches, readable by its owner alone."""
    long = max((batch.examples.shape[1] for batch in seen.batches if batch.examples.ndim == 2), default=0)
    images = torch.cat([_padded(batch.examples, long) for batch in seen.batches])
    places: dict[bytes, int] = {}
    order = [places.setdefault(row.tobytes(), number) for number, row in enumerate(images.flatten(1).numpy())]
    first = list(places.values())
    number = {place: row for row, place in enumerate(first)}
    labels = torch.cat([_classes(batch) for batch in seen.batches])
    arrays = {"images": images[first].contiguous(), "labels": labels[first].contiguous()}
    arrays["order"] = torch.tensor([number[place] for place in order])
    arrays["lengths"] = torch.tensor([batch.examples.shape[1:2] or (0,) for batch in seen.batches]).flatten()
    arrays["sizes"] = torch.tensor([len(batch.examples) for batch in seen.batches])
    arrays["steps"] = torch.tensor(seen.step_sizes, dtype=torch.int64)
    for place, batch in enumerate(seen.batches):
        kept = {"target": batch.target, "state": batch.state}
        arrays |= {f"{key}/{place}": value.contiguous() for key, value in kept.items() if value is not None}
    arrays |= {f"after/{name}": value.contiguous().clone() for name, value in after.items()}
    write_whole(path, save(arrays), mode=0o600)


def _padded(examples: Tensor, length: int) -> Tensor:
    """Sequences of tokens as long as the longest; other examples as they are."""
    if examples.is_floating_point() or examples.ndim != 2:
        return examples
    return torch.nn.functional.pad(examples, (0, length - examples.shape[1]))


def _classes(batch: Batch) -> Tensor:
    """The class of each example, int64 (B,); -1 where it has none."""
    size, target = len(batch.examples), batch.target
    if target is None or target.numel() != size or not bool((target == target.round()).all()):
        return torch.full((size,), -1)
    return target.flatten().long()


def read_truth(path: Path) -> TrainedOn | None:
    """Return what a client trained on, its numbers in float32; ``None``: it was not kept."""
    if not path.is_file():
        return None
    arrays = {name: value.float() if value.is_floating_point() else value for name, value in read_arrays(path).items()}
    try:
        images, labels = arrays["images"], arrays["labels"]
        if "order" not in arrays:
            return TrainedOn(images, labels)
        shown = images[arrays["order"]].split(arrays["sizes"].tolist())
        lengths = arrays["lengths"].tolist()
        batches = [
            Batch(
                part[:, :long] if part.ndim == 2 and not part.is_floating_point() else part,
                arrays.get(f"target/{place}"),
                arrays.get(f"state/{place}"),
            )
            for place, (part, long) in enumerate(zip(shown, lengths, strict=True))
        ]
        after = {key.removeprefix("after/"): value for key, value in arrays.items() if key.startswith("after/")}
        return TrainedOn(images, labels, tuple(batches), tuple(arrays["steps"].tolist()), after)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise InputError(f"{path} is damaged: {reason_of(error)}") from None


def built(tapped: Tapped, shape: tuple[int, ...] | None, classes: int | None) -> nn.Module:
    """Return the network; its maker is told ``shape`` and ``classes`` if it takes them."""
    if tapped.model is None:
        raise InputError('the network is not known: tap.model = "package.module:Name" in fedpriv.toml names it')
    maker = imported(tapped, tapped.model, "tap.model")
    takes, known = inspect.signature(maker).parameters, {"shape": shape, "classes": classes}
    try:
        network = maker(**{key: value for key, value in known.items() if key in takes and value is not None})
    except Exception as error:
        hint = "tap.model in fedpriv.toml names a function that returns it"
        raise InputError(f"the network {tapped.model} cannot be made: {reason_of(error)}; {hint}") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"tap.model = {tapped.model!r} returns {type(network).__name__}, no torch.nn.Module")
    return uncompiled(network)


def imported(tapped: Tapped, path: str, key: str) -> Any:
    """Return what the import path that a setting has names, in the folder where this runs, or the app's or above."""
    return own_object(path, key, [Path.cwd(), Path(tapped.app), *Path(tapped.app).parents])
