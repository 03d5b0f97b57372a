"""The mod that records uploads of any Flower app for ``fedpriv attack``."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from safetensors.torch import save
from torch import Tensor, nn

from fedpriv.attacks.observation import Observation, PublicSettings, TextFormat, observation_stem, write_observation
from fedpriv.core.errors import InputError
from fedpriv.core.files import as_json, write_once, write_whole, writing_to
from fedpriv.core.npz import parse_header
from fedpriv.flower.app_settings import TapSettings, found_settings, read_settings
from fedpriv.flower.arrays import (
    REPLIES,
    Form,
    arrays_of,
    client_of,
    is_training,
    moved,
    nearest_form,
    record_of,
    rescaled,
    round_of,
    stage_of,
    type_of,
    update_of,
    watched_form,
)
from fedpriv.flower.folder import (
    ABOUT,
    BASE,
    COMPARED,
    LEDGER,
    MADE,
    MESSAGES,
    TRUTH,
    Exchange,
    Tapped,
    write_exchange,
    write_truth,
)
from fedpriv.flower.noise import Noises, hearing_noise, is_changed, noising_outside, others_noise
from fedpriv.flower.watch import OWN_LOSS, ReleasedUpdate, Seen, seen_here, waiting, watching
from fedpriv.gradients import Vector
from fedpriv.mechanisms import mechanism_settings

_LOG = logging.getLogger("fedpriv")
_STATE = "fedpriv.tap"
_LIKE: Mapping[str, Literal["sgd", "adam"]] = {"sgd": "sgd", "adam": "adam", "adamw": "adam"}


def tap(near: str | Path) -> Mod:
    """Return a mod that writes down messages and replies, and passes every one on as it is.

    For each client's first ``tap.rounds`` messages of each type it writes the whole content of the message and its
    reply: arrays, metrics, configs, bytes. If a gradient attack fits the reply, it also writes an observation with the
    public settings: batch size, steps, learning rate, from the settings file or as observed in PyTorch. With
    ``tap.keep_images`` it also writes the client's training examples, to score attacks.

    A reply that cannot be written is still passed on; the client's log says why.

    Args:
        near: as for :func:`~fedpriv.flower.privatise`; without a fedpriv.toml all settings have their defaults.

    Raises:
        InputError: the settings are wrong.
    """
    own = None if found_settings(near) is None else read_settings(near).tap
    return Tap(own or TapSettings(), Path(near).absolute().parent)


@dataclass(frozen=True, eq=False)
class _Watched:
    """A message, and what is watched while the app answers it."""

    about: Exchange  # what is known before the answer
    sent: Vector  # its arrays
    seen: Seen  # the training
    noises: Noises  # of other libraries
    answers: int  # to messages of this type, this one included
    run: int  # the run's number


@dataclass(frozen=True)
class Tap:
    """A mod of these settings; the model is looked for in the app's folder, too, and in those above it."""

    settings: TapSettings
    app: Path

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Pass a message on, and write down what comes back, or what a mechanism around this makes of it."""
        if (around := seen_here()) is not None and around.for_tap:
            _LOG.error("fedpriv tap: it is given twice, and one of them writes nothing")
            return call_next(message, context)
        heard, answers = _heard(message, context)
        if heard > self.settings.rounds:
            return call_next(message, context)
        about, sent = self._message(message, context, heard)
        later, shapes = waiting(), {name: tuple(value.shape) for name, value in sent.items()}
        with watching(shapes) as seen, hearing_noise(message, sent) as noises:
            write = partial(self._told, _Watched(about, sent, seen, noises, answers, context.run_id))
            if later is not None:
                later.append(write)
            reply = call_next(message, context)
        if later is None:
            write(reply, seen.released)
        return reply

    def _message(self, message: Message, context: Context, heard: int) -> tuple[Exchange, Vector]:
        """What is known before the app answers: the message's records and arrays, before a mod takes them out."""
        about = Exchange(
            round=round_of(message) or heard,
            client=client_of(context),
            node=context.node_id,
            type=type_of(message),
            sent=described(message.content),
            replied={},
            summed=stage_of(message.content) == "",
        )
        if noising_outside():
            why = "LocalDpMod comes before the tap and noises what leaves after the tap has seen it: put the tap first"
            return replace(about, unattacked=why), {}
        if not is_training(message):
            about = replace(about, unattacked=f"a message to {about.type} trains nothing")
        try:
            record = record_of(message.content, self.settings.record)
            return replace(about, record=record), arrays_of(message.content, record)
        except (InputError, ValueError) as error:
            return replace(about, unattacked=about.unattacked or str(error)), {}

    def _told(self, watched: _Watched, reply: Message, released: ReleasedUpdate | None) -> None:
        """Write down a reply; what goes wrong is told, and changes nothing for the app."""
        try:
            watched.seen.released = released or self._others(watched, reply)
            self._write(watched, reply)
        except (InputError, OSError, ValueError) as error:
            _LOG.error("fedpriv tap: client %d, nothing was written: %s", watched.about.client, error)

    def _others(self, watched: _Watched, reply: Message) -> ReleasedUpdate | None:
        """The noise of other libraries in a reply to train; a mechanism of ours is claimed alone."""
        about, sent, seen = watched.about, watched.sent, watched.seen
        moving = {name: sent[name] for name in seen.trained or moved(sent)}
        if not moving or not about.type.startswith("train"):
            return None
        steps = max(self.settings.local_steps or 0, seen.step_count)
        return others_noise(watched.noises, self.settings.noise, about.client, watched.answers, moving, steps, reply)

    def _write(self, watched: _Watched, reply: Message) -> None:
        if reply.has_error():
            raise InputError(f"the client failed: {reply.error.reason}")
        runs = Path(os.environ.get("FEDPRIV_RUNS") or self.settings.folder)
        folder = (runs / f"tap-{watched.run}").absolute()
        seen = watched.seen
        exchange, observation, arrays = self._exchange(watched.about, watched.sent, seen, reply)
        with writing_to(folder):
            for name in ("observations", MESSAGES, TRUTH, LEDGER):
                (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        tapped = Tapped(self.settings.model, str(self.app), self.settings.loss, self.settings.records)
        write_once(folder / ABOUT, as_json(tapped))
        write_exchange(folder, exchange, arrays)
        if observation is not None:
            self._observe(folder, exchange, observation, seen)
        said = f"no gradient attack fits: {exchange.unattacked}; " if observation is None else ""
        _LOG.warning("fedpriv tap: %s; %sattack it with: fedpriv attack %s", exchange.stem, said, folder)

    def _observe(self, folder: Path, exchange: Exchange, observation: Observation, seen: Seen) -> None:
        """Write what a gradient attack is given, and, apart, what scores it."""
        stem = observation_stem(observation.round, observation.client, 1)
        if self.settings.keep_images and seen.is_whole and seen.batches:
            own = {} if exchange.source.startswith(COMPARED) else seen.after()
            write_truth(folder / TRUTH / f"{stem}.safetensors", seen, own)
        if seen.released is not None:
            write_whole(folder / LEDGER / f"{stem}.json", as_json(seen.released.line))
        if not (folder / BASE).exists() and (base := seen.base):
            write_once(folder / BASE, save({name: value.clone() for name, value in base.items()}))
        write_observation(folder / "observations", observation)

    def _exchange(
        self, about: Exchange, sent: Vector, seen: Seen, reply: Message
    ) -> tuple[Exchange, Observation | None, Vector]:
        """What is written of a message: what it says, an observation if an attack fits, and all other arrays."""
        exchange = replace(about, replied=described(reply.content))
        records = {name: _arrays(record) for name, record in reply.content.array_records.items()}
        try:
            if about.unattacked:
                raise InputError(about.unattacked)
            record = record_of(reply.content, _reply_record(self.settings, reply.content, about.record))
            after, form = rescaled(arrays_of(reply.content, record), seen.candidates(sent))
            seen.names = {name: there for name, there in seen.names.items() if name in after} or seen.names
            exchange = self._formed(replace(exchange, record=record, order=tuple(after), form=form), sent, after, seen)
            observation = self._observation(exchange, sent, after, seen)
        except (InputError, ValueError) as error:
            observation, exchange = None, replace(exchange, unattacked=_reason(error, about, reply.content))
        names = observation.parameters if observation is not None else {}
        left = {f"sent/{about.record}/{name}": value for name, value in sent.items() if name not in names}
        for name, arrays in records.items():
            known = names if name == exchange.record else {}
            left |= {f"reply/{name}/{key}": value for key, value in arrays.items() if key not in known}
        return exchange, observation, left | _bytes(reply.content)

    def _formed(self, exchange: Exchange, before: Vector, after: Vector, seen: Seen) -> Exchange:
        """Tell the form of a reply, and what was seen."""
        names = seen.trained or moved(before)
        if not names:
            kinds = ", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in before.values()}))
            raise InputError(f"no array of the message is trained by gradients ({kinds or 'there is none'})")
        held = seen.candidates(before)
        found: dict[str, Form | None] = {
            "tap.reply says so": self.settings.reply,
            MADE: seen.released.form if seen.released is not None else None,
            "whole numbers, in the scale of the network that was watched": exchange.form,
            COMPARED: watched_form(after, held),
            "by its distance from the parameters that were sent": nearest_form(before, after, names),
        }
        source, form = next((how, form) for how, form in found.items() if form is not None)
        noise = seen.released.by if seen.released is not None else ""
        changed = not noise and is_changed(after, held, form)
        watched = replace(exchange, optimizers=tuple(seen.optimizers), rates=seen.rates, noise=noise, changed=changed)
        watched = replace(watched, form=form, source=source, **_learned(seen))
        return replace(watched, remarks=self._remarks(watched, seen))

    def _remarks(self, exchange: Exchange, seen: Seen) -> tuple[str, ...]:
        """What makes attacks mean less than they seem to."""
        rates = {rate.learning_rate for rate in seen.rates.values()}
        found = {
            "the learning rate changes within a round; attacks take the first one for all": seen.changed,
            "images leave [0, 1] before normalisation: tap.mean and tap.std say what that is": (
                exchange.kind == "image" and _outside(seen, self.settings)
            ),
            "gradients were clipped, by a factor that is not known: attacks that compare directions (iga) are not "
            "touched by that, those that compare lengths are": seen.clipped,
            f"parameter groups have learning rates of their own ({', '.join(f'{rate:g}' for rate in sorted(rates))})": (
                len(rates) > 1
            ),
            f"several optimisers ({', '.join(seen.optimizers)}) were seen; attacks have a model of one": (
                len(seen.optimizers) > 1
            ),
            "weight decay was seen; it is taken off the update but of Adam, in whose rates it is": any(
                rate.weight_decay for rate in seen.rates.values()
            ),
        }
        return tuple(text for text, holds in found.items() if holds)

    def _observation(self, exchange: Exchange, before: Vector, after: Vector, seen: Seen) -> Observation:
        names = seen.trained or moved(before)
        own = seen.released.config if seen.released is not None else mechanism_settings({})
        form = exchange.form or "weights"
        public = self._public(exchange, seen, own.model_dump(mode="json", exclude_none=True))
        if form == "gradient":
            public = replace(public, algorithm="fedsgd", local_steps=1, learning_rate=1.0)
        return Observation(
            round=exchange.round,
            client=exchange.client,
            parameters={name: before[name].float() for name in names},
            upload=update_of(before, after, names, form),
            settings=public,
        )

    def _public(self, exchange: Exchange, seen: Seen, mechanism: dict[str, Any]) -> PublicSettings:
        """What is public, as the settings say, or as it was seen."""
        own = self.settings
        rates = max(seen.rates.values(), key=lambda each: each.learning_rate, default=None)
        shape, text = own.shape or _shape(exchange, seen), None
        if exchange.is_text:
            text = TextFormat(exchange.vocabulary, "next" if exchange.task == "next" else "classify", packed=True)
        classes = exchange.vocabulary if exchange.task == "next" else 2 if exchange.task in OWN_LOSS else seen.classes
        kind = next(iter(seen.optimizers), None)
        optimizer = own.optimizer or (kind and _LIKE.get(kind))
        if kind is not None and optimizer is None:
            raise InputError(f"attacks have no model of the optimiser {kind}; tap.optimizer names a similar one")
        sizes = seen.step_sizes or seen.batch_sizes
        batch_size = _known("batch_size", own.batch_size or (sizes[0] if sizes else None))
        return PublicSettings(
            model={"name": own.model or "app:unknown"},
            shape=shape,
            classes=_known("classes", own.classes or classes or None),
            mean=_each(own.mean, shape[0]),
            std=_each(own.std, shape[0]),
            algorithm="fedavg",
            batch_size=batch_size,
            local_steps=_known("local_steps", own.local_steps or seen.step_count or None),
            learning_rate=_known("learning_rate", own.learning_rate or (rates and rates.learning_rate)),
            optimizer=_known("optimizer", optimizer),
            momentum=own.momentum if own.momentum is not None else rates.momentum if rates else 0.0,
            client_examples=max(batch_size, own.examples or seen.examples or batch_size),
            mechanism=mechanism,
            text=text,
        )


def _heard(message: Message, context: Context) -> tuple[int, int]:
    """The how manieth message of its type this is for the client, and of all to train at most.

    Flower's context counts them; a SuperNode that was started again has a new one, but the rounds go on.
    """
    records, kind = context.state.config_records, type_of(message)
    if stage_of(message.content):
        kind = f"{kind}, {stage_of(message.content)}"
    if _STATE not in records:
        records[_STATE] = ConfigRecord({})
    heard = int(str(records[_STATE].get(kind, 0))) + 1
    records[_STATE][kind] = heard
    counts = records[_STATE].items()
    trained = sum(int(str(count)) for name, count in counts if name == kind or name.split(".")[0] == "train")
    return heard, max(trained, round_of(message) or 0)


def _reply_record(own: TapSettings, content: RecordDict, sent: str) -> str | None:
    names = (own.reply_record, own.record, REPLIES.get(sent), sent)
    return next((name for name in names if name in content.array_records), None)


def described(content: RecordDict) -> dict[str, dict[str, Any]]:
    """Records by name, with their keys and values; of arrays type and shape, of bytes the length."""
    told: dict[str, dict[str, Any]] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            told[name] = {key: _kind(array) for key, array in record.items()}
        else:
            told[name] = {key: _plain(value) for key, value in record.items()}
    return told


def _kind(array: Array) -> str:
    """Type and shape, which older clients give in the bytes only; trees and other bytes have a length."""
    try:
        header = array if array.dtype else parse_header(array.data)
    except ValueError:
        return f"{len(array.data)} bytes"
    return f"{header.dtype} {tuple(header.shape)}"


def _plain(value: Any) -> Any:
    """A value of a metric or a config as JSON has it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _arrays(record: ArrayRecord) -> Vector:
    """The arrays of a record; what is no array of numbers is kept as the bytes that it came in."""
    try:
        return arrays_of(RecordDict({"record": record}), "record")
    except ValueError:
        return {name: _as_bytes(array.data) for name, array in record.items()}


def _bytes(content: RecordDict) -> dict[str, Tensor]:
    """The bytes in configs, as arrays."""
    records = content.config_records.items()
    found = ((f"bytes/{name}/{key}", value) for name, record in records for key, value in record.items())
    return {name: _as_bytes(value) for name, value in found if isinstance(value, bytes)}


def _as_bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _reason(error: Exception, about: Exchange, content: RecordDict) -> str:
    """Why no gradient attack fits."""
    if stage_of(content) is not None and not about.summed:
        return "this is a stage of secure aggregation; a tap that comes after secaggplus_mod sees what is summed"
    return str(error)


def _known(key: str, value: Any) -> Any:
    """Return what is known."""
    if value is None:
        raise InputError(f"PyTorch was not seen to train a network with these arrays; tap.{key} is not set either")
    return value


def _learned(seen: Seen) -> dict[str, Any]:
    """What the network was seen to learn, and of what, as fields of an exchange."""
    if seen.inputs is None:
        return {}
    (kind, sides), task = seen.inputs, seen.task
    first = seen.batches[0] if seen.batches else None
    target = first.target.shape[1:] if first is not None and first.target is not None else ()
    tables = [layer for module in seen.parts.values() for layer in module.modules() if isinstance(layer, nn.Embedding)]
    tokens = len(sides) == 2 and "int" in kind and tables
    return {
        "names": {name: seen.names[name] for name in seen.trained},
        "network": seen.network,
        "parts": tuple(part for part in seen.parts if part),
        "task": task,
        "loss": seen.loss,
        "classes": seen.classes,
        "local": seen.local,
        "example": sides[1:],
        "target": tuple(target) if task in OWN_LOSS else (),
        "vocabulary": _vocabulary(seen, [layer.num_embeddings for layer in tables]) if tokens else 0,
        "bounds": None if tokens or (len(sides) == 4 and task != "values") else _bounds(seen),
    }


def _vocabulary(seen: Seen, sizes: Sequence[int]) -> int:
    """Rows of the first table that has one for each token; one of positions may have more."""
    largest = max((int(batch.examples.max()) for batch in seen.batches), default=0)
    return next((size for size in sizes if size > largest), max(sizes))


def _bounds(seen: Seen) -> tuple[float, float]:
    """A range that is wide enough for all numbers, as scaled or standardised rows have it."""
    told = [batch.examples for batch in seen.batches]
    if seen.task == "values":
        told += [batch.target for batch in seen.batches if batch.target is not None]
    low, high = min(float(value.min()) for value in told), max(float(value.max()) for value in told)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    most = max(-low, high)
    wide = next((size for size in (1.0, 10.0, 1e3, 1e6) if most <= size), 2 * most)
    return -wide, wide


def _shape(exchange: Exchange, seen: Seen) -> tuple[int, int, int]:
    """(C, H, W) of the images that were seen; of rows, and of what goes with them, all numbers in one line."""
    if seen.inputs is None and seen.parts:
        raise InputError(
            "the network is given no dense tensor of examples, but such as a dict, of which attacks have no model"
        )
    if seen.inputs is None:
        raise InputError("PyTorch was not seen to train a network with these arrays")
    kind, sides = seen.inputs
    given = f"{kind} ({', '.join(('B', *map(str, sides[1:])))})"
    if seen.task is None and seen.loss and seen.batches and seen.batches[0].target is not None:
        target = ", ".join(map(str, seen.batches[0].target.shape[1:]))
        raise InputError(
            f"the network is given {given}, and {seen.loss} compares its output with a target of ({target}) for each "
            "example, of which attacks have no model"
        )
    if seen.task is None:
        raise InputError(
            f"the network is given {given}, and no loss of torch.nn.functional was seen that compares its output with "
            "a class, numbers or the example: an own loss of other parts has no model here"
        )
    if exchange.is_text:
        return (1, 1, max(batch.examples.shape[1] for batch in seen.batches))
    if "float" not in kind or seen.task == "next":
        raise InputError(f"the network is given {given}, and gradient attacks are for images, rows and tokens")
    if exchange.kind == "image":
        return (sides[1], sides[2], sides[3])
    return (1, 1, math.prod(sides[1:]) + (math.prod(exchange.target) if seen.task == "values" else 0))


def _each(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values * channels if len(values) == 1 else values


def _outside(seen: Seen, own: TapSettings) -> bool:
    """Whether what the network was shown is no picture on [0, 1] after the normalisation that the settings name."""
    mean, std = np.array(own.mean), np.array(own.std)
    low, high = (-mean / std).min() - 1e-4, ((1 - mean) / std).max() + 1e-4
    shown = [batch.examples for batch in seen.batches]
    return any(float(batch.min()) < low or float(batch.max()) > high for batch in shown if len(batch))
