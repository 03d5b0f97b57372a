"""The mod that records uploads of any Flower app as observations for ``fedpriv attack``."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedpriv.attacks.observation import Observation, PublicSettings, observation_stem, write_observation
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_once, write_whole, writing_to
from fedpriv.flower.app_settings import TapSettings, read_settings
from fedpriv.flower.arrays import arrays_of, client_of, is_training, moved, round_of, update_of
from fedpriv.flower.folder import ABOUT, LEDGER, TRUTH, Tapped, write_truth
from fedpriv.flower.watch import Seen, watching
from fedpriv.gradients import Vector
from fedpriv.mechanisms import mechanism_settings

_LOG = logging.getLogger("fedpriv")
_STATE = "fedpriv.tap"
_LIKE: Mapping[str, Literal["sgd", "adam"]] = {"sgd": "sgd", "adam": "adam", "adamw": "adam"}


def tap(near: str | Path) -> Mod:
    """Return a mod that writes down uploads, and passes every message and reply on as it is.

    For each of a client's first ``tap.rounds`` training messages it writes an observation, which holds what whoever
    reads the message and its reply has, and what is public: batch size, steps, learning rate, as the settings say or as
    PyTorch was seen to do. Where ``tap.keep_images`` is set, what the client trained on lies beside it, to score
    attacks.

    A reply that no observation can be made of is passed on all the same; the client's log says why.

    Args:
        near: as of :func:`~fedpriv.flower.privatise.privatise`.

    Raises:
        InputError: the settings are missing or wrong, or have no section [tap].
    """
    settings = read_settings(near)
    if settings.tap is None:
        raise InputError('fedpriv.toml has no section [tap]; it needs one key: model = "package.module:Name"')
    path = Path(near).absolute()
    return Tap(settings.tap, path.parent)


@dataclass(frozen=True)
class Tap:
    """A mod of these settings; the model is looked for in the app's folder, too, and in those above it."""

    settings: TapSettings
    app: Path

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Pass a message on, and write down what comes back."""
        if not (is_training(message) and self._counted(context)):
            return call_next(message, context)
        names = frozenset(message.content.array_records.get(self.settings.record, ()))
        with watching(names) as seen:
            reply = call_next(message, context)
        try:
            self._write(message, reply, context, seen)
        except (InputError, OSError, ValueError) as error:
            _LOG.error("fedpriv tap: client %d, nothing was written: %s", client_of(context), error)
        return reply

    def _counted(self, context: Context) -> bool:
        """Whether this is one of the client's first messages; Flower's context counts them."""
        records = context.state.config_records
        if _STATE not in records:
            records[_STATE] = ConfigRecord({"heard": 0})
        heard = int(str(records[_STATE]["heard"]))
        records[_STATE]["heard"] = heard + 1
        return heard < self.settings.rounds

    def _write(self, message: Message, reply: Message, context: Context, seen: Seen) -> None:
        if reply.has_error():
            raise InputError(f"the client failed: {reply.error.reason}")
        before, after = arrays_of(message, self.settings.record), arrays_of(reply, self.settings.record)
        number = round_of(message) or int(str(context.state.config_records[_STATE]["heard"]))
        runs = Path(os.environ.get("FEDPRIV_RUNS") or self.settings.folder)
        folder = (runs / f"tap-{context.run_id}").absolute()
        client = client_of(context)
        observation = self._observation(number, client, before, after, seen)
        with writing_to(folder):
            (folder / "observations").mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in (TRUTH, LEDGER):
                (folder / name).mkdir(exist_ok=True, mode=0o700)
        about = Tapped(self.settings.model, str(self.app), self.settings.loss)
        write_once(folder / ABOUT, json.dumps(asdict(about), indent=2).encode() + b"\n")
        stem = observation_stem(number, client, 1)
        if self.settings.keep_images and seen.is_whole and seen.images:
            write_truth(folder / TRUTH / f"{stem}.safetensors", seen)
        if seen.released is not None:
            line = json.dumps(asdict(seen.released.line), indent=2, allow_nan=False)
            write_whole(folder / LEDGER / f"{stem}.json", f"{line}\n".encode())
        path = write_observation(folder / "observations", observation)
        _LOG.warning("fedpriv tap: %s; attack it with: fedpriv attack %s", path.name, folder)

    def _observation(self, number: int, client: int, before: Vector, after: Vector, seen: Seen) -> Observation:
        names = seen.trained or moved(before, before)
        own = seen.released.config if seen.released is not None else mechanism_settings({})
        return Observation(
            round=number,
            client=client,
            parameters={name: before[name].float() for name in names},
            upload=update_of(before, after, names),
            settings=self._public(seen, own.model_dump(mode="json", exclude_none=True)),
        )

    def _public(self, seen: Seen, mechanism: dict[str, Any]) -> PublicSettings:
        """What is public, as the settings say, or as it was seen."""
        own, steps = self.settings, seen.steps
        shape = own.shape or _shape(seen)
        if seen.changed:
            _LOG.warning("fedpriv tap: the learning rate changes within a round; attacks take the first one for all")
        if _outside(seen, own):
            _LOG.warning("fedpriv tap: images leave [0, 1] before normalisation: tap.mean and tap.std say what that is")
        optimizer = own.optimizer or (steps and _LIKE.get(steps.kind))
        if steps is not None and optimizer is None:
            raise InputError(f"attacks have no model of the optimiser {steps.kind}; tap.optimizer names a similar one")
        batch_size = _known("batch_size", own.batch_size or (seen.batch_sizes[0] if seen.batch_sizes else None))
        return PublicSettings(
            model={"name": own.model},
            shape=shape,
            classes=_known("classes", own.classes or seen.classes or None),
            mean=_each(own.mean, shape[0]),
            std=_each(own.std, shape[0]),
            algorithm="fedavg",
            batch_size=batch_size,
            local_steps=_known("local_steps", own.local_steps or seen.step_count or None),
            learning_rate=_known("learning_rate", own.learning_rate or (steps and steps.learning_rate)),
            optimizer=_known("optimizer", optimizer),
            momentum=own.momentum if own.momentum is not None else steps.momentum if steps else 0.0,
            client_examples=max(batch_size, own.examples or seen.examples or batch_size),
            mechanism=mechanism,
        )


def _known(key: str, value: Any) -> Any:
    """Return what is known."""
    if value is None:
        raise InputError(f"PyTorch was not seen to train the network: set tap.{key} in fedpriv.toml")
    return value


def _shape(seen: Seen) -> tuple[int, int, int]:
    """(C, H, W) of the images that were seen."""
    sides = tuple(seen.images[0].shape[1:]) if seen.images else ()
    if len(sides) != 3:
        raise InputError("the network was not seen to take images (B, C, H, W): set tap.shape in fedpriv.toml")
    return (sides[0], sides[1], sides[2])


def _each(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values * channels if len(values) == 1 else values


def _outside(seen: Seen, own: TapSettings) -> bool:
    """Whether what the network was shown is no picture on [0, 1] after the normalisation that the settings name."""
    mean, std = np.array(own.mean), np.array(own.std)
    low, high = (-mean / std).min() - 1e-4, ((1 - mean) / std).max() + 1e-4
    return any(float(batch.min()) < low or float(batch.max()) > high for batch in seen.images)
