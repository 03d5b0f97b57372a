"""The query ledger: who was answered how much, on the disk before any noise is drawn.

It is a text file with one JSON object a line. The first says what the endpoint is and how many images it answers in
all; each further one is a charge: its number, the user, SHA-256 of the question, and the hash of the line before.
Charges are appended and fsynced under an exclusive lock, and the answer is computed afterwards. So a kill at any moment
may lose an answer, never a charge, and no number is given twice, also not by two processes at a time. A line that was
cut off counts as spent, by nobody: it has its number, and its hash is in the next line. A changed line breaks the
chain, and the ledger is refused. Who deletes the file, or goes on with an older copy of it, starts anew: no file can
know of that.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import Journal

OWNER = "owner"
"""The user of questions that need no key: those of whoever has the folder."""

_BEGIN = "0" * 64


@dataclass(frozen=True)
class Opening:
    """The first line."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    service: str  # SHA-256 of what the endpoint is: policy, settings, model
    answers: int  # images that it answers in all
    previous: str = _BEGIN  # zeros


@dataclass(frozen=True)
class Charge:
    """One answer that was paid for."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    number: int  # from 0, in order; each once
    user: str  # who asked
    question: str  # SHA-256 of the image
    previous: str  # SHA-256 of the line before


@dataclass(frozen=True)
class Request:
    """Questions of one user, which are all answered or not at all."""

    user: str  # who asks
    questions: tuple[str, ...]  # SHA-256 of each image


_OPENING, _CHARGE = TypeAdapter(Opening), TypeAdapter(Charge)


class QueryLedger:
    """The charges of an endpoint; several processes may have it open."""

    # limits: for each user how many answers are theirs; who is not named has no limit of their own.
    def __init__(self, path: Path, opening: Opening, limits: Mapping[str, int]) -> None:
        """Open the ledger, or begin it where there is none."""
        self.path, self.answers, self.limits = path, opening.answers, dict(limits)
        self._opening, self._last = opening, ""
        self._journal = Journal(path, _line(opening))
        self._charges: list[Charge | None] = []
        self._used: Counter[str] = Counter()
        self.refresh()

    @property
    def used(self) -> int:
        """Answers that were paid for, by everybody, as of the last look at the file."""
        return len(self._charges)

    def used_by(self, user: str) -> int:
        """Answers that a user has paid for."""
        return self._used[user]

    def question(self, number: int) -> str | None:
        """The question of a charge; ``None``: there is no such charge."""
        charge = self._charges[number] if 0 <= number < len(self._charges) else None
        return None if charge is None else charge.question

    def refresh(self) -> None:
        """Look at what other processes have charged."""
        with self._locked():
            pass

    def charge(self, requests: Sequence[Request]) -> list[range | str]:
        """Charge for requests in order, on the disk before this returns: each one's numbers, or why it is refused."""
        with self._locked():
            lines: list[bytes] = []
            decided: list[range | str] = []
            taken: Counter[str] = Counter()
            for request in requests:
                refusal = self._refusal(request, len(lines), taken[request.user])
                first = self.used + len(lines)
                decided.append(refusal or range(first, first + len(request.questions)))
                if refusal is None:
                    taken[request.user] += len(request.questions)
                    for number, question in enumerate(request.questions, first):
                        previous = _digest(lines[-1]) if lines else self._last
                        lines.append(_line(Charge(number, request.user, question, previous)))
            if lines:
                self._journal.append(lines)
            for line in lines:
                self._enter(line)
            return decided

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def _refusal(self, request: Request, charged: int, taken: int) -> str | None:
        wanted = len(request.questions)
        left = self.answers - self.used - charged
        limit = self.limits.get(request.user)
        own = None if limit is None else limit - self._used[request.user] - taken
        if own is not None and wanted > own:
            return f"answers asked for: {wanted}; left: {max(own, 0)} of the {limit} of {request.user}"
        if wanted > left:
            return f"answers asked for: {wanted}; left: {max(left, 0)} of {self.answers}"
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile, and what others wrote before is known."""
        try:
            with self._journal.locked():
                self._check_file()
                for line in self._journal.fresh():
                    self._enter(line + b"\n")
                yield
        except OSError as error:
            raise RunFailedError(f"{self.path} cannot be written: {error.strerror}; nothing was answered") from None

    def _check_file(self) -> None:
        status = os.fstat(self._journal.descriptor)
        if not self.path.exists() or not os.path.samestat(status, self.path.stat()):
            raise InputError(f"{self.path} was replaced: its charges cannot be counted any more")
        if status.st_size < self._journal.offset:
            raise InputError(f"{self.path} is shorter than it was: charges are missing")

    def _enter(self, line: bytes) -> None:
        """Take note of a line, which has to follow the one before it."""
        if not self._last:
            self._check_opening(line)
        else:
            charge = _parsed(line)
            if charge is not None and (charge.previous, charge.number) != (self._last, self.used):
                raise self._broken(self.used + 2)
            self._charges.append(charge)
            self._used["" if charge is None else charge.user] += 1
        self._last = _digest(line)

    def _broken(self, line: int) -> InputError:
        return InputError(f"{self.path}, line {line}: the chain of charges is broken; nothing is answered")

    def _check_opening(self, first: bytes) -> None:
        try:
            written = _OPENING.validate_json(first)
        except ValidationError:
            raise self._broken(1) from None
        if written != self._opening:
            raise InputError(f"{self.path} is of another endpoint, or of another budget ({written.answers} answers)")


def _parsed(line: bytes) -> Charge | None:
    """The charge in a line; ``None``: it was cut off."""
    try:
        return _CHARGE.validate_json(line)
    except ValidationError:
        return None


def _line(value: Opening | Charge) -> bytes:
    return json.dumps(vars(value)).encode() + b"\n"


def _digest(line: bytes) -> str:
    return sha256(line).hexdigest()
