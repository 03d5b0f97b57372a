"""Check on random data that an attack's simulation of a client computes what the client computes.

Where the simulation is that of another network, an attack fails for that reason alone. So before a failure counts, the
simulation has to reproduce an unprotected upload of the clients' own code, on random examples.

- It does: the attack's result counts, be it a success or a failure.
- The clients' network draws random numbers (dropout, stochastic depth, noise): only what is recovered counts.
- It computes something else: an attack that searches by simulation is not made. Of one that reads examples off the
  upload (:attr:`AttackSettings.simulates` is false), only what it recovers counts.
- It reproduces the first local step and not those after it (tag, lamp): only what is recovered counts.
"""

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import (
    Loss,
    Network,
    soft_cross_entropy,
    twice_differentiable,
)
from fedpriv.attacks.reconstruction.upload_model import Heard, Victim, local_optimizer, prepare_victims, uploads_of
from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.errors import InputError, cut, reason_of
from fedpriv.core.names import END, PAD, START
from fedpriv.core.randomness import torch_stream
from fedpriv.data.tokenizers import next_targets
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied
from fedpriv.mechanisms import mechanism_settings

EXAMPLES, STEPS = 2, 3  # of an upload that is simulated, at most: what differs does so in few examples, too
DRAWS = 16  # further uploads of a network that drew random numbers and computed the same
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Of the length of the client's upload: far above rounding (1e-12 and 1e-5), far below another network (above 0.05)."""

RANDOM = (
    "the network draws random numbers while clients train (such as dropout, stochastic depth or noise); attacks cannot "
    "know them and run without: their successes count, but their failure is no evidence of privacy"
)


@dataclass(frozen=True, eq=False)
class Sent:
    """What a client would upload, and whether a generator of random numbers moved while it was computed."""

    upload: Vector
    drew: bool


Client = Callable[[Vector, Sequence[tuple[Tensor, Tensor]], int], Sent]
"""The clients' own code, without a mechanism: (parameters, batches, number of the draw) -> what is uploaded."""


@dataclass(frozen=True, eq=False)
class SimulationTrial:
    """One random batch, and what a client would upload for it."""

    model: nn.Module  # the network, in the type of the trial; not to be changed
    loss: Loss  # what the clients minimise
    observation: Observation  # the client's upload; there is no mechanism
    examples: Tensor  # normalised (B, C, H, W), or int64 (B, L), the last token a target where the next is predicted
    labels: Tensor  # int64 (B,)

    def victim(self, names: Sequence[str]) -> Victim:
        """Return the upload in gradient space; ``names``: of the trained parameters, in order."""
        (victim,) = prepare_victims([self.observation], names, self.labels.device)
        return victim


@dataclass(frozen=True, eq=False)
class _Tried:
    """A trial, the batches that the client was given, and whether its network drew random numbers."""

    trial: SimulationTrial
    batches: Sequence[tuple[Tensor, Tensor]]
    drew: bool


Simulation = Callable[[SimulationTrial], Vector]
"""What an attack takes for the client's upload, in gradient space; parameters that it does not simulate are missing."""


@dataclass(frozen=True)
class Mismatch:
    """Why an attack's simulation does not reproduce an upload."""

    kind: Literal["random", "wrong", "steps"]  # steps: right for one local step, not for those after it
    reason: str  # what does not fit, in one line
    traceback: str = ""  # of an unexpected error on the way; empty: there was none

    def bars(self, attack: type[AttackSettings]) -> bool:
        """Whether the attack is not to be made at all."""
        return self.kind == "wrong" and attack.simulates

    @property
    def text(self) -> str:
        """What is said of an attack that is not to be made."""
        return self.reason if self.kind == "random" else f"not attacked: {self.reason}"

    @property
    def of_failure(self) -> str:
        """Why a result in which nothing was recovered is none."""
        return f"not attacked: it recovered nothing above a guess; {self.reason}"


class SimulationCheck:
    """Compares simulations with a client; each only once for the same parameters."""

    def __init__(self, client: Client, model: nn.Module, seed: int, loss: Loss = soft_cross_entropy) -> None:
        self._client = client
        self._model = model
        self._seed = seed
        self._loss = loss
        self._known: list[tuple[Simulation, Vector, PublicSettings, Mismatch | None]] = []
        self._latest: tuple[torch.dtype, Vector, _Tried] | None = None  # models are large: no more are kept

    def mismatch(self, simulation: Simulation, heard: Heard) -> Mismatch | None:
        """Say why an attack's failure on an upload would show nothing; ``None``: it would count."""
        found = (self.at(simulation, each.parameters, each.settings) for each in uploads_of(heard))
        return next((mismatch for mismatch in found if mismatch is not None), None)

    def at(self, simulation: Simulation, parameters: Vector, settings: PublicSettings) -> Mismatch | None:
        """Say the same of uploads from these parameters, which need not have been observed."""
        tried = _tried(settings)
        for known, before, public, mismatch in self._known:
            if known is simulation and public == tried and _same(before, parameters):
                return mismatch
        mismatch = self._compared(simulation, parameters, replace(tried, local_steps=1))
        if mismatch is None and tried.local_steps > 1:
            later = self._compared(simulation, parameters, tried)
            mismatch = later if later is None or later.kind == "random" else replace(later, kind="steps")
        self._known.append((simulation, parameters, tried, mismatch))
        return mismatch

    def _compared(self, simulation: Simulation, parameters: Vector, settings: PublicSettings) -> Mismatch | None:
        """In float64, where Adam's steps do not enlarge rounding; in float32 where the network takes nothing else."""
        device = next(self._model.parameters()).device
        failed: Exception = InputError("no type of numbers was tried")
        for dtype in (torch.float32,) if device.type == "mps" else (torch.float64, torch.float32):
            try:
                with twice_differentiable():
                    return self._in(dtype, simulation, parameters, settings)
            except Exception as error:  # noqa: BLE001 - whatever the network raises becomes the reason, below
                failed = error
        if isinstance(failed, InputError):
            return Mismatch("wrong", str(failed))
        text = "".join(traceback.format_exception(failed))
        return Mismatch("wrong", f"its simulation of a client fails: {cut(reason_of(failed), 300)}", text)

    def _in(
        self, dtype: torch.dtype, simulation: Simulation, parameters: Vector, settings: PublicSettings
    ) -> Mismatch | None:
        tried = self._tried(dtype, parameters, settings)
        victim = tried.trial.victim(tuple(parameters))
        off = _off(simulation(tried.trial), victim.gradient)
        allowed = TOLERANCE[dtype]
        if off <= allowed and not tried.drew:
            return None
        for draw in range(1, 1 + (DRAWS if tried.drew else 1)):
            sent = self._client(tried.trial.observation.parameters, tried.batches, draw)
            again = victim.model.gradient(sent.upload)
            if not _off(again, victim.gradient) <= allowed:
                return Mismatch("random", RANDOM)
        if off <= allowed:
            return None
        steps = "" if settings.local_steps == 1 else f" in {settings.local_steps} local steps"
        return Mismatch(
            "wrong",
            f"its simulation of a client computes another upload than the client from the same random "
            f"images{steps} (off by {100 * off:.2g} % of its length), so that its failure would show nothing",
        )

    def _tried(self, dtype: torch.dtype, parameters: Vector, settings: PublicSettings) -> "_Tried":
        """The client's upload, which is the same for all attacks."""
        if self._latest is not None:
            known, start, latest = self._latest
            if known == dtype and start is parameters and latest.trial.observation.settings == settings:
                return latest
        device = next(self._model.parameters()).device
        before = {name: value.to(device, dtype) for name, value in parameters.items()}
        examples, labels = _random_examples(settings, torch_stream(self._seed, "simulation"))
        examples = examples.to(device, dtype if examples.is_floating_point() else None)
        batches = _batches(settings, examples, labels.to(device))
        sent = self._client(before, batches, 0)
        observation = Observation(0, 0, before, sent.upload, settings)
        model = copied(self._model).to(dtype)
        tried = _Tried(SimulationTrial(model, self._loss, observation, examples, labels.to(device)), batches, sent.drew)
        self._latest = dtype, parameters, tried
        return tried


def simulated_upload(network: Network, victim: Victim, examples: Tensor, labels: Tensor) -> Vector:
    """Return what a network, as attacks run it, makes a client upload for a batch, by ordinary autograd."""

    def gradient(parameters: Vector, rows: Sequence[int]) -> Vector:
        wanted = {name: parameters[name].detach().requires_grad_() for name in network.names}
        loss = network.loss(wanted, examples[list(rows)], labels[list(rows)])
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(wanted, found, strict=True))

    return trained_upload(victim, len(examples), gradient)


def trained_upload(victim: Victim, examples: int, gradient: Callable[[Vector, Sequence[int]], Vector]) -> Vector:
    """Return what a client uploads, in gradient space; ``gradient``: at parameters, of examples with these numbers."""
    training = victim.model.training
    if training is None:
        return gradient(victim.parameters, range(examples))
    optimizer, now = local_optimizer(training), victim.parameters
    for batch in training.batches(examples):
        step = optimizer(gradient(now, batch))
        now = {name: value + step[name] for name, value in now.items()}
    return victim.model.gradient({name: value - victim.parameters[name] for name, value in now.items()})


def simulated_images(trial: SimulationTrial) -> Vector:
    """What attacks on images and rows take for the upload."""
    network = Network(trial.model, trial.loss)
    labels = F.one_hot(trial.labels, trial.observation.settings.classes).to(trial.examples)
    return simulated_upload(network, trial.victim(network.names), trial.examples, labels)


def _tried(settings: PublicSettings) -> PublicSettings:
    """The same without a mechanism, of one client, and with a few examples and steps."""
    batch = min(settings.batch_size or 1, EXAMPLES)
    return replace(
        settings,
        batch_size=batch,
        local_steps=min(settings.local_steps, STEPS),
        client_examples=max(settings.client_examples, batch),
        mechanism=mechanism_settings({}).model_dump(mode="json", exclude_none=True),
        clients=1,
    )


def _random_examples(settings: PublicSettings, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Examples and labels as of :class:`SimulationTrial`."""
    count = settings.examples
    labels = torch.randint(settings.classes, (count,), generator=stream)
    if settings.text is None:
        images = torch.rand(count, *settings.shape, generator=stream, dtype=torch.float64)
        mean, std = (
            torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (settings.mean, settings.std)
        )
        return (images - mean) / std, labels
    room = settings.shape[-1] + (settings.text.task == "next")
    tokens = torch.randint(
        min(END + 1, settings.text.vocabulary - 1), settings.text.vocabulary, (count, room), generator=stream
    )
    if settings.text.packed:
        return tokens, labels
    begin = (START, *settings.text.mark)
    tokens[:, : len(begin)] = tokens.new_tensor(begin)
    lengths = torch.randint(min(len(begin) + 1, room), room + 1, (count,), generator=stream)
    lengths[0] = room  # one sentence has no padding
    return torch.where(torch.arange(room) < lengths[:, None], tokens, PAD), labels


def _batches(settings: PublicSettings, examples: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of each local step, in the order in which attacks take examples."""
    if settings.text is not None and settings.text.task == "next":
        examples, labels = examples[:, :-1], next_targets(examples, settings.text.mark, settings.text.until)
    size = min(settings.batch_size or 1, len(examples))
    rows = [[(step * size + place) % len(examples) for place in range(size)] for step in range(settings.local_steps)]
    return [(examples[part], labels[part]) for part in rows]


def _off(one: Vector, other: Vector) -> float:
    """How far a vector is from another one, of the latter's length, in the tensors that the former has."""
    apart = math.sqrt(sum(float((value - other[name]).double().square().sum()) for name, value in one.items()))
    length = math.sqrt(sum(float(other[name].double().square().sum()) for name in one))
    return apart / length if length else (math.inf if apart else 0.0)


def _same(one: Vector, other: Vector) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
