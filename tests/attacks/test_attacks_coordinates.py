"""Coordinates of images: their covariance is that of photographs, and nothing is lost."""

import pytest
import torch

from fedpriv.attacks.reconstruction.priors import CHANNELS, NEIGHBOURS
from fedpriv.attacks.reconstruction.variables import coordinates_of
from tests.cases import in_one_test


@in_one_test("shape", [(1, 8, 8), (3, 32, 32), (3, 24, 32)])
def test_one_to_one(shape: tuple[int, int, int]) -> None:
    """The matrix of the map has full rank, so every image can be reached."""
    small = (shape[0], 8, 8) if shape[1] == 8 else (shape[0], 6, 5)
    count = small[0] * small[1] * small[2]
    matrix = coordinates_of(small).images(torch.eye(count, dtype=torch.float64).reshape(count, *small)).flatten(1)
    assert int(torch.linalg.matrix_rank(matrix)) == count


def test_standard_normal_coordinates_make_images_like_photographs() -> None:
    """The covariance of the images, written out, against its definition for every pair of pixels."""
    channels, height, width = 3, 4, 32
    count = channels * height * width
    unit = torch.eye(count, dtype=torch.float64).reshape(count, channels, height, width)
    matrix = coordinates_of((channels, height, width)).images(unit).flatten(1)
    covariance = (matrix.mT @ matrix).reshape(channels, height, width, channels, height, width)
    torch.testing.assert_close(covariance[0, 0, 0, 0, 0, 0], torch.tensor(1.0, dtype=torch.float64))
    for place in (1, 5, 31):  # a line of 32 pixels has the neighbours of the generic prior
        assert float(covariance[0, 0, 0, 0, 0, place]) == pytest.approx(NEIGHBOURS**place)
    # In a line of 4 pixels each is as far apart as 8 of those.
    assert float(covariance[1, 0, 3, 1, 1, 3]) == pytest.approx(NEIGHBOURS**8)
    assert float(covariance[0, 2, 7, 2, 2, 7]) == pytest.approx(CHANNELS)
    assert float(covariance[0, 0, 0, 2, 1, 2]) == pytest.approx(CHANNELS * NEIGHBOURS**10)
