"""Answers by votes of prompts (Wu, Panda, Wang and Mittal, "Privacy-preserving in-context learning", ICLR 2024).

For each question M prompts of N examples are made, each example in one of them at most. Each prompt votes for the label
that the model finds likeliest; the answer is the label with the largest count after normal noise. If one example is
replaced, one prompt votes differently: the sensitivity is sqrt(2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.aggregators import SENSITIVITY, NoisyMax, SampledUse, least_sigma, votes_guarantee
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.core.records import Guarantee
from fedpriv.prompts.language import Floats, LanguageModel
from fedpriv.prompts.settings import IclConfig
from fedpriv.prompts.texts import CONTENT_FREE, Example, Wording, check_enough, drawn

_CHANGED = "all examples of one client are replaced by any others"


@dataclass(frozen=True)
class Classifier:
    """Who answers."""

    language: LanguageModel  # the model
    wording: Wording  # of prompts; its texts are the examples
    config: IclConfig  # how many prompts of how many examples
    secret: Secret  # draws who is in which prompt; what is proven rests on nobody knowing it
    seed: int  # shares the examples out to clients

    def scores(self, prefixes: Sequence[str], question: str) -> Floats:
        """Return how likely each label is behind each prefix, (prefixes, labels); corrected if the settings say so."""
        asked = [question, CONTENT_FREE] if self.config.calibrated else [question]
        endings = [self.wording.ending(text, any(prefixes)) for text in asked]
        logarithms = self.language.after(prefixes, endings, self.wording.candidates)
        return logarithms[:, 0] - logarithms[:, 1] if self.config.calibrated else logarithms[:, 0]

    def zero_shot(self, question: str) -> Floats:
        """Return how likely each label is without examples, (labels,)."""
        return self.scores([""], question)[0]

    def votes(self, number: int, question: str, client: int | None = None) -> NDArray[np.int64]:
        """Return what each prompt votes for, (voters,); voters of one client stand together."""
        clients = range(self.config.clients) if client is None else (client,)
        prefixes = [self.wording.prefix(examples) for each in clients for examples in self._prompts(number, each)]
        return self.scores(prefixes, question).argmax(axis=1)

    def _prompts(self, number: int, client: int) -> Iterator[list[Example]]:
        examples, config, own = self.wording.texts.examples, self.config, self.shares[client]
        generator = self.secret.stream("icl-prompts", number, client).numpy()
        for rows in own[drawn(len(own), config.prompts, config.shots, generator)]:
            yield [examples[row] for row in rows]

    @cached_property
    def shares(self) -> list[NDArray[np.int64]]:
        """The numbers of each client's examples; all of them together where examples are protected."""
        count, clients = len(self.wording.texts.examples), self.config.clients
        if clients == 1:
            return [np.arange(count)]
        if clients > count:
            raise InputError(key="icl.clients", given=clients, allowed=f"there are {count} examples")
        order = numpy_stream(self.seed, "icl-clients").permutation(count)
        return [np.sort(part) for part in np.array_split(order, clients)]


@dataclass(frozen=True)
class VoteNoise:
    """The noise on counts, and what all answers together prove."""

    epsilon: float  # that it was calibrated for
    sigma: float  # deviation on each count, in votes
    guarantee: Guarantee  # of all answers


def noise_of(config: IclConfig, examples: int, epsilon: float) -> VoteNoise:
    """Return the least noise with which all answers keep to ``epsilon``."""
    if config.unit == "client":
        check_enough(examples // config.clients, config.prompts, config.shots, f" for each of {config.clients} clients")
        sigma = least_sigma(config.queries, epsilon, config.delta, config.prompts)
        return VoteNoise(epsilon, sigma, _by_client(config, sigma))
    use = _use(config, examples)
    sigma = use.least_sigma(epsilon)
    return VoteNoise(epsilon, sigma, use.guarantee(sigma))


def together(config: IclConfig, examples: int, noises: Sequence[VoteNoise]) -> Guarantee:
    """Return what is proven of answers with each of these noises on the same votes: precisions add up."""
    sigma = sum(noise.sigma**-2 for noise in noises) ** -0.5
    return _by_client(config, sigma) if config.unit == "client" else _use(config, examples).guarantee(sigma)


def answers(votes: NDArray[np.int64], labels: int, sigma: float, secret: Secret, level: int) -> NDArray[np.int64]:
    """Answer each question (Q,) by its votes (Q, voters)."""
    counts = np.array([np.bincount(row, minlength=labels) for row in votes])
    if sigma == 0:
        return counts.argmax(axis=1)
    generators = (secret.stream("icl-noise", level, number).numpy() for number in range(len(votes)))
    decided = [NoisyMax(sigma).decide(row, generator) for row, generator in zip(counts, generators, strict=True)]
    return np.array([answer for answer in decided if answer is not None])


def _use(config: IclConfig, examples: int) -> SampledUse:
    taken = config.prompts * config.shots
    check_enough(examples, config.prompts, config.shots)
    return SampledUse(SENSITIVITY, taken / examples, config.queries, config.delta)


def _by_client(config: IclConfig, sigma: float) -> Guarantee:
    aggregator, asked = NoisyMax(sigma), config.queries
    claim = aggregator.claim(asked, asked, config.delta, config.prompts)
    notes = (f"A client has {config.prompts} votes in each question.",)
    return votes_guarantee(aggregator, claim, asked, config.delta, config.prompts, _CHANGED, notes)
