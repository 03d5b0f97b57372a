"""Observe mods, Opacus engines and strategies of an app while it runs, from the objects, not from the source."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import flwr.clientapp.client_app as flower_client
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.strategy import Strategy as LegacyStrategy
from flwr.serverapp.strategy import FedAvg, Strategy

from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.files import append_line
from fedpriv.flower._privatise import Privatiser
from fedpriv.flower._tap import Tap, described
from fedpriv.flower.app_settings import TapSettings
from fedpriv.flower.arrays import arrays_of, client_of, norm, parameters_in, parameters_of, stage_of, type_of
from fedpriv.flower.audit.records import Answer, ModAction, Round, StrategyLayer
from fedpriv.flower.noise import SEEDED, Noises, Stated, half_doubt, hearing_noise, numpy_is_seeded, stated_of
from fedpriv.gradients import Vector

ANSWERS, LEDGERS = "answers", "ledgers"

CLIPPING_NORM = "clipping_norm"
"""The key by which Flower's wrappers tell clients, and keep for themselves, what updates are clipped to."""

WRAPPERS = (
    "DifferentialPrivacyServerSideFixedClipping",
    "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyServerSideAdaptiveClipping",
    "DifferentialPrivacyClientSideAdaptiveClipping",
)
_BYTES = ("|", "<U", "object")  # how numpy's names of types begin that are no numbers
_NEEDED = ("noise_multiplier", CLIPPING_NORM, "num_sampled_clients")
_CONFIGURE, _AGGREGATE = ("configure_train", "configure_fit"), ("aggregate_train", "aggregate_fit")


_ACTIONS: ContextVar[list[ModAction] | None] = ContextVar("actions", default=None)
"""What mods did while one message was answered."""


@dataclass(frozen=True)
class ObservedApp:
    """A ClientApp whose answers are written down as they leave."""

    app: ClientApp
    folder: Path

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        stage, sent = stage_of(message.content), described(message.content)
        about = Answer(client_of(context), context.node_id, type_of(message), stage, sent)
        came = dict(message.content.array_records)
        actions, noises = list[ModAction](), Noises()
        token = _ACTIONS.set(actions)
        if find_spec("opacus") is not None:
            import_module("opacus")  # so that its engines are heard, too, where the app imports it later
        try:
            with hearing_noise(message, parameters_of(message)) as noises:
                reply = self.app(message, context)
        except BaseException as error:
            self._write(replace(about, error=reason_of(error)), actions, noises)
            raise
        finally:
            _ACTIONS.reset(token)
        if reply.has_error():
            self._write(replace(about, error=" ".join(str(reply.error.reason).split())), actions, noises)
            # Flower's mods address some errors to their own client, and its server then waits an hour for an answer.
            return Message(reply.error, reply_to=message)
        echoed = tuple(
            name
            for name, record in reply.content.array_records.items()
            if any(record == each for each in came.values())
        )
        about = replace(about, replied=described(reply.content), echoed=echoed)
        self._write(about, actions, noises, reply)
        return reply

    def _write(self, answer: Answer, actions: list[ModAction], noises: Noises, left: Message | None = None) -> None:
        observed = (*noises.local(left), *noises.engines(left))
        whole = replace(answer, actions=tuple(actions), noises=observed, stated=tuple(noises.stated))
        (self.folder / ANSWERS).mkdir(parents=True, exist_ok=True)
        append_line(self.folder / ANSWERS / f"{answer.client}.jsonl", json.dumps(asdict(whole), default=str))


@dataclass(frozen=True)
class ObservedMod:
    """A mod, with what it did to each reply written down."""

    mod: Mod

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Do what the mod does."""
        before = parameters_of(message)
        inside: Vector = {}
        held: dict[str, dict[str, Any]] = {}

        def answered(given: Message, own: Context) -> Message:
            reply = call_next(given, own)
            inside.update(parameters_of(reply) if before else {})
            held.update(_records(reply))
            return reply

        reply = self.mod(message, context, answered)
        if (actions := _ACTIONS.get()) is not None:
            action = _action(self.mod, before, inside, parameters_of(reply) if before else {})
            others = {name: record for name, record in _records(reply).items() if name != parameters_in(reply)}
            pairs = ((name, key, value) for name, record in others.items() for key, value in record.items())
            added = tuple((name, key) for name, key, value in pairs if held.get(name, {}).get(key) != value)
            actions.append(replace(action, added=added))
        return reply


def _records(reply: Message) -> dict[str, dict[str, Any]]:
    """What a reply holds, in records of their own: mods change its own in place."""
    return {} if reply.has_error() else {name: dict(record) for name, record in reply.content.items()}


def _action(mod: Mod, before: Vector, inside: Vector, after: Vector) -> ModAction:
    """Compare the update that reached a mod with the one that left it."""
    action = ModAction(name_of(mod), lets_out=_let_out(mod))
    names = [name for name, value in before.items() if value.is_floating_point()]
    names = [name for name in names if name in inside and name in after]
    names = [name for name in names if before[name].shape == inside[name].shape == after[name].shape]
    changes = {name: inside[name].double() - before[name].double() for name in names}
    lefts = {name: after[name].double() - before[name].double() for name in names}
    if not names:
        return action
    whole = sum(float((changes[name] * lefts[name]).sum()) for name in names)
    size = sum(float(change.square().sum()) for change in changes.values())
    factor = min(1.0, whole / size) if size else 1.0
    own = {name: _factor(changes[name], lefts[name], factor) for name in names}
    off = {name: float((lefts[name] - own[name] * changes[name]).norm()) for name in names}
    rounding = {name: 1e-6 * float(before[name].double().norm()) + 1e-4 * float(changes[name].norm()) for name in names}
    return replace(
        action,
        noised=tuple(name for name in names if off[name] > rounding[name]),
        norm=norm(changes),
        left=norm(lefts),
    )


def _factor(change: torch.Tensor, left: torch.Tensor, whole: float) -> float:
    """The factor by which clipping has shortened an array; one number alone does not tell it, the whole update does."""
    size = float(change.square().sum())
    return float((change * left).sum()) / size if size and change.numel() > 1 else whole


def name_of(mod: object) -> str:
    """The name of a mod, for people."""
    if isinstance(mod, Privatiser):
        return "privatise"
    return str(getattr(mod, "__name__", type(mod).__name__))


def _numbers(thing: object) -> dict[str, float]:
    """The numbers that an object was made with."""
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    shown = {key: value for key, value in own.items() if not key.startswith("_") and not isinstance(value, bool)}
    return {key: float(value) for key, value in shown.items() if isinstance(value, (int, float))}


def _let_out(mod: Mod) -> tuple[str, ...]:
    return (*mod.settings.privatise.send, *mod.settings.privatise.passed) if isinstance(mod, Privatiser) else ()


@contextmanager
def observing_mods(folder: Path, settings: TapSettings, app: Path) -> Iterator[list[str]]:
    """Have each chain of mods that Flower makes meanwhile observed, and tapped where its uploads can be read.

    A tap of the app's own is left out, and :func:`~fedpriv.flower.privatise` counts in a ledger of the audit's own: the
    clients' real ledgers stay as they are. The names of the mods are collected, outermost first.
    """
    chain: Callable[..., ClientAppCallable] = vars(flower_client)["make_ffn"]
    names: list[str] = []

    def observed(function: ClientAppCallable, mods: list[Mod]) -> ClientAppCallable:
        _refuse_twice(mods)
        own = [mod for mod in mods if not isinstance(mod, Tap)]
        place = 1 + own.index(secaggplus_mod) if secaggplus_mod in own else 0
        names.extend(name for name in map(name_of, own) if name not in names)
        seen: list[Mod] = [ObservedMod(_elsewhere(mod, folder / LEDGERS)) for mod in own]
        return chain(function, [*seen[:place], Tap(settings, app), *seen[place:]])

    with patch.object(flower_client, "make_ffn", observed):
        yield names


def _refuse_twice(mods: list[Mod]) -> None:
    """A mod that acts twice on one reply is a mistake: the second makes nothing better that is said of the first."""
    kinds = Counter(name_of(mod) for mod in mods)
    for mod in mods:
        ours = type(mod).__module__.startswith(("flwr.", "fedpriv."))
        if kinds[name_of(mod)] > 1 and (ours or mods.count(mod) > 1):
            listed = ", ".join(map(name_of, mods))
            raise InputError(key="mods", given=listed, allowed=f"{name_of(mod)} is given twice; allowed is once")


def _elsewhere(mod: Mod, folder: Path) -> Mod:
    """The same mod; of ours, with a ledger in another folder."""
    if not isinstance(mod, Privatiser):
        return mod
    own = mod.settings.privatise.model_copy(update={"folder": folder})
    return Privatiser(mod.settings.model_copy(update={"privatise": own}), mod.app)


# ---- strategies -----------------------------------------------------------------------------------------------------


@dataclass
class ServerNotes:
    """What was seen of the server's strategies."""

    layers: tuple[StrategyLayer, ...] = ()  # outermost first; empty: no strategy was seen
    rounds: list[Round] = field(default_factory=list)
    unread: InputError | None = None  # why a strategy cannot be read
    _known: list[Any] = field(default_factory=list)  # strategies that were read
    _running: list[Any] = field(default_factory=list)  # strategies whose method is running, outermost first
    _before: Vector = field(default_factory=dict)  # the arrays of the round
    _results: dict[int, Vector] = field(default_factory=dict)  # strategy -> what it returned in the round

    def configured(self, method: Callable[..., Any], strategy: Any, number: int, arrays: Any, *rest: Any) -> Any:
        """Note the arrays that a round starts with, and read strategies that are called for the first time."""
        if all(strategy is not each for each in self._known):
            self._read(strategy)
        if not self._running:
            self._before = _of_server(arrays)
        return self._inside(method, strategy, number, arrays, *rest)

    def _read(self, strategy: Any) -> None:
        """Read a strategy and those inside it; those that it keeps elsewhere are read when it calls them."""
        try:
            found = [strategy]
            while (inner := getattr(found[-1], "strategy", None)) is not None:
                found.append(inner)
            self.layers += tuple(_layer(each) for each in found)
            self._known += found
        except InputError as error:
            self.unread = error
            raise

    def aggregated(self, method: Callable[..., Any], strategy: Any, number: int, replies: Any, *rest: Any) -> Any:
        """Note what a round's replies weigh, how far they are from the start, and what a wrapper adds to their mean."""
        replies = list(replies)
        if not self._running:
            innermost = self._known[-1] if self._known else strategy
            self.rounds.append(Round(int(number), *_weights_and_norms(replies, innermost, self._before)))
        clip_norm = getattr(strategy, CLIPPING_NORM, None)
        result = self._inside(method, strategy, number, replies, *rest)
        self._results[id(strategy)] = _of_server(result[0]) if result and result[0] else {}
        if _wraps(type(strategy)):
            noise, doubt = self._added(strategy)
            self.rounds[-1] = replace(
                self.rounds[-1],
                clip_norm=clip_norm,
                next_clip_norm=getattr(strategy, CLIPPING_NORM, None),
                noise=noise,
                doubt=doubt,
                stated=_spent(strategy),
            )
        if not self._running:
            self._results.clear()
        return result

    def _inside(self, method: Callable[..., Any], strategy: Any, *given: Any) -> Any:
        self._running.append(strategy)
        try:
            return method(strategy, *given)
        finally:
            self._running.pop()

    def _added(self, strategy: Any) -> tuple[float | None, str]:
        """Root mean square of what a wrapper adds to the result of the strategy inside it, and why that proves nothing.

        Of the latter: empty, if nothing is known against it.
        """
        inner = self._results.get(id(getattr(strategy, "strategy", None)), {})
        whole = self._results.get(id(strategy), {})
        both = [name for name in inner if name in whole]
        noises = [whole[name].double() - inner[name].double() for name in both if whole[name].is_floating_point()]
        noise = float(torch.cat([each.flatten() for each in noises]).square().mean().sqrt()) if noises else None
        moved = [name for name in inner if name in self._before and not inner[name].equal(self._before[name])]
        # Of an array without dimensions numpy makes a number, whose product with the factor of clipping is dropped.
        wide = [name for name in moved if not inner[name].ndim]
        bare = [name for name in moved if name in both and whole[name].equal(inner[name])]
        if numpy_is_seeded():
            return noise, SEEDED.format("numpy")
        if wide or bare:
            return noise, f"{wide[0]} has no dimensions, and is not clipped" if wide else f"{bare[0]} gets no noise"
        return noise, half_doubt(inner)


@contextmanager
def observing_strategies() -> Iterator[ServerNotes]:
    """Observe all strategies whose methods Flower, or an app's own loop, calls meanwhile."""
    notes = ServerNotes()
    with ExitStack() as stack:

        def observe(kind: type[Any]) -> None:
            for names, noting in ((_CONFIGURE, notes.configured), (_AGGREGATE, notes.aggregated)):
                for name in names:
                    if name in vars(kind):
                        stack.enter_context(patch.object(kind, name, _bound(noting, vars(kind)[name])))

        for base in (Strategy, LegacyStrategy):
            for kind in _below(base):
                observe(kind)
            hooked = cast(Any, classmethod(lambda cls, **_: observe(cls)))
            stack.enter_context(patch.object(base, "__init_subclass__", hooked))
        yield notes


def _bound(noting: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    names = [*signature(method).parameters][1:]

    def observed(strategy: Any, *given: Any, **named: Any) -> Any:
        return noting(method, strategy, *given, *(named[name] for name in names[len(given) :] if name in named))

    return observed


def _below(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)


def _layer(strategy: Any) -> StrategyLayer:
    kind, settings = type(strategy), _numbers(strategy)
    if not isinstance(strategy, (Strategy, LegacyStrategy)):
        raise InputError(key="strategy", given=kind.__name__, allowed="it cannot be read: it is none of Flower's")
    own = [base for base in kind.__mro__ if base.__module__.startswith("flwr.")]
    wraps = _wraps(kind)
    if wraps and (missing := [key for key in _NEEDED if key not in settings]):
        given = getattr(strategy, missing[0], None)
        raise InputError(
            where=f"strategy {kind.__name__}",
            key=missing[0],
            given=given,
            allowed="it cannot be read: no number",
        )
    flowers = own[0] if own else object
    replaced = [
        name
        for name in (*_AGGREGATE, "_add_noise_to_aggregated_arrays")
        if wraps and (name in vars(strategy) or getattr(kind, name, None) is not getattr(flowers, name, None))
    ]
    plain = FedAvg.aggregate_train if isinstance(strategy, Strategy) else LegacyFedAvg.aggregate_fit
    averages = plain in (getattr(kind, name, None) for name in _AGGREGATE) and not {*_AGGREGATE} & {*vars(strategy)}
    weight = str(getattr(strategy, "weighted_by_key", ""))
    return StrategyLayer(kind.__name__, kind.__module__, settings, weight, wraps, averages, tuple(replaced))


def _wraps(kind: type[Any]) -> str:
    """Which of Flower's privacy wrappers a class is; empty: none."""
    own = (base for base in kind.__mro__ if base.__module__.startswith("flwr."))
    return next((base.__name__ for base in own if base.__name__ in WRAPPERS), "")


def _of_server(arrays: Any) -> Vector:
    """Arrays of numbers as a strategy has them: a record, or parameters of older ones; some encrypt them to bytes."""
    if isinstance(arrays, ArrayRecord):
        numbers = ArrayRecord({name: array for name, array in arrays.items() if not array.dtype.startswith(_BYTES)})
        return arrays_of(RecordDict({"arrays": numbers}), "arrays")
    from flwr.compat.common.parameter import parameters_to_ndarrays

    values = enumerate(parameters_to_ndarrays(arrays))
    return {str(place): torch.as_tensor(value) for place, value in values if value.dtype.kind not in "SUOV"}


def _weights_and_norms(replies: list[Any], strategy: Any, before: Vector) -> tuple[dict[int, float], dict[int, float]]:
    """By node, what a reply weighs and how far its arrays are from those that were sent."""
    weights, norms = {}, {}
    key = getattr(strategy, "weighted_by_key", "num-examples")
    for reply in replies:
        if isinstance(reply, Message):
            if reply.has_error():
                continue
            node, records = reply.metadata.src_node_id, reply.content.metric_records.values()
            weight = next((record[key] for record in records if key in record), 1)
            arrays = {
                name: value
                for record in reply.content.array_records.values()
                for name, value in _of_server(record).items()
            }
        else:
            node, weight = int(getattr(reply[0], "node_id", 0)), reply[1].num_examples
            arrays = _of_server(reply[1].parameters)
        weights[node] = float(cast(float, weight))
        both = [name for name in before if name in arrays and arrays[name].shape == before[name].shape]
        norms[node] = norm({name: arrays[name].double() - before[name].double() for name in both})
    return weights, norms


def _spent(strategy: Any) -> Stated | None:
    """What a wrapper's accountant states by now."""
    accountant = getattr(strategy, "accountant", None)
    if accountant is None or not accountant.num_releases:
        return None
    spent = accountant.get_privacy_spent()
    relation = str(getattr(accountant.config.neighboring_relation, "value", accountant.config.neighboring_relation))
    return stated_of(spent.epsilon, spent.delta, int(spent.num_releases), relation)
