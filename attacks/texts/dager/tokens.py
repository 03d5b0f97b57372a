"""The first step: which tokens may stand at each position, by the row spaces of what sees single tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.texts.dager.probes import Probe, inputs_of
from fedpriv.attacks.texts.dager.spans import Span
from fedpriv.core.names import PAD

__all__ = ["Kept", "kept_tokens", "token_inputs"]

_CHUNK = 512  # tokens of which inputs are held at once
_UNLIKE = 1e-5  # relative difference from which an input depends on its position


@dataclass(frozen=True, eq=False)
class Kept:
    """Tokens that may stand at each position.

    Attributes:
        tokens: of each position, those nearest to the row space first.
        placed: whether inputs depend on the position: else all positions have the same tokens.
    """

    tokens: tuple[tuple[int, ...], ...]
    placed: bool

    @property
    def before_end(self) -> tuple[tuple[int, ...], ...]:
        """Those of positions before the first that has none."""
        return tuple(takewhile(bool, self.tokens))


def token_inputs(network: nn.Module, probes: Sequence[Probe], tokens: Tensor, length: int) -> dict[str, Tensor]:
    """Return what goes into probes that see single tokens, (V, T, n), of tokens (V,) at every position."""
    return inputs_of(network, probes, tokens[:, None].expand(-1, length))


def kept_tokens(
    network: nn.Module, spans: Sequence[Span], vocabulary: int, length: int, most: int, opening: tuple[int, ...]
) -> Kept:
    """Try all tokens at all positions.

    Padding is in no text, and a gradient has nothing of it. A first position that no span sees may have any token.

    Args:
        network: with the parameters that clients were sent.
        spans: of probes that see single tokens; a token has to be in all of them.
        vocabulary: V.
        length: T.
        most: at one position.
        opening: the tokens with which every sequence begins.

    Raises:
        AttackRefused: more tokens than that pass, or none does at the first position.
    """
    tried = vocabulary * length
    probes = [span.probe for span in spans]
    found: list[list[tuple[float, int]]] = [[] for _ in range(length)]
    placed = False
    unseeing = torch.tensor([not span.sees_first for span in spans])
    for numbers in torch.arange(vocabulary).split(_CHUNK):
        inputs = token_inputs(network, probes, numbers, length)
        shares = torch.stack([span.residuals(inputs[span.probe.layer]) for span in spans])
        passed = torch.stack([span.holds(inputs[span.probe.layer], tried) for span in spans])
        shares[unseeing, :, 0], passed[unseeing, :, 0] = 0.0, True
        placed = placed or any(map(_is_placed, inputs.values()))
        for row, place in passed.all(dim=0).nonzero().tolist():
            token = int(numbers[row])
            if token != PAD:
                found[place].append((float(shares[:, row, place].max()), token))
    if bool(unseeing.any()) and opening:
        found[0] = [(0.0, opening[0])]
    tokens = tuple(tuple(token for _, token in sorted(each)) for each in found)
    if not tokens[0]:
        why = "noise edge" if any(span.noisy for span in spans) else "rank"
        raise AttackRefused(f"{why}: no token at the first position is in the row space of {probes[0].layer}")
    tested = range(int(unseeing.all()), length)
    crowded = max(tested, key=lambda place: len(tokens[place]))
    if len(tokens[crowded]) > most:
        raise AttackRefused(
            f"rank: at position {crowded} {len(tokens[crowded])} tokens are in the row space of {probes[0].layer}, "
            f"which has {spans[0].free} dimensions less than inputs; adversary.dager.most_tokens = {most} at most"
        )
    return Kept(tokens, placed)


def _is_placed(inputs: Tensor) -> bool:
    differences = (inputs - inputs[:, :1]).norm(dim=2)
    return bool((differences > _UNLIKE * inputs.norm(dim=2)).any())
