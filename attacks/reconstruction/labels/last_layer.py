"""Labels read off the last layer's gradient, before any image is known.

The gradient of the cross entropy with respect to the logits is ``softmax - label``. It is the gradient of the last bias
itself, and for a last layer without bias, the gradient of its weight is that vector times the layer's input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels.logit_search import LogitSearch
from fedpriv.attacks.reconstruction.labels.trial_training import TrialTraining
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients import Vector

__all__ = [
    "JOINT",
    "OutputLayer",
    "find_output_layer",
    "infer_labels",
    "label_signatures",
    "match_labels",
    "read_labels",
]

TRIED = 4  # batches of random images on which local training is tried
CANDIDATES = 16  # for the labels of local training, out of the search on logits, that are trained with first
SEARCHED = 256  # examples at most: a search tries all pairs' places, whose memory grows with the cube
SAMPLES = 8  # random images for each class, from which a batch's labels are told
JOINT = "labels could not be read off the last layer and were optimised with the images"  # for people
PROBE = 20240229  # the seed of the images that tell which tensor is the last; it decides nothing else


@dataclass(frozen=True)
class OutputLayer:
    """The tensor whose gradient shows the labels.

    Attributes:
        name: the parameter.
        bias: whether it is added to the logits; else it is the weight (classes, features) of a layer without bias.
    """

    name: str
    bias: bool


def find_output_layer(
    network: Network, parameters: Vector, shape: tuple[int, int, int], classes: int
) -> OutputLayer | None:
    """Find the last layer by what it does, so that own networks need no naming convention.

    A bias of the last layer is a tensor (classes,) that shifts the logits by its own change. A weight of a last layer
    without bias is a matrix (classes, features) whose rows scale one logit each.

    Returns:
        The layer, or ``None`` where no tensor does either.
    """
    generator = torch.Generator().manual_seed(PROBE)
    reference = next(iter(parameters.values()))
    images = torch.randn(4, *shape, generator=generator).to(reference)
    change = torch.rand(classes, generator=generator).to(reference) + 0.5
    with torch.no_grad():
        logits = network.logits(parameters, images)
        for name in reversed(network.names):
            value = parameters[name]
            if value.shape == (classes,) and _close(
                network.logits({**parameters, name: value + change}, images), logits + change
            ):
                return OutputLayer(name, bias=True)
            if (
                value.ndim == 2
                and len(value) == classes
                and _close(network.logits({**parameters, name: value * change[:, None]}, images), logits * change)
            ):
                return OutputLayer(name, bias=False)
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max())
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5 * max(scale, 1e-30)))


def read_labels(scene: Scene, rows: Sequence[Victim]) -> list[Tensor | None]:
    """Return each row's labels (B,): known ones, else those read off once for each victim, else ``None``."""
    if all(victim.labels is not None for victim in rows):
        return [victim.labels for victim in rows]
    layer = find_output_layer(scene.network, rows[0].parameters, scene.shape, scene.classes)
    if layer is None:
        return [victim.labels for victim in rows]
    distinct = {id(victim): victim for victim in rows}
    pooled = [_pooled(victim, layer) for victim in distinct.values()]
    inferred = infer_labels(scene.network, pooled, layer, scene.shape, scene.classes)
    labels = dict(zip(distinct, inferred, strict=True))
    return [labels[id(victim)] if victim.labels is None else victim.labels for victim in rows]


def _pooled(victim: Victim, layer: OutputLayer) -> Victim:
    """The mean over several uploads of the same examples, for the last layer: labels add the same sign to each."""
    if not victim.more:
        return victim
    releases = [upload.model.releases for upload in victim.uploads]
    parts = [count * upload.gradient[layer.name] for count, upload in zip(releases, victim.uploads, strict=True)]
    mean = torch.stack(parts).sum(dim=0) / sum(releases)
    return replace(victim, gradient={**victim.gradient, layer.name: mean}, more=())


def infer_labels(
    network: Network, victims: Sequence[Victim], layer: OutputLayer, shape: tuple[int, int, int], classes: int
) -> list[Tensor | None]:
    """Guess the labels behind each upload.

    One example (iDLG, Zhao et al. 2020): the most negative entry of ``softmax - label`` is the label's, the only one
    below zero without noise. Several examples: the labels whose gradients, at random images and through the mechanism,
    add up best to what was heard (see :func:`match_labels`). Several local steps, or Adam: the labels with which
    training on random images comes closest to what was heard, searched for on the logits alone first (see
    ``labels.logit_search`` and ``labels.trial_training``); of more than SEARCHED examples, those of the line before.

    Args:
        network: the network.
        victims: the uploads.
        layer: the last layer.
        shape: (C, H, W).
        classes: number of classes.

    Returns:
        For each victim the labels (B,), ascending, or in the order of the local steps where there are several; ``None``
        where the gradient's scale is unknown (a mechanism on the whole update of several examples), so that labels
        have to be optimised with the images.
    """
    return [_infer(network, victim, layer, shape, classes) for victim in victims]


def _infer(
    network: Network, victim: Victim, layer: OutputLayer, shape: tuple[int, int, int], classes: int
) -> Tensor | None:
    heard = victim.gradient[layer.name]
    if victim.model.examples == 1:
        return _output_gradient(heard, layer).argmin().reshape(1)
    if victim.model.protects_updates:
        return None
    signatures = label_signatures(network, victim, layer, _random(victim, layer, shape), classes)
    labels = match_labels(heard.flatten(), signatures, victim.model.examples)
    if victim.model.training is None or victim.model.examples > SEARCHED:
        return labels
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(TRIED, victim.model.examples, *shape, generator=generator).to(heard)
    kept = LogitSearch(network, victim, layer.name, images, classes).search(labels)[:CANDIDATES]
    return TrialTraining(network, victim, layer.name, images, classes).improve(torch.cat([labels[None], kept]))


def _output_gradient(heard: Tensor, layer: OutputLayer) -> Tensor:
    """The vector softmax - label (classes,), from a weight up to a positive factor.

    The weight's gradient is an outer product, so its leading left singular vector is that vector up to sign, also with
    noise and for inputs of any sign; the label's entry is the largest, because it outweighs all others together.
    """
    if layer.bias:
        return heard
    if not bool(torch.isfinite(heard).all()):
        return heard.sum(dim=1)
    leading: Tensor = torch.linalg.svd(heard, full_matrices=False).U[:, 0]
    largest = leading[leading.abs().argmax()]
    return -leading * largest.sign()


def _random(victim: Victim, layer: OutputLayer, shape: tuple[int, int, int]) -> Tensor:
    """Images (SAMPLES, C, H, W)."""
    generator = torch.Generator().manual_seed(PROBE)
    return torch.randn(SAMPLES, *shape, generator=generator).to(victim.gradient[layer.name])


def label_signatures(network: Network, victim: Victim, layer: OutputLayer, images: Tensor, classes: int) -> Tensor:
    """Return what an example of each class adds to the last layer's gradient, on average over images: (classes, P).

    Args:
        network: the network.
        victim: the upload.
        layer: the last layer.
        images: (n, C, H, W), normalised.
        classes: number of classes.
    """
    images = images[:, None]
    total = []
    for label in range(classes):
        labels = F.one_hot(torch.full((len(images), 1), label), classes).to(images)
        gradients = network.gradients(victim.parameters, images, labels, shared=True, each=True)
        total.append(victim.model.expected_of_examples(gradients)[layer.name].mean(dim=0).flatten())
    return torch.stack(total)


def match_labels(heard: Tensor, signatures: Tensor, examples: int) -> Tensor:
    """Choose ``examples`` labels, duplicates allowed, whose signatures add up best to ``examples * heard``.

    One label after the other takes the largest share out of the rest; then single labels are exchanged while that
    brings the sum closer.
    """
    rest = examples * heard
    chosen: list[int] = []
    for _ in range(examples):
        label = int((rest - signatures).square().sum(dim=1).argmin())
        chosen.append(label)
        rest = rest - signatures[label]
    for _ in range(examples):
        improved = _exchange(rest, signatures, chosen)
        if improved is None:
            break
        rest = improved
    return torch.tensor(sorted(chosen), device=heard.device)


def _exchange(rest: Tensor, signatures: Tensor, chosen: list[int]) -> Tensor | None:
    """Make the single exchange that shrinks the rest most, in ``chosen`` too; ``None`` where none does."""
    candidates = rest + signatures[chosen][:, None] - signatures[None]
    distances = candidates.square().sum(dim=2)
    best = int(distances.argmin())
    out, into = divmod(best, len(signatures))
    if not float(distances[out, into]) < float(rest.square().sum()) * (1 - 1e-6):
        return None
    chosen[out] = into
    return candidates[out, into]
