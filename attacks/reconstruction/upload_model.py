"""The adversary's model of how an upload was computed: sign, scale, local steps and mechanism.

Every attack compares in gradient space. A FedSGD upload is a mean gradient already. A FedAvg upload is parameters after
minus before, and with ``s`` steps of plain SGD at learning rate ``lr`` it is ``-lr`` times the sum of the steps'
gradients; so ``-upload / (lr * s)`` is compared. After one step of SGD that is the mean gradient at the parameters
before the round; for several steps, and for Adam, what dummies would send is computed by training on them (see
:func:`unrolled_update`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedpriv.attacks.observation import CandidateLists, Observation, PublicSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import (
    Loss,
    Network,
    plain_gradients,
    soft_cross_entropy,
    twice_differentiable,
)
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.core.errors import reason_of
from fedpriv.core.federated import upload_sign
from fedpriv.core.optimizers import ADAM_BETAS, ADAM_EPSILON, momentum_weights
from fedpriv.core.randomness import fixed_normal
from fedpriv.core.registry import ATTACKS
from fedpriv.gradients import Block, Vector
from fedpriv.gradients.calls import copied, coupled_layers
from fedpriv.gradients.operator import first_line
from fedpriv.mechanisms import recorded_mechanism
from fedpriv.mechanisms.machinery.base import BlockMechanism, Mechanism
from fedpriv.mechanisms.machinery.law import Noise
from fedpriv.mechanisms.machinery.redistribution import Redistribution

# FedAvg on dummy data: the adversary trains on the dummies as the client did, with the public settings, and compares
# the updates (Geiping et al. 2020, section 6). Dummies are taken in turn, or, where a client passes several times over
# its examples, in the orders that explain the update best (``reconstruction.labels``).


@dataclass(frozen=True)
class LocalTraining:
    """The public facts of what a client does between the parameters that it is sent and its upload."""

    optimizer: Literal["sgd", "adam"]  # sgd or adam
    learning_rate: float  # of the optimiser
    momentum: float  # of sgd, from 0 up to 1
    steps: int  # optimiser steps
    batch_size: int  # examples in the batch of a step
    clients: int = 1  # how many clients' updates are averaged; each trains on its own share of the dummies

    @property
    def is_gradient(self) -> bool:
        """Whether the update is a multiple of one batch's mean gradient, so that there is nothing to unroll."""
        return self.steps == 1 and self.optimizer == "sgd"

    @property
    def length(self) -> float:
        """By how much the update is longer than the mean gradient of equal steps; of Adam, an order of magnitude."""
        if self.optimizer == "adam":
            return self.learning_rate * self.steps
        return self.learning_rate * sum(self._weights)

    @property
    def equal_steps(self) -> float:
        """How many steps of equal weight would average noise of their own as much; ``steps`` without momentum."""
        return sum(self._weights) ** 2 / sum(weight**2 for weight in self._weights)

    @property
    def _weights(self) -> list[float]:
        return momentum_weights(self.steps, self.momentum)

    def passes(self, examples: int) -> int:
        """How often one client uses each of its ``examples``, in other batches each time; 0: not several times."""
        steps, rest = divmod(examples, self.batch_size)
        alone = self.clients == 1 and steps > 1 and not rest
        return self.steps // steps if alone and self.steps > steps and not self.steps % steps else 0

    def batches(self, examples: int) -> list[list[int]]:
        """The numbers of the dummies, of one client's ``examples``, in the batch of each step."""
        size = min(self.batch_size, examples)
        return [[(step * size + place) % examples for place in range(size)] for step in range(self.steps)]


def unrolled_update(
    network: Network,
    parameters: Vector,
    images: Tensor,  # (N, B, C, H, W), normalised; B is a multiple of training.clients
    labels: Tensor,  # probabilities (N, B, classes)
    training: LocalTraining,
    release: Callable[[Vector], Vector] | None = None,
    orders: Tensor | None = None,
) -> Vector:
    """Train on dummy data and return the clients' mean update (N, *shape), differentiable in images and labels.

    ``orders``, int64 (N, steps, b), are the numbers of the dummies in each step's batch; ``None``: they are taken in
    turn. ``release`` maps the gradients (N, b, *shape) of a step to the one (N, *shape) that a mechanism is expected to
    make of them; ``None``: their mean is used. Takes ``steps`` times the memory of written-out gradients, and more.
    """
    rows = len(images)
    images, labels = (values.unflatten(1, (training.clients, -1)).flatten(0, 1) for values in (images, labels))
    start = {name: parameters[name].detach() for name in network.names}
    optimizer = local_optimizer(training)
    change: Vector = {}
    taken = torch.tensor(training.batches(images.shape[1]), device=images.device) if orders is None else orders
    numbers = torch.arange(len(images), device=images.device)[:, None]
    for batch in taken.expand(len(images), *taken.shape[-2:]).unbind(1):
        now = {name: start[name] + value for name, value in change.items()} or start
        each = release is not None
        dummies = images[numbers, batch], labels[numbers, batch]
        gradients = network.gradients(now, *dummies, shared=not change, each=each)
        step = optimizer(gradients if release is None else release(gradients))
        change = {name: change[name] + value for name, value in step.items()} if change else step
    return {name: value.unflatten(0, (rows, training.clients)).mean(dim=1) for name, value in change.items()}


Step = Callable[[Vector], Vector]
"""(gradients) -> the change of the parameters, of an optimiser that remembers the steps before."""


def local_optimizer(training: LocalTraining) -> Step:
    """Return a client's optimiser, afresh, as torch has it, for tensors of any shape; it can be differentiated."""
    return _adam(training.learning_rate) if training.optimizer == "adam" else _sgd(training)


def _sgd(training: LocalTraining) -> Step:
    velocity: Vector = {}

    def step(gradients: Vector) -> Vector:
        for name, value in gradients.items():
            again = name in velocity and training.momentum
            velocity[name] = training.momentum * velocity[name] + value if again else value
        return {name: -training.learning_rate * value for name, value in velocity.items()}

    return step


def _adam(rate: float) -> Step:
    means: tuple[Vector, Vector] = ({}, {})
    steps = 0

    def step(gradients: Vector) -> Vector:
        nonlocal steps
        steps += 1
        for name, value in gradients.items():
            for mean, beta, new in zip(means, ADAM_BETAS, (value, value.square()), strict=True):
                share = (1 - beta) * new
                mean[name] = beta * mean[name] + share if name in mean else share
        return {name: change(*(mean[name] for mean in means)) for name in gradients}

    def change(first: Tensor, second: Tensor) -> Tensor:
        first, second = first / (1 - ADAM_BETAS[0] ** steps), second / (1 - ADAM_BETAS[1] ** steps)
        # The root of zero has no derivative, so a zero is replaced before the root is taken.
        positive = second > 0
        root = torch.where(positive, torch.where(positive, second, 1.0).sqrt(), 0.0)
        return -rate * first / (root + ADAM_EPSILON)

    return step


Made = TypeVar("Made")


class Norms(Protocol):
    """Norms of gradients: of N rows of U units, as of :class:`DummyGradients`."""

    @property
    def names(self) -> Block:
        """The names of the parameters."""

    def dimension(self, block: Block) -> int:
        """Return the number of coordinates of some of them."""

    def squared(self, block: Block) -> Tensor:
        """Return the squared norms (N, U) of some of them."""


@dataclass(frozen=True)
class UploadModel:
    """What the adversary expects a client with given examples to send, in gradient space."""

    mechanism: Mechanism  # the mechanism, with its public parameters
    unit: str  # example (applied to each example's gradient) or update (to the whole upload)
    step: float  # what a mean gradient is multiplied with, without sign: length for fedavg, 1 for fedsgd
    signed: int  # -1 for fedavg (the upload points downhill), 1 for fedsgd
    examples: int  # the number B of examples behind the upload
    training: LocalTraining | None = None  # where the upload is more than one gradient
    batch: int = 1  # the examples behind one release of the mechanism
    releases: float = 1.0  # releases with noise of their own that are averaged, or as many alike

    @staticmethod
    def of(settings: PublicSettings, redistribution: Redistribution | None = None) -> "UploadModel":
        """Read the public settings; ``redistribution`` is r, for hgm."""
        config = recorded_mechanism(settings.mechanism)
        fedavg = settings.algorithm == "fedavg"
        training = LocalTraining(
            settings.optimizer,
            settings.learning_rate,
            settings.momentum,
            settings.local_steps,
            settings.examples if settings.batch_size is None else settings.batch_size,
            settings.clients,
        )
        steps = training.equal_steps if fedavg and config.unit == "example" else 1.0
        return UploadModel(
            mechanism=config.mechanism(redistribution).padded(settings.draws),
            unit=config.unit,
            step=training.length if fedavg else 1.0,
            signed=upload_sign(settings.algorithm),
            examples=settings.examples,
            training=training if fedavg and not training.is_gradient else None,
            batch=training.batch_size,
            releases=settings.clients * steps,
        )

    @property
    def needs_examples(self) -> bool:
        """Whether the expected upload depends on each example's gradient, not on their mean only."""
        return self.protects_examples and self.examples > 1

    @property
    def protects_examples(self) -> bool:
        """Whether the mechanism privatises the examples' gradients in each step, rather than the upload."""
        return self.mechanism.protects and self.unit == "example"

    @property
    def has_density(self) -> bool:
        """Whether the distribution of the upload is known: that of noise behind Adam's steps is not."""
        adam = self.training is not None and self.training.optimizer == "adam"
        return not (adam and self.protects_examples)

    @property
    def protects_updates(self) -> bool:
        """Whether the mechanism privatises the upload, and so hides the length of the mean gradient."""
        return self.mechanism.protects and self.unit == "update"

    def noise(self, tensors: Sequence[int]) -> Noise:
        """The noise in an upload, in gradient space, standardised; of parameters with so many coordinates, in order."""
        # An update is privatised as it is and divided by its step only then; a batch's sum is divided by its size.
        examples, divisor = (1, self.step) if self.protects_updates else (self.batch, float(self.batch))
        return self.mechanism.noise(tensors, examples, divisor).averaged(self.releases)

    def weights(self, gradients: Norms, scales: Mapping[str, float]) -> list[tuple[Block, Tensor]]:
        """Return the units' weights (N, U) in the standardised expected upload, and which tensors have them."""
        mechanism = self.mechanism
        if not isinstance(mechanism, BlockMechanism):
            raise ValueError(f"the factors of {mechanism.name} do not follow from Euclidean norms")
        # A mechanism for whole updates sees the mean gradient times this, and what it sends is divided by it again.
        factor = self.step if self.protects_updates else 1.0
        weights: list[tuple[Block, Tensor]] = []
        blocks = mechanism.blocks_of(gradients.names)
        for block in blocks:
            parts = [
                (scale, tuple(name for name in block if scales[name] == scale))
                for scale in dict.fromkeys(scales[name] for name in block)
            ]
            norm = reduce(torch.add, [gradients.squared(names) * (factor * scale) ** 2 for scale, names in parts])
            weight = mechanism.weight(norm, gradients.dimension(block), len(blocks)) / norm.shape[1]
            weights += [(names, weight * scale) for scale, names in parts]
        return weights

    def trained(
        self,
        network: Network,
        parameters: Vector,
        images: Tensor,
        labels: Tensor,
        heard: Vector | None = None,
        orders: Tensor | None = None,
    ) -> Vector:
        """Train on (N, B, C, H, W) as the client did, noise left out, and return the expected uploads (N, *shape)."""
        if self.training is None:
            raise ValueError("this upload is one gradient; there is no local training to unroll")
        release = self._released if self.protects_examples else None
        change = unrolled_update(network, parameters, images, labels, self.training, release, orders)
        return self.gradient(change) if self.protects_examples else self.expected(self.gradient(change), heard)

    def _released(self, gradients: Vector) -> Vector:
        return batch_mean(vmap(vmap(self.mechanism.expected))(gradients))

    def gradient(self, upload: Vector) -> Vector:
        """Turn an upload into the (noisy) mean gradient that it stands for."""
        factor = self.signed / self.step
        return upload if factor == 1 else {name: value * factor for name, value in upload.items()}

    def expected(self, gradients: Vector, heard: Vector | None = None) -> Vector:
        """Map mean gradients (N, *shape) to expected uploads (N, *shape), for models that do not need the examples.

        With ``heard`` uploads (N, *shape) to what is compared with them, where these are constraints alone.
        """
        if not self.mechanism.protects:
            return gradients
        factor = self.signed * self.step if self.protects_updates else 1.0
        updates = {name: value * factor for name, value in gradients.items()}
        if heard is not None and self.mechanism.constrains:
            sent = vmap(self.mechanism.fitted)(updates, {name: heard[name] * factor for name in gradients})
        else:
            sent = vmap(self.mechanism.expected)(updates)
        return {name: value / factor for name, value in sent.items()}

    def expected_of_examples(self, gradients: Vector) -> Vector:
        """Map gradients (N, B, *shape) of the examples of dummy batches to expected uploads (N, *shape)."""
        if not self.needs_examples:
            return self.expected(batch_mean(gradients))
        return self._released(gradients)


def batch_mean(gradients: Vector) -> Vector:
    """Mean over the examples: (N, B, *shape) to (N, *shape)."""
    return {name: value.mean(dim=1) for name, value in gradients.items()}


@dataclass(frozen=True)
class Victim:
    """One observation, made ready for an attack."""

    round: int  # the round
    client: int  # the client
    parameters: Vector  # what the client started from; one object for all uploads of a round
    gradient: Vector  # the upload in gradient space
    model: UploadModel  # how such uploads come about
    note: str  # what a reader of the result must know; may be empty
    labels: Tensor | None = None  # int64 (B,), where the threat model grants them
    candidates: CandidateLists | None = None  # for each image a list of records, where the threat model grants them
    more: tuple["Victim", ...] = ()  # other uploads of the same examples, from other parameters; see join
    orders: Tensor | None = None  # int64 (steps, b), the dummies in each step's batch; None: taken in turn
    pool: int = 0  # images that other batches in each round are drawn from; 0: all are of one batch

    @property
    def title(self) -> str:
        """What it is, for a person."""
        return f"round {self.round}, client {self.client}"

    @property
    def noise(self) -> Noise:
        """In the upload; see :meth:`UploadModel.noise`."""
        return self.model.noise([value.numel() for value in self.gradient.values()])

    @property
    def noise_variance(self) -> float:
        """The largest of a block's noise, standardised; 0: there is none."""
        return max(self.noise.variances, default=0.0)

    def noise_in(self, name: str) -> float:
        """Return the noise's deviation in a parameter's gradient; where it differs, in the root mean square."""
        deviations = self.model.mechanism.deviations((name,))[name]
        return math.sqrt(self.noise_variance * float(deviations.square().mean()))

    @property
    def needs_writing(self) -> bool:
        """Whether the likelihood needs expected uploads themselves, not just inner products of their blocks."""
        return not self.noise.follows_from(len(self.model.mechanism.directions(tuple(self.gradient))))

    @property
    def one_scale(self) -> bool:
        """Whether the mechanism leaves all tensors, such as weight and bias, on one scale."""
        return len(self.model.mechanism.blocks_of(tuple(self.gradient))) == 1

    @property
    def in_small_blocks(self) -> bool:
        """Whether the mechanism draws noise in blocks of coordinates that cut through tensors."""
        return not self.model.mechanism.blocks_of(tuple(self.gradient))

    @property
    def uploads(self) -> tuple["Victim", ...]:
        """All uploads of the examples."""
        return (self, *self.more)


def by_victim(rows: Sequence[Victim]) -> list[tuple[Victim, list[int]]]:
    """Return each of the distinct victims with the numbers of its rows."""
    members: dict[int, list[int]] = {}
    for number, victim in enumerate(rows):
        members.setdefault(id(victim), []).append(number)
    return [(rows[numbers[0]], numbers) for numbers in members.values()]


def refusal(settings: PublicSettings) -> str | None:
    """Say why these uploads cannot be attacked by gradient matching, or return ``None``."""
    if settings.algorithm == "fedavg" and settings.batch_size is None:
        return "the batch size is withheld, so the number of examples behind an upload is not known"
    return None


def prepare_victims(observations: Sequence[Observation], names: Sequence[str], device: torch.device) -> list[Victim]:
    """Model each upload; uploads of one round share their parameters in memory."""
    shared: list[tuple[Vector, Vector]] = []
    shares: list[tuple[Vector, Redistribution]] = []
    victims = []
    for observation in observations:
        reason = refusal(observation.settings)
        if reason is not None:
            raise AttackRefused(f"{observation.title}: {reason}")
        if set(observation.parameters) != set(names):
            odd = min(set(observation.parameters) ^ set(names))
            raise AttackRefused(
                f"{observation.title}: the observed parameters are not those of the network; {odd!r} is in one of them "
                "only"
            )
        redistribution = None
        if observation.redistribution is not None:
            redistribution = _shared(observation.redistribution.shares, names, device, shares, Redistribution)
        model = UploadModel.of(observation.settings, redistribution)
        upload = {name: observation.upload[name].to(device) for name in names}
        parameters = _shared(observation.parameters, names, device, shared, dict)
        note = _note(model, upload)
        labels = _known_labels(observation, model.examples, device)
        gradient = model.gradient(upload)
        about = observation.round, observation.client
        victims.append(Victim(*about, parameters, gradient, model, note, labels, observation.candidates))
    return victims


def _known_labels(observation: Observation, examples: int, device: torch.device) -> Tensor | None:
    if observation.labels is None:
        return None
    if len(observation.labels) != examples:
        raise AttackRefused(
            f"{observation.title}: {len(observation.labels)} labels are known, and the public settings make for "
            f"{examples} examples (Poisson sampling); the attacks model one or the other"
        )
    return torch.tensor(observation.labels, device=device)


def _shared(
    vector: Vector,
    names: Sequence[str],
    device: torch.device,
    known: list[tuple[Vector, Made]],
    make: Callable[[Vector], Made],
) -> Made:
    """Return one object, made of the numbers on the device, for all vectors that hold the same ones."""
    for source, ready in known:
        if source is vector or all(_same(source[name], vector[name]) for name in names):
            return ready
    ready = make({name: vector[name].to(device) for name in names})
    known.append((vector, ready))
    return ready


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def _note(model: UploadModel, upload: Vector) -> str:
    notes = []
    if model.training is not None and model.training.steps > 1:
        notes.append(
            f"{model.training.steps} local steps were unrolled on the dummies; which example was in which batch is not "
            "known"
        )
    if not any(bool(value.any()) for value in sorted(upload.values(), key=Tensor.numel)):
        notes.append("the upload is zero and says nothing about the examples")
    return "; ".join(notes)


# What makes an attack mean less than it seems to, said before it runs.


KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)


def preflight(
    model: nn.Module, settings: PublicSettings, attacks: Sequence[str], loss: Loss = soft_cross_entropy
) -> tuple[str, ...]:
    """Return one line for each thing that makes these attacks on such uploads misleading."""
    if not attacks:
        return ()
    is_text = settings.text is not None
    reason = refusal(settings) or (None if is_text else whole_numbers(model, settings.shape))
    if reason is not None:
        raise AttackRefused(reason)
    if is_text:
        return tuple(_about_layers(model, attacks))
    return (*_about_layers(model, attacks), *_about_examples(settings), *_about_gradient(model, settings, loss))


def whole_numbers(model: nn.Module, shape: tuple[int, int, int]) -> str | None:
    """Say why a network whose input is tokens cannot be attacked, or return ``None``; a table of places is no input."""
    tables = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    ]
    if not tables or _moves(model, shape):
        return None
    name, layer = tables[0]
    return (
        f"layer {name or 'the model'} ({type(layer).__name__}) takes whole numbers, such as tokens; "
        "the attacks change the values of images in small steps, which such an input does not allow"
    )


def _moves(model: nn.Module, shape: tuple[int, int, int]) -> bool:
    """Whether what a network gives for an image moves with the image's values."""
    still = copied(model).eval().requires_grad_(False)
    parameter = next(still.parameters())
    images = torch.zeros(1, *shape, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
    try:
        logits: Tensor = still(images)
        return logits.requires_grad
    except Exception:  # noqa: BLE001 - such as that it takes whole numbers
        return False


def _about_layers(model: nn.Module, attacks: Sequence[str]) -> list[str]:
    lines = []
    coupled = coupled_layers(model)
    kinked = [name for name, layer in model.named_modules() if isinstance(layer, KINKED)]
    mixing = model.get_submodule(coupled[0]) if coupled else None
    if mixing is not None and (mixing.training or getattr(mixing, "running_mean", None) is None):
        lines.append(
            f"layer {coupled[0]} (BatchNorm) mixes the examples of a batch; the attacks use the statistics of their "
            "dummy batch, as the client does in training"
        )
    smooth = [name for name in attacks if name in ATTACKS and ATTACKS[name].smooth]
    if kinked and smooth:
        kind = type(model.get_submodule(kinked[0])).__name__
        made = "assumes" if len(smooth) == 1 else "assume"
        lines.append(
            f"layer {kinked[0]} ({kind}) has a second derivative of zero; {' and '.join(smooth)} {made} smooth "
            "activations such as sigmoid and may fail for that reason alone"
        )
    return lines


def _about_examples(settings: PublicSettings) -> list[str]:
    lines = []
    count = settings.examples if settings.batch_size is not None else 0
    if count > settings.classes:
        lines.append(
            f"{count} examples behind one upload are more than the {settings.classes} classes: labels repeat and are "
            "hard to tell from the last layer, and pictures of one class blend"
        )
    if settings.algorithm == "fedavg" and settings.local_steps > 1:
        lines.append(
            f"{settings.local_steps} local steps: attacks train on their dummies in an order of their own, because it "
            "is not known which example was in which batch"
        )
    elif settings.algorithm == "fedavg" and settings.optimizer == "adam":
        lines.append("the first step of Adam keeps little more of a gradient than the signs: attacks get weaker")
    return lines


@twice_differentiable()
def _about_gradient(model: nn.Module, settings: PublicSettings, loss: Loss) -> list[str]:
    """Try the gradient at random images: a network that passes nothing on to its input cannot be attacked."""
    network = Network(model, loss)
    trained = dict(model.named_parameters())
    parameters = {name: trained[name].detach() for name in network.names}
    reference = next(iter(parameters.values()))
    images = fixed_normal(0, 1, 2, *settings.shape).to(reference).requires_grad_()
    labels = F.one_hot(torch.arange(2) % settings.classes, settings.classes).to(reference)[None]
    try:
        gradients = plain_gradients(network.loss, parameters, images[0], labels[0])
    except Exception as error:
        raise AttackRefused(f"gradients of dummy images through this network fail: {reason_of(error)}") from error
    if not any(bool(value.any()) for value in gradients.values()):
        return ["the gradient at random images is zero: uploads say nothing"]
    squares = torch.stack([value.square().sum() for value in gradients.values()]).sum()
    try:
        (felt,) = torch.autograd.grad(squares, images, allow_unused=True) if squares.requires_grad else (None,)
    except RuntimeError as error:
        return [f"the network cannot be differentiated twice, which nearly all attacks need: {first_line(error)}"]
    if felt is None or not bool(felt.any()):
        return ["the gradient does not depend on the image (a zero last layer, or dead units): attacks cannot start"]
    return []


# Several uploads of one batch, attacked as one victim: from the same parameters they are averaged; from others, as in
# later rounds, they are matched at once, with the sum of the mismatches (of likelihoods, the joint one). Uploads of
# other mini-batches are neither, but a first Linear layer's gradients show them together (:class:`OtherBatches`).


MOST = 128  # images of a client that its rounds show together


@dataclass(frozen=True)
class OtherBatches:
    """Uploads of one client in several rounds, of other mini-batches of its images."""

    observations: tuple[Observation, ...]  # at least two


Heard = Observation | tuple[Observation, ...] | OtherBatches
"""One upload, several of the very same batch, or several of other batches of one client's images."""


def uploads_of(heard: Heard) -> tuple[Observation, ...]:
    """Return the uploads."""
    if isinstance(heard, OtherBatches):
        return heard.observations
    return heard if isinstance(heard, tuple) else (heard,)


def stackable(observations: Sequence[Observation]) -> bool:
    """Whether these are other mini-batches, several images each, of at most MOST images of one client."""
    first = observations[0].settings
    alike = all(
        other.client == observations[0].client and replace(other.settings, mechanism={}) == replace(first, mechanism={})
        for other in observations[1:]
    )
    if len(observations) < 2 or not alike or first.clients > 1 or first.batch_size is None:
        return False
    return 1 < first.batch_size * first.local_steps < first.client_examples <= MOST


def other_batches(observations: Sequence[Observation]) -> str | None:
    """Say why these uploads are not known to be of one batch (all of a client's examples), or return ``None``."""
    first = observations[0]
    for other in observations[1:]:
        if (other.client, other.settings.clients) != (first.client, first.settings.clients):
            return f"{other.title} and {first.title} are not of the same client"
        if replace(other.settings, mechanism={}) != replace(first.settings, mechanism={}):
            return f"the client's settings differ between {first.title} and {other.title}"
    public = first.settings
    if public.batch_size is None:
        return f"{first.title}: the batch size is withheld, so it is not known whether rounds use the same examples"
    if public.clients > 1:
        return f"{first.title}: which of the clients' examples are in a sum is not known to be the same in other rounds"
    if public.batch_size * public.local_steps < public.client_examples:
        return (
            f"client {first.client} uses {public.batch_size * public.local_steps} of its {public.client_examples} "
            "examples in a round, and others in the next; only closed_form can attack such uploads together, "
            f"of at most {MOST} examples"
        )
    return None


def join(victims: Sequence[Victim]) -> Victim:
    """Make one victim of uploads of the same batch, averaged where the parameters are the same."""
    if len(victims) == 1:
        return victims[0]
    _refuse_different(victims)
    alike: dict[int, list[Victim]] = {}
    for victim in victims:
        alike.setdefault(id(victim.parameters), []).append(victim)
    first, *others = [_average(members) for members in alike.values()]
    rounds = ", ".join(str(number) for number in sorted({victim.round for victim in victims}))
    note = f"{len(victims)} uploads of the same examples were attacked together (round {rounds})"
    return replace(first, more=tuple(others), note="; ".join(text for text in (first.note, note) if text))


def stack(victims: Sequence[Victim], images: int) -> Victim:
    """Make one victim of uploads of other batches of one client's images."""
    first, *others = victims
    _refuse_strangers(victims)
    rounds = ", ".join(str(victim.round) for victim in victims)
    note = f"{len(victims)} uploads of other batches of {images} images were stacked (round {rounds})"
    note = "; ".join(text for text in (first.note, note) if text)
    return replace(first, more=tuple(others), note=note, labels=None, pool=images)


def _refuse_different(victims: Sequence[Victim]) -> None:
    _refuse_strangers(victims)
    first = victims[0]
    for victim in victims[1:]:
        known = (None if member.labels is None else member.labels.tolist() for member in (first, victim))
        if len({tuple(labels or ()) for labels in known}) > 1:
            where = f"client {first.client}, rounds {first.round} and {victim.round}"
            raise AttackRefused(f"{where}: other labels are known of each upload, so they are not of one batch")


def _refuse_strangers(victims: Sequence[Victim]) -> None:
    first = victims[0]
    for victim in victims[1:]:
        where = f"client {first.client}, rounds {first.round} and {victim.round}"
        if victim.client != first.client:
            raise AttackRefused(f"uploads of clients {first.client} and {victim.client} are not of one batch")
        if victim.model != first.model:
            raise AttackRefused(f"{where}: the uploads were computed in different ways (batch, steps, or mechanism)")


def _average(victims: Sequence[Victim]) -> Victim:
    """One upload in place of several with the same parameters: their mean, of as many times more releases."""
    first, count = victims[0], len(victims)
    if count == 1:
        return first
    gradient = {name: torch.stack([victim.gradient[name] for victim in victims]).mean(dim=0) for name in first.gradient}
    return replace(first, gradient=gradient, model=replace(first.model, releases=count * first.model.releases))
