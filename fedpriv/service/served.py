"""The endpoint that outlives its process: questions of many users, each charged before it is answered."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedpriv.attacks.questions import Answers, UsedUpError
from fedpriv.core.errors import RunFailedError
from fedpriv.core.files import open_unlinked
from fedpriv.service.endpoint import Oracle, checked_images, digest
from fedpriv.service.features import pixels
from fedpriv.service.ledger import OWNER, QueryLedger, Request


@dataclass(frozen=True)
class Given:
    """One answer, as it is kept."""

    number: int  # of its charge
    question: str  # SHA-256 of the image
    label: int  # the class
    # one a class, `None` for each that is not shown; `None` for all: labels only
    probabilities: tuple[float | None, ...] | None


@dataclass(frozen=True, eq=False)
class Question:
    """What a user asks at a time: all of it is answered, or nothing."""

    user: str  # a name in the ledger
    images: Tensor  # (n, C, H, W), from checked_images


@dataclass(frozen=True)
class QuestionOutcome:
    """What became of a question."""

    given: tuple[Given, ...] = ()  # its answers, one an image; empty where it is refused
    charged: int = 0  # how many of them were paid for now
    refusal: str = ""  # why it is refused; empty: it is not


_GIVEN = TypeAdapter(Given)


class StoredAnswers:
    """answers.jsonl: what was answered, free to ask again; lines that do not fit their charge count as none."""

    def __init__(self, path: Path, ledger: QueryLedger) -> None:
        """Open the file, or make it."""
        self._ledger = ledger
        self._descriptor = open_unlinked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._offset = 0
        self._known: dict[str, Given] = {}

    def refresh(self) -> None:
        """Read what other processes, or earlier ones, have answered."""
        size = os.fstat(self._descriptor).st_size
        lines = os.pread(self._descriptor, max(size - self._offset, 0), self._offset).split(b"\n")[:-1]
        for line in lines:
            self._offset += len(line) + 1
            try:
                given = _GIVEN.validate_json(line)
            except ValidationError:
                continue
            if self._ledger.question(given.number) == given.question:
                self._known.setdefault(given.question, given)

    def get(self, question: str) -> Given | None:
        """The answer to a question; ``None``: there is none yet."""
        return self._known.get(question)

    def add(self, given: Sequence[Given]) -> None:
        """Keep answers."""
        # Behind a line that a kill cut off, a new one begins.
        size = os.fstat(self._descriptor).st_size
        end = b"\n" if size and os.pread(self._descriptor, 1, size - 1) != b"\n" else b""
        try:
            os.write(self._descriptor, end + b"".join(json.dumps(vars(each)).encode() + b"\n" for each in given))
        except OSError as error:
            raise RunFailedError(f"answers cannot be kept: {error.strerror}; they are charged, and lost") from None
        self.refresh()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Served:
    """An endpoint with a query ledger; see :class:`fedpriv.attacks.questions.Questions`, as whoever has the folder."""

    def __init__(self, oracle: Oracle, ledger: QueryLedger, stored: StoredAnswers | None) -> None:
        """Open it."""
        self.oracle, self.ledger, self.classes = oracle, ledger, oracle.facts.classes
        self._stored = stored
        ledger.refresh()
        if stored is not None:
            stored.refresh()

    @property
    def asked(self) -> int:
        """Answers that were paid for, by everybody."""
        return self.ledger.used

    def ask(self, images: Tensor) -> Answers:
        """Answer questions of whoever has the folder; see :class:`fedpriv.attacks.questions.Questions`."""
        (outcome,) = self.answer([Question(OWNER, checked_images(images, self.oracle.shape))])
        if outcome.refusal:
            raise UsedUpError(outcome.refusal)
        labels = np.array([given.label for given in outcome.given], dtype=np.int64)
        if self.oracle.policy.labels_only:
            return Answers(labels)
        return Answers(labels, np.array([given.probabilities for given in outcome.given], dtype=np.float64))

    def answer(self, questions: Sequence[Question]) -> list[QuestionOutcome]:
        """Answer what several users ask, in one batch: charged together, then computed together."""
        asked = [[digest(image) for image in pixels(question.images)] for question in questions]
        if self._stored is not None:
            self.ledger.refresh()
            self._stored.refresh()
        new = [self._new(digests) for digests in asked]
        requests = [
            Request(question.user, tuple(digests[at] for at in places))
            for question, digests, places in zip(questions, asked, new, strict=True)
        ]
        decided = self.ledger.charge(requests)
        fresh = self._computed(questions, asked, new, decided)
        return [
            QuestionOutcome(refusal=numbers) if isinstance(numbers, str) else self._outcome(digests, numbers, fresh)
            for digests, numbers in zip(asked, decided, strict=True)
        ]

    def close(self) -> None:
        """Close its files."""
        self.ledger.close()
        if self._stored is not None:
            self._stored.close()

    def _new(self, digests: Sequence[str]) -> list[int]:
        """Places of the images that have to be paid for: with stored answers each picture once."""
        if self._stored is None:
            return list(range(len(digests)))
        first = {digest: at for at, digest in reversed(list(enumerate(digests)))}
        return sorted(at for digest, at in first.items() if self._stored.get(digest) is None)

    def _computed(
        self,
        questions: Sequence[Question],
        asked: Sequence[Sequence[str]],
        new: Sequence[Sequence[int]],
        decided: Sequence[range | str],
    ) -> dict[int, Given]:
        """Charge's number -> its answer."""
        images: list[Tensor] = []
        digests: list[str] = []
        numbers: list[int] = []
        for question, known, places, granted in zip(questions, asked, new, decided, strict=True):
            if isinstance(granted, range) and places:
                images.append(question.images[list(places)])
                digests += [known[at] for at in places]
                numbers += granted
        if not numbers:
            return {}
        answers = self.oracle.answers(torch.cat([torch.from_numpy(pixels(image)) for image in images]), numbers)
        fresh = [_given(answers, at, number, digests[at]) for at, number in enumerate(numbers)]
        if self._stored is not None:
            self._stored.add(fresh)
        return {given.number: given for given in fresh}

    def _outcome(self, digests: Sequence[str], numbers: range, fresh: dict[int, Given]) -> QuestionOutcome:
        if self._stored is None:
            return QuestionOutcome(tuple(fresh[number] for number in numbers), len(numbers))
        own = {fresh[number].question: fresh[number] for number in numbers}
        stored = (own.get(digest) or self._stored.get(digest) for digest in digests)
        return QuestionOutcome(tuple(given for given in stored if given is not None), len(numbers))


def _given(answers: Answers, at: int, number: int, question: str) -> Given:
    if answers.probabilities is None:
        return Given(number, question, int(answers.labels[at]), None)
    shown = tuple(None if math.isnan(value) else value for value in answers.probabilities[at].tolist())
    return Given(number, question, int(answers.labels[at]), shown)
