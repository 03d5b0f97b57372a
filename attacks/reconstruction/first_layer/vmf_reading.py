"""One image and its label from an upload of von Mises-Fisher draws on blocks of D coordinates."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.relus import kink_inputs
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.first_layer.input_layer import InputLayer
from fedpriv.attacks.reconstruction.first_layer.vmf_blocks import (
    SHARPEST,
    HeardBlocks,
    LengthSearch,
    Units,
    heard_blocks,
)
from fedpriv.attacks.reconstruction.matching.distances import squared_distance
from fedpriv.attacks.reconstruction.matching.matcher import Comparison, Matcher, Precision
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.mechanisms.machinery.blocks import block_length
from fedpriv.mechanisms.vmf import VmfMechanism

__all__ = ["read_blocks"]

REFINED = 2  # rounds of lengths that the whole upload decides
NEEDS = (
    "closed_form on blocks of a size needs vmf, one example, one upload of one draw, and a block of D numbers within a "
    "row of {} pixels; given {}, examples {}, uploads {}, draws {:g}"
)


def read_blocks(scene: Scene, victim: Victim, layer: InputLayer) -> tuple[Tensor, Tensor]:
    """Read the image off the first layer, and its sign, lengths and label off all layers.

    Args:
        scene: what is public.
        victim: its mechanism is vmf with blocks of a size.
        layer: the first layer.

    Returns:
        The image (C, H, W), normalised, and its label ().

    Raises:
        AttackRefused: it is not a single draw for a single example, or no block lies within a row.
    """
    heard = _heard(victim, layer, scene.pixels)
    search = LengthSearch(heard, scene.prior.to(heard.rows), _relus(scene, victim, layer))
    known = torch.arange(scene.classes) if victim.labels is None else victim.labels.cpu()
    upload = _Upload(scene, victim, heard)
    searched = [search.settle(sign) for sign in (1.0, -1.0)]
    images = [search.image(lengths) for lengths in searched]
    tried = [
        (lengths.surprise + upload.mismatch(label, images[number]).item(), number, label)
        for number, lengths in enumerate(searched)
        for label in known.tolist()
    ]
    _, number, label = min(tried)
    lengths = searched[number]
    for _ in range(REFINED):
        lengths = search.refine(lengths, partial(upload.mismatch, label))
    image = search.image(lengths)
    return image.to(scene.mean).view(scene.shape), torch.tensor(label, device=scene.mean.device)


def _heard(victim: Victim, layer: InputLayer, pixels: int) -> HeardBlocks:
    mechanism, model = victim.model.mechanism, victim.model
    single = model.examples == 1 and not victim.more and model.releases == 1 and model.training is None
    if isinstance(mechanism, VmfMechanism) and single and not layer.transposed:
        before = list(victim.gradient)[: list(victim.gradient).index(layer.weight)]
        offset = sum(victim.gradient[name].numel() for name in before)
        weight, _ = layer.gradients(victim.gradient)
        length = block_length(mechanism.blocks)
        heard = None if length is None else heard_blocks(weight, offset, length, mechanism.kappa)
        if heard is not None:
            return heard
    kind = f"{mechanism.name}, {getattr(mechanism, 'blocks', 'blocks')}" + (", transposed" if layer.transposed else "")
    raise AttackRefused(NEEDS.format(pixels, kind, model.examples, len(victim.uploads), model.releases))


def _relus(scene: Scene, victim: Victim, layer: InputLayer) -> Units | None:
    """The layer's units, if what it gives goes to ReLUs."""
    probe = torch.linspace(-1, 1, scene.pixels).to(next(iter(victim.parameters.values())))
    inputs = kink_inputs(scene.network, victim.parameters, probe.view(1, *scene.shape))
    weight, bias = layer.gradients(victim.parameters)
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    if (
        not inputs
        or inputs[0].shape != (1, len(weight))
        or not torch.allclose(inputs[0][0], weight @ probe + bias, rtol=1e-3, atol=1e-4)
    ):
        return None
    return Units(weight.cpu().double(), bias.cpu().double())


class _Upload:
    """How well images explain the whole upload."""

    def __init__(self, scene: Scene, victim: Victim, heard: HeardBlocks) -> None:
        self._scene = scene
        precision: Precision = "float32" if scene.network.device.type == "mps" else "float64"
        self._matcher = Matcher(scene.network, [victim], _relative_distance, precision)
        coordinates = sum(value.numel() for value in victim.gradient.values())
        across = max(heard.across, 1 / (SHARPEST * heard.length))
        self._scale = math.ceil(coordinates / heard.length) / (2 * across)

    def mismatch(self, label: int, image: Tensor) -> Tensor:
        """Minus the logarithm of the upload's density given an image (P,) and its label, but for a constant."""
        images = image.view(1, 1, *self._scene.shape).to(self._scene.network.device)
        one_hot = F.one_hot(torch.tensor([[label]], device=images.device), self._scene.classes)
        distance: Tensor = self._matcher(images, one_hot)[0]
        return self._scale * distance.to(image)


def _relative_distance(comparison: Comparison) -> Tensor:
    return squared_distance(comparison) / comparison.heard.sum(dim=1).clamp(min=1e-30)
