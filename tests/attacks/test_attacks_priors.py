"""The prior of public images against dense covariance matrices and against images drawn from a known one."""

import numpy as np
import pytest
import torch
from attack_victims import digits, normalise
from scipy.stats import multivariate_normal
from torch import Tensor

from fedpriv.attacks.reconstruction.priors import GaussianPrior, fit_prior, generic_prior
from tests.cases import in_one_test

SHAPE = (2, 5, 4)
PIXELS = 40


def dense(prior: GaussianPrior) -> np.ndarray:
    """The covariance matrix, (P, P), in float64."""
    basis, variances = prior.basis.double().numpy(), prior.variances.double().numpy()
    return basis @ np.diag(variances - prior.rest) @ basis.T + prior.rest * np.eye(len(basis))


def some_prior() -> GaussianPrior:
    rng = np.random.default_rng(1)
    basis = torch.from_numpy(np.linalg.qr(rng.normal(size=(PIXELS, 6)))[0])
    variances = torch.tensor([9.0, 4.0, 2.0, 1.0, 0.5, 0.3], dtype=torch.float64)
    return GaussianPrior(torch.from_numpy(rng.normal(size=PIXELS)), basis, variances, 0.1, 0.0)


def draws(prior: GaussianPrior, count: int, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    flat = rng.multivariate_normal(prior.mean.numpy(), dense(prior), size=count, method="cholesky")
    return torch.from_numpy(flat).unflatten(1, SHAPE)


def test_energy_is_the_density_of_scipy() -> None:
    prior = some_prior()
    images = draws(prior, 12, 2)
    normal = multivariate_normal(prior.mean.numpy(), dense(prior))
    found = prior.energy(images.unflatten(0, (3, 4)))
    assert found.shape == (3, 4)
    wanted = -2 * (normal.logpdf(images.flatten(1).numpy()) - normal.logpdf(prior.mean.numpy()))
    np.testing.assert_allclose(found.flatten().numpy(), wanted, rtol=1e-9)


def test_energy_can_be_differentiated() -> None:
    prior = some_prior()
    images = draws(prior, 3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(prior.energy(images).sum() / 2, images)
    wanted = np.linalg.solve(dense(prior), (images.detach().flatten(1) - prior.mean).numpy().T).T
    np.testing.assert_allclose(gradient.flatten(1).numpy(), wanted, rtol=1e-9)


def test_shrinking_is_a_matrix_with_the_same_directions() -> None:
    """The best linear estimate of an image from the image plus white noise (Wiener), against the dense formula."""
    prior = some_prior()
    heard = draws(prior, 1, 4)[0].flatten() - prior.mean
    wanted = dense(prior) @ np.linalg.solve(dense(prior) + 0.7 * np.eye(PIXELS), heard.numpy())
    along, outside = prior.variances / (prior.variances + 0.7), torch.tensor(prior.rest / (prior.rest + 0.7))
    np.testing.assert_allclose(prior.shrink(heard, along, outside).numpy(), wanted, rtol=1e-9)


def test_fit_finds_the_distribution_that_images_were_drawn_from() -> None:
    """2,000 images of 40 numbers: variances have a relative standard error of 4 %; 20 % are allowed, seeds fixed."""
    known = some_prior()
    prior = fit_prior(draws(known, 2000, 5))
    assert len(prior.variances) >= 4
    np.testing.assert_allclose(prior.variances[:4].numpy(), known.variances[:4].numpy(), rtol=0.2)
    overlap = (prior.basis[:, :4].mT @ known.basis[:, :4]).abs().diagonal()
    assert float(overlap.min()) > 0.97
    assert float((prior.mean - known.mean).abs().max()) < 0.3
    fresh = draws(known, 500, 6)
    # Chi-squared with 40 degrees of freedom, but for the error of the fit.
    assert float(prior.energy(fresh).mean()) == pytest.approx(PIXELS, rel=0.05)
    assert prior.contrast == pytest.approx(np.sqrt(2 / PIXELS), rel=0.25)


def test_principal_directions_are_those_of_numpy() -> None:
    images = normalise(digits()[0][:600])
    prior = fit_prior(images)
    kept = images[[number for number in range(600) if number % 5 != 4]].flatten(1).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(kept.T))
    rank = len(prior.variances)
    np.testing.assert_allclose(prior.variances.numpy(), values[::-1][:rank], rtol=1e-4)
    overlap = np.abs((vectors[:, ::-1][:, :5] * prior.basis[:, :5].double().numpy()).sum(axis=0))
    np.testing.assert_allclose(overlap, 1, atol=1e-4)
    assert prior.mean.dtype == torch.float32


@in_one_test("count", [25, 60, 1797])
def test_a_fitted_prior_tells_digits_from_noise(count: int) -> None:
    """Fewer images than pixels too; images of the same kind lie nearer than noise of the same mean and power."""
    images = normalise(digits()[0])
    prior = fit_prior(images[:count])
    fresh = images[-200:]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(64, generator=generator)
    shuffled = fresh.flatten(1)[:, order].unflatten(1, (1, 8, 8))
    assert float(prior.energy(shuffled).median()) > 2 * float(prior.energy(fresh).median())
    assert bool((prior.variances > 0).all())
    assert prior.rest > 0
    assert 0.05 < prior.contrast < 2


def test_more_images_than_are_used_and_the_same_result_twice() -> None:
    images = draws(some_prior(), 5000, 7)
    first, again = fit_prior(images), fit_prior(images.flip(0).flip(0))
    assert torch.equal(first.basis, again.basis)
    assert first.rest == again.rest


@pytest.mark.parametrize(("images", "words"), [(torch.zeros(19, 1, 4, 4), "at least 20"), (torch.zeros(40, 16), "40")])
def test_too_few_images(images: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_prior(images)


def test_images_that_are_all_the_same() -> None:
    with pytest.raises(ValueError, match="all the same"):
        fit_prior(torch.full((30, 1, 4, 4), 0.3))


@in_one_test("shape", [(1, 8, 8), (3, 7, 6), (2, 5, 9)])
def test_generic_prior_is_a_markov_process(shape: tuple[int, int, int]) -> None:
    mean, std = (torch.linspace(low, low + 0.1, shape[0])[:, None, None].double() for low in (0.4, 0.2))
    prior = generic_prior(shape, mean, std)
    places = np.stack(np.meshgrid(*(np.arange(size) for size in shape), indexing="ij"), -1).reshape(-1, 3)
    apart = np.abs(places[:, None] - places[None])
    wanted = 0.95 ** (apart[..., 1] + apart[..., 2]) * np.where(apart[..., 0] > 0, 0.9, 1)
    wanted *= (0.25 / float(std.mean())) ** 2
    values, _ = np.linalg.eigh(wanted)
    rank = len(prior.variances)
    np.testing.assert_allclose(prior.variances.numpy(), values[::-1][:rank], rtol=1e-9)
    assert prior.rest == pytest.approx(values[::-1][rank:].mean(), rel=1e-9)
    reduced = dense(prior)
    assert np.abs(reduced - wanted).max() < 0.05 * wanted.max()
    np.testing.assert_allclose(prior.mean.unflatten(0, shape).numpy() * std.numpy() + mean.numpy(), 0.5)


def test_generic_prior_prefers_real_digits_to_shuffled_ones() -> None:
    mean, std = torch.tensor([[[0.3]]]), torch.tensor([[[0.35]]])
    prior = generic_prior((1, 8, 8), mean, std)
    images = normalise(digits()[0][:100])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = images.flatten(1)[:, order].unflatten(1, (1, 8, 8))
    assert float(prior.energy(images).mean()) < 0.8 * float(prior.energy(shuffled).mean())
