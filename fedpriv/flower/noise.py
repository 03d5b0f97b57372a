"""Noise that other libraries add to what leaves a client: recognised while it is added, or told by the settings."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from inspect import getclosurevars
from math import inf, log, sqrt
from typing import Any

from flwr.app import Message
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp.mod import LocalDpMod
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

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


@dataclass
class Drawn:
    """How batches came about while a message was answered, by the passes over torch's loaders that began."""

    poisson: bool = False  # by a sampler of Opacus
    passes: int = 0  # over other loaders
    repeats: bool = False  # whether one of these may give an example twice in a pass

    def began(self, loader: DataLoader[Any]) -> None:
        """Note a pass over a loader."""
        batches, order = loader.batch_sampler, loader.sampler
        if any(hasattr(each, "sample_rate") for each in (batches, getattr(batches, "sampler", None))):
            self.poisson = True
            return
        once = isinstance(order, SequentialSampler) or (
            isinstance(order, RandomSampler) and not order.replacement and order.num_samples <= len(order.data_source)
        )
        self.passes += 1
        self.repeats |= not (once and type(batches) in (BatchSampler, type(None)))

    def uses(self, steps: int) -> int:
        """In how many of so many steps one example may have been."""
        return steps if self.poisson or self.repeats or not self.passes else min(steps, self.passes)


def hearing_loaders(drawn: Drawn) -> AbstractContextManager[None]:
    """Note passes over loaders inside."""
    return after_each(DataLoader, "__iter__", lambda _, loader: drawn.began(loader))


@dataclass
class Noises:
    """What added noise while a message was answered."""

    mods: list[LocalMod] = field(default_factory=list)  # innermost first
    drawn: Drawn = field(default_factory=Drawn)
    optimizer: Any = None  # of Opacus
    steps: int = 0  # of it
    least: float = inf  # the smallest of its noise multipliers, which a scheduler may change

    def stepped(self, optimizer: Any) -> None:
        """Note the optimiser of Opacus around one that steps."""
        if self.optimizer is None and self.steps == 0:
            around = (frame.f_locals.get("self") for frame in _frames())
            kinds = (each for each in around if getattr(each, "original_optimizer", None) is optimizer)
            self.optimizer = next((each for each in kinds if hasattr(each, "noise_multiplier")), None)
        if self.optimizer is not None:
            self.least = min(self.least, float(self.optimizer.noise_multiplier))
        self.steps += 1


@contextmanager
def hearing_noise() -> Iterator[Noises]:
    """Note which mods and optimisers add noise inside."""
    noises = Noises()

    def acted(reply: Message, mod: LocalMod, *_: Any) -> None:
        if not reply.has_error():
            noises.mods.append(mod)

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: noises.stepped(optimizer))
    with until_the_end([hook]), hearing_loaders(noises.drawn), ExitStack() as stack:
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
        return _released("tap.noise", told, client, answers, tensors, _each_time(batch), uses)
    if noises.mods:
        return _of_local(noises.mods[-1], client, answers, sent)
    if noises.optimizer is None or not noises.least:
        return None
    return _of_opacus(noises, client, answers, tensors)


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
    if not scalars:
        return released
    why = LEFT_OUT.format(", ".join(scalars[:4]))
    nothing = dict.fromkeys(released.line.theorem, f"none: {why}")
    line = replace(released.line, epsilon=None, pure_epsilon=None, theorem=nothing, ceilings={}, notes=(why,))
    return replace(released, line=line)


def _of_opacus(noises: Noises, client: int, answers: int, tensors: tuple[int, ...]) -> ReleasedUpdate:
    """The noise of Opacus' optimiser; Poisson batches, if they are, at the rate that its accountant was given."""
    optimizer, size = noises.optimizer, max(1, int(noises.optimizer.expected_batch_size))
    known = getclosurevars(optimizer.step_hook).nonlocals if optimizer.step_hook is not None else {}
    examples = max(size, int(size / known["sample_rate"] + 1e-9)) if known.get("sample_rate") else size
    bounds = optimizer.max_grad_norm
    clip_norm = sqrt(sum(each**2 for each in bounds)) if isinstance(bounds, list) else bounds
    own = {"name": "gaussian", "clip_norm": float(clip_norm), "sigma": noises.least}
    if not noises.drawn.poisson:
        steps = noises.drawn.uses(noises.steps)
        return _released("Opacus", mechanism_settings(own), client, answers, tensors, _each_time(size), steps)
    config = mechanism_settings({**own, "adjacency": "zero-out"})
    return _released("Opacus", config, client, answers, tensors, Sampling("poisson", size, examples), noises.steps)


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
