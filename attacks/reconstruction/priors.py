"""Image priors: a normal distribution, fitted to public images where there are any, and one that is trained on them.

The normal one's covariance is a few principal directions with their own variances and one variance for all the rest,
so that it is positive definite, can be inverted at once, and needs fewer images than pixels. Real images differ in
contrast far more than a normal distribution of so many pixels allows: ``contrast`` says how much, for estimates that
depend on it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.gradients.operator import first_line

Shape = tuple[int, int, int]

MOST_IMAGES = 2048  # public images that are used; more of them change little
FEWEST_IMAGES = 20  # below this the generic prior knows more
RANKS = (4, 8, 16, 32, 64, 128, 192, 256, 384, 512)

# The generic prior: what photographs have in common (Field 1987; Ruderman 1994), on the [0, 1] scale.
GREY, DEVIATION = 0.5, 0.25
NEIGHBOURS = 0.95  # correlation of neighbouring pixels
CHANNELS = 0.9  # correlation of two channels of one pixel
CONTRAST = 0.7
SHARE = 0.995  # of the variance that principal directions of the generic prior explain


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """A normal distribution over images of P numbers, on the scale of the network's input."""

    mean: Tensor  # (P,)
    basis: Tensor  # (P, r), orthonormal columns
    variances: Tensor  # (r,), along the columns, above 0
    rest: float  # variance along every other direction, above 0
    contrast: float  # deviation of the logarithm of images' squared distances; 0.0: really normal

    @property
    def pixels(self) -> int:
        """P."""
        return len(self.mean)

    def energy(self, images: Tensor) -> Tensor:
        """Return the squared distance from the mean in standard deviations: -2 log density but for a constant."""
        offsets = images.flatten(-3) - self.mean
        along = offsets @ self.basis
        outside = offsets.square().sum(dim=-1) - along.square().sum(dim=-1)
        return (along.square() / self.variances).sum(dim=-1) + outside.clamp(min=0) / self.rest

    def shrink(self, offsets: Tensor, along: Tensor, outside: Tensor) -> Tensor:
        """Multiply offsets (P,) with ``along`` (r,) in the principal directions and ``outside`` () in the others."""
        return outside * offsets + self.basis @ ((along - outside) * (self.basis.mT @ offsets))

    def to(self, like: Tensor) -> "GaussianPrior":
        """Return the same prior on a tensor's device and in its type."""
        mean, basis, variances = (value.to(like) for value in (self.mean, self.basis, self.variances))
        return GaussianPrior(mean, basis, variances, self.rest, self.contrast)


def stretched(offsets: Tensor, basis: Tensor, along: Tensor, outside: Tensor | float) -> Tensor:
    """Multiply offsets (..., P) with ``along`` (..., r) in the directions of a basis (P, r), and ``outside`` beyond."""
    return outside * offsets + ((along - outside) * (offsets @ basis)) @ basis.mT


def fit_prior(images: Tensor) -> GaussianPrior:
    """Fit the prior to public images (N, C, H, W), N >= 20; a fifth of them decides how many directions it has."""
    if images.ndim != 4 or len(images) < FEWEST_IMAGES:
        raise InputError(f"a prior needs at least {FEWEST_IMAGES} images (N, C, H, W); given {tuple(images.shape)}")
    flat = images[:: -(-len(images) // MOST_IMAGES)].flatten(1).cpu().double()
    held = torch.arange(len(flat)) % 5 == 4
    mean = flat[~held].mean(dim=0)
    fitted, tests = flat[~held] - mean, flat[held] - mean
    variances, basis = _principal(fitted)
    if len(variances) == 0:
        raise InputError("the public images are all the same: they say nothing about what images look like")
    along = tests @ basis
    squares = tests.square().sum(dim=1)
    ranks = {min(rank, len(variances), flat.shape[1] - 1) for rank in RANKS}
    rank = min(ranks, key=lambda number: _surprise(along[:, :number], squares, variances[:number], flat.shape[1]))
    rest = _rest(along[:, :rank], squares, variances[:rank], flat.shape[1])
    prior = GaussianPrior(mean, basis[:, :rank], variances[:rank], rest, 0.0)
    energies = prior.energy(flat[held].unflatten(1, images.shape[1:]))
    contrast = float(energies.clamp(min=1e-9).log().std())
    return GaussianPrior(mean, basis[:, :rank].contiguous(), variances[:rank], rest, contrast).to(images)


def generic_prior(shape: Shape, mean: Tensor, std: Tensor) -> GaussianPrior:
    """Return the prior without public images (C, H, W): grey, a Markov process in both directions and the channels."""
    channels, height, width = shape
    covariances = (channel_covariance(channels), line_covariance(height), line_covariance(width))
    factors = [torch.linalg.eigh(matrix) for matrix in covariances]
    products = torch.einsum("c,h,w->chw", *(values for values, _ in factors)).flatten()
    order = products.argsort(descending=True)
    explained = products[order].cumsum(0) / products.sum()
    rank = min(int((explained < SHARE).sum()) + 1, RANKS[-1], len(products) - 1)
    c, h, w = torch.unravel_index(order[:rank], shape)
    vectors = torch.einsum("ir,jr,kr->ijkr", *(v[:, n] for (_, v), n in zip(factors, (c, h, w), strict=True)))
    scale = DEVIATION / float(std.double().mean())
    start = ((GREY - mean.double()) / std.double()).expand(shape).flatten()
    variances = products[order[:rank]] * scale**2
    rest = float(products[order[rank:]].mean()) * scale**2
    return GaussianPrior(start, vectors.flatten(0, 2), variances, rest, CONTRAST).to(mean)


def channel_covariance(channels: int) -> Tensor:
    """The correlations (C, C) of the channels of one pixel, in the generic prior; float64 on the CPU."""
    return torch.full((channels, channels), CHANNELS, dtype=torch.float64).fill_diagonal_(1.0)


def line_covariance(length: int, neighbours: float = NEIGHBOURS) -> Tensor:
    """The correlations (length, length) of the pixels of one line, in the generic prior; float64 on the CPU."""
    places = torch.arange(length, dtype=torch.float64)
    return neighbours ** (places[:, None] - places).abs()


def _principal(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (r,), largest first, and directions (P, r) of centred images (n, P), those of variance 0 left out."""
    count, pixels = offsets.shape
    has_many = count > pixels
    values, vectors = torch.linalg.eigh((offsets.mT @ offsets if has_many else offsets @ offsets.mT) / (count - 1))
    values, vectors = values.flip(0), vectors.flip(1)
    kept = values > max(float(values[0]) * 1e-9, 1e-30)
    values, vectors = values[kept], vectors[:, kept]
    return values, vectors if has_many else offsets.mT @ vectors / (values * (count - 1)).sqrt()


def _rest(along: Tensor, squares: Tensor, variances: Tensor, pixels: int) -> float:
    """The variance of held-out images (n, r), with squared lengths (n,), along each of the directions left."""
    outside = (squares - along.square().sum(dim=1)).mean() / (pixels - along.shape[1])
    return max(float(outside), 1e-6 * float(variances[0]))


def _surprise(along: Tensor, squares: Tensor, variances: Tensor, pixels: int) -> float:
    """Minus the mean log-density of held-out images with so many directions, but for a constant."""
    rank = along.shape[1]
    rest = _rest(along, squares, variances, pixels)
    outside = (squares - along.square().sum(dim=1)).mean() / rest
    inside = (along.square() / variances).sum(dim=1).mean()
    return float((inside + outside + variances.log().sum()) / 2) + (pixels - rank) / 2 * math.log(rest)


# A prior that is trained on public images: a small network that removes noise of any strength.
#
# The best denoiser of images with normal noise of deviation s tells the slope of their smoothed log-density:
# ``(D(x, s) - x) / s^2`` (Tweedie; Vincent 2011). So the network is a diffusion prior: attacks follow that slope next
# to the upload's. Scaling and weights of the loss follow Karras et al. (NeurIPS 2022).


WIDTH = 40  # channels at half the images' side; twice as many at a quarter
LEAST, MOST = 0.01, 1.0  # deviations of the noise that is removed, on the [0, 1] scale
BATCH = 64
RATE = 2e-3  # of Adam, at first; falls to 0 with half a cosine
KEPT = 0.998  # of the weights' running mean, a step
DIGESTS, ABOUT = "digests", "prior"  # in the file: a tensor, and JSON


class _Block(nn.Module):
    """Two convolutions that know the noise's strength, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.level = nn.Linear(1, 2 * channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, values: Tensor, level: Tensor) -> Tensor:
        factor, shift = self.level(level)[:, :, None, None].chunk(2, dim=1)
        inner = self.first(F.silu(values)) * (1 + factor) + shift
        return values + self.second(F.silu(inner))


class DenoisingNetwork(nn.Module):
    """What a U-Net of two scales adds to the Wiener filter of the images' normal distribution.

    Images (N, C, H, W) and deviations (N,) on the [0, 1] scale -> denoised images.
    """

    mean: Tensor
    basis: Tensor
    variances: Tensor
    rest: Tensor

    def __init__(self, shape: Shape, prior: GaussianPrior) -> None:
        super().__init__()
        channels = shape[0]
        self.register_buffer("mean", prior.mean)
        self.register_buffer("basis", prior.basis)
        self.register_buffer("variances", prior.variances)
        self.register_buffer("rest", torch.tensor(prior.rest))
        self.enter = nn.Conv2d(8 * channels, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 2, stride=2)
        self.up = nn.Conv2d(2 * WIDTH, 4 * WIDTH, 1)
        self.leave = nn.Conv2d(WIDTH, 4 * channels, 3, padding=1)
        nn.init.zeros_(self.leave.weight)
        self.fine = nn.ModuleList([_Block(WIDTH), _Block(WIDTH)])
        self.coarse = nn.ModuleList([_Block(2 * WIDTH), _Block(2 * WIDTH)])

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the mean of images (N, C, H, W) given these, which have noise of deviations (N,)."""
        squared = noise.square()[:, None]
        along, outside = self.variances / (self.variances + squared), self.rest / (self.rest + squared)
        offsets = images.flatten(1) - self.mean
        filtered = stretched(offsets, self.basis, along, outside)
        size = (squared + self.spread).sqrt()
        both = torch.stack([offsets / size, filtered / self.spread.sqrt()], dim=1)
        rest = self._inner(both.unflatten(2, images.shape[1:]).flatten(1, 2), (noise.log() / 4)[:, None])
        return (self.mean + filtered).view_as(images) + self.error(noise)[:, None, None, None] * rest

    @property
    def spread(self) -> Tensor:
        """The mean variance of a pixel ()."""
        total = self.variances.sum() + (len(self.mean) - len(self.variances)) * self.rest
        return total / len(self.mean)

    def error(self, noise: Tensor) -> Tensor:
        """The Wiener filter's root mean squared error (N,) at these deviations."""
        squared = noise.square()[:, None]
        inside = (self.variances * squared / (self.variances + squared)).sum(dim=1)
        outside = (self.rest * squared / (self.rest + squared))[:, 0] * (len(self.mean) - len(self.variances))
        return ((inside + outside) / len(self.mean)).sqrt()

    def _inner(self, values: Tensor, level: Tensor) -> Tensor:
        height, width = values.shape[2:]
        padded = F.pad(values, (0, -width % 4, 0, -height % 4), mode="replicate")
        fine = self.fine[0](self.enter(F.pixel_unshuffle(padded, 2)), level)
        coarse = self.down(fine)
        for block in self.coarse:
            coarse = block(coarse, level)
        fine = self.fine[1](fine + F.pixel_shuffle(self.up(coarse), 2), level)
        return F.pixel_shuffle(self.leave(F.silu(fine)), 2)[:, :, :height, :width]


@dataclass(frozen=True, eq=False)
class TrainedPrior:
    """A denoising network, and what it was trained on."""

    network: DenoisingNetwork
    shape: Shape  # of an image
    data: str  # the data set's name
    digests: Tensor  # int64 (N,), ascending: of the images that it was trained on

    @property
    def words(self) -> str:
        """What it is, for people."""
        return f"prior trained on {len(self.digests):,} images of {self.data}"

    def saw(self, images: Tensor) -> int:
        """How many of these images (N, C, H, W), on the [0, 1] scale, it was trained on."""
        return int(torch.isin(digests_of(images), self.digests).sum())

    def write(self, path: Path) -> None:
        """Write it to a file."""
        tensors = {name: value.contiguous() for name, value in self.network.state_dict().items()}
        about = {"data": self.data, "shape": self.shape}
        write_whole(path, save(tensors | {DIGESTS: self.digests}, metadata={ABOUT: json.dumps(about)}))

    def denoised(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the mean (N, B, C, H, W) of images given these, which have noise of deviations (N,); [0, 1] scale."""
        network = self.network.to(images)
        every = noise[:, None].expand(images.shape[:2]).flatten().clamp(LEAST, MOST)
        with torch.no_grad():
            denoised: Tensor = network(images.flatten(0, 1), every).unflatten(0, images.shape[:2])
        return denoised

    def energy(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return numbers (N,) whose derivative is minus the slope of the log-density that noise (N,) smooths."""
        fixed = images.detach()
        rest = fixed - self.denoised(fixed, noise)
        # Only the slope is known: the value is what the denoiser takes away.
        energies = (rest * (images - fixed) + rest.square() / 2).flatten(1).sum(dim=1)
        return energies / noise.square()


def read_trained_prior(path: Path) -> TrainedPrior:
    """Read a prior from its file."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[ABOUT])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        channels, height, width = map(int, about["shape"])
        digests, data = tensors.pop(DIGESTS), str(about["data"])
        gaussian = GaussianPrior(tensors["mean"], tensors["basis"], tensors["variances"], float(tensors["rest"]), 0.0)
        network = DenoisingNetwork((channels, height, width), gaussian)
        network.load_state_dict(tensors)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        hint = f"write one with fedpriv attack train-prior FILE --out {path}"
        raise InputError(f"{path} is no prior: {first_line(error)}; {hint}") from None
    return TrainedPrior(network.eval(), (channels, height, width), data, digests)


def digests_of(images: Tensor) -> Tensor:
    """64 bits of a digest of each image (N, C, H, W), on the [0, 1] scale, in 256 steps; int64 (N,), ascending."""
    steps = (images * 255).round().byte().flatten(1).numpy()
    numbers = [int.from_bytes(blake2b(row.tobytes(), digest_size=8).digest(), "big", signed=True) for row in steps]
    return torch.tensor(numbers, dtype=torch.int64).sort().values


def train_prior(images: Tensor, data: str, steps: int, seed: int, report: Callable[[int, float], None]) -> TrainedPrior:
    """Train a prior on images (N, C, H, W) of a data set, on the [0, 1] scale."""
    shape = (images.shape[1], images.shape[2], images.shape[3])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        network = DenoisingNetwork(shape, fit_prior(images))
    generator = torch.Generator().manual_seed(seed)
    mean = {name: value.detach().clone() for name, value in network.named_parameters()}
    adam = torch.optim.Adam(network.parameters(), lr=RATE)
    for step in range(steps):
        chosen = images[torch.randint(len(images), (BATCH,), generator=generator)]
        noise = LEAST * (MOST / LEAST) ** torch.rand(BATCH, generator=generator)
        noisy = chosen + noise[:, None, None, None] * torch.randn(chosen.shape, generator=generator)
        loss = ((network(noisy, noise) - chosen).flatten(1) / network.error(noise)[:, None]).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        adam.step()
        fresh = max(1 - KEPT, 9 / (step + 10))
        for name, value in network.named_parameters():
            mean[name].lerp_(value.detach(), fresh)
        report(step + 1, float(loss.detach()))
    network.load_state_dict(mean, strict=False)
    return TrainedPrior(network.eval(), shape, data, digests_of(images))
