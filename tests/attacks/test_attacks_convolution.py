"""The ways back from a convolution's output to its images, against torch's own, over shapes, steps and thresholds."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedpriv.attacks.reconstruction.dummy_gradients import convolution
from fedpriv.attacks.reconstruction.dummy_gradients.convolution import Windows, _back_by_phases, _by_phases, _folded
from tests.cases import in_one_test

SHAPES = [
    Windows(kernel, dilation, stride, image, 1)
    for kernel, dilation, stride, image in itertools.product(
        [(1, 1), (3, 3), (5, 2)], [(1, 1), (2, 3)], [(1, 1), (2, 2), (3, 1)], [(12, 12), (13, 16)]
    )
]


@pytest.mark.parametrize("windows", SHAPES, ids=str)
@pytest.mark.parametrize("many", [0, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patches_are_added_up_where_they_lie(
    windows: Windows, many: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "MANY_SUMS", many)
    places = windows.positions[0] * windows.positions[1]
    numbers = 2 * windows.kernel[0] * windows.kernel[1]
    patches = torch.randn(3, numbers, places, generator=torch.Generator().manual_seed(1), dtype=dtype)
    wanted = F.fold(patches.double(), windows.image, windows.kernel, windows.dilation, 0, windows.stride)
    torch.testing.assert_close(_folded(patches, windows).double(), wanted, rtol=0, atol=50 * torch.finfo(dtype).eps)


@in_one_test("kernel", [(2, 2), (3, 3), (4, 3), (5, 5), (7, 5)])
@in_one_test("stride", [2, 3])
def test_a_strided_way_back_by_phases(kernel: tuple[int, int], stride: int) -> None:
    places = (4, 5)
    image: Any = tuple((count + -(-size // stride) - 1) * stride for count, size in zip(places, kernel, strict=True))
    windows = Windows(kernel, (1, 1), (stride, stride), image, 1)
    generator = torch.Generator().manual_seed(2)
    of_output = torch.randn(3, 4, *windows.positions, generator=generator)
    weight = torch.randn(4, 2, *kernel, generator=generator)
    assert _by_phases(of_output, windows)
    through = torch.einsum("oik,rop->rikp", weight.flatten(2).double(), of_output.flatten(2).double()).flatten(1, 2)
    wanted = F.fold(through, image, kernel, 1, 0, stride)
    torch.testing.assert_close(_back_by_phases(of_output, weight, windows).double(), wanted, rtol=0, atol=2e-5)
