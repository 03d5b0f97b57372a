"""The mod that applies a mechanism to what a ClientApp returns, and counts it in a ledger."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fedpriv.clients.model_errors import unless_raised
from fedpriv.core.errors import InputError, RefusedError
from fedpriv.core.files import append_line, writing_to
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import Secret
from fedpriv.core.records import LedgerLine
from fedpriv.core.wire import pack
from fedpriv.data.sampling import Sampling
from fedpriv.flower.app_settings import FlowerSettings, TapSettings, read_settings
from fedpriv.flower.arrays import (
    REPLIES,
    STATISTICS,
    Form,
    WrongAppError,
    arrays_of,
    as_sent,
    client_of,
    is_training,
    moved,
    record_of,
    round_of,
    stage_of,
    type_of,
    update_of,
)
from fedpriv.flower.folder import Tapped, built, imported
from fedpriv.flower.ledger import AnswerLedger, Layout, read_layout
from fedpriv.flower.secure_sum import ASSUMED, Protocol, check_claim, check_protocol, protocol_of, share_of
from fedpriv.flower.watch import ReleasedUpdate, names_in, releasing, seen_here, waiting, watching
from fedpriv.gradients import Vector
from fedpriv.mechanisms import MechanismSettings
from fedpriv.mechanisms.machinery.base import NoiseAt

_LOG = logging.getLogger("fedpriv")
_MADE = (
    "privatise: %d of %d rows of %s are nearly copies of others, which training does not produce: the server may have "
    "crafted these parameters to read single records; the ledger's proof still holds"
)
_DECIDES = (
    "privatise: %s has one class %.1f above all others, which training does not produce: the server may have crafted "
    "these parameters to count the records of each class; the ledger's proof still holds"
)
WEIGHT = "num-examples"
"""By what Flower's strategies weight replies."""

_CONSTANT = ("fitres.num_examples", "fitres.status")  # records of a NumPyClient's reply that leave without its data
_SIGNS = {"weights": 1.0, "update": 1.0, "negated update": -1.0, "gradient": 1.0}


def privatise(near: str | Path) -> Mod:
    """Return a mod that clips and noises the update in each reply to a training message, and keeps a ledger.

    A client replies with the parameters that it received plus one release of the mechanism: one vector of all
    floating-point arrays except running statistics, or of those that ``privatise.trained`` names. Other arrays are sent
    back unchanged. Metrics and configs stay at the client, except those that ``privatise.send`` names. num-examples is
    1, so that all clients have equal weights. Messages other than those to train are refused, unless ``privatise.pass``
    names their type; then nothing covers the reply. The mechanism ``distributed`` adds a share of the noise on a sum,
    and answers inside ``secaggplus_mod`` only.

    If the app raises any exception, or its reply does not fit or is not finite, the update is zero, because failures
    may depend on the data; the client's own log and ledger record it. Errors that cannot depend on the data, such as a
    wrong record name, are raised. Signals (Ctrl-C) still end the process.

    Args:
        near: a settings file (.toml); or the ``__file__`` of the app's module: fedpriv.toml is in its folder or in one
            above it.

    Raises:
        InputError: the settings are missing or wrong, or name no mechanism whose noise clients add.
    """
    settings = read_settings(near)
    if not settings.mechanism.protects:
        raise InputError("privatise needs a mechanism: fedpriv.toml has no [mechanism], or its name is 'none'")
    return Privatiser(settings, Path(near).absolute().parent)


@dataclass(frozen=True)
class _Answer:
    """What an app answers: all of it may depend on its data."""

    update: Vector
    statistics: Vector
    numbers: Vector  # by name, of those that have noise of their own
    sent: RecordDict  # what leaves as it is, since the settings say so


@dataclass(frozen=True)
class _Asked:
    """A training message, and what is settled before the app sees it."""

    message: Message
    context: Context
    record: str  # of the reply
    before: Vector  # what was received, in the types that it had at first
    layout: Layout
    protocol: Protocol | None  # of SecAgg+; `None`: the answer has all of its noise
    ledger: AnswerLedger
    line: LedgerLine

    @property
    def is_first(self) -> bool:
        """Whether the client answers for the first time."""
        return self.line.participations == 1


@dataclass(frozen=True)
class Privatiser:
    """A mod of these settings."""

    settings: FlowerSettings
    app: Path = Path()

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a training message with a release; refuse others, or pass on what the settings name."""
        passed, kind = self.settings.privatise.passed, type_of(message)
        if waiting() is not None:
            raise WrongAppError("privatise is given twice, as a mod of the app and of its function: one is enough")
        if stage_of(message.content):
            raise WrongAppError("privatise comes after secaggplus_mod in mods = [...]: before it, all is masked")
        if kind in passed or (not is_training(message) and kind.split(".")[0] in passed):
            self._note_passed(client_of(context), kind, context.run_id, round_of(message))
            return call_next(message, context)
        if not is_training(message):
            return self._numbers_alone(message, context, call_next)
        asked = self._asked(message, context)
        with releasing() as later:
            answer = unless_raised(lambda: self._answer(asked, call_next), WrongAppError, level=logging.ERROR)
        if answer is None:
            _LOG.error("client %d: the app failed; its update counts as zero", asked.line.client)
            asked.ledger.note_failure(asked.line)
            nothing = partial(_zeros, asked.before)
            answer = _Answer(nothing(asked.layout.trained), nothing(asked.layout.statistics), {}, RecordDict())
        release = self._release(asked, answer)
        released = ReleasedUpdate(asked.ledger.plan.config, asked.line, self.settings.privatise.reply)
        if (seen := seen_here()) is not None:
            seen.released = released
        reply = Message(self._content(asked, answer, self._reply_arrays(asked, release)), reply_to=message)
        for call in later:
            call(reply, released)
        return reply

    def _asked(self, message: Message, context: Context) -> _Asked:
        """Charge the ledger for the answer; nothing here has seen the client's data, so errors are raised."""
        own, client = self.settings.privatise, client_of(context)
        record = record_of(message.content, own.record)
        reply_record = own.reply_record or REPLIES.get(record, record)
        if reply_record in own.passed:
            raise WrongAppError(f"privatise.pass names {reply_record}, the very record that is to be protected")
        received = arrays_of(message.content, record)
        layout = self._layout(client, received)
        before = {name: _typed(value, layout.types[name]) for name, value in received.items()}
        _warn_of_crafted(before)
        protocol = protocol_of(context) if self.settings.mechanism.noise_at == "sum" else None
        ledger = self._ledger(client, before, layout, "clients" if protocol is None else "sum")
        if protocol is not None:
            check_protocol(protocol, ledger.plan, before, (*layout.trained, *layout.copies), own.reply)
        line = ledger.charge(context.run_id, round_of(message))
        asked = _Asked(message, context, reply_record, before, layout, protocol, ledger, line)
        if asked.is_first:
            self._forecast(ledger.plan, before, layout)
        if protocol is not None:
            check_claim(line)
        return asked

    def _answer(self, asked: _Asked, call_next: ClientAppCallable) -> _Answer:
        """Ask the app: the update and what else is sent; all that looks at an answer is in here, and may raise."""
        own, before, layout = self.settings.privatise, asked.before, asked.layout
        with _watched(asked.is_first, before, layout):
            content = _content_with(asked.record, call_next(asked.message, asked.context))
            after = arrays_of(content, asked.record)
            if not set(after) & set(layout.trained):
                raise WrongAppError(
                    f"the reply's {asked.record} has none of the arrays that were sent: no update can be made of it"
                )
            if asked.is_first:
                self._tell_kept(content, asked.record)
                _tell_wasted({*layout.trained} - {*after}, "the reply does not have", layout)
            statistics = _update(before, after, layout.statistics, own.reply) if own.statistics is not None else {}
            numbers = self._numbers(content, "train")
            update = _update(before, after, layout.trained, own.reply)
            return _Answer(update, statistics, numbers, self._sent(content))

    def _release(self, asked: _Asked, answer: _Answer) -> Vector:
        """Clip and noise the update, whole or as a share of the noise on a sum, and statistics with their own noise."""
        own, plan = self.settings.privatise, asked.ledger.plan
        released_update = plan.release_update if asked.protocol is None else partial(share_of, plan)
        release = released_update(answer.update, self._noise(asked.line).stream("noise"))
        if own.statistics is None or not asked.layout.statistics:
            return release
        statistics = self._released(own.statistics, answer.statistics, "statistics", asked.context, asked.message)
        return release | statistics

    def _numbers_alone(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer another message with the numbers that have a mechanism of their own, or refuse it."""
        own, kind = self.settings.privatise, type_of(message)
        if all(each.type != kind for each in own.metrics):
            raise RefusedError(
                f"privatise covers replies to train, not to {kind}; privatise.pass = [{json.dumps(kind)}] lets them "
                "leave as they are, covered by nothing, and privatise.metrics gives numbers in them noise"
            )
        with releasing():
            numbers = unless_raised(
                lambda: self._numbers(call_next(message, context).content, kind), WrongAppError, level=logging.ERROR
            )
        content = RecordDict()
        self._add_numbers(content, numbers or {}, context, message)
        return Message(content, reply_to=message)

    def _numbers(self, content: RecordDict, kind: str) -> Vector:
        """What a reply has of the numbers that have noise of their own."""
        found = {}
        for own in self.settings.privatise.metrics:
            record, _, array = own.name.partition("/")
            values: list[Any] = [each[own.name] for each in content.metric_records.values() if own.name in each]
            if array and record in content.array_records:
                values = [arrays_of(content, record)[array]]
            if own.type == kind and values:
                numbers = torch.as_tensor(values[0], dtype=torch.float64).flatten()
                found[own.name] = numbers if len(numbers) == own.size else torch.zeros(own.size)
        return found

    def _add_numbers(self, content: RecordDict, numbers: Vector, context: Context, message: Message) -> None:
        """Release numbers, each of a ledger of its own; those that the app did not reply are zeros with noise."""
        for own in self.settings.privatise.metrics:
            if own.type != type_of(message):
                continue
            record, _, array = own.name.partition("/")
            values = {"": numbers.get(own.name, torch.zeros(own.size)).float()}
            part = own.name.replace("/", ".")
            released = self._released(own.mechanism, values, part, context, message)[""].double()
            released = released.round() if own.whole else released
            if array:
                kept = arrays_of(content, record) if record in content.array_records else {}
                content[record] = pack({**kept, array: released})
            else:
                metrics = next(iter(content.metric_records), "metrics")
                listed = [float(value) for value in released]
                told: dict[str, Any] = dict(content.metric_records.get(metrics, {}))
                content[metrics] = MetricRecord({**told, own.name: listed[0] if own.size == 1 else listed})

    def _layout(self, client: int, before: Vector) -> Layout:
        """Which arrays get noise: as in the client's ledger, or found now."""
        own, tapped = self.settings.privatise, self.settings.tap or TapSettings()
        layout = read_layout(self._folder, client)
        if layout is not None and set(layout.types) == set(before):
            floating = [name for name, kind in layout.types.items() if getattr(torch, kind).is_floating_point]
            if own.trained is None or {*_matching(floating, own.trained)} == {*layout.trained, *layout.copies}:
                return layout
        network = _network(tapped, self.app)
        there = names_in(network, {name: tuple(value.shape) for name, value in before.items()}) if network else {}
        return _found_layout(before, own.trained, network, there or {name: name for name in before})

    def _ledger(self, client: int, before: Vector, layout: Layout, noise_at: NoiseAt) -> AnswerLedger:
        own = self.settings.privatise
        sizes = tuple(before[name].numel() for name in layout.trained)
        plan = _plan(self.settings.mechanism, own.rounds, client, sizes, noise_at)
        return AnswerLedger(self._folder, plan, own.rounds, own.target_epsilon, layout, self._notes)

    @property
    def _folder(self) -> Path:
        """Where the ledgers are; settings without a folder are refused when they are read."""
        if self.settings.privatise.folder is None:
            raise InputError("privatise.folder is not set")
        return self.settings.privatise.folder

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        own = self.settings.privatise
        notes = ["counted are the answers with this release; messages that nothing covers are refused"]
        if own.passed:
            notes = [f"not covered, since they pass as they are: {', '.join(own.passed)}; others are refused"]
        if own.send:
            notes.append(f"not covered, since they leave as they are: {', '.join(own.send)}")
        if self.settings.mechanism.noise_at == "sum":
            notes.append(ASSUMED.format(self.settings.mechanism.least_in_sum))
        if own.seed is not None:
            notes.append("the noise follows from privatise.seed: anyone who knows that can subtract it")
        parts = [*(["statistics"] if own.statistics else []), *(each.name.replace("/", ".") for each in own.metrics)]
        if parts:
            files = ", ".join(f"client-K-{part}.json" for part in parts)
            notes.append(f"what a client answers is proven by all its ledgers together: client-K.json, {files}")
        return tuple(notes)

    def _noise(self, line: LedgerLine) -> Secret:
        """What the noise of one answer is keyed by, and of no other."""
        seed = self.settings.privatise.seed
        secret = Secret.drawn() if seed is None else Secret.of_seed(seed)
        return secret.derived("flower answer", line.client, line.participations)

    def _released(
        self, config: MechanismSettings, values: Vector, part: str, context: Context, message: Message
    ) -> Vector:
        """Release a part of a reply with noise of its own, counted in a ledger of its own."""
        rounds, sizes = self.settings.privatise.rounds, tuple(value.numel() for value in values.values())
        plan = _plan(config, rounds, client_of(context), sizes)
        ledger = AnswerLedger(self._folder, plan, rounds, None, Layout({}, ()), self._notes, f"-{part}")
        line = ledger.charge(context.run_id, round_of(message))
        return plan.release_update(values, self._noise(line).stream(part))

    def _reply_arrays(self, asked: _Asked, release: Vector) -> Vector:
        """What leaves: what came plus the release; in a sum, whole steps of SecAgg+'s grid."""
        if asked.protocol is None:
            return self._moved(asked.before, release, asked.layout)
        rounded = asked.protocol.rounded
        return rounded(self._moved(rounded(asked.before), release, asked.layout, exactly=True))

    def _moved(self, before: Vector, release: Vector, layout: Layout, exactly: bool = False) -> Vector:
        """What came plus the release, in the replies' form; variances are not below zero unless summed."""
        form = self.settings.privatise.reply
        whole = form == "weights"
        listed = all(name.isdigit() for name in before)
        arrays = {}
        for name, value in before.items():
            change = release.get(layout.copies.get(name, name))
            if change is None:
                arrays[name] = value if whole else torch.zeros_like(value)
                continue
            result = value.double() + change if whole else _SIGNS[form] * change.double()
            if whole and not (exactly and name not in layout.statistics) and _is_variance(name, value, listed):
                result = result.clamp_min(0)
            arrays[name] = as_sent(result, value.dtype)
        return arrays

    def _content(self, asked: _Asked, answer: _Answer, arrays: Vector) -> RecordDict:
        """A reply as the app's own are, with nothing of its data but the release and what the settings let out."""
        sent, legacy = answer.sent, asked.record in REPLIES.values()
        name, weight = ("fitres.num_examples", "num_examples") if legacy else ("metrics", WEIGHT)
        weight = self.settings.privatise.weight or weight
        content = RecordDict({asked.record: pack(arrays)})
        if legacy:
            content["fitres.metrics"] = ConfigRecord({})
            content["fitres.status"] = ConfigRecord({"code": 0, "message": ""})
        for key, value in sent.items():
            content[key] = value
        name = next(iter(sent.metric_records), name)
        counted = 1 if asked.protocol is None else int(asked.protocol.weight)
        metrics: dict[str, Any] = {weight: counted, **sent.metric_records.get(name, {})}
        content[name] = MetricRecord(metrics)
        self._add_numbers(content, answer.numbers, asked.context, asked.message)
        return content

    def _sent(self, content: RecordDict) -> RecordDict:
        """Records and keys that leave as they are, since the settings name them."""
        own, sent = self.settings.privatise, RecordDict()
        for name, record in content.items():
            if name in own.passed:
                sent[name] = record
            elif isinstance(record, (MetricRecord, ConfigRecord)) and any(key in own.send for key in record):
                values: dict[str, Any] = {key: value for key, value in record.items() if key in own.send}
                sent[name] = type(record)(values)
        return sent

    def _tell_kept(self, content: RecordDict, record: str) -> None:
        """Name, in the client's own log, what a strategy may miss."""
        own, kept = self.settings.privatise, []
        for name, values in content.items():
            if name in _CONSTANT:
                continue
            if isinstance(values, (MetricRecord, ConfigRecord)) and name not in own.passed:
                kept += [f"{name}.{key}" for key in values if key not in (*own.send, WEIGHT, own.weight)]
            elif name != record and name not in own.passed:
                kept.append(name)
        if kept:
            _LOG.warning(
                "privatise: %s stay at the client; a strategy that reads one of them fails. Send keys that reveal "
                "nothing about the data with privatise.send, the key of weights with privatise.weight, records with "
                "privatise.pass",
                ", ".join(kept),
            )

    def _forecast(self, plan: Plan, before: Vector, layout: Layout) -> None:
        """Say before the first training how much noise there will be, and what does not move."""
        signal, noise = _lengths(plan.config, plan.tensors)
        d, shares = sum(plan.tensors), plan.config.least_in_sum
        noise = noise / math.sqrt(shares) if shares else noise
        where = f" in the mean of {shares} clients" if shares else ""
        drowned = (
            "; such noise drowns the update: train fewer parameters (privatise.trained, an adapter), or average more "
            "clients in a round"
            if noise > 10 * signal
            else ""
        )
        text = "privatise: d = %s trained numbers; the norm of the noise%s is %.3g against %.3g of a clipped update%s"
        _LOG.warning(text, f"{d:,}", where, noise, signal, drowned)
        if layout.statistics and self.settings.privatise.statistics is None:
            _LOG.warning(
                "privatise: running statistics (%s) are sent back unchanged, so the network is wrong in eval(): "
                "release them with noise by [privatise.statistics], or use GroupNorm",
                ", ".join(layout.statistics[:4]),
            )

    def _note_passed(self, client: int, kind: str, run: int, number: int | None) -> None:
        """Enter in the client's folder that a reply left which nothing covers."""
        folder = self._folder
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            told = {"type": kind, "run": run, "round": number, "covered": "by nothing"}
            append_line(folder / f"client-{client}-passed.jsonl", json.dumps(told))


def _warn_of_crafted(received: Vector) -> None:
    """Say in the client's log that parameters look as a server makes them to read single records."""
    for name, (copies, rows) in copied_rows(received).items():
        _LOG.warning(_MADE, copies, rows, name)
    if (alone := lonely_bias(received)) is not None:
        _LOG.warning(_DECIDES, *alone)


def _content_with(record: str, reply: Message) -> RecordDict:
    """The content of an app's reply, which has this record."""
    if reply.has_error():
        raise RuntimeError(reply.error.reason)
    if record not in reply.content.array_records:
        names = ", ".join(sorted(reply.content.array_records)) or "no ArrayRecord"
        raise WrongAppError(key="reply_record", given=record, allowed=f"the reply has {names}; nothing of it has left")
    return reply.content


@contextmanager
def _watched(first: bool, before: Vector, layout: Layout) -> Iterator[None]:
    """Watch what the first training moves, and say what gets noise for nothing; the noise stays as it is."""
    if not first:
        yield
        return
    with watching({name: tuple(value.shape) for name, value in before.items()}, for_tap=False) as seen:
        yield
    statistics = {name for name, there in seen.names.items() if there.rpartition(".")[2] in STATISTICS}
    twice = [name for group in seen.tied for name in group[1:] if name in layout.trained]
    used = {*seen.trained, *statistics, *twice}
    if seen.trained:
        _tell_wasted({*layout.trained} - used, "training did not change", layout)
    if twice:
        text = "privatise: noise is wasted on %s, a second copy of another array: tap.model = 'package.module:Name' of "
        _LOG.warning(text + "the network shows which", ", ".join(twice[:8]))


def _found_layout(
    before: Vector, patterns: tuple[str, ...] | None, network: nn.Module | None, there: Mapping[str, str]
) -> Layout:
    """What gets noise by the settings, by the network that they name, or by names and types alone."""
    types = {name: str(value.dtype).removeprefix("torch.") for name, value in before.items()}
    candidates = moved(before)
    state = network.state_dict(keep_vars=True) if network is not None else {}
    if patterns is not None:
        floating = [name for name, value in before.items() if value.is_floating_point()]
        candidates = _matching(floating, patterns)
    elif state:
        candidates = tuple(name for name in candidates if state[there[name]].requires_grad)
    if not candidates:
        raise WrongAppError(_no_numbers(before))
    averaged = {name for name, value in before.items() if value.is_floating_point()} - {*moved(before), *candidates}
    statistics = [name for name in before if there[name].rpartition(".")[2] in STATISTICS[:2]]
    for name in averaged - {*statistics}:
        whole = torch.int64 if before[name].dtype == torch.float64 else before[name].dtype
        types[name] = str(state[there[name]].dtype if state else whole).removeprefix("torch.")
    firsts: dict[int, str] = {}
    copies: dict[str, str] = {}
    for name in candidates if state else ():
        first = firsts.setdefault(id(state[there[name]]), name)
        if first != name:
            copies[name] = first
    trained = tuple(name for name in candidates if name not in copies)
    return Layout(types, trained, copies, tuple(name for name in statistics if name not in candidates))


def _no_numbers(before: Vector) -> str:
    kinds = ", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in before.values()})) or "nothing"
    return (
        f"the message has no floating-point array that training moves, but {kinds}: bytes of a model, such as trees, "
        "have no update that noise fits; floating-point parameters fit, and counts or histograms as such an array"
    )


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(names)
    if wrong := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]:
        allowed = f"no floating-point array has such a name; the message has {', '.join(names[:12])}"
        raise WrongAppError(key="privatise.trained", given=wrong[0], allowed=allowed)
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _network(tapped: TapSettings, app: Path) -> nn.Module | None:
    """The network that the settings name, if it can be made without more; random numbers stay as they are."""
    if tapped.model is None:
        return None
    about = Tapped(tapped.model, str(app), tapped.loss)
    takes = signature(imported(about, tapped.model, "tap.model")).parameters
    given = (("shape", tapped.shape), ("classes", tapped.classes))
    if any(key in takes and takes[key].default is Parameter.empty and value is None for key, value in given):
        return None
    with torch.random.fork_rng():
        return built(about, tapped.shape, tapped.classes)


def _is_variance(name: str, value: Tensor, listed: bool) -> bool:
    """Whether an array must not go below zero: by its name, or in a list if it is all positive, as variances are."""
    if name.rpartition(".")[2] == STATISTICS[1]:
        return True
    return listed and value.ndim == 1 and bool((value >= 0).all()) and bool((value > 0).any())


def _typed(value: Tensor, kind: str) -> Tensor:
    """The same in the type that it had at first: an average of whole numbers comes back as one of others."""
    wanted = getattr(torch, kind)
    return value.to(wanted) if wanted.is_floating_point else value.round().to(wanted)


def _update(before: Vector, after: Vector, names: tuple[str, ...], form: Form) -> Vector:
    """The update of a reply; arrays that it leaves out have not moved, so nobody learns which it has."""
    there = [name for name in names if name in after]
    if whole := [name for name in there if not after[name].is_floating_point()]:
        kind = str(after[whole[0]].dtype).removeprefix("torch.")
        raise InputError(f"the reply's {whole[0]} is {kind}: privatise reads numbers before they are quantised")
    return _zeros(before, names) | update_of(before, after, there, form)


def _tell_wasted(names: Iterable[str], why: str, layout: Layout) -> None:
    """Name, in the client's own log, arrays that get noise for nothing."""
    if wasted := [name for name in layout.trained if name in names]:
        left = json.dumps([name for name in layout.trained if name not in wasted])
        text = "privatise: noise is wasted on %s, which %s: privatise.trained = %s leaves it out"
        _LOG.warning(text, ", ".join(wasted[:8]), why, left)


def _zeros(before: Vector, names: Iterable[str]) -> Vector:
    return {name: torch.zeros(before[name].shape) for name in names}


def _lengths(config: MechanismSettings, tensors: tuple[int, ...]) -> tuple[float, float]:
    """The norm of a long update in a release, all of whose numbers are the same, and that of the noise."""
    mechanism, long = config.mechanism(), {str(place): torch.full((n,), 1e6) for place, n in enumerate(tensors)}
    signal = sum(float(value.double().square().sum()) for value in mechanism.expected(long).values())
    noise = mechanism.noise(tensors, 1, 1)
    spread = sum(size * variance for size, variance in zip(noise.sizes, noise.variances, strict=True))
    return math.sqrt(signal), math.sqrt(spread)


@lru_cache(maxsize=1024)
def _plan(
    config: MechanismSettings,
    rounds: int | None,
    client: int,
    tensors: tuple[int, ...],
    noise_at: NoiseAt = "clients",
) -> Plan:
    """Bind the mechanism, calibrated where the settings have a target. Of a whole update nothing is sampled."""
    draft = Plan(client, Sampling("shuffled", 1, 1), 1, config.with_some_noise(), tensors, 0, noise_places=(noise_at,))
    if not config.parameter or config.noise is not None:
        return replace(draft, config=config.with_noise(config.noise)) if config.noise is not None else draft
    if config.target is None:
        return replace(draft, config=config.with_noise(config.nominal_noise()))
    planned = draft.accounted(range(1, (rounds or 1) + 1))
    return replace(draft, config=config.with_noise(config.target.least_noise(planned)))


# What a client can notice of parameters that it is sent: rows that are nearly copies, a bias that decides alone. Active
# attacks that read single records (imprint, class fishing) need either. Training gives neither: rows that were drawn at
# random stay different, and a bias learns no more than how frequent a class is. A server that knows of the checks can
# send rows that differ more, and reads less exactly.

FEWEST = 8  # numbers in a row; shorter ones, such as kernels of one pixel, may be equal by chance or by rounding
NEAR = 0.05  # of the longest row: the distance below which rows are copies
SHARE = 0.75  # of the rows but two, which class fishing leaves different
SHADOWS = 64  # random directions by which rows are compared
MOST = 4096  # rows that are compared with each other; of more, as many at even distances
SEED = 20260417  # of these directions; it decides nothing else
ALONE = 9.0  # nats by which a bias of the last layer is above all others: a class 8,000 times as frequent


def copied_rows(parameters: Vector) -> dict[str, tuple[int, int]]:
    """Return the weights of whose rows three quarters are nearly copies: name -> (rows that repeat another, rows).

    A weight of zeros, which has not been trained yet, is none of them. False alarms: a layer of which most rows are
    zero or tiny, as those of pruned networks, or of classes that occur in nobody's data. Half of the rows would not do:
    in the table of a small pretrained Llama half of the tokens were never trained.
    """
    weights = {name: value.flatten(1) for name, value in parameters.items() if value.ndim > 1 and len(value) > 2}
    counts = {name: _copies(rows) for name, rows in weights.items() if rows.shape[1] >= FEWEST}
    return {name: (copies, rows) for name, (copies, rows) in counts.items() if copies and copies >= SHARE * (rows - 2)}


def lonely_bias(parameters: Vector) -> tuple[str, float] | None:
    """Return the last layer's bias, and by how much one class is above all others, if it decides alone."""
    named = [name.removesuffix("weight") + "bias" for name, value in parameters.items() if value.ndim == 2]
    biases = [name for name in named if name in parameters and len(parameters[name]) > 1]
    if not biases or not parameters[biases[-1]].is_floating_point():
        return None
    first, second = parameters[biases[-1]].double().topk(2).values.tolist()
    return (biases[-1], first - second) if first - second > ALONE else None


def _copies(rows: Tensor) -> tuple[int, int]:
    """How many of the rows (n, m) that are compared are near an earlier one, none if all are zero; and n."""
    rows = rows[:: -(-len(rows) // MOST)]
    if not rows.is_floating_point() or not bool(rows.any()):
        return 0, len(rows)
    shadows = torch.randn(rows.shape[1], SHADOWS, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    seen = rows.double() @ shadows.to(rows.device)
    near = torch.cdist(seen, seen) <= NEAR * seen.norm(dim=1).max()
    return int(near.tril(diagonal=-1).any(dim=1).sum()), len(rows)
