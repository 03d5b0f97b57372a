"""Records of PATE: each question, and all together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from pydantic import Field, TypeAdapter

from fedpriv.core.records.reading import FileRecord, Record
from fedpriv.core.runs import RunFolder

_Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class VotedAnswer(Record):
    """One line of answers.jsonl: one question, which is public as its answer is."""

    query: Annotated[int, Field(ge=0)]  # the number of the image in the test data
    answered: bool  # whether there is an answer
    label: Annotated[int, Field(ge=0)] | None  # the class; `None` without an answer

    def __post_init__(self) -> None:
        if self.answered != (self.label is not None):
            raise ValueError("answered and label do not agree")


class Knowledge(FileRecord):
    """knowledge.json: what the answers are worth, and what they prove; no figure here tells of votes but as proven.

    ``planned`` images were put to the vote; ``asked`` of them were put to the aggregator before the budget ended, and
    ``answered`` have an answer, of which the share ``right`` names the class of the test data. ``student`` is the
    accuracy on the ``evaluated`` test images that nobody was asked about. ``spent`` is the epsilon of the answers
    given; the claim is the ledger's. ``sanitised`` is a data-dependent epsilon with noise on it: an estimate, which is
    above or below the true one.
    """

    path: ClassVar[str] = "knowledge.json"

    aggregator: str
    noise_at: str
    teachers: int
    voted: int
    planned: int
    asked: int
    answered: int
    right: _Share | None
    student: _Share
    evaluated: int
    budget: float | None
    spent: float | None
    delta: float
    sanitised: float | None = None


_ANSWERS, _ANSWER = "answers.jsonl", TypeAdapter(VotedAnswer)


def read_answers(folder: RunFolder) -> tuple[VotedAnswer, ...]:
    """Return every question that was put to the aggregator; empty before."""
    return folder.whole_lines(_ANSWERS, _ANSWER)


def write_answers(folder: RunFolder, answers: Sequence[VotedAnswer]) -> None:
    """Write answers.jsonl."""
    folder.write_jsonl(_ANSWERS, [asdict(answer) for answer in answers])
