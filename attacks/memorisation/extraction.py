"""Extraction by sampling (Carlini et al. 2021, Extracting Training Data from Large Language Models).

The model writes texts from their beginning. They are put in order by how much likelier it finds them than the model
before training did, and searched for sequences of tokens that stand in the training data and not in the public test
data. What of the test data alone is found the same way shows how often a text is right by chance.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedpriv.attacks.memorisation.exposure import Network, log_probabilities
from fedpriv.attacks.memorisation.records import ExtractedTexts
from fedpriv.core.names import END, PAD, START
from fedpriv.data.canaries import Canaries, Numbers

_AT_ONCE = 256  # sequences
_RANKED = 10  # a tenth of the samples comes first
_SHOWN = 5


def sampled(network: Network, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Let a model write texts, each token drawn from what it says comes next, until their end."""
    tokens = torch.full((count, length), PAD, dtype=torch.int64)
    tokens[:, 0] = START
    for place in range(1, length):
        logits = torch.cat([network(part)[:, place - 1].cpu() for part in tokens.split(_AT_ONCE)])
        drawn = torch.multinomial(logits.double().softmax(dim=1), 1, generator=generator)[:, 0]
        over = (tokens[:, place - 1] == END) | (tokens[:, place - 1] == PAD)
        tokens[:, place] = drawn.masked_fill(over, PAD)
    return tokens


def mean_losses(network: Network, tokens: Tensor) -> Tensor:
    """Return what a model takes for each text (N, T), in nats per token, (N,), in float64, on the CPU."""
    parts = []
    for part, logs in log_probabilities(network, tokens, tokens.shape[1]):
        following = functional.pad(part[:, 1:], (0, 1), value=PAD)
        counted = following != PAD
        losses = -logs.gather(2, following[:, :, None])[:, :, 0] * counted
        parts.append(losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1))
    return torch.cat(parts)


def windows(texts: Iterable[Numbers], tokens: int) -> set[bytes]:
    """Return all different sequences of so many tokens in texts, each (T,), padding left out."""
    found: set[bytes] = set()
    for text in texts:
        kept = text[text != PAD].astype(np.int32)
        found.update(kept[start : start + tokens].tobytes() for start in range(len(kept) - tokens + 1))
    return found


def written_secrets(written: Numbers, canaries: Canaries) -> NDArray[np.bool_]:
    """Return whether each secret, (2 N,), stands behind its prefix in one of the texts (M, T) that a model wrote."""
    begin = np.repeat(canaries.start[None, 1:], len(canaries.secrets), axis=0)
    wanted = np.concatenate([begin, canaries.alphabet[canaries.secrets]], axis=1).astype(np.int32)
    found = windows(written, wanted.shape[1])
    return np.array([row.tobytes() in found for row in wanted])


def extraction(
    written: Numbers, gains: Numbers, train: Numbers, test: Numbers, tokens: int
) -> tuple[ExtractedTexts, list[Numbers]]:
    """Search what a model wrote, ordered by ``gains`` (how much likelier training made it), for its training data."""
    ours, public = windows(train, tokens), windows(test, tokens)
    secret, other = ours - public, public - ours
    each = [windows([text], tokens) for text in written]
    hits = np.array([bool(own & secret) for own in each], dtype=bool)
    everything = set().union(*each)
    found = sorted(everything & secret)
    first = np.argsort(-gains, kind="stable")[: max(1, len(written) // _RANKED)]
    figures = ExtractedTexts(
        samples=len(written),
        tokens=tokens,
        found=len(found),
        of_train=len(secret),
        control=len(everything & other),
        of_test=len(other),
        with_found=int(hits.sum()),
        ranked=len(first),
        ranked_found=int(hits[first].sum()),
    )
    return figures, [np.frombuffer(one, dtype=np.int32).astype(np.int64) for one in found[:_SHOWN]]
