"""From texts to sequences of tokens: padded or packed, for labels or for the next token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from typing_extensions import TypeAliasType

from fedpriv.core.names import END, PAD, START
from fedpriv.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_TARGET = -100
"""What stands where nothing is predicted; torch's cross entropy leaves it out."""

Numbers = TypeAliasType("Numbers", "NDArray[np.int64]")


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What is to be known of a data set of texts, beside its tokens.

    Attributes:
        task: classify: the label of a sequence; next: each token from those before it.
        tokenizer: that made the tokens.
        keys: whose each training sequence is, (N,), numbers of ``key_names``; ``None``: nobody says.
        key_names: the keys.
        packed: whether sequences are cut from texts laid end to end.
    """

    task: Literal["classify", "next"]
    tokenizer: Tokenizer
    keys: Numbers | None = None
    key_names: tuple[str, ...] = ()
    packed: bool = False

    def chosen(self, rows: Numbers) -> TextFacts:
        """Return the facts of some training sequences."""
        return self if self.keys is None else replace(self, keys=self.keys[rows])


def labelled(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Numbers:
    """Return sequences (N, length), each a text with its beginning, cut off or padded at the end."""
    return _padded([[START, *tokenizer.encode(text)][:length] for text in texts], length)


def next_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], owners: Sequence[int], length: int, pack: bool
) -> tuple[Numbers, Numbers, Numbers]:
    """Return inputs (N, length), the token after each, (N, length), and whose a sequence is, (N,)."""
    import numpy as np

    streams = _together(tokenizer, texts, owners) if pack else _apart(tokenizer, texts, owners)
    pieces, whose = [], []
    for owner, stream in streams:
        starts = range(0, len(stream) - 1, length) if pack else (0,)
        pieces += [stream[start : start + length + 1] for start in starts]
        whose += [owner] * len(starts)
    tokens = _padded(pieces, length + 1)
    targets = np.where(tokens[:, 1:] == PAD, NO_TARGET, tokens[:, 1:])
    return tokens[:, :-1], targets, np.array(whose, dtype=np.int64)


def _apart(tokenizer: Tokenizer, texts: Sequence[str], owners: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    for text, owner in zip(texts, owners, strict=True):
        yield owner, [START, *tokenizer.encode(text), END]


def _together(tokenizer: Tokenizer, texts: Sequence[str], owners: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    streams: dict[int, list[int]] = {}
    for owner, tokens in _apart(tokenizer, texts, owners):
        streams.setdefault(owner, []).extend(tokens)
    yield from streams.items()


def _padded(rows: Sequence[Sequence[int]], length: int) -> Numbers:
    import numpy as np

    tokens = np.full((len(rows), length), PAD, dtype=np.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return tokens
