"""Votes of prompts: by hand, against brute force, and what is proven against figures of others."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedpriv.accounting.aggregators import NoisyMax, SampledUse
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret
from fedpriv.prompts.classify import SENSITIVITY, answers, noise_of, together
from fedpriv.prompts.settings import IclConfig
from fedpriv.prompts.texts import Example, Wording, drawn
from tests.prompts.worlds import classifier, fruits

# Wu et al. 2024's setting: ten prompts of four examples, 500 questions, delta 1e-4; as the specification prints it.
PRINTED = [(5452, 1, 1.350), (5452, 3, 0.920), (5452, 8, 0.683), (6920, 1, 1.212), (6920, 3, 0.865), (6920, 8, 0.647)]

# Tang et al. 2024, AG News, 20 of 30,000 examples, 100 tokens, delta 1 / 30,000: their noise and their epsilon.
AUTHORS = [(0.51, 1.0), (0.46, 2.0), (0.39, 4.0), (0.31, 8.0)]


@pytest.mark.parametrize(("examples", "epsilon", "sigma"), PRINTED)
def test_noise_is_calibrated_as_printed(examples: int, epsilon: float, sigma: float) -> None:
    config = IclConfig(shots=4, prompts=10, queries=500, delta=1e-4)
    noise = noise_of(config, examples, epsilon)
    assert noise.sigma == pytest.approx(sigma, rel=0.01)
    assert noise.guarantee.epsilon is not None
    assert epsilon * (1 - 1e-3) <= noise.guarantee.epsilon <= epsilon
    assert (noise.guarantee.participations, noise.guarantee.sampling[:5]) == (500, "fixed")


@pytest.mark.parametrize(("noise", "published"), AUTHORS)
def test_the_ledger_is_below_the_authors_list(noise: float, published: float) -> None:
    use = SampledUse(SENSITIVITY, 20 / 30_000, 100, 1 / 30_000)
    # Theirs is a multiple of the sensitivity of the sum.
    proven = use.guarantee(noise * SENSITIVITY).epsilon
    assert proven is not None
    assert 0.88 * published <= proven <= published


def test_without_sampling_the_figure_is_the_exact_one() -> None:
    use = SampledUse(SENSITIVITY, 1.0, 40, 1e-5)
    proven = use.guarantee(12.0).epsilon
    assert proven == pytest.approx(NoisyMax(12.0).claim(40, 40, 1e-5).epsilon, rel=0.01)


def test_all_levels_together_are_one_with_less_noise() -> None:
    config = IclConfig(unit="client", clients=20, shots=1, prompts=2, queries=30, delta=1e-5)
    noises = [noise_of(config, 60, epsilon) for epsilon in (1.0, 3.0)]
    # Full participation: squares of mu add up (Dong, Roth and Su 2022, Cor. 3.3).
    mus = [2 * math.sqrt(2 * 30) / noise.sigma for noise in noises]
    both = together(config, 60, noises).epsilon
    assert both is not None
    mu = math.hypot(*mus)
    delta = stats.norm.cdf(mu / 2 - both / mu) - math.exp(both) * stats.norm.cdf(-mu / 2 - both / mu)
    assert delta == pytest.approx(1e-5, rel=1e-6)


def test_a_client_moves_as_many_votes_as_it_has() -> None:
    one, three = (
        noise_of(IclConfig(unit="client", clients=9, shots=1, prompts=prompts, queries=50), 90, 2.0)
        for prompts in (1, 3)
    )
    assert three.sigma == pytest.approx(3 * one.sigma)
    assert "replace-one-client" in three.guarantee.adjacency
    assert (three.guarantee.sampling, three.guarantee.participations) == ("full", 50)


def test_counting_votes_as_by_hand() -> None:
    texts = fruits(4, 1)
    config = IclConfig(shots=2, prompts=2, calibrated=False)
    answering = classifier(config, texts)
    # The same draw, made again; then words in common counted by hand.
    rows = drawn(4, 2, 2, answering.secret.stream("icl-prompts", 0, 0).numpy())
    asked = set(texts.questions[0].text.split())
    expected = []
    for prompt in rows:
        scores = [1, 1]
        for row in prompt:
            example = texts.examples[row]
            scores[example.label] += len(asked & set(example.text.split()))
        expected.append(int(np.argmax(scores)))
    assert answering.votes(0, texts.questions[0].text).tolist() == expected
    assert sorted(rows.ravel().tolist()) == [0, 1, 2, 3]


def test_replacing_any_example_moves_one_vote() -> None:
    texts = fruits(12, 1)
    config = IclConfig(shots=2, prompts=4, calibrated=True)
    question = texts.questions[0].text
    before = classifier(config, texts).votes(0, question)
    moved = 0
    for row, label in itertools.product(range(12), (0, 1)):
        changed = list(texts.examples)
        changed[row] = Example(question, label)
        after = classifier(config, type(texts)(**{**vars(texts), "examples": tuple(changed)})).votes(0, question)
        assert (before != after).sum() <= 1
        moved += int((before != after).sum())
    assert moved  # some do: the test sees votes that move


def test_each_question_has_draws_of_its_own() -> None:
    answering = classifier(IclConfig(shots=1, prompts=3))
    draws = [next(answering._prompts(number, 0)) for number in range(20)]
    assert len({example.text for (example,) in draws}) > 5


def test_clients_make_prompts_of_their_own_examples() -> None:
    answering = classifier(IclConfig(unit="client", clients=5, shots=2, prompts=3))
    shares = answering.shares
    assert sorted(np.concatenate(shares).tolist()) == list(range(60))
    examples = answering.wording.texts.examples
    prompts = [prompt for client in range(5) for prompt in answering._prompts(0, client)]
    assert len(prompts) == 15
    for number, prompt in enumerate(prompts):
        own = {examples[row].text for row in shares[number // 3]}
        assert {example.text for example in prompt} <= own


def test_answers_are_the_plurality_plus_noise() -> None:
    votes = np.array([[0, 0, 0, 1]] * 400)
    assert set(answers(votes, 2, 0.0, Secret.of_seed(0), 0).tolist()) == {0}
    said = answers(votes, 2, 2.0, Secret.of_seed(0), 0)
    expected = stats.norm.cdf((3 - 1) / (2.0 * math.sqrt(2)))
    # 400 answers: 4.5 deviations, false alarm 7e-6.
    assert abs((said == 0).mean() - expected) < 4.5 * math.sqrt(expected * (1 - expected) / 400)
    assert (said[:40] != answers(votes[:40], 2, 2.0, Secret.of_seed(0), 1)).any()
    assert (said[:40] != answers(votes[:40], 2, 2.0, Secret.of_seed(1), 0)).any()


def test_too_few_examples_are_one_line() -> None:
    with pytest.raises(InputError, match=r"icl.prompts = 10 with icl.shots = 4 take 40 examples, and there are 39"):
        noise_of(IclConfig(), 39, 1.0)


def test_wording() -> None:
    wording = Wording(fruits(2, 1), 2)
    assert wording.prefix(wording.texts.examples) == "Text: red red\nAnswer: yes\n\nText: green sour\nAnswer: yes"
    assert wording.ending(" a\n b  c", True) == "\n\nText: a b\nAnswer:"
    assert wording.prefix([]) == ""
    assert wording.ending("a", False) == "Text: a\nAnswer:"
    assert wording.candidates == (" no", " yes")
