"""The network of an app in the form in which attacks run networks, and a replay of its training.

An attack on an app is an attack on our own model of its training: network, loss, optimiser, batches. So before a
result counts, the training that was watched is repeated with that model, from the same parameters on the very same
batches; where another upload comes out, a failure would show nothing. The batches are the referee's: of the comparison
an attack learns nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from typing_extensions import override

from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.own_model import named_vector
from fedpriv.attacks.simulation import Mismatch
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.federated import example_losses
from fedpriv.core.names import PAD
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.world import trained_parameters
from fedpriv.data.tokenizers import next_targets
from fedpriv.flower.arrays import norm
from fedpriv.flower.folder import Exchange, TrainedOn
from fedpriv.flower.watch import OWN_LOSS, Task
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied
from fedpriv.mechanisms.filters import FilterSettings, recognised
from fedpriv.models.machinery.logits import LogitsOf, logits_in

OFF = 0.02
"""Share of its length by which a replay may differ: far above rounding, far below another network or loss."""

_ROUNDING = 2e-7  # of the parameters' length, for a small update of float32 numbers

_ANOTHER = (
    "the training that was watched is another than ours: from the same batches ours makes an upload that is off by "
    "{:.0%} of its length (the app's own loss, another schedule, a proximal term, noise or clipping of another library)"
)
_DRAWS = "the network draws random numbers while it trains (such as dropout), which no attack knows"

Loss = Callable[[Tensor, Tensor], Tensor]


class Learner(nn.Module):
    """A network with what it learns: examples in the form of attacks -> logits.

    Of numbers, or of the example itself, the network's own loss is the first of two "logits": attacks then minimise it
    as it is. Its target, where it is no part of the example, is the last numbers of it.
    """

    def __init__(self, network: nn.Module, exchange: Exchange, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self._parts, self._task, self._loss = exchange.parts, exchange.task, loss
        self._example, self._target = exchange.example, exchange.target
        self._tokens = exchange.is_text

    @override
    def forward(self, examples: Tensor) -> Tensor:
        """Return logits (B, classes), or of tokens predicted (B, T, V)."""
        size = math.prod(self._example)
        flat = examples.flatten(1)
        given = examples if self._tokens else flat[:, :size].reshape(len(flat), *self._example)
        for part in self._parts or ("",):
            given = logits_in(self.network.get_submodule(part)(given))
        if self._task == "one logit":
            return torch.cat([torch.zeros_like(given.flatten(1)), given.flatten(1)], dim=1)
        if self._task == "one probability":
            sure = torch.cat([1 - given.flatten(1), given.flatten(1)], dim=1)
            return sure.clamp_min(torch.finfo(sure.dtype).tiny).log()
        if self._task not in OWN_LOSS:
            return given
        target = flat[:, size:] if self._task == "values" else flat[:, :size]
        each = vmap(self._loss_of_one)(given, target.reshape(len(flat), *self._target))
        return torch.stack([each, torch.zeros_like(each)], dim=1)

    def _loss_of_one(self, output: Tensor, target: Tensor) -> Tensor:
        shape = target.shape if output.numel() == target.numel() else output.shape
        return self._loss(output.reshape(1, *shape), target[None])


def own_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of the losses that a :class:`Learner` of numbers has computed itself."""
    return logits[:, 0].mean()


def learner_of(network: nn.Module, exchange: Exchange, loss: Loss) -> Learner:
    """Return the network as attacks run it: of tokens with the mask that they imply."""
    own = LogitsOf(network) if exchange.is_text and not exchange.parts else network
    learner = Learner(own, exchange, loss)
    learner.train()
    return learner


def as_learned(observation: Observation, learner: Learner, exchange: Exchange) -> Observation:
    """Return an observation whose arrays have the names of the learner's parameters."""
    masked = isinstance(learner.network, LogitsOf)
    prefix = "network.network." if masked else "network."
    inner = learner.get_submodule(prefix[:-1])

    def renamed(values: Vector, what: str) -> Vector:
        known = {exchange.names[name]: value for name, value in values.items() if name in exchange.names}
        named = known if len(known) == len(values) else named_vector(values, inner, what)
        return {f"{prefix}{name}": value for name, value in named.items()}

    return replace(
        observation,
        parameters=renamed(observation.parameters, "parameters"),
        upload=renamed(observation.upload, "upload"),
    )


@dataclass(frozen=True, eq=False)
class Replay:
    """What repeating a training on its batches says."""

    doubt: Mismatch | None = None  # why an attack's failure would show nothing; `None`: it counts
    longer: str = ""  # of an upload that has not the length of ours
    made: Vector | None = None  # our update; `None`: nothing was repeated


def unrepeated(why: str) -> Replay:
    """What a training that cannot be repeated says of attacks: a failure would show nothing."""
    return Replay(Mismatch("wrong", f"the training cannot be repeated: {why}"))


def filtered(upload: Vector, public: PublicSettings, made: Vector | None) -> FilterSettings | None:
    """Return the filter in an app's own code that an upload looks like, unless its training makes such numbers.

    First steps of Adam have one size, and where units are dead they are zero.
    """
    seen = recognised(upload)
    if seen is None or (made is None and public.optimizer != "sgd"):
        return None
    plain = None if made is None else recognised(made)
    return None if plain is not None and plain.name == seen.name else seen


def replayed(learner: Learner, observation: Observation, known: TrainedOn, task: Task | None) -> Replay:
    """Repeat a training on its batches."""
    before, wanted = observation.parameters, known.after or {}
    sent = observation.upload
    if wanted:
        sent = {name: value - before[name] for name, value in wanted.items()}
    try:
        made, drew = _trained(learner, before, observation.settings, known, task)
    except Exception as error:  # noqa: BLE001 - whatever the app's own network raises becomes the reason
        return unrepeated(reason_of(error))
    made = {name: made[name] for name in sent}
    replay = Replay(made=made)
    if (seen := filtered(sent, observation.settings, made)) is not None:
        made = seen.mechanism().expected(made)
    pairs = [(made[name].double().flatten(), value.double().flatten()) for name, value in sent.items()]
    ours, theirs = (torch.cat(values) for values in zip(*pairs, strict=True))
    scale = float((ours @ theirs) / (ours @ ours).clamp_min(1e-300))
    off, length = max(0.0, float((scale * ours - theirs).norm()) - _ROUNDING * norm(before)), float(theirs.norm())
    if length and not off <= OFF * length:
        return replace(replay, doubt=Mismatch("wrong", _ANOTHER.format(off / length)))
    longer = f"the upload has {scale:.2g} times the length of an unclipped one" if abs(scale - 1) > OFF else ""
    return replace(replay, doubt=Mismatch("random", _DRAWS) if drew else None, longer=longer)


def _trained(
    learner: nn.Module, before: Vector, public: PublicSettings, known: TrainedOn, task: Task | None
) -> tuple[Vector, bool]:
    """What our model of the training changes, and whether random numbers were drawn."""
    model = copied(learner).train()
    own = trained_parameters(model)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(before[name])
    optimizer = make_optimizer(public.optimizer, public.learning_rate, public.momentum)
    first, drew = None, False
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for group in known.steps(public.local_steps):
            total = sum(len(batch.examples) for batch in group)
            gradient = {name: torch.zeros_like(value) for name, value in own.items()}
            for batch in group:
                if batch.state is not None:
                    torch.set_rng_state(batch.state)
                start = torch.get_rng_state()
                loss = _loss(model, batch.examples, batch.target, task)
                drew = drew or not torch.equal(start, torch.get_rng_state())
                slopes = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
                share = len(batch.examples) / total
                gradient = {
                    name: value + share * slope for (name, value), slope in zip(gradient.items(), slopes, strict=True)
                }
            first = first or gradient
            if public.algorithm == "fedsgd":
                return gradient, drew
            optimizer.step(own, gradient)
    return {name: value.detach() - before[name] for name, value in own.items()}, drew


def _loss(model: nn.Module, examples: Tensor, target: Tensor | None, task: Task | None) -> Tensor:
    if task == "next":
        return example_losses(model(examples), next_targets(F.pad(examples, (0, 1), value=PAD))).mean()
    if task == "itself":
        return own_loss(model(examples), examples)
    if target is None or len(target) != len(examples):
        raise InputError("not all targets were seen")
    if task == "values":
        joined = torch.cat([examples.flatten(1), target.flatten(1) if target.ndim > 1 else target[:, None]], dim=1)
        return own_loss(model(joined), joined)
    return F.cross_entropy(model(examples), target.flatten().long())
