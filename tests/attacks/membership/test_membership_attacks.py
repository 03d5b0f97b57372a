"""Attacks against the published definitions, written out candidate by candidate."""

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit
from scipy.stats import multivariate_normal, norm

from fedpriv.attacks.intervals import auc_interval, curve
from fedpriv.attacks.membership import attacks
from fedpriv.attacks.membership.attacks import (
    ATTACKS,
    Signals,
    label_logits,
    losses,
    write_signals,
    wrong_log_probabilities,
)
from fedpriv.core.errors import InputError
from tests.cases import in_one_test


def made_up(seed: int, *, models: int = 12, rounds: int = 2, candidates: int = 60, others: int = 40, gain: float = 1.0):
    """Logits that are larger by ``gain`` where a model was trained with an example; the truth about the target."""
    rng = np.random.default_rng(seed)
    inside = np.stack([rng.permutation(models) < models // 2 for _ in range(candidates)], axis=1)
    members = rng.random(candidates) < 0.5
    hard = rng.normal(1, 2, candidates)
    noise = rng.normal(0, 1, (models + 1, rounds, candidates))
    growth = gain * np.arange(1, rounds + 1)[:, None] / rounds
    every = hard + noise + growth * np.vstack([inside, members])[:, None]
    population = rng.normal(1, 2, others) + rng.normal(0, 1, (models + 1, rounds, others))
    rounds_ = np.arange(1, rounds + 1)
    wrong = -np.sort(rng.exponential(3, (models + 1, candidates, 4)))
    signals = Signals(every[-1], every[:-1], inside, population[-1], population[:-1], rounds_, wrong[-1], wrong[:-1])
    return signals, members


@pytest.mark.parametrize("scale", [1.0, 30.0, 500.0])
def test_logits_are_those_of_the_probability(scale: float) -> None:
    """Against the definition in 300 bits."""
    mpmath = pytest.importorskip("mpmath")
    outputs = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).mul(scale)
    labels = torch.tensor([0, 3, 1, 1, 2])
    found = label_logits(outputs, labels)
    with mpmath.workprec(3000):
        for model in range(2):
            for row in range(5):
                terms = [mpmath.exp(mpmath.mpf(float(value))) for value in outputs[model, row]]
                p = terms[labels[row]] / sum(terms)
                assert float(found[model, row]) == pytest.approx(float(mpmath.log(p / (1 - p))), rel=1e-9, abs=1e-9)
                wanted = float(-mpmath.log(p))
                assert losses(found[model, row].numpy()) == pytest.approx(wanted, rel=1e-9, abs=1e-300)


def test_losses_are_cross_entropies() -> None:
    outputs, labels = torch.randn(30, 7), torch.randint(7, (30,))
    wanted = torch.nn.functional.cross_entropy(outputs.double(), labels, reduction="none")
    np.testing.assert_allclose(losses(label_logits(outputs, labels).numpy()), wanted.numpy(), rtol=1e-9)


def test_attack_p_is_the_share_of_worse_population_losses() -> None:
    signals, _ = made_up(1)
    target, population = losses(signals.target[-1]), losses(signals.population[-1])
    wanted = [(sum(other > one for other in population) + 0.5) / (len(population) + 1) for one in target]
    np.testing.assert_allclose(ATTACKS["attack-p"](signals), wanted)


def test_attack_r_compares_with_models_trained_without() -> None:
    """Without smoothing it is the share of reference losses above the target's; with it, a sum of normal tails."""
    signals, _ = made_up(2)
    target, references = signals.target[-1], signals.references[:, -1]
    counted = expit(attacks.attack_r(target, references, signals.inside, bandwidth=1e-6))
    smooth = attacks.attack_r(target, references, signals.inside, bandwidth=0.7)
    for column, one in enumerate(target):
        out = references[~signals.inside[:, column], column]
        assert counted[column] == pytest.approx(np.mean(losses(out) > losses(one)), abs=1e-6)
        share = np.mean([norm.cdf(one, other, 0.7) for other in out])
        assert smooth[column] == pytest.approx(math.log(share / (1 - share)), rel=1e-6, abs=1e-6)


def test_attack_r_smooths_by_silvermans_rule() -> None:
    signals, _ = made_up(2)
    target, references, outside = signals.target[-1], signals.references[:, -1], ~signals.inside
    groups = [references[outside[:, column], column] for column in range(len(target))]
    width = 1.06 * math.sqrt(np.mean([group.var(ddof=1) for group in groups])) * len(groups[0]) ** -0.2
    wanted = attacks.attack_r(target, references, signals.inside, width)
    np.testing.assert_allclose(ATTACKS["attack-r"](signals), wanted)


def test_ties_count_half() -> None:
    assert attacks.attack_r(np.array([1.0]), np.array([[1.0], [2.0], [0.0]]), np.zeros((3, 1), bool))[
        0
    ] == pytest.approx(0, abs=1e-12)
    assert attacks.attack_p(np.array([1.0]), np.array([1.0, 1.0]))[0] == 0.5


@pytest.mark.parametrize("models", [12, 140])
def test_lira_is_a_ratio_of_fitted_normal_densities(models: int) -> None:
    """With few references one variance for all candidates, with many each candidate's own."""
    signals, _ = made_up(3, models=models)
    kinds = (signals.inside, ~signals.inside)
    last = signals.references[:, -1]
    pooled = []
    for kind in kinds:
        squares = [(last[kind[:, c], c] - last[kind[:, c], c].mean()) ** 2 for c in range(last.shape[1])]
        pooled.append(sum(map(np.sum, squares)) / sum(len(one) - 1 for one in squares))
    wanted, offline = [], []
    for column, one in enumerate(signals.target[-1]):
        samples = [last[kind[:, column], column] for kind in kinds]
        spread = [s.std(ddof=1) for s in samples] if models > 100 else [math.sqrt(v) for v in pooled]
        logs = [norm.logpdf(one, s.mean(), d) for s, d in zip(samples, spread, strict=True)]
        wanted.append(logs[0] - logs[1])
        offline.append(norm.logcdf(one, samples[1].mean(), spread[1]))
    np.testing.assert_allclose(ATTACKS["lira-online"](signals), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ATTACKS["lira-offline"](signals), offline, rtol=1e-4, atol=1e-4)


def test_lira_over_rounds_is_a_ratio_of_multivariate_densities() -> None:
    signals, _ = made_up(4, rounds=3)
    ends = []
    for kind in (signals.inside, ~signals.inside):
        groups = [signals.references[kind[:, c], :, c] for c in range(signals.target.shape[1])]
        scatter = sum((g - g.mean(0)).T @ (g - g.mean(0)) for g in groups) / sum(len(g) - 1 for g in groups)
        ends.append(
            [multivariate_normal.logpdf(signals.target[:, c], g.mean(0), scatter) for c, g in enumerate(groups)]
        )
    np.testing.assert_allclose(ATTACKS["lira-rounds"](signals), np.subtract(*ends), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_rmia_counts_the_population_that_is_beaten(gamma: float) -> None:
    """Zarifzadeh et al. 2024, Equations 2 and 4, with probabilities as they stand."""
    signals, _ = made_up(5)
    sigmoid = lambda phi: 1 / (1 + np.exp(-phi))  # noqa: E731
    p, q = sigmoid(signals.references[:, -1]), sigmoid(signals.reference_population[:, -1])
    of_target, of_others = sigmoid(signals.target[-1]), sigmoid(signals.population[-1])
    online, offline = [], []
    for column in range(p.shape[1]):
        kind = signals.inside[:, column]
        average = (p[kind, column].mean() + p[~kind, column].mean()) / 2
        online.append(np.mean(of_target[column] / average >= gamma * of_others / q.mean(axis=0)))
        stretched = (1.3 * p[~kind, column].mean() + 0.7) / 2
        offline.append(np.mean(of_target[column] / stretched >= gamma * of_others / ((1.3 * q.mean(axis=0) + 0.7) / 2)))
    np.testing.assert_allclose(attacks.rmia_online(signals, gamma), online)
    np.testing.assert_allclose(attacks.rmia_offline(signals, gamma), offline)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_finds_what_is_there_and_nothing_else(name: str) -> None:
    """Without any gain 0.5 lies in an interval at 99.9 %; with a large one the attack is far above it."""
    signals, members = made_up(6, models=32, candidates=600, others=300, gain=0.0)
    low, high = auc_interval(ATTACKS[name](signals), members, 0.999)
    assert low <= 0.5 <= high
    signals, members = made_up(7, models=32, candidates=600, others=300, gain=3.0)
    least = 0.6 if name == "attack-p" else 0.75
    assert curve(ATTACKS[name](signals), members).auc > least


def test_more_rounds_tell_more() -> None:
    signals, members = made_up(8, models=64, rounds=6, candidates=2000, gain=1.5)
    areas = {name: curve(ATTACKS[name](signals), members).auc for name in ("lira-online", "lira-rounds")}
    assert areas["lira-rounds"] > areas["lira-online"] + 0.02


@in_one_test("name", [name for name in ATTACKS if name != "attack-p"])
def test_a_candidate_without_the_references_that_are_needed_is_named(name: str) -> None:
    signals, _ = made_up(9)
    inside = signals.inside.copy()
    inside[:, 7] = True
    bad = replace(signals, inside=inside)
    with pytest.raises(InputError, match="candidate 7"):
        ATTACKS[name](bad)


def test_signals_are_read_as_they_were_written(tmp_path: Path) -> None:
    signals, _ = made_up(10)
    write_signals(tmp_path / "signals.npz", signals)
    again = Signals(**np.load(tmp_path / "signals.npz"))
    for name in [field.name for field in fields(Signals)]:
        np.testing.assert_array_equal(getattr(again, name), getattr(signals, name))
    assert [path.name for path in tmp_path.iterdir()] == ["signals.npz"]


def test_signals_of_other_shapes_are_refused() -> None:
    signals, _ = made_up(11)
    with pytest.raises(ValueError, match="references has the shape"):
        replace(signals, target=signals.target[:1])
    with pytest.raises(ValueError, match="reference_others has the shape"):
        replace(signals, reference_others=signals.reference_others[1:])


@in_one_test("classes", [2, 5, 30])
def test_wrong_classes_come_in_order_of_probability(classes: int) -> None:
    """Against softmax and sorting, row by row."""
    outputs = torch.randn(3, 8, classes, generator=torch.Generator().manual_seed(classes))
    labels = torch.arange(8) % classes
    found = wrong_log_probabilities(outputs, labels)
    assert found.shape == (3, 8, min(classes - 1, 9))
    for model in range(3):
        for row in range(8):
            probabilities = outputs[model, row].double().softmax(0).tolist()
            del probabilities[labels[row]]
            wanted = np.log(sorted(probabilities, reverse=True)[:9])
            np.testing.assert_allclose(found[model, row].numpy(), wanted, rtol=1e-9)


def test_shadow_models_see_more_than_the_label() -> None:
    """Members' second class is surer, their label's logit is not: only the attack that sees the others finds it.

    False alarm: 0.5 is tested with intervals at 99.9 %, six of them.
    """
    signals, members = made_up(12, models=32, candidates=600, others=300, gain=0.0)
    reference_others, others = signals.reference_others.copy(), signals.others.copy()
    reference_others[..., 0] += 6.0 * signals.inside
    others[:, 0] += 6.0 * members
    told = replace(signals, others=others, reference_others=reference_others)
    for name in ATTACKS:
        scores = ATTACKS[name](told)
        low, high = auc_interval(scores, members, 0.999)
        assert low > 0.8 if name == "shadow" else low <= 0.5 <= high, name


def test_shadow_models_come_near_the_best_test() -> None:
    """One normal number, shifted for members alike in all models: no test has a larger AUC than Phi(shift / sqrt 2)."""
    rng = np.random.default_rng(13)
    signals, members = made_up(13, models=16, rounds=1, candidates=1000, gain=0.0)
    shift = 1.5
    told = replace(
        signals,
        target=rng.normal(size=signals.target.shape) + shift * members,
        references=rng.normal(size=signals.references.shape) + shift * signals.inside[:, None],
    )
    low, high = auc_interval(ATTACKS["shadow"](told), members, 0.999)
    assert low <= norm.cdf(shift / math.sqrt(2)) <= high
    np.testing.assert_array_equal(ATTACKS["shadow"](told), ATTACKS["shadow"](told))
