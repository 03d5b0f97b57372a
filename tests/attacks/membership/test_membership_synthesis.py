"""Data for shadows in three ways: planted distributions, flips and targets come back; every question is counted."""

import numpy as np
import pytest
import torch

from fedpriv.attacks.membership.probes import answers
from fedpriv.attacks.membership.probes.answers import by_model, by_statistics, is_binary, noisy_real
from tests.attacks.endpoint_scenes import SHAPE, endpoint, linear

CLASSES = 3


def test_features_have_their_own_distributions_and_are_independent() -> None:
    """20,000 records, 16 planted shares: each within five standard deviations (false alarm 1e-5)."""
    rng = np.random.default_rng(3)
    shares = rng.random(16)
    # Real features depend on one another: one number decides all of a record.
    real = (rng.random((4000, 1)) < shares).astype(float)
    server = endpoint(linear(CLASSES, seed=1), CLASSES)
    made = by_statistics(torch.from_numpy(real).view(-1, *SHAPE), server, 20_000, np.random.default_rng(4))
    found = made.images.flatten(1).numpy()
    met = real.mean(axis=0)
    assert np.abs(found.mean(axis=0) - met).max() < 5 * np.sqrt(0.25 / 20_000)
    varying = (met > 0.1) & (met < 0.9)
    assert np.abs(np.corrcoef(found[:, varying].T) - np.eye(varying.sum())).max() < 6 / np.sqrt(20_000)
    assert np.abs(np.corrcoef(real[:, varying].T) - np.eye(varying.sum())).max() > 0.3
    assert server.asked == 20_000
    np.testing.assert_array_equal(made.labels.numpy(), linear(CLASSES, seed=1)(made.images).argmax(1).numpy())


def test_binary_features_are_flipped_and_others_get_noise() -> None:
    """64,000 features: the share of flips within five standard deviations (false alarm 1e-6)."""
    rng = np.random.default_rng(5)
    binary = torch.from_numpy(rng.integers(2, size=(4000, *SHAPE)).astype(float))
    labels = torch.from_numpy(rng.integers(CLASSES, size=4000))
    made = noisy_real(binary, labels, 0.1, np.random.default_rng(6))
    assert is_binary(made.images) and torch.equal(made.labels, labels)
    flips = float((made.images != binary).double().mean())
    assert abs(flips - 0.1) < 5 * np.sqrt(0.09 / 64_000)
    grey = torch.full((4000, *SHAPE), 0.5, dtype=torch.float64)
    noisy = noisy_real(grey, labels, 0.1, np.random.default_rng(6)).images
    assert float(noisy.std()) == pytest.approx(0.1, rel=0.02) and not is_binary(noisy)


@pytest.mark.parametrize("binary", [True, False])
def test_searched_records_are_what_the_model_is_sure_of(binary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SURE", 0.8)
    network = linear(CLASSES, seed=2)
    server = endpoint(network, CLASSES, most=3000)
    made = by_model(server, SHAPE, 45, 3000, binary, np.random.default_rng(1))
    shares = network(made.images).softmax(1).detach()
    own = shares.gather(1, made.labels[:, None])[:, 0]
    assert len(own) > 30 and float(own.min()) > 0.8
    assert bool((shares.argmax(1) == made.labels).all()) and set(made.labels.tolist()) == set(range(CLASSES))
    assert is_binary(made.images) == binary and 45 <= server.asked <= 3000
    assert bool(((made.images >= 0) & (made.images <= 1)).all())


def test_a_search_never_asks_beyond_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SURE", 0.999999)
    server = endpoint(linear(CLASSES, seed=2), CLASSES, most=100)
    made = by_model(server, SHAPE, 40, 100, True, np.random.default_rng(1))
    assert server.asked == 80 and len(made.labels) == 0
