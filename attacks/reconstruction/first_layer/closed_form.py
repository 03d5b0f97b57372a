"""Images read off the gradient of a first Linear layer, without optimisation.

The gradient of its weight is the sum of ``e x^T`` over the examples, that of its bias the sum of ``e``: see
``first_layer.rank_one`` for one example, with or without noise, and
``first_layer.sparse_batch`` for several. Local training with SGD changes the errors e, not
the images, so that updates of several steps can be read too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.reconstruction.dummy_gradients.routes import dummy_gradients
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.first_layer.input_layer import InputLayer, find_input_layer
from fedpriv.attacks.reconstruction.first_layer.rank_one import exact, rank_one
from fedpriv.attacks.reconstruction.first_layer.sparse_batch import SparseBatch, separate
from fedpriv.attacks.reconstruction.first_layer.vmf_reading import read_blocks
from fedpriv.attacks.reconstruction.labels.last_layer import read_labels
from fedpriv.attacks.reconstruction.matching.distances import squared_distance
from fedpriv.attacks.reconstruction.matching.matcher import Comparison, Matcher
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients import Vector

__all__ = ["read_images", "run_closed_form"]

DRAWS = 20240513  # the seed of the rows that a batch is separated with; it decides nothing but the time
SCALES = 25  # factors of an image that are tried at once
ZOOMS = 3  # times
NO_LAYER = "closed_form needs a network whose first layer multiplies the image itself (Linear behind flattening)"
MIXED = (
    "the first layer's gradient is a mixture of {} examples that cannot be taken apart (noise, no ReLU, or too many)"
)


def run_closed_form(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: ClosedFormSettings, report: Report
) -> Outcome:
    """Run the attack.

    Args:
        scene: what is public.
        rows: the victims.
        images: not read: nothing starts at random.
        logits: likewise.
        config: has no settings.
        report: told how it goes.

    Raises:
        AttackRefused: the network has no such layer, or an upload is of a kind that cannot be read.
    """
    answers = _read_all(scene, rows)
    pictures = torch.stack([answer.images for answer in answers])
    labels = _complete(scene, rows, answers)
    losses = _distances(scene, rows, pictures, labels)
    report(1, losses)
    return Outcome(pictures, labels, losses, torch.ones(len(rows)).long(), ("",) * len(rows))


def read_images(scene: Scene, victims: Sequence[Victim]) -> list[Tensor]:
    """Return the images (B, C, H, W) alone, normalised, for attacks that start there.

    Raises:
        AttackRefused: as for :func:`run_closed_form`.
    """
    return [answer.images for answer in _read_all(scene, victims)]


@dataclass(frozen=True, eq=False)
class _Read:
    """Images (B, C, H, W) and labels (B,); the labels are ``None`` where the last layer tells them without error."""

    images: Tensor
    labels: Tensor | None


def _read_all(scene: Scene, rows: Sequence[Victim]) -> list[_Read]:
    layers: dict[int, InputLayer | None] = {}
    for victim in rows:
        if id(victim.parameters) not in layers:
            layers[id(victim.parameters)] = find_input_layer(scene.network, victim.parameters, scene.shape)
    return [_read(scene, victim, layers[id(victim.parameters)]) for victim in rows]


def _read(scene: Scene, victim: Victim, layer: InputLayer | None) -> _Read:
    """What the first layer says."""
    if layer is None:
        raise AttackRefused(NO_LAYER)
    if victim.model.training is not None and victim.model.training.optimizer == "adam":
        raise AttackRefused("closed_form reads sums of gradients; Adam's steps are none")
    if not victim.model.mechanism.blocks_of(tuple(victim.gradient)):
        image, label = read_blocks(scene, victim, layer)
        return _Read(scene.box(image[None]), label[None])
    if victim.model.examples > 1:
        return _read_batch(scene, victim, layer)
    weight, bias = _stacked(victim, layer)
    usable = bias if victim.one_scale else None
    clean = exact(weight, usable)
    if clean is not None:
        return _Read(scene.box(clean.image.view(1, *scene.shape)), None)
    image = rank_one(weight, usable, scene.prior, _bias_noise(victim, layer)).image.view(1, *scene.shape)
    if usable is None:
        image = _scaled(scene, victim, image)
    return _Read(scene.box(image), _label(scene, victim, image))


def _complete(scene: Scene, rows: Sequence[Victim], answers: Sequence[_Read]) -> Tensor:
    """The labels (N, B), those read off the last layer included; where there is none, those that match best."""
    open_rows = [victim for victim, answer in zip(rows, answers, strict=True) if answer.labels is None]
    read = iter(read_labels(scene, open_rows)) if open_rows else iter(())
    labels = []
    for victim, answer in zip(rows, answers, strict=True):
        known = next(read) if answer.labels is None else answer.labels
        labels.append(_label(scene, victim, answer.images) if known is None else known)
    return torch.stack(labels)


def _stacked(victim: Victim, layer: InputLayer) -> tuple[Tensor, Tensor | None]:
    """The layer's matrix (outputs, P) and bias (outputs,): of several uploads one below the other, as of a wider layer.

    Averages of several releases are scaled such that the noise is as large in all rows.
    """
    if not victim.more:
        return layer.gradients(victim.gradient)
    parts = [(math.sqrt(upload.model.releases), *layer.gradients(upload.gradient)) for upload in victim.uploads]
    weight = torch.cat([scale * matrix for scale, matrix, _ in parts])
    biases = [scale * vector for scale, _, vector in parts if vector is not None]
    return weight, torch.cat(biases) if biases else None


def _bias_noise(victim: Victim, layer: InputLayer) -> float:
    """The noise in the bias over that in the weight."""
    if layer.bias is None:
        return 1.0
    deviations = victim.model.mechanism.deviations((layer.bias, layer.weight))
    bias, weight = (value.square().mean() for value in deviations.values())
    return float((bias / weight).sqrt())


def _scaled(scene: Scene, victim: Victim, image: Tensor) -> Tensor:
    """An image (1, C, H, W) known but for its length, with the factor that matches the whole upload best."""
    (label,) = read_labels(scene, [victim])
    if label is None:
        return image
    exponents = torch.linspace(-3, 3, SCALES).to(image)
    factors = torch.cat([exponents.exp(), -exponents.exp()])
    width = 6 / (SCALES - 1)
    best = image.new_tensor(1.0)
    for _ in range(ZOOMS):
        labels = label.expand(len(factors), 1)
        distances = _distances(scene, [victim] * len(factors), factors[:, None, None, None, None] * image, labels)
        best = factors[distances.argmin()]
        factors = best * (width * torch.linspace(-1, 1, SCALES).to(image)).exp()
        width *= 2 / (SCALES - 1)
    return best * image


def _label(scene: Scene, victim: Victim, image: Tensor) -> Tensor:
    """The label (1,) with which an image (1, C, H, W) matches the upload best."""
    if victim.labels is not None:
        return victim.labels
    labels = torch.arange(scene.classes, device=image.device)[:, None]
    images = image.expand(scene.classes, *image.shape)
    distances = _distances(scene, [victim] * scene.classes, images, labels)
    return labels[distances.argmin()]


def _distances(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor) -> Tensor:
    """Squared distances (N,), relative, of uploads and what images (N, B, C, H, W) with labels (N, B) would send."""
    one_hot = F.one_hot(labels, scene.classes).to(images)
    distances = []
    with torch.no_grad():
        for part in chunks(scene.network, rows, scene.shape, scene.classes):
            these = slice(part.start, part.stop)
            matcher = Matcher(scene.network, rows[these], _relative_distance, often=False)
            distances.append(matcher(images[these], one_hot[these]))
    return torch.cat(distances)


def _relative_distance(comparison: Comparison) -> Tensor:
    return squared_distance(comparison).clamp(min=0) / comparison.heard.sum(dim=1).clamp(min=1e-30)


def _read_batch(scene: Scene, victim: Victim, layer: InputLayer) -> _Read:
    """The same for an upload of several examples."""
    weight, bias = _stacked(victim, layer)
    generator = torch.Generator().manual_seed(DRAWS)
    separated = None if bias is None else separate(weight, bias, victim.model.examples, generator)
    if separated is None or layer.bias is None or not victim.one_scale:
        raise AttackRefused(MIXED.format(victim.model.examples))
    images = scene.box(separated.images.unflatten(1, scene.shape))
    return _Read(images, _labels_of(scene, victim, layer.bias, images, separated))


def _labels_of(scene: Scene, victim: Victim, bias: str, images: Tensor, separated: SparseBatch) -> Tensor:
    """The labels (B,) whose errors at the first layer point as those that were found."""
    examples = len(images)
    classes = torch.arange(scene.classes, device=images.device)
    one_hot = F.one_hot(classes[:, None].expand(-1, examples), scene.classes).to(images)
    gradients: Vector = dummy_gradients(
        scene.network, victim.parameters, images.expand(scene.classes, *images.shape), one_hot, each=True
    ).rows((bias,))
    outputs = gradients[bias].shape[-1]  # of several uploads the first's errors are used
    cosines = F.cosine_similarity(gradients[bias].detach(), separated.errors[:outputs].mT[None], dim=2)
    if victim.labels is None:
        return cosines.argmax(dim=0)
    return _assigned(cosines, victim.labels)


def _assigned(cosines: Tensor, labels: Tensor) -> Tensor:
    """Give known labels (B,) to the images, one to one, by cosines (classes, B)."""
    rows, columns = linear_sum_assignment(-cosines[labels].cpu().double().numpy())
    order = torch.empty(len(labels), dtype=torch.long)
    order[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return labels[order.to(labels.device)]
