"""What candidate records are expected to send, and how likely that makes an upload."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.matching.matcher import Comparison, Matcher
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.posterior.likelihood import flat, misfit
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients.operator import total, wide

__all__ = ["alone", "expected_uploads", "inner_products", "misfits"]

COLUMNS = 2**16  # that are converted to float64 at a time


def alone(victim: Victim) -> Victim:
    """Return the same upload as if it were of a single example and of a batch of one."""
    return replace(victim, model=replace(victim.model, examples=1, batch=1))


def expected_uploads(scene: Scene, victim: Victim, images: Tensor, labels: Tensor) -> Tensor:
    """Return what batches are expected to send, (n, K), standardised, parameters end to end in their order.

    Args:
        scene: what is public.
        victim: says from which parameters and how; not joined with other uploads.
        images: (n, B, C, H, W), normalised.
        labels: int64 (n, B).
    """
    return _compared(scene, victim, images, labels, lambda comparison: flat(comparison.expected()), written=True)


def misfits(scene: Scene, victim: Victim, images: Tensor, labels: Tensor) -> Tensor:
    """Return minus the log-likelihood (n,) of what was heard, in all uploads, with these batches behind it.

    Args:
        scene: what is public.
        victim: what was heard.
        images: (n, B, C, H, W), normalised.
        labels: int64 (n, B).
    """
    return _compared(scene, victim, images, labels, misfit, written=victim.needs_writing)


def inner_products(vectors: Tensor) -> Tensor:
    """Return the inner products (n, n) of vectors (n, K), computed in float64 where the device has it."""
    parts = (wide(part) for part in vectors.split(COLUMNS, dim=1))
    return total([part @ part.mT for part in parts])


def _compared(
    scene: Scene,
    victim: Victim,
    images: Tensor,
    labels: Tensor,
    objective: Callable[[Comparison], Tensor],
    *,
    written: bool,
) -> Tensor:
    given = F.one_hot(labels, scene.classes).to(images)
    rows: Sequence[Victim] = [victim] * len(images)
    parts = []
    with torch.no_grad():
        for part in chunks(scene.network, rows, scene.shape, scene.classes, written=written):
            these = slice(part.start, part.stop)
            parts.append(Matcher(scene.network, rows[these], objective, often=False)(images[these], given[these]))
    return torch.cat(parts)
