"""The query ledger: who was answered how much, on the disk before any noise is drawn.

It is a text file with one JSON object a line. The first says what the endpoint is and how many images it answers in
all; each further one is a charge: its number, the user, SHA-256 of the question, and the hash of the line before.
Charges are appended and fsynced under an exclusive lock, and the answer is computed afterwards. So a kill at any moment
may lose an answer, never a charge, and no number is given twice, also not by two processes at a time. A last line that
was cut off counts as spent: a line is written in its place, and where a kill cuts that off, the next process completes
it. A changed line breaks the chain, and the ledger is refused. Who deletes the file, or goes on with an older copy of
it, starts anew: no file can know of that.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import open_unlinked, write_once

OWNER = "owner"
"""The user of questions that need no key: those of whoever has the folder."""

_BEGIN = "0" * 64
_TORN = "torn"


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
    question: str  # SHA-256 of the image; `torn` where the line before it was cut off, and this one stands for it
    previous: str  # SHA-256 of the line before


@dataclass(frozen=True)
class Request:
    """Questions of one user, which are all answered or not at all."""

    user: str  # who asks
    questions: tuple[str, ...]  # SHA-256 of each image


class _Entry(NamedTuple):
    """A charge, its line with the end of it, and the line's hash."""

    charge: Charge
    line: bytes
    digest: str


_OPENING, _CHARGE = TypeAdapter(Opening), TypeAdapter(Charge)


class QueryLedger:
    """The charges of an endpoint; several processes may have it open."""

    # limits: for each user how many answers are theirs; who is not named has no limit of their own.
    def __init__(self, path: Path, opening: Opening, limits: Mapping[str, int]) -> None:
        """Open the ledger, or begin it where there is none."""
        self.path, self.answers, self.limits = path, opening.answers, dict(limits)
        write_once(path, _line(opening))
        self._descriptor = open_unlinked(path, os.O_RDWR | os.O_APPEND)
        self._offset, self._lines, self._last = 0, 0, _BEGIN
        self._charges: list[Charge] = []
        self._used: Counter[str] = Counter()
        with self._locked():
            self._check_opening(opening)

    @property
    def used(self) -> int:
        """Answers that were paid for, by everybody, as of the last look at the file."""
        return len(self._charges)

    def used_by(self, user: str) -> int:
        """Answers that a user has paid for."""
        return self._used[user]

    def question(self, number: int) -> str | None:
        """The question of a charge; ``None``: there is no such charge."""
        return self._charges[number].question if 0 <= number < len(self._charges) else None

    def refresh(self) -> None:
        """Look at what other processes have charged."""
        with self._locked():
            pass

    def charge(self, requests: Sequence[Request]) -> list[range | str]:
        """Charge for requests in order, on the disk before this returns: each one's numbers, or why it is refused."""
        with self._locked():
            charges: list[_Entry] = []
            decided: list[range | str] = []
            taken: Counter[str] = Counter()
            for request in requests:
                refusal = self._refusal(request, len(charges), taken[request.user])
                first = self.used + len(charges)
                decided.append(refusal or range(first, first + len(request.questions)))
                if refusal is None:
                    taken[request.user] += len(request.questions)
                    charges += self._made(request, first, charges[-1].digest if charges else self._last)
            self._write(charges)
            return decided

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

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

    def _made(self, request: Request, first: int, previous: str) -> list[_Entry]:
        made = []
        for number, question in enumerate(request.questions, first):
            charge = Charge(number, request.user, question, previous)
            line = _line(charge)
            previous = sha256(line).hexdigest()
            made.append(_Entry(charge, line, previous))
        return made

    def _write(self, charges: Sequence[_Entry]) -> None:
        if not charges:
            return
        self._append(b"".join(entry.line for entry in charges))
        for entry in charges:
            self._enter(entry)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile, and what others wrote before is known."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            self._catch_up()
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        status = os.fstat(self._descriptor)
        if not self.path.exists() or not os.path.samestat(status, self.path.stat()):
            raise InputError(f"{self.path} was replaced: its charges cannot be counted any more")
        if status.st_size < self._offset:
            raise InputError(f"{self.path} is shorter than it was: charges are missing")
        content = os.pread(self._descriptor, status.st_size - self._offset, self._offset)
        *lines, last = content.split(b"\n")
        # A whole line that is none, at the end: it was cut off, and is being mended.
        begun = self._lines + len(lines) > 1 and bool(lines) and _parsed(lines[-1]) is None
        torn, mending = (lines.pop(), b"\n" + last) if begun else (last, b"")
        for at, line in enumerate(lines):
            self._read(line, lines[at + 1 : at + 2])
        if torn:
            self._mend(torn, mending)

    def _read(self, line: bytes, following: Sequence[bytes]) -> None:
        if not self._lines:
            self._skip(line)
            return
        charge = _parsed(line)
        if charge is None and self._stands_for(following, line):
            self._skip(line)
            return
        if charge is None or charge.previous != self._last or charge.number != len(self._charges):
            raise self._broken()
        self._enter(_Entry(charge, line + b"\n", sha256(line + b"\n").hexdigest()))

    def _stands_for(self, following: Sequence[bytes], line: bytes) -> bool:
        """Whether the next line was written in the place of this one, which had been cut off."""
        after = _parsed(following[0]) if following else None
        return after is not None and after.question == _TORN and after.previous == sha256(line + b"\n").hexdigest()

    def _mend(self, torn: bytes, begun: bytes) -> None:
        """Whoever wrote it was killed: it counts as spent. Where it is no charge, another line says so behind it.

        ``begun``: what is written behind it already, by somebody who was killed, too.
        """
        if _parsed(torn) is not None:  # only its end is missing
            self._append(b"\n")
            self._read(torn, [])
            return
        mark = _line(Charge(len(self._charges), "", _TORN, sha256(torn + b"\n").hexdigest()))
        missing = (b"\n" + mark).removeprefix(begun)
        if begun + missing != b"\n" + mark:
            raise self._broken()
        self._append(missing)
        self._read(torn, [mark[:-1]])
        self._read(mark[:-1], [])

    def _broken(self) -> InputError:
        return InputError(f"{self.path}, line {self._lines + 1}: the chain of charges is broken; nothing is answered")

    def _append(self, content: bytes) -> None:
        """Have it all on the disk before this returns."""
        try:
            written = os.write(self._descriptor, content)
            if written < len(content):
                raise OSError(None, "only a part of it was written")
            os.fsync(self._descriptor)
        except OSError as error:
            raise RunFailedError(f"{self.path} cannot be written: {error.strerror}; nothing was answered") from None

    def _skip(self, line: bytes) -> None:
        self._pass(line + b"\n", sha256(line + b"\n").hexdigest())

    def _pass(self, line: bytes, digest: str) -> None:
        self._offset += len(line)
        self._lines += 1
        self._last = digest

    def _enter(self, entry: _Entry) -> None:
        self._pass(entry.line, entry.digest)
        self._charges.append(entry.charge)
        self._used[entry.charge.user] += 1

    def _check_opening(self, opening: Opening) -> None:
        first = os.pread(self._descriptor, 4096, 0).split(b"\n")[0]
        try:
            written = _OPENING.validate_json(first)
        except ValidationError:
            raise InputError(f"{self.path}, line 1: the chain of charges is broken; nothing is answered") from None
        if written != opening:
            raise InputError(f"{self.path} is of another endpoint, or of another budget ({written.answers} answers)")


def _parsed(line: bytes) -> Charge | None:
    try:
        return _CHARGE.validate_json(line)
    except ValidationError:
        return None


def _line(value: Opening | Charge) -> bytes:
    return json.dumps(vars(value)).encode() + b"\n"
