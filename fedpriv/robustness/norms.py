"""How far a perturbation of the image moves the noisy value, in units of the noise: norms of A = Sigma^(-1/2) W.

W is the first layer seen from the pixels, division by the data set's standard deviation included, and
S_p = max of |A alpha|_2 over |alpha|_p <= 1. A certificate of margin m holds for perturbations below m / S_p, so it
needs S_p from above: :func:`layer_norms`. Power iteration gives a lower bound, :func:`estimated_norm`, which
is good enough to scale the noise while training and for nothing else.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.names import NormName
from fedpriv.core.randomness import torch_stream
from fedpriv.core.reading import Record
from fedpriv.robustness.noise import RobustnessNoise, noise_layers

# Of float64 arithmetic: the error of a Gram matrix and its eigenvalues is thousands of times smaller.
_UPWARDS = 1 + 1e-9
_LANCZOS_STEPS = 12
_ASCENT_STEPS = 20
_STARTS = 8
# Numbers of the layer's values that are held at once.
_PIECE = 1 << 24


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """h, from images on the pixel scale to the noiseless value at the place of the noise; affine."""

    network: nn.Module  # holds the noise layer
    layer: RobustnessNoise  # the noise layer
    # (B, C, H, W), floating point on [0, 1] -> what the network is fed, of the same type and device
    normalise: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int]  # (C, H, W) of an image

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the values (B, ...) of images (B, C, H, W)."""
        return self.layer.value_at(self.network, self.normalise(pixels))

    def blank(self) -> Tensor:
        """A black image, (1, C, H, W), in the network's numbers and on its device."""
        first = next(self.network.parameters())
        return torch.zeros(1, *self.shape, dtype=first.dtype, device=first.device)

    @property
    def scale(self) -> Tensor:
        """By how much a pixel's change is multiplied when images are normalised, (C, H, W), float64."""
        black = torch.zeros(1, *self.shape, dtype=torch.float64)
        return (self.normalise(black + 1) - self.normalise(black))[0]

    def exact(self) -> "FirstLayer":
        """The same in float64, on the CPU: a copy."""
        try:
            network = copy.deepcopy(self.network).to(device="cpu", dtype=torch.float64)
        except (Exception, SystemExit) as error:
            raise InputError(f"the network cannot be copied, as its norm needs: {reason_of(error)}") from error
        layer = noise_layers(network)[noise_layers(self.network).index(self.layer)]
        made = FirstLayer(network, layer, self.normalise, self.shape)
        with torch.no_grad():
            kind = made(made.blank()).dtype
        if kind != torch.float64:
            raise InputError(f"the first layer gives {kind} for float64: its norm cannot be bounded")
        return made


@dataclass(frozen=True, eq=False)
class Gram:
    """What the norms are bounded from."""

    matrix: Tensor  # G = A'A = W' Sigma^(-1) W, (d, d), float64, on the CPU; symmetric
    rows: float  # the sum over coordinates k of |A_k|_1 squared


@dataclass(frozen=True)
class LayerNorms(Record):
    """Upper bounds of S_2 and S_infinity, and how the second was found."""

    l2: float  # S_2, one over pixels
    linf: float  # S_infinity, one over pixels
    linf_how: str  # the bound that is the smallest, in words
    linf_least: float  # what S_infinity is at least, by sign ascent


def layer_norms(first: FirstLayer, deviations: Tensor) -> LayerNorms:
    """Bound the norms of the layer in units of the noise, from above.

    On the image A is diagonal, and both norms are exact. Behind a layer S_2 is from the eigenvalues of G, and
    S_infinity is the least of four bounds: by rows, sqrt(d) S_2, sqrt(sum |G_ij|) (exact where G >= 0, as learned
    low-pass filters make it), and the dual one for t = the sums of |G|'s rows.
    """
    if not bool((deviations > 0).all() & deviations.isfinite().all()):
        raise InputError("the noise is not above 0 and finite: the first layer's weights are too small or not finite")
    if first.layer.place == "input":
        return _on_the_image(first, deviations)
    product = gram(first, deviations)
    values, vectors = torch.linalg.eigh(product.matrix)
    largest = float(values[-1])
    if not largest > 0:
        raise InputError("the first layer is zero: the network does not see the image, and its norm is 0")
    l2 = math.sqrt(largest) * _UPWARDS
    sums = product.matrix.abs().sum(dim=1)
    bounds = {
        "norms of the layer's rows": math.sqrt(product.rows) * _UPWARDS,
        "sqrt(d) S_2": math.sqrt(len(sums)) * l2,
        "sum of |G|": math.sqrt(float(sums.sum())) * _UPWARDS,
        "dual bound": dual_bound(product.matrix, sums),
    }
    how = min(bounds, key=lambda name: bounds[name])
    starts = torch.stack([torch.ones_like(sums), vectors[:, -1]])
    return LayerNorms(l2, bounds[how], how, sign_ascent(lambda signs: signs @ product.matrix, starts))


def gram(first: FirstLayer, deviations: Tensor) -> Gram:
    """Convolve the d unit images, in pieces: G in float64, never A as a whole."""
    exact = first.exact()
    pixels = math.prod(first.shape)
    scale = deviations.to("cpu", torch.float64)
    with torch.no_grad():
        zero = exact(exact.blank())
    rows = torch.zeros_like(zero[0])
    matrix = torch.empty(pixels, pixels, dtype=torch.float64)
    start = 0
    for images in unit_images(exact):
        with torch.enable_grad():
            values = exact(images.requires_grad_())
        moved = (values.detach() - zero) / scale
        rows += moved.abs().sum(dim=0)
        (back,) = torch.autograd.grad(values, images, moved / scale)
        matrix[start : start + len(images)] = back.flatten(1)
        start += len(images)
    return Gram((matrix + matrix.T) / 2, float(rows.square().sum()))


def unit_images(first: FirstLayer) -> Iterator[Tensor]:
    """Yield the d images in which one pixel is 1 and all others are 0, in order and in pieces (B, C, H, W)."""
    blank = first.blank()
    with torch.no_grad():
        wide = max(blank.numel(), first(blank).numel())
    step, pixels = max(1, _PIECE // wide), blank.numel()
    for start in range(0, pixels, step):
        count = min(step, pixels - start)
        units = blank.new_zeros(count, pixels)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        yield units.view(count, *first.shape)


def dual_bound(matrix: Tensor, weights: Tensor) -> float:
    """Return sqrt(sum t lambda_max(T^(-1/2) G T^(-1/2))), which is at least S_infinity for any t > 0.

    For |alpha|_inf <= 1, alpha' G alpha <= lambda_max alpha' T alpha <= lambda_max sum t. The best t is within
    sqrt(pi / 2) of S_infinity (Nesterov 1998). Where t is 0, G has to be 0.
    """
    seen = weights > 0
    roots = weights[seen].sqrt()
    scaled = matrix[seen][:, seen] / roots[:, None] / roots
    return math.sqrt(float(weights.sum()) * float(torch.linalg.eigvalsh(scaled)[-1])) * _UPWARDS


def sign_ascent(product: Callable[[Tensor], Tensor], starts: Tensor) -> float:
    """Return a lower bound of S_infinity = max of sqrt(s'Gs) over signs s: s <- sign(Gs) never lowers it."""
    signs = _signs(starts)
    best = 0.0
    for _ in range(_ASCENT_STEPS):
        moved = product(signs)
        reached = float((signs * moved).sum(dim=1).max())
        if reached <= best:
            break
        best, signs = reached, _signs(moved)
    return math.sqrt(best)


def estimated_norm(first: FirstLayer, spread: Tensor, norm: NormName) -> float:
    """Return a lower bound of S_p in a few passes through the layer; on the image it is exact.

    S_2 by Lanczos' method, within about a percent; S_infinity by sign ascent from several starts, which is further off
    for weights without order. Both begin at the same vectors each time.
    """
    if first.layer.place == "input":
        exact = _on_the_image(first, spread)
        return exact.l2 if norm == "l2" else exact.linf
    drawn = torch.randn(_STARTS, math.prod(first.shape), generator=torch_stream(0, "norm-start"))
    normal = _normal_product(first, spread)
    if norm == "l2":
        return math.sqrt(_lanczos(normal, drawn[0]))
    return sign_ascent(normal, torch.cat([torch.ones_like(drawn[:1]), drawn]))


def _on_the_image(first: FirstLayer, deviations: Tensor) -> LayerNorms:
    """The norms of a diagonal A."""
    diagonal = first.scale / deviations.to("cpu", torch.float64)
    l2, linf = float(diagonal.abs().max()) * _UPWARDS, float(diagonal.norm())
    return LayerNorms(l2, linf * _UPWARDS, "exact: noise on the image", linf)


def _normal_product(first: FirstLayer, spread: Tensor) -> Callable[[Tensor], Tensor]:
    """From vectors (n, d) or (d,) to their products with G, in the network's numbers; returned on the CPU."""
    scale = spread.to(first.blank())
    with torch.no_grad():
        zero = first(first.blank())

    def product(vectors: Tensor) -> Tensor:
        with torch.enable_grad():
            images = vectors.reshape(-1, *first.shape).to(zero).requires_grad_()
            values = first(images)
        moved = (values.detach() - zero) / scale.square()
        (back,) = torch.autograd.grad(values, images, moved)
        return back.reshape(vectors.shape).cpu().to(vectors.dtype)

    return product


def _lanczos(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """The largest Ritz value of G after a few steps, with full reorthogonalisation; never above the largest eigenvalue.

    Golub and Van Loan 2013, section 10.3.
    """
    vector = start / start.norm()
    basis, diagonal, beside = vector[None], [], []
    for _ in range(min(_LANCZOS_STEPS, len(start))):
        moved = product(basis[-1])
        diagonal.append(float(moved @ basis[-1]))
        for _ in range(2):
            moved = moved - (basis @ moved) @ basis
        length = float(moved.norm())
        if length <= 1e-6 * abs(diagonal[0]):
            break
        beside.append(length)
        basis = torch.cat([basis, moved[None] / length])
    size = len(diagonal)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    links = torch.tensor(beside[: size - 1], dtype=torch.float64)
    matrix = matrix + torch.diag(links, 1) + torch.diag(links, -1)
    return max(float(torch.linalg.eigvalsh(matrix)[-1]), 0.0)


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values)
