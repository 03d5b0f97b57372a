"""Batches: how likely a record makes an upload when the other examples are known in distribution only.

The sum of the other examples' gradients is taken as normal, with mean and covariance of what public images send. All
vectors involved span a small space, so everything is computed from their inner products.
"""

import math

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.candidates.expected import alone, expected_uploads, inner_products
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.posterior.likelihood import Whitening, flat
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["batch_log_likelihoods"]

PUBLIC = 240  # images that stand for the others
HELD_OUT = 5  # one in so many says how much of a gradient lies outside the span of the rest
SEED = 20261123  # of their labels, and of images where there are no public ones; they are no part of the result
SMALLEST = 1e-12  # relative variance


def batch_log_likelihoods(scene: Scene, victim: Victim, images: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood (n,) of an upload with a record in the batch, but for a constant; float64.

    Let c be what a record is expected to add to the upload. With the B - 1 others as a normal sum, the upload is
    N(c + (B - 1) m, noise + (B - 1) S), where m and S are mean and covariance of what public images add.

    Args:
        scene: what is public.
        victim: what was heard; one gradient of B >= 2 examples.
        images: (n, C, H, W), normalised.
        labels: int64 (n,).

    Raises:
        AttackRefused: the upload is the result of several steps, joined with others, or of a mechanism that acts on
            whole updates.
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
    fitted, held = _split(others)
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
        raise AttackRefused("records in a batch cannot be told behind a mechanism that acts on whole updates")
    if victim.more:
        raise AttackRefused("records in a batch are told from one upload at a time; set adversary.join_uploads = false")


def _public_images(scene: Scene) -> Tensor:
    """Images (P, C, H, W), normalised: public ones, or draws from the prior where there are none."""
    if scene.public_images is not None and len(scene.public_images) >= PUBLIC:
        step = len(scene.public_images) // PUBLIC
        return (scene.public_images[::step][:PUBLIC].to(scene.mean) - scene.mean) / scene.std
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randn(PUBLIC, *scene.shape, generator=generator).to(scene.mean)
    return Whitening(scene.prior, scene.shape).images(drawn)


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
    parts: tuple[Tensor, ...] = coordinates.split([len(part) for part in vectors])
    return parts


def _variance(victim: Victim) -> float:
    """Of the noise in each standardised coordinate, on average over blocks."""
    noise = victim.noise
    return sum(size * variance for size, variance in zip(noise.sizes, noise.variances, strict=True)) / sum(noise.sizes)


def _split(others: Tensor) -> tuple[Tensor, Tensor]:
    held = torch.arange(len(others)) % HELD_OUT == HELD_OUT - 1
    return others[~held], others[held]


def _principal(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (r,) and directions (d, r) of centred vectors (n, d)."""
    _, singular, directions = torch.linalg.svd(offsets, full_matrices=False)
    kept = singular > singular[0] * math.sqrt(SMALLEST)
    return singular[kept].square() / (len(offsets) - 1), directions[kept].mT


def _rest(held: Tensor, basis: Tensor, dimension: int) -> float:
    """The variance of held-out vectors in each of the coordinates outside the principal directions."""
    outside = held.square().sum(dim=1) - (held @ basis).square().sum(dim=1)
    return float(outside.clamp(min=0).mean()) / max(dimension - basis.shape[1], 1)
