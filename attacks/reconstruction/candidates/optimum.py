"""How often the best decision among candidate records is right: no attack tells more, and one attains it.

Let the record be any of N with equal probability, and the parameters that it was trained from known and independent of
it. The best decision names the record that makes the upload most probable. How often it is right follows from the
expected uploads of the N records alone, by drawing uploads; with normal and with directional noise their inner products
are drawn, in N dimensions rather than in as many as the network has parameters.

In a batch the other examples are taken as known, and what they add as told: that can only make the decision better.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.attacks.candidates import Candidates
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction.candidates.expected import alone, expected_uploads, inner_products
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, soft_cross_entropy, twice_differentiable
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.posterior.likelihood import flat
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim, prepare_victims
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.randomness import Secret

__all__ = ["Optimum", "best_decisions"]

Array = NDArray[np.float64]

DRAWS = 4000  # uploads for each list, from inner products
MOST_NUMBERS = 2**29  # of expected uploads of one list, in float32: 2 GiB
# For each list, where uploads have to be drawn whole.
MOST_OPERATIONS, FEWEST_DRAWS, MOST_DRAWS = 2e9, 20, 200


@dataclass(frozen=True)
class Optimum:
    """How often the best decision was right.

    Attributes:
        right: in so many of the draws.
        draws: uploads that were drawn, each from another record of the list in turn.
    """

    right: int
    draws: int

    @property
    def share(self) -> float:
        """Of the draws."""
        return self.right / self.draws


@dataclass(frozen=True, eq=False)
class _Question:
    """One list of records.

    Attributes:
        expected: (N, K), what each record is expected to send, standardised.
        victim: how uploads come about.
    """

    expected: Tensor
    victim: Victim


@twice_differentiable()
def best_decisions(
    model: nn.Module,
    observation: Observation,
    candidates: Candidates,
    images: Tensor,
    labels: Tensor,
    seed: int,
    *,
    labels_known: bool = False,
) -> list[Optimum]:
    """Return for each image of an upload how often the best decision among its list is right.

    Args:
        model: the network, on the device to use.
        observation: one client's upload, for its parameters and what is public; what was sent is not read.
        candidates: the lists.
        images: (B, C, H, W) on the [0, 1] scale, the true ones in the lists' order: the others of a batch are known.
        labels: int64 (B,), likewise.
        seed: of the draws.
        labels_known: whether records of other labels than the image's are out.

    Raises:
        AttackRefused: nothing protects the upload, it is a sum, several local steps made it, or too much memory would
            be needed.
    """
    network = Network(model, soft_cross_entropy)
    (victim,) = prepare_victims([observation], network.names, network.device)
    _refuse(victim, observation, candidates)
    dtype = next(iter(victim.parameters.values())).dtype
    scene = Scene.of(network, observation.settings, dtype)
    normalised, truth = ((part.to(scene.mean) - scene.mean) / scene.std for part in (candidates.images, images))
    optima = []
    for number, label in enumerate(labels):
        listed = candidates.alike(number, label, labels_known)
        rng = np.random.default_rng([seed, observation.round, observation.client, number])
        question = _question(scene, victim, normalised[listed], candidates.labels[listed], truth, labels, number)
        optima.append(_optimum(question, rng))
    return optima


def _refuse(victim: Victim, observation: Observation, candidates: Candidates) -> None:
    if not victim.model.mechanism.protects:
        raise AttackRefused("the best decision is computed behind a mechanism; there is none")
    if observation.settings.clients > 1:
        raise AttackRefused("the best decision is computed for one client's upload, not for a sum")
    if victim.model.training is not None and not victim.model.protects_updates:
        raise AttackRefused("the best decision is computed for one gradient, not for several local steps")
    numbers = candidates.lists.shape[1] * sum(value.numel() for value in victim.gradient.values())
    if numbers > MOST_NUMBERS:
        raise AttackRefused(f"the best decision would need {4 * numbers / 2**30:.1f} GiB for expected uploads")


def _question(
    scene: Scene, victim: Victim, images: Tensor, classes: Tensor, truth: Tensor, labels: Tensor, number: int
) -> _Question:
    """Put each record of a list (N, C, H, W) into the place of one image of the batch."""
    if not victim.model.protects_updates:
        # Each example has noise of its own or adds to a known sum: the others drop out.
        single = alone(victim)
        return _Question(expected_uploads(scene, single, images[:, None], classes[:, None].to(images.device)), single)
    batches = truth.expand(len(images), *truth.shape).clone()
    given = labels.expand(len(images), len(labels)).clone()
    batches[:, number], given[:, number] = images, classes
    return _Question(expected_uploads(scene, victim, batches, given.to(images.device)), victim)


def _optimum(question: _Question, rng: np.random.Generator) -> Optimum:
    records = len(question.expected)
    mechanism, names = question.victim.model.mechanism, tuple(question.victim.gradient)
    blocks = mechanism.directions(names)
    parts = _parts(question, blocks)
    grams = torch.stack([inner_products(part) for part in parts]).cpu().double().numpy()
    variances = question.victim.noise.variances
    if not question.victim.needs_writing:
        sources = np.arange(DRAWS) % records
        products = mechanism.draw_products(grams, [part.shape[1] for part in parts], variances, sources, rng)
        if products is not None:
            lengths = np.diagonal(grams, axis1=1, axis2=2)[:, None, :]
            scale = np.maximum(np.array(variances), np.finfo(float).tiny)[:, None, None]
            scores = ((products - lengths / 2) / scale).sum(axis=0)
            return Optimum(int((scores.argmax(axis=1) == sources).sum()), DRAWS)
    return _drawn_whole(question, rng)


def _parts(question: _Question, blocks: Sequence[tuple[str, ...]]) -> list[Tensor]:
    """The columns of each block."""
    if len(blocks) == 1:
        return [question.expected]
    sizes = {name: value.numel() for name, value in question.victim.gradient.items()}
    columns = dict(zip(sizes, question.expected.split(list(sizes.values()), dim=1), strict=True))
    return [torch.cat([columns[name] for name in block], dim=1) for block in blocks]


def _drawn_whole(question: _Question, rng: np.random.Generator) -> Optimum:
    """Draw uploads by the mechanism itself, and score each record against each."""
    expected, victim = question.expected, question.victim
    draws = int(min(MOST_DRAWS, max(FEWEST_DRAWS, MOST_OPERATIONS // expected.numel())))
    noise = victim.model.noise([value.numel() for value in victim.gradient.values()])
    model = victim.model
    mechanism, factor = model.mechanism, model.signed * model.step if model.protects_updates else 1.0
    stream = Secret(rng.bytes(32)).stream("optimum")
    right = 0
    for source in rng.permutation(np.arange(draws) % len(expected)):
        sent = _named({name: value * factor for name, value in _raw(victim, expected[source]).items()})
        released = mechanism.release(DenseGradients(sent), 1, stream)
        heard = flat({name: value[None] / factor for name, value in mechanism.standardise(released).items()})
        right += int(noise.misfit(expected, heard.expand_as(expected)).argmin()) == source
    return Optimum(right, draws)


def _raw(victim: Victim, standardised: Tensor) -> Vector:
    """Undo :meth:`Mechanism.standardise`."""
    names = tuple(victim.gradient)
    deviations = victim.model.mechanism.deviations(names)
    sizes = [victim.gradient[name].numel() for name in names]
    parts = zip(names, standardised.split(sizes), strict=True)
    return {name: part.view(victim.gradient[name].shape) * deviations[name].to(part) for name, part in parts}


def _named(vector: Vector) -> Vector:
    return {name: value[None] for name, value in vector.items()}
