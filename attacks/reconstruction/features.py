"""Reconstruct each image of a batch alone, from the features that reached the last layer.

The objective is the squared distance of features, each on its own scale, plus a prior of images. L-BFGS minimises it
in coordinates in which the pixels of photographs are independent, which finds the coarse parts. Then signed Adam goes
on in pixels, with a total variation that falls. The label of each image is known from the same layer. The features
may be what an earlier convolution got, which says more.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.activations import (
    TYPICAL,
    Contrast,
    Features,
    deepened,
    nearest,
    read_activation,
    read_contrast,
)
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, plain_gradients, twice_differentiable
from fedpriv.attacks.reconstruction.first_layer.batch import Spectrum, images_of, polish, scaled, take_apart
from fedpriv.attacks.reconstruction.first_layer.closed_form import PatchTable, find_patch_table
from fedpriv.attacks.reconstruction.labels import find_output_layer, read_labels
from fedpriv.attacks.reconstruction.lbfgs import differentiable, minimise
from fedpriv.attacks.reconstruction.matching import opponent_variation
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Scene, Start, time_is_up
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.reconstruction.variables import SIDE, coordinates_of
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied

# What reached the last Linear layer for each example of a batch, from that layer's gradient, with its label.
#
# The gradient is a sum of products of ``softmax - label`` and features, as a first layer's is of errors and images
# (after Kariyappa et al. 2023). These errors sum to zero: at most classes - 1 examples can be told apart.


DRAWS = 8  # sets of random images whose softmax the search starts from
EXPLAINED = 1e-12  # misfit of features that explain the gradient, so that no other start can be better
SEED = 20261124  # of these images; they are no part of the result
NO_LAYER = "this needs a network that ends in a Linear layer with bias"
NOT_ONE = "features need the gradient of one step, not the update of local training, and weight and bias on one scale"
FEW = (
    "{} of {} examples stand apart in the last layer's gradient; features need all, and at most one fewer than there "
    "are classes ({})"
)
UNKNOWN = "the labels of the batch cannot be read off the last layer, and features start from them"


def read_features(scene: Scene, victim: Victim) -> Features:
    """Tell the examples of a batch apart by the last layer."""
    name, layer = last_layer(scene.network, victim.parameters, scene.shape, scene.classes)
    if victim.model.training is not None or victim.model.protects_updates or victim.pool or not victim.one_scale:
        raise AttackRefused(NOT_ONE)
    weight, bias = (f"{name}.weight", f"{name}.bias")
    matrix = torch.cat([victim.gradient[weight], victim.gradient[bias][:, None]], dim=1)
    count = victim.model.examples
    spectrum = take_apart(matrix, victim.noise_in(weight), count)
    if spectrum.examples != count:
        raise AttackRefused(FEW.format(spectrum.examples, count, scene.classes))
    (labels,) = read_labels(scene, [victim])
    if labels is None:
        raise AttackRefused(UNKNOWN)
    if layer.in_features < count:
        raise AttackRefused(FEW.format(layer.in_features, count, scene.classes))
    return _best(scene, victim, spectrum, name, labels)


def last_layer(
    network: Network, parameters: Vector, shape: tuple[int, int, int], classes: int
) -> tuple[str, nn.Linear]:
    """Return the Linear layer whose results are the logits, with its name."""
    output = find_output_layer(network, parameters, shape, classes)
    for name, layer in network.model.named_modules():
        if isinstance(layer, nn.Linear) and output is not None and output.name == f"{name}.bias":
            return name, layer
    raise AttackRefused(NO_LAYER)


def _best(scene: Scene, victim: Victim, spectrum: Spectrum, name: str, labels: Tensor) -> Features:
    """The features that explain most, of searches from the errors of several sets of random images."""
    labels = labels.cpu()
    errors = _Errors(victim.parameters, name, labels, victim.model.examples)
    clipped = victim.model.mechanism.protects
    candidates: list[Features] = []
    for guess in _softmax_draws(scene, victim, len(labels)):
        start = scaled(spectrum, spectrum.left.mT @ (guess - errors.one_hot).mT)
        if start is None:
            continue
        # Clipping multiplies each example's errors with a number that only its whole gradient tells.
        polished = None if clipped else polish(spectrum, start, errors)
        mixing = start if polished is None else polished.mixing
        misfit = errors.misfit(spectrum, mixing) if polished is None else polished.misfit
        candidates.append(Features(name, images_of(spectrum, mixing), labels.to(scene.mean.device), misfit))
        if misfit < EXPLAINED:
            break
    if not candidates:
        raise AttackRefused(FEW.format(0, len(labels), scene.classes))
    return min(candidates, key=lambda features: features.misfit)


def _softmax_draws(scene: Scene, victim: Victim, count: int) -> Iterator[Tensor]:
    """Probabilities (B, classes) at random images: first a mean, for all examples alike, then single ones, then all's.

    Each draw of images passes through the network only when it is wanted: mostly the first start explains everything.
    """
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for numbers in torch.randn(DRAWS, count, *scene.shape, generator=generator).to(scene.mean):
        with torch.no_grad():
            found.append(scene.network.logits(victim.parameters, numbers).softmax(dim=1).double().cpu())
        if len(found) == 1:
            yield found[0].mean(dim=0).expand(count, -1)
        yield found[-1]
    yield torch.cat(found).mean(dim=0).expand(count, -1)


class _Errors:
    """``(softmax - label) / B`` of features (N, B, F) with labels (B,), as the search asks for it."""

    def __init__(self, parameters: Vector, name: str, labels: Tensor, examples: int) -> None:
        self._weight = parameters[f"{name}.weight"].double().cpu()
        self._bias = parameters[f"{name}.bias"].double().cpu()
        self._examples = examples
        self.one_hot = F.one_hot(labels, len(self._bias)).double()

    def __call__(self, features: Tensor) -> Tensor:
        softmax = (features @ self._weight.mT + self._bias).softmax(dim=2)
        return (softmax - self.one_hot) / self._examples

    def misfit(self, spectrum: Spectrum, mixing: Tensor) -> float:
        """One minus the mean cosine of errors found and errors of the features found."""
        expected = self(images_of(spectrum, mixing)[None])[0]
        return 1 - float(F.cosine_similarity(spectrum.left @ mixing, expected.mT, dim=0).mean())


ITERATIONS = 300
PRIOR = 1e-4  # weight of the coordinates' mean square next to the features' relative squared distance
COARSE = 6  # and a third of the steps are those of L-BFGS
FAINT = 0.1  # deviation of the coordinates that L-BFGS starts from where a picture of zeros has no features
RATE = 0.4  # of signed Adam, at its start
MOMENTS = (0.8, 0.99)  # how it averages: the steps are few
VARIATION = (0.3, 5e-3)  # weight of the opponents' variation at 32 pixels a side, at the start and least
ALIKE = 2.5  # power of the side with which that weight grows
NO_TAPE = "features need a last layer that can be followed: a torch.nn.Linear that the network calls once"


def read_feature_starts(scene: Scene, victims: Sequence[Victim], iterations: int = ITERATIONS) -> list[Start]:
    """Return each victim's images and labels."""
    return [
        _from_positions(scene, victim, iterations) or _invert(scene, victim, read_features(scene, victim), iterations)
        for victim in victims
    ]


def _invert(scene: Scene, victim: Victim, features: Features, iterations: int) -> Start:
    if time_is_up():
        return Start(torch.zeros(len(features.labels), *scene.shape).to(scene.mean), features.labels)
    target = _Target(scene, victim, features)
    begin = torch.zeros(target.count, *scene.shape)
    if target.contrast is not None:
        begin = FAINT * torch.randn(begin.shape, generator=torch.Generator().manual_seed(SEED))
    first = min(iterations, COARSE + iterations // 3)
    coarse = _coarse(scene, begin.to(scene.mean), target.distances, first, target.contrast is not None)
    coarse = target.restored(coarse) if target.count == 1 else target.typical(coarse)
    images = target.restored(_sharpened(scene, coarse, target.distances, iterations - first))
    return Start(images, target.labels(images))


class _Target:
    """What a layer got, the last or an earlier one, which images are sought for."""

    def __init__(self, scene: Scene, victim: Victim, features: Features) -> None:
        self._scene, self._victim, self._features = scene, victim, features
        inner = read_activation(scene, victim)
        self._inner = None if inner is None else deepened(scene, victim, inner, features)
        self.contrast = read_contrast(scene.network, victim.parameters, victim.gradient)  # None: no norm hides it
        layer, values = features.layer, features.values
        if self._inner is not None:
            layer, values = self._inner.layer, self._inner.values.flatten(1)
        self._given = _layer_inputs(scene.network, victim.parameters, layer)
        self._wanted = values.to(scene.mean)
        sizes = self._wanted.square().mean(dim=1).clamp(min=1e-30)
        self._scales = sizes if self._inner is None else self._inner.apart.to(sizes)

    @property
    def count(self) -> int:
        """B, how many images there are."""
        return len(self._wanted)

    def distances(self, images: Tensor, index: Tensor | slice) -> Tensor:
        """Return how far images are from what the layer got, which of an earlier one is known up to factors."""
        made, wanted = self._given(images), self._wanted[index]
        if self._inner is None:
            return (made - wanted).square().mean(dim=1) / self._scales[index]
        return (1 - F.cosine_similarity(made, wanted, dim=1).square()) / self._scales[index]

    def labels(self, images: Tensor) -> Tensor:
        """Return the label of each image: of images in any order, by the features they are nearest to."""
        if self._inner is None:
            return self._features.labels
        made = _layer_inputs(self._scene.network, self._victim.parameters, self._features.layer)(images).detach()
        return self._features.labels[nearest(made, self._features.values).to(self._features.labels.device)]

    def typical(self, images: Tensor) -> Tensor:
        """Return images in the box, with the contrast that most have if a norm hides theirs."""
        return self._scene.box(images if self.contrast is None else TYPICAL**0.5 * images)

    def restored(self, images: Tensor) -> Tensor:
        """Return images in the box, with the contrast that a norm hides."""
        if self.contrast is not None and self.count == 1:
            images = self.contrast.restored(images)
        elif self.contrast is not None:
            shares = _wholes(self._scene, self._victim, self.contrast, images, self.labels(images))
            images = self.contrast.restored(images, shares)
        return self._scene.box(images)


def _wholes(scene: Scene, victim: Victim, hidden: Contrast, images: Tensor, labels: Tensor) -> Tensor:
    """Each example's share of what the gradient of the first norm tells, as of these images: (B, groups)."""
    name = f"{hidden.norm}.weight"
    fixed = {key: value.detach() for key, value in victim.parameters.items()}
    shares = []
    for image, label in zip(images, F.one_hot(labels, scene.classes).to(scene.mean), strict=True):
        with torch.enable_grad():
            weight = fixed[name].clone().requires_grad_()
            loss = scene.network.loss(fixed | {name: weight}, image[None], label[None])
            (gradient,) = torch.autograd.grad(loss, weight)
        shares.append((gradient * weight.detach()).double().view(hidden.groups, -1).sum(dim=1) / len(images))
    return torch.stack(shares).cpu()


Distances = Callable[[Tensor, Tensor | slice], Tensor]


def _coarse(scene: Scene, begin: Tensor, distances: Distances, iterations: int, one_length: bool) -> Tensor:
    """Images (B, C, H, W) by L-BFGS in coordinates, until time is up, but some steps at least."""
    coordinates = coordinates_of(scene.shape).to(scene.mean)

    def images_at(points: Tensor) -> Tensor:
        images = coordinates.images(points.unflatten(1, scene.shape))
        return images / images.square().mean(dim=(1, 2, 3), keepdim=True).sqrt() if one_length else images

    def losses(points: Tensor, index: Tensor) -> Tensor:
        return distances(images_at(points), index) + PRIOR * points.square().mean(dim=1)

    def going_on(done: int, _: Tensor) -> bool:
        return done < 2 * COARSE or not time_is_up()

    return images_at(minimise(differentiable(losses), begin.flatten(1), iterations, going_on).points)


def _sharpened(scene: Scene, start: Tensor, distances: Distances, iterations: int, rate: float = RATE) -> Tensor:
    """Go on from images (B, C, H, W), by signed Adam, until time is up."""
    images = start.clone()
    adam = torch.optim.Adam([images], lr=rate, betas=MOMENTS)
    # Photographs look the same at all scales: in a larger one neighbours are more alike.
    most, least = (weight * (images.shape[2] / SIDE) ** ALIKE for weight in VARIATION)
    for step in range(iterations):
        if time_is_up():
            break
        left = 1 - step / iterations
        leaf = images.detach().requires_grad_()
        with torch.enable_grad():
            smooth = max(least, most * left**2) * opponent_variation(leaf[:, None])
            (gradient,) = torch.autograd.grad((distances(leaf, slice(None)) + smooth).sum(), leaf)
        images.grad = gradient.sign()
        adam.param_groups[0]["lr"] = rate * (1 - math.cos(math.pi * left)) / 2
        adam.step()
        images.copy_(scene.box(images))
    return images


# A batch whose patches have a table of positions, as in vision transformers.
#
# The gradient of the table holds each patch's error, summed over the images alone. These errors are nearly the same for
# all patches, and what little differs tells the patches: it is compared on a scale of its own, or it would count for
# nothing. Kernels and vectors tell what patches have in common; large matrices would double the time of a step. A large
# image is looked for as an enlarged small one: the path is shorter, and patches tell little of their finest details.


POSITION_RATE = 0.1  # of signed Adam
COMMON = 4  # weight of all else next to the differences between patches
ASUNDER = 0.01  # deviation of the pixels at the start, or images of one label would stay the same


def _from_positions(scene: Scene, victim: Victim, iterations: int) -> Start | None:
    """Images and labels; ``None``: there is no such table, or more than one exact gradient."""
    found = find_patch_table(scene, victim)
    exact = victim.model.training is None and not victim.noise_variance
    if found is None or not exact or victim.pool or not victim.one_scale:
        return None
    (labels,) = read_labels(scene, [victim])
    if labels is None:
        raise AttackRefused(UNKNOWN)
    distances = _PatchDistances(scene, victim, found, labels)
    channels, *size = scene.shape
    small = [min(side, SIDE) for side in size]
    begin = ASUNDER * torch.randn(len(labels), channels, *small, generator=torch.Generator().manual_seed(SEED))

    def enlarged(images: Tensor) -> Tensor:
        return images if small == size else F.interpolate(images, size, mode="bilinear")

    def from_small(images: Tensor, index: Tensor | slice) -> Tensor:
        return distances(enlarged(images))

    return Start(enlarged(_sharpened(scene, begin.to(scene.mean), from_small, iterations, POSITION_RATE)), labels)


class _PatchDistances:
    """How far the gradient of a batch is from the upload: what differs between patches, and all else."""

    def __init__(self, scene: Scene, victim: Victim, found: PatchTable, labels: Tensor) -> None:
        self._network = scene.network
        self._found = found
        self._one_hot = F.one_hot(labels, scene.classes).to(scene.mean)
        self._fixed = {name: value.detach() for name, value in victim.parameters.items()}
        self._compared = {
            name: self._fixed[name]
            for name, value in victim.gradient.items()
            if name in (found.table, found.kernels) or value.ndim == 1
        }
        self._heard = self._parts({name: victim.gradient[name] for name in self._compared})
        self._sizes = [float(part.square().sum().clamp(min=1e-30)) for part in self._heard]

    def __call__(self, images: Tensor) -> Tensor:
        """Return the distance of a batch (B, C, H, W), a share for each image (B,)."""
        with twice_differentiable():
            made = self._parts(plain_gradients(self._loss, self._compared, images, self._one_hot))
        differs, *common = (
            (one - other).square().sum() / size for one, other, size in zip(made, self._heard, self._sizes, strict=True)
        )
        total: Tensor = differs + COMMON * torch.stack(common).mean()
        return (total / len(images)).expand(len(images))

    def _loss(self, leaves: Vector, images: Tensor, labels: Tensor) -> Tensor:
        return self._network.loss(self._fixed | leaves, images, labels)

    def _parts(self, gradient: Vector) -> list[Tensor]:
        """The differences between patches, then all else."""
        table = gradient[self._found.table][0]
        patches, rest = table[-self._found.count :], table[: -self._found.count]
        mean = patches.mean(dim=0)
        others = [value for name, value in gradient.items() if name != self._found.table]
        return [patches - mean, mean, rest, *others]


class _Reached(Exception):
    """The layer was reached: the rest of the network need not run."""


def _layer_inputs(network: Network, parameters: Vector, name: str) -> Callable[[Tensor], Tensor]:
    """Return the function from images (B, C, H, W) to what a layer gets, (B, F), in the layout of fastest kernels."""
    model = copied(network.model)
    model.load_state_dict(dict(parameters), strict=False)
    model.requires_grad_(False).to(memory_format=torch.channels_last)
    kept: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        kept.append(inputs[0])
        raise _Reached

    model.get_submodule(name).register_forward_pre_hook(keep)

    def given(images: Tensor) -> Tensor:
        with suppress(_Reached):
            model(images.contiguous(memory_format=torch.channels_last))
        if len(kept) != 1:
            raise AttackRefused(NO_TAPE)
        return kept.pop().flatten(1)

    return given
