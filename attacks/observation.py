"""Observations: a client's upload in one round, or the sum of several, as the tap writes and the adversary reads it.

An observation is two files, ``<round>-<client>.safetensors`` (for a sum ``<round>-sum.safetensors``) with the tensors
and one of the same name ending in ``.json`` with the rest. Neither can hold code, and a file that is truncated or
altered is refused with one line.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedpriv.core.columns import ColumnSpec, features_of
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.core.registry import ALGORITHMS
from fedpriv.core.settings import wrong_value
from fedpriv.gradients import Vector
from fedpriv.mechanisms import recorded_mechanism
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.models import recorded_model

# Candidate records: a list for each image of an upload, one of which is that image.
#
# The question of re-identification, and of an adversary who already holds the record and asks whose it is.

OTHERS = 99
"""Images among which, with the original, a reconstruction is to pick: chance is 1 in 100."""


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """Lists of records, one for each image of an upload, from which an adversary picks the image."""

    images: Tensor  # (M, C, H, W) on the [0, 1] scale, no two of them the same
    labels: Tensor  # int64 (M,), the records' labels
    lists: Tensor  # int64 (B, N), for each image of the upload the numbers of N >= 2 records; their order says nothing

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1]:
            raise InputError(
                f"candidates: images {tuple(self.images.shape)} and labels {tuple(self.labels.shape)}; allowed are "
                "(M, C, H, W) and (M,)"
            )
        if self.lists.ndim != 2 or self.lists.shape[1] < 2:
            raise InputError(f"candidates: lists {tuple(self.lists.shape)}; allowed is (B, N) with N of 2 or more")
        if int(self.lists.min()) < 0 or int(self.lists.max()) >= len(self.images):
            raise InputError(f"candidates: a list names a record that is not from 0 to {len(self.images) - 1}")
        _refuse_copies(self.images)
        if any(len(row.unique()) < len(row) for row in self.lists):
            raise InputError("candidates: a list names a record twice; each is allowed once")

    def alike(self, number: int, label: Tensor, labels_known: bool) -> Tensor:
        """Return the records of one list that may be the image: those with its label, where that is known."""
        listed = self.lists[number]
        return listed[self.labels[listed] == label] if labels_known else listed

    @staticmethod
    def of_all(images: Tensor, labels: Tensor, examples: int) -> "CandidateLists":
        """Return one list of all records for each of so many images of an upload."""
        return CandidateLists(images, labels, torch.arange(len(images)).expand(examples, len(images)))


def _refuse_copies(images: Tensor) -> None:
    _, number, counts = images.flatten(1).unique(dim=0, return_inverse=True, return_counts=True)
    twice = (counts[number] > 1).nonzero().flatten().tolist()
    if twice:
        other = next(place for place in twice[1:] if number[place] == number[twice[0]])
        raise InputError(f"candidates: records {twice[0]} and {other} are the same; each is allowed once")


Count = Annotated[int, Field(ge=1, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class TextFormat:
    """What is public of texts."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    vocabulary: Count  # tokens that there are
    task: Literal["classify", "next"]  # classify: the label of a sequence; next: each token from those before it
    packed: bool = False  # whether sequences are cut from running text; else each begins a text
    mark: tuple[int, ...] = ()  # next: tokens behind which the loss counts; empty: everywhere
    # next: tokens behind which it counts no more, up to the next mark; empty: it counts on
    until: tuple[int, ...] = ()


@dataclass(frozen=True)
class PublicSettings:
    """What the threat model lets the adversary know: no seed, no indices."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: dict[str, Any]  # its settings, dumped
    shape: tuple[Count, Count, Count]  # (C, H, W) of one image
    classes: Annotated[int, Field(ge=2)]  # number of classes
    mean: tuple[Finite, ...]  # public mean of each channel, on the [0, 1] scale
    std: tuple[Positive, ...]  # public standard deviation of each channel, on the [0, 1] scale
    algorithm: str  # fedsgd (the upload is a mean gradient) or fedavg (parameters after minus before)
    batch_size: Count | None  # public batch size (the expected one, for Poisson sampling); None: withheld
    local_steps: Count  # optimiser steps between the parameters and the upload; 1 for fedsgd
    learning_rate: Positive  # of the local optimiser, for fedavg
    optimizer: Literal["sgd", "adam"]  # the local optimiser, for fedavg
    momentum: Annotated[float, Field(ge=0, lt=1)]  # of the local SGD, for fedavg
    client_examples: Count  # the number of the client's examples
    mechanism: dict[str, Any]  # its settings with the noise itself, dumped; none where it is withheld
    clients: Count = 1  # whose uploads are averaged; their steps and examples are then means
    columns: tuple[ColumnSpec, ...] = ()  # of the table whose rows the examples are; empty: these are images
    draws: Annotated[int, Field(ge=0, strict=True)] = 0  # in each release at least, with balls in bins
    text: TextFormat | None = None  # of texts, whose shape is (1, 1, T); None: these are images or rows

    def __post_init__(self) -> None:
        if self.columns and (1, 1, features_of(self.columns)) != self.shape:
            raise ValueError(f"columns have {features_of(self.columns)} features, rows the shape {self.shape}")
        channels = self.shape[0]
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(f"mean and std need one number for each of the {channels} channels")
        if self.algorithm == "fedsgd" and self.local_steps != 1:
            raise InputError(
                key="local_steps", given=self.local_steps, allowed="a fedsgd upload is one step's gradient"
            )

    @property
    def examples(self) -> int:
        """Distinct examples in the observation: of each client a batch, or all batches of the local steps."""
        if self.batch_size is None:
            raise InputError("the batch size is withheld, so the number of examples behind an upload is not known")
        return self.clients * min(self.batch_size * self.local_steps, max(self.client_examples, self.batch_size))


@dataclass(frozen=True)
class Observation:
    """One upload, or one sum of uploads, as the adversary has it."""

    round: int  # the round, from 1
    client: int  # the client, from 0; 0 for a sum
    parameters: Vector  # the parameters that the client started the round from
    upload: Vector  # as sent, noise included: mean gradient, or after minus before; of a sum the mean upload
    settings: PublicSettings  # what is public
    redistribution: Redistribution | None = None  # the public shares r of the noise, for the mechanism hgm
    labels: tuple[int, ...] | None = None  # the labels behind it, ascending, where the threat model grants them
    candidates: CandidateLists | None = None  # a list for each image, where granted; stored apart

    def __post_init__(self) -> None:
        if self.labels is not None and not all(0 <= label < self.settings.classes for label in self.labels):
            raise ValueError(f"labels {list(self.labels)} are not all from 0 to {self.settings.classes - 1}")
        if not self.parameters:
            raise ValueError("an observation needs at least one parameter")
        self._check_like_parameters("upload", self.upload)
        if self.redistribution is not None:
            self._check_like_parameters("redistribution", self.redistribution.shares)
        elif recorded_mechanism(self.settings.mechanism).needs_redistribution:
            raise ValueError(f"an upload through {self.settings.mechanism['name']} needs the redistribution")

    def _check_like_parameters(self, what: str, given: Vector) -> None:
        wanted = {name: tuple(value.shape) for name, value in self.parameters.items()}
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        if wanted != shapes:
            wrong = sorted(set(wanted.items()) ^ set(shapes.items()))[0][0]
            raise ValueError(f"{what} and parameters differ in the name or shape of {wrong!r}")

    @property
    def stem(self) -> str:
        """The name of its files, without ending."""
        return observation_stem(self.round, self.client, self.settings.clients)

    @property
    def title(self) -> str:
        """What it is, for a person."""
        return observation_title(self.round, self.client, self.settings.clients)


def observation_stem(round_number: int, client: int, clients: int) -> str:
    """The name, without ending, of the files about one upload, or about the sum of so many clients' uploads."""
    return f"{round_number:04d}-{client:04d}" if clients == 1 else f"{round_number:04d}-sum"


def observation_title(round_number: int, client: int, clients: int) -> str:
    """The same for a person."""
    return (
        f"round {round_number}, client {client}" if clients == 1 else f"round {round_number}, sum of {clients} clients"
    )


@dataclass(frozen=True)
class _About:
    """The JSON file of an observation."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    round: Annotated[int, Field(ge=0)]
    client: Annotated[int, Field(ge=0)]
    settings: dict[str, Any]
    labels: tuple[int, ...] | None = None
    order: tuple[str, ...] = ()  # of the parameters


_SETTINGS, _ABOUT = TypeAdapter(PublicSettings), TypeAdapter(_About)


def write_observation(folder: Path, observation: Observation) -> Path:
    """Write the two files of an observation, the tensors last, durably, and return the tensors' path."""
    about = {"round": observation.round, "client": observation.client, "order": [*observation.parameters]}
    about["settings"] = _plain(observation.settings)
    if observation.labels is not None:
        about["labels"] = observation.labels
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    tensors = {f"parameters/{name}": value for name, value in observation.parameters.items()}
    tensors |= {f"upload/{name}": value for name, value in observation.upload.items()}
    if observation.redistribution is not None:
        tensors |= {f"redistribution/{name}": value for name, value in observation.redistribution.shares.items()}
    copies = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    path = folder / f"{observation.stem}.safetensors"
    write_whole(path.with_suffix(".json"), text.encode(), durable=True)
    write_whole(path, save(copies), durable=True)
    return path


def _plain(settings: PublicSettings) -> dict[str, Any]:
    """As they are written; what is empty for most uploads is left out."""
    tree = asdict(settings)
    if settings.text is not None and not settings.text.until:
        del tree["text"]["until"]
    return {key: value for key, value in tree.items() if key not in ("columns", "draws", "text") or value}


def in_order(names: Iterable[str]) -> list[str]:
    """Names in the order that a list of arrays had, where they are its numbers; safetensors keeps none."""
    listed = [*names]
    numbered = set(listed) == {str(number) for number in range(len(listed))}
    return sorted(listed, key=int) if numbered else listed


def list_observations(folder: Path) -> tuple[Path, ...]:
    """Return the tensor files of a folder of observations, by round, then client."""
    return tuple(sorted(folder.glob("[0-9]*-*.safetensors")))


def read_observation(path: Path) -> Observation:
    """Read an observation."""
    about = _read_about(path.with_suffix(".json"))
    settings = _checked(about.settings, path.with_suffix(".json"))
    parts: dict[str, Vector] = {"parameters": {}, "upload": {}, "redistribution": {}}
    for key, value in _read_tensors(path).items():
        kind, _, name = key.partition("/")
        if kind not in parts:
            raise InputError(f"{path} is damaged: {key!r} is not one of {', '.join(parts)}")
        parts[kind][name] = value
    order = about.order or in_order(parts["parameters"])
    places = {name: place for place, name in enumerate(order)}
    for kind, vector in parts.items():
        parts[kind] = dict(sorted(vector.items(), key=lambda each: places.get(each[0], 0)))
    try:
        shares = Redistribution(parts["redistribution"]) if parts["redistribution"] else None
        observation = Observation(
            about.round, about.client, parts["parameters"], parts["upload"], settings, shares, about.labels
        )
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if set(order) != set(observation.parameters):
        raise InputError(f"{path} is damaged: its order names other arrays than it holds")
    return observation


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _read_about(path: Path) -> _About:
    try:
        return _ABOUT.validate_json(_content(path))
    except ValidationError as error:
        detail = error.errors()[0]
        if not detail["loc"]:
            raise InputError(f"{path} is damaged: {detail['msg']}") from None
        raise wrong_value(detail).replaced(where=f"{path} is damaged") from None


def _checked(settings: dict[str, Any], path: Path) -> PublicSettings:
    try:
        public = _SETTINGS.validate_python(settings)
        recorded_model(public.model)
        config = recorded_mechanism(public.mechanism)
    except ValidationError as error:
        raise wrong_value(error.errors()[0]).replaced(where=f"{path} is damaged") from None
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if config.parameter and config.noise is None:
        raise InputError(f"{path} is damaged: mechanism {config.name} without the noise itself")
    known = [name for name, algorithm in ALGORITHMS.items() if algorithm.trains_in_steps]
    if public.algorithm not in known:
        words = f"allowed: {', '.join(known)}"
        raise InputError(where=f"{path} is damaged", key="algorithm", given=public.algorithm, allowed=words)
    return public


def _read_tensors(path: Path) -> Vector:
    content = _content(path)
    try:
        tensors: Vector = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    for key, value in tensors.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise InputError(f"{path} is damaged: {key!r} has the type {value.dtype}; expected float32 or float64")
    return tensors
