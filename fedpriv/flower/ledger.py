"""A client's ledger of answers, written to disk before the noise of an answer is drawn.

A client has one file, ``client-K.jsonl``. Its first line says what a release is; each further one is an answer: its
number, the run, the round. Lines are appended and fsynced under an exclusive lock, and the answer leaves afterwards. So
a kill may lose an answer, never its place in the ledger, and a restart gives no budget back. A line that was cut off
counts as an answer. Beside it, ``client-K.json`` has what is proven by now.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedpriv.accounting import ceilings
from fedpriv.core.errors import InputError, RefusedError
from fedpriv.core.files import append_line, open_unlinked, sync, write_once, write_whole, writing_to
from fedpriv.core.plan import Plan
from fedpriv.core.records import LedgerLine

TOLD = 1 / 100  # which of 100 images, as in the ledger of a run


@dataclass(frozen=True)
class AnswerLedger:
    """The ledger of one client."""

    folder: Path  # of all clients' ledgers on this machine
    plan: Plan  # of the client: what a release is
    most_answers: int | None  # as often it answers, and no more; `None`: no limit
    most_epsilon: float | None  # an answer that would take it above is not given; `None`: no limit
    notes: tuple[str, ...] = ()  # what a reader must know with the figures

    def charge(self, run: int, round_number: int | None) -> LedgerLine:
        """Enter one more answer and return what is proven with it; whoever calls this may release once.

        Run and round, which some servers do not tell, are written down for people.
        """
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_once(self._answers, self._opening, mode=0o600)
        with self._locked():
            number = self._count() + 1
            line = self._line(number)
            self._check(number, line)
            append_line(self._answers, json.dumps({"answer": number, "run": run, "round": round_number}))
            sync(self._answers)
            text = json.dumps(asdict(line), indent=2, allow_nan=False)
            write_whole(self._answers.with_suffix(".json"), f"{text}\n".encode(), mode=0o600, durable=True)
        return line

    @property
    def _answers(self) -> Path:
        return self.folder / f"client-{self.plan.client}.jsonl"

    @property
    def _opening(self) -> bytes:
        mechanism = self.plan.config.model_dump(mode="json", exclude_none=True)
        return json.dumps({"mechanism": mechanism, "tensors": self.plan.tensors}).encode() + b"\n"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else counts meanwhile."""
        descriptor = open_unlinked(self._answers, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _count(self) -> int:
        opening, *answers = self._answers.read_bytes().split(b"\n")
        if opening + b"\n" != self._opening:
            raise InputError(
                f"{self._answers} is the ledger of another mechanism or model: what it counts still counts; name "
                "another privatise.folder only for clients whose data were in none of its answers"
            )
        if answers and answers[-1]:  # cut off by a kill; it is ended here, and counts
            append_line(self._answers, "")
        return sum(1 for line in answers if line)

    def _line(self, answers: int) -> LedgerLine:
        rounds = range(1, answers + 1)
        guarantee = self.plan.guarantee(rounds)
        (told,) = ceilings(self.plan.accounted(rounds), [TOLD])
        line = LedgerLine.of(self.plan.client, 1, guarantee, self.plan.config.noise, {"told": told})
        return replace(line, examples=None, notes=(*line.notes, *self.notes))

    def _check(self, answers: int, line: LedgerLine) -> None:
        client, most = self.plan.client, self.most_epsilon
        if self.most_answers is not None and answers > self.most_answers:
            raise RefusedError(f"client {client} has answered {answers - 1} times, as often as privatise.rounds allows")
        if most is not None and (line.epsilon is None or line.epsilon > most):
            raise RefusedError(
                f"client {client} has answered {answers - 1} times; one more would take it above "
                f"privatise.target_epsilon = {most:g}"
            )
