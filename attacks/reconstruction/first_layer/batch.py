"""A whole batch from the gradient of a first Linear layer: any activation, with noise, over several rounds.

The gradient is a product of few factors (:class:`Spectrum`), and the images are combinations of these. Independent
components give roughly which. Where units switch off, their zeros make that exact (:func:`settle_switches`), and prove
it (:class:`SignCheck`); elsewhere the network's own errors do (:func:`polish`). The prior fills in what noise leaves
open.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, dummy_gradients
from fedpriv.attacks.reconstruction.labels import read_labels
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Vector
from fedpriv.gradients.operator import wide_type

LAYER_PROBE = 20240311  # the seed of the images that tell which tensor is the first; it decides nothing else
TOLERANCE = 1e-6  # of logits that should be equal, relative to the change that shows that they are not just constant


@dataclass(frozen=True)
class InputLayer:
    """The parameters of a first layer that multiplies the image."""

    weight: str  # name of the matrix
    bias: str | None  # name of the vector that is added to the product; None: there is none
    transposed: bool  # whether the matrix is (pixels, outputs) rather than (outputs, pixels)

    def gradients(self, vector: Vector) -> tuple[Tensor, Tensor | None]:
        """Return what a vector, such as an upload, holds for the matrix (outputs, pixels) and the bias (outputs,)."""
        weight = vector[self.weight]
        return weight.mT if self.transposed else weight, None if self.bias is None else vector[self.bias]


def find_input_layer(network: Network, parameters: Vector, shape: tuple[int, int, int]) -> InputLayer | None:
    """Find the layer by what it does, so that own networks need no naming convention; among parameters that are given.

    The image enters through ``W x`` alone if mirroring the rows of W and the image at a random plane changes nothing. A
    bias is a vector to which adding ``W d`` does what adding d to the image does.
    """
    pixels = shape[0] * shape[1] * shape[2]
    candidates = [
        (name, transposed)
        for name, value in parameters.items()
        for transposed in (False, True)
        if value.ndim == 2 and value.shape[0 if transposed else 1] == pixels
    ]
    if not candidates:
        return None
    network = network.widened()
    parameters = {name: value.to(network.dtype) for name, value in parameters.items()}
    generator = torch.Generator().manual_seed(LAYER_PROBE)
    images, plane, step = (
        torch.randn(*size, generator=generator).to(network.device, network.dtype)
        for size in ((4, *shape), (pixels,), (pixels,))
    )
    trial = _Trial(network, parameters, images, plane / plane.norm(), 0.1 * step)
    found = (each for each in candidates if trial.multiplies(*each))
    return next((InputLayer(name, trial.bias(name, transposed), transposed) for name, transposed in found), None)


class _Trial:
    """Whether changes of parameters and images cancel."""

    def __init__(self, network: Network, parameters: Vector, images: Tensor, plane: Tensor, step: Tensor) -> None:
        self._network = network
        self._parameters = parameters
        self._images = images
        self._plane = plane
        self._step = step

    def multiplies(self, name: str, transposed: bool) -> bool:
        value = self._parameters[name]
        flat = self._images.flatten(1)
        mirrored = flat - 2 * (flat @ self._plane)[:, None] * self._plane
        if transposed:
            changed = value - 2 * self._plane[:, None] * (self._plane @ value)
        else:
            changed = value - 2 * (value @ self._plane)[:, None] * self._plane
        return self._cancel({name: changed}, mirrored.view_as(self._images))

    def bias(self, name: str, transposed: bool) -> str | None:
        weight = self._parameters[name]
        change = self._step @ weight if transposed else weight @ self._step
        moved = self._images - self._step.view(self._images.shape[1:])
        for other, value in self._parameters.items():
            if value.shape == change.shape and self._cancel({other: value + change}, moved):
                return other
        return None

    def _cancel(self, changes: Vector, images: Tensor) -> bool:
        """Whether the changes of parameters undo that of the images, which alone has an effect."""
        with torch.no_grad():
            before = self._network.logits(self._parameters, self._images)
            alone = self._network.logits(self._parameters, images)
            both = self._network.logits({**self._parameters, **changes}, images)
        effect = float((alone - before).abs().max())
        tolerance = TOLERANCE if both.dtype == torch.float64 else 1e-3
        return effect > 0 and float((both - before).abs().max()) <= tolerance * effect


# A proof that needs no truth: behind a ReLU an error is zero exactly where the image found switches the unit off.
#
# Wrong separations agreed at 0.5 to 0.9 of the pairs (unit, example). The share that agrees is the sparsity-matching
# score of SPEAR (Dimitrov, Baader, Mueller and Vechev 2024).


# An image: with 1 to 2 of them wrong images were found that agreed everywhere, with 3 and more none.
OUTPUTS = 3
CLEAR = 5.0  # deviations of the noise up to which an error counts as zero


@dataclass(frozen=True)
class SignCheck:
    """How well zero errors and images agree."""

    pairs: int  # of a unit and an example, that were compared
    disagreeing: int  # those that contradict each other
    narrow: bool = False  # whether the layer has so few outputs an image that other images may agree as well

    @property
    def share(self) -> float:
        """The share of the pairs that agree; 1.0 certifies a layer's answer that is not narrow, without noise."""
        return 1.0 - self.disagreeing / self.pairs

    @property
    def words(self) -> str:
        """In one line, for people."""
        doubt = ""
        if self.disagreeing:
            doubt = ": the images are not proven"
        elif self.narrow:
            doubt = f": below {OUTPUTS} outputs an image this does not prove the images"
        return (
            f"certificate {self.share:.4f} ({self.disagreeing} of {self.pairs} pairs disagree with the images){doubt}"
        )


def certify(errors: Tensor, noise: Tensor, outputs: Tensor, rounds: int = 1) -> SignCheck:
    """Compare errors (rows, B), of noise (B,), with the first layer's outputs (B, rows) at the images found."""
    zero = errors.mT.abs() <= CLEAR * noise[:, None]
    parts = zero.unflatten(1, (rounds, -1))
    missing = parts.all(dim=2, keepdim=True).expand_as(parts).flatten(1) if rounds > 1 else torch.zeros_like(zero)
    disagreeing = (zero != (outputs <= 0)) & ~missing
    narrow = zero.shape[1] < OUTPUTS * rounds * len(zero)
    return SignCheck(zero.numel(), int(disagreeing.sum()), narrow)


# Images told apart by independent components: differences of neighbouring pixels are far from normal, mixtures less so
# (FastICA, Hyvarinen 1999, symmetric; on gradients Kariyappa et al. 2023).


SMOOTH = 0.1  # of the absolute value that measures how far from normal a row is, in its standard deviations
ICA_STEPS = 200  # at most
ICA_SETTLED = 1e-5  # change of a direction's cosine after which it stays
FEW = 32  # up to so many images several starts are tried
STARTS = 3
SEED = 20261123  # of the starts; it decides nothing but which local optimum is found
SMALLEST = 16  # side of an image from which on noise is averaged over 2 x 2 pixels


def unmix(mixtures: Tensor, shape: tuple[int, int, int], *, noisy: bool) -> Tensor:
    """Find the unmixing A (B, B): the rows of A times mixtures (B, P) are images (C, H, W), each but for a factor."""
    samples = _differences(mixtures.unflatten(1, shape), pooled=noisy and min(shape[1:]) >= SMALLEST)
    values, vectors = torch.linalg.eigh(samples @ samples.mT / samples.shape[1])
    whitening = (vectors / values.clamp(min=1e-12 * float(values[-1])).sqrt()) @ vectors.mT
    white = whitening @ samples
    starts = STARTS if len(mixtures) <= FEW else 1
    rotations = [_rotation(white, start) for start in range(starts)]
    sparsest = min(rotations, key=lambda rotation: float(_smooth_size(rotation @ white).mean()))
    return sparsest @ whitening


def _differences(images: Tensor, *, pooled: bool) -> Tensor:
    """Differences of neighbours (B, n): across, down, and of these two, in decorrelated channels on equal scales."""
    channels = images.shape[1]
    turned = torch.einsum("dc,bchw->bdhw", _cosines(channels).to(images), images)
    if pooled:
        turned = F.avg_pool2d(turned, 2)
    across, down = turned.diff(dim=3), turned.diff(dim=2)
    parts = [part[:, channel].flatten(1) for part in (across, down, across.diff(dim=2)) for channel in range(channels)]
    sizes = [part.square().mean().sqrt() if part.numel() else part.new_zeros(()) for part in parts]
    usable = [part / size for part, size in zip(parts, sizes, strict=True) if float(size) > 0]
    return torch.cat(usable, dim=1) if usable else images.flatten(1)


def _cosines(count: int) -> Tensor:
    """The orthonormal cosine transform (n, n), which nearly decorrelates channels."""
    places = torch.arange(count, dtype=torch.float64)
    matrix = torch.cos(math.pi / count * (places + 0.5) * places[:, None]) * math.sqrt(2 / count)
    matrix[0] /= math.sqrt(2)
    return matrix


def _rotation(white: Tensor, start: int) -> Tensor:
    """A rotation (B, B) of white samples (B, n) at which they are sparse, by fixed-point steps."""
    generator = torch.Generator().manual_seed(SEED + start)
    rotation, _ = torch.linalg.qr(torch.randn(len(white), len(white), generator=generator, dtype=white.dtype))
    for _ in range(ICA_STEPS):
        rows = rotation @ white
        sizes = _smooth_size(rows)
        curvature = (SMOOTH**2 / sizes**3).mean(dim=1)
        step = (rows / sizes) @ white.mT / white.shape[1] - curvature[:, None] * rotation
        left, _, right = torch.linalg.svd(step)
        turned: Tensor = left @ right
        change = float((1 - (turned * rotation).sum(dim=1).abs()).max())
        rotation = turned
        if change < ICA_SETTLED:
            break
    return rotation


def _smooth_size(rows: Tensor) -> Tensor:
    """The absolute value without its kink; the smaller its mean at equal variance, the sparser a row."""
    return (rows.square() + SMOOTH**2).sqrt()


# A first Linear layer's gradient as a product ``E Xh`` of errors (outputs, B) and images with a one (B, P + 1).
#
# Noise of deviation s alone has no singular value above ``s (sqrt(rows) + sqrt(columns) + t)`` but with probability
# ``exp(-t^2 / 2)`` (Davidson and Szarek 2001, theorem II.13). What is below that edge cannot be told from noise.


FALSE_ALARM = 1e-6  # probability that noise alone counts as an image
ROUNDING = 8.0  # rounding errors of sums, in units of the type's precision times the root mean square of the entries
SPARE = 16  # singular values beyond twice those that are expected, from which on there is noise alone
DIRECT = 512  # up to so many rows or columns the singular values are computed directly
PASSES = 4  # over larger matrices, to find the range of the leading singular vectors
SHORT = (torch.bfloat16, torch.float16)  # types in which uploads may be sent
PROBES = 20240513  # the seed of the random vectors that this starts from; it decides nothing but roundings


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The part of a matrix (rows, P + 1) that stands above the noise; float64 on the CPU."""

    left: Tensor  # (rows, B), orthonormal columns
    values: Tensor  # (B,), singular values, the largest first, all above the edge
    right: Tensor  # (B, P + 1), orthonormal rows
    deviation: float  # of the noise in each entry of the matrix, rounding included
    edge: float  # the largest singular value that noise alone shows
    largest: float  # the largest singular value
    unexplained: float  # the share of the squared matrix that these factors leave

    @property
    def examples(self) -> int:
        """How many images stand above the noise."""
        return len(self.values)

    @property
    def scaled(self) -> Tensor:
        """The right factor times the singular values, (B, P + 1): the matrix is ``left @ scaled``."""
        return self.values[:, None] * self.right

    def noise_of(self, vectors: Tensor) -> Tensor:
        """The deviation (n,) of the noise in ``left @ vector`` for vectors (n, B)."""
        return self.deviation * (vectors / self.values).norm(dim=1)


def noise_edge(rows: int, columns: int, deviation: float) -> float:
    """Return the singular value that noise of this deviation exceeds with probability :data:`FALSE_ALARM` at most."""
    return deviation * (math.sqrt(rows) + math.sqrt(columns) + math.sqrt(-2 * math.log(FALSE_ALARM)))


def take_apart(matrix: Tensor, deviation: float, expected: int) -> Spectrum:
    """Find the singular values and vectors of a matrix (rows, P + 1) that stand above public and seen noise."""
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("the gradient of the first layer is not finite")
    precise = matrix.double().cpu()
    rows, columns = precise.shape
    kept = min(rows, columns, 2 * expected + SPARE)
    left, values, right = _leading(precise, kept)
    squared = float(precise.square().sum())
    rounding = ROUNDING * _precision(matrix) * math.sqrt(squared / precise.numel())
    deviation = max(deviation, rounding)
    above = int((values > noise_edge(rows, columns, deviation)).sum())
    if kept < min(rows, columns):
        deviation, above = _seen(precise.shape, squared, values[:above], deviation)
    edge = noise_edge(rows, columns, deviation)
    explained = float(values[:above].square().sum())
    unexplained = max(1 - explained / squared, 0.0) if squared else 1.0
    return Spectrum(
        left[:, :above], values[:above], right[:above], deviation, edge, float(values[:1].sum()), unexplained
    )


def _precision(matrix: Tensor) -> float:
    """The relative precision of the shortest type that holds all numbers: that in which they were sent."""
    short = [kind for kind in SHORT if torch.equal(matrix.to(kind).to(matrix.dtype), matrix)]
    return float(torch.finfo(short[0] if short else matrix.dtype).eps)


def _seen(shape: torch.Size, squared: float, values: Tensor, least: float) -> tuple[float, int]:
    """The noise's deviation, and the fewest values without which the rest looks like noise (Kritchman, Nadler 2008)."""
    rows, columns = shape
    rests = squared - torch.cat([values.new_zeros(1), values.square().cumsum(0)])
    for above, (value, rest) in enumerate(zip(values.tolist(), rests.tolist(), strict=False)):
        deviation = max(least, math.sqrt(max(rest, 0.0) / ((rows - above) * (columns - above))))
        if value <= noise_edge(rows, columns, deviation):
            return deviation, above
    return least, len(values)


def _leading(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular vectors and values; of large matrices by subspace iteration (Halko et al. 2011)."""
    if min(matrix.shape) <= DIRECT:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :count], values[:count], right[:count]
    generator = torch.Generator().manual_seed(PROBES)
    basis = torch.randn(matrix.shape[1], count, generator=generator, dtype=matrix.dtype)
    for _ in range(PASSES):
        basis, _ = torch.linalg.qr(matrix @ basis)
        basis, _ = torch.linalg.qr(matrix.mT @ basis)
    basis, _ = torch.linalg.qr(matrix @ basis)
    inner, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    return basis @ inner, values, right


# Images from the gradient and the examples' errors, by what images look like: the posterior's mean.
#
# Given the errors E the gradient is ``E X`` plus normal noise, and images have a normal prior: then the mean of the
# images given the gradient is linear in it (a Wiener filter that takes into account which images are mixed).


FAINT = 3.0  # deviations of the noise below which a bias says nothing of an image's sign and contrast


def denoised(spectrum: Spectrum, mixing: Tensor, prior: GaussianPrior) -> Tensor:
    """Return the images (B, P) whose errors are ``left @ mixing``, with mixing (B, B)."""
    prior, variance = prior.to(mixing), spectrum.deviation**2
    information = mixing.mT @ mixing / variance
    offsets = spectrum.scaled[:, :-1] - mixing.sum(dim=1, keepdim=True) * prior.mean
    offsets = mixing.mT @ offsets / variance
    strengths, turned = torch.linalg.eigh(information)
    heard = turned.mT @ offsets
    kept = 1 / (strengths.clamp(min=0)[:, None] + 1 / prior.variances)
    outside = 1 / (strengths.clamp(min=0)[:, None] + 1 / prior.rest)
    along = heard @ prior.basis
    shrunk = outside * heard + ((kept - outside) * along) @ prior.basis.mT
    return prior.mean + turned @ shrunk


def faint_scaled(spectrum: Spectrum, mixing: Tensor, prior: Callable[[], GaussianPrior]) -> Tensor:
    """Scale the columns of a mixing (B, B) so that images end in a one, or, if noise covers it, are typical."""
    inverse = torch.linalg.inv(mixing)
    rows = inverse @ spectrum.scaled
    ones = rows[:, -1]
    faint = ones.abs() < FAINT * spectrum.deviation * inverse.norm(dim=1)
    lengths: Tensor = ones
    if not bool(faint.any()):
        return mixing * lengths
    fitted = prior().to(mixing)
    outside = fitted.pixels - len(fitted.variances)
    typical = (fitted.mean.square().sum() + fitted.variances.sum() + outside * fitted.rest).sqrt()
    sign = torch.where(rows[:, :-1] @ fitted.mean < 0, -1.0, 1.0)
    lengths = torch.where(faint, rows[:, :-1].norm(dim=1) / typical * sign, ones)
    return mixing * lengths


# The unmixing A made exact by the network itself: with right factors V and left factors L, ``E(A V) A = L``.
#
# Solved by damped Newton steps on the sum of squares (Gauss-Newton, Levenberg and Marquardt), with differences for the
# derivatives of the errors along the B factors.


MOST_POLISHED = 64  # images: beyond, the B^2 unknowns take minutes
NEWTON_STEPS = 15
NUDGE = 1e-6  # of an image's length, for differences
FIRST_DAMPING, LESS, MORE = 1e-3, 0.05, 8.0
TRIALS = 8  # of one step
NEWTON_SETTLED = 1e-6  # relative gain of a step after which it is over
NEWTON_RIDGE = 1e-14  # relative to the mean of the diagonal

Errors = Callable[[Tensor], Tensor]
"""Batches of images (N, B, P) -> each example's share in the upload's errors (N, B, rows); float64 on the CPU."""


@dataclass(frozen=True, eq=False)
class Polished:
    """A mixing (B, B), scaled, and the squared distance of left factors that its images leave, relative to them."""

    mixing: Tensor
    misfit: float


def polish(spectrum: Spectrum, mixing: Tensor, errors: Errors) -> Polished:
    """Solve for the mixing (B, B), scaled, from one that is roughly right."""
    problem = _Problem(spectrum, errors)
    # Unknown is A = mixing^-1 in coordinates of orthonormal right factors.
    point = _Point.of(problem, torch.linalg.inv(mixing) * spectrum.values)
    damping = FIRST_DAMPING
    for _ in range(NEWTON_STEPS):
        system, slope = problem.linearised(point)
        moved: _Point | None = None
        for _ in range(TRIALS):
            moved = problem.step(point, system, slope, damping)
            if moved is not None and moved.size < point.size:
                break
            moved, damping = None, damping * MORE
        if moved is None:
            break
        gain = 1 - moved.size / point.size
        point, damping = moved, damping * LESS
        if gain < NEWTON_SETTLED:
            break
    inverse = point.unmixing / spectrum.values
    return Polished(torch.linalg.inv(inverse), point.size / float(problem.left.square().sum()))


@dataclass(frozen=True, eq=False)
class _Point:
    """Where the search is."""

    unmixing: Tensor  # A, (B, B)
    errors: Tensor  # (B, rows), of its images
    rest: Tensor  # (rows + 1, B): what is left of the equations; the last row says that images end in a one
    size: float  # squared length of the rest

    @staticmethod
    def of(problem: "_Problem", unmixing: Tensor) -> "_Point":
        errors = problem.errors(problem.images(unmixing)[None])[0]
        ends = problem.weight * (unmixing @ problem.last - 1)
        rest = torch.cat([errors.mT @ unmixing - problem.left, ends[None]])
        return _Point(unmixing, errors, rest, float(rest.square().sum()))


class _Problem:
    """The equations and their linearisation."""

    def __init__(self, spectrum: Spectrum, errors: Errors) -> None:
        self.left = spectrum.left * spectrum.values
        self.errors = errors
        self.last = spectrum.right[:, -1]
        self.weight = float(self.left.norm()) / len(self.last)
        self._pixels = spectrum.right[:, :-1]

    def images(self, unmixing: Tensor) -> Tensor:
        """(B, P)."""
        return unmixing @ self._pixels

    def linearised(self, point: _Point) -> tuple[Tensor, Tensor]:
        """The matrix (B B, B B) and the vector (B, B) of the normal equations of the change of A."""
        count = len(point.unmixing)
        along = self._derivatives(point)  # (B, rows, B): of image i's errors, along factor l
        flat = along.permute(1, 0, 2).flatten(1)
        system = (flat.mT @ flat).view(count, count, count, count)
        system = system * (point.unmixing @ point.unmixing.mT)[:, None, :, None]
        mixed = torch.einsum("iul,ju,in->iljn", along, point.errors, point.unmixing)
        same = torch.eye(count, dtype=along.dtype)
        system = system + mixed + mixed.permute(2, 3, 0, 1)
        system = system + (point.errors @ point.errors.mT)[:, None, :, None] * same[None, :, None, :]
        ends = self.weight**2 * torch.outer(self.last, self.last)
        system = system + same[:, None, :, None] * ends[None, :, None, :]
        rest, end = point.rest[:-1], point.rest[-1]
        slope = torch.einsum("iul,ui->il", along, rest @ point.unmixing.mT)
        slope = slope + point.errors @ rest + self.weight * end[:, None] * self.last
        return system.reshape(count**2, count**2), slope

    def step(self, point: _Point, system: Tensor, slope: Tensor, damping: float) -> _Point | None:
        """Where a damped step leads; ``None`` where it is not defined."""
        diagonal = system.diagonal()
        damped = system + torch.diag(damping * diagonal + NEWTON_RIDGE * diagonal.mean())
        factor, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            return None
        change = torch.cholesky_solve(slope.reshape(-1, 1), factor).view_as(slope)
        moved = _Point.of(self, point.unmixing - change)
        return moved if math.isfinite(moved.size) else None

    def _derivatives(self, point: _Point) -> Tensor:
        images = self.images(point.unmixing)
        nudge = NUDGE * float(images.norm(dim=1).mean())
        moved = [self.errors(images[None] + nudge * row)[0] for row in self._pixels]
        return (torch.stack(moved, dim=2) - point.errors[:, :, None]) / nudge


# The unmixing made exact where units switch: each example's errors are zero where its image switches units off.
#
# They are the combination of left factors that is smallest there, in absolute values (as SPEAR++ for sparse errors).
# Better errors give better images, and these a better guess of the units. In several rounds with other batches, errors
# vanish in all rounds without the example: then the sum of the rounds' lengths is made small.


KEPT = (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0)  # of the units that seem off, the clearest; in each turn
WEIGHTINGS = 4  # of the rows, in one turn
SHRINKING = 0.3  # of what counts as zero, from one weighting to the next
RIDGE = 1e-13  # relative to the trace, so that a system can be solved


@dataclass(frozen=True, eq=False)
class PublicLayer:
    """The public first layer, of several rounds one below the other; float64 on the CPU."""

    weight: Tensor  # (rows, P)
    bias: Tensor  # (rows,)
    rounds: int = 1  # in how many equal parts the rows fall
    other_batches: bool = False  # whether an example may be missing from rounds

    def outputs(self, images: Tensor) -> Tensor:
        """(B, rows), before the activation, of images (B, P)."""
        return images @ self.weight.mT + self.bias


@dataclass(frozen=True, eq=False)
class Switched:
    """A mixing (B, B) of the left factors, errors = left @ mixing, and how far zeros and images agree."""

    mixing: Tensor
    certificate: SignCheck


def scaled(spectrum: Spectrum, mixing: Tensor) -> Tensor | None:
    """Scale the columns of a mixing (B, B) such that each image ends in a one; ``None`` where it cannot be inverted."""
    ones, failed = torch.linalg.solve_ex(mixing, spectrum.scaled[:, -1])
    usable = not int(failed) and bool(torch.isfinite(ones).all()) and bool((ones != 0).all())
    # Lengths of many orders of magnitude make a matrix singular that was nearly so.
    return mixing * ones if usable and not int(torch.linalg.inv_ex(mixing * ones).info) else None


def images_of(spectrum: Spectrum, mixing: Tensor) -> Tensor:
    """The images (B, P) of a scaled mixing (B, B)."""
    return torch.linalg.solve(mixing, spectrum.scaled)[:, :-1]


def settle_switches(spectrum: Spectrum, mixing: Tensor, layer: PublicLayer, *, switching: bool = True) -> Switched:
    """Take turns of images and errors until they agree; return the mixing (B, B) with which they agreed best."""
    best = Switched(mixing, _certificate(spectrum, mixing, layer))
    for turn, kept in enumerate(KEPT):
        certain = switching and best.certificate.disagreeing == 0
        if switching:
            off = _off(spectrum, mixing, layer, 1.0 if certain else kept)
            turned = scaled(spectrum, _smallest(spectrum, mixing, off))
        else:
            turned = scaled(spectrum, _fewest_rounds(spectrum, mixing, layer.rounds, turn))
        if turned is None:
            break
        mixing = turned
        certificate = _certificate(spectrum, mixing, layer)
        if not switching or certificate.disagreeing <= best.certificate.disagreeing:
            best = Switched(mixing, certificate)
        if certain:
            break
    return best


def _certificate(spectrum: Spectrum, mixing: Tensor, layer: PublicLayer) -> SignCheck:
    noise = spectrum.noise_of(mixing.mT)
    outputs = layer.outputs(images_of(spectrum, mixing))
    return certify(spectrum.left @ mixing, noise, outputs, layer.rounds if layer.other_batches else 1)


def _off(spectrum: Spectrum, mixing: Tensor, layer: PublicLayer, kept: float) -> Tensor:
    """Which rows (B, rows) are zero in each example's errors, because it seems to switch the unit off."""
    depth = layer.outputs(images_of(spectrum, mixing)) / layer.weight.norm(dim=1).clamp(min=1e-30)
    wanted = kept * (depth <= 0).sum(dim=1, keepdim=True)
    return depth.argsort(dim=1).argsort(dim=1) < wanted


def _smallest(spectrum: Spectrum, mixing: Tensor, off: Tensor) -> Tensor:
    """Mixing (B, B) whose errors are smallest, in absolute values, in rows (B, rows) that seem to be zero."""
    vectors, counted = (mixing / mixing.norm(dim=0)).mT, off.to(mixing)
    start = vectors
    for weighting in range(WEIGHTINGS):
        sizes = (vectors @ spectrum.left.mT).abs()
        typical = (sizes * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        least = torch.maximum(typical * SHRINKING**weighting, spectrum.noise_of(vectors))[:, None]
        vectors = _weighted(spectrum, start, counted / (sizes.square() + least.square()).sqrt().clamp(min=1e-30))
    return vectors.mT


def _fewest_rounds(spectrum: Spectrum, mixing: Tensor, rounds: int, turn: int) -> Tensor:
    """Mixing (B, B) whose errors have the smallest sum of lengths over the rounds, so that they vanish in many."""
    vectors = start = (mixing / mixing.norm(dim=0)).mT
    for weighting in range(WEIGHTINGS):
        parts = (vectors @ spectrum.left.mT).unflatten(1, (rounds, -1))
        sizes = parts.norm(dim=2, keepdim=True)
        least = sizes.mean(dim=1) * SHRINKING ** (turn + weighting)
        least = torch.maximum(least, spectrum.noise_of(vectors)[:, None])[:, :, None]
        weights = 1 / (sizes.square() + least.square()).sqrt().clamp(min=1e-30)
        vectors = _weighted(spectrum, start, weights.expand_as(parts).flatten(1))
    return vectors.mT


def _weighted(spectrum: Spectrum, start: Tensor, weights: Tensor) -> Tensor:
    """Unit vectors (B, B) with the least weighted squares, by weights (B, rows), that keep their share of the start."""
    ridge = RIDGE * torch.eye(len(start), dtype=start.dtype)
    products = torch.stack([(spectrum.left * row[:, None]).mT @ spectrum.left for row in weights])
    traces = products.diagonal(dim1=1, dim2=2).sum(dim=1).clamp(min=1e-30)
    solved, _ = torch.linalg.solve_ex(products + traces[:, None, None] * ridge, start[:, :, None])
    return solved[:, :, 0] / solved[:, :, 0].norm(dim=1, keepdim=True).clamp(min=1e-30)


MOST_IMAGES = 128  # images that are told apart
WEAK = 8.0  # times the noise's edge below which an image is searched in averaged pixels
AUDIBLE = 1e-4  # deviation of the noise in an image, on the scale of the network's input, from which the prior is asked
READINGS = 4  # turns of labels and images
CLEAR_OF_NOISE = 10.0  # times the noise in the left factors: what is left there is no more than noise
SOLVED = 0.05  # of the squared left factors: more than that is left where the model of the upload does not hold
PROBE = 20261123  # the seed of the images that tell whether units switch; it decides nothing else
PROBED = 16

NO_BIAS = "closed_form tells the images of a batch apart by the first layer's bias, on one scale with its weight"
NOTHING = "no image of the batch stands above the noise in the first layer's gradient (edge {:.3g}, largest {:.3g})"
FULL = (
    "the first layer's gradient of {} outputs has the full rank {}: the images cannot be told apart (more examples "
    "than outputs, or noise that is not public)"
)
ALIKE = "the images of the batch differ by constants alone, and cannot be told apart"
MANY = "{} images stand above the noise in the first layer's gradient; closed_form tells {} apart at most"


@dataclass(frozen=True, eq=False)
class LayerReading:
    """What the first layer says."""

    images: Tensor  # (n, C, H, W), normalised, the strongest first
    labels: Tensor | None  # int64 (n,), each its image's; None: the last layer may tell them
    note: str = ""  # how sure that is, for people
    unexplained: float | None = None  # the share of a batch's squared gradient that these images leave


def read_batch(scene: Scene, victim: Victim, layer: InputLayer) -> LayerReading:
    """Tell the images of a batch apart."""
    weight, bias = stacked(victim, layer)
    if bias is None or not victim.one_scale:
        raise AttackRefused(NO_BIAS)
    spectrum = _spectrum(victim, layer, torch.cat([weight, bias[:, None]], dim=1))
    components = unmix(spectrum.right[:, :-1], scene.shape, noisy=float(spectrum.values[-1]) < WEAK * spectrum.edge)
    inverse, failed = torch.linalg.inv_ex(components)
    if int(failed) or not bool(torch.isfinite(inverse).all()):
        raise AttackRefused(ALIKE)
    mixing = faint_scaled(spectrum, spectrum.values[:, None] * inverse, lambda: scene.prior)
    public, other_batches = _public_layer(victim, layer), victim.pool > 0
    notes = [_counted(spectrum, victim)]
    switching = _switches(scene, victim, layer)
    if switching or other_batches:
        settled = settle_switches(spectrum, mixing, public, switching=switching)
        mixing = settled.mixing
        notes += [settled.certificate.words] if switching else []
    separation = _Separation(scene, victim, layer, spectrum, mixing)
    separation = separation if switching or not _modelled(victim) else separation.polished()
    order = (spectrum.left @ separation.mixing).norm(dim=0).argsort(descending=True)
    images, labels = separation.images[order.to(scene.mean.device)], separation.labels[order.to(scene.mean.device)]
    return LayerReading(images, labels, "; ".join(notes), spectrum.unexplained)


def stacked(victim: Victim, layer: InputLayer) -> tuple[Tensor, Tensor | None]:
    """The matrix (outputs, P) and bias (outputs,) of all uploads one below the other, scaled to equal noise."""
    if not victim.more:
        return layer.gradients(victim.gradient)
    scales = _scales(victim, layer)
    parts = [(scale, *layer.gradients(upload.gradient)) for scale, upload in zip(scales, victim.uploads, strict=True)]
    weight = torch.cat([scale * matrix for scale, matrix, _ in parts])
    biases = [scale * vector for scale, _, vector in parts if vector is not None]
    return weight, torch.cat(biases) if biases else None


def first_layer_errors(scene: Scene, victim: Victim, bias: str, images: Tensor, labels: Tensor) -> Tensor:
    """The errors (N, B, outputs) with which dummies (N, B, C, H, W), labels (N, B), enter one upload."""
    dtype = wide_type(images)
    parameters = {name: value.to(dtype) for name, value in victim.parameters.items()}
    one_hot = F.one_hot(labels, scene.classes).to(dtype)
    gradients = dummy_gradients(scene.network.cast(dtype), parameters, images.to(dtype), one_hot, each=True)
    errors = gradients.rows((bias,))[bias].detach()
    scales = victim.model.mechanism.scales(gradients.names)
    if scales is None:
        return errors
    weights = next(weight for names, weight in victim.model.weights(gradients, scales) if bias in names)
    # Weights are of a mean over the dummies; the upload was divided by the public number of examples.
    return errors * (weights.detach() * images.shape[1] / victim.model.examples)[:, :, None]


def _scales(victim: Victim, layer: InputLayer) -> list[float]:
    """What each upload's rows are multiplied with for equal noise, or equal rounding errors where there is none."""
    if victim.noise_variance > 0:
        return [math.sqrt(upload.model.releases / victim.model.releases) for upload in victim.uploads]
    sizes = [float(layer.gradients(upload.gradient)[0].norm()) for upload in victim.uploads]
    return [sizes[0] / size if size > 0 and sizes[0] > 0 else 1.0 for size in sizes]


def _spectrum(victim: Victim, layer: InputLayer, matrix: Tensor) -> Spectrum:
    try:
        spectrum = take_apart(matrix, victim.noise_in(layer.weight), victim.pool or victim.model.examples)
    except ValueError as error:
        raise AttackRefused(str(error)) from None
    if spectrum.examples == 0:
        raise AttackRefused(NOTHING.format(spectrum.edge, spectrum.largest))
    if spectrum.examples >= min(matrix.shape):
        raise AttackRefused(FULL.format(len(matrix), spectrum.examples))
    if spectrum.examples > MOST_IMAGES:
        raise AttackRefused(MANY.format(spectrum.examples, MOST_IMAGES))
    return spectrum


def _counted(spectrum: Spectrum, victim: Victim) -> str:
    count, of = spectrum.examples, victim.pool or victim.model.examples
    return f"{count} image{'s' if count > 1 else ''} above the noise edge (public number: {of})"


def _public_layer(victim: Victim, layer: InputLayer) -> PublicLayer:
    parts = [layer.gradients(upload.parameters) for upload in victim.uploads]
    weight = torch.cat([matrix for matrix, _ in parts]).double().cpu()
    bias = torch.cat([vector for _, vector in parts if vector is not None]).double().cpu()
    return PublicLayer(weight, bias, len(parts), victim.pool > 0)


def _switches(scene: Scene, victim: Victim, layer: InputLayer) -> bool:
    """Whether an example's error is zero at a unit exactly where the unit's output is not positive."""
    if layer.bias is None:
        return False
    images = fixed_normal(PROBE, 1, PROBED, *scene.shape).to(scene.mean)
    labels = (torch.arange(PROBED, device=images.device) % scene.classes)[None]
    errors = first_layer_errors(scene, victim, layer.bias, images, labels)[0].cpu()
    outputs = _public_layer(replace(victim, more=()), layer).outputs(images[0].flatten(1).double().cpu())
    closed = outputs <= 0
    return bool((errors[closed] == 0).all()) and float((errors[~closed] != 0).double().mean()) > 1 / 2


def _modelled(victim: Victim) -> bool:
    """Whether the errors in the upload are those of one gradient, on a scale that is known."""
    model = victim.model
    known = not model.protects_updates and model.mechanism.scales(tuple(victim.gradient)) is not None
    return victim.pool == 0 and model.training is None and known


@dataclass(frozen=True, eq=False)
class _Separation:
    """Images and labels that belong to a mixing (B, B)."""

    scene: Scene
    victim: Victim
    layer: InputLayer
    spectrum: Spectrum
    mixing: Tensor

    @property
    def bias(self) -> str:
        return str(self.layer.bias)

    @property
    def images(self) -> Tensor:
        """(B, C, H, W), normalised, with noise filled in by the prior."""
        inverse = torch.linalg.inv(self.mixing)
        heard = self.spectrum.deviation * float(inverse.norm(dim=1).max())
        known = images_of(self.spectrum, self.mixing)
        if heard < AUDIBLE:
            flat = known
        elif self.scene.trained is None:
            flat = denoised(self.spectrum, self.mixing, self.scene.prior)
        else:
            noise = self.spectrum.deviation * inverse.norm(dim=1)
            flat = self.scene.denoised(known.unflatten(1, self.scene.shape), noise).flatten(1)
        return self.scene.box(flat.unflatten(1, self.scene.shape).to(self.scene.mean))

    @property
    def labels(self) -> Tensor:
        """(B,): those whose errors at the first layer point as those that were found."""
        cosines = self._cosines()
        if self.victim.labels is None or len(self.victim.labels) != len(self.mixing):
            return cosines.argmax(dim=0)
        return _assigned(cosines, self.victim.labels)

    def polished(self) -> "_Separation":
        """Go on with the network's own errors, and labels, until labels stay."""
        if len(self.mixing) > MOST_POLISHED:
            return self
        best, least = self, SOLVED
        for labels in self._readings():
            current = self
            for _ in range(READINGS):
                solution = polish(self.spectrum, current.mixing, self._errors(labels))
                current = replace(self, mixing=solution.mixing)
                if solution.misfit < least:
                    best, least = current, solution.misfit
                before, labels = labels, current.labels
                if torch.equal(before, labels):
                    break
            if least < CLEAR_OF_NOISE * self._noise:
                break
        return best

    @property
    def _noise(self) -> float:
        """The share of the noise in the squared left factors."""
        rows, count = self.spectrum.left.shape
        return rows * count * self.spectrum.deviation**2 / float(self.spectrum.values.square().sum())

    def _readings(self) -> Iterator[Tensor]:
        """Labels (B,) to begin with: by each image's own errors; and, where these differ, by the last layer."""
        own = self.labels
        yield own
        (read,) = read_labels(self.scene, [self.victim])
        if read is not None and len(read) == len(own):
            other = _assigned(self._cosines(), read)
            if not torch.equal(own, other):
                yield other

    def _errors(self, labels: Tensor) -> Errors:
        scales = _scales(self.victim, self.layer)

        def errors(images: Tensor) -> Tensor:
            pictures = images.unflatten(2, self.scene.shape).to(labels.device)
            given = labels.expand(len(images), -1)
            parts = [
                scale * first_layer_errors(self.scene, upload, self.bias, pictures, given)
                for scale, upload in zip(scales, self.victim.uploads, strict=True)
            ]
            return torch.cat(parts, dim=2).double().cpu()

        return errors

    def _cosines(self) -> Tensor:
        """(classes, B), of errors found and errors with each label; of several uploads where they are largest."""
        images, classes = self.images, self.scene.classes
        labels = torch.arange(classes, device=images.device)[:, None].expand(-1, len(images))
        parts = (self.spectrum.left @ self.mixing).mT.to(images).chunk(len(self.victim.uploads), dim=1)
        loudest = torch.stack([part.norm(dim=1) for part in parts]).argmax(dim=0)
        cosines = images.new_zeros(classes, len(images))
        for number in loudest.unique().tolist():
            mine = loudest == number
            dummies = images[mine].expand(classes, *images[mine].shape)
            errors = first_layer_errors(self.scene, self.victim.uploads[number], self.bias, dummies, labels[:, mine])
            cosines[:, mine] = F.cosine_similarity(errors.to(images), parts[number][mine][None], dim=2)
        return cosines


def _assigned(cosines: Tensor, labels: Tensor) -> Tensor:
    """Give known labels (B,) to the images, one to one, by cosines (classes, B)."""
    rows, columns = linear_sum_assignment(-cosines[labels].cpu().double().numpy())
    order = torch.empty(len(labels), dtype=torch.long)
    order[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return labels[order.to(labels.device)]
