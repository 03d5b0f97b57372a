"""Randomised response: its law, its survey and what it lets anybody tell, against enumeration and exact laws."""

import itertools
import math

import numpy as np
import pytest
import torch
from mpmath import mp
from scipy import stats

from fedpriv.accounting.response import Response, coin_response, kept_response, label_guarantee, most_told
from fedpriv.algorithms.labels.preparation import changed_labels
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret
from tests.cases import in_one_test

ALARM = 1e-6


@in_one_test("answers", [2, 3, 10, 106])
@in_one_test("epsilon", [1e-6, 0.5, 1.0, 3.0, 20.0])
def test_probabilities_are_those_of_exact_arithmetic(epsilon: float, answers: int) -> None:
    law = Response(epsilon, answers)
    with mp.workdps(40):
        whole = mp.e ** mp.mpf(epsilon) + answers - 1
        keep, other = mp.e ** mp.mpf(epsilon) / whole, 1 / whole
        assert abs(law.keep - keep) < 1e-15
        assert abs(law.other - other) < 1e-15


def test_printed_figures() -> None:
    assert Response(1.0, 10).keep == pytest.approx(0.231969, abs=5e-7)
    assert Response(3.0, 10).keep == pytest.approx(0.690568, abs=5e-7)
    coin = coin_response(0.5, 2)
    assert (coin.keep, coin.epsilon) == (pytest.approx(0.75, abs=1e-15), pytest.approx(1.098612, abs=5e-7))
    assert coin.standard_error(0.1, 2000) == pytest.approx(0.02049, abs=5e-6)


@pytest.mark.parametrize("answers", [2, 5])
def test_ways_to_say_the_same(answers: int) -> None:
    for epsilon in (0.1, 1.0, 4.0):
        law = Response(epsilon, answers)
        assert kept_response(law.keep, answers).epsilon == pytest.approx(epsilon)
        heads = 1 - answers * law.other  # else one of all answers is drawn
        assert coin_response(heads, answers).epsilon == pytest.approx(epsilon)


@in_one_test("answers", [2, 3, 4, 5])
def test_the_largest_likelihood_ratio_is_the_claim(answers: int) -> None:
    """Enumerated over all truths and answers; and over vectors of three, of which one may change."""
    law = Response(1.3, answers)
    table = np.full((answers, answers), law.other) + np.eye(answers) * (law.keep - law.other)
    assert table.sum(axis=1) == pytest.approx(1)
    ratios = [table[a, z] / table[b, z] for a in range(answers) for b in range(answers) for z in range(answers)]
    assert math.log(max(ratios)) == pytest.approx(1.3)
    others = [table[1, 0] * table[0, 1], table[0, 1] * table[1, 0]]
    assert others[0] == pytest.approx(others[1])
    claim = label_guarantee(law)
    assert (claim.pure_epsilon, claim.epsilon, claim.delta) == (1.3, 1.3, 0.0)


@in_one_test("shares", [(0.5, 0.5), (0.9, 0.1), (0.2, 0.3, 0.5), (0.7, 0.1, 0.1, 0.1)])
@in_one_test("epsilon", [0.2, 1.0, 3.0])
def test_no_rule_tells_more_than_the_ceiling(shares: tuple[float, ...], epsilon: float) -> None:
    """All rules from an answer to a named truth are tried: the best one reaches it."""
    count = len(shares)
    law = Response(epsilon, count)
    table = np.full((count, count), law.other) + np.eye(count) * (law.keep - law.other)
    rules = itertools.product(range(count), repeat=count)
    best = max(sum(shares[rule[z]] * table[rule[z], z] for z in range(count)) for rule in rules)
    assert law.success(shares) == pytest.approx(best)
    decided = law.best_decisions(shares)
    assert sum(shares[y] * table[y, z] for z, y in enumerate(decided)) == pytest.approx(best)
    assert max(shares) - 1e-12 <= best <= most_told(epsilon, max(shares)) + 1e-12
    if len(set(shares)) == 1:
        assert best == pytest.approx(law.keep) == pytest.approx(most_told(epsilon, 1 / count))


def test_labels_follow_the_law() -> None:
    """Kept as often as a binomial law allows, and the others alike: wrong in two of a million runs."""
    law, count = Response(1.0, 5), 200_000
    labels = torch.full((count,), 3)
    changed = changed_labels(labels, law, Secret.of_seed(1).stream("labels", 0))
    found = torch.bincount(changed, minlength=5).tolist()
    assert stats.binomtest(found[3], count, law.keep).pvalue > ALARM
    others = found[:3] + found[4:]
    assert stats.chisquare(others).pvalue > ALARM
    again = changed_labels(labels, law, Secret.of_seed(1).stream("labels", 0))
    assert torch.equal(changed, again)
    assert not torch.equal(changed, changed_labels(labels, law, Secret.of_seed(1).stream("labels", 1)))


def test_a_survey_has_no_bias_and_the_error_that_it_says() -> None:
    """Exact moments of the binomial law of the counts; a deviation off by 5 % fails, wrong once in a million runs."""
    law, people, share = coin_response(0.5, 2), 2000, 0.1
    given = law.other + share * (law.keep - law.other)
    counts = np.random.default_rng(5).binomial(people, given, size=10_000)
    found = np.array([law.shares([people - count, count])[0][1] for count in counts])
    exact = math.sqrt(given * (1 - given) / people) / (law.keep - law.other)
    assert abs(found.mean() - share) < stats.norm.isf(ALARM / 2) * exact / 100
    assert abs(found.std() / exact - 1) < 0.05  # 7 standard deviations of the deviation of 10,000
    assert law.standard_error(share, people) == pytest.approx(exact)
    estimates, errors = law.shares([1600, 400])
    assert estimates.sum() == pytest.approx(1)
    assert errors[0] == pytest.approx(math.sqrt(0.2 * 0.8 / people) * 2)


@in_one_test(
    ("make", "words"),
    [
        (lambda: Response(0.0, 3), "epsilon = 0: allowed is from 1e-09 to 20"),
        (lambda: Response(21.0, 3), "epsilon = 21"),
        (lambda: Response(1.0, 1), "answers = 1"),
        (lambda: kept_response(0.3, 3), "keep = 0.3: with 3 answers allowed is above 1 / 3"),
        (lambda: coin_response(1.0, 2), "coin = 1"),
    ],
)
def test_what_is_no_law_is_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=words):
        make()
