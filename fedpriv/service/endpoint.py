"""Endpoints: a policy's answers to questions, in this process alone, or charged to a ledger that outlives it."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedpriv.attacks.questions import Answers, UsedUpError
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import Journal
from fedpriv.core.randomness import Secret
from fedpriv.data.datasets import Dataset
from fedpriv.service.answer_sources import Features, pixels
from fedpriv.service.ledger import OWNER, QueryLedger, Request
from fedpriv.service.policies import AnswerPolicy, Facts, Scores

_AT_ONCE = 256  # images of one forward pass


@dataclass(frozen=True, eq=False)
class Oracle:
    """What answers are computed from, without any count."""

    policy: AnswerPolicy  # what is shown of the scores
    facts: Facts  # public sizes
    shape: tuple[int, int, int]  # (C, H, W) of an image
    scores: Callable[[Tensor], Scores]  # images (n, C, H, W) -> (n, classes) float64
    scale: float  # of the noise
    secret: Secret  # what the noise of an answer is drawn from, with its number and the question

    def answers(self, images: Tensor, numbers: Sequence[int]) -> Answers:
        """Answer images whose answers have these numbers; the same image and number give the same noise again."""
        draws = self.policy.draws_of(self.scale, self._streams(images, numbers), self.facts)
        return self.policy.answer(self.scores(images), draws)

    def _streams(self, images: Tensor, numbers: Sequence[int]) -> list[np.random.Generator]:
        if not (self.policy.draws and self.policy.repeats_noise):
            return []
        asked = zip(numbers, map(digest, pixels(images)), strict=True)
        return [self.secret.stream("answer", number, bytes.fromhex(question)).numpy() for number, question in asked]


def digest(image: NDArray[np.float64]) -> str:
    """SHA-256 of an image from :func:`pixels`, by which a question is known."""
    return sha256(np.ascontiguousarray(image, dtype="<f8").tobytes()).hexdigest()


class Endpoint:
    """Answers in this process, counted; see :class:`fedpriv.attacks.questions.Questions`.

    Its noise is its own: no answer that it gives has a number in a query ledger. ``exact`` are the scores of images
    that it answers from, without policy and noise: for a referee, and never for an attack.
    """

    def __init__(self, oracle: Oracle) -> None:
        """Open it."""
        self.classes, self.shape, self.asked = oracle.facts.classes, oracle.shape, 0
        self.policy, self.facts, self.exact = oracle.policy, oracle.facts, oracle.scores
        self._oracle = oracle

    def ask(self, images: Tensor) -> Answers:
        """Answer questions; see :class:`fedpriv.attacks.questions.Questions`."""
        checked = checked_images(images, self.shape)
        numbers = range(self.asked, self.asked + len(checked))
        self.asked += len(checked)
        return self._oracle.answers(checked, numbers)


def checked_images(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return images, if they are some of this shape."""
    if images.ndim != 4 or tuple(images.shape[1:]) != shape or not len(images):
        wanted = " x ".join(str(size) for size in ("n", *shape))
        given = " x ".join(str(size) for size in images.shape) or "one number"
        raise InputError(f"images of {given}: expected {wanted}, n from 1")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InputError(f"images of {str(images.dtype).removeprefix('torch.')}: bytes, or numbers on [0, 1]")
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise InputError("images: a pixel is not a number on [0, 1]")
    return images


def network_scores(network: torch.nn.Module, dataset: Dataset) -> Callable[[Tensor], Scores]:
    """Return how images (n, C, H, W) get logits (n, classes), float64, from a network in evaluation mode."""
    first = next(network.parameters())

    def scores(images: Tensor) -> Scores:
        with torch.no_grad():
            parts = [network(dataset.normalise(part.to(first.device), first.dtype)) for part in images.split(_AT_ONCE)]
            logits: Scores = torch.cat(parts).double().cpu().numpy()
        return logits

    return scores


def head_scores(weights: Scores, features: Features) -> Callable[[Tensor], Scores]:
    """Return how images (n, C, H, W) get logits (n, classes), float64, from the convex head."""

    def scores(images: Tensor) -> Scores:
        return features(images) @ weights.T

    return scores


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
        self._ledger, self._journal = ledger, Journal(path)
        self._known: dict[str, Given] = {}

    def refresh(self) -> None:
        """Read what other processes, or earlier ones, have answered."""
        with self._journal.locked():
            self._read()

    def get(self, question: str) -> Given | None:
        """The answer to a question; ``None``: there is none yet."""
        return self._known.get(question)

    def add(self, given: Sequence[Given]) -> None:
        """Keep answers."""
        try:
            with self._journal.locked():
                self._read()
                self._journal.append([json.dumps(vars(each)).encode() + b"\n" for each in given], durable=False)
        except OSError as error:
            raise RunFailedError(f"answers cannot be kept: {error.strerror}; they are charged, and lost") from None
        self._known = {each.question: each for each in given} | self._known

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def _read(self) -> None:
        for line in self._journal.fresh():
            with suppress(ValidationError):
                given = _GIVEN.validate_json(line)
                if self._ledger.question(given.number) == given.question:
                    self._known.setdefault(given.question, given)


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
