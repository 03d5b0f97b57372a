"""Records of PATE: each question, and all together."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.files import write_whole
from fedpriv.core.npz import read_arrays, read_headers
from fedpriv.core.reading import FileRecord, Record
from fedpriv.core.records import Failure
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


_ANSWERS = "answers.jsonl"


def read_answers(folder: RunFolder) -> tuple[VotedAnswer, ...]:
    """Return every question that was put to the aggregator; empty before."""
    return folder.whole_lines(_ANSWERS, VotedAnswer)


def write_answers(folder: RunFolder, answers: Sequence[VotedAnswer]) -> None:
    """Write answers.jsonl."""
    folder.write_jsonl(_ANSWERS, [asdict(answer) for answer in answers])


_FILE = "private/votes.npz"


@dataclass(frozen=True)
class Poll:
    """private/votes.npz: what clients voted, for no eyes but those of the server that they trust with it."""

    # (T, Q), int16, the class that each teacher sees; (0, Q) where votes were summed under masks
    votes: NDArray[np.int16]
    clients: NDArray[np.int64]  # (T,), int64, whose teachers these are; (M,) who is in the sum
    # (Q, K), float64, votes for each class; with noise in them where they were summed under masks
    counts: NDArray[np.float64]
    failures: tuple[Failure, ...]  # who was left out, and why
    bytes_up: int  # the size of what was sent


def keep_poll(folder: RunFolder, poll: Poll) -> None:
    """Write what clients voted, for the owner's eyes only, onto the disk: they are not asked again."""
    path = folder.path / _FILE
    content = io.BytesIO()
    np.savez(
        content,
        votes=poll.votes,
        clients=poll.clients,
        counts=poll.counts,
        failed=np.array([failure.client for failure in poll.failures], dtype=np.int64),
        reasons=np.array([failure.reason for failure in poll.failures], dtype="<U300"),
        bytes_up=np.array(poll.bytes_up, dtype=np.int64),
    )
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_whole(path, content.getvalue(), mode=0o600, durable=True)


def kept_poll(folder: RunFolder) -> Poll | None:
    """What clients voted; ``None`` until they have, and in runs in which they do not."""
    path = folder.path / _FILE
    if not path.exists():
        return None
    headers = read_headers(path, ("votes", "clients", "counts", "failed", "reasons", "bytes_up"))
    if sum(header.nbytes for header in headers.values()) > path.stat().st_size:
        raise InputError(f"{path} is damaged: it is packed")
    try:
        read = read_arrays(path, headers)
        failures = zip(read["failed"].tolist(), read["reasons"].tolist(), strict=True)
        failed = tuple(Failure(int(client), str(reason)) for client, reason in failures)
        poll = Poll(read["votes"], read["clients"], read["counts"], failed, int(read["bytes_up"]))
        if poll.counts.ndim != 2 or poll.votes.shape[1:] != poll.counts.shape[:1]:
            raise ValueError(f"votes of shape {poll.votes.shape} and counts of shape {poll.counts.shape}")
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {one_line(error)}") from None
    return poll
