"""The image of one example from a first Linear layer with von Mises-Fisher noise on blocks of D coordinates.

Row i of the layer's gradient is ``e_i x``: a block within it is a draw around ``sign(e_i) x_b / |x_b|``, or says
nothing where ``e_i`` is 0. So rows and directions are estimated in turn, from the first singular vector on; the lengths
|x_b| and the common sign are those that the prior makes most probable (in polar coordinates), with the units that are
on as inequalities ``w_i x + b_i > 0``; and the noise that is left in the directions is filtered by the prior.

Where D does not divide the P pixels, rows are cut at different places, and the image at all of them. Blocks that reach
from one row into the next are not used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from fedpriv.accounting.vmf_functions import log_mgf, mean_resultant_length
from fedpriv.attacks.reconstruction.dummy_gradients.network import kink_inputs
from fedpriv.attacks.reconstruction.first_layer.input_layer import InputLayer
from fedpriv.attacks.reconstruction.matching import Compared, Matcher, Precision, squared_distance
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.mechanisms.machinery.base import block_length
from fedpriv.mechanisms.vmf import VmfMechanism

TURNS = 20  # of rows and directions, before rows are weighted by what they are likely to say
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
    for _ in range(TURNS):
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
        solved: Tensor = offset / self._diagonal - self._left @ (self._right @ offset)
        return solved


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


def _relative_distance(comparison: Compared) -> Tensor:
    return squared_distance(comparison) / comparison.heard.sum(dim=1).clamp(min=1e-30)
