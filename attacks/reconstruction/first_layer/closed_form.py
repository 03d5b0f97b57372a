"""Images read off the gradient of a first Linear layer, without optimisation.

The gradient of its weight is the sum of ``e x^T`` over the examples, the gradient of its bias the sum of ``e``. One
example is read here, with or without noise, draws on blocks included; ``first_layer.batch`` reads several. Local
training with SGD changes the errors e, not the images, so that updates of several steps can be read too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from fedpriv.accounting.vmf_functions import log_mgf, mean_resultant_length
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import kink_inputs
from fedpriv.attacks.reconstruction.first_layer.batch import (
    InputLayer,
    LayerReading,
    find_input_layer,
    read_batch,
    stacked,
)
from fedpriv.attacks.reconstruction.labels import read_labels
from fedpriv.attacks.reconstruction.matching import Compared, Matcher, Precision, compared, squared_distance
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene, Start
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.gradients.operator import in_double
from fedpriv.mechanisms.machinery.base import block_length
from fedpriv.mechanisms.machinery.vmf_sampling import mean_cosine
from fedpriv.mechanisms.vmf import VmfMechanism

# The image x of one example from the matrix ``e x^T`` and the bias ``e`` of a first Linear layer.
#
# With noise, errors e and image x are estimated in turn: given one, the other is a projection, shrunk by what the prior
# leaves open (variational Bayes for rank one, e on a sphere: Smidl and Quinn 2007). The length of e, and with it the
# contrast of the image, follows from the bias, and from the prior where noise covers the bias.


EXACT = 1e-12  # squared distance to a matrix of rank one, relative, that rounding alone explains
PROVING_ROWS = 64  # rows with the largest errors, on which that is tested
POWER_STEPS = 30  # of the power method for the first direction
TURNS = 40  # most turns of errors and image
SETTLED = 1e-4  # relative change of the image in a turn after which it stays
WIDE = 61  # lengths of the errors, of each sign, that are tried first
NARROW = 17  # lengths around the best one that are tried then
ZOOMS = 8  # times
SCALES = 801  # values of v that are summed over
LEAST_SPREAD = 0.1  # of the logarithm of an image's power over the prior's


@dataclass(frozen=True, eq=False)
class RankOne:
    """What the matrix (outputs, P) and the bias of a first layer say."""

    image: Tensor  # (P,), on the scale of the network's input
    errors: Tensor  # (outputs,), the derivative with respect to the layer's output
    deviation: float  # the noise in each entry, as seen in what is not of rank one


def quotient(weight: Tensor, bias: Tensor) -> RankOne:
    """Return the quotient of matrix (outputs, P) and bias, rows weighted by the squared bias: right without noise."""
    image = (weight.mT @ bias) / bias.square().sum()
    rows = bias.abs().topk(min(PROVING_ROWS, len(bias))).indices
    rest = weight[rows] - torch.outer(bias[rows], image)
    return RankOne(image, bias, float(rest.square().mean().sqrt()))


def exact(weight: Tensor, bias: Tensor | None) -> RankOne | None:
    """Return the quotient if the rows with the largest errors are of rank one up to rounding, else ``None``."""
    if bias is None or not bool(bias.any()):
        return None
    estimate = quotient(weight, bias)
    squared = float(bias.abs().topk(min(PROVING_ROWS, len(bias))).values.square().mean())
    size = squared * float(estimate.image.square().mean())
    return estimate if estimate.deviation**2 <= EXACT * size else None


def rank_one(weight: Tensor, bias: Tensor | None, prior: GaussianPrior, bias_noise: float = 1.0) -> RankOne:
    """Estimate image and errors; without a bias on the matrix' scale, contrast and sign are guesses of the prior."""
    return exact(weight, bias) or _Estimate(weight, bias, prior, bias_noise).settle()


class _Estimate:
    """Image and errors in turn."""

    def __init__(self, weight: Tensor, bias: Tensor | None, prior: GaussianPrior, bias_noise: float) -> None:
        self._weight = weight
        self._bias = bias
        self._bias_noise = bias_noise
        self._prior = prior
        self._precise = in_double(weight)
        self._squared = float(self._precise.square().sum())
        self._lengths = _Lengths(prior)

    def settle(self) -> RankOne:
        """Take turns until the image stays."""
        unit, certainty = self._first_direction(), 1.0
        image, length, deviation = self._prior.mean, 0.0, 0.0
        for _ in range(TURNS):
            seen = self._weight.mT @ unit
            deviation = self._deviation(unit)
            bias_seen = None if self._bias is None else certainty * float(self._bias @ unit)
            inferred = self._lengths.infer(certainty * seen, bias_seen, deviation, self._bias_noise * deviation)
            change = float((inferred.image - image).norm() / inferred.image.norm())
            image, length = inferred.image, inferred.length
            unit, size = self._direction(inferred)
            certainty = mean_cosine(size / deviation**2, len(unit))
            if change < SETTLED:
                break
        return RankOne(image, length * unit, deviation)

    def _first_direction(self) -> Tensor:
        """The unit vector of errors that explains most, were the image drawn from the prior (power method)."""
        prior = self._prior
        columns = (self._weight @ prior.basis) * prior.variances.sqrt()
        if self._bias is not None:
            middle = self._weight @ prior.mean + self._bias
            columns = torch.cat([columns, middle[:, None]], dim=1)
        direction = columns[:, columns.square().sum(dim=0).argmax()]
        for _ in range(POWER_STEPS):
            direction = columns @ (columns.mT @ _unit(direction))
        return _unit(direction)

    def _direction(self, inferred: "_Inferred") -> tuple[Tensor, float]:
        """The errors' direction given the image, and how strongly it is seen in units of the squared noise."""
        seen = self._weight @ inferred.product
        if self._bias is not None:
            seen = seen + inferred.length / self._bias_noise**2 * self._bias
        return _unit(seen), float(seen.norm())

    def _deviation(self, unit: Tensor) -> float:
        """The noise in what is left of the matrix when its part along a direction is taken away."""
        rows, pixels = self._weight.shape
        # A difference of large numbers: the rounding of a projection in float32 would be seen in it.
        precise = in_double(unit)
        rest = self._squared - float(
            (self._precise.mT @ precise).square().sum() / precise.square().sum().clamp(min=1e-30)
        )
        return math.sqrt(max(rest, EXACT * self._squared, 1e-60) / (max(rows - 1, 1) * pixels))


@dataclass(frozen=True, eq=False)
class _Inferred:
    """Means over what the lengths of errors, contrasts and images may be."""

    length: float  # of the errors; negative where they point the other way
    product: Tensor  # (P,), length times image
    image: Tensor  # (P,)


class _Lengths:
    """How long the errors are, from ``length * image + noise`` and ``length + noise``, and so the image (float64, CPU).

    The image has the prior's distribution, its covariance times an unknown log-normal power. With v the squared length
    times that power, the log evidence is a polynomial of the length; lengths and v are summed over on grids.
    """

    def __init__(self, prior: GaussianPrior) -> None:
        self._prior = prior
        self._variances = prior.variances.cpu().double()
        self._mean_along = (prior.basis.mT @ prior.mean).cpu().double()
        self._mean_outside = float(prior.mean.square().sum()) - float(self._mean_along.square().sum())
        self._outside = prior.pixels - len(self._variances)
        total = float(self._variances.sum()) + self._outside * prior.rest
        self._typical = math.sqrt(float(prior.mean.square().sum()) + total)
        self._spread = max(prior.contrast, LEAST_SPREAD)

    def infer(self, seen: Tensor, bias_seen: float | None, deviation: float, bias_deviation: float) -> _Inferred:
        """Infer them from length times image plus noise, (P,)."""
        prior = self._prior
        along = (prior.basis.mT @ seen).cpu().double()
        squared = float(seen.double().square().sum())
        typical = max(math.sqrt(squared) / self._typical, 1e-30)
        scales = typical**2 * torch.logspace(-5, 2, SCALES, dtype=torch.float64)
        inside, rest = scales[:, None] * self._variances, scales * prior.rest
        noisy, noisy_rest = inside + deviation**2, rest + deviation**2
        outside = max(squared - float(along.square().sum()), 0.0)
        product = float(seen.double() @ prior.mean.double()) - float(along @ self._mean_along)
        constant = (along.square() / noisy + noisy.log()).sum(dim=1) + outside / noisy_rest
        constant = constant + self._outside * noisy_rest.log()
        linear = (along * self._mean_along / noisy).sum(dim=1) + product / noisy_rest
        square = (self._mean_along.square() / noisy).sum(dim=1) + self._mean_outside / noisy_rest

        def evidence(lengths: Tensor) -> Tensor:
            """Its logarithm for lengths (n,), with all v: (n, v)."""
            column = lengths[:, None]
            powers = (scales / column.square()).log() / self._spread
            exponent = constant - 2 * column * linear + column.square() * square + powers.square()
            if bias_seen is not None:
                exponent = exponent + ((bias_seen - column) / bias_deviation).square()
            return -exponent / 2

        lengths = _grid(evidence, typical, bias_seen)
        shares = (evidence(lengths) + _widths(lengths).log()[:, None]).flatten().softmax(dim=0).view(-1, SCALES)
        kept, kept_rest = inside / noisy, rest / noisy_rest

        def shrunk(weights: Tensor, vector: Tensor) -> Tensor:
            return prior.shrink(vector, (weights @ kept).to(seen), (weights @ kept_rest).to(seen))

        length = float((shares.sum(dim=1) * lengths).sum())
        sums, over, times = shares.sum(dim=0), (shares / lengths[:, None]).sum(dim=0), lengths @ shares
        image = prior.mean + shrunk(over, seen) - shrunk(sums, prior.mean)
        return _Inferred(length, length * prior.mean + shrunk(sums, seen) - shrunk(times, prior.mean), image)


def _grid(evidence: Callable[[Tensor], Tensor], typical: float, bias_seen: float | None) -> Tensor:
    """Lengths of both signs, ascending, that lie close together where there is evidence."""
    wide = typical * torch.logspace(-2, 1, WIDE, dtype=torch.float64)
    lengths = torch.cat([-wide, wide, wide.new_tensor([bias_seen] if bias_seen else [])])
    width = 10 ** (3 / (WIDE - 1)) - 1
    best, most, near, every = lengths[0], -math.inf, lengths, [lengths]
    for _ in range(ZOOMS):
        found = evidence(near).logsumexp(dim=1)
        if float(found.max()) > most:
            best, most = near[found.argmax()], float(found.max())
        near = best * (1 + width * torch.linspace(-1, 1, NARROW, dtype=torch.float64))
        every.append(near)
        width /= NARROW / 4
    return torch.cat(every).unique()


def _widths(lengths: Tensor) -> Tensor:
    """How much each point of an ascending grid stands for, on a logarithmic scale of each sign."""
    widths = torch.empty_like(lengths)
    for sign in (lengths < 0, lengths > 0):
        logarithms = lengths[sign].abs().log()
        if len(logarithms):
            padded = torch.cat([logarithms[:1], logarithms, logarithms[-1:]])
            widths[sign] = (padded[2:] - padded[:-2]).abs() / 2
    return widths


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm().clamp(min=1e-30)


FACTORS = 25  # factors of an image that are tried at once
FACTOR_ZOOMS = 3  # times
CLEAR = 0.3  # of an image's noise, on the [0, 1] scale: above, its contrast is too uncertain for a trained prior
NO_LAYER = "closed_form needs a network whose first layer multiplies the image itself (Linear behind flattening)"


def run_closed_form(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: ClosedFormSettings, report: Report
) -> Outcome:
    """Run the attack."""
    answers = _read_all(scene, rows)
    labels = _complete(scene, rows, answers)
    losses = _losses(scene, rows, answers, labels)
    report(1, losses)
    notes = tuple(answer.note for answer in answers)
    return Outcome(tuple(answer.images for answer in answers), labels, losses, torch.ones(len(rows)).long(), notes)


def read_starts(scene: Scene, victims: Sequence[Victim]) -> list[Start]:
    """Return where attacks start: the images that the first layer shows, then the prior's mean without labels."""
    answers = _read_all(scene, victims)
    labels = _complete(scene, victims, answers)
    return [
        Start.of(scene, answer.images, known, victim.model.examples)
        for victim, answer, known in zip(victims, answers, labels, strict=True)
    ]


def _read_all(scene: Scene, rows: Sequence[Victim]) -> list[LayerReading]:
    layers: dict[int, InputLayer | None] = {}
    for victim in rows:
        if id(victim.parameters) not in layers:
            layers[id(victim.parameters)] = find_input_layer(scene.network, victim.parameters, scene.shape)
    return [_read(scene, victim, layers[id(victim.parameters)]) for victim in rows]


def _read(scene: Scene, victim: Victim, layer: InputLayer | None) -> LayerReading:
    """What the first layer says."""
    if layer is None:
        lone = victim.model.examples == 1 and victim.model.training is None and victim.one_scale
        patches = read_patches(scene, victim) if lone else None
        if patches is None or patches.misfit > SOLVED:
            raise AttackRefused(_without_layer(scene, victim))
        return LayerReading(scene.box(patches.image[None]), None, patches.note)
    if victim.model.training is not None and victim.model.training.optimizer == "adam":
        raise AttackRefused("closed_form reads sums of gradients; Adam's steps are none")
    if victim.in_small_blocks:
        image, label = read_blocks(scene, victim, layer)
        return LayerReading(scene.box(image[None]), label[None])
    if victim.model.examples > 1 or victim.pool:
        return read_batch(scene, victim, layer)
    return _read_one(scene, victim, layer)


def _read_one(scene: Scene, victim: Victim, layer: InputLayer) -> LayerReading:
    """A single image, of which the gradient is the product with its errors, exactly or but for noise."""
    weight, bias = stacked(victim, layer)
    usable = bias if victim.one_scale else None
    clean = exact(weight, usable)
    if clean is not None:
        return LayerReading(scene.box(clean.image.view(1, *scene.shape)), None)
    estimate = rank_one(weight, usable, scene.prior, _bias_noise(victim, layer))
    image = estimate.image.view(1, *scene.shape)
    length = estimate.errors.norm()
    noise = estimate.deviation / length
    if scene.trained is not None and float(noise * scene.std.mean()) < CLEAR:
        noisy = (weight.mT @ estimate.errors / length.square()).view_as(image)
        image = scene.denoised(noisy, noise[None])
    if usable is None:
        image = _scaled(scene, victim, image)
    return LayerReading(scene.box(image), _label(scene, victim, image))


# The one image of a vision transformer: the gradient of its table of positions is the error of each patch, and that of
# the patches' kernels the sum of products of errors and patches. With fewer patches than channels that can be solved;
# with a few more, a few sums of patches are not told and taken for those of an image of the data's mean.


ROUNDING = 1e-6  # of features, relative to their root mean square, and of errors, relative to their largest direction
ENOUGH = 0.9  # of the sums of patches have to be told
UNTOLD = "{} of {} sums of patches are not told by the gradient; they are left at the data's mean"
SOLVED = 1e-5  # misfit of linear equations of float32 numbers that have a solution


@dataclass(frozen=True, eq=False)
class Patched:
    """The image that a table of positions shows."""

    image: Tensor  # (C, H, W)
    misfit: float  # the share of the kernels' gradient that it leaves
    error: float  # what that and rounding can change of it, on the scale of the network's input
    note: str = ""  # what the gradient does not tell


@dataclass(frozen=True)
class PatchTable:
    """Where a network takes images apart into patches and adds a table of positions to them."""

    kernels: str  # the name of the convolution's weight
    table: str  # (1, positions, channels); the last positions are the patches
    size: tuple[int, int]  # of a patch
    count: int  # patches


def find_patch_table(scene: Scene, victim: Victim) -> PatchTable | None:
    """The patches and their table, if a client uploads the gradients of both; ``None``: there are none."""
    _, height, width = scene.shape
    for name, layer in scene.network.model.named_modules():
        weight = victim.gradient.get(f"{name}.weight")
        if not isinstance(layer, nn.Conv2d) or weight is None or layer.kernel_size != layer.stride:
            continue
        size = (int(layer.kernel_size[0]), int(layer.kernel_size[1]))
        count = (height // size[0]) * (width // size[1])
        tables = [
            table
            for table, value in victim.gradient.items()
            if value.ndim == 3 and len(value) == 1 and value.shape[1] >= count and value.shape[2] == len(weight)
        ]
        if len(tables) == 1 and weight[0].numel() * count == scene.pixels:
            return PatchTable(f"{name}.weight", tables[0], size, count)
    return None


def read_patches(scene: Scene, victim: Victim) -> Patched | None:
    """The image from the gradients of a table of positions and of the patches' kernels; ``None``: there are none."""
    found = find_patch_table(scene, victim)
    if found is None:
        return None
    errors = victim.gradient[found.table].double()[0, -found.count :].mT
    products = victim.gradient[found.kernels].double().flatten(1)
    left, sizes, right = torch.linalg.svd(errors, full_matrices=False)
    told = int((sizes > ROUNDING * sizes[0]).sum())
    noisy = victim.noise_variance > 0
    if told < ENOUGH * found.count or (noisy and told == len(errors)):  # equations that always have a solution
        return None
    patches = right[:told].mT @ ((left[:, :told].mT @ products) / sizes[:told, None])
    missing = float((errors @ patches - products).square().mean().sqrt())
    rounded = ROUNDING * float(sizes[0]) * float(patches.square().mean().sqrt())
    image = nn.functional.fold(patches.mT, scene.shape[1:], found.size, stride=found.size).to(scene.mean)
    misfit = missing / max(float(products.square().mean().sqrt()), 1e-300)
    if told < found.count:
        return Patched(image, misfit, math.inf, UNTOLD.format(found.count - told, found.count))
    return Patched(image, misfit, (missing * len(products) ** 0.5 + rounded) / max(float(sizes[-1]), 1e-300))


def _without_layer(scene: Scene, victim: Victim) -> str:
    """Why no uploaded layer multiplies the image."""
    network = scene.network
    frozen = {name: value for name, value in network.model.named_parameters() if name not in network.names}
    layer = find_input_layer(network, victim.parameters | frozen, scene.shape) if frozen else None
    if layer is None:
        return NO_LAYER
    return f"closed_form reads images in the gradient of {layer.weight}, which is frozen: clients do not upload it"


def _complete(scene: Scene, rows: Sequence[Victim], answers: Sequence[LayerReading]) -> tuple[Tensor, ...]:
    """Each row's labels (n,), those read off the last layer included; where there is none, those that match best."""
    open_rows = [victim for victim, answer in zip(rows, answers, strict=True) if answer.labels is None]
    read = iter(read_labels(scene, open_rows)) if open_rows else iter(())
    labels = []
    for victim, answer in zip(rows, answers, strict=True):
        known = next(read) if answer.labels is None else answer.labels
        labels.append(_label(scene, victim, answer.images) if known is None else known)
    return tuple(labels)


def _losses(scene: Scene, rows: Sequence[Victim], answers: Sequence[LayerReading], labels: Sequence[Tensor]) -> Tensor:
    """What the images leave unexplained (N,), relative: of single ones in all layers, of batches in the first."""
    losses = torch.tensor([answer.unexplained or 0.0 for answer in answers], dtype=torch.float64)
    single = [row for row, answer in enumerate(answers) if answer.unexplained is None]
    if single:
        pictures = torch.stack([answers[row].images for row in single])
        known = torch.stack([labels[row] for row in single])
        losses[single] = (
            compared(scene, [rows[row] for row in single], relative_distance, pictures, known).cpu().double()
        )
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
    exponents = torch.linspace(-3, 3, FACTORS).to(image)
    factors = torch.cat([exponents.exp(), -exponents.exp()])
    width = 6 / (FACTORS - 1)
    best = image.new_tensor(1.0)
    for _ in range(FACTOR_ZOOMS):
        labels = label.expand(len(factors), 1)
        distances = compared(
            scene,
            [victim] * len(factors),
            relative_distance,
            factors[:, None, None, None, None] * image,
            labels,
        )
        best = factors[distances.argmin()]
        factors = best * (width * torch.linspace(-1, 1, FACTORS).to(image)).exp()
        width *= 2 / (FACTORS - 1)
    return best * image


def _label(scene: Scene, victim: Victim, image: Tensor) -> Tensor:
    """The label (1,) with which an image (1, C, H, W) matches the upload best."""
    if victim.labels is not None:
        return victim.labels
    labels = torch.arange(scene.classes, device=image.device)[:, None]
    images = image.expand(scene.classes, *image.shape)
    distances = compared(scene, [victim] * scene.classes, relative_distance, images, labels)
    return labels[distances.argmin()]


def relative_distance(comparison: Compared) -> Tensor:
    """The squared distance of gradients over the upload's own square (N,)."""
    return squared_distance(comparison).clamp(min=0) / comparison.heard.sum(dim=1).clamp(min=1e-30)


# The image of one example from a first Linear layer with von Mises-Fisher noise on blocks of D coordinates.
#
# Row i of the layer's gradient is ``e_i x``: a block within it is a draw around ``sign(e_i) x_b / |x_b|``, or says
# nothing where ``e_i`` is 0. So rows and directions are estimated in turn, from the first singular vector on; the
# lengths |x_b| and the common sign are those that the prior makes most probable (in polar coordinates), with the units
# that are on as inequalities ``w_i x + b_i > 0``; and the noise that is left in the directions is filtered by the
# prior. Where D does not divide the P pixels, rows are cut at different places, and the image at all of them. Blocks
# that reach from one row into the next are not used.


BLOCK_TURNS = 20  # of rows and directions, before rows are weighted by what they are likely to say
WEIGHED = 5  # more turns, with these weights
OVERLAPS = 100  # steps in which overlapping blocks agree on the lengths of what they share, before any prior
FILTERS = 3  # rounds of lengths and the noise that belongs to them
STEPS = 100  # of one search for lengths
SHARPEST = 100  # of D: no more concentration is taken for true in the search, which could not follow
UNSEEN = 1e6  # variance of a pixel that no block holds

Mismatch = Callable[[Tensor], Tensor]
"""Image (P,) -> minus the logarithm of an upload's density given that image, but for a constant; differentiable."""


@dataclass(frozen=True, eq=False)
class HeardBlocks:
    """The rows of a first layer, blocks of length 1; float64 on the CPU."""

    rows: Tensor  # (m, P); zero outside of the blocks that lie within a row
    phases: Tensor  # int64 (m,), which row of blocks tells how it is cut
    blocks: Tensor  # int64 (F, P), the number of each pixel's block, from 1 on; 0: none that lies within a row
    parts: Tensor  # int64 (P,), the part of the image that each pixel belongs to: cut wherever any row is
    kappa: float  # concentration
    length: int  # D

    @property
    def cosine(self) -> float:
        """The mean cosine of a draw and its direction."""
        return float(mean_resultant_length(self.length, self.kappa))

    @property
    def across(self) -> float:
        """The variance of a draw in each coordinate across its direction."""
        return self.cosine / self.kappa if self.kappa else 1 / self.length

    def norms(self, image: Tensor) -> Tensor:
        """The length of the block that each pixel of an image (P,) is in, cut in each way: (F, P); else infinite."""
        return _block_norms(image.expand(len(self.blocks), -1), self.blocks)

    def directions(self, image: Tensor) -> Tensor:
        """The directions of an image's (P,) blocks, cut in each way: (F, P); differentiable."""
        return image / self.norms(image)

    def sums(self, weights: Tensor) -> Tensor:
        """The sums of the rows that are cut in the same way, with weights (m,): (F, P)."""
        return self.rows.new_zeros(self.blocks.shape).index_add(0, self.phases, weights[:, None] * self.rows)

    def agreement(self, image: Tensor) -> Tensor:
        """The sum over its blocks of each row's cosines with an image (P,): (m,)."""
        return (self.rows * self.directions(image)[self.phases]).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Units:
    """Units of which those with a positive input are on, ReLUs; float64 on the CPU."""

    weight: Tensor  # (m, P)
    bias: Tensor  # (m,)

    def surprise(self, odds: Tensor, image: Tensor, deviations: Tensor) -> Tensor:
        """Minus the log-probability of units on, of log odds (m,), given a normal image (P,) and deviations (m,)."""
        scores = (self.weight @ image + self.bias) / deviations
        on, off = (F.logsigmoid(side * odds) + torch.special.log_ndtr(side * scores) for side in (1, -1))
        return -torch.logaddexp(on, off).sum()


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of an image's parts."""

    sign: float  # of all directions, 1.0 or -1.0
    lengths: Tensor  # (J,)
    surprise: float  # minus the logarithm of their density, but for a constant


def heard_blocks(weight: Tensor, offset: int, length: int, kappa: float) -> HeardBlocks | None:
    """Cut the rows (m, P) that were heard of the layer's matrix into blocks; ``None``: none lies within a row."""
    outputs, pixels = weight.shape
    begins = (offset + pixels * torch.arange(outputs)) % length
    shifts, phases = begins.unique(return_inverse=True)
    places = shifts[:, None] + torch.arange(pixels)
    blocks = places // length
    whole = (blocks * length >= shifts[:, None]) & ((blocks + 1) * length <= shifts[:, None] + pixels)
    if not bool(whole.any()):
        return None
    parts = (places % length == 0).any(dim=0).long().cumsum(0)
    blocks = torch.where(whole, blocks + 1, 0)
    rows = weight.cpu().double()
    rows = rows / _block_norms(rows, blocks[phases])
    return HeardBlocks(rows, phases, blocks, parts - parts[0], kappa, length)


def _row_signs(heard: HeardBlocks) -> tuple[Tensor, Tensor]:
    """Return each row's sign (m,), all perhaps reversed, 0 where it has none, and the log odds (m,) that it has one."""
    _, vectors = torch.linalg.eigh(heard.rows @ heard.rows.mT)
    signs: Tensor = vectors[:, -1]
    for _ in range(BLOCK_TURNS):
        signs = heard.agreement(signs @ heard.rows)
        signs = signs / signs.norm().clamp(min=1e-30)
    blocks = (heard.blocks > 0).sum(dim=1) / heard.length
    # Directions are estimates: no more certainty than they allow, or rows that differ a little count as silent.
    kappa = min(heard.kappa, float(heard.length))
    silence = blocks[heard.phases] * float(log_mgf(heard.length, kappa))
    odds = torch.zeros_like(signs)
    for _ in range(WEIGHED):
        exponents = kappa * heard.agreement(signs @ heard.rows)
        odds = torch.logaddexp(exponents, -exponents) - silence
        # The posterior mean of the sign: it is as likely to be 1, -1, or nothing, which makes draws uniform.
        told = exponents.tanh() * odds.sigmoid()
        signs = told if bool((told.abs() > 0.5).any()) else signs
    return signs, odds - math.log(2)


class LengthSearch:
    """The search for the lengths of an image's parts, and the filter of the noise in their directions."""

    def __init__(self, heard: HeardBlocks, prior: GaussianPrior, units: Units | None = None) -> None:
        signs, self._odds = _row_signs(heard)
        self._units = units
        self._heard = heard
        self._prior = prior
        self._sums = heard.sums(signs)
        self._rows = signs.new_zeros(len(heard.blocks)).index_add(0, heard.phases, signs.square())
        self._sizes = heard.parts.bincount().double()
        direction = self._sums.sum(dim=0)
        energy = prior.mean.square().sum() + prior.variances.sum() + (prior.pixels - len(prior.variances)) * prior.rest
        self._typical = energy.sqrt()
        self._start = self._of_parts(direction)
        self._unit = direction / (direction.norm() / self._typical * self._start).clamp(min=1e-30)[heard.parts]

    def settle(self, sign: float) -> Lengths:
        """Search with the rows alone; sign: 1.0, or -1.0 for the other sign of all directions."""
        lengths = Lengths(sign, self._start, 0.0)
        for _ in range(OVERLAPS if len(self._heard.blocks) > 1 else 0):
            lengths = Lengths(sign, self._of_parts(self._seen(lengths)[0]), 0.0)
        for _ in range(FILTERS):
            lengths = self.refine(lengths, self._mismatch(sign))
        return lengths

    def refine(self, rough: Lengths, mismatch: Mismatch) -> Lengths:
        """Search from there on, with the noise that belongs to these lengths."""
        unit = rough.sign * self._unit
        # Noise grows with the lengths, and behind more noise images may be longer: that of a typical image stops this.
        typical = rough.lengths * (self._typical / rough.lengths.norm().clamp(min=1e-30))
        pixels = PixelFilter(self._prior, self._seen(replace(rough, lengths=typical))[1])
        energy = pixels.of_parts(unit, self._heard.parts)
        gates = self._gates(pixels)

        def surprise(logarithms: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            leaf = torch.from_numpy(logarithms).requires_grad_()
            image = leaf.exp()[self._heard.parts] * unit
            value = mismatch(image) + gates(image) + energy(leaf.exp()) / 2 - ((self._sizes - 1) * leaf).sum()
            (gradient,) = torch.autograd.grad(value, leaf)
            return value.item(), gradient.numpy()

        start = rough.lengths.clamp(min=1e-6).log().numpy()
        least = minimize(surprise, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
        return Lengths(rough.sign, torch.from_numpy(least.x).exp(), float(least.fun))

    def image(self, lengths: Lengths) -> Tensor:
        """The image (P,) with these lengths, on the scale of the network's input, without the noise in directions."""
        seen, noise = self._seen(lengths)
        return PixelFilter(self._prior, noise).image(seen)

    def _of_parts(self, image: Tensor) -> Tensor:
        """The lengths (J,) of an image's parts, which is first made as long as images are."""
        squares = image.new_zeros(len(self._sizes)).index_add(0, self._heard.parts, image.square())
        return self._typical * (squares / squares.sum().clamp(min=1e-60)).sqrt()

    def _gates(self, pixels: "PixelFilter") -> Mismatch:
        """Of the units that are on and off, of an image that is seen through noise; a constant without ReLUs."""
        units = self._units
        if units is None:
            return lambda seen: seen.new_zeros(())
        deviations = pixels.deviations(units.weight)
        return lambda seen: units.surprise(self._odds, pixels.image(seen), deviations)

    def _mismatch(self, sign: float) -> Mismatch:
        """Of the rows; a constant where all are cut alike."""
        heard, sums = self._heard, sign * self._sums
        if len(heard.blocks) == 1:
            return lambda image: image.new_zeros(())
        return lambda image: -min(heard.kappa, SHARPEST * heard.length) * (sums * heard.directions(image)).sum()

    def _seen(self, found: Lengths) -> tuple[Tensor, Tensor]:
        """What the rows say of each pixel if these are the lengths, and the noise's variance: (P,)."""
        heard = self._heard
        factors = heard.cosine / heard.norms(found.lengths[heard.parts] * self._unit)
        precision = (self._rows[:, None] * factors.square()).sum(dim=0) / heard.across
        seen = found.sign * (factors * self._sums).sum(dim=0) / heard.across / precision.clamp(min=1 / UNSEEN)
        return seen, 1 / precision.clamp(min=1 / UNSEEN)


class PixelFilter:
    """The prior of images of which each pixel (P,) is seen through noise of its own variance (Woodbury)."""

    def __init__(self, prior: GaussianPrior, noise: Tensor) -> None:
        self._prior, self._noise = prior, noise
        self._diagonal = prior.rest + noise
        scaled = prior.basis / self._diagonal[:, None]
        gains = prior.variances - prior.rest
        inner = torch.eye(len(gains), dtype=gains.dtype) + gains[:, None] * (prior.basis.mT @ scaled)
        self._left, self._right = scaled, torch.linalg.solve(inner, gains[:, None] * scaled.mT)

    def of_parts(self, unit: Tensor, parts: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the squared distance from the mean of an image of parts of lengths (J,), in standard deviations."""

        def summed(columns: Tensor) -> Tensor:
            count = int(parts.max()) + 1
            return columns.new_zeros(count, columns.shape[1]).index_add(0, parts, unit[:, None] * columns)

        mean = self._prior.mean
        matrix = summed((unit / self._diagonal)[:, None])[:, 0].diag() - summed(self._left) @ summed(self._right.mT).mT
        linear, constant = summed(self._solve(mean)[:, None])[:, 0], mean @ self._solve(mean)
        return lambda lengths: lengths @ (matrix @ lengths) - 2 * lengths @ linear + constant

    def image(self, seen: Tensor) -> Tensor:
        """The mean of the image (P,) given what is seen."""
        return seen - self._noise * self._solve(seen - self._prior.mean)

    def deviations(self, weight: Tensor) -> Tensor:
        """The standard deviations (m,) of products ``weight @ image``, weight (m, P), given what is seen."""
        blurred = weight * self._noise
        known = blurred / self._diagonal - (blurred @ self._left) @ self._right
        variances: Tensor = (blurred * (weight - known)).sum(dim=1)
        return variances.clamp(min=1e-12).sqrt()

    def _solve(self, offset: Tensor) -> Tensor:
        return offset / self._diagonal - self._left @ (self._right @ offset)


def _block_norms(images: Tensor, blocks: Tensor) -> Tensor:
    """The length of the block that each pixel of images (n, P) is in; infinite where the number (n, P) is 0: none."""
    sums = images.new_zeros(len(images), int(blocks.max()) + 1)
    squares = sums.scatter_add(1, blocks, images.square()).gather(1, blocks)
    return torch.where(blocks > 0, squares.clamp(min=1e-60).sqrt(), torch.inf)


REFINED = 2  # rounds of lengths that the whole upload decides
NEEDS = (
    "closed_form on blocks of a size needs vmf, one example, one upload of one draw, and a block of D numbers within a "
    "row of {} pixels; given {}, examples {}, uploads {}, draws {:g}"
)


def read_blocks(scene: Scene, victim: Victim, layer: InputLayer) -> tuple[Tensor, Tensor]:
    """Read the image (C, H, W) off the first layer, and its sign, lengths and label () off all layers."""
    heard = _heard(victim, layer, scene.pixels)
    search = LengthSearch(heard, scene.prior.to(heard.rows), _relus(scene, victim, layer))
    known = torch.arange(scene.classes) if victim.labels is None else victim.labels.cpu()
    upload = _BlockUpload(scene, victim, heard)
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


class _BlockUpload:
    """How well images explain the whole upload."""

    def __init__(self, scene: Scene, victim: Victim, heard: HeardBlocks) -> None:
        self._scene = scene
        precision: Precision = "float32" if scene.network.device.type == "mps" else "float64"
        self._matcher = Matcher(scene.network, [victim], relative_distance, precision)
        coordinates = sum(value.numel() for value in victim.gradient.values())
        across = max(heard.across, 1 / (SHARPEST * heard.length))
        self._scale = math.ceil(coordinates / heard.length) / (2 * across)

    def mismatch(self, label: int, image: Tensor) -> Tensor:
        """Minus the logarithm of the upload's density given an image (P,) and its label, but for a constant."""
        images = image.view(1, 1, *self._scene.shape).to(self._scene.network.device)
        one_hot = F.one_hot(torch.tensor([[label]], device=images.device), self._scene.classes)
        distance: Tensor = self._matcher(images, one_hot)[0]
        return self._scale * distance.to(image)
