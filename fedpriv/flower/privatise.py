"""The mod that applies a mechanism to what a ClientApp returns, and counts it in a ledger."""

import logging
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedpriv.accounting import calibrate
from fedpriv.clients.model_errors import unless_raised
from fedpriv.core.errors import InputError
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import Secret
from fedpriv.core.records import LedgerLine
from fedpriv.core.wire import pack
from fedpriv.data.sampling import Sampling
from fedpriv.flower.app_settings import FlowerSettings, read_settings
from fedpriv.flower.arrays import arrays_of, as_sent, client_of, is_training, moved, round_of, update_of
from fedpriv.flower.ledger import AnswerLedger
from fedpriv.flower.watch import ReleasedUpdate, note_release
from fedpriv.gradients import Vector

_LOG = logging.getLogger("fedpriv")
WEIGHT = "num-examples"
"""By what Flower's strategies weight replies."""


def privatise(near: str | Path) -> Mod:
    """Return a mod that clips and noises the update in each reply to a training message, and keeps a ledger.

    What leaves the client is the parameters that it was sent plus one release of the mechanism: all floating-point
    arrays but running statistics, as one vector. Running statistics and whole numbers leave as they came; metrics stay
    at the client but those that ``privatise.send`` names, and num-examples is 1, so that all clients weigh alike.
    Messages other than those to train pass through untouched, and what an evaluation replies is covered by nothing.

    An app that raises, whatever it is, or returns something that does not fit or is not finite, has an update of zero:
    whether it does may depend on its data. The client's own log says so. Only signals (Ctrl-C) still end the process.

    Args:
        near: a file of settings (.toml); or the ``__file__`` of the app's module, in whose folder, or one above it,
            fedpriv.toml is.

    Raises:
        InputError: the settings are missing or wrong, name no mechanism, or one whose noise no client adds.
    """
    settings = read_settings(near)
    if not settings.mechanism.protects:
        raise InputError("privatise needs a mechanism: fedpriv.toml has no [mechanism], or its name is 'none'")
    return Privatiser(settings)


@dataclass(frozen=True)
class Privatiser:
    """A mod of these settings."""

    settings: FlowerSettings

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a training message with a release; pass on others."""
        if not is_training(message):
            return call_next(message, context)
        before = arrays_of(message, self.settings.privatise.record)
        names = moved(before, before)
        ledger = self._ledger(client_of(context), tuple(before[name].numel() for name in names))
        line = ledger.charge(context.run_id, round_of(message))
        answered = unless_raised(
            lambda: self._answered(message, context, call_next, before, names), level=logging.ERROR
        )
        if answered is None:
            _LOG.error("client %d: the app failed; its update counts as zero", line.client)
        update, metrics = answered or (
            {name: torch.zeros(before[name].shape) for name in names},
            MetricRecord({WEIGHT: 1}),
        )
        release = ledger.plan.release_update(update, self._noise(line).stream("noise"))
        note_release(ReleasedUpdate(ledger.plan.config, line))
        state = {name: as_sent(before[name].double() + value, before[name]) for name, value in release.items()}
        content = RecordDict({self.settings.privatise.record: pack({**before, **state}), "metrics": metrics})
        return Message(content, reply_to=message)

    def _answered(
        self, message: Message, context: Context, call_next: ClientAppCallable, before: Vector, names: tuple[str, ...]
    ) -> tuple[Vector, MetricRecord]:
        """The update and the metrics that the app answers; all that looks at its answer is in here, and may raise."""
        reply = call_next(message, context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        after = arrays_of(reply, self.settings.privatise.record)
        return update_of(before, after, names), self._metrics(reply)

    def _ledger(self, client: int, tensors: tuple[int, ...]) -> AnswerLedger:
        own = self.settings.privatise
        if own.folder is None:
            raise InputError("privatise.folder is not set")
        plan = _plan(self.settings, client, tensors)
        return AnswerLedger(own.folder, plan, own.rounds, own.target_epsilon, self._notes)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        own = self.settings.privatise
        notes = ["counted are the answers to training messages; replies to evaluations are covered by nothing"]
        if own.send:
            notes.append(f"not covered, since they leave as they are: {', '.join(own.send)}")
        if own.seed is not None:
            notes.append("the noise follows from privatise.seed: whoever knows that can subtract it")
        return tuple(notes)

    def _noise(self, line: LedgerLine) -> Secret:
        """What the noise of one answer is keyed by, and of no other."""
        seed = self.settings.privatise.seed
        secret = Secret.drawn() if seed is None else Secret.of_seed(seed)
        return secret.derived("flower answer", line.client, line.participations)

    def _metrics(self, reply: Message) -> MetricRecord:
        records = reply.content.metric_records.values()
        sent = {key: record[key] for record in records for key in self.settings.privatise.send if key in record}
        return MetricRecord({WEIGHT: 1, **sent})


@lru_cache(maxsize=1024)
def _plan(settings: FlowerSettings, client: int, tensors: tuple[int, ...]) -> Plan:
    """Bind the mechanism, calibrated where the settings have a target. Of a whole update nothing is sampled."""
    config = settings.mechanism
    draft = Plan(client, Sampling("shuffled", 1, 1), 1, config.with_some_noise(), tensors, 0)
    if not config.parameter or config.noise is not None:
        return replace(draft, config=config.with_noise(config.noise)) if config.noise is not None else draft
    if config.calibrated_epsilon is None:
        return replace(draft, config=config.with_noise(config.nominal_noise()))
    planned = draft.accounted(range(1, (settings.privatise.rounds or 1) + 1))
    return replace(draft, config=config.with_noise(calibrate(config.calibrated_epsilon, planned)))
