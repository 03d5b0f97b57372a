"""Extraction: numbers that are known by construction come back, and every question is counted."""

import numpy as np
import pytest
import torch

from fedpriv.attacks.endpoint.probes.extraction import (
    EquationSolving,
    Extraction,
    affine_scores,
    is_affine,
    mixed_images,
    solved_scores,
    trained_copy,
)
from fedpriv.attacks.questions import Answers
from fedpriv.attacks.scene import probabilities, rounding_unit, uniform_images
from fedpriv.core.errors import InputError
from tests.attacks.endpoint_scenes import SHAPE, endpoint, hidden, linear, public, referee, scene

CLASSES = 5


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are trained for a part of the steps."""
    monkeypatch.setattr("fedpriv.attacks.endpoint.probes.extraction.LBFGS_STEPS", 60)


@pytest.mark.parametrize("classes", [2, 5])
def test_d_plus_1_exact_answers_give_every_number(classes: int, quick: None) -> None:
    network = linear(classes, seed=1)
    server = endpoint(network, classes, most=17)
    made = EquationSolving().run(scene(network, lambda seed: linear(classes, seed), classes, 17, opened=[server]),
                                 referee(network, classes))  # fmt: skip
    (finding,) = made
    assert server.asked == finding.result.queries == 17
    share, uniform, variation, error = finding.result.figures
    assert (share.measured.value, uniform.measured.value, share.ceiling) == (1.0, 1.0, 1.0)
    assert error.measured.value < 1e-10 and variation.measured.value < 1e-10
    assert [point.queries for point in finding.result.curve] == [4, 8, 17]


def test_the_solution_is_the_weights_themselves_up_to_a_shift() -> None:
    network = linear(CLASSES, seed=2)
    images = uniform_images(17, SHAPE, np.random.default_rng(0))
    shown = network(images).softmax(1).detach().numpy()
    solution = solved_scores(images, shown)
    weights = network[1].weight.detach().numpy()
    np.testing.assert_allclose(solution.weights, weights - weights.mean(0), atol=1e-9)
    bias = network[1].bias.detach().numpy()
    np.testing.assert_allclose(solution.bias, bias - bias.mean(), atol=1e-9)
    found = affine_scores(network, SHAPE)
    np.testing.assert_allclose(found.weights, weights - weights.mean(0), atol=1e-12)
    assert solution.error(found) < 1e-9


def test_rounding_delays_and_does_not_protect(quick: None) -> None:
    network = linear(CLASSES, seed=3, scale=0.5)
    (finding,) = EquationSolving().run(
        scene(network, lambda seed: linear(CLASSES, seed), CLASSES, 200, "rounded:2"), referee(network, CLASSES)
    )
    shares = {point.queries: point.share for point in finding.result.curve}
    assert list(shares) == [4, 8, 17, 34, 170] and finding.result.queries == 170
    assert shares[170] > 0.93 and shares[170] > shares[17]
    assert finding.result.figures[0].ceiling is None  # rounded answers prove nothing


def test_only_what_is_affine_is_solved_for_and_labels_say_too_little() -> None:
    network = hidden(CLASSES, seed=1)
    here = scene(network, lambda seed: hidden(CLASSES, seed), CLASSES, 50)
    assert not is_affine(here)
    assert "is for models whose logits are affine in the image" in str(EquationSolving().refusal(here))
    labels = scene(network, lambda seed: hidden(CLASSES, seed), CLASSES, 50, "label-only")
    assert "names labels only" in str(EquationSolving().refusal(labels))
    network = linear(CLASSES, seed=1)
    few = scene(network, lambda seed: linear(CLASSES, seed), CLASSES, 50, "top:2")
    with pytest.raises(InputError, match="withholds some"):
        EquationSolving().run(few, referee(network, CLASSES))


def test_copies_come_nearer_the_more_they_ask_and_labels_are_enough(quick: None) -> None:
    network = linear(CLASSES, seed=15)
    budget = 250
    servers = [endpoint(network, CLASSES, most=budget) for _ in range(4)]
    found = Extraction(points=3).run(
        scene(network, lambda seed: linear(CLASSES, seed + 100), CLASSES, budget, opened=servers),
        referee(network, CLASSES),
    )
    asked = {finding.result.variant: finding.result.queries for finding in found}
    assert asked == {
        "random images, probabilities": 250,
        "public images, probabilities": 40,
        "mixed public images, probabilities": 250,
        "mixed public images, labels": 250,
    }
    assert [server.asked for server in servers] == list(asked.values())
    by_variant = {finding.result.variant: finding.result for finding in found}
    exact = by_variant["random images, probabilities"]
    assert [point.queries for point in exact.curve] == [10, 50, 250]
    assert exact.figures[0].measured.value > 0.97 > exact.curve[0].share
    assert by_variant["mixed public images, labels"].figures[0].measured.value > 0.75
    guess = exact.figures[0].guess
    assert guess is not None and guess < 0.5


def test_a_copy_is_trained_by_steps_of_adam_where_there_are_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.attacks.endpoint.probes.extraction.MOST_FOR_LBFGS", 10)
    monkeypatch.setattr("fedpriv.attacks.endpoint.probes.extraction.ADAM_STEPS", 300)
    monkeypatch.setattr("fedpriv.attacks.endpoint.probes.extraction.ADAM_RATE", 0.05)
    network = linear(3, seed=6)
    images = uniform_images(200, SHAPE, np.random.default_rng(1))
    copy = trained_copy(scene(network, lambda seed: linear(3, seed), 3, 1), images,
                        network(images).softmax(1).detach().numpy())  # fmt: skip
    assert (copy(images).argmax(1) == network(images).argmax(1)).double().mean() > 0.97


def test_mixtures_lie_between_public_images() -> None:
    held = public(2, 7, 3)
    mixed = mixed_images(held, 50, np.random.default_rng(2))
    low, high = held.images.min(0).values, held.images.max(0).values
    assert mixed.shape == (50, *SHAPE)
    assert bool(((mixed >= low - 1e-12) & (mixed <= high + 1e-12)).all())


def test_what_a_policy_withholds_is_filled_evenly() -> None:
    shown = np.array([[0.6, np.nan, np.nan], [0.0, 0.0, 0.0], [0.5, 0.5, 0.1]])
    filled = probabilities(Answers(shown.argmax(1), shown), 3)
    np.testing.assert_allclose(filled, [[0.6, 0.2, 0.2], [1 / 3] * 3, [5 / 11, 5 / 11, 1 / 11]])
    np.testing.assert_array_equal(probabilities(Answers(np.array([2, 0])), 3), np.eye(3)[[2, 0]])


@pytest.mark.parametrize(("decimals", "unit"), [(2, 0.01), (5, 1e-5)])
def test_the_unit_of_rounding_is_found(decimals: int, unit: float) -> None:
    shown = np.random.default_rng(0).dirichlet(np.ones(4), 50)
    assert rounding_unit(shown.round(decimals)) == pytest.approx(unit)
    assert rounding_unit(shown) == 0.0


def test_copies_use_torch_without_its_global_generator() -> None:
    network = linear(3, seed=6)
    images = uniform_images(20, SHAPE, np.random.default_rng(1))
    here = scene(network, lambda seed: linear(3, seed), 3, 1)
    before = torch.get_rng_state()
    one, two = (trained_copy(here, images, network(images).softmax(1).detach().numpy())(images) for _ in range(2))
    assert torch.equal(one, two) and torch.equal(before, torch.get_rng_state())
