"""One image from the gradient of a first Linear layer: exact without noise, and what noise leaves of it."""

import numpy as np
import pytest
import torch
from attack_victims import digits, mlp, normalise, observe
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.closed_form import quotient, rank_one
from fedpriv.attacks.reconstruction.priors import GaussianPrior, fit_prior
from tests.cases import in_one_test

FIRST = ("hidden1.weight", "hidden1.bias")


@pytest.fixture(scope="module")
def prior() -> GaussianPrior:
    return fit_prior(normalise(digits()[0][800:]))


def product(seed: int, noise: float, image: Tensor, outputs: int = 96, bias_noise: float = 1.0) -> tuple[Tensor, ...]:
    """Weight and bias gradients of an image with random errors of length 1, with noise; and the errors."""
    rng = np.random.default_rng(seed)
    errors = torch.from_numpy(rng.normal(size=outputs)).float()
    errors /= errors.norm()
    weight = torch.outer(errors, image) + noise * torch.from_numpy(rng.normal(size=(outputs, len(image)))).float()
    return weight, errors + noise * bias_noise * torch.from_numpy(rng.normal(size=outputs)).float(), errors


def mse(found: Tensor, image: Tensor) -> float:
    return float((found - image).square().mean())


@in_one_test("activation", ["relu", "sigmoid"])
@in_one_test("dtype", [torch.float32, torch.float64])
def test_exact_on_clean_gradients(activation: str, dtype: torch.dtype, prior: GaussianPrior) -> None:
    images, labels = digits()
    model = mlp(activation, (64, 32)).to(dtype)
    for number in range(10):
        upload = observe(model, images[[number]], labels[[number]]).upload
        found = rank_one(upload[FIRST[0]], upload[FIRST[1]], prior.to(upload[FIRST[0]]))
        assert mse(found.image, normalise(images[number]).flatten().to(dtype)) < (
            1e-12 if dtype == torch.float32 else 1e-28
        )


def test_a_single_row_is_enough(prior: GaussianPrior) -> None:
    """Errors of zero in all rows but one, as where a ReLU is shut: no division by these zeros."""
    image = normalise(digits()[0][3]).flatten()
    errors = torch.zeros(20)
    errors[7] = -0.3
    found = rank_one(torch.outer(errors, image), errors, prior)
    assert mse(found.image, image) < 1e-12


@pytest.mark.parametrize("noise", [1e-4, 1e-2])
def test_noise_is_measured_and_averaged_out(noise: float, prior: GaussianPrior) -> None:
    """Against the best that is possible with errors that are known: their projection has noise of this size."""
    found_errors = []
    for number in range(12):
        image = normalise(digits()[0][number]).flatten()
        weight, bias, _ = product(number, noise, image)
        found = rank_one(weight, bias, prior)
        assert found.deviation == pytest.approx(noise, rel=0.1)
        found_errors.append(mse(found.image, image))
    # The length of the errors is known to `noise`, relative, which adds at most its share of the image.
    assert np.median(found_errors) < 3 * noise**2


def test_far_better_than_the_quotient_where_errors_are_as_small_as_the_noise(prior: GaussianPrior) -> None:
    found_errors, quotients = [], []
    for number in range(12):
        image = normalise(digits()[0][number]).flatten()
        weight, bias, _ = product(number, 0.1, image)
        found_errors.append(mse(rank_one(weight, bias, prior).image, image))
        quotients.append(mse(quotient(weight, bias).image, image))
    assert np.median(found_errors) < 0.1 * np.median(quotients)


def test_never_far_from_the_prior_when_noise_covers_all(prior: GaussianPrior) -> None:
    guesses, attacks = [], []
    for number in range(8):
        image = normalise(digits()[0][number]).flatten()
        weight, bias, _ = product(number, 5.0, image)
        attacks.append(mse(rank_one(weight, bias, prior).image, image))
        guesses.append(mse(prior.mean, image))
    assert np.median(attacks) < 1.1 * np.median(guesses)


@pytest.mark.parametrize(("ratio", "gain"), [(0.1, 0.97), (10.0, 0.9)])
def test_bias_with_other_noise_than_the_matrix(ratio: float, gain: float, prior: GaussianPrior) -> None:
    """Told how noisy the bias is, the attack does better than if it took both for equal."""
    told, equal = [], []
    for number in range(12):
        image = normalise(digits()[0][number]).flatten()
        weight, bias, _ = product(number, 0.1, image, bias_noise=ratio)
        told.append(mse(rank_one(weight, bias, prior, ratio).image, image))
        equal.append(mse(rank_one(weight, bias, prior).image, image))
    assert np.median(told) < gain * np.median(equal)


def test_without_bias_the_direction_is_found(prior: GaussianPrior) -> None:
    cosines = []
    for number in range(10):
        image = normalise(digits()[0][number]).flatten()
        weight, _, errors = product(number, 1e-3, image)
        found = rank_one(weight, None, prior)
        cosines.append(abs(float(torch.cosine_similarity(found.image, image, dim=0))))
        assert abs(float(torch.cosine_similarity(found.errors, errors, dim=0))) > 0.999
    assert min(cosines) > 0.999


def test_zero_and_constant_uploads_give_finite_images(prior: GaussianPrior) -> None:
    for weight, bias in ((torch.zeros(9, 64), torch.zeros(9)), (torch.zeros(9, 64), torch.ones(9))):
        for given in (bias, None):
            assert bool(torch.isfinite(rank_one(weight, given, prior).image).all())
