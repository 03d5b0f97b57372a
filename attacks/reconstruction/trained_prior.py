"""An image prior that is trained on public images: a small network that removes noise of any strength.

The best denoiser of images with normal noise of deviation s tells the slope of their smoothed log-density:
``(D(x, s) - x) / s^2`` (Tweedie; Vincent 2011). So the network is a diffusion prior: attacks follow that slope next to
the upload's. Scaling and weights of the loss follow Karras et al. (NeurIPS 2022).
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

from fedpriv.attacks.reconstruction.priors import GaussianPrior, Shape, fit_prior, stretched
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.gradients.operator import first_line

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
