"""What prompts of the counting model give away, and what private answers do."""

import numpy as np
import pytest
from scipy import integrate, stats

from fedpriv.core.errors import InputError
from fedpriv.prompts.classify import noise_of
from fedpriv.prompts.leaks import candidates, membership_leak, repeating
from fedpriv.prompts.settings import IclConfig, LeaksConfig
from fedpriv.prompts.texts import Example, PromptTexts
from tests.prompts.test_icl_generate import Table
from tests.prompts.worlds import classifier, fruits


def random_texts() -> PromptTexts:
    """Texts of random words with random labels: only who has seen one knows its label."""
    generator = np.random.default_rng(4)
    texts = [
        Example(" ".join(f"w{word}" for word in generator.integers(0, 40, 6)), int(generator.integers(2)))
        for _ in range(1200)
    ]
    return PromptTexts("random", tuple(texts[:800]), tuple(texts[800:]), ("no", "yes"), "Text", "Answer")


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[float, float, float, float | None]]:
    config = IclConfig(shots=4, prompts=10, queries=200, delta=1e-4, calibrated=False)
    texts = random_texts()
    leak = membership_leak(
        classifier(config, texts), LeaksConfig(pairs=400), [noise_of(config, len(texts.examples), 1.0)]
    )
    return {
        figure.what: (figure.measured.value, figure.measured.low or 0.0, figure.measured.high or 1.0, figure.ceiling)
        for figure in leak.figures
    }


def test_one_prompt_tells_its_example(figures: dict[str, tuple[float, float, float, float | None]]) -> None:
    value, low, _, ceiling = figures["true label's probability, one prompt"]
    assert (value > 0.6, low > 0.6, ceiling) == (True, True, None)


def test_a_private_answer_hardly_does(figures: dict[str, tuple[float, float, float, float | None]]) -> None:
    ((value, _, _, ceiling),) = [figure for what, figure in figures.items() if what.endswith("ε 1")]
    # 400 pairs: a deviation of 0.018 around 0.5 or a little more.
    assert 0.45 <= value <= 0.55
    assert ceiling is not None
    assert value < ceiling < 0.9


def test_the_ceiling_is_the_area_under_the_trade_off() -> None:
    """Dong, Roth and Su 2022: no test of G_mu has more power than Phi(Phi^-1(alpha) + mu)."""
    config = IclConfig(shots=4, prompts=10, queries=200)
    noise = noise_of(config, 800, 1.0)
    leak = membership_leak(classifier(config, random_texts()), LeaksConfig(pairs=2), [noise])
    mu = np.sqrt(2) / noise.sigma
    area, _ = integrate.quad(lambda alpha: stats.norm.cdf(stats.norm.ppf(alpha) + mu), 0, 1)
    assert leak.figures[-1].ceiling == pytest.approx(area, abs=1e-8)


def test_a_member_is_in_its_first_prompt_only() -> None:
    answering = classifier(IclConfig(shots=1, prompts=5), random_texts())
    examples = answering.wording.texts.examples
    for one in candidates(answering, 50):
        rows = one.rows.ravel().tolist()
        held = [examples[row].text for row in rows]
        assert len(set(rows)) == 5
        assert held.count(one.asked.text) == one.is_member
        assert (held[0] == one.asked.text) == one.is_member


def test_pairs_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"leaks.pairs = 21: there are 60 private examples and 20 test texts"):
        membership_leak(classifier(IclConfig(shots=1, prompts=2)), LeaksConfig(pairs=21), [])


def test_repeated_words_are_counted() -> None:
    class Echo(Table):
        def write(self, prompt: str, tokens: int) -> str:
            return prompt.partition("\n")[0]

    config = IclConfig(shots=1, prompts=3)
    leak = repeating(classifier(config, fruits(), Echo()), LeaksConfig(repeats=6))
    echoed, voted = leak.figures
    assert (echoed.measured.value, echoed.ceiling) == (1.0, None)
    assert echoed.guess is not None
    assert echoed.guess < 1
    assert (voted.measured.value, voted.ceiling) == (0.0, 0.0)
