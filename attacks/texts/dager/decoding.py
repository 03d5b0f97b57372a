"""The second step for decoders: sentences grow from left to right, while a deeper row space holds their prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.texts.dager.probes import inputs_of
from fedpriv.attacks.texts.dager.spans import Span
from fedpriv.attacks.texts.dager.tokens import Kept

__all__ = ["Grown", "grow"]


@dataclass(frozen=True)
class Grown:
    """Sentences, as tokens.

    Attributes:
        whole: those that no token extends.
        inner: their beginnings, each of which may be a sentence of the batch as well.
        tried: prefixes that were run through the network.
    """

    whole: tuple[tuple[int, ...], ...]
    inner: tuple[tuple[int, ...], ...]
    tried: int


def grow(network: nn.Module, spans: Sequence[Span], kept: Kept, most: int) -> Grown:
    """Extend each prefix by each token of the next position, and keep what the row spaces hold.

    Without positions a first token that is repeated attends to nothing new, and cannot be told from itself: it is not
    repeated. First tokens that no span sees are not tested, and are no sentences by themselves.

    Args:
        network: with the parameters that clients were sent.
        spans: of probes that see prefixes; their inputs at the last token have to be in all of them.
        kept: tokens by position.
        most: prefixes that are kept at one position.

    Raises:
        AttackRefused: more prefixes pass.
    """
    prefixes: list[tuple[int, ...]] = [()]
    whole: list[tuple[int, ...]] = []
    inner: list[tuple[int, ...]] = []
    tried = 0
    blind = not any(span.sees_first for span in spans)
    for place, tokens in enumerate(kept.tokens):
        longer = [(*prefix, token) for prefix in prefixes for token in tokens if kept.placed or {*prefix} != {token}]
        tried += len(longer)
        passed = _passed(network, spans, longer) if longer else []
        extended = {prefix[:-1] for prefix in passed}
        whole += [prefix for prefix in prefixes if len(prefix) > blind and prefix not in extended]
        inner += [prefix for prefix in prefixes if prefix in extended and len(prefix) > 1]
        if len(passed) > most and place >= blind:
            raise AttackRefused(
                f"rank: {len(passed)} beginnings of {place + 1} tokens are in the row space of {spans[0].probe.layer}, "
                f"which has {spans[0].free} dimensions less than inputs; adversary.dager.most_sentences = {most} at "
                "most"
            )
        prefixes = passed
        if not prefixes:
            break
    return Grown((*whole, *prefixes), tuple(inner), tried)


def _passed(network: nn.Module, spans: Sequence[Span], prefixes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    inputs = inputs_of(network, [span.probe for span in spans], torch.tensor(prefixes))
    tried = len(prefixes)
    seeing = [span for span in spans if span.sees_first or len(prefixes[0]) > 1]
    if not seeing:
        return list(prefixes)
    held = torch.stack([span.holds(inputs[span.probe.layer][:, -1], tried) for span in seeing]).all(dim=0)
    return [prefix for prefix, passes in zip(prefixes, held.tolist(), strict=True) if passes]
