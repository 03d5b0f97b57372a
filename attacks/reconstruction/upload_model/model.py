"""How an upload came about, as the adversary models it: sign, scale, local steps and mechanism.

Every attack compares in gradient space. A FedSGD upload is a mean gradient already. A FedAvg upload is parameters after
minus before, and with ``s`` steps of plain SGD at learning rate ``lr`` it is ``-lr`` times the sum of the steps'
gradients; so ``-upload / (lr * s)`` is compared. After one step of SGD that is the mean gradient at the parameters
before the round; for several steps, and for Adam, what dummies would send is computed by training on them (see
``upload_model.unroll``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from fedpriv.attacks.candidates import Candidates
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.upload_model.unroll import LocalTraining, unrolled_update
from fedpriv.federated import upload_sign
from fedpriv.gradients import Block, Vector
from fedpriv.mechanisms import recorded_mechanism
from fedpriv.mechanisms.machinery.base import BlockMechanism, Mechanism
from fedpriv.mechanisms.machinery.law import Noise
from fedpriv.mechanisms.machinery.redistribution import Redistribution

__all__ = ["Norms", "UploadModel", "Victim", "batch_mean", "prepare_victims", "refusal"]

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
    """What the adversary expects a client with given examples to send, in gradient space.

    Attributes:
        mechanism: the mechanism, with its public parameters.
        unit: example (applied to each example's gradient) or update (to the whole upload).
        step: what the client multiplied its mean gradient with, but for the sign: learning rate times local steps for
            fedavg (see :attr:`LocalTraining.length`), 1 for fedsgd.
        signed: -1 for fedavg (the upload points downhill), 1 for fedsgd.
        examples: the number B of examples behind the upload.
        training: the local training, where the upload is more than one gradient and has to be unrolled.
        batch: the examples behind one release of the mechanism.
        releases: how many releases with noise of their own are averaged in the upload; where they count differently (as
            with momentum), how many alike would average the noise as much.
    """

    mechanism: Mechanism
    unit: str
    step: float
    signed: int
    examples: int
    training: LocalTraining | None = None
    batch: int = 1
    releases: float = 1.0

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
            mechanism=config.mechanism(redistribution),
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
        """Whether the expected upload depends on each example's gradient.

        Otherwise it depends on their mean only.
        """
        return self.protects_examples and self.examples > 1

    @property
    def protects_examples(self) -> bool:
        """Whether the mechanism privatises the examples' gradients in each step, rather than the upload."""
        return self.mechanism.protects and self.unit == "example"

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
        """Return the weights (N, U) of the units in the standardised expected upload, and which tensors have them.

        The expected upload is the sum over the U units of their gradients with these weights: with none 1 / U, with
        gaussian min(1, C / |g|) / U, with vmf A_K(kappa) / (|g| U), per block.

        Args:
            gradients: of the dummies; a unit is an example where :attr:`needs_examples`, else the mean of a batch.
            scales: the mechanism's, which are not ``None``.
        """
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

    def trained(self, network: Network, parameters: Vector, images: Tensor, labels: Tensor) -> Vector:
        """Train on dummy batches as the client did, and return the expected uploads (N, *shape), in gradient space.

        For models with local :attr:`training`. Noise that is added in each step is left out of the steps after it.

        Args:
            network: the network.
            parameters: what the clients started from.
            images: (N, B, C, H, W), normalised.
            labels: probabilities (N, B, classes).
        """
        if self.training is None:
            raise ValueError("this upload is one gradient; there is no local training to unroll")
        release = self._released if self.protects_examples else None
        change = unrolled_update(network, parameters, images, labels, self.training, release)
        return self.gradient(change) if self.protects_examples else self.expected(self.gradient(change))

    def _released(self, gradients: Vector) -> Vector:
        return batch_mean(vmap(vmap(self.mechanism.expected))(gradients))

    def gradient(self, upload: Vector) -> Vector:
        """Turn an upload into the (noisy) mean gradient that it stands for."""
        factor = self.signed / self.step
        return upload if factor == 1 else {name: value * factor for name, value in upload.items()}

    def expected(self, gradients: Vector) -> Vector:
        """Map mean gradients (N, *shape) of dummy batches to expected uploads (N, *shape), in gradient space.

        For models that do not need the examples.
        """
        if not self.mechanism.protects:
            return gradients
        factor = self.signed * self.step if self.protects_updates else 1.0
        sent = vmap(self.mechanism.expected)({name: value * factor for name, value in gradients.items()})
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
    """One observation, made ready for an attack.

    Attributes:
        round: the round.
        client: the client.
        parameters: what the client started from; one object for all uploads of a round.
        gradient: the upload in gradient space.
        model: how such uploads come about.
        note: what a reader of the result must know; may be empty.
        labels: int64 (B,), where the threat model grants them.
        candidates: for each image a list of records, where the threat model grants them.
        more: other uploads of the same examples, from other parameters; see
            ``upload_model.repeated``.
        pool: how many images the uploads' batches are drawn from, where these are other batches of one client in each
            round; 0: all uploads are of the same batch.
    """

    round: int
    client: int
    parameters: Vector
    gradient: Vector
    model: UploadModel
    note: str
    labels: Tensor | None = None
    candidates: Candidates | None = None
    more: tuple["Victim", ...] = ()
    pool: int = 0

    @property
    def noise(self) -> Noise:
        """In the upload; see :meth:`UploadModel.noise`."""
        return self.model.noise([value.numel() for value in self.gradient.values()])

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


def refusal(settings: PublicSettings) -> str | None:
    """Say why these uploads cannot be attacked by gradient matching, or return ``None``."""
    if settings.algorithm == "fedavg" and settings.batch_size is None:
        return "the batch size is withheld, so the number of examples behind an upload is not known"
    return None


def prepare_victims(observations: Sequence[Observation], names: Sequence[str], device: torch.device) -> list[Victim]:
    """Model each upload; uploads of one round share their parameters in memory.

    Args:
        observations: what was heard.
        names: the names of the network's parameters, in order.
        device: where the attack runs.

    Raises:
        AttackRefused: an upload's settings are outside what gradient matching can model, or do not fit the network.
    """
    shared: list[tuple[Vector, Vector]] = []
    shares: list[tuple[Vector, Redistribution]] = []
    victims = []
    for observation in observations:
        reason = refusal(observation.settings)
        if reason is not None:
            raise AttackRefused(f"client {observation.client}, round {observation.round}: {reason}")
        if set(observation.parameters) != set(names):
            odd = min(set(observation.parameters) ^ set(names))
            raise AttackRefused(
                f"client {observation.client}, round {observation.round}: the observed parameters are not those of the "
                f"network; {odd!r} is in one of them only"
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
