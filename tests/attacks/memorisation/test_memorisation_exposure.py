"""Exposure and extraction against brute force, a network that knows a text by heart, and one that knows nothing."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedpriv.attacks.memorisation import audit
from fedpriv.attacks.memorisation.audit import (
    Network,
    enumerated,
    exposures,
    extraction,
    log_perplexities,
    mean_losses,
    ranked,
    sampled,
    windows,
    written_secrets,
)
from fedpriv.core.names import END, PAD, START
from fedpriv.data.canaries import Canaries

VOCABULARY, LENGTH = 12, 9
START_TOKENS = np.array([START, 5, 6])


def canaries(secrets: list[list[int]], size: int = 3) -> Canaries:
    return Canaries(START_TOKENS, np.arange(4, 4 + size), np.array(secrets), np.ones(len(secrets) // 2, dtype=np.int64))


def table(seed: int) -> Network:
    """What comes next depends on the last two tokens and the place, as a table of random numbers says."""
    logits = torch.randn(LENGTH, VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def network(tokens: Tensor) -> Tensor:
        before = tokens.roll(1, dims=1)
        return logits[torch.arange(tokens.shape[1]), tokens, before]

    return network


def by_heart(text: list[int]) -> Network:
    """Goes on as one text does, whatever came before."""
    following = torch.tensor([*text[1:], PAD])

    def network(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        logits[:, torch.arange(len(text)), following] = 50.0
        return logits

    return network


def test_all_secrets_are_ranked_as_one_after_the_other() -> None:
    network, given = table(0), canaries([[0, 1, 2], [2, 2, 2]])
    everything = enumerated(network, given, LENGTH)
    alone = []
    for secret in itertools.product(range(3), repeat=3):
        tokens = [*START_TOKENS.tolist(), *(4 + number for number in secret)]
        logs = network(torch.tensor([tokens + [PAD] * (LENGTH - len(tokens))])).double().log_softmax(dim=2)[0]
        alone.append(-sum(float(logs[place - 1, tokens[place]]) for place in range(3, 6)))
    assert everything == pytest.approx(alone)
    assert log_perplexities(network, given, given.secrets, LENGTH) == pytest.approx([alone[5], alone[26]])
    found, fit = exposures(network, given, LENGTH, np.random.default_rng(0))
    assert fit is None
    order = np.argsort(alone).tolist()
    assert [one.rank for one in found] == [1 + order.index(5), 1 + order.index(26)]
    assert [one.bits for one in found] == pytest.approx([math.log2(27 / (1 + order.index(p))) for p in (5, 26)])


def test_a_network_that_knows_a_secret_by_heart_gives_all_of_it_away() -> None:
    text = [START, 5, 6, 4, 6, 5, END, PAD, PAD]
    known, other = exposures(by_heart(text), canaries([[0, 2, 1], [1, 1, 1]]), LENGTH, np.random.default_rng(0))[0]
    assert written_secrets(np.array([text]), canaries([[0, 2, 1], [1, 1, 1]])).tolist() == [True, False]
    assert known.rank == 1
    assert known.bits == math.log2(27)
    assert other.bits < 2


def test_a_network_that_knows_nothing_ranks_secrets_uniformly() -> None:
    """The sums of 100 exposures of independent uniform ranks: 5 standard deviations, by chance less than 1 in 10^6."""
    bits = []
    for seed in range(100):
        secrets = np.random.default_rng(1000 + seed).integers(3, size=(2, 3)).tolist()
        bits.append(exposures(table(seed), canaries(secrets), LENGTH, np.random.default_rng(0))[0][0].bits)
    ranks = np.arange(1, 28)
    mean, deviation = np.log2(27 / ranks).mean(), np.log2(27 / ranks).std()
    assert abs(np.mean(bits) - mean) < 5 * deviation / math.sqrt(len(bits))


def test_equal_likelihoods_count_against_the_attacker() -> None:
    assert ranked(np.zeros(8), 3).rank == 8
    assert ranked(np.zeros(8), 3).bits == 0
    assert ranked(np.array([math.nan, 1.0]), 0).bits == 0


def test_exposures_of_many_secrets_are_extrapolated() -> None:
    """The fit is compared with the truth, which is the rank among all of them."""
    network, length = table(7), 9
    secrets = np.random.default_rng(1).integers(3, size=(8, 5))
    given = canaries(secrets.tolist())
    exact = exposures(network, given, length, np.random.default_rng(0))[0]
    fitted, p = audit._extrapolated(network, given, length, np.random.default_rng(0))
    assert all(one.rank is None for one in fitted)
    assert 0 <= p <= 1
    assert [one.log_perplexity for one in fitted] == pytest.approx([one.log_perplexity for one in exact])
    assert np.abs(np.array([one.bits for one in fitted]) - [one.bits for one in exact]).max() < 1.0


def test_texts_are_drawn_as_the_network_says() -> None:
    """The second token's counts against the network's probabilities: a chi-square test at 1 in 10^6."""
    network = table(3)
    drawn = sampled(network, 4000, LENGTH, torch.Generator().manual_seed(5))
    assert drawn.shape == (4000, LENGTH)
    assert bool((drawn[:, 0] == START).all())
    first = torch.full((1, LENGTH), PAD)
    first[0, 0] = START
    expected = 4000 * network(first)[0, 0].double().softmax(dim=0).numpy()
    # The token before the first is padding, and so it was in the drawing.
    counts = np.bincount(drawn[:, 1].numpy(), minlength=VOCABULARY)
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6
    ended = (drawn[:, :-1] == END) | (drawn[:, :-1] == PAD)
    assert bool((drawn[:, 1:][ended] == PAD).all())


def test_losses_are_means_over_what_is_no_padding() -> None:
    network = table(2)
    tokens = torch.tensor([[START, 5, 7, END, PAD, PAD, PAD, PAD, PAD]])
    logs = network(tokens).double().log_softmax(dim=2)[0]
    expected = -(logs[0, 5] + logs[1, 7] + logs[2, END]) / 3
    assert float(mean_losses(network, tokens)) == pytest.approx(float(expected))


def test_what_only_the_training_data_have_is_counted() -> None:
    def text(*tokens: int) -> list[int]:
        return [*tokens, *[PAD] * (6 - len(tokens))]

    train = np.array([text(4, 5, 6, 7), text(8, 9, 10)])
    test = np.array([text(4, 5, 6), text(9, 9, 9)])
    written = np.array([text(3, 5, 6, 7), text(4, 5, 6), text(9, 9, 9), text(11, 11)])
    assert len(windows(train, 3)) == 3
    found, shown = extraction(written, np.array([3.0, 2.0, 1.0, 0.0]), train, test, 3)
    assert (found.found, found.of_train, found.control, found.of_test) == (1, 2, 1, 1)
    assert (found.samples, found.with_found, found.ranked, found.ranked_found) == (4, 1, 1, 1)
    assert [each.tolist() for each in shown] == [[5, 6, 7]]
    assert found.rate == 0.5
    assert extraction(written, np.array([0.0, 1.0, 2.0, 3.0]), train, test, 3)[0].ranked_found == 0


def test_a_network_that_knows_a_text_by_heart_writes_it_again() -> None:
    text = [START, 5, 6, 4, 6, 5, END, PAD, PAD]
    written = sampled(by_heart(text), 3, LENGTH, torch.Generator().manual_seed(0)).numpy()
    train, test = np.array([text]), np.array([[START, 7, 7, 7, 7, 7, END, PAD, PAD]])
    found, _ = extraction(written, np.zeros(3), train, test, 4)
    assert (found.found, found.with_found, found.control) == (4, 3, 0)
    assert found.rate == 1


def test_what_stands_in_given_prompts_is_not_written_by_chance() -> None:
    """A model that writes nothing right has no test sequence; two of them are in its prompt, and one is not."""
    train, test, prompt = (np.array([row]) for row in ([9, 9, 9, 9, 9], [5, 6, 7, 8, 4], [5, 6, 7, 8, PAD]))
    written = np.array([[5, 6, 7, 8, 3]])
    figures, _ = extraction(written, np.zeros(1), train, test, 3, prompt)
    assert (figures.control, figures.of_test, figures.of_train) == (0, 1, 1)
    assert extraction(test, np.zeros(1), train, test, 3, prompt)[0].control == 1


def test_what_follows_prompts_is_written_and_counted_alone() -> None:
    text = [START, 5, 6, 4, 6, 5, END, PAD, PAD]
    prompts = torch.tensor([[START, 5, 6, *[PAD] * 6], [START, 7, 6, *[PAD] * 6]])
    written = sampled(by_heart(text), 20, LENGTH, torch.Generator().manual_seed(0), prompts)
    assert {row[:3] for row in map(tuple, written.tolist())} == {(START, 5, 6), (START, 7, 6)}
    assert {row[3:] for row in map(tuple, written.tolist()) if row[1] == 5} == {tuple(text[3:])}
    network, tokens = table(2), torch.tensor([[START, 5, 7, 4, END, *[PAD] * 4]])
    logs = network(tokens).double().log_softmax(dim=2)[0]
    expected = -(logs[2, 4] + logs[3, END]) / 2
    assert float(mean_losses(network, tokens, (5, 7))) == pytest.approx(float(expected))
