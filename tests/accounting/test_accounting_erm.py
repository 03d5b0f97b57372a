"""Private ERM: printed figures, the solver against scikit-learn, and sensitivity by replacing every example."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import integrate, optimize, stats
from sklearn.linear_model import LogisticRegression

from fedpriv.accounting.convex_models import (
    Problem,
    descent_steps,
    least_tolerance,
    most_steps,
    objective_terms,
    output_scale,
)
from fedpriv.accounting.gaussian import gaussian_delta
from fedpriv.accounting.guarantees import guarantee
from fedpriv.accounting.release import Release
from fedpriv.algorithms.erm.training import _minimum, bounded_features, trained_parameters, usual_length
from fedpriv.core.errors import InputError
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.model_noise import spread_noise
from fedpriv.models.machinery.convex import Objective
from tests.cases import in_one_test

Array = NDArray[np.float64]


def released(mechanism: str, epsilon: float, times: int = 1, law: str | None = None) -> Release:
    return Release(mechanism, "example", "full", 1.0, times, (3,), epsilon, 1e-5, law=law)


def problem_of(features: Array, labels: NDArray[np.int64], classes: int, regularisation: float) -> Problem:
    return Problem(len(labels), features.shape[1], classes, regularisation, 1e-9)


def minimum(features: Array, labels: NDArray[np.int64], classes: int, regularisation: float) -> Array:
    return _minimum(problem_of(features, labels, classes, regularisation), features, labels, regularisation, None)


def examples(count: int, features: int, classes: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    draws = np.random.default_rng(seed)
    rows = draws.normal(size=(count, features))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) * draws.uniform(1, 2, size=(count, 1))
    return rows, draws.integers(classes, size=count)


def test_printed_figures() -> None:
    assert objective_terms(Problem(10_000, 5, 2, 0.01), 1.0).epsilon == pytest.approx(0.995006, abs=5e-7)
    assert objective_terms(Problem(1000, 5, 2, 0.001), 1.0).epsilon == pytest.approx(0.553713, abs=5e-7)
    terms = objective_terms(Problem(100, 5, 2, 0.001), 1.0)
    assert terms.regularisation - 0.001 == pytest.approx(0.0078020, abs=5e-8)
    assert (terms.epsilon, terms.scale) == (0.5, 4.0)
    # Where the regularisation is raised, the change of volume takes the other half of epsilon.
    assert 2 * math.log1p(0.25 / (100 * terms.regularisation)) == pytest.approx(0.5)
    softmax = Problem(1437, 65, 10, 0.01)
    assert softmax.sensitivity == pytest.approx(0.196829, abs=5e-7)
    assert (softmax.dimension, Problem(9, 65, 2, 1.0).dimension) == (650, 65)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_minimum_is_scikit_learns(classes: int) -> None:
    features, labels = examples(60, 5, classes, 1)
    ours = minimum(features, labels, classes, 0.01)
    solver = "lbfgs" if classes == 2 else "newton-cg"
    model = LogisticRegression(C=1 / (0.01 * 60), fit_intercept=False, tol=1e-13, max_iter=100_000, solver=solver)
    np.testing.assert_allclose(ours, model.fit(features, labels).coef_, atol=1e-6)


def test_the_logistic_minimum_to_eight_digits() -> None:
    """scikit-learn's Newton solver gets there; the vector is the one of two classes."""
    features, labels = examples(60, 5, 2, 2)
    model = LogisticRegression(C=1 / (0.05 * 60), fit_intercept=False, tol=1e-14, solver="newton-cholesky")
    np.testing.assert_allclose(minimum(features, labels, 2, 0.05), model.fit(features, labels).coef_, atol=1e-8)


@pytest.mark.parametrize("classes", [2, 3])
def test_no_replacement_of_any_example_moves_it_further(classes: int) -> None:
    """Every example of a small set becomes, with every label, each of some extreme ones."""
    features, labels = examples(6, 2, classes, 3)
    sensitivity = problem_of(features, labels, classes, 0.1).sensitivity
    before, largest = minimum(features, labels, classes, 0.1), 0.0
    corners = [np.array(corner, dtype=float) for corner in itertools.product((-1, 1), repeat=2)]
    for at, corner, label in itertools.product(range(6), corners, range(classes)):
        rows, named = features.copy(), labels.copy()
        rows[at], named[at] = corner / math.sqrt(2), label
        largest = max(largest, float(np.linalg.norm(minimum(rows, named, classes, 0.1) - before)))
    assert 0 < largest <= sensitivity


def test_a_made_pair_reaches_the_sensitivity() -> None:
    """An example and the one in its place are on the wrong side of all others, far out, and opposite to each other."""
    short, tilt, count = 0.006, 0.08, 120_000
    regularisation = 0.76 * short**2
    across = math.sqrt(1 - tilt**2)
    features, labels = np.tile([[short, 0.0]], (count, 1)), np.ones(count, dtype=np.int64)
    found = []
    for side in (across, -across):
        features[0] = (-tilt, side)
        found.append(minimum(features, labels, 2, regularisation))
    sensitivity = problem_of(features, labels, 2, regularisation).sensitivity
    assert 0.99 * sensitivity <= np.linalg.norm(found[0] - found[1]) <= sensitivity


def test_noise_of_both_laws() -> None:
    """The pure law's length is a Gamma variable and its direction uniform: wrong once in a million runs each."""
    draws = np.random.default_rng(1)
    noise = np.stack([spread_noise("laplace", 0.5, (4,), draws) for _ in range(3000)])
    lengths = np.linalg.norm(noise, axis=1)
    assert stats.kstest(lengths, stats.gamma(4, scale=0.5).cdf).pvalue > 1e-6
    density, _ = integrate.quad(lambda r: r**3 * math.exp(-r / 0.5), 0, np.inf)  # the same law from its density
    assert math.gamma(4) * 0.5**4 == pytest.approx(density)
    assert stats.kstest((noise[:, 0] / lengths) ** 2, stats.beta(0.5, 1.5).cdf).pvalue > 1e-6
    assert output_scale(Problem(100, 4, 2, 0.1), 2.0, "laplace", 0.5) == pytest.approx(0.2 / 2)


def test_normal_noise_is_as_private_as_it_says() -> None:
    problem = Problem(1000, 7, 2, 0.01)
    for epsilon in (0.2, 1.0, 8.0):
        sigma = output_scale(problem, epsilon, "gaussian", 1e-5)
        assert gaussian_delta(epsilon, problem.sensitivity / sigma) == pytest.approx(1e-5, rel=1e-6)


def test_objective_noise_solves_the_perturbed_problem() -> None:
    """A general solver on the objective as the paper writes it finds the same weights."""
    features, labels = examples(40, 3, 2, 4)
    config = mechanism_settings({"name": "objective", "target_epsilon": 1.0})
    problem = problem_of(features, labels, 2, 0.05)
    terms = objective_terms(problem, 1.0)
    tilt = spread_noise("laplace", terms.scale, (1, 3), np.random.default_rng(9))[0]

    def literal(w: Array) -> float:
        margins = (2 * labels - 1) * (features @ w)
        return float(np.logaddexp(0, -margins).mean() + terms.regularisation / 2 * w @ w + tilt @ w / 40)

    wanted = optimize.minimize(literal, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x

    def fit(regularisation: float, offset: Array | None) -> Array:
        return _minimum(problem, features, labels, regularisation, offset)

    draws = np.random.default_rng(9)
    spread_noise("laplace", terms.scale, (1, 3), draws)
    cover = spread_noise("laplace", terms.cover, (1, 3), draws)
    found = config.released(problem, fit, np.random.default_rng(9))
    np.testing.assert_allclose((found - cover)[0], wanted, atol=1e-6)


def test_the_solvers_error_has_its_part_of_epsilon() -> None:
    """The parts add up to epsilon; no other share of it gives less noise on the weights in one dimension."""
    problem, epsilon = Problem(10_000, 5, 2, 0.01, 1e-4), 2.0
    terms = objective_terms(problem, epsilon)
    exact = terms.epsilon + 2 * math.log1p(0.25 / (10_000 * terms.regularisation))
    solver = 2 * problem.tolerance / (terms.regularisation * terms.cover)
    assert exact + solver == pytest.approx(epsilon)

    def noise(part: float) -> float:
        return 2 / (10_000 * 0.01 * (epsilon - part)) + 2 * problem.tolerance / (0.01 * part)

    assert solver == pytest.approx(optimize.minimize_scalar(noise, bounds=(1e-3, 1.999), method="bounded").x, rel=1e-4)
    # Where the regularisation is raised, too: the change of volume, the noise and the solver's error add up.
    tight = objective_terms(replace(problem, regularisation=1e-6), epsilon)
    volume = 2 * math.log1p(0.25 / (10_000 * tight.regularisation))
    solver = 2 * problem.tolerance / (tight.regularisation * tight.cover)
    assert tight.epsilon + volume + solver == pytest.approx(epsilon)


@in_one_test("classes", [2, 5])
@in_one_test("regularisation", [10.0, 1e-3, 1e-6])
@in_one_test("tilt", [0.0, 1.0, 1e5])
def test_descent_never_needs_more_steps_than_public_sizes_say(classes: int, regularisation: float, tilt: float) -> None:
    """Counted from the gradient where descent may begin: at zero, or wherever the objective is no larger."""
    features, labels = examples(60, 4, classes, 5)
    problem = Problem(60, 4, classes, regularisation, 1e-6)
    draws = np.random.default_rng(7)
    offset = draws.normal(size=(problem.rows, 4))
    offset *= tilt / np.linalg.norm(offset)
    pair = np.concatenate([-offset, offset]) if classes == 2 else offset
    objective = Objective(features, labels, classes, regularisation * (2 if classes == 2 else 1), pair)
    starts = [np.zeros((classes, 4)), *(scale * draws.normal(size=(classes, 4)) for scale in (0.1, 1.0, 10.0))]
    allowed = [start for start in starts if objective.value(start) <= objective.value(starts[0])]
    for start in allowed:
        length = float(np.linalg.norm(objective.gradient(start)))
        smoothness = 0.5 + objective.regularisation
        steps = descent_steps(smoothness, objective.regularisation, length, 1e-6)
        assert steps <= most_steps(problem, tilt)


@in_one_test("classes", [2, 5])
@in_one_test("regularisation", [10.0, 1e-2, 1e-5])
@in_one_test("tilt", [0.0, 1.0, 1e5])
def test_the_solver_reaches_the_least_tolerance(classes: int, regularisation: float, tilt: float) -> None:
    """On any data: examples at random, all alike, and one class only; the noise term as long as was counted on."""
    features, labels = examples(60, 4, classes, 5)
    sizes = Problem(60, 4, classes, regularisation)
    problem = replace(sizes, tolerance=least_tolerance(sizes, tilt))
    draws = np.random.default_rng(6)
    for rows, named in ((features, labels), (np.tile(features[:1], (60, 1)), labels), (features, 0 * labels)):
        offset = draws.normal(size=(problem.rows, 4))
        offset *= tilt / np.linalg.norm(offset)
        _minimum(problem, rows, named, regularisation, offset)


@in_one_test(("mechanism", "law"), [("output", "laplace"), ("output", "gaussian"), ("objective", None)])
def test_the_ledger_claims_the_epsilon_once_and_more_for_two(mechanism: str, law: str | None) -> None:
    once, twice = (guarantee(released(mechanism, 1.5, times, law)) for times in (1, 2))
    assert once.epsilon == 1.5
    assert once.pure_epsilon == (None if law == "gaussian" else 1.5)
    assert twice.pure_epsilon == (None if law == "gaussian" else 3.0)
    assert once.epsilon < (twice.epsilon or 0) <= 3.0
    assert once.adjacency.startswith("replace-one")
    assert guarantee(released(mechanism, 1.5, 0, law)).epsilon == 0


@pytest.mark.parametrize("classes", [2, 3])
def test_released_weights_are_those_of_the_network(classes: int) -> None:
    """The linear layer's logits are the model's on unbounded features; shortening an example keeps its class."""
    inputs = torch.randn(30, 1, 2, 3, generator=torch.Generator().manual_seed(1))
    length = usual_length(inputs)
    features = bounded_features(inputs, length)
    lengths = np.linalg.norm(features, axis=1)
    assert lengths.max() <= 1
    assert (lengths < 1 - 1e-9).any()
    labels = np.arange(30) % classes
    problem = problem_of(features, labels, classes, 0.05)
    like = {"weight": torch.zeros(classes, 6), "bias": torch.zeros(classes)}
    layer = trained_parameters(problem, features, labels, mechanism_settings({}), None, length, like)
    logits = (inputs.flatten(1) @ layer["weight"].T + layer["bias"]).double().numpy()
    weights = minimum(features, labels, classes, 0.05)
    rows = np.concatenate([-weights / 2, weights / 2]) if classes == 2 else weights
    np.testing.assert_array_equal(logits.argmax(1), (features @ rows.T).argmax(1))
    short = lengths < 1 - 1e-9
    np.testing.assert_allclose(logits[short], (features @ rows.T)[short], atol=1e-5)


@in_one_test(
    ("given", "words"),
    [
        ({"examples": 0}, "examples = 0"),
        ({"classes": 1}, "classes = 1"),
        ({"regularisation": 0.0}, "without it one example may move the minimum as far as it likes"),
        ({"tolerance": -1.0}, "tolerance = -1"),
    ],
)
def test_what_is_no_problem_is_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Problem(**{"examples": 5, "features": 2, "classes": 2, "regularisation": 1.0, **given})  # type: ignore[arg-type]


def test_objective_noise_is_for_two_classes() -> None:
    with pytest.raises(InputError, match="proven for two classes, and these data have 3"):
        objective_terms(Problem(10, 2, 3, 1.0), 1.0)
