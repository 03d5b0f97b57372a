"""Noise that other libraries add to what leaves a client: recognised while it is added, or told by the settings."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from inspect import getclosurevars
from math import inf, log, sqrt
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp.mod import LocalDpMod
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fedpriv.core.plan import Plan
from fedpriv.data.sampling import Sampling
from fedpriv.flower.arrays import Form
from fedpriv.flower.ledger import line_of
from fedpriv.flower.watch import ReleasedUpdate, after_each
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import until_the_end
from fedpriv.mechanisms import MechanismSettings, mechanism_settings

LocalMod = LocalDpMod | OlderLocalDpMod
"""Flower has two, for older apps and newer ones, with the same noise."""

LEFT_OUT = "LocalDpMod neither clips nor noises arrays without dimensions: {}"
SEEDED = "{}'s generator, which draws the noise, is seeded: whoever knows the seed subtracts the noise"
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


@dataclass
class Noises:
    """What added noise while a message was answered."""

    mods: list[LocalMod] = field(default_factory=list)  # innermost first
    drawn: Drawn = field(default_factory=Drawn)
    private: dict[Any, None] = field(default_factory=dict)  # optimisers of Opacus that took steps, each once
    plain: str = ""  # the type of an optimiser that took a step with none of Opacus around it
    steps: int = 0  # of Opacus
    least: float = inf  # the smallest noise multiplier, which a scheduler may change
    seeded: bool = False  # whether torch's generator had a seed of the app's own in any of these steps
    reordered: bool = False  # whether sequences were packed in another order than that of their batch
    _seed: int = field(default_factory=torch.initial_seed)

    @property
    def doubt(self) -> str:
        """Why nothing is proven of Opacus' noise, whatever its multiplier; empty: nothing is known against it."""
        if self.plain:
            return f"{self.plain} took steps without noise as well: if on the data, what noise covers depends on them"
        if any(hasattr(each, "unclipped_num_std") for each in self.private):
            return "Opacus' adaptive clipping divides a noisy count by the exact size of the batch"
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
        around = (frame.f_locals.get("self") for frame in _frames())
        kinds = (each for each in around if getattr(each, "original_optimizer", None) is optimizer)
        private = next((each for each in kinds if hasattr(each, "noise_multiplier")), None)
        if private is None:
            self.plain = self.plain or type(optimizer).__name__
        else:
            self.private[private] = None
            self.least = min(self.least, float(private.noise_multiplier))
            self.steps += 1
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
def hearing_noise() -> Iterator[Noises]:
    """Note which mods and optimisers add noise inside."""
    noises = Noises()

    def acted(reply: Message, mod: LocalMod, *_: Any) -> None:
        if not reply.has_error():
            noises.mods.append(mod)

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: noises.stepped(optimizer))
    with until_the_end([hook]), hearing_loaders(noises.drawn), ExitStack() as stack:
        stack.enter_context(after_each(PackedSequence, "__new__", lambda made, *_, **__: noises.packed(made)))
        for kind in (LocalDpMod, OlderLocalDpMod):
            stack.enter_context(after_each(kind, "__call__", acted))
        yield noises


def is_changed(reply: Vector, held: Mapping[Form, Vector], form: Form) -> bool:
    """Whether a reply is off what the watched network holds by a hundredth of the update or more."""
    own, update = held.get(form, {}), held.get("update", {})
    if not own or any(name not in reply or reply[name].shape != value.shape for name, value in own.items()):
        return False
    off = sum(float((reply[name].double() - value.double()).square().sum()) for name, value in own.items())
    return off > 1e-4 * sum(float(value.double().square().sum()) for value in update.values())


def noising_outside() -> bool:
    """Whether a LocalDpMod is around this, which noises a reply after it has been seen here."""
    return any(isinstance(frame.f_locals.get("self"), LocalMod) for frame in _frames())


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def others_noise(
    noises: Noises, told: MechanismSettings | None, client: int, answers: int, sent: Vector, batch: int, steps: int
) -> ReleasedUpdate | None:
    """Return what is known of the noise in a reply, as seen and as ``[tap.noise]`` says; ``None``: none is known."""
    tensors = tuple(value.numel() for value in sent.values())
    if told is not None:
        uses = 1 if told.unit == "update" else noises.drawn.uses(steps)
        released = _released("tap.noise", told, client, answers, tensors, _each_time(batch), uses)
        return released if uses else _unproven(released, "no step was seen; tap.local_steps says how many there are")
    if noises.mods:
        return _of_local(noises.mods[-1], client, answers, sent)
    if not noises.private or not noises.least:
        return None
    released = _of_opacus(noises, client, answers, tensors)
    return _unproven(released, noises.doubt) if noises.doubt else released


def half_doubt(values: Vector) -> str:
    """Why nothing is proven of arrays of half precision; empty: there is none."""
    half = [name for name, value in values.items() if value.dtype in (torch.float16, torch.bfloat16)]
    return f"{half[0]} has half precision, whose rounding moves a clipped update further than its norm" if half else ""


def doubt_of_local(update: Vector) -> str:
    """Why nothing is proven of LocalDpMod's noise on an update; empty: nothing is known against it."""
    return SEEDED.format("numpy") if numpy_is_seeded() else half_doubt(update)


def _of_local(mod: LocalMod, client: int, answers: int, sent: Vector) -> ReleasedUpdate | None:
    """The noise of LocalDpMod, as it computes it; nothing is proven where it leaves arrays out."""
    deviation = mod.sensitivity * sqrt(2 * log(1.25 / mod.delta)) / mod.epsilon if mod.epsilon and mod.delta else 0.0
    if not deviation:
        return None
    own = {"name": "gaussian", "unit": "update", "clip_norm": mod.clipping_norm, "delta": mod.delta}
    config = mechanism_settings({**own, "sigma": deviation / mod.clipping_norm})
    tensors = tuple(value.numel() for value in sent.values())
    released = _released("LocalDpMod", config, client, answers, tensors, _each_time(1), 1)
    scalars = [name for name, value in sent.items() if not value.ndim]
    why = LEFT_OUT.format(", ".join(scalars[:4])) if scalars else doubt_of_local(sent)
    return _unproven(released, why) if why else released


def _unproven(released: ReleasedUpdate, why: str) -> ReleasedUpdate:
    """The same noise, of which nothing is proven."""
    nothing = dict.fromkeys(released.line.theorem, f"none: {why}")
    line = replace(released.line, epsilon=None, pure_epsilon=None, theorem=nothing, ceilings={}, notes=(why,))
    return replace(released, line=line)


def _of_opacus(noises: Noises, client: int, answers: int, tensors: tuple[int, ...]) -> ReleasedUpdate:
    """The noise of Opacus' optimisers; Poisson batches, if they are, at the rate that its accountant was given."""
    drawn = (_batches(each, noises.drawn) for each in noises.private)
    size, examples = min(drawn, key=lambda each: each[1] / each[0])
    bounds = next(iter(noises.private)).max_grad_norm
    clip_norm = sqrt(sum(each**2 for each in bounds)) if isinstance(bounds, list) else bounds
    own = {"name": "gaussian", "clip_norm": float(clip_norm), "sigma": noises.least}
    if not noises.drawn.poisson:
        steps = noises.drawn.uses(noises.steps)
        return _released("Opacus", mechanism_settings(own), client, answers, tensors, _each_time(size), steps)
    config = mechanism_settings({**own, "adjacency": "zero-out"})
    return _released("Opacus", config, client, answers, tensors, Sampling("poisson", size, examples), noises.steps)


def _batches(optimizer: Any, drawn: Drawn) -> tuple[int, int]:
    """The size of batches that an optimiser of Opacus expects, and of how many examples they are drawn."""
    size = max(1, int(optimizer.expected_batch_size))
    known = getclosurevars(optimizer.step_hook).nonlocals if optimizer.step_hook is not None else {}
    rate = known.get("sample_rate")
    return size, max(size, int(size / drawn.rate(rate) + 1e-9)) if rate else size


def _each_time(size: int) -> Sampling:
    """Batches of which any may have the example; what counts is in how many it may be."""
    return Sampling("fixed", size, size)


def _released(
    by: str,
    config: MechanismSettings,
    client: int,
    answers: int,
    tensors: tuple[int, ...],
    sampling: Sampling,
    steps: int,
) -> ReleasedUpdate:
    noise = config.noise if config.noise is not None else config.nominal_noise()
    plan = Plan(client, sampling, max(1, steps), config.with_noise(noise), tensors, 0)
    return ReleasedUpdate(plan.config, line_of(plan, answers), None, by)
