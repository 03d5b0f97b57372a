"""Noise that other libraries add to what leaves a client: recognised while it is added, and what it proves.

What was observed of it is a :class:`Noise`; what several of them prove, or why nothing, :func:`proven` says: to the
tap, whose attacks name it, and to the audit, which compares it with what the software says.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from inspect import getclosurevars, isfunction
from math import isfinite, log, sqrt
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Message
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp.mod import LocalDpMod
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fedpriv.accounting.gaussian import gaussian_delta
from fedpriv.accounting.people import together
from fedpriv.accounting.release import SIGMA, SMALLEST_RATE, Release, release_with
from fedpriv.core.plan import Plan
from fedpriv.core.reading import Record
from fedpriv.core.records import Guarantee
from fedpriv.data.sampling import Sampling
from fedpriv.flower.arrays import MASKED, SAME, Form, apart, norm, parameters_in, parameters_of
from fedpriv.flower.ledger import line_of
from fedpriv.flower.watch import ReleasedUpdate, after_each, frames
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import until_the_end
from fedpriv.mechanisms import MechanismSettings, mechanism_settings

LocalMod = LocalDpMod | OlderLocalDpMod
"""Flower has two, for older apps and newer ones, with the same noise."""

DELTA = 1e-5
"""Of a statement about software that names none."""

LEFT_OUT = "LocalDpMod neither clips nor noises arrays without dimensions: {}"
NO_NOISE, UNBOUNDED = "there is no noise", "the clipping norm is infinite"
SEEDED = "{}'s generator, which draws the noise, is seeded: whoever knows the seed subtracts the noise"
STATUS = 200  # characters of a text beside the arrays, at most: older clients say there how they fared
_AHEAD = 2  # batches that a loader may have given before the step of the first of them


def poisson_rate(batches: Any) -> float:
    """The rate of Opacus' sampler, alone or in another one, with no generator of the app's own; 0: it is none."""
    samplers: tuple[Any, Any] = (batches, getattr(batches, "sampler", None))
    own = (each for each in samplers if hasattr(each, "sample_rate") and getattr(each, "generator", None) is None)
    return next((float(each.sample_rate) for each in own), 0.0)


@dataclass
class Drawn:
    """How batches came about while a message was answered: passes over torch's loaders, and batches behind steps."""

    passes: int = 0  # over loaders that do not draw Poisson batches
    repeats: bool = False  # whether an example may have been in several batches of a pass
    steps: int = 0
    by_poisson: int = 0  # steps, each on a Poisson batch of its own
    rates: set[float] = field(default_factory=set)  # at which Poisson batches were drawn
    _fresh: Counter[bool] = field(default_factory=Counter)  # batches that no step has used, by whether they are Poisson

    @property
    def poisson(self) -> bool:
        """Whether each step had a Poisson batch of its own."""
        return 0 < self.by_poisson == self.steps

    def began(self, loader: DataLoader[Any]) -> None:
        """Note a pass over a loader."""
        batches, order = loader.batch_sampler, loader.sampler
        if poisson_rate(batches):
            return
        once = isinstance(order, SequentialSampler) or (
            isinstance(order, RandomSampler) and not order.replacement and order.num_samples <= len(order.data_source)
        )
        self.passes += 1
        self.repeats |= not (once and type(batches) in (BatchSampler, type(None)))

    def gave(self, rate: float) -> None:
        """Note a batch that a loader gave, and the rate of a Poisson batch."""
        poisson = rate > 0
        self.rates |= {rate} if poisson else set()
        self._fresh[poisson] = min(self._fresh[poisson] + 1, _AHEAD)

    def stepped(self) -> None:
        """Note a step: without a fresh batch it repeats an earlier one, as batches in a list do."""
        self.steps += 1
        kind = next((kind for kind in (True, False) if self._fresh[kind]), None)
        if kind is None:
            self.repeats = True
            return
        self._fresh[kind] -= 1
        self.by_poisson += kind

    def rate(self, told: float) -> float:
        """The rate of Poisson batches of which an accountant is told this one."""
        return told if told in self.rates else max({told, *self.rates})

    def uses(self, steps: int) -> int:
        """In how many of so many steps one example may have been; of steps that were not seen, in all."""
        known = self.passes and not self.repeats and not self.by_poisson and steps <= self.steps
        return min(steps, self.passes) if known else steps


@contextmanager
def hearing_loaders(drawn: Drawn) -> Iterator[None]:
    """Note passes over loaders inside, and the batches that they give."""
    with (
        after_each(DataLoader, "__iter__", lambda _, loader: drawn.began(loader)),
        after_each(
            _BaseDataLoaderIter, "__next__", lambda _, batches: drawn.gave(poisson_rate(batches._index_sampler))
        ),
    ):
        yield


def numpy_is_seeded() -> bool:
    """Whether numpy's global generator was given a seed, from which all that it draws follows."""
    return np.random.get_bit_generator().seed_seq is None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Stated(Record):
    """A guarantee that other software states."""

    epsilon: float | None  # `None`: no finite one
    delta: float
    releases: int = 1
    relation: str = ""  # adjacency, in its words


def stated_of(epsilon: float, delta: float, releases: int = 1, relation: str = "") -> Stated:
    """Return what software states, which may be infinite."""
    return Stated(float(epsilon) if isfinite(epsilon) else None, float(delta), releases, relation)


@dataclass(frozen=True)
class Noise(Record):
    """Noise of one kind in one answer of a client, as it was observed: all that what it proves depends on."""

    by: str  # what added it
    release: Release  # what it is of, and how often one unit may be in it
    clip_norm: float
    steps: int = 1  # with this noise
    doubt: str = ""  # why nothing is proven of it; empty: nothing is known against it
    left: tuple[str, ...] = ()  # arrays that changed and leave without it
    stated: Stated | None = None  # by what added it, of this answer alone
    notes: tuple[str, ...] = ()  # what makes it less than it seems

    @property
    def why(self) -> str:
        """Why nothing is proven of the whole answer; empty: something is."""
        return self.doubt or (LEFT_OUT.format(", ".join(self.left[:4])) if self.left else "")


def observed_noise(by: str, sigma: float, delta: float, clip_norm: float, doubt: str = "", **sampled: Any) -> Noise:
    """Return what was observed of normal noise, in numbers that an account takes, whatever a user's program has."""
    exists, allowed = sigma >= SIGMA.floor, 0 < delta < 1
    bounded = isfinite(clip_norm)
    doubt = ("" if allowed else f"delta = {delta:g} is no probability below 1") or doubt
    doubt = UNBOUNDED if not bounded else NO_NOISE if not exists else doubt
    noise = min(sigma, SIGMA.ceiling) if exists else SIGMA.floor
    kind = {"mechanism": "gaussian", "sampling": "full", "rate": 1.0, "participations": 1}
    release = release_with(noise, delta if allowed else DELTA, **{**kind, **sampled})
    return Noise(by, release, clip_norm if bounded else 0.0, release.participations, doubt)


def proven(noises: Sequence[Noise], delta: float | None = None) -> Guarantee:
    """Return what the noise in all answers of a client proves, at a delta or the smallest of theirs; or why nothing."""
    delta = min(each.release.delta for each in noises) if delta is None else delta
    found = together([replace(each.release, delta=delta) for each in noises])
    why = next((each.why for each in noises if each.why), "")
    return _unproven(found, why) if why else found


def _unproven(found: Guarantee, why: str) -> Guarantee:
    nothing = dict.fromkeys(found.theorem, f"none: {why}")
    return replace(found, epsilon=None, pure_epsilon=None, theorem=nothing, notes=(why,))


@dataclass
class Noises:
    """What added noise while a message was answered."""

    sent: Vector = field(default_factory=dict)  # by the server, before mods
    came: Sequence[Mapping[str, Any]] = ()  # all records that it sent
    mods: list[Noise] = field(default_factory=list)  # by LocalDpMod, innermost first
    given: Vector = field(default_factory=dict)  # what it clips the changes of
    noisy: Vector = field(default_factory=dict)  # what it made of the reply
    inside: bool = False  # whether code of the app called it, which has the arrays without noise as well
    drawn: Drawn = field(default_factory=Drawn)
    # of Opacus: (optimiser, its noise multiplier, the rate that its accountant is given) -> steps
    steps: Counter[tuple[Any, float, float]] = field(default_factory=Counter)
    accountants: set[Any] = field(default_factory=set)  # of these
    stated: list[Stated] = field(default_factory=list)  # by these
    uniform: bool = False  # whether an engine was made whose loader does not draw Poisson batches
    plain: str = ""  # the type of an optimiser that took a step with none of Opacus around it
    seeded: bool = False  # whether torch's generator had a seed of the app's own in any of these steps
    summed: bool = False  # whether the gradients of several batches were added up in a step
    reordered: bool = False  # whether sequences were packed in another order than that of their batch
    _seed: int = field(default_factory=torch.initial_seed)

    def local(self, reply: Message | None) -> tuple[Noise, ...]:
        """The noise of LocalDpMod in what leaves, before and after which an app's own mods may change arrays."""
        doubt = self.beside(reply) or self._around(parameters_of(reply) if reply else {}) if self.mods else ""
        return tuple(replace(each, doubt=each.doubt or doubt) for each in self.mods)

    def beside(self, reply: Message | None) -> str:
        """Which arrays, bytes, lists or long texts leave as well, unless the server sent them; empty: none."""
        if reply is None or reply.has_error():
            return ""
        covered = (parameters_in(reply), MASKED)
        for name, record in reply.content.items():
            for key, value in record.items() if name not in covered else ():
                whole = isinstance(value, Array | bytes) or (isinstance(value, list) and len(value) > 1)
                whole = whole or (isinstance(value, str) and len(value) > STATUS)
                if whole and all(came.get(key) != value for came in self.came):
                    return f"{name}.{key} leaves as well, and no noise in it is known"
        return ""

    def _around(self, reply: Vector) -> str:
        """Why LocalDpMod's noise proves nothing of what leaves; empty: nothing is known against it."""
        for name, value in self.given.items():
            if not _is_same(value, self.sent.get(name)):
                return f"LocalDpMod clips what changes {name}, which is not as the server sent it"
        for name, value in reply.items():
            if name not in self.noisy and not _is_same(value, self.sent.get(name)):
                return f"LocalDpMod was not given {name}, which leaves as well"
        for name, value in self.noisy.items() if self.inside else ():  # masked or encrypted, it cannot be compared
            if not _is_same(value, reply.get(name)):
                return f"{name} leaves otherwise than LocalDpMod returned it"
        return ""

    @property
    def private(self) -> list[Any]:
        """Optimisers of Opacus that took steps, each once."""
        return [*dict.fromkeys(optimizer for optimizer, _, _ in self.steps)]

    def engines(self, reply: Message | None) -> tuple[Noise, ...]:
        """The noise of Opacus: of Poisson batches, if they are, at the rate that its accountant was given."""
        drawn, doubt = self.drawn, self.doubt or self.beside(reply)
        delta = min((each.delta for each in self.stated if 0 < each.delta < 1), default=DELTA)
        found = []
        for (optimizer, sigma, rate), steps in self.steps.items():
            bounds = optimizer.max_grad_norm
            clip_norm = sqrt(sum(each**2 for each in bounds)) if isinstance(bounds, list) else float(bounds)
            sampled: dict[str, Any] = {"sampling": "fixed", "participations": drawn.uses(steps)}
            if drawn.poisson and not self.uniform:
                rate = min(max(drawn.rate(rate), SMALLEST_RATE), 1.0)
                sampled = {"sampling": "poisson", "rate": rate, "participations": steps, "adjacency": "zero-out"}
            noise = observed_noise("Opacus", sigma, delta, clip_norm, doubt, **sampled)
            found.append(replace(noise, steps=steps))
        return tuple(found)

    @property
    def doubt(self) -> str:
        """Why nothing is proven of Opacus' noise, whatever its multiplier; empty: nothing is known against it."""
        if self.plain:
            return f"{self.plain} took steps without noise as well: if on the data, what noise covers depends on them"
        if any(hasattr(each, "unclipped_num_std") for each in self.private):
            return "Opacus' adaptive clipping divides a noisy count by the exact size of the batch"
        if self.summed and self.drawn.poisson:
            return "a step adds up the gradients of several Poisson batches, and an example may be in more than one"
        if self.reordered:
            return "Opacus gives sequences that were packed in order of their lengths each other's gradients"
        if own := next(filter(None, map(_own_method, self.private)), ""):
            return own
        given = any(
            getattr(each, "generator", None) and not getattr(each, "secure_mode", False) for each in self.private
        )
        if given or self.seeded:
            return SEEDED.format("torch")
        return ""

    def packed(self, made: PackedSequence) -> None:
        """Note sequences that were packed."""
        order = made.sorted_indices
        self.reordered |= order is not None and bool((order.diff() < 0).any())

    def stepped(self, optimizer: Optimizer) -> None:
        """Note a step, and the optimiser of Opacus around it."""
        self.drawn.stepped()
        around = (frame.f_locals.get("self") for frame in frames())
        kinds = (each for each in around if getattr(each, "original_optimizer", None) is optimizer)
        private = next((each for each in kinds if hasattr(each, "noise_multiplier")), None)
        if private is None:
            self.plain = self.plain or type(optimizer).__name__
        else:
            hook = getattr(private, "step_hook", None)
            told = getclosurevars(hook).nonlocals if isfunction(hook) else {}
            self.steps[private, float(private.noise_multiplier), float(told.get("sample_rate", 1.0))] += 1
            kept = (getattr(parameter, "grad_sample", None) for parameter in private.params)
            self.summed |= any(isinstance(each, list) and len(each) > 1 for each in kept)
            self.accountants |= {told["self"]} if "self" in told else set()
            # Unseeded, torch begins with 64 random bits; dates and times in milliseconds have fewer.
            self.seeded |= torch.initial_seed() != self._seed or self._seed < 2**45


def _own_method(optimizer: Any) -> str:
    """Which method that clips or adds noise is not Opacus' own; empty: none."""
    for name in ("clip_and_accumulate", "add_noise"):
        method = getattr(optimizer, name, None)
        if method is not None and not str(method.__module__).startswith("opacus."):
            return f"{type(optimizer).__name__} has {name} of its own, for which no theorem is known here"
    return ""


@contextmanager
def hearing_noise(message: Message, sent: Vector) -> Iterator[Noises]:
    """Note which mods and optimisers add noise inside, to parameters that the server sent in a message."""
    noises = Noises(sent, [dict(record) for record in message.content.values()])

    def acted(reply: Message, mod: LocalMod, message: Message, *_: Any) -> None:
        before, after = parameters_of(message), parameters_of(reply)
        if before and after:
            noises.mods.append(_of_local(mod, before, after))
            noises.given |= before
            noises.noisy |= after
            noises.inside |= _called_by_app()

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: noises.stepped(optimizer))
    with until_the_end([hook]), hearing_loaders(noises.drawn), _hearing_engines(noises), ExitStack() as stack:
        stack.enter_context(after_each(PackedSequence, "__new__", lambda made, *_, **__: noises.packed(made)))
        for kind in (LocalDpMod, OlderLocalDpMod):
            stack.enter_context(after_each(kind, "__call__", acted))
        yield noises


@contextmanager
def _hearing_engines(noises: Noises) -> Iterator[None]:
    """Note what engines of Opacus make, and state; nothing where the app has not imported it."""
    if "opacus" not in sys.modules:
        yield
        return
    from opacus import PrivacyEngine
    from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
    from opacus.data_loader import DPDataLoader

    def asked(epsilon: float, accountant: Any, delta: float, *_: Any, **__: Any) -> None:
        if accountant in noises.accountants:
            noises.stated.append(stated_of(epsilon, delta))

    def made(result: tuple[Any, ...], *_: Any, **__: Any) -> None:
        noises.uniform |= not isinstance(result[-1], DPDataLoader)

    def promised(_: Any, __: Any, *, target_epsilon: float, target_delta: float, **___: Any) -> None:
        noises.stated.append(stated_of(target_epsilon, target_delta))

    with ExitStack() as stack:
        for kind in (GaussianAccountant, PRVAccountant, RDPAccountant):
            stack.enter_context(after_each(kind, "get_epsilon", asked))
        stack.enter_context(after_each(PrivacyEngine, "make_private", made))
        stack.enter_context(after_each(PrivacyEngine, "make_private_with_epsilon", promised))
        yield


def is_changed(reply: Vector, held: Mapping[Form, Vector], form: Form) -> bool:
    """Whether a reply is off what the watched network holds by a hundredth of the update or more."""
    off = apart(reply, held.get(form, {}))
    return off is not None and off > SAME * norm(held.get("update", {}))


def noising_outside() -> bool:
    """Whether a LocalDpMod is around this, which noises a reply after it has been seen here."""
    return any(isinstance(frame.f_locals.get("self"), LocalMod) for frame in frames())


def _called_by_app() -> bool:
    """Whether code of an app called a mod, and not Flower in its turn."""
    names = (str(frame.f_globals.get("__name__", "")) for frame in frames())
    return not next(name for name in names if not name.startswith("fedpriv.")).startswith("flwr.")


def _is_same(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and value.shape == other.shape and bool((value.double() == other.double()).all())


def half_doubt(values: Vector) -> str:
    """Why nothing is proven of arrays of half precision; empty: there is none."""
    half = [name for name, value in values.items() if value.dtype in (torch.float16, torch.bfloat16)]
    return f"{half[0]} has half precision, whose rounding moves a clipped update further than its norm" if half else ""


def _cut_doubt(before: Vector, after: Vector) -> str:
    """Why nothing is proven of arrays that hold no real numbers; empty: those that changed have no dimensions."""
    others = ((name, value) for name, value in after.items() if value.ndim and not value.is_floating_point())
    cut = next(((name, value.dtype) for name, value in others if not _is_same(value, before.get(name))), None)
    return "" if cut is None else f"LocalDpMod cuts the noise on {cut[0]} to {str(cut[1]).removeprefix('torch.')}"


def _of_local(mod: LocalMod, before: Vector, after: Vector) -> Noise:
    """The noise of LocalDpMod, as it computes it, in an update that it clips; it leaves arrays without dimensions."""
    told, delta, clip = mod.epsilon, mod.delta, mod.clipping_norm
    fits = told and 0 < delta <= 1
    sigma = mod.sensitivity * sqrt(2 * log(1.25 / delta)) / told / clip if fits else 0.0
    doubt = SEEDED.format("numpy") if numpy_is_seeded() else half_doubt(after) or _cut_doubt(before, after)
    noise = observed_noise("LocalDpMod", sigma, delta, clip, doubt, unit="update")
    notes = []
    if noise.doubt not in (NO_NOISE, UNBOUNDED) and mod.sensitivity < 2 * clip:
        off = gaussian_delta(told, 2 / max(sigma, SIGMA.floor))
        notes.append(
            f"sensitivity = {mod.sensitivity:g}, but two updates of norm {clip:g} differ by up to {2 * clip:g}; at "
            f"epsilon {told:g} delta is {off:.3g} an answer"
        )
    if told > 1:
        notes.append("its formula for the noise is proven only for epsilon below 1")
    scalars = (name for name, value in before.items() if name in after and not value.ndim)  # BatchNorm's counter, too
    left = tuple(name for name in scalars if not after[name].double().equal(before[name].double()))
    return replace(noise, left=left, stated=stated_of(told, delta), notes=tuple(notes))


def others_noise(
    noises: Noises, told: MechanismSettings | None, client: int, answers: int, sent: Vector, steps: int, reply: Message
) -> ReleasedUpdate | None:
    """Return what is known of the noise in a reply, as seen and as ``[tap.noise]`` says; ``None``: none is known.

    The client's earlier answers are taken to have had the same.
    """
    if told is not None:
        return _as_told(noises, told, client, answers, sent, steps, reply)
    scalars = tuple(name for name, value in sent.items() if not value.ndim)
    local = tuple(replace(each, left=tuple(dict.fromkeys((*each.left, *scalars)))) for each in noises.local(reply))
    found = local or noises.engines(reply)
    if not found or any(each.doubt in (NO_NOISE, UNBOUNDED) for each in found):
        return None
    least = min(found, key=lambda each: each.release.noise or 0.0)
    own = {"name": "gaussian", "clip_norm": least.clip_norm, "sigma": least.release.noise}
    own |= {key: getattr(least.release, key) for key in ("unit", "delta", "adjacency")}
    return _released(least, mechanism_settings(own), client, found * answers)


def _as_told(
    noises: Noises, told: MechanismSettings, client: int, answers: int, sent: Vector, steps: int, reply: Message
) -> ReleasedUpdate:
    """The noise that the settings tell; of an example in how many of the steps it may be."""
    uses = 1 if told.unit == "update" else noises.drawn.uses(steps)
    config = told.with_noise(told.noise or 0.0)
    tensors = tuple(value.numel() for value in sent.values())
    plan = Plan(client, Sampling("fixed", 1, 1), max(1, uses), config, tensors, 0)
    doubt = noises.beside(reply) if uses else "no step was seen; tap.local_steps says how many there are"
    noise = Noise("tap.noise", plan.accounted([1]), 0.0, doubt=doubt)
    return _released(noise, config, client, [noise] * answers)


def _released(least: Noise, config: MechanismSettings, client: int, noises: Sequence[Noise]) -> ReleasedUpdate:
    """What is proven of a client's answers, with a ceiling for the least noise in all of them."""
    uses = sum(each.release.participations for each in noises)
    rate = max(each.release.rate for each in noises)
    line = line_of(client, proven(noises), replace(least.release, participations=uses, rate=rate))
    unproven = any(each.why for each in noises)
    return ReleasedUpdate(config, replace(line, ceilings={}) if unproven else line, None, least.by)
