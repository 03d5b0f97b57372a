"""How close a reconstruction is to its original: MSE, PSNR, SSIM and LPIPS, per image, and one-to-one matching.

Images are floating point (N, C, H, W). For psnr, ssim and lpips_scores they are on the [0, 1] scale, clamped by the
caller; nothing is clamped here, so that the scale of a number is visible where it is computed. Every function computes
on the CPU and returns there; mse, psnr and ssim compute in float64. A score of a picture with a NaN in it is NaN.
"""

import http.client
import pickle
import urllib.error
import urllib.request
import warnings
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedpriv.core.errors import one_line
from fedpriv.core.files import content_digest
from fedpriv.core.records import SSIM_WINDOW, ssim_window

SSIM_SIGMA = 1.5
_TRUNCATED = 3.5  # a window ends so many deviations from its centre
_C1, _C2 = 0.01**2, 0.03**2  # of Wang et al., for a range of 1
LEAST_PADDED = SSIM_WINDOW // 2 + 1  # pixels a side that reflection needs
LPIPS_SIDE = 64
CONNECT_SECONDS = 5.0
_WEIGHTS = "squeezenet1_1-*.pth"


@dataclass(frozen=True, eq=False)
class LpipsResult:
    """LPIPS of each image, or why there is none."""

    values: Tensor | None  # float32 (N,), 0 for identical images; None if it cannot be computed
    reason: str | None  # why not, to follow on "LPIPS is not available: "; None if there are values


def mse(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Mean squared error of each image over its channels and pixels, on the scale that the images are on."""
    original, reconstruction = _pair(originals, reconstructions)
    return (original - reconstruction).square().mean(dim=(1, 2, 3))


def psnr(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, float64 (N,), for a peak of 1; infinite for identical images."""
    return 10 * torch.log10(1 / mse(originals, reconstructions))


def ssim(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Structural similarity of each image, float64 (N,), at most 1: the mean over windows (Wang et al. 2004).

    The window is theirs, 11x11, Gaussian of 1.5 pixels; below that side the largest odd one that fits, in proportion
    (8x8 digits: 7x7 and 0.95), so that numbers of such images compare among themselves only. Constants are K1 = 0.01,
    K2 = 0.03 for a range of 1. Only windows inside the image count, as in their code.
    Of signals windows lie along them (:func:`ssim_window`).
    """
    window = ssim_window(*originals.shape[-2:])
    sigma = tuple(SSIM_SIGMA * side / SSIM_WINDOW if side > 1 else 0.0 for side in window)
    return _similarity(*_pair(originals, reconstructions), sigma)


def padded_ssim(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """SSIM of each image as torchmetrics, kornia and ignite define it, float64 (N,): the windows at all pixels count.

    The image is padded by reflection, so each side needs :data:`LEAST_PADDED` pixels. The window is always 11x11.
    """
    border = (SSIM_WINDOW // 2,) * 4
    original, reconstruction = _pair(originals, reconstructions)
    return _similarity(pad(original, border, "reflect"), pad(reconstruction, border, "reflect"), (SSIM_SIGMA,) * 2)


def match(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Return which reconstruction (N,) belongs to each original: one to one, the least total MSE (Hungarian)."""
    from scipy.optimize import linear_sum_assignment

    original, reconstruction = _pair(originals, reconstructions)
    cost = torch.stack([(reconstruction - image).square().mean(dim=(1, 2, 3)) for image in original]).numpy()
    # A broken image costs the same with every other one, so any constant leaves the best choice of the rest as it is.
    _, order = linear_sum_assignment(np.where(np.isfinite(cost), cost, 0.0))
    return torch.from_numpy(order)


def lpips_scores(originals: Tensor, reconstructions: Tensor, download: bool = True) -> LpipsResult:
    """Perceptual distance of each image (Zhang et al. 2018): LPIPS v0.1 on SqueezeNet 1.1.

    ImageNet weights lie in torch's hub folder or are fetched once (5 MB). Grey images are repeated to three channels; a
    side below 64 pixels, on which LPIPS was calibrated, is enlarged bilinearly.
    """
    original, reconstruction = _pair(originals, reconstructions)
    if original.shape[1] not in (1, 3):
        raise ValueError(f"LPIPS is for 1 or 3 channels; given {original.shape[1]}")
    hub = Path(torch.hub.get_dir())
    held = tuple(map(content_digest, filter(Path.is_file, sorted((hub / "checkpoints").glob(_WEIGHTS)))))
    network, reason = _lpips_network(hub, download, held)
    if network is None:
        return LpipsResult(None, reason)
    with torch.no_grad():
        distances: Tensor = network(_perceptible(original), _perceptible(reconstruction), normalize=True)
    return LpipsResult(distances.flatten(), None)


def _similarity(originals: Tensor, reconstructions: Tensor, sigma: tuple[float, ...]) -> Tensor:
    """Mean SSIM (equation 13) over the windows inside each image, float64 (N,); a window ends at 3.5 sigma."""
    from scipy.ndimage import gaussian_filter

    mean = partial(gaussian_filter, sigma=sigma, truncate=_TRUNCATED, axes=(2, 3))
    x, y = originals.numpy(), reconstructions.numpy()
    product, squares = mean(x) * mean(y), mean(x) ** 2 + mean(y) ** 2
    covariance, variances = mean(x * y) - product, mean(x**2 + y**2) - squares
    values = (2 * product + _C1) / (squares + _C1) * (2 * covariance + _C2) / (variances + _C2)
    down, across = (round(_TRUNCATED * each) for each in sigma)
    height, width = values.shape[2:]
    inside = values[:, :, down : height - down, across : width - across]
    return torch.from_numpy(inside.mean(axis=(1, 2, 3)))


def _pair(originals: Tensor, reconstructions: Tensor) -> tuple[Tensor, Tensor]:
    if originals.ndim != 4 or originals.shape != reconstructions.shape or originals.numel() == 0:
        raise ValueError(
            f"expected two stacks of images (N, C, H, W); given {tuple(originals.shape)} "
            f"and {tuple(reconstructions.shape)}"
        )
    return originals.detach().cpu().double(), reconstructions.detach().cpu().double()


def _perceptible(images: Tensor) -> Tensor:
    """Three channels, at least 64 pixels a side, float32."""
    coloured = images.float().expand(-1, 3, -1, -1)
    height, width = images.shape[2:]
    shorter = min(height, width)
    if shorter >= LPIPS_SIDE:
        return coloured
    size = (round(height * LPIPS_SIDE / shorter), round(width * LPIPS_SIDE / shorter))
    return nn.functional.interpolate(coloured, size=size, mode="bilinear", align_corners=False)


@lru_cache(maxsize=4)
def _lpips_network(hub: Path, download: bool, _: tuple[bytes, ...]) -> tuple[nn.Module | None, str | None]:
    """Return the network or the reason, remembered for these weights: a missing network costs its time-out once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips calls torchvision in a way that torchvision warns of
        try:
            import lpips  # seconds to import
            from torchvision.models import SqueezeNet1_1_Weights
        except (ImportError, OSError, RuntimeError) as error:  # torchvision raises all three beside another torch
            return None, f"lpips or torchvision cannot be imported: {one_line(error)[:200]}"

        url = SqueezeNet1_1_Weights.IMAGENET1K_V1.url
        weights = hub / "checkpoints" / url.rpartition("/")[2]
        reason = _provide(url, weights, download)
        if reason is not None:
            return None, reason
        try:
            with torch.random.fork_rng(devices=[]):  # weights are drawn at random before they are read
                network = lpips.LPIPS(net="squeeze", verbose=False, pnet_rand=True)
            # torch's hub would unpickle the file, whatever it holds; this reads tensors and nothing else.
            stored = torch.load(weights, map_location="cpu", weights_only=True)
            names = [name for name, _ in network.net.named_parameters()]
            network.net.load_state_dict({name: stored[f"features.{name.partition('.')[2]}"] for name in names})
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, EOFError, pickle.UnpicklingError) as error:
            return None, f"its weights, {weights.name} in torch's hub folder, cannot be read: {one_line(error)[:200]}"
    usable: nn.Module = network.requires_grad_(False).eval()
    return usable, None


def _provide(url: str, weights: Path, download: bool) -> str | None:
    """Make sure that the weights are there, or return the reason why they are not."""
    if weights.is_file():
        return None
    absent = f"its weights, {weights.name}, are not in torch's hub folder ($TORCH_HOME/hub/checkpoints)"
    if not download:
        return absent
    try:
        # torch's own download knows no time-out: see first whether the server answers.
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_SECONDS).close()
    except (OSError, http.client.HTTPException) as error:
        return f"{absent}, and {_refusal(error)}"
    try:
        weights.parent.mkdir(parents=True, exist_ok=True)
        digits = weights.stem.rpartition("-")[2]
        torch.hub.download_url_to_file(url, str(weights), hash_prefix=digits, progress=False)
    except RuntimeError:
        return f"{absent}, and what was fetched is damaged"
    except (OSError, http.client.HTTPException) as error:
        return f"{absent}, and could not be fetched: {one_line(error)[:200]}"
    return None


def _refusal(error: Exception) -> str:
    """Say what a server that offers weights did, without the words of urllib."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server that offers them answers with error {error.code}"
    return "the server that offers them cannot be reached"
