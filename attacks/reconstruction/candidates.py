"""Candidate attack: pick each image of an upload from a list of records, by the mechanism's likelihood.

No decision is right more often. For a single example the likelihood is exact, and several uploads of it add up. In a
batch the other examples are not known; their sum is modelled as normal (:func:`batch_log_likelihoods`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedpriv.attacks.methods.candidate import CandidateSettings
from fedpriv.attacks.observation import CandidateLists, Observation
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, soft_cross_entropy, twice_differentiable
from fedpriv.attacks.reconstruction.matching import compared
from fedpriv.attacks.reconstruction.posterior import Whitening, flat, misfit
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model import Victim, prepare_victims
from fedpriv.core.randomness import Secret, fixed_normal
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.gradients.operator import total, wide

# What candidate records are expected to send, and how likely that makes an upload.


COLUMNS = 2**16  # that are converted to float64 at a time


def alone(victim: Victim) -> Victim:
    """Return the same upload as if it were of a single example and of a batch of one."""
    return replace(victim, model=replace(victim.model, examples=1, batch=1))


def expected_uploads(scene: Scene, victim: Victim, images: Tensor, labels: Tensor) -> Tensor:
    """Return what batches (n, B, C, H, W) with labels (n, B) are expected to send, (n, K), standardised."""
    rows = [victim] * len(images)
    return compared(scene, rows, lambda comparison: flat(comparison.expected()), images, labels, written=True)


def misfits(scene: Scene, victim: Victim, images: Tensor, labels: Tensor) -> Tensor:
    """Return minus the log-likelihood (n,) of all uploads with batches (n, B, C, H, W), labels (n, B), behind them."""
    return compared(scene, [victim] * len(images), misfit, images, labels, written=victim.needs_writing)


def inner_products(vectors: Tensor) -> Tensor:
    """Return the inner products (n, n) of vectors (n, K), computed in float64 where the device has it."""
    parts = (wide(part) for part in vectors.split(COLUMNS, dim=1))
    return total([part @ part.mT for part in parts])


# How often the best decision among candidate records is right: no attack tells more.
#
# Any of N records is as likely; the best decision names the one that makes the upload most probable. Uploads are drawn
# by their inner products with the N expected ones. In a batch the other examples, and what they add, count as known.


Array = NDArray[np.float64]

DRAWS = 4000  # uploads for each list, from inner products
MOST_OPTIMUM_NUMBERS = 2**29  # of expected uploads of one list, in float32: 2 GiB
# For each list, where uploads have to be drawn whole.
MOST_OPERATIONS, FEWEST_DRAWS, MOST_DRAWS = 2e9, 20, 200


@dataclass(frozen=True)
class Optimum:
    """How often the best decision was right."""

    right: int  # in so many of the draws
    draws: int  # uploads that were drawn, each from another record of the list in turn

    @property
    def share(self) -> float:
        """Of the draws."""
        return self.right / self.draws


@dataclass(frozen=True, eq=False)
class _Question:
    """One list of records."""

    expected: Tensor  # (N, K), what each record is expected to send, standardised
    victim: Victim  # how uploads come about


@twice_differentiable()
def best_decisions(
    model: nn.Module,
    observation: Observation,
    candidates: CandidateLists,
    images: Tensor,
    labels: Tensor,  # int64 (B,), likewise
    seed: int,
    *,
    labels_known: bool = False,
) -> list[Optimum]:
    """Return how often the best decision is right for each image (B, C, H, W), [0, 1] scale, the others known."""
    network = Network(model, soft_cross_entropy)
    (victim,) = prepare_victims([observation], network.names, network.device)
    _refuse(victim, observation, candidates)
    dtype = next(iter(victim.parameters.values())).dtype
    scene = Scene.of(network, observation.settings, dtype)
    normalised, truth = (scene.normalised(part) for part in (candidates.images, images))
    optima = []
    for number, label in enumerate(labels):
        listed = candidates.alike(number, label, labels_known)
        rng = np.random.default_rng([seed, observation.round, observation.client, number])
        question = _question(scene, victim, normalised[listed], candidates.labels[listed], truth, labels, number)
        optima.append(_optimum(question, rng))
    return optima


def _refuse(victim: Victim, observation: Observation, candidates: CandidateLists) -> None:
    if not victim.model.mechanism.protects:
        raise AttackRefused("the best decision is computed behind a mechanism; there is none")
    if observation.settings.clients > 1:
        raise AttackRefused("the best decision is computed for one client's upload, not for a sum")
    if victim.model.training is not None and not victim.model.protects_updates:
        raise AttackRefused("the best decision is computed for one gradient, not for several local steps")
    numbers = candidates.lists.shape[1] * sum(value.numel() for value in victim.gradient.values())
    if numbers > MOST_OPTIMUM_NUMBERS:
        raise AttackRefused(f"it would need {4 * numbers / 2**30:.1f} GiB for expected uploads")


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
        sent = {name: value[None] * factor for name, value in _raw(victim, expected[source]).items()}
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


# Batches: how likely a record makes an upload when the other examples are known in distribution only.
#
# The sum of the other examples' gradients is taken as normal, with mean and covariance of what public images send. All
# vectors involved span a small space, so everything is computed from their inner products.


PUBLIC = 240  # images that stand for the others
HELD_OUT = 5  # one in so many says how much of a gradient lies outside the span of the rest
SEED = 20261123  # of their labels, and of images where there are no public ones; they are no part of the result
SMALLEST = 1e-12  # relative variance


def batch_log_likelihoods(scene: Scene, victim: Victim, images: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood (n,) of an upload with each image (n, C, H, W), label (n,), in the batch; float64.

    Let c be what it is expected to add. With the B - 1 others as a normal sum, the upload is N(c + (B - 1) m, noise +
    (B - 1) S), where m and S are mean and covariance of what public images add.
    """
    _refuse_others(victim)
    model = victim.model
    single = alone(victim)
    public = _public_images(scene)
    given = _public_labels(scene, victim, len(public))
    added = [
        expected_uploads(scene, single, part[:, None], classes[:, None]) / model.examples
        for part, classes in ((images, labels), (public, given))
    ]
    heard = flat({name: value[None] for name, value in model.mechanism.standardise(victim.gradient).items()})
    records, others, upload = _in_their_span(added[0], added[1], heard)
    noise = max(_variance(victim), SMALLEST * float(upload.square().mean()))
    last = torch.arange(len(others)) % HELD_OUT == HELD_OUT - 1
    fitted, held = others[~last], others[last]
    mean = fitted.mean(dim=0)
    variances, basis = _principal(fitted - mean)
    rest = _rest(held - mean, basis, heard.shape[1])
    count = model.examples - 1
    offsets = upload - count * mean - records
    along = offsets @ basis
    outside = offsets.square().sum(dim=1) - along.square().sum(dim=1)
    inside = (along.square() / (noise + count * variances.clamp(min=rest))).sum(dim=1)
    return -(inside + outside.clamp(min=0) / (noise + count * rest)) / 2


def _refuse_others(victim: Victim) -> None:
    model = victim.model
    if model.training is not None:
        raise AttackRefused("records in a batch can be told from one gradient, not from an upload of several steps")
    if model.protects_updates:
        raise AttackRefused("records in a batch cannot be told apart with a mechanism that acts on whole updates")
    if victim.more:
        raise AttackRefused("records in a batch are told from one upload at a time; set adversary.join_uploads = false")


def _public_images(scene: Scene) -> Tensor:
    """Images (P, C, H, W), normalised: public ones, or draws from the prior where there are none."""
    if scene.public_images is not None and len(scene.public_images) >= PUBLIC:
        step = len(scene.public_images) // PUBLIC
        return scene.normalised(scene.public_images[::step][:PUBLIC])
    return Whitening(scene.prior, scene.shape).images(fixed_normal(SEED, PUBLIC, *scene.shape).to(scene.mean))


def _public_labels(scene: Scene, victim: Victim, count: int) -> Tensor:
    """Labels (P,): of the batch where they are known, else any, each as often."""
    choices = torch.arange(scene.classes) if victim.labels is None else victim.labels.cpu()
    generator = torch.Generator().manual_seed(SEED)
    return choices[torch.randint(len(choices), (count,), generator=generator)].to(scene.network.device)


def _in_their_span(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Vectors (n, K) in orthonormal coordinates of the space that all of them span together."""
    values, basis = torch.linalg.eigh(inner_products(torch.cat(vectors)))
    kept = values > values[-1] * SMALLEST
    coordinates = basis[:, kept] * values[kept].sqrt()
    return coordinates.split([len(part) for part in vectors])


def _variance(victim: Victim) -> float:
    """Of the noise in each standardised coordinate, on average over blocks."""
    noise = victim.noise
    return sum(size * variance for size, variance in zip(noise.sizes, noise.variances, strict=True)) / sum(noise.sizes)


def _principal(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (r,) and directions (d, r) of centred vectors (n, d)."""
    _, singular, directions = torch.linalg.svd(offsets, full_matrices=False)
    kept = singular > singular[0] * math.sqrt(SMALLEST)
    return singular[kept].square() / (len(offsets) - 1), directions[kept].mT


def _rest(held: Tensor, basis: Tensor, dimension: int) -> float:
    """The variance of held-out vectors in each of the coordinates outside the principal directions."""
    outside = held.square().sum(dim=1) - (held @ basis).square().sum(dim=1)
    return float(outside.clamp(min=0).mean()) / max(dimension - basis.shape[1], 1)


# Less likely than anything that is possible, and finite, so that an assignment exists.
IMPOSSIBLE = -1e300
# Of a batch: records whose inner products are decomposed in seconds, and numbers of their expected uploads, 8 GiB.
MOST_RECORDS, MOST_NUMBERS = 4000, 2**31


@dataclass(frozen=True, eq=False)
class _Pick:
    """What is picked for one upload."""

    records: Tensor  # their numbers, (B,)
    labels: Tensor  # their classes, (B,)
    log_likelihoods: Tensor  # of the upload with each of them behind it, but for a constant, (B,)
    probability: float | None  # of the pick, for one image; None: a batch, of which it is not known

    @property
    def loss(self) -> Tensor:
        """What the attack minimises."""
        if self.probability is None:
            return -self.log_likelihoods.sum()
        return -torch.tensor(self.probability, dtype=torch.float64).log()


def run_candidates(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: CandidateSettings, report: Report
) -> Outcome:
    """Return the records that are picked, and minus the logarithm of how probable the pick is, or of its likelihood."""
    picks = [_pick(scene, victim, config) for victim in rows]
    chosen = [_candidates(scene, victim).images[pick.records] for victim, pick in zip(rows, picks, strict=True)]
    losses = torch.stack([pick.loss for pick in picks])
    report(1, losses)
    return Outcome(
        images=scene.normalised(torch.stack(chosen)),
        labels=torch.stack([pick.labels for pick in picks]),
        losses=losses,
        iterations=torch.ones(len(rows), dtype=torch.int64),
        notes=tuple(map(_note, picks)),
    )


def _pick(scene: Scene, victim: Victim, config: CandidateSettings) -> _Pick:
    candidates = _candidates(scene, victim)
    images = scene.normalised(candidates.images)
    # For each record and class: how likely the upload is, and how probable the class was before.
    prior = _label_prior(scene, victim, candidates, config)
    numbers, classes = (prior > -torch.inf).nonzero(as_tuple=True)
    if len(numbers) == 0:
        raise AttackRefused("no record has a label that is among those of the upload")
    _refuse_size(victim, len(numbers))
    if victim.model.examples == 1:
        heard = -misfits(scene, victim, images[numbers, None], classes[:, None]).double()
    else:
        heard = batch_log_likelihoods(scene, victim, images[numbers], classes)
    each = torch.full_like(prior, -torch.inf)
    each[numbers, classes] = heard + prior[numbers, classes]
    return _decided(candidates, each.cpu())


def _decided(candidates: CandidateLists, each: Tensor) -> _Pick:
    """The records that make the upload most probable, one for each image and none twice; each (M, classes)."""
    records = each.logsumexp(dim=1)
    listed = torch.full((len(candidates.lists), len(records)), IMPOSSIBLE, dtype=torch.float64)
    listed.scatter_(1, candidates.lists, records[candidates.lists].clamp(min=IMPOSSIBLE / 2))
    _, columns = linear_sum_assignment(listed.numpy(), maximize=True)
    picked = torch.from_numpy(columns)
    probability = float(listed[0].softmax(dim=0)[picked[0]]) if len(listed) == 1 else None
    return _Pick(picked, each[picked].argmax(dim=1), records[picked], probability)


def _refuse_size(victim: Victim, records: int) -> None:
    """In a batch all expected uploads are held at once, and compared with each other."""
    if victim.model.examples == 1:
        return
    numbers = records * sum(value.numel() for value in victim.gradient.values())
    if records > MOST_RECORDS or numbers > MOST_NUMBERS:
        raise AttackRefused(
            f"{records} records, one for each class that it may have, in a batch of {victim.model.examples} images "
            f"need {4 * numbers / 2**30:.1f} GiB; allowed are {MOST_RECORDS} and {4 * MOST_NUMBERS / 2**30:g} GiB"
        )


def _label_prior(scene: Scene, victim: Victim, candidates: CandidateLists, config: CandidateSettings) -> Tensor:
    """The logarithm of how probable each class of each record is without the upload, (M, classes), not normalised."""
    known = torch.zeros(len(candidates.labels), scene.classes, dtype=torch.float64)
    if config.labels == "given":
        known = torch.full_like(known, -torch.inf).scatter(1, candidates.labels[:, None], 0.0)
    if victim.labels is not None:
        absent = [label for label in range(scene.classes) if label not in victim.labels.tolist()]
        known[:, absent] = -torch.inf
    return known.to(scene.network.device)


def _candidates(scene: Scene, victim: Victim) -> CandidateLists:
    candidates, examples = victim.candidates, victim.model.examples
    if candidates is None:
        raise AttackRefused("it needs, for each image, a list of records that contains it; none is given")
    if candidates.images.shape[1:] != scene.shape:
        raise AttackRefused(
            f"the records have the shape {tuple(candidates.images.shape[1:])}, the upload's images {scene.shape}"
        )
    if len(candidates.lists) != examples:
        raise AttackRefused(
            f"{len(candidates.lists)} lists of records for an upload of {examples} images, as settings say; where the "
            "size of batches varies, it is refused"
        )
    if candidates.lists.unique().numel() < examples:
        raise AttackRefused(f"{candidates.lists.unique().numel()} records for {examples} images: there are too few")
    if int(candidates.labels.min()) < 0 or int(candidates.labels.max()) >= scene.classes:
        raise AttackRefused(f"the records' labels are not all from 0 to {scene.classes - 1}")
    return candidates


def _note(pick: _Pick) -> str:
    what = "picked out of a list, nothing was reconstructed; "
    if pick.probability is not None:
        return f"{what}probability of the pick {pick.probability:.2g}"
    return f"{what}the other examples of the batch stand in as a normal distribution"
