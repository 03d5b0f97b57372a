"""Inner products of releases drawn in the span of their means, against releases that are drawn whole."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.machinery.vmf_sampling import directional_products, normal_products
from tests.cases import in_one_test
from tests.noise import stream

DRAWS = 700
RECORDS, TENSORS = 4, {"a": 7, "b": 5}


def gradients(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(RECORDS, size, generator=generator, dtype=torch.float64) for name, size in TENSORS.items()
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "gaussian", "sigma": 0.7, "clip_norm": 1.0},
        {"name": "gaussian", "sigma": 0.7, "clip_norm": 1.0, "clipping": "layer"},
        {"name": "vmf", "kappa": 0.0},
        {"name": "vmf", "kappa": 6.0},
        {"name": "vmf", "kappa": 6.0, "blocks": "layer"},
    ],
    ids=str,
)
def test_they_are_distributed_as_those_of_whole_releases(settings: dict[str, Any]) -> None:
    """Kolmogorov and Smirnov's two-sample test for each record: 20 tests at 1e-4 give 0.2 % of false alarms."""
    mechanism = mechanism_settings(settings).mechanism()
    rows = gradients(1)
    expected = [mechanism.expected({name: value[k] for name, value in rows.items()}) for k in range(RECORDS)]
    blocks = mechanism.directions(tuple(TENSORS))
    flat = [torch.stack([torch.cat([each[name] for name in block]) for each in expected]) for block in blocks]
    grams = np.stack([(part @ part.mT).numpy() for part in flat])
    sizes = [sum(TENSORS[name] for name in block) for block in blocks]
    variances = mechanism.noise(list(TENSORS.values()), 1, 1.0).variances
    products = mechanism.draw_products(grams, sizes, variances, np.zeros(DRAWS, np.int64), np.random.default_rng(2))
    noise = stream(3)
    first = DenseGradients({name: value[:1] for name, value in rows.items()})
    released = [mechanism.release(first, 1, noise) for _ in range(DRAWS)]
    assert products is not None
    for number, block in enumerate(blocks):
        heard = torch.stack([torch.cat([each[name] for name in block]) for each in released])
        whole = (heard @ flat[number].mT).numpy()
        for record in range(RECORDS):
            drawn = products[number, :, record]
            if settings.get("kappa") == 0:
                assert np.all(drawn == 0)
                assert np.all(whole == 0)
            else:
                assert stats.ks_2samp(drawn, whole[:, record]).pvalue > 1e-4


def test_blocks_of_a_size_are_left_to_whole_draws() -> None:
    mechanism = mechanism_settings({"name": "vmf", "kappa": 6.0, "blocks": "size:3"}).mechanism()
    assert (
        mechanism.draw_products(np.eye(2)[None], [12], [1.0], np.zeros(3, np.int64), np.random.default_rng(0)) is None
    )


@in_one_test("dimension", [2, 3, 50, 10**6])
def test_the_part_across_has_the_length_that_is_left(dimension: int) -> None:
    """With an orthonormal pair the products are two coordinates of a unit vector: cos and the part of sin."""
    drawn = directional_products(np.eye(2), 5.0, dimension, 1.0, np.zeros(DRAWS, np.int64), np.random.default_rng(1))
    squares = (drawn**2).sum(axis=1)
    assert np.all(squares <= 1 + 1e-12)
    if dimension == 2:
        assert np.allclose(squares, 1)
    # In K dimensions the second coordinate has a (K - 1)-th of what the cosine leaves; five standard errors.
    share = drawn[:, 1] ** 2 / (1 - drawn[:, 0] ** 2)
    assert abs(share.mean() - 1 / (dimension - 1)) < 5 * share.std() / np.sqrt(DRAWS) + 1e-12


def test_records_that_depend_on_each_other_are_no_obstacle() -> None:
    """Three vectors in a plane: all products follow from two coordinates."""
    vectors = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    sources = np.arange(300) % 3
    drawn = normal_products(vectors @ vectors.T, 0.25, sources, np.random.default_rng(1))
    assert np.allclose(drawn[:, 2], drawn[:, 0] + drawn[:, 1])
