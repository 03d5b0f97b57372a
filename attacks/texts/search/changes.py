"""Small changes of a sentence: other tokens in some places, places exchanged, a token more or less."""

import torch
from torch import Tensor

from fedpriv.attacks.texts.scene import padded
from fedpriv.core.names import PAD

__all__ = ["crossed", "joined", "rearranged", "replaced", "shortened"]


def replaced(sentence: Tensor, slopes: Tensor, count: int, each: int) -> Tensor:
    """Return a sentence (L,) with one other token each, (n, L): those that promise most.

    Args:
        sentence: L tokens.
        slopes: (L, V), what each token in each place is to change; infinite where it may not stand.
        count: at most so many changes.
        each: at most so many of them in one place.
    """
    best = slopes.topk(min(each, slopes.shape[1]), dim=1, largest=False)
    values, tokens = best.values.flatten(), best.indices.flatten()
    order = values.argsort(stable=True)[:count]
    order = order[torch.isfinite(values[order])]
    made = sentence.repeat(len(order), 1)
    places = torch.arange(len(sentence), device=sentence.device).repeat_interleave(best.values.shape[1])[order]
    made[torch.arange(len(order), device=sentence.device), places] = tokens[order]
    return made


def rearranged(sentence: Tensor, known: int) -> Tensor:
    """Return a sentence (L,) with two tokens exchanged, one moved, one left out or one twice, (n, L).

    Or with its end moved to its beginning. So many known tokens there stay.
    """
    tokens: list[int] = [token for token in sentence.tolist() if token != PAD]
    length, room = len(tokens), len(sentence)
    made: dict[tuple[int, ...], None] = {}
    for one in range(known, length):
        rest = tokens[:one] + tokens[one + 1 :]
        for other in range(known, length):
            made[*rest[:other], tokens[one], *rest[other:]] = None
        for other in range(one + 1, length):
            swapped = tokens.copy()
            swapped[one], swapped[other] = swapped[other], swapped[one]
            made[tuple(swapped)] = None
        if length > 2:
            made[tuple(rest)] = None
        if length < room:
            made[*tokens[:one], tokens[one], *tokens[one:]] = None
    for place in range(known + 1, length):
        made[*tokens[:known], *tokens[place:], *tokens[known:place]] = None
    made.pop(tuple(tokens), None)
    return padded(list(made), room).to(sentence.device)


def shortened(sentence: Tensor) -> Tensor:
    """Return a sentence (L,) without its last tokens, (n, L): without one, two, and so on, down to two tokens."""
    length = int((sentence != PAD).sum())
    places = torch.arange(len(sentence), device=sentence.device)
    ends = torch.arange(2, max(length, 2), device=sentence.device)
    return torch.where(places < ends[:, None], sentence, PAD)


def crossed(one: Tensor, other: Tensor, known: int) -> Tensor:
    """Return two sentences (L,) with the tokens of one place exchanged, or of all places from one on, (n, 2, L).

    So many tokens at their beginnings are known, and the same.
    """
    length = len(one)
    single = torch.eye(length, dtype=torch.bool, device=one.device)
    behind = torch.ones(length, length, dtype=torch.bool, device=one.device).triu()
    masks = torch.cat([single[known:], behind[1:-1]])
    made = torch.stack([torch.where(masks, other, one), torch.where(masks, one, other)], dim=1)
    # Padding ends a sentence: nothing stands behind it.
    is_padding = made == PAD
    sound = (is_padding[:, :, 1:] >= is_padding[:, :, :-1]).all(dim=2).all(dim=1) & (
        made != torch.stack([one, other])
    ).any(dim=2).any(dim=1)
    return made[sound]


def joined(sentence: Tensor, better: Tensor) -> Tensor:
    """Return changes of a sentence (L,) made together, the first, the first two, and so on, (n, L).

    Args:
        sentence: L tokens.
        better: (m, L), the sentence with single changes, the best first; those that touch places of earlier ones are
            left out.
    """
    now, touched = sentence.clone(), torch.zeros_like(sentence, dtype=torch.bool)
    made = []
    for other in better:
        changed = other != sentence
        if bool((changed & touched).any()):
            continue
        now, touched = torch.where(changed, other, now), touched | changed
        made.append(now)
    return torch.stack(made)
