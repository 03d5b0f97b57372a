"""Robbing the Fed (Fowl et al. 2022): an *active* server, the worst case, makes images readable in one gradient.

The server does not follow the protocol: it sends a network whose first two Linear layers it has made. All rows of the
first are the same measurement of an image, a weighted brightness, and their biases are cut points of that measurement:
row k lets an image through the ReLU if its measurement is above the k-th cut point. All columns of the second layer are
the same, so an image has the same weight in every row that it passes. It is then in the gradients of the rows up to
that of its bin, and of none after: the difference of two neighbours' gradients holds the images of one bin only, and an
image that is alone in its bin is ``(dW_k - dW_{k+1}) / (db_k - db_{k+1})``, exactly. See
``first_layer.imprint_reading``.

Two choices are not in the paper. The weights of the brightness differ a little from pixel to pixel, so that images of
few grey levels do not fall on each other or on a cut point. And the first layer is small and the second large, which
leaves the network's outputs as they are and puts nearly all of an example's gradient into the first layer: clipping
then bounds the image, and not the rest.

No passive adversary can do any of this: it measures what a mechanism is worth against a server that lies.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.attacks.methods.imprint import ImprintSettings
from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.threat import ThreatModel
from fedpriv.gradients import Vector

__all__ = [
    "ImprintLayers",
    "craft_parameters",
    "find_imprint_layers",
    "is_crafted",
    "refuse_local_training",
]

PROBE = 20240409  # the seed of the images by which the layers are found; it decides nothing else
COLUMN = 20240410  # the seed of the second layer's column
BRIGHTNESS = 20240411  # the seed of the weights of the brightness
UNEVEN = 0.5  # how far the weights of the brightness lie from their mean, relative
# Of the first layer; a power of two, so that nothing is rounded. The second layer undoes it.
SMALL = 2.0**-10


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


def refuse_local_training(settings: PublicSettings) -> None:
    """Raise AttackRefused if the clients send anything else than one gradient, or one step of SGD along it."""
    if settings.local_steps > 1 or (settings.algorithm == "fedavg" and settings.optimizer == "adam"):
        raise AttackRefused(
            f"imprint reads one gradient; the clients train for {settings.local_steps} local step(s) with "
            f"{settings.optimizer} (fedsgd, or one step of sgd, is wanted)"
        )


def craft_parameters(model: nn.Module, public_images: Tensor, threat: ThreatModel, bins: int | None = None) -> Vector:
    """Make the parameters that the server sends; those of all other layers stay as they are.

    Args:
        model: the network; it is not changed.
        public_images: (M, C, H, W), normalised, of the same kind as the clients'. The cut points are quantiles of their
            measurement: as many images in each bin.
        threat: what the adversary may do.
        bins: how many rows of the first layer become bins, from 2; ``None``: all. The others let no image through.

    Returns:
        All trained parameters, by name.

    Raises:
        AttackRefused: the adversary is passive or lacks something else, the network has no such layers, or the first
            has fewer rows than bins are wanted.
        ValueError: there are fewer than two public images.
    """
    _require(threat)
    if len(public_images) < 2:
        raise ValueError(f"{len(public_images)} public image(s); cut points need at least 2")
    channels, height, width = public_images.shape[1:]
    layers = find_imprint_layers(model, (channels, height, width))
    parameters = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    weight, bias, following = (parameters[name] for name in (layers.weight, layers.bias, layers.next_weight))
    rows = len(weight)
    if bins is not None and bins > rows:
        raise AttackRefused(f"imprint.bins = {bins}: the first layer ({layers.weight}) has {rows} rows")
    weight.copy_((SMALL * _brightness(weight)).expand_as(weight))
    measured = public_images.flatten(1).to(weight).double() @ weight[0].double()
    bias.copy_(-_cut_points(measured, bins or rows, rows))
    following.copy_(_column(len(following), measured)[:, None].expand_as(following) / (bins or rows))
    return parameters


def is_crafted(parameters: Vector, layers: ImprintLayers) -> bool:
    """Whether these are parameters that :func:`craft_parameters` may have made."""
    weight, bias, following = (parameters[name] for name in (layers.weight, layers.bias, layers.next_weight))
    alike = bool((weight == weight[:1]).all()) and bool((following == following[:, :1]).all())
    return alike and bool((bias[1:] <= bias[:-1]).all()) and bool(weight.any())


def _require(threat: ThreatModel) -> None:
    reason = threat.refusal(ImprintSettings.name, ImprintSettings.needs)
    if reason is not None:
        raise AttackRefused(f"{reason}; {threat.conduct}")


def _brightness(weight: Tensor) -> Tensor:
    """The weights (P,) of the pixels in the measurement: positive, 1 / P on average."""
    pixels = weight.shape[1]
    generator = torch.Generator().manual_seed(BRIGHTNESS)
    uneven = 1 + UNEVEN * (2 * torch.rand(pixels, generator=generator, dtype=torch.float64) - 1)
    return (uneven / pixels).to(weight)


def _cut_points(measured: Tensor, bins: int, rows: int) -> Tensor:
    """Quantiles of the measurements, ascending, then cuts that no image passes: (rows,).

    The lowest one lies below whatever an image may measure.
    """
    levels = torch.arange(bins, device=measured.device, dtype=measured.dtype) / bins
    far = 2 * (measured.max() - measured.min()) + SMALL
    cuts = torch.quantile(measured, levels)
    cuts[0] = measured.min() - far
    return torch.cat([cuts, (measured.max() + far).expand(rows - bins)])


def _column(features: int, measured: Tensor) -> Tensor:
    """The second layer's column: random signs, so that neither a ReLU nor the softmax hides an image."""
    generator = torch.Generator().manual_seed(COLUMN)
    signs = torch.randn(features, generator=generator).to(measured)
    return signs / (measured.max() - measured.min()).clamp(min=1e-6 * SMALL)


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
