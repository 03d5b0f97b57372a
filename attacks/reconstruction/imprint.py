"""Robbing the Fed (Fowl et al. 2022): an *active* server, the worst case, reads images off one gradient exactly.

The server does not follow the protocol: it sends a network whose first two Linear layers it has made. All rows of the
first are the same measurement of an image, its mean brightness, and their biases are cut points of that measurement:
row k lets an image through the ReLU if its measurement is above the k-th cut point. All columns of the second layer are
the same, so an image has the same weight in every row that it passes. It is then in the gradients of the rows up to
that of its bin, and of none after: the difference of two neighbours' gradients holds the images of one bin only, and an
image that is alone in its bin is ``(dW_k - dW_{k+1}) / (db_k - db_{k+1})``, exactly.

Clipping each example's gradient changes its weight, not that quotient. No passive adversary can do any of this: it
measures what a mechanism is worth against a server that lies.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.observation import Observation
from attacks.reconstruction.errors import AttackRefused
from attacks.reconstruction.uploads import UploadModel
from attacks.threat import Access, ThreatModel
from fedpriv.gradients import Vector

__all__ = ["NEEDS", "Imprint", "ImprintLayers", "craft_parameters", "find_imprint_layers", "read_imprint"]

NEEDS = (Access.PARAMETERS, Access.SUM, Access.BATCH_SIZE, Access.PUBLIC_DATA, Access.ACTIVE)

PROBE = 20240409  # the seed of the images by which the layers are found; it decides nothing else
COLUMN = 20240410  # the seed of the second layer's column
# A bin whose difference is so many times the rounding of the sums holds an image with an error below 1 / 256.
ROUNDINGS = 256
# With noise, a difference of so many standard deviations is taken for an image: 2e-9 a bin by chance.
DEVIATIONS = 6.0
# The noise is read off the empty bins; these are most of them if there are so many times more bins than examples.
EMPTY = 4
# Mean distance from the valid range, on the [0, 1] scale, above which what a bin holds is no image.
OUTSIDE = 0.05


@dataclass(frozen=True)
class ImprintLayers:
    """The two layers that the server makes.

    Attributes:
        weight: name of the first layer's weight (bins, pixels).
        bias: name of the first layer's bias (bins,).
        next_weight: name of the weight (features, bins) of the layer that follows it after a ReLU.
    """

    weight: str
    bias: str
    next_weight: str


@dataclass(frozen=True, eq=False)
class Imprint:
    """What was read off one upload.

    Attributes:
        images: (R, C, H, W) on the [0, 1] scale, float32 on the CPU, by brightness; R may be 0.
        bins: the number of each image's bin, int64 (R,).
        complete: whether there are as many images as examples behind the upload, so that each is alone in its bin.
            Otherwise some bins may hold mixtures of images of one brightness, which nothing here tells from images.
        note: the same for a person.
    """

    images: Tensor
    bins: Tensor
    complete: bool
    note: str


def find_imprint_layers(model: nn.Module, shape: tuple[int, int, int]) -> ImprintLayers:
    """Find the layers by what the network does with random images.

    The first is a Linear layer with bias whose input is the image itself; the second is a Linear layer whose input is
    the first one's output with negative numbers set to zero.

    Args:
        model: the network; it is not changed.
        shape: (C, H, W).

    Raises:
        AttackRefused: there are no such layers.
    """
    network = copy.deepcopy(model).eval()
    parameter = next(network.parameters())
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(3, *shape, generator=generator).to(parameter)
    with _written_down(network) as calls, torch.no_grad():
        network(images)
    flat = images.flatten(1)
    first = next((call for call in calls if _equal(call.given, flat)), None)
    if first is None or first.layer.bias is None:
        raise AttackRefused(
            "imprint needs a network whose first layer is a Linear layer with bias, behind nothing but flattening; "
            "this network has none"
        )
    passed = first.result.clamp(min=0)
    second = next((call for call in calls if _equal(call.given, passed)), None)
    if second is None:
        raise AttackRefused(f"imprint needs a ReLU and another Linear layer right after {first.name or 'the first'}")
    return ImprintLayers(f"{first.name}.weight", f"{first.name}.bias", f"{second.name}.weight")


def craft_parameters(model: nn.Module, public_images: Tensor, threat: ThreatModel) -> Vector:
    """Make the parameters that the server sends; those of all other layers stay as they are.

    Args:
        model: the network; it is not changed.
        public_images: (M, C, H, W), normalised, of the same kind as the clients'. The cut points are quantiles of their
            measurement: as many images in each bin.
        threat: what the adversary may do.

    Returns:
        All trained parameters, by name.

    Raises:
        AttackRefused: the adversary is passive or lacks something else, or the network has no such layers.
        ValueError: there are fewer than two public images.
    """
    _require(threat)
    if len(public_images) < 2:
        raise ValueError(f"{len(public_images)} public image(s); cut points need at least 2")
    channels, height, width = public_images.shape[1:]
    layers = find_imprint_layers(model, (channels, height, width))
    parameters = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    weight, bias, following = (parameters[name] for name in (layers.weight, layers.bias, layers.next_weight))
    bins, pixels = weight.shape
    weight.fill_(1 / pixels)
    measured = public_images.flatten(1).to(weight).double().mean(dim=1)
    bias.copy_(-_cut_points(measured, bins))
    following.copy_(_column(len(following), measured)[:, None].expand_as(following) / bins)
    return parameters


def read_imprint(observation: Observation, model: nn.Module, threat: ThreatModel) -> Imprint:
    """Read the images off an upload of a client that was sent crafted parameters.

    A bin holds an image if its difference of bias gradients stands out from rounding, and from the noise of the empty
    bins, and if what it holds lies in the valid range and in the bin itself. The truth has no part in this.

    Args:
        observation: one upload, or a sum of several, of a single gradient step.
        model: the network; its parameters do not matter.
        threat: what the adversary may do.

    Raises:
        AttackRefused: the adversary is passive or lacks something else, the upload is of several local steps or of
            Adam, the network has no such layers, or the parameters were not crafted.
    """
    _require(threat)
    settings = observation.settings
    if settings.local_steps > 1 or (settings.algorithm == "fedavg" and settings.optimizer == "adam"):
        raise AttackRefused(
            f"{observation.title}: imprint reads one gradient; the client trained for {settings.local_steps} local "
            f"step(s) with {settings.optimizer}"
        )
    layers = find_imprint_layers(model, settings.shape)
    upload = UploadModel.of(settings, observation.redistribution).gradient(observation.upload)
    cuts = -observation.parameters[layers.bias].double()
    if not _is_crafted(observation.parameters, layers, cuts):
        raise AttackRefused(f"{observation.title}: the parameters that the client was sent were not made for imprint")
    sums = torch.cat([upload[layers.weight].double(), upload[layers.bias].double()[:, None]], dim=1)
    each = sums - torch.cat([sums[1:], torch.zeros_like(sums[:1])])
    precision = torch.finfo(observation.upload[layers.bias].dtype).eps
    visible = each[:, -1].abs() > _threshold(sums[:, -1], each[:, -1], settings.examples, precision)
    bins = visible.nonzero().flatten()
    normalised = each[bins, :-1] / each[bins, -1:]
    mean, std = (torch.tensor(values).to(normalised)[:, None, None] for values in (settings.mean, settings.std))
    images = normalised.unflatten(1, settings.shape) * std + mean
    upper = torch.cat([cuts[1:], cuts.new_full((1,), torch.inf)])
    slack = OUTSIDE / float(std.min())
    measured = normalised.mean(dim=1)
    in_bin = (measured > cuts[bins] - slack) & (measured < upper[bins] + slack)
    in_range = (images - images.clamp(0, 1)).abs().flatten(1).mean(dim=1) < OUTSIDE
    kept = in_bin & in_range
    count, complete = int(kept.sum()), int(kept.sum()) == settings.examples
    note = f"active server (imprint): {count} of {settings.examples} images stand out"
    note += "" if complete else "; two of the same brightness show as a mixture"
    return Imprint(images[kept].clamp(0, 1).float().cpu(), bins[kept].cpu(), complete, note)


def _require(threat: ThreatModel) -> None:
    reason = threat.refusal("imprint", NEEDS)
    if reason is not None:
        raise AttackRefused(f"{reason}; {threat.conduct}")


def _cut_points(measured: Tensor, bins: int) -> Tensor:
    """Quantiles of the measurements, ascending: (bins,). The lowest one lies below whatever an image may measure."""
    levels = torch.arange(bins, device=measured.device, dtype=measured.dtype) / bins
    cuts = torch.quantile(measured, levels)
    cuts[0] = measured.min() - 2 * (measured.max() - measured.min()) - 1
    return cuts


def _column(features: int, measured: Tensor) -> Tensor:
    """The second layer's column: random signs, so that neither a ReLU nor the softmax hides an image; small."""
    generator = torch.Generator().manual_seed(COLUMN)
    signs = torch.randn(features, generator=generator).to(measured)
    return signs / (measured.max() - measured.min()).clamp(min=1e-6)


def _threshold(sums: Tensor, differences: Tensor, examples: int, precision: float) -> Tensor:
    """What a difference of bias gradients has to exceed."""
    rounding = ROUNDINGS * precision * sums.abs().max()
    if examples * EMPTY > len(differences):
        return rounding
    # The median absolute deviation over all bins, of which most are empty.
    return torch.maximum(rounding, DEVIATIONS * differences.abs().median() / 0.6745)


def _is_crafted(parameters: Vector, layers: ImprintLayers, cuts: Tensor) -> bool:
    weight, following = parameters[layers.weight], parameters[layers.next_weight]
    alike = bool((weight == weight[:1]).all()) and bool((following == following[:, :1]).all())
    return alike and bool((cuts[1:] >= cuts[:-1]).all()) and bool(weight.any())


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    layer: nn.Linear
    given: Tensor
    result: Tensor


@contextmanager
def _written_down(network: nn.Module) -> Iterator[list[_Call]]:
    """Write down what each Linear layer is given and returns."""
    calls: list[_Call] = []

    def listen(name: str) -> None:
        def hook(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            if isinstance(layer, nn.Linear):
                calls.append(_Call(name, layer, given[0].clone(), result.clone()))

        handles.append(network.get_submodule(name).register_forward_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            listen(name)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))
