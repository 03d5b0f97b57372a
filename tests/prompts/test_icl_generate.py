"""Synthetic examples: by hand where the model is a table, and what is proven."""

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret
from fedpriv.prompts.generate import Writer, _decided, noise_of_label
from fedpriv.prompts.language import Floats, LanguageModel
from fedpriv.prompts.settings import IclConfig
from fedpriv.prompts.texts import Wording
from tests.prompts.worlds import fruits

TOKENS = (" red", " green", "\n")


class Table(LanguageModel):
    """Goes on with a word as often as it stands in the prompt; a line ends after two words."""

    title = "table"

    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        return np.log([[self._score(prompt, token) for token in candidates] for prompt in prompts])

    def token(self, candidate: str) -> str:
        return candidate

    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        return TOKENS[:count]

    def _score(self, prompt: str, token: str) -> float:
        begun = prompt.rpartition("\n")[2]
        if begun.count(" ") >= 2:
            return 1.0 if token == "\n" else 0.01
        return 0.01 + (prompt.count(token) if token != "\n" else 0)


def writer(config: IclConfig) -> Writer:
    return Writer(Table(), Wording(fruits(), 40), config, Secret.of_seed(2))


def test_without_noise_the_commonest_word_is_written() -> None:
    config = IclConfig(mode="generate", shots=2, prompts=5, tokens=6)
    written = writer(config).example(1, 0, 0.0)
    # Label 1 has "red" in each fourth text and "green" more often, "Text:" ends the prompt.
    own = [example.text for example in fruits().examples if example.label == 1]
    assert (written.label, len(written.text.split())) == (1, 2)
    counts = {word: sum(text.count(f" {word}") for text in own) for word in ("red", "green")}
    assert set(written.text.split()) <= set(counts)


def test_the_same_secret_writes_the_same() -> None:
    config = IclConfig(mode="generate", shots=2, prompts=5, tokens=3)
    several = [writer(config).example(0, number, 3.0).text for number in range(12)]
    assert several == [writer(config).example(0, number, 3.0).text for number in range(12)]
    assert len(set(several)) > 1


def test_noise_decides_by_the_sum_of_distributions() -> None:
    scores = np.log([[0.8, 0.2], [0.3, 0.3]])  # the second row is made to add up to 1
    generator = np.random.default_rng(1)
    chosen = [_decided(scores, 1.0, generator) for _ in range(4000)]
    expected = stats.norm.cdf((1.3 - 0.7) / np.sqrt(2))
    # 4.5 deviations, false alarm 7e-6.
    assert abs(np.mean(np.array(chosen) == 0) - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 4000)


def test_no_distribution_moves_the_sum_by_more() -> None:
    rows = np.random.default_rng(0).dirichlet(np.full(5, 0.05), 4000)
    distances = np.linalg.norm(rows[:2000] - rows[2000:], axis=1)
    assert 0.98 * np.sqrt(2) < distances.max() <= np.sqrt(2)


def test_each_label_keeps_to_the_target() -> None:
    config = IclConfig(mode="generate", shots=1, prompts=4, synthetic=2, tokens=5, target_epsilon=2.0)
    noise = noise_of_label(config, fruits(), 0)
    assert noise.guarantee.participations == 10
    assert noise.guarantee.epsilon is not None
    assert 2.0 * (1 - 1e-3) <= noise.guarantee.epsilon <= 2.0
    with pytest.raises(InputError, match="take 40 examples, and there are"):
        noise_of_label(IclConfig(mode="generate"), fruits(), 0)
