"""The second step for encoders: in them all positions see each other, and sentences are found by changing tokens.

Where every position has one token there is nothing to be found. Else many sentences are changed at once, one position
after the other, to the token with which a deeper row space holds them best. What it holds is a sentence of the batch;
what the search does not find is not there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedpriv.attacks.texts.dager.probes import inputs_of
from fedpriv.attacks.texts.dager.spans import Span
from fedpriv.attacks.texts.dager.tokens import Kept
from fedpriv.attacks.texts.scene import padded

__all__ = ["search"]

Sentence = tuple[int, ...]

_TOGETHER = 16  # sentences that are changed at once


def search(
    network: nn.Module, spans: Sequence[Span], kept: Kept, wanted: int, starts: int, stream: torch.Generator
) -> tuple[list[Sentence], int]:
    """Return sentences that the row spaces hold, at most so many, and how many were run through the network.

    Args:
        network: with the parameters that clients were sent.
        spans: of probes that see whole sequences.
        kept: tokens by position.
        wanted: sentences of the batch.
        starts: random sentences that the search begins with, for each length that sentences may have.
        stream: draws them.
    """
    found: dict[Sentence, None] = {}
    tried = 0
    for _ in range(0, starts, _TOGETHER):
        for length in _lengths(kept):
            current = padded([_drawn(kept.tokens[:length], stream) for _ in range(_TOGETHER)], len(kept.tokens))
            current, more = _settled(network, spans, current, kept.tokens[:length])
            tried += more
            held = _held(network, spans, current, length)
            found |= {tuple(row[:length]): None for row, passes in zip(current.tolist(), held, strict=True) if passes}
            if len(found) >= wanted:
                return list(found), tried
    return list(found), tried


def _settled(
    network: nn.Module, spans: Sequence[Span], current: Tensor, choices: Sequence[Sequence[int]]
) -> tuple[Tensor, int]:
    """Change sentences (N, T) until no other token at one place is better; return them and how many were tried."""
    tried = 0
    while True:
        before = current
        for place, tokens in enumerate(choices):
            if len(tokens) > 1:
                current, more = _changed(network, spans, current, len(choices), place, tokens)
                tried += more
        if torch.equal(current, before):
            return current.unique(dim=0), tried


def _lengths(kept: Kept) -> list[int]:
    """Those that sentences may have, at least one token each.

    First those after which fewer tokens are known than before, the longest of them first: there a sentence ends.
    """
    counts = [len(tokens) for tokens in (*kept.before_end, ())]
    return sorted(range(1, len(counts)), key=lambda length: (counts[length] >= counts[length - 1], -length))


def _drawn(choices: Sequence[Sequence[int]], stream: torch.Generator) -> list[int]:
    return [tokens[int(torch.randint(len(tokens), (1,), generator=stream))] for tokens in choices]


def _changed(
    network: nn.Module, spans: Sequence[Span], current: Tensor, length: int, place: int, tokens: Sequence[int]
) -> tuple[Tensor, int]:
    """Put the best token at one place of each sentence; the one that is there stays where none is better."""
    variants = current[:, None].repeat(1, len(tokens), 1)
    variants[:, :, place] = torch.tensor(tokens)
    flat = variants.flatten(0, 1)
    shares = _shares(network, spans, flat, length).view(len(current), len(tokens))
    best = shares.argmin(dim=1)
    return variants[torch.arange(len(current)), best], len(flat)


def _shares(network: nn.Module, spans: Sequence[Span], tokens: Tensor, length: int) -> Tensor:
    """How far sentences are from the row spaces, (N,): the sum over positions and spans of squared shares."""
    inputs = inputs_of(network, [span.probe for span in spans], tokens)
    each = [span.residuals(inputs[span.probe.layer][:, :length]).square().sum(dim=1) for span in spans]
    return torch.stack(each).sum(dim=0)


def _held(network: nn.Module, spans: Sequence[Span], tokens: Tensor, length: int) -> list[bool]:
    inputs = inputs_of(network, [span.probe for span in spans], tokens)
    tried = tokens.numel()
    passed = [span.holds(inputs[span.probe.layer][:, :length], tried).all(dim=1) for span in spans]
    held: list[bool] = torch.stack(passed).all(dim=0).tolist()
    return held
