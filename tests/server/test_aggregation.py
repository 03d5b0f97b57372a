"""The server's step against the same step written out in numpy."""

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.world import State
from fedpriv.server.aggregation import ServerOptimizer
from fedpriv.server.rules.mean import mean_upload
from fedpriv.server.uploads import Upload
from tests.cases import in_one_test

SHAPES = {"a.weight": (3, 2), "a.bias": (3,)}


def vector(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}


def uploads(rng: np.random.Generator, examples: tuple[int, ...]) -> list[Upload]:
    return [Upload(i, n, State(vector(rng), {"running": torch.full((2,), float(i))})) for i, n in enumerate(examples)]


def setup(**federation: object) -> Experiment:
    return Experiment.model_validate({"federation": federation, "training": {"learning_rate": 0.3}})


@in_one_test("examples", [(5,), (1, 1, 1), (10, 30, 1)])
@in_one_test("weighting", ["examples", "uniform"])
def test_the_mean_is_weighted(examples: tuple[int, ...], weighting: str) -> None:
    sent = uploads(np.random.default_rng(0), examples)
    mean = mean_upload(sent, weighting)
    weights = np.array(examples, dtype=float) if weighting == "examples" else np.ones(len(examples))
    for name in SHAPES:
        stacked = np.stack([upload.state.parameters[name].double().numpy() for upload in sent])
        expected = np.average(stacked, axis=0, weights=weights)
        np.testing.assert_allclose(mean.parameters[name].numpy(), expected, rtol=1e-5, atol=1e-6)
    expected_buffer = np.average(np.arange(len(examples)), weights=weights)
    np.testing.assert_allclose(mean.buffers["running"].numpy(), expected_buffer, rtol=1e-5)


@in_one_test("algorithm", ["fedsgd", "fedavg"])
@in_one_test("momentum", [0.0, 0.9])
def test_sgd_goes_down_the_gradient_or_along_the_change(algorithm: str, momentum: float) -> None:
    rng = np.random.default_rng(1)
    experiment = setup(algorithm=algorithm, server_momentum=momentum)
    rate = 0.3 if algorithm == "fedsgd" else 1.0
    sign = -1 if algorithm == "fedsgd" else 1
    start = State(vector(rng), {})
    optimizer = ServerOptimizer(experiment, start)
    expected = {name: value.double().numpy() for name, value in start.parameters.items()}
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(3):
        mean = State(vector(rng), {})
        optimizer.step(mean)
        for name in SHAPES:
            velocity[name] = momentum * velocity[name] + mean.parameters[name].double().numpy()
            expected[name] = expected[name] + sign * rate * velocity[name]
    for name in SHAPES:
        np.testing.assert_allclose(optimizer.state.parameters[name].numpy(), expected[name], rtol=1e-5, atol=1e-6)


def test_adam_is_the_published_algorithm() -> None:
    """Kingma and Ba 2015, Algorithm 1, with beta (0.9, 0.999) and epsilon 1e-8."""
    rng = np.random.default_rng(2)
    start = State(vector(rng), {})
    optimizer = ServerOptimizer(setup(server_optimizer="adam", server_learning_rate=0.02), start)
    name = "a.weight"
    x, m, v = start.parameters[name].double().numpy(), np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
    for t in range(1, 5):
        mean = State(vector(rng), {})
        optimizer.step(mean)
        g = mean.parameters[name].double().numpy()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x - 0.02 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(optimizer.state.parameters[name].numpy(), x, rtol=1e-4, atol=1e-6)


@in_one_test("federation", [{}, {"server_momentum": 0.9}, {"server_optimizer": "adam"}])
def test_a_checkpoint_continues_to_the_same_bits(federation: dict[str, object]) -> None:
    rng = np.random.default_rng(3)
    experiment, start = setup(**federation), State(vector(rng), {"running": torch.zeros(2)})
    means = [State(vector(rng), {"running": torch.ones(2)}) for _ in range(6)]
    whole = ServerOptimizer(experiment, start)
    for mean in means:
        whole.step(mean)
    first, second = ServerOptimizer(experiment, start), ServerOptimizer(experiment, start)
    for mean in means[:3]:
        first.step(mean)
    second.load(first.tensors(), 3)
    for mean in means[3:]:
        second.step(mean)
    assert second.rounds == 6
    for name in SHAPES:
        assert torch.equal(whole.state.parameters[name], second.state.parameters[name])
    assert torch.equal(whole.state.buffers["running"], second.state.buffers["running"])


@in_one_test("federation", [{}, {"server_momentum": 0.9}, {"server_optimizer": "adam"}])
def test_statistics_are_averaged_under_each_optimiser(federation: dict[str, object]) -> None:
    """A server's momentum would carry a running variance that falls past zero."""
    still = {name: value.zero_() for name, value in vector(np.random.default_rng(0)).items()}
    server = ServerOptimizer(setup(**federation), State(still, {"running": torch.ones(2, dtype=torch.float64)}))
    for _ in range(20):
        server.step(State(still, {"running": 0.1 * (0.02 - server.state.buffers["running"])}))
    np.testing.assert_allclose(server.state.buffers["running"].numpy(), 0.02 + 0.98 * 0.9**20, rtol=1e-12)


def test_the_callers_tensors_are_left_alone() -> None:
    start = State(vector(np.random.default_rng(4)), {})
    before = {name: value.clone() for name, value in start.parameters.items()}
    optimizer = ServerOptimizer(setup(), start)
    optimizer.step(State(vector(np.random.default_rng(5)), {}))
    assert all(torch.equal(before[name], start.parameters[name]) for name in SHAPES)


RULES: tuple[dict[str, object], ...] = (
    {"aggregation": "median"},
    {"aggregation": "trimmed-mean", "trim": 0.25},
    {"aggregation": "krum", "malicious": 1},
)


def by_hand(federation: dict[str, object], sent: list[Upload]) -> dict[str, np.ndarray]:
    """The robust rules, from their papers, on float64."""
    names = [*SHAPES, "running"]
    rows = {
        name: np.stack([(u.state.parameters | u.state.buffers)[name].double().numpy() for u in sent]) for name in names
    }
    if federation["aggregation"] == "median":
        return {name: np.median(value, axis=0) for name, value in rows.items()}
    if federation["aggregation"] == "trimmed-mean":
        return {name: trim_mean(value, federation["trim"], axis=0) for name, value in rows.items()}
    flat = np.concatenate([value.reshape(len(sent), -1) for value in rows.values()], axis=1)
    distances = np.square(flat[:, None] - flat[None]).sum(axis=2)
    nearest = np.sort(distances, axis=1)[:, 1 : len(sent) - 2]  # n - f - 2 neighbours with f = 1
    best = int(nearest[:, : len(sent) - 3].sum(axis=1).argmin())
    return {name: value[best] for name, value in rows.items()}


@in_one_test("count", [5, 6, 9])
@in_one_test("federation", RULES)
def test_robust_rules_are_those_of_their_papers(federation: dict[str, object], count: int) -> None:
    sent = uploads(np.random.default_rng(count), tuple(range(1, count + 1)))
    settings = setup(clients=count, **federation).federation
    result, expected = settings.rule.aggregate(sent, settings.weighting), by_hand(federation, sent)
    for name, value in (result.parameters | result.buffers).items():
        assert value.dtype == torch.float32
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-5, atol=1e-6)


@in_one_test("federation", RULES)
def test_one_wrong_upload_does_not_upset_a_robust_rule(federation: dict[str, object]) -> None:
    rng = np.random.default_rng(11)
    truth = vector(rng)
    states = [State({k: v + 0.01 * torch.randn_like(v) for k, v in truth.items()}, {}) for _ in range(7)]
    states[3] = State({name: torch.full_like(value, 1e6) for name, value in truth.items()}, {})
    sent = [Upload(number, 10, state) for number, state in enumerate(states)]
    settings = setup(clients=7, **federation).federation
    result, mean = settings.rule.aggregate(sent, settings.weighting), mean_upload(sent, "examples")
    for name, value in truth.items():
        assert (result.parameters[name] - value).abs().max() < 0.1
        assert (mean.parameters[name] - value).abs().max() > 1e4


def test_krum_tells_uploads_apart_that_differ_little() -> None:
    """Squares of a large network's numbers are rounded by more than its uploads differ."""
    start = torch.randn(200_000, generator=torch.Generator().manual_seed(13))
    moves = torch.randn(8, start.numel(), generator=torch.Generator().manual_seed(14))
    sent = [Upload(client, 10, State({"w": start + 1e-4 * move}, {})) for client, move in enumerate(moves)]
    settings = setup(clients=8, aggregation="krum").federation
    rows = torch.stack([upload.state.parameters["w"] for upload in sent]).double()
    nearest = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square().sort().values[:, 1:6]
    assert torch.equal(
        settings.rule.aggregate(sent, "examples").parameters["w"].double(), rows[nearest.sum(1).argmin()]
    )


def test_the_mean_is_the_default() -> None:
    sent = uploads(np.random.default_rng(12), (1, 5, 2))
    result, mean = setup(clients=3).federation.rule.aggregate(sent, "examples"), mean_upload(sent, "examples")
    assert all(torch.equal(value, mean.parameters[name]) for name, value in result.parameters.items())


@in_one_test(
    ("sections", "words"),
    [
        ({"federation": {"aggregation": "krum", "clients": 4}}, "malicious = 1 needs 5 uploads a round"),
        ({"federation": {"aggregation": "krum", "clients": 9, "clients_per_round": 4}}, "a round has 4 clients"),
        (
            {"federation": {"aggregation": "median"}, "adversary": {"threat_model": "secure-aggregation"}},
            "'median' needs each upload, and under adversary.threat_model = 'secure-aggregation'",
        ),
        (
            {
                "federation": {"aggregation": "median"},
                "adversary": {"threat_model": "malicious-server", "attacks": ["imprint"]},
            },
            "with imprint",
        ),
    ],
)
def test_rules_that_cannot_work_are_refused(sections: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Experiment.model_validate(sections)


@in_one_test(
    ("change", "words"),
    [
        ({"optimizer/0/exp_avg_sq": None}, "optimizer/0/exp_avg_sq does not fit"),
        ({"optimizer/0/exp_avg": torch.zeros(1)}, "optimizer/0/exp_avg does not fit"),
        ({"optimizer/0/step": torch.tensor(-5.0)}, "optimizer/0/step holds what no step leaves behind"),
        ({"optimizer/9/step": torch.zeros(())}, "holds optimizer/9/step"),
        ({"parameters/a.bias": torch.full((3,), torch.nan)}, "parameters/a.bias holds what no step leaves behind"),
        ({"parameters/other": torch.zeros(3)}, "holds parameters/other"),
    ],
)
def test_a_damaged_checkpoint_is_refused(change: dict[str, torch.Tensor | None], words: str) -> None:
    """Each of these ended a resumed run with a traceback, or with numbers that nobody computed."""
    experiment = setup(server_optimizer="adam")
    optimizer = ServerOptimizer(experiment, State(vector(np.random.default_rng(6)), {}))
    optimizer.step(State(vector(np.random.default_rng(7)), {}))
    tensors = {key: value for key, value in (optimizer.tensors() | change).items() if value is not None}
    with pytest.raises(InputError, match=words):
        optimizer.load(tensors, 1)
