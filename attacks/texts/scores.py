"""How well sentences were read: ROUGE over tokens, exact sentences, and which sentence goes with which.

A token is one of the run's tokenizer: a word, a piece of one, or a byte. Those that begin, end or pad a text are left
out, here and in all figures. ROUGE is that of Lin 2004 as torchmetrics computes it, as an F-measure with beta = 1.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.core.names import END, PAD, START
from fedpriv.core.records import SentenceScore

__all__ = ["bare", "likeness", "pairs", "sentence_score"]

_KEYS = ("rouge1", "rouge2", "rougeL")


def bare(tokens: Tensor) -> list[int]:
    """Return the tokens of one sequence that are part of a text: without beginnings, ends and padding."""
    numbers: list[int] = tokens.flatten().tolist()
    return [number for number in numbers if number not in (PAD, START, END)]


def sentence_score(true: Sequence[int], made: Sequence[int]) -> SentenceScore:
    """Compare a sentence with the true one, as :func:`bare` returns both."""
    from torchmetrics.functional.text.rouge import rouge_score  # seconds to import

    given, wanted = (" ".join(map(str, tokens)) for tokens in (made, true))
    figures = rouge_score(given, wanted, rouge_keys=_KEYS, normalizer=str, tokenizer=str.split)
    one, two, longest = (float(figures[f"{key}_fmeasure"]) for key in _KEYS)
    right = sum(token == other for token, other in zip(true, made, strict=False))
    return SentenceScore(one, two, longest, right, len(true), list(true) == list(made))


def likeness(true: Sequence[int], made: Sequence[int]) -> float:
    """Return how alike two sentences are, from 0 to 1: the mean of the shares of tokens in both, and in both places."""
    total = len(true) + len(made)
    if total == 0:
        return 1.0
    shared = (Counter(true) & Counter(made)).total()
    placed = sum(token == other for token, other in zip(true, made, strict=False))
    return (shared + placed) / total


def pairs(true: Sequence[Sequence[int]], made: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return which sentence goes with which true one: one to one, by the highest total likeness."""
    if not true or not made:
        return {}
    alike = np.array([[likeness(one, other) for other in made] for one in true])
    rows, columns = linear_sum_assignment(alike, maximize=True)
    return dict(zip(rows.tolist(), columns.tolist(), strict=True))
