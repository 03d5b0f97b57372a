"""Exposure of secrets (Carlini et al. 2019, The Secret Sharer): the rank of a secret among all possible ones.

The log-perplexity of a secret is what the model takes for its tokens, in nats, behind the public prefix. Its rank is
its place among all secrets that could have been drawn, and exposure is log2 |R| - log2 rank (Definition 4). Where there
are too many secrets to ask the model about each, log-perplexities of random ones are fitted by a skew-normal
distribution, and the exposure is -log2 of its share below the secret's (Section 4.3); what that says far beyond the
random ones is an extrapolation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedpriv.core.names import PAD
from fedpriv.data.canaries import Canaries, Numbers

Network = Callable[[Tensor], Tensor]
"""Tokens (B, T), int64, to logits (B, T, V)."""

Floats = NDArray[np.float64]

MOST_ENUMERATED = 100_000
"""Up to so many secrets the model is asked about each."""

_SAMPLED = 2048  # random secrets that the distribution is fitted to
_AT_ONCE = 256  # sequences


@dataclass(frozen=True)
class Exposure:
    """What the model remembers of a secret."""

    log_perplexity: float  # in nats
    rank: int | None  # from 1; `None` where it is extrapolated
    bits: float  # the exposure, from 0 to log2 |R|


def exposures(
    network: Network, canaries: Canaries, length: int, rng: np.random.Generator
) -> tuple[tuple[Exposure, ...], float | None]:
    """Return each secret's exposure, and the p-value of the fit; ``None`` where all secrets were ranked."""
    if canaries.space <= MOST_ENUMERATED:
        everything = enumerated(network, canaries, length)
        places = len(canaries.alphabet) ** np.arange(canaries.secrets.shape[1])[::-1]
        return tuple(ranked(everything, int(place)) for place in canaries.secrets @ places), None
    return _extrapolated(network, canaries, length, rng)


def enumerated(network: Network, canaries: Canaries, length: int) -> Floats:
    """Return the log-perplexity of every secret, (|R|,), in order, common beginnings asked together."""
    alphabet = torch.from_numpy(canaries.alphabet)
    contexts, total = torch.from_numpy(canaries.start)[None], torch.zeros(1, dtype=torch.float64)
    for _ in range(canaries.secrets.shape[1]):
        following = torch.cat([logs[:, -1, alphabet] for _, logs in log_probabilities(network, contexts, length)])
        total = (total[:, None] - following).flatten()
        repeated = contexts.repeat_interleave(len(alphabet), dim=0)
        contexts = torch.cat([repeated, alphabet.repeat(len(contexts))[:, None]], dim=1)
    return total.numpy()


def ranked(everything: Floats, place: int) -> Exposure:
    """Return the exposure of one of all secrets; those that are as likely come before it."""
    own = float(everything[place])
    rank = int(np.count_nonzero(everything <= own)) or len(everything)  # NaN has the last rank
    return Exposure(own, rank, math.log2(len(everything)) - math.log2(rank))


def log_perplexities(network: Network, canaries: Canaries, secrets: Numbers, length: int) -> Floats:
    """Return the log-perplexities, (N,), of secrets, numbers in the alphabet (N, n)."""
    chosen, begin = torch.from_numpy(canaries.alphabet[secrets]), len(canaries.start)
    tokens = torch.cat([torch.from_numpy(canaries.start).expand(len(chosen), -1), chosen], dim=1)
    parts = [
        -logs[:, begin - 1 : -1].gather(2, part[:, begin:, None]).sum(dim=(1, 2))
        for part, logs in log_probabilities(network, tokens, length)
    ]
    return torch.cat(parts).numpy()


def log_probabilities(network: Network, tokens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through sequences (N, m) with log-probabilities (n, m, V) of what comes next, float64, on the CPU."""
    for part in tokens.split(_AT_ONCE):
        logits = network(functional.pad(part, (0, length - part.shape[1]), value=PAD))
        yield part, logits[:, : part.shape[1]].cpu().double().log_softmax(dim=2)


def _extrapolated(
    network: Network, canaries: Canaries, length: int, rng: np.random.Generator
) -> tuple[tuple[Exposure, ...], float]:
    from scipy import stats  # a second to import, and only long secrets need it

    drawn = rng.integers(len(canaries.alphabet), size=(2 * _SAMPLED, canaries.secrets.shape[1]))
    fitted, other = np.split(log_perplexities(network, canaries, drawn, length), 2)
    law = stats.skewnorm(*stats.skewnorm.fit(fitted))
    most = math.log2(canaries.space)
    own = log_perplexities(network, canaries, canaries.secrets, length)
    bits = np.clip(np.nan_to_num(-law.logcdf(own) / math.log(2), nan=0.0), 0.0, most)
    found = tuple(Exposure(float(nats), None, float(each)) for nats, each in zip(own, bits, strict=True))
    return found, float(stats.kstest(other, law.cdf).pvalue)
