"""Metrics against formulas written out in numpy, and LPIPS with and without its weights."""

import io
import os
import subprocess
import sys
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.attacks import metrics
from fedpriv.attacks.metrics import LEAST_PADDED, lpips_scores, match, mse, padded_ssim, psnr, ssim
from tests.cases import in_one_test

SHAPES = [(1, 8, 8), (3, 8, 8), (1, 11, 11), (1, 28, 28), (3, 32, 32), (3, 9, 30), (1, 10, 10), (1, 2, 2), (1, 1, 1)]


def pictures(shape: tuple[int, int, int], count: int = 4, seed: int = 0) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def wang_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """Wang et al. 2004, equations 13 to 17, one window at a time, for images (C, H, W)."""
    channels, height, width = x.shape
    size = min(height, width, 11)
    size -= size % 2 == 0
    offsets = np.arange(size) - size // 2
    bell = np.exp(-(offsets**2) / (2 * (1.5 * size / 11) ** 2))
    weights = np.outer(bell, bell) / np.outer(bell, bell).sum()
    c1, c2 = 0.01**2, 0.03**2
    values = []
    for channel in range(channels):
        for top in range(height - size + 1):
            for left in range(width - size + 1):
                a = x[channel, top : top + size, left : left + size]
                b = y[channel, top : top + size, left : left + size]
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
                cov = (weights * (a - mean_a) * (b - mean_b)).sum()
                luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
                values.append(luminance * (2 * cov + c2) / (var_a + var_b + c2))
    return float(np.mean(values))


@in_one_test("shape", SHAPES)
def test_scores_equal_their_formulas(shape: tuple[int, int, int]) -> None:
    x = pictures(shape, seed=1)
    y = (x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).clamp(0, 1)
    a, b = x.double().numpy(), y.double().numpy()
    squared = ((a - b) ** 2).reshape(len(a), -1).mean(1)
    np.testing.assert_allclose(mse(x, y), squared, rtol=1e-12)
    np.testing.assert_allclose(psnr(x, y), -10 * np.log10(squared), rtol=1e-12)
    np.testing.assert_allclose(ssim(x, y), [wang_ssim(p, q) for p, q in zip(a, b, strict=True)], rtol=0, atol=1e-9)


def test_ssim_of_a_signal_compares_its_shape() -> None:
    """Its windows lie along it, so that the figure is a picture's whose rows are all this one; noise is not alike."""
    x = pictures((1, 1, 60), seed=1)
    y = (x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).clamp(0, 1)
    tall = [z.double().numpy().repeat(11, axis=2) for z in (x, y)]
    expected = [wang_ssim(p, q) for p, q in zip(*tall, strict=True)]
    np.testing.assert_allclose(ssim(x, y), expected, rtol=0, atol=1e-9)
    for rows in (2, 3, 12):  # of which all but the first are their own originals
        beside = torch.cat([x, *[y] * (rows - 1)], dim=2), torch.cat([y] * rows, dim=2)
        for pair in (beside, [z.mT for z in beside]):
            np.testing.assert_allclose(ssim(*pair), (np.array(expected) + rows - 1) / rows, rtol=0, atol=1e-9)
    assert float(ssim(torch.full((1, 1, 1, 60), 0.5), x[:1])) < 0.2


@in_one_test("channels", [1, 3])
@in_one_test("side", [(8, 8), (28, 28), (32, 32), (LEAST_PADDED, 9)])
def test_padded_ssim_is_that_of_torchmetrics(channels: int, side: tuple[int, int]) -> None:
    """And the formula's, where numpy pads the picture."""
    from torchmetrics.image import StructuralSimilarityIndexMeasure

    x = pictures((channels, *side), 2, seed=1).double()
    y = (x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).clamp(0, 1)
    theirs = StructuralSimilarityIndexMeasure(data_range=1.0, reduction="none")(y, x)
    np.testing.assert_allclose(padded_ssim(x, y), theirs, rtol=0, atol=1e-6)
    wide = ((0, 0), (5, 5), (5, 5))
    a, b = (np.pad(z[0].numpy(), wide, mode="reflect") for z in (x, y))
    assert float(padded_ssim(x, y)[0]) == pytest.approx(wang_ssim(a, b), abs=1e-9)


def test_padding_needs_six_pixels_a_side() -> None:
    x = pictures((1, LEAST_PADDED - 1, 9))
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        padded_ssim(x, x)


@in_one_test("shape", SHAPES)
@in_one_test("content", ["noise", "black", "grey", "white"])
def test_identical_images_are_perfect(shape: tuple[int, int, int], content: str) -> None:
    levels = {"black": 0.0, "grey": 0.5, "white": 1.0}
    x = pictures(shape) if content == "noise" else torch.full((4, *shape), levels[content])
    np.testing.assert_allclose(ssim(x, x), 1, atol=1e-12)
    assert mse(x, x).eq(0).all()
    assert psnr(x, x).eq(torch.inf).all()


@in_one_test("shape", SHAPES)
def test_constant_images_have_the_luminance_term(shape: tuple[int, int, int]) -> None:
    dark, light = torch.full((1, *shape), 0.25, dtype=torch.float64), torch.full((1, *shape), 0.75, dtype=torch.float64)
    expected = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)
    assert ssim(dark, light).item() == pytest.approx(expected, abs=1e-9)
    assert psnr(torch.zeros(1, *shape), torch.ones(1, *shape)).item() == 0


def test_a_score_does_not_depend_on_the_other_images() -> None:
    x, y = pictures((3, 32, 32), seed=3), pictures((3, 32, 32), seed=4)
    for score in (mse, psnr, ssim, padded_ssim):
        alone = torch.cat([score(x[i : i + 1], y[i : i + 1]) for i in range(len(x))])
        torch.testing.assert_close(score(x, y), alone, rtol=1e-12, atol=1e-12)


def test_mse_takes_any_scale() -> None:
    x, y = pictures((3, 8, 8), seed=5), pictures((3, 8, 8), seed=6)
    torch.testing.assert_close(mse(4 * x - 2, 4 * y - 2), 16 * mse(x, y), rtol=1e-5, atol=0)


@in_one_test("score", [mse, psnr, ssim, padded_ssim, match, lpips_scores])
@in_one_test("shapes", [((2, 1, 8, 8), (3, 1, 8, 8)), ((1, 8, 8), (1, 8, 8)), ((0, 1, 8, 8), (0, 1, 8, 8))])
def test_shapes_that_do_not_pair_are_refused(score: object, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="two stacks of images"):
        score(torch.zeros(shapes[0]), torch.zeros(shapes[1]))  # type: ignore[operator]


@in_one_test("count", [1, 2, 7])
def test_match_undoes_a_shuffle(count: int) -> None:
    x = pictures((3, 8, 8), count, seed=7)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(8))
    shuffled = (x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9)))[order]
    assert torch.equal(order[match(x, shuffled)], torch.arange(count))


def test_match_minimises_the_total_and_not_each_choice() -> None:
    """Greedy would give the first original its nearest (0.5) and leave 0 for 0.9; the total prefers the reverse."""
    originals = torch.tensor([0.4, 0.9]).reshape(2, 1, 1, 1)
    reconstructions = torch.tensor([0.0, 0.5]).reshape(2, 1, 1, 1)
    assert match(originals, reconstructions).tolist() == [0, 1]


def test_match_gives_a_broken_reconstruction_what_is_left() -> None:
    x = pictures((1, 8, 8), 3, seed=10)
    broken = x[[2, 0, 1]].clone()
    broken[1] = torch.nan
    assert match(x, broken).tolist() == [1, 2, 0]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def refuse(request: urllib.request.Request, timeout: float) -> None:
        asked.append(request.full_url)
        raise urllib.error.URLError("no network\nin this test")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return asked


def test_lpips_without_a_torchvision_that_fits_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "lpips", None)
    x = torch.zeros(1, 3, 64, 64)
    assert "cannot be imported" in str(lpips_scores(x, x, False).reason)


@pytest.mark.parametrize("download", [True, False])
def test_lpips_without_weights_says_why(
    download: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_network: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    x = pictures((3, 32, 32))
    first, second = (lpips_scores(x, x, download) for _ in range(2))
    assert first.values is None and second.values is None
    assert first.reason is not None and "squeezenet1_1-b8a52dc0.pth, are not in torch's hub folder" in first.reason
    assert "\n" not in first.reason and "no network" not in first.reason
    assert first.reason.endswith("the server that offers them cannot be reached") == download
    assert len(no_network) == int(download), "the network is tried once, and only if a download is wanted"
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "hub").exists()


def test_lpips_names_the_error_that_a_server_answers_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)

    monkeypatch.setattr(urllib.request, "urlopen", gone)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    x = pictures((3, 32, 32))
    assert str(lpips_scores(x, x).reason).endswith("and the server that offers them answers with error 404")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("invalid hash value"), "what was fetched is damaged"),
        (OSError(28, "No space left on device"), "could not be fetched: [Errno 28] No space left on device"),
    ],
)
def test_lpips_says_what_became_of_a_download(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", lambda request, timeout: io.BytesIO())
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    x = pictures((3, 32, 32))
    assert str(lpips_scores(x, x).reason).endswith(words)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_lpips_with_damaged_weights_says_why(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "squeezenet1_1-b8a52dc0.pth").write_bytes(content)
    result = lpips_scores(pictures((3, 8, 8)), pictures((3, 8, 8)))
    assert result.values is None
    assert result.reason is not None and "cannot be read" in result.reason and "\n" not in result.reason
    assert capfd.readouterr() == ("", "")


def test_lpips_refuses_other_numbers_of_channels() -> None:
    with pytest.raises(ValueError, match="1 or 3 channels; given 2"):
        lpips_scores(pictures((2, 8, 8)), pictures((2, 8, 8)))


@pytest.fixture(scope="module")
def hub_with_weights(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub folder that holds the backbone, as float32 under the file name torchvision asks for."""
    source = shared_data / "squeezenet1_1_lpips.npz"
    if not source.is_file():
        pytest.skip("FEDPRIV_DATA holds no squeezenet1_1_lpips.npz")
    hub = tmp_path_factory.mktemp("hub")
    (hub / "checkpoints").mkdir()
    with np.load(source) as arrays:
        state = {
            name: torch.from_numpy(arrays[name].astype(np.float32))
            for name in arrays.files
            if not name.startswith("lpips.")
        }
    torch.save(state, hub / "checkpoints" / "squeezenet1_1-b8a52dc0.pth")
    return hub


@pytest.fixture
def installed(hub_with_weights: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(hub_with_weights))


def scores(x: Tensor, y: Tensor) -> Tensor:
    result = lpips_scores(x, y)
    assert result.values is not None, result.reason
    return result.values


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 40, 100), (3, 96, 96)])
def test_lpips_is_zero_for_the_same_and_grows_with_noise(shape: tuple[int, int, int]) -> None:
    x = pictures(shape)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    little, much = scores(x, (x + 0.05 * noise).clamp(0, 1)), scores(x, (x + 0.5 * noise).clamp(0, 1))
    assert scores(x, x).eq(0).all()
    assert little.gt(0).all() and much.gt(little).all()


@pytest.mark.usefixtures("installed")
def test_lpips_equals_its_definition(shared_data: Path) -> None:
    """Zhang et al. 2018, equation 1, from torchvision's features and the .npz file's own linear weights."""
    from torchvision.models import squeezenet1_1

    x, y = pictures((3, 64, 64), seed=1), pictures((3, 64, 64), seed=2)
    backbone = squeezenet1_1(weights=None).features.eval()
    with np.load(shared_data / "squeezenet1_1_lpips.npz") as arrays:
        state = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
    backbone.load_state_dict({k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")})
    shift = torch.tensor([-0.030, -0.088, -0.188])[:, None, None]
    scale = torch.tensor([0.458, 0.448, 0.450])[:, None, None]
    a, b = (2 * x - 1 - shift) / scale, (2 * y - 1 - shift) / scale
    expected = torch.zeros(len(x))
    taps = (1, 4, 7, 9, 10, 11, 12)
    with torch.no_grad():
        for number, layer in enumerate(backbone):
            a, b = layer(a), layer(b)
            if number in taps:
                difference = torch.nn.functional.normalize(a, dim=1) - torch.nn.functional.normalize(b, dim=1)
                weights = state[f"lpips.lin{taps.index(number)}"].reshape(1, -1, 1, 1)
                expected += (weights * difference.square()).sum(1).mean((1, 2))
    torch.testing.assert_close(scores(x, y), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("installed")
def test_lpips_enlarges_small_images_and_repeats_grey_ones() -> None:
    x, y = pictures((1, 32, 32), seed=1), pictures((1, 32, 32), seed=2)
    large = [torch.nn.functional.interpolate(z, size=(64, 64), mode="bilinear").repeat(1, 3, 1, 1) for z in (x, y)]
    torch.testing.assert_close(scores(x, y), scores(*large))


@pytest.mark.usefixtures("installed")
def test_lpips_leaves_torch_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    metrics._lpips_network.cache_clear()
    settings = [
        torch.get_num_threads,
        torch.get_default_dtype,
        torch.is_grad_enabled,
        torch.are_deterministic_algorithms_enabled,
        torch.get_float32_matmul_precision,
    ]
    before, state = [read() for read in settings], torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
    result = lpips_scores(pictures((1, 8, 8)).requires_grad_(), pictures((1, 8, 8)))
    assert result.values is not None and not result.values.requires_grad
    assert [read() for read in settings] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_lpips_without_weights_or_network_in_a_fresh_process(tmp_path: Path) -> None:
    """An address that nobody answers at stands for no network; warnings would show on stderr."""
    program = (
        "import torch; from fedpriv.attacks.metrics import lpips_scores\n"
        "x = torch.zeros(1, 3, 32, 32); result = lpips_scores(x, x)\n"
        "print(result.values, result.reason.endswith('the server that offers them cannot be reached'))"
    )
    environment = os.environ | {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("None True\n", "")


def test_weights_that_come_later_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing network is remembered only as long as no file is there."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    image = pictures((1, 8, 8))
    assert "are not in torch's hub folder" in str(lpips_scores(image, image, download=False).reason)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "squeezenet1_1-b8a52dc0.pth").write_bytes(b"no weights")
    assert "cannot be read" in str(lpips_scores(image, image, download=False).reason)
