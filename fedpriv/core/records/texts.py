"""The records of sentences that attacks read out of uploads, token by token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedpriv.core.records.reading import Record


@dataclass(frozen=True)
class Sentence(Record):
    """A sentence as a file in reconstructions/ has it.

    Attributes:
        text: as the tokenizer writes it.
        tokens: without those that begin, end or pad it.
        pieces: the text of each token by itself.
    """

    text: str
    tokens: list[int]
    pieces: list[str]

    def joined(self, pieces: Sequence[str]) -> str:
        """Put pieces of it together, with spaces between them where its tokens are words."""
        return (" " if " ".join(self.pieces) == self.text else "").join(pieces)


@dataclass(frozen=True)
class SentenceScore(Record):
    """How well one sentence was read; tokens that begin, end or pad a text do not count.

    Attributes:
        rouge1: F-measure of the tokens that both have (ROUGE-1, Lin 2004), from 0 to 1.
        rouge2: the same of pairs of neighbouring tokens; of sentences of one token 0.
        rouge_l: the same of the longest common subsequence.
        right: tokens of the true sentence that stand at their own place.
        tokens: of the true sentence.
        exact: whether both are the same, token by token.
    """

    rouge1: float
    rouge2: float
    rouge_l: float
    right: int
    tokens: int
    exact: bool


@dataclass(frozen=True)
class SentenceResult(Record):
    """What an attack read of all sentences.

    Attributes:
        rouge1: mean over the sentences; those for which nothing was offered count with 0.
        rouge2: likewise.
        rouge_l: likewise.
        exact: sentences that were read whole.
        right: tokens at their own place, of all sentences.
        tokens: of all sentences.
    """

    rouge1: float
    rouge2: float
    rouge_l: float
    exact: int
    right: int
    tokens: int

    @property
    def share_right(self) -> float:
        """Of the tokens."""
        return self.right / self.tokens if self.tokens else 0.0


def sentence_result(scores: Iterable[SentenceScore | None]) -> SentenceResult | None:
    """Return what was read of all sentences; ``None``: none were attacked."""
    read = [score for score in scores if score is not None]
    if not read:
        return None
    return SentenceResult(
        rouge1=sum(score.rouge1 for score in read) / len(read),
        rouge2=sum(score.rouge2 for score in read) / len(read),
        rouge_l=sum(score.rouge_l for score in read) / len(read),
        exact=sum(score.exact for score in read),
        right=sum(score.right for score in read),
        tokens=sum(score.tokens for score in read),
    )
