"""Distances and total variation against numpy."""

import math

import numpy as np
import pytest
import torch

from fedpriv.attacks.reconstruction.dummy_gradients.factors import Targets
from fedpriv.attacks.reconstruction.matching import (
    Compared,
    angle,
    opponent_variation,
    squared_distance,
    total_variation,
)
from fedpriv.attacks.reconstruction.upload_model import UploadModel
from fedpriv.mechanisms.none import NoMechanism
from tests.cases import in_one_test

Blocks = tuple[tuple[str, ...], ...]
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 1, 3, 3)}
WHOLE = (tuple(SHAPES),)
LAYERS = tuple((name,) for name in SHAPES)


def vectors(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def compare(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], blocks: Blocks) -> Compared:
    """What a matcher hands to an objective, from vectors (N, *shape) written out."""

    def products(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> torch.Tensor:
        per_tensor = {name: (left[name] * right[name]).flatten(1).sum(dim=1) for name in left}
        return torch.stack([torch.stack([per_tensor[name] for name in block]).sum(dim=0) for block in blocks], dim=1)

    rows = [{name: value[row] for name, value in other.items()} for row in range(len(other["a"]))]
    model = UploadModel(NoMechanism(), "example", 1.0, 1, 1)
    targets = Targets(rows, range(len(rows)))
    return Compared(products(one, other), products(one, one), products(other, other), blocks, model, dict, targets)


def flat(vector: dict[str, torch.Tensor], names: tuple[str, ...], row: int) -> np.ndarray:
    return np.concatenate([vector[name][row].numpy().ravel() for name in names])


@in_one_test("blocks", [WHOLE, LAYERS, (("a", "c"), ("b",))])
def test_against_numpy(blocks: Blocks) -> None:
    one, other = vectors(4, 0), vectors(4, 1)
    distances, angles = squared_distance(compare(one, other, blocks)), angle(compare(one, other, blocks))
    for row in range(4):
        difference = flat(one, tuple(SHAPES), row) - flat(other, tuple(SHAPES), row)
        assert distances[row].item() == pytest.approx(np.sum(difference**2), rel=1e-12)
        cosines = [
            np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v)
            for u, v in ((flat(one, block, row), flat(other, block, row)) for block in blocks)
        ]
        assert angles[row].item() == pytest.approx(1 - np.mean(cosines), rel=1e-12)


@pytest.mark.parametrize("blocks", [WHOLE, LAYERS])
def test_angle_ignores_lengths_of_blocks(blocks: Blocks) -> None:
    one, other = vectors(3, 0), vectors(3, 1)
    factors = dict(zip(SHAPES, (0.01, 7.0, 300.0), strict=True)) if blocks is LAYERS else dict.fromkeys(SHAPES, 12.0)
    scaled = {name: factors[name] * value for name, value in one.items()}
    torch.testing.assert_close(
        angle(compare(scaled, other, blocks)), angle(compare(one, other, blocks)), rtol=1e-12, atol=0
    )


def test_close_directions_in_double_precision_are_still_told_apart() -> None:
    one, small = vectors(1, 0), vectors(1, 1)
    other = {name: value + 1e-6 * small[name] for name, value in one.items()}
    unit = [flat(vector, tuple(SHAPES), 0) / np.linalg.norm(flat(vector, tuple(SHAPES), 0)) for vector in (one, other)]
    exact = np.sum((unit[0] - unit[1]) ** 2) / 2  # the same number without cancellation
    assert 0 < exact < 1e-10
    assert angle(compare(one, other, WHOLE)).item() == pytest.approx(exact, rel=0.01)


@in_one_test("zero", ["expected", "heard", "both"])
def test_zero_vectors_are_orthogonal_and_have_a_gradient(zero: str) -> None:
    one = {name: value.requires_grad_() for name, value in vectors(2, 0).items()}
    other = vectors(2, 1)
    with torch.no_grad():
        for name in SHAPES:
            if zero != "heard":
                one[name][0] = 0
            if zero != "expected":
                other[name][0] = 0
    result = angle(compare(one, other, LAYERS))
    assert result[0].item() == 1
    gradients = torch.autograd.grad(result.sum(), list(one.values()))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert any(bool(gradient[1].any()) for gradient in gradients)


def test_nan_stays_visible() -> None:
    one = vectors(2, 0)
    one["b"][0, 0] = torch.nan
    result = angle(compare(one, vectors(2, 1), WHOLE))
    assert torch.isnan(result).tolist() == [True, False]


@in_one_test("channels", [1, 2, 3, 5])
@in_one_test("size", [(4, 4), (5, 3), (1, 6), (1, 1)])
@in_one_test("examples", [1, 3])
def test_total_variation_for_any_number_of_channels(channels: int, size: tuple[int, int], examples: int) -> None:
    """Peers assume three channels."""
    images = torch.randn(2, examples, channels, *size, generator=torch.Generator().manual_seed(0)).double()
    for row in range(2):
        picture = images[row].numpy()
        across, down = np.abs(np.diff(picture, axis=-1)), np.abs(np.diff(picture, axis=-2))
        wanted = sum(float(part.mean()) for part in (across, down) if part.size)
        assert total_variation(images)[row].item() == pytest.approx(wanted, rel=1e-12)


@in_one_test("channels", [1, 2, 3, 5])
@in_one_test(("size", "examples"), [((4, 3), 1), ((3, 5), 2), ((1, 4), 1), ((1, 1), 1)])
def test_opponent_variation_pixel_by_pixel(channels: int, size: tuple[int, int], examples: int) -> None:
    images = torch.randn(2, examples, channels, *size, generator=torch.Generator().manual_seed(0)).double()
    height, width = size
    for row in range(2):
        lengths = []
        for picture in images[row].tolist():
            planes = [
                *picture,
                *(np.subtract(picture[i], picture[j]) for i in range(channels) for j in range(i + 1, channels)),
            ]
            for plane in planes:
                for i in range(height):
                    for j in range(width):
                        across = plane[i][j + 1] - plane[i][j] if j + 1 < width else 0.0
                        down = plane[i + 1][j] - plane[i][j] if i + 1 < height else 0.0
                        lengths.append(math.sqrt(across**2 + down**2 + 1e-8))
        assert opponent_variation(images)[row].item() == pytest.approx(sum(lengths) / len(lengths), rel=1e-12)


def test_opponent_variation_has_a_gradient_everywhere() -> None:
    flat = torch.zeros(1, 1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(opponent_variation(flat).sum(), flat)
    assert not bool(gradient.any())
    images = torch.randn(1, 2, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(opponent_variation, images.requires_grad_())
