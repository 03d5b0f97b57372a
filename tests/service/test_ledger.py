"""The query ledger under attack: kills, two processes, torn and edited lines, and random schedules."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.service.ledger import Opening, QueryLedger, Request

OPENING = Opening("ab" * 32, 100)


def ledger(folder: Path, answers: int = 100, limits: dict[str, int] | None = None) -> QueryLedger:
    return QueryLedger(folder / "charges.jsonl", Opening("ab" * 32, answers), limits or {})


def ask(book: QueryLedger, *counts: int, user: str = "ann") -> list[range | str]:
    return book.charge([Request(user, ("00",) * count) for count in counts])


def test_numbers_are_given_once_and_a_restart_gives_nothing_back(tmp_path: Path) -> None:
    book = ledger(tmp_path, 10)
    assert ask(book, 3, 2) == [range(3), range(3, 5)]
    book.close()
    again = ledger(tmp_path, 10)
    assert (again.used, again.used_by("ann"), again.used_by("bob")) == (5, 5, 0)
    assert ask(again, 5, 1) == [range(5, 10), "answers asked for: 1; left: 0 of 10"]
    assert ask(ledger(tmp_path, 10), 1) == ["answers asked for: 1; left: 0 of 10"]
    assert len((tmp_path / "charges.jsonl").read_text().splitlines()) == 11


def test_a_user_has_a_budget_within_that_of_all(tmp_path: Path) -> None:
    book = ledger(tmp_path, 6, {"ann": 3})
    assert ask(book, 2, 2, 1) == [range(2), "answers asked for: 2; left: 1 of the 3 of ann", range(2, 3)]
    assert ask(book, 4, 3, user="bob") == ["answers asked for: 4; left: 3 of 6", range(3, 6)]


def test_two_that_have_it_open_know_of_each_other(tmp_path: Path) -> None:
    one, two = ledger(tmp_path, 10), ledger(tmp_path, 10)
    assert (ask(one, 3), ask(two, 4), ask(one, 3)) == ([range(3)], [range(3, 7)], [range(7, 10)])
    assert ask(two, 1) == ["answers asked for: 1; left: 0 of 10"]
    assert (one.question(9), one.question(10)) == ("00", None)


def test_random_schedules_against_a_counting_model(tmp_path: Path) -> None:
    """Requests of three users through two openings, some of them reopened, with torn lines in between."""
    stream = np.random.default_rng(1)
    for schedule in range(8):
        folder = tmp_path / str(schedule)
        folder.mkdir()
        limits = {"ann": 9, "bob": 14}
        books = [ledger(folder, 30, limits) for _ in range(2)]
        used: Counter[str] = Counter()
        given: list[int] = []
        for _ in range(50):
            at = int(stream.integers(2))
            user, count = str(stream.choice(["ann", "bob", "cy"])), int(stream.integers(1, 4))
            (found,) = ask(books[at], count, user=user)
            fits = used.total() + count <= 30 and used[user] + count <= limits.get(user, 30)
            assert isinstance(found, range) == fits
            if isinstance(found, range):
                used[user] += count
                given += found
            if stream.random() < 0.1:
                with (folder / "charges.jsonl").open("ab") as file:
                    file.write(b'{"number": 7, "us'[: int(stream.integers(1, 17))])
                used["torn"] += 1
            if stream.random() < 0.2:
                books[at] = ledger(folder, 30, limits)
                assert books[at].used == used.total()
            if used.total() >= 30:
                break
        assert len(set(given)) == len(given) and max(given) < max(30, used.total())


@pytest.mark.parametrize("cut", [1, 20, "whole"])
def test_a_line_that_was_cut_off_counts_as_spent(tmp_path: Path, cut: int | str) -> None:
    book = ledger(tmp_path)
    ask(book, 4)
    book.close()
    path = tmp_path / "charges.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-1] if cut == "whole" else content[: content[:-1].rindex(b"\n") + 1 + int(cut)])
    again = ledger(tmp_path)
    assert again.used == 4
    assert ask(again, 2) == [range(again.used - 2, again.used)]
    assert ledger(tmp_path).used == again.used


class Killed(BaseException):
    """Stands in for SIGKILL, which no handler sees."""


@pytest.mark.parametrize("cut", [1, 20, "whole"])
def test_a_kill_before_a_cut_line_is_ended_leaves_a_ledger_that_goes_on(
    tmp_path: Path, cut: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(ledger(tmp_path), 4)
    path = tmp_path / "charges.jsonl"
    content = path.read_bytes()
    torn = content[:-1] if cut == "whole" else content[: content[:-1].rindex(b"\n") + 1 + int(cut)]
    path.write_bytes(torn)

    def killed(descriptor: int, data: bytes) -> int:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "write", killed)
        ledger(tmp_path)
    assert path.read_bytes() == torn
    assert ledger(tmp_path).used == 4
    assert path.read_bytes() == torn + b"\n"
    assert ask(ledger(tmp_path), 2) == [range(4, 6)]


def test_a_cut_line_is_in_the_chain(tmp_path: Path) -> None:
    """Several in a row count as spent, each; the one before a charge cannot be changed, and none can be taken out."""
    ask(ledger(tmp_path), 4)
    path = tmp_path / "charges.jsonl"
    path.write_bytes(path.read_bytes()[:-20] + b'\n{"number": 0')
    assert ask(ledger(tmp_path), 1) == [range(5, 6)]
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in ([*lines[:5], b'{"number": 1\n', lines[6]], [*lines[:4], *lines[5:]], [*lines[:5], lines[6]]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(InputError, match="the chain of charges is broken"):
            ledger(tmp_path)


def test_a_disk_that_is_full_behind_a_cut_line_loses_no_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = ledger(tmp_path)
    ask(book, 2)
    path, written = tmp_path / "charges.jsonl", os.write
    path.write_bytes(path.read_bytes() + b'{"number": 2, "us')
    monkeypatch.setattr(os, "write", lambda descriptor, data: written(descriptor, data[:30]))
    with pytest.raises(RunFailedError, match="nothing was answered"):
        ask(book, 1)
    monkeypatch.undo()
    assert ask(book, 1) == [range(4, 5)]


@pytest.mark.parametrize("line", range(1, 6))
def test_an_edited_ledger_is_refused(tmp_path: Path, line: int) -> None:
    ask(ledger(tmp_path), 4)
    path = tmp_path / "charges.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace('"ann"', '"bob"').replace("100", "900")
    path.write_text("".join(lines))
    if line < 5:
        with pytest.raises(InputError, match=r"the chain of charges is broken|of another endpoint"):
            ledger(tmp_path)
    else:
        # The last line is in no other line's hash yet; from the next charge on it is.
        assert ledger(tmp_path).used == 4


def test_missing_lines_are_noticed(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    ask(book, 4)
    path = tmp_path / "charges.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "charges.jsonl").write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(InputError, match="line 3: the chain of charges is broken"):
        ledger(tmp_path / "other")
    os.truncate(path, len(lines[0]))
    with pytest.raises(InputError, match="is shorter than it was"):
        ask(book, 1)
    path.unlink()
    with pytest.raises(InputError, match="was replaced"):
        ask(book, 1)


def test_another_endpoint_or_budget_is_refused(tmp_path: Path) -> None:
    ledger(tmp_path)
    with pytest.raises(InputError, match=r"of another endpoint, or of another budget \(100 answers\)"):
        ledger(tmp_path, 200)


def test_a_full_disk_answers_nothing_and_gives_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = ledger(tmp_path)
    ask(book, 2)
    written = os.write

    def full(descriptor: int, content: bytes) -> int:
        written(descriptor, content[:30])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunFailedError, match="No space left on device; nothing was answered"):
        ask(book, 1)
    monkeypatch.undo()
    assert ask(book, 1) == [range(3, 4)]
    assert ledger(tmp_path).used == 4


ASK = """
import sys
from pathlib import Path
from fedpriv.service.ledger import *
book = QueryLedger(Path(sys.argv[1]), Opening("ab" * 32, 5000), {})
while True:
    for given in book.charge([Request(sys.argv[2], ("00",) * 3)]):
        print("\\n".join(map(str, given)) if isinstance(given, range) else "end", flush=True)
"""


def test_killed_processes_never_get_a_number_twice(tmp_path: Path) -> None:
    """Two processes ask as fast as they can and are killed; every number that they printed was charged before."""
    path, given = tmp_path / "charges.jsonl", []
    for kill in range(2):
        command = [sys.executable, "-c", ASK, str(path)]
        both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("ann", "bob")]
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(0.05 + 0.05 * kill)
        for process in both:
            process.send_signal(signal.SIGKILL)
            printed = process.communicate()[0].split("\n")[:-1]
            given += [int(number) for number in printed if number != "end"]
    assert len(set(given)) == len(given) > 4
    book = QueryLedger(path, Opening("ab" * 32, 5000), {})
    assert book.used > max(given)
    numbers = [
        json.loads(line)["number"] if line.endswith("}") else place  # a kill may cut one off
        for place, line in enumerate(path.read_text().splitlines()[1:])
    ]
    assert numbers == list(range(book.used))


def test_it_is_never_a_link(tmp_path: Path) -> None:
    ledger(tmp_path).close()
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "charges.jsonl").symlink_to(tmp_path / "charges.jsonl")
    with pytest.raises(OSError, match="symbolic link"):
        ledger(tmp_path / "real")
