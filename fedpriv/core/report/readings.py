"""Rows of tables and sentences in the report, next to what the attacks read: cell by cell, token by token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from fedpriv.core.numbers import decimal, percent
from fedpriv.core.records import NUMBER_TOLERANCE, AttackResult, RowScore, Sentence
from fedpriv.core.report.view import Content, ShownResult, ShownVictim

MOST_COLUMNS = 40  # that are shown of one row


@dataclass(frozen=True)
class ShownCell:
    """One cell that an attack or a guess offers."""

    text: str  # as a person reads it
    # read (right, or within the tolerance, where the guess is not), right (so is the guess), wrong, or empty where it
    # was not scored
    state: str
    off: str = ""  # the error of a number that is not read, as a share of its column's range; else empty


@dataclass(frozen=True)
class RowTable:
    """One attacked row."""

    candidates: tuple[ShownResult, ...]  # what was made of it, one a column of the report
    lines: tuple[tuple[str, str, tuple[ShownCell, ...]], ...]  # (column's name, true text, a cell for each candidate)
    hidden: int  # columns that are not shown: those in which all candidates are right first


def row_table(victim: ShownVictim) -> RowTable:
    """Return what the report shows of an attacked row."""
    shown = tuple(candidate for candidate in victim.candidates if candidate.content is not None)
    guess = next((candidate.score.cells for candidate in shown if candidate.upload == "none" and candidate.score), None)
    lines = [
        (name, text, tuple(_cell(candidate, name, guess) for candidate in shown))
        for name, text in _cells(victim.original).items()
    ]
    kept = lines
    if len(lines) > MOST_COLUMNS:
        order = sorted(
            range(len(lines)),
            key=lambda place: (all((cell.state in ("read", "right")) for cell in lines[place][2]), place),
        )
        kept = [lines[place] for place in sorted(order[:MOST_COLUMNS])]
    return RowTable(shown, tuple(kept), len(lines) - len(kept))


def column_table(results: tuple[AttackResult, ...]) -> list[tuple[str, list[str]]]:
    """What each attack read of each column: the share of right values, or the median error of numbers."""
    scored = [result.rows for result in results if result.rows is not None]
    if not scored:
        return []
    named = [(name, [percent(rows.categories[name]) for rows in scored]) for name in scored[0].categories]
    return named + [(name, [f"± {percent(rows.numbers[name])}" for rows in scored]) for name in scored[0].numbers]


def _cells(content: Content | None) -> Mapping[str, str]:
    return content if isinstance(content, Mapping) else {}


def _cell(candidate: ShownResult, name: str, guess: RowScore | None) -> ShownCell:
    text = _cells(candidate.content).get(name, "n/a")
    scores = candidate.score.cells if candidate.score else None
    if scores is None:
        return ShownCell(text, "")
    right = "right" if guess is not None and _right(guess, name) else "read"
    return ShownCell(text, right if _right(scores, name) else "wrong", _off(scores.numbers, name))


def _right(scores: RowScore, name: str) -> bool:
    return scores.categories[name] if name in scores.categories else scores.numbers.get(name, 1.0) <= NUMBER_TOLERANCE


def _off(numbers: Mapping[str, float], name: str) -> str:
    error = numbers.get(name, 0.0)
    return percent(error) if error > NUMBER_TOLERANCE else ""


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
