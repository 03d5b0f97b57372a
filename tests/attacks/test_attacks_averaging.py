"""The normal distribution closest to a posterior: exact where the posterior is normal, and not where its mode is."""

import pytest
import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.posterior import fit_cloud

PIXELS = 16


def basis(columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(PIXELS, columns, generator=generator)).Q


@pytest.mark.slow
def test_of_a_normal_posterior_it_has_mean_and_deviations() -> None:
    """One number is heard along each principal direction, with noise of another size: textbook formulas."""
    directions = basis(4)
    precisions, heard = torch.tensor([0.0, 1.0, 3.0, 8.0]), torch.tensor([5.0, -1.0, 2.0, 0.5])

    def posterior(coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
        flat = coordinates.flatten(1)
        misfit = (precisions * (flat @ directions - heard).square()).sum(dim=1) / 2
        return shares * misfit + flat.square().sum(dim=1) / 2

    start = torch.zeros(2, 1, 1, 4, 4)
    cloud = fit_cloud(posterior, start, (torch.zeros(2, 1, 3), torch.ones(2)), directions, 600, 0.05)
    wanted = (precisions * heard / (1 + precisions)) @ directions.T
    torch.testing.assert_close(cloud.middle.flatten(1), wanted.expand(2, -1), atol=0.05, rtol=0)
    deviations = (1 + precisions).rsqrt()
    torch.testing.assert_close(cloud.along[0, 0], deviations, atol=0.05, rtol=0)
    torch.testing.assert_close(cloud.rest[0, 0], torch.ones(1), atol=0.05, rtol=0)
    torch.testing.assert_close(cloud.least, deviations.min().expand(2), atol=0.05, rtol=0)


@pytest.mark.slow
def test_a_narrow_peak_far_from_the_mass_is_left() -> None:
    """A peak 0.05 wide at 2 deviations is higher than all the rest, and has an eighth of its probability."""

    def posterior(coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
        flat = coordinates.flatten(1)
        peak = 3 * torch.exp(-(flat[:, 0] - 2).square() / (2 * 0.05**2))
        return flat.square().sum(dim=1) / 2 - shares * peak

    start = torch.zeros(1, 1, 1, 4, 4)
    start[..., 0, 0] = 2
    cloud = fit_cloud(posterior, start, (torch.zeros(1, 1, 3), torch.ones(1)), basis(4), 1000, 0.05)
    assert float(cloud.middle.abs().max()) < 0.3


def test_what_else_the_posterior_depends_on_is_fitted_as_far_as_it_has_a_rate() -> None:
    """One tensor has its most probable value at 3; another stays, though the posterior changes with it."""

    def posterior(coordinates: Tensor, moved: Tensor, fixed: Tensor) -> Tensor:
        return coordinates.flatten(1).square().sum(dim=1) / 2 + (moved - 3).square() - fixed

    start = torch.zeros(2, 1, 1, 4, 4)
    cloud = fit_cloud(posterior, start, (torch.zeros(2), torch.ones(2)), basis(4), 300, 0.05, (0.1,))
    moved, fixed = cloud.others
    torch.testing.assert_close(moved, torch.full((2,), 3.0), atol=1e-2, rtol=0)
    assert torch.equal(fixed, torch.ones(2))
