"""Canaries in one run: scores of a known law, bounds below what is proven, and half the noise refuted.

Bounds that must hold are made with a confidence of 99.9 %: a sound implementation fails the product of twelve in one of
eighty random seeds at most; the seeds are fixed.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedpriv.attacks.canaries.audit import Share, audit_canaries, best_guesses, canary_scores
from fedpriv.attacks.canaries.report import CanaryAudit
from fedpriv.attacks.epsilon import canary_epsilon, independent_canary_epsilon
from fedpriv.core.cli.app import app
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.lab import start_run
from fedpriv.core.numbers import figure
from fedpriv.core.plan import Plan
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from tests.cases import in_one_test

SURE, ROUNDS, CANARIES = 0.999, 8, 500
NOISE = Secret.of_seed(1)


def experiment(mechanism: dict[str, Any], **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [32]},
        "federation": {"clients": 1, "rounds": ROUNDS},
        "training": {"batch_size": 128},
        "adversary": {"attacks": []},
        "engine": {"name": "inline", "threads": 1},
        "mechanism": mechanism,
        "noise": "reproducible",
    }
    return Experiment.model_validate(settings | changes)


@cache
def gaussian_world(sigma: float) -> World:
    return build_world(experiment({"name": "gaussian", "sigma": sigma}))


def coins(canaries: int = CANARIES) -> np.ndarray:
    return np.random.default_rng(0).random(canaries) < 0.5


def shared(world: World, canaries: int = CANARIES) -> Share:
    return Share.of(world, 0, range(1, ROUNDS + 1), np.arange(canaries))


def proven(plan: Plan) -> float:
    epsilon = plan.guarantee(range(1, ROUNDS + 1)).epsilon
    assert epsilon is not None
    return epsilon


def test_scores_have_the_law_of_clipped_sums_with_normal_noise() -> None:
    """Over several passes: a canary that is in n batches has a mean of n C / B and a variance of n (sigma C / B)^2."""
    world = gaussian_world(1.5)
    plan, inside = world.plans[0], coins()
    rounds = range(1, 3 * plan.sampling.steps_per_epoch + 1)
    share = Share.of(world, 0, rounds, np.arange(CANARIES))
    times = np.zeros(CANARIES)
    for step in range(len(rounds)):
        batch = plan.batch(step)
        times[batch[batch < CANARIES]] += 1
    assert times.max() == 3
    unit = world.experiment.mechanism.clip_norm / 128  # type: ignore[attr-defined]
    scores = canary_scores(share, inside, True, NOISE) / unit
    standard = ((scores - np.where(inside, times, -times)) / (1.5 * np.sqrt(times)))[times > 0]
    assert abs(standard.mean()) < 5 / np.sqrt(len(standard))
    assert standard.std() == pytest.approx(1, abs=5 / np.sqrt(2 * len(standard)))
    assert not scores[times == 0].any()


CASES = [
    ({"name": "gaussian", "sigma": 1.5}, "shuffled"),
    ({"name": "gaussian", "sigma": 1.5}, "poisson"),
    ({"name": "gaussian", "sigma": 1.0, "adjacency": "zero-out"}, "poisson"),
    ({"name": "gaussian", "sigma": 1.0}, "balls-in-bins"),
    ({"name": "hgm", "sigma": 1.5}, "shuffled"),
    ({"name": "laplace", "scale": 0.2}, "shuffled"),
    ({"name": "laplace", "scale": 0.2}, "fixed"),
    ({"name": "vmf", "kappa": 100}, "shuffled"),
    ({"name": "vmf", "kappa": 100}, "balls-in-bins"),
    ({"name": "vmf", "kappa": 20, "blocks": "layer"}, "poisson"),
    ({"name": "vmf", "kappa": 1, "blocks": "size:16"}, "shuffled"),
]


@in_one_test(("mechanism", "sampling"), CASES)
def test_every_mechanism_and_sampling_is_bounded_below_its_ledger(mechanism: dict[str, Any], sampling: str) -> None:
    given = experiment(mechanism, training={"batch_size": 128, "sampling": sampling})
    world, inside = build_world(given), coins()
    line = world.plans[0].guarantee(range(1, ROUNDS + 1))
    scores = canary_scores(shared(world), inside, line.replaces, NOISE)
    assert (scores > 0)[inside].mean() > (scores > 0)[~inside].mean()
    assert canary_epsilon(scores, inside, 50, line.delta, SURE).epsilon <= proven(world.plans[0])


def test_the_bound_on_normal_noise_is_near_what_is_proven_and_twice_that_for_any_mechanism() -> None:
    """1,000 canaries, one pass, noise for (8, 1e-5); guesses of the general bound about a tenth, as it says itself."""
    world, inside = gaussian_world(1.20046), coins(1000)
    assert proven(world.plans[0]) == pytest.approx(8, abs=0.01)
    share = Share.of(world, 0, range(1, world.plans[0].sampling.steps_per_epoch + 1), np.arange(1000))
    scores = canary_scores(share, inside, True, NOISE)
    tight = independent_canary_epsilon(scores, inside, 0.0, 1e-5).epsilon
    assert 6 < tight <= 8
    assert tight > 2 * canary_epsilon(scores, inside, 100, 1e-5).epsilon


def test_more_guesses_are_made_where_more_of_them_are_right() -> None:
    inside = np.random.default_rng(0).permutation(np.arange(200) % 2 == 0)
    unsure = np.where(np.arange(200) % 10, 0.0, np.where(inside, 1.0, -1.0))
    assert best_guesses(inside.astype(float), inside, 1e-5) == 200
    assert best_guesses(unsure, inside, 1e-5) <= 20


def test_half_the_noise_is_refuted() -> None:
    world = gaussian_world(2.0)
    honest = world.plans[0]
    share = Share.of(world, 0, range(1, honest.sampling.steps_per_epoch + 1), np.arange(1000))
    halved = replace(share, plan=replace(honest, config=honest.config.with_noise(1.0)))
    inside = coins(1000)
    for each, refuted in ((share, False), (halved, True)):
        bound = independent_canary_epsilon(canary_scores(each, inside, True, NOISE), inside, 0.0, 1e-5, SURE)
        assert (bound.epsilon > proven(honest)) is refuted


def ran(folder: Path, mechanism: dict[str, Any], clients: int) -> RunFolder:
    federation, training = {"clients": clients, "rounds": 1}, {"batch_size": 16}
    start_run(experiment(mechanism, federation=federation, training=training), folder / "run", "", Silent())
    return RunFolder.open(folder / "run")


def test_a_run_whose_clients_are_protected_is_audited_by_its_command(tmp_path: Path) -> None:
    folder = ran(tmp_path, {"name": "gaussian", "sigma": 1.0, "unit": "update"}, clients=24)
    result = CliRunner().invoke(app, ["audit", str(folder.path), "--canaries", "1000"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    found = folder.read(CanaryAudit)
    assert found is not None
    assert (found.clients, found.epsilon_bound.trials) == (24, 24)
    assert f"Measured: ε is at least {figure(found.epsilon_bound.epsilon, 3)}, with 95% confidence" in said
    assert (
        f"Proven: ε is at most {figure(found.proven_epsilon)} Adjacency: {found.adjacency} At δ: {figure(1e-5)}" in said
    )
    assert "Based on: 24 canaries of 24 clients (one after the other" in said
    assert "Audit of the noise with canaries" in (folder.path / "report.html").read_text()
    assert json.loads((folder.path / "summary.json").read_text())["canaries"]["clients"] == 24

    ledger = folder.path / "ledger.json"
    written = json.loads(ledger.read_text())
    for line in written["clients"]:
        line["epsilon"] = 0.1
    ledger.write_text(json.dumps(written))
    with pytest.raises(RunFailedError, match=r"claimed: at most 0\.1"):
        audit_canaries(folder, 1000, Silent())
    shown = folder.read(CanaryAudit)
    assert shown is not None
    assert shown.figure.exceeded


def test_canaries_stand_for_examples_that_are_in_a_batch(tmp_path: Path) -> None:
    """Of 16 of a client's 359 examples something was released: others would be guessed by coins."""
    folder = ran(tmp_path, {"name": "gaussian", "sigma": 0.5}, clients=4)
    found = audit_canaries(folder, 1000, Silent())
    assert (found.clients, found.epsilon_bound.trials) == (4, 64)
    assert 5 < found.epsilon_bound.epsilon < found.proven_epsilon


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ({"name": "none"}, "no mechanism"),
        ({"name": "central", "sigma": 1.0, "unit": "update"}, "mechanism.name = 'central'"),
    ],
)
def test_a_run_without_noise_of_the_clients_is_refused_in_one_line(
    tmp_path: Path, mechanism: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        audit_canaries(ran(tmp_path, mechanism, clients=4), 10, Silent())


def test_one_canary_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for count in (-1, 1):
        with pytest.raises(InputError, match=f"--canaries {count}: a number from 2"):
            audit_canaries(RunFolder(tmp_path), count, Silent())
