"""Images read off the gradient of a first Linear layer, without optimisation.

The gradient of its weight is the sum of ``e x^T`` over the examples, that of its bias the sum of ``e``: see
``first_layer.rank_one`` for one example, with or without noise, and
``first_layer.batch`` for several. Local training with SGD changes the errors e, not
the images, so that updates of several steps can be read too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.first_layer.batch import read_batch, stacked
from fedpriv.attacks.reconstruction.first_layer.input_layer import InputLayer, find_input_layer
from fedpriv.attacks.reconstruction.first_layer.rank_one import exact, rank_one
from fedpriv.attacks.reconstruction.first_layer.vmf_reading import read_blocks
from fedpriv.attacks.reconstruction.labels.last_layer import read_labels
from fedpriv.attacks.reconstruction.matching.distances import squared_distance
from fedpriv.attacks.reconstruction.matching.matcher import Comparison, Matcher
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.starts import Start
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["read_starts", "run_closed_form"]

SCALES = 25  # factors of an image that are tried at once
ZOOMS = 3  # times
NO_LAYER = "closed_form needs a network whose first layer multiplies the image itself (Linear behind flattening)"


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
    labels = _complete(scene, rows, answers)
    losses = _losses(scene, rows, answers, labels)
    report(1, losses)
    notes = tuple(answer.note for answer in answers)
    return Outcome(tuple(answer.images for answer in answers), labels, losses, torch.ones(len(rows)).long(), notes)


def read_starts(scene: Scene, victims: Sequence[Victim]) -> list[Start]:
    """Return what attacks that start there are given: as many images a victim as its public number says.

    Images that the first layer does not show are the prior's mean; then no labels are told.

    Raises:
        AttackRefused: as for :func:`run_closed_form`.
    """
    answers = _read_all(scene, victims)
    labels = _complete(scene, victims, answers)
    return [
        Start.of(scene, answer.images, known, victim.model.examples)
        for victim, answer, known in zip(victims, answers, labels, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Read:
    """Images (n, C, H, W) and labels (n,); the labels are ``None`` where the last layer tells them without error.

    ``unexplained`` is the share of the squared gradient that is none of these images'; ``None``: not of a batch.
    """

    images: Tensor
    labels: Tensor | None
    note: str = ""
    unexplained: float | None = None


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
    if victim.in_small_blocks:
        image, label = read_blocks(scene, victim, layer)
        return _Read(scene.box(image[None]), label[None])
    if victim.model.examples > 1 or victim.pool:
        batch = read_batch(scene, victim, layer)
        return _Read(batch.images, batch.labels, batch.note, batch.unexplained)
    weight, bias = stacked(victim, layer)
    usable = bias if victim.one_scale else None
    clean = exact(weight, usable)
    if clean is not None:
        return _Read(scene.box(clean.image.view(1, *scene.shape)), None)
    image = rank_one(weight, usable, scene.prior, _bias_noise(victim, layer)).image.view(1, *scene.shape)
    if usable is None:
        image = _scaled(scene, victim, image)
    return _Read(scene.box(image), _label(scene, victim, image))


def _complete(scene: Scene, rows: Sequence[Victim], answers: Sequence[_Read]) -> tuple[Tensor, ...]:
    """Each row's labels (n,), those read off the last layer included; where there is none, those that match best."""
    open_rows = [victim for victim, answer in zip(rows, answers, strict=True) if answer.labels is None]
    read = iter(read_labels(scene, open_rows)) if open_rows else iter(())
    labels = []
    for victim, answer in zip(rows, answers, strict=True):
        known = next(read) if answer.labels is None else answer.labels
        labels.append(_label(scene, victim, answer.images) if known is None else known)
    return tuple(labels)


def _losses(scene: Scene, rows: Sequence[Victim], answers: Sequence[_Read], labels: Sequence[Tensor]) -> Tensor:
    """What the images leave unexplained (N,), relative: of single ones in all layers, of batches in the first."""
    losses = torch.tensor([answer.unexplained or 0.0 for answer in answers], dtype=torch.float64)
    single = [row for row, answer in enumerate(answers) if answer.unexplained is None]
    if single:
        pictures = torch.stack([answers[row].images for row in single])
        known = torch.stack([labels[row] for row in single])
        losses[single] = _distances(scene, [rows[row] for row in single], pictures, known).cpu().double()
    return losses


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
