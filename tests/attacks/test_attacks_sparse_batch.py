"""Whole batches from the gradient of a first Linear layer with ReLU, against the images themselves."""

import numpy as np
import pytest
import torch
from attack_victims import digits, mlp, normalise, observe
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.sparse_batch import SparseBatch, separate

FIRST = ("hidden1.weight", "hidden1.bias")


def gradients(rows: list[int], activation: str = "relu", noise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    images, labels = digits()
    upload = observe(mlp(activation, (400, 32)), images[rows], labels[rows]).upload
    generator = torch.Generator().manual_seed(8)
    weight, bias = (
        upload[name] + noise * upload[name].std() * torch.randn(upload[name].shape, generator=generator)
        for name in FIRST
    )
    return weight, bias, normalise(images[rows]).flatten(1)


def run(weight: Tensor, bias: Tensor, examples: int) -> SparseBatch | None:
    return separate(weight, bias, examples, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("examples", [2, 3, 4, 8])
def test_exact_without_noise(examples: int) -> None:
    weight, bias, images = gradients(list(range(10, 10 + examples)))
    found = run(weight, bias, examples)
    assert found is not None
    apart = torch.cdist(images.double(), found.images.double()).square() / images.shape[1]
    rows, columns = linear_sum_assignment(apart.numpy())
    assert float(apart[rows, columns].max()) < 1e-7
    torch.testing.assert_close(found.errors @ found.images, weight, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.errors.sum(dim=1), bias, atol=1e-6, rtol=1e-4)


def test_errors_are_zero_where_the_relu_is_shut() -> None:
    """An oracle of its own: the network's first layer says where each image is stopped."""
    weight, bias, images = gradients([1, 5, 9])
    found = run(weight, bias, 3)
    assert found is not None
    layer = mlp("relu", (400, 32)).hidden1
    for image, errors in zip(found.images, found.errors.T, strict=True):
        stopped = (layer.weight @ image + layer.bias).detach() <= 0
        size = float(errors.abs().max())
        assert float(errors[stopped].abs().max()) < 1e-5 * size
        assert float((errors[~stopped].abs() > 1e-5 * size).float().mean()) > 0.95
    assert images.shape == found.images.shape


@pytest.mark.parametrize(
    ("rows", "activation", "noise", "claimed"),
    [
        pytest.param([1, 2, 3], "sigmoid", 0.0, 3, id="no zeros"),
        pytest.param([1, 2, 3], "relu", 0.3, 3, id="noise"),
        pytest.param([1, 2, 3], "relu", 0.0, 4, id="fewer examples than claimed"),
        pytest.param([7, 7], "relu", 0.0, 2, id="the same example twice"),
    ],
)
def test_says_so_where_it_cannot_be_done(rows: list[int], activation: str, noise: float, claimed: int) -> None:
    weight, bias, _ = gradients(rows, activation, noise)
    assert run(weight, bias, claimed) is None


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_degenerate_uploads(value: float) -> None:
    assert run(torch.full((50, 64), value), torch.full((50,), value), 2) is None
    assert run(torch.ones(3, 64), torch.ones(3), 4) is None


def test_the_same_twice() -> None:
    weight, bias, _ = gradients([4, 6])
    one, other = run(weight, bias, 2), run(weight, bias, 2)
    assert one is not None
    assert other is not None
    assert torch.equal(one.images, other.images)
