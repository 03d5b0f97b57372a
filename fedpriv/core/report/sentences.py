"""Sentences side by side: which tokens of a reading are those of the original, and which are not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from fedpriv.core.numbers import decimal, percent
from fedpriv.core.records import Sentence
from fedpriv.core.report.view import ShownResult, ShownVictim


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of which the same is to be said."""

    text: str  # of the tokens
    state: str  # read (in the original, in this order), moved (in the original, elsewhere), wrong, or empty: nothing


@dataclass(frozen=True)
class SentenceLine:
    """One line of the comparison: what an attack or a guess offers."""

    candidate: ShownResult  # whose it is
    runs: tuple[Run, ...]  # its tokens
    figures: tuple[tuple[str, str], ...]  # (name, text) of the scores


def sentence_lines(victim: ShownVictim) -> list[SentenceLine]:
    """Return what was read of an attacked sentence; attacks that read nothing of it have a line, too."""
    true = victim.original.tokens if isinstance(victim.original, Sentence) else []
    return [_line(candidate, true) for candidate in victim.candidates]


def _line(candidate: ShownResult, true: Sequence[int]) -> SentenceLine:
    words = candidate.score.words if candidate.score else None
    figures: tuple[tuple[str, str], ...] = ()
    if words is not None:
        share = words.right / words.tokens if words.tokens else 0.0
        rouge = (("ROUGE-1", words.rouge1), ("ROUGE-2", words.rouge2), ("ROUGE-L", words.rouge_l))
        figures = (*((name, decimal(value)) for name, value in rouge), ("in their places", percent(share)))
    sentence = candidate.content
    if not isinstance(sentence, Sentence):
        return SentenceLine(candidate, (), figures)
    states = _states(true, sentence.tokens)
    parts = groupby(zip(states, sentence.pieces, strict=True), key=lambda pair: pair[0])
    runs = tuple(Run(sentence.joined([piece for _, piece in part]), state) for state, part in parts)
    return SentenceLine(candidate, runs, figures)


def _states(true: Sequence[int], made: Sequence[int]) -> list[str]:
    """Of each token of a reading whether it was read, moved or is wrong."""
    matched = SequenceMatcher(None, true, made, autojunk=False).get_matching_blocks()
    read = {block.b + place for block in matched for place in range(block.size)}
    left = Counter(true) - Counter(made[place] for place in read)
    states = []
    for place, token in enumerate(made):
        if place in read:
            states.append("read")
            continue
        states.append("moved" if left[token] > 0 else "wrong")
        left[token] -= 1
    return states
