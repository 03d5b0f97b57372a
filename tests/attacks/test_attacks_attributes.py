"""Attribute inference: a planted dependence is read out of a model, and a prior is all that a blind one gives."""

import numpy as np
import pytest
import torch

from fedpriv.attacks.endpoint.probes.attribute_inference import Attribute, attributes, guessed_values, truth_of
from fedpriv.attacks.scene import Public
from tests.attacks.endpoint_scenes import SHAPE, endpoint, linear

PIXEL = 5


def test_the_likelier_value_is_prior_times_answer_by_hand() -> None:
    network = linear(3, seed=4, scale=3.0)
    rng = np.random.default_rng(2)
    images, labels = torch.from_numpy(rng.random((60, *SHAPE))), rng.integers(3, size=60)
    hidden = Attribute(PIXEL, 0.5, (0.2, 0.9), 0.45)
    server = endpoint(network, 3, most=120)
    found = guessed_values(server, hidden, images, labels)
    assert server.asked == 120
    expected = []
    for image, label in zip(images, labels, strict=True):
        weights = []
        for value, prior in ((0.2, 0.55), (0.9, 0.45)):
            changed = image.clone().flatten()
            changed[PIXEL] = value
            weights.append(prior * float(network(changed.view(1, *SHAPE)).softmax(1)[0, label].detach()))
        expected.append(weights[1] > weights[0])
    assert found.tolist() == expected and 0 < sum(expected) < 60


def test_the_hidden_value_itself_is_never_looked_at() -> None:
    network = linear(3, seed=4)
    images = torch.from_numpy(np.random.default_rng(2).random((20, *SHAPE)))
    labels = np.zeros(20, dtype=np.int64)
    other = images.clone()
    other.view(20, -1)[:, PIXEL] = 1 - other.view(20, -1)[:, PIXEL]
    hidden = Attribute(PIXEL, 0.5, (0.0, 1.0), 0.5)
    one, two = (guessed_values(endpoint(network, 3), hidden, some, labels) for some in (images, other))
    assert one.tolist() == two.tolist()


def test_a_label_that_is_the_hidden_value_gives_it_away() -> None:
    network = linear(2, seed=1, scale=0.0)
    with torch.no_grad():
        network[1].weight[1, PIXEL] = 12.0
        network[1].bias[1] = -6.0
    images = torch.from_numpy(np.random.default_rng(3).integers(2, size=(100, *SHAPE)).astype(float))
    truth = images.flatten(1)[:, PIXEL].numpy() > 0.5
    hidden = Attribute(PIXEL, 0.5, (0.0, 1.0), 0.5)
    assert guessed_values(endpoint(network, 2), hidden, images, truth.astype(np.int64)).tolist() == truth.tolist()
    blind = linear(2, seed=1, scale=0.0)
    assert not guessed_values(endpoint(blind, 2), Attribute(PIXEL, 0.5, (0.0, 1.0), 0.4), images, truth * 1).any()


def test_features_are_split_at_the_median_and_constant_ones_left_out() -> None:
    images = torch.zeros((8, *SHAPE), dtype=torch.float64)
    images.view(8, -1)[:, 3] = torch.tensor([0.0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1], dtype=torch.float64)
    images.view(8, -1)[:, 7] = torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])
    found = attributes(Public(images, torch.zeros(8, dtype=torch.int64)), 5)
    assert [one.pixel for one in found] == [7, 3]
    assert (found[0].values, found[0].prior) == ((0.0, 1.0), 0.75)  # half of all are the largest value
    assert found[1].prior == 0.5 and found[1].values == pytest.approx((0.05, 0.7))
    assert truth_of(found[1], images).tolist() == [False] * 4 + [True] * 4
