"""A client's ledger of answers, written to disk before the noise of an answer is drawn.

A client has one file, ``client-K.jsonl``. Its first line says what a release is, and of which arrays; each further one
is an answer: its number, the run, the round. Lines are appended and fsynced under an exclusive lock, and the answer
leaves afterwards. So a kill may lose an answer, never its place in the ledger, and a restart gives no budget back. A
line that was cut off counts as an answer. ``client-K.json`` has what is proven by now. A line ``failed`` says that the
app failed and an answer's update was zero; both files stay at the client.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedpriv.accounting import Release, ceilings, guarantee
from fedpriv.core.errors import InputError, RefusedError
from fedpriv.core.files import Journal, as_json, write_whole, writing_to
from fedpriv.core.numbers import several
from fedpriv.core.plan import Plan
from fedpriv.core.records import Guarantee, LedgerLine

TOLD = 1 / 100  # which of 100 images, as in the ledger of a run


@dataclass(frozen=True)
class Layout:
    """Which arrays of a record a release is made of, as it was when the client first answered."""

    types: Mapping[str, str]  # of all arrays of the record, as torch names them
    trained: tuple[str, ...]  # those that get noise, each tensor once
    copies: Mapping[str, str] = field(default_factory=dict)  # tied array -> the trained one that it is
    statistics: tuple[str, ...] = ()  # running statistics


_LAYOUT = TypeAdapter(Layout)


def read_layout(folder: Path, client: int) -> Layout | None:
    """Return what the first line of a client's ledger says; ``None``: none, or a ledger of an earlier version."""
    path = folder / f"client-{client}.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        told = _opening_of(file.readline(), path).get("layout")
    return None if told is None else _LAYOUT.validate_python(told)


def _opening_of(line: bytes, path: Path) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise InputError(f"{path} is damaged: its first line says nothing of a mechanism")
    return told


def line_of(client: int, found: Guarantee, release: Release) -> LedgerLine:
    """Return what is proven of a client, with a ceiling for these releases."""
    (told,) = ceilings(release, [TOLD])
    return replace(LedgerLine.of(client, 1, found, release.noise, {"told": told}), examples=None)


@dataclass(frozen=True)
class AnswerLedger:
    """The ledger of one client."""

    folder: Path  # of all clients' ledgers on this machine
    plan: Plan  # of the client: what a release is
    most_answers: int | None  # as often it answers, and no more; `None`: no limit
    most_epsilon: float | None  # an answer that would take it above is not given; `None`: no limit
    layout: Layout  # of the arrays
    notes: tuple[str, ...] = ()  # what a reader must know with the figures
    part: str = ""  # of what leaves; in the names of the files

    def charge(self, run: int, round_number: int | None) -> LedgerLine:
        """Enter one more answer and return what is proven with it; whoever calls this may release once."""
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._opened() as journal:
            answers, failed = self._count(journal)
            line = self._line(answers + 1)
            self._check(answers + 1, line)
            journal.append([_line_of({"answer": answers + 1, "run": run, "round": round_number})])
            self._tell(line, failed)
        return line

    def note_failure(self, line: LedgerLine) -> None:
        """Write down, at the client alone, that the app failed and the answer's update was zero."""
        with self._opened() as journal:
            _, failed = self._count(journal)
            journal.append([_line_of({"failed": line.participations})])
            self._tell(line, failed + 1)

    def _tell(self, line: LedgerLine, failed: int) -> None:
        """Write what is proven by now, and how often the app failed."""
        told = f"the app failed {several(failed, 'time')}, and these updates were zero; this file stays at the client"
        own = replace(line, notes=(*line.notes, told)) if failed else line
        write_whole(self._answers.with_suffix(".json"), as_json(own), mode=0o600, durable=True)

    @property
    def _answers(self) -> Path:
        return self.folder / f"client-{self.plan.client}{self.part}.jsonl"

    @property
    def _released(self) -> dict[str, Any]:
        mechanism = self.plan.config.model_dump(mode="json", exclude_none=True)
        return {"mechanism": mechanism, "tensors": [*self.plan.tensors]}

    @contextmanager
    def _opened(self) -> Iterator[Journal]:
        """The file, to which nobody else adds meanwhile."""
        opening = _line_of({**self._released, "layout": asdict(self.layout)})
        with closing(Journal(self._answers, opening, mode=0o600)) as journal, journal.locked():
            yield journal

    def _count(self, journal: Journal) -> tuple[int, int]:
        """Answers, and those of them whose app failed; a line that was cut off by a kill counts."""
        opening, *lines = journal.fresh()
        told = _opening_of(opening, self._answers)
        if {key: told.get(key) for key in self._released} != self._released:
            raise InputError(
                f"{self._answers} is the ledger of another mechanism or model: what it counts still counts; name "
                "another privatise.folder only for clients whose data were in none of its answers"
            )
        failed = sum(1 for line in lines if line.startswith(b'{"failed": ') and line.endswith(b"}"))
        return sum(1 for line in lines if line) - failed, failed

    def _line(self, answers: int) -> LedgerLine:
        release = self.plan.accounted(range(1, answers + 1))
        line = line_of(self.plan.client, guarantee(release), release)
        return replace(line, notes=(*line.notes, *self.notes))

    def _check(self, answers: int, line: LedgerLine) -> None:
        client, most = self.plan.client, self.most_epsilon
        if self.most_answers is not None and answers > self.most_answers:
            raise RefusedError(f"client {client} has answered {answers - 1} times, as often as privatise.rounds allows")
        if most is not None and (line.epsilon is None or line.epsilon > most):
            raise RefusedError(
                f"client {client} has answered {answers - 1} times; one more would take it above "
                f"privatise.target_epsilon = {most:g}"
            )


def _line_of(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
