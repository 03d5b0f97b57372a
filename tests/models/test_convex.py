"""The convex head: its minimum against scikit-learn, its gradient, and its sensitivity against real retraining."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.models.machinery.convex import Objective, _descended, minimised
from fedpriv.service.answer_sources import pooled_features
from fedpriv.service.proof import head_sensitivity
from tests.cases import in_one_test

Array = NDArray[np.float64]


def problem(examples: int, features: int, classes: int, regularisation: float, seed: int) -> Objective:
    stream = np.random.default_rng(seed)
    rows = pooled_features(stream.random((examples, 1, 1, features)) ** 3, None, 1.0)
    return Objective(rows, stream.integers(classes, size=examples), classes, regularisation)


@in_one_test("classes", [2, 5])
@in_one_test("regularisation", [0.1, 0.002])
def test_minimum_is_scikit_learns(classes: int, regularisation: float) -> None:
    objective = problem(80, 6, classes, regularisation, 1)
    found = minimised(objective, 1.0, 1e-11)
    assert found.gradient_norm <= 0.5e-11
    solver = "newton-cg" if classes > 2 else "lbfgs"
    theirs = LogisticRegression(
        C=1 / (regularisation * 80), fit_intercept=False, tol=1e-12, max_iter=100_000, solver=solver
    )
    coefficients = theirs.fit(objective.features, objective.labels).coef_
    if classes == 2:
        # Of two classes scikit-learn has one row, with half the regularisation of two opposite ones.
        half = Objective(objective.features, objective.labels, 2, regularisation)
        theirs.set_params(C=2 / (regularisation * 80))
        coefficients = theirs.fit(half.features, half.labels).coef_ / 2
        coefficients = np.concatenate([-coefficients, coefficients])
    np.testing.assert_allclose(found.weights, coefficients, atol=1e-6)


def test_gradient_and_curvature_against_finite_differences() -> None:
    objective = problem(30, 4, 3, 0.05, 2)
    stream = np.random.default_rng(3)
    weights, direction = stream.normal(size=(2, 3, 4))
    numeric = optimize.approx_fprime(weights.ravel(), lambda flat: objective.value(flat.reshape(3, 4)), 1e-7)
    np.testing.assert_allclose(objective.gradient(weights).ravel(), numeric, atol=1e-6)
    step = 1e-6
    curved = (
        (objective.gradient(weights + step * direction) - objective.gradient(weights - step * direction)) / step / 2
    )
    np.testing.assert_allclose(objective.curvature(weights, direction), curved, atol=1e-7)


def neighbours(objective: Objective, stream: np.random.Generator) -> Iterator[Objective]:
    """One example is mislabelled, turned round, doubled from another, or drawn afresh."""
    labels, features = objective.labels, objective.features
    at = int(stream.integers(len(labels)))
    changes = [
        (features[at], (labels[at] + 1) % objective.classes),
        (-features[at], labels[at]),
        (features[at - 1], labels[at - 1]),
        (-features[at], (labels[at] + 1) % objective.classes),
        (np.eye(features.shape[1])[0], stream.integers(objective.classes)),
    ]
    for row, label in changes:
        other, named = features.copy(), labels.copy()
        other[at], named[at] = row, label
        yield Objective(other, named, objective.classes, objective.regularisation)


@in_one_test("size", [(2, 1, 2), (3, 2, 2), (12, 3, 4), (60, 5, 10)])
@in_one_test("regularisation", [1.0, 0.01])
def test_no_replacement_moves_the_model_further_than_is_proven(
    size: tuple[int, int, int], regularisation: float
) -> None:
    largest = 0.0
    for seed in range(3):
        objective = problem(*size, regularisation, seed)
        bound = head_sensitivity(1.0, regularisation, size[0], 1e-6)
        weights = minimised(objective, 1.0, 1e-6).weights
        for other in neighbours(objective, np.random.default_rng(seed)):
            moved = minimised(other, 1.0, 1e-6).weights - weights
            largest = max(largest, float(np.linalg.norm(moved)) / bound)
            points = np.concatenate([objective.features, other.features])
            shift = softmax(points @ (weights + moved).T, axis=1) - softmax(points @ weights.T, axis=1)
            assert np.abs(shift).max() <= np.tanh(np.sqrt(2) * bound / 4)  # docs/service.md
            assert np.linalg.norm(points @ moved.T, axis=1).max() <= bound
    # The bound holds, and is no multiple of what can happen.
    assert (0.1 if regularisation == 1 else 0.01) < largest <= 1


def test_an_opposite_example_of_two_comes_near_the_bound() -> None:
    """With strong regularisation the softmax stays at 1/C, and the change is (1/n)(e_y - p)(phi - phi')/lambda."""
    features = np.array([[1.0, 0.0], [0.0, 1.0]])
    ours = minimised(Objective(features, np.array([0, 1]), 2, 100.0), 1.0, 1e-9)
    other = minimised(Objective(np.array([[1.0, 0.0], [0.0, -1.0]]), np.array([0, 1]), 2, 100.0), 1.0, 1e-9)
    ratio = np.linalg.norm(ours.weights - other.weights) / head_sensitivity(1.0, 100.0, 2, 1e-9)
    assert ratio == pytest.approx(0.5, abs=0.01)  # |e_y - 1/2| is sqrt(2) / 2 of the sqrt(2) that is allowed for


def test_features_are_averaged_and_of_one_length() -> None:
    images = np.arange(32.0).reshape(2, 1, 4, 4)
    features = pooled_features(images, 2, 3.0)
    expected = np.array([[2.5, 4.5, 10.5, 12.5], [18.5, 20.5, 26.5, 28.5]])
    np.testing.assert_allclose(features, 3 * expected / np.linalg.norm(expected, axis=1, keepdims=True))
    assert not pooled_features(np.zeros((1, 1, 4, 4)), None, 1.0).any()
    with pytest.raises(InputError, match="'pooled:3': images of 4 x 4 are no multiple"):
        pooled_features(images, 3, 1.0)


def test_what_cannot_be_certified_is_refused() -> None:
    objective = problem(10, 3, 2, 0.1, 0)
    with pytest.raises(InputError, match=r"features of length 1: at most 0.5 is proven"):
        minimised(objective, 0.5, 1e-6)
    with pytest.raises(RunFailedError, match="float64 ends there; choose a larger tolerance"):
        minimised(objective, 1.0, 1e-19)


@in_one_test("regularisation", [1.0, 1e-2, 1e-3])
def test_descent_alone_ends_within_its_steps(regularisation: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From zero, without L-BFGS and Newton; where fewer steps are allowed it says so, and returns no weights."""
    objective = problem(20, 3, 3, regularisation, 4)
    origin = np.zeros((3, 3))
    assert _descended(objective, origin, 1.0, 1e-6).gradient_norm <= 0.5e-6
    with monkeypatch.context() as fewer:
        fewer.setattr("fedpriv.models.machinery.convex.MOST_STEPS", 3)
        with pytest.raises(RunFailedError, match="after 3 steps; choose a larger tolerance or regularisation"):
            _descended(objective, origin, 1.0, 1e-6)
