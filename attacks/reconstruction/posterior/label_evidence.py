"""Which labels of a single example an upload leaves open under noise.

The gradient of the last bias, ``softmax - label``, says so without regard to the image: labels whose entry is not among
the smallest, give or take the noise, are out. The rest of the upload says more, for a label turns the whole gradient.
So before an image is searched for with every label that is left, images are drawn from the prior, and the upload's
likelihood is compared between labels at each of them.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.labels.last_layer import OutputLayer, find_output_layer, read_labels
from fedpriv.attacks.reconstruction.matching.matcher import Matcher
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.posterior.likelihood import Whitening, misfit
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["likely_labels", "open_labels"]

MARGIN = 5.0  # standard deviations from the smallest entry of the last bias's gradient within which labels stay open
DRAWS = 16  # images at which labels are compared; the first is the prior's mean
SEED = 20261122  # of these images; they are no part of the result
# How much less likely than the best a label may be, as a logarithm, at the image that favours it most. Of uploads whose
# label can be told at all, the true one is mostly the best at each of the images.
BEHIND = 25.0
TRIED = 10  # labels that are searched with, at most


def open_labels(scene: Scene, rows: Sequence[Victim]) -> list[list[Tensor | None]]:
    """Return for each row all sets of labels (B,) that the last layer leaves open; ``None``: they are to be optimised.

    Only those of a single example behind noise are open; others are read off (see :func:`read_labels`).
    """
    layer = find_output_layer(scene.network, rows[0].parameters, scene.shape, scene.classes)
    return [_open(scene, victim, layer, read) for victim, read in zip(rows, read_labels(scene, rows), strict=True)]


def _open(scene: Scene, victim: Victim, layer: OutputLayer | None, read: Tensor | None) -> list[Tensor | None]:
    if victim.labels is not None or victim.model.examples > 1:
        return [read]
    if layer is not None and not victim.model.mechanism.protects:
        return [read]
    device = scene.network.device
    choices: list[Tensor | None] = [torch.tensor([label], device=device) for label in range(scene.classes)]
    if layer is None or not layer.bias:
        return choices
    heard = victim.gradient[layer.name]
    deviation = math.sqrt(2 * max(victim.noise.variances))
    deviation *= float(victim.model.mechanism.deviations((layer.name,))[layer.name].max())
    near = (heard - heard.min() <= MARGIN * deviation).tolist()
    return [labels for labels, kept in zip(choices, near, strict=True) if kept] or [read]


def likely_labels(scene: Scene, victim: Victim, labels: Sequence[Tensor]) -> list[Tensor]:
    """Return those of the labels (1,) that may be right, at most :data:`TRIED`, the likeliest on average first.

    Args:
        scene: what is public, the prior included.
        victim: an upload of a single example.
        labels: those that are open.
    """
    if len(labels) < 2:
        return list(labels)
    losses = _losses(scene, victim, torch.stack(list(labels))).nan_to_num(math.inf, math.inf)
    behind = (losses - losses.amin(dim=0)).nan_to_num(math.inf).amin(dim=1)
    order = losses.mean(dim=1).argsort(stable=True).tolist()
    kept = [number for number in order if float(behind[number]) <= BEHIND] or order
    return [labels[number] for number in kept[:TRIED]]


def _losses(scene: Scene, victim: Victim, labels: Tensor) -> Tensor:
    """Minus the log-likelihood (labels, draws) of the upload with each label at each of the drawn images."""
    generator = torch.Generator().manual_seed(SEED)
    coordinates = torch.randn(DRAWS, 1, *scene.shape, generator=generator).to(scene.mean)
    coordinates[0] = 0
    images = Whitening(scene.prior, scene.shape).images(coordinates).repeat(len(labels), 1, 1, 1, 1)
    given = F.one_hot(labels, scene.classes).to(images).repeat_interleave(DRAWS, dim=0)
    rows = [victim] * len(images)
    misfits = []
    with torch.no_grad():
        for part in chunks(scene.network, rows, scene.shape, scene.classes, written=victim.needs_writing):
            these = slice(part.start, part.stop)
            misfits.append(Matcher(scene.network, rows[these], misfit, often=False)(images[these], given[these]))
    losses: Tensor = torch.cat(misfits).unflatten(0, (len(labels), DRAWS))
    return losses
