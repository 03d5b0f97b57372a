"""Check what clients send before it is aggregated.

Whoever can reach the server can send it anything. A reply is an upload if it holds the model's tensors, finite and no
longer than an honest client's could be, and says as many examples as the client is known to hold; else it is refused,
and the reason is kept.
"""

import math
import re
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor

from fedpriv.core.algorithm import ModelRelease, algorithm_of
from fedpriv.core.errors import printable
from fedpriv.core.optimizers import ADAM_BETAS, momentum_weights
from fedpriv.core.plan import Plan
from fedpriv.core.records import Failure
from fedpriv.core.wire import record_in, unpack
from fedpriv.core.world import State, World
from fedpriv.gradients import Vector

# How often an honest upload may be taken for too long.
_TAIL = 1e-12
# Uploads are computed in float32, bounds are not.
_ROUNDING = 1.01
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Upload:
    """What one client sent in one round."""

    client: int  # its partition
    examples: int  # how many examples it says it holds
    state: State  # the upload proper under `parameters`, the change of the running statistics under `buffers`
    # how often it holds each class after it changed its labels; `None`: it was not asked
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Allowed:
    """What one client may send."""

    examples: int  # the number of examples that it holds, as the ledger accounts for
    norm: float  # the largest Euclidean norm of the upload; infinite where nothing bounds it
    statistics: bool  # whether running statistics may change; under a mechanism none leaves a client
    classes: int | None = None  # of how many classes it is to say how often it holds them; `None`: of none


def allowed_upload(world: World, client: int) -> Allowed:
    """Return what a client may send.

    The norm is bounded by ``federation.max_update_norm`` where that is set, and by what the mechanism lets out: clipped
    gradients and noise of a known law, whose norm an honest upload exceeds once in 10^12 rounds.
    """
    unprotected = not world.experiment.mechanism.protects
    most = world.experiment.federation.max_update_norm or math.inf
    classes = told_classes(world)
    plan = world.plans[client]
    return Allowed(plan.sampling.examples, min(most, _honest_norm(world, plan)), unprotected, classes)


def told_classes(world: World) -> int | None:
    """Of how many classes clients say how often they hold each; ``None``: they say nothing."""
    return world.dataset.classes if world.experiment.counts_classes else None


def _honest_norm(world: World, plan: Plan) -> float:
    """The norm that an upload of a client who follows the protocol stays below."""
    experiment = world.experiment
    training, algorithm = experiment.training, algorithm_of(experiment)
    if not plan.config.protects:
        bound = math.inf
    elif isinstance(algorithm, ModelRelease):
        bound = algorithm.longest_model(world, plan, _TAIL) + norm(world.initial.parameters)
    elif experiment.federation.algorithm == "fedsgd" or plan.config.protects_updates:
        bound = plan.norm_bound(_TAIL)
    elif training.optimizer == "sgd":
        steps = plan.steps_per_round
        times = sum(momentum_weights(steps, training.momentum))
        bound = training.learning_rate * times * plan.norm_bound(_TAIL / steps)
    else:
        bound = training.learning_rate * plan.steps_per_round * _ADAM_STEP * math.sqrt(sum(plan.tensors))
    return _ROUNDING * bound


# A step of Adam (beta a, b) moves a coordinate by at most this times the learning rate, whatever the gradients:
# Cauchy-Schwarz on m_t = (1 - a) sum a^i g_i and v_t = (1 - b) sum b^i g_i^2.
_A, _B = ADAM_BETAS
_ADAM_STEP = (1 - _A) / math.sqrt(1 - _B) / math.sqrt(1 - _A**2 / _B)


def read_upload(reply: Message, client: int, like: State, allowed: Allowed) -> Upload | Failure:
    """Check a reply and return its upload, or the reason why it is refused."""
    if reply.has_error():
        return refusal(client, raised(reply))
    content = reply.content
    if not isinstance(sent := content.get("upload"), ArrayRecord):
        return refusal(client, "sent no upload")
    try:
        buffers = record_in(content, "buffers", ArrayRecord) if "buffers" in content else ArrayRecord()
        state = State(unpack(sent), unpack(buffers))
        sender, examples = number_in(reply, "partition"), number_in(reply, "examples")
        labels = None if allowed.classes is None else _label_counts(reply)
    except (KeyError, ValueError, TypeError) as error:
        return refusal(client, f"sent an upload that cannot be read: {error}")
    if sender != client:
        return refusal(client, f"sent an upload of client {sender}")
    problem = (
        _misfit(state.parameters, like.parameters)
        or _misfit(state.buffers, like.buffers)
        or _excess(state, examples, allowed)
        or _miscounted(labels, allowed)
    )
    if problem:
        return refusal(client, problem)
    ordered = State(_ordered(state.parameters, like.parameters), _ordered(state.buffers, like.buffers))
    return Upload(client, examples, ordered, labels)


def raised(reply: Message) -> str:
    """Say what a client raised instead of an answer."""
    return f"raised an error: {_last_line(reply.error.reason or '')}"


def refusal(client: int, reason: str) -> Failure:
    """Name a client and why it is left out, in one printable line: some of the words are the client's own."""
    line = " ".join(printable(reason).split())
    return Failure(client, line if len(line) <= _LONGEST_REASON else f"{line[: _LONGEST_REASON - 4]} ...")


def number_in(reply: Message, key: str) -> int:
    """Return one of the whole numbers that a client says of itself."""
    value = record_in(reply.content, "client", MetricRecord)[key]
    if type(value) is not int:
        raise TypeError(f"{key} is {value!r}, expected a whole number")
    return value


def _label_counts(reply: Message) -> tuple[int, ...]:
    """How often a client says that it holds each class."""
    value = record_in(reply.content, "client", MetricRecord)["labels"]
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise TypeError(f"labels is {value!r}, expected whole numbers")
    return tuple(int(number) for number in value)


def norm(vector: Vector) -> float:
    """The Euclidean norm, in float64: the square of a huge finite number does not fit in float32."""
    return math.hypot(*(float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in vector.values()))


def _misfit(given: Vector, expected: Vector) -> str | None:
    """Say what is wrong with the tensors of an upload, if anything."""
    if missing := expected.keys() - given.keys():
        return f"left out {min(missing)}"
    if unknown := given.keys() - expected.keys():
        return f"sent {min(unknown)}, which the model does not have"
    for name, want in expected.items():
        value = given[name]
        if value.shape != want.shape:
            return f"sent {name} of shape {tuple(value.shape)}, expected {tuple(want.shape)}"
        if value.dtype != want.dtype:
            return f"sent {name} as {value.dtype}, expected {want.dtype}"
        if value.is_floating_point() and not _is_finite(value):
            return f"sent NaN or infinity in {name}"
    return None


def _is_finite(value: Tensor) -> bool:
    """Whether all numbers are; a sum of squares is the quickest look, and infinite for huge finite numbers, too."""
    flat = value.flatten()
    return math.isfinite(torch.dot(flat, flat)) or bool(flat.isfinite().all())


def _excess(state: State, examples: int, allowed: Allowed) -> str | None:
    """Say what is out of range in an upload whose tensors fit, if anything."""
    if examples != allowed.examples:
        return f"says that it holds {examples} examples; it holds {allowed.examples}"
    # Masked uploads are whole numbers, which have no norm here; they are allowed any.
    if allowed.norm < math.inf and (length := norm(state.parameters)) > allowed.norm:
        return f"sent an upload of norm {length:.3g}; at most {allowed.norm:.3g} is allowed"
    if not allowed.statistics and any(bool(value.any()) for value in state.buffers.values()):
        return "sent running statistics, which no mechanism protects"
    return None


def _miscounted(labels: tuple[int, ...] | None, allowed: Allowed) -> str | None:
    """Say what is wrong with counts of labels, if anything."""
    if labels is None:
        return None
    if len(labels) != allowed.classes or min(labels) < 0 or sum(labels) != allowed.examples:
        return f"counts {sum(labels)} labels in {len(labels)} classes; it holds {allowed.examples} in {allowed.classes}"
    return None


def _ordered(given: Vector, like: Vector) -> Vector:
    return {name: given[name] for name in like}


def _last_line(reason: str) -> str:
    """What an engine says of an exception, without tracebacks: Ray wraps it in two coloured ones."""
    plain = _COLOUR.sub("", reason)
    cause, wrapped, _ = plain.partition("\n\nThe above exception was the direct cause")
    lines = (cause if wrapped else plain).strip().splitlines() or ["no reason given"]
    return lines[-1].strip()
