"""Guesses without an upload."""

import numpy as np
import pytest
import torch
from attack_victims import digits

from fedpriv.attacks.baselines import best_guess_mse, guesses
from tests.cases import in_one_test


def test_mean_and_grey() -> None:
    images = digits()[0][:500]
    mean, grey = guesses(images)
    assert (mean.name, grey.name) == ("guess-mean", "guess-grey")
    np.testing.assert_allclose(mean.image.numpy(), images.numpy().astype(np.float64).mean(axis=0), rtol=1e-6)
    assert torch.equal(grey.image, torch.full((1, 8, 8), 0.5))


def test_mean_is_the_best_constant_for_such_images() -> None:
    images = digits()[0]
    mean, grey = guesses(images)
    reached = (images - mean.image).square().mean()
    for other in (grey.image, images[3], 0.9 * mean.image, mean.image + 0.02):
        assert float(reached) < float((images - other).square().mean())


def test_best_guess_of_each_image() -> None:
    images = digits()[0][:50]
    both = guesses(images)
    originals = torch.cat([images[:3], torch.full((1, 1, 8, 8), 0.5)])
    wanted = [
        min(float(np.mean((original.numpy() - guess.image.numpy()) ** 2)) for guess in both) for original in originals
    ]
    np.testing.assert_allclose(
        best_guess_mse(both, originals, torch.zeros(4, dtype=torch.long)).numpy(), wanted, rtol=1e-6, atol=1e-12
    )


def test_mean_of_each_class() -> None:
    images, labels = (part[:300] for part in digits())
    found = guesses(images, labels, classes=11)
    assert [guess.name for guess in found] == ["guess-mean", "guess-grey", "guess-class"]
    offered = found[2].offer(torch.arange(11)).numpy()
    for label in range(10):
        of_class = images.numpy().astype(np.float64)[labels.numpy() == label]
        np.testing.assert_allclose(offered[label], of_class.mean(axis=0), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(offered[10], found[0].image.numpy())  # no public image is of this class
    assert torch.equal(found[1].offer(labels[:5]), torch.full((5, 1, 8, 8), 0.5))


def test_the_mean_of_the_class_beats_the_mean_of_all() -> None:
    images, labels = digits()
    mean, _, of_class = guesses(images[:900], labels[:900], classes=10)
    errors = [best_guess_mse([guess], images[900:], labels[900:]).median() for guess in (of_class, mean)]
    assert float(errors[0]) < float(errors[1])
    both = best_guess_mse([mean, of_class], images[900:], labels[900:])
    assert torch.equal(
        both, torch.minimum(*(best_guess_mse([g], images[900:], labels[900:]) for g in (mean, of_class)))
    )


@in_one_test("labels", [torch.zeros(3, dtype=torch.long), torch.tensor([0, 5]), torch.tensor([-1, 0])])
def test_wrong_labels(labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="public labels"):
        guesses(torch.zeros(2, 1, 8, 8), labels, classes=5)


@in_one_test("images", [torch.zeros(0, 1, 8, 8), torch.zeros(1, 8, 8), torch.full((2, 1, 8, 8), 17.0)])
def test_wrong_images(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="public images"):
        guesses(images)
