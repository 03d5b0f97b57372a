"""The server of answers under load, killed while it answers: how many answers a second, and whether the ledger holds.

N users ask for one image after the other, each image once, over connections of their own on the loopback address. The
server is killed (SIGKILL) at K random moments and started again. Afterwards every answer that a user got is looked up
in the query ledger: each number was given once and charged to that user, and nobody got more than their budget. Then
the same users ask for a third of the time without kills. Exit 1: the ledger did not hold.

Before that one question after the other is asked in this process under several policies: the medians of what computing
the scores takes, of charging, which waits for the disk, and of all the rest.
"""

import argparse
import asyncio
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import options, save, seconds, show
from fedpriv.core.config import Experiment
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.service.ledger import OWNER, Request
from fedpriv.service.opening import add_user, open_service
from fedpriv.service.settings import ServiceConfig
from studies.arguments import whole

_BUDGET = 1_000_000
_SHAPE = (1, 8, 8)
_WAIT = 0.02  # seconds until a user who was cut off, or a look at the port, tries again
_STARTS_WITHIN = 60.0
_TIMED = 300  # questions
_PRIVATE = {"target_epsilon": 8.0}
_POLICIES: dict[str, dict[str, float]] = {"none": {}, "logits": _PRIVATE, "label": _PRIVATE, "votes": {"noise": 1.0}}


@dataclass(eq=False)
class User:
    """Who asks, and what came of it."""

    name: str  # in the ledger
    key: str  # sent with each question
    budget: int  # answers that are theirs
    numbers: list[int] = field(default_factory=list)  # of the answers that arrived
    refused: int = 0  # how often the budget was used up


@dataclass(frozen=True)
class Load:
    """One stretch of time."""

    seconds: float  # how long users asked
    answers: int  # how many arrived
    waits: tuple[float, ...]  # seconds from question to answer, ascending

    def wait(self, share: float) -> float:
        """The wait in milliseconds that so large a share of the answers had at most."""
        return 1e3 * self.waits[int(share * (len(self.waits) - 1))] if self.waits else float("nan")


class Server:
    """The process that answers, in a folder and at a port of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port: int = listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, without waiting for it."""
        command = [sys.executable, "-m", "fedpriv", "serve", str(self._folder), "--port", str(self.port), "--quiet"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it as a power failure would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    async def up(self) -> None:
        """Wait until it answers."""
        until = time.monotonic() + _STARTS_WITHIN
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            await asyncio.sleep(_WAIT)
        raise TimeoutError(f"no server at port {self.port} within {_STARTS_WITHIN:g} s")


async def ask_for_ever(user: User, port: int, until: float, waits: list[float]) -> None:
    """Ask, and connect again whenever the server is gone."""
    stream = np.random.default_rng(int.from_bytes(os.urandom(8)))
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(_WAIT)
            continue
        try:
            while time.monotonic() < until:
                began = time.monotonic()
                status, content = await _asked(reader, writer, user, stream.random((1, *_SHAPE)))
                if status == 429:
                    user.refused += 1
                    await asyncio.sleep(1.0)
                    continue
                if status != 200:
                    raise ValueError(f"status {status}: {content!r}")
                user.numbers += [given["number"] for given in json.loads(content)["answers"]]
                waits.append(time.monotonic() - began)
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(_WAIT)
        finally:
            writer.close()


async def _asked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, user: User, image: np.ndarray
) -> tuple[int, bytes]:
    stream = io.BytesIO()
    np.save(stream, image)
    body = stream.getvalue()
    head = (
        f"POST /answers HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/x-npy\r\n"
        f"authorization: Bearer {user.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def load(server: Server, users: list[User], seconds: float, kills: int, seed: int) -> Load:
    """Let all users ask for so long, while the server is killed so often."""
    await server.up()
    began = time.monotonic()
    waits: list[float] = []
    before = sum(len(user.numbers) for user in users)
    asking = [asyncio.create_task(ask_for_ever(user, server.port, began + seconds, waits)) for user in users]
    draws = random.Random(seed)
    for moment in sorted(draws.uniform(0, seconds * 0.9) for _ in range(kills)):
        await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
        await server.up()
        # Not while it starts: it is to be killed while it answers.
        await asyncio.sleep(draws.uniform(0.1, 0.5))
        server.kill()
        server.start()
    await asyncio.gather(*asking)
    answers = sum(len(user.numbers) for user in users) - before
    return Load(time.monotonic() - began, answers, tuple(sorted(waits)))


def cost(experiment: Experiment, method: str) -> tuple[str, ...]:
    """Return the median milliseconds of one question's scores, of its charge, and of what else answering it takes."""
    with tempfile.TemporaryDirectory(prefix="service-") as name:
        folder = Path(name) / "run"
        start_run(experiment, folder, "", Silent())
        config = ServiceConfig.model_validate({"method": method, "answers": 4 * _TIMED, **_POLICIES[method]})
        served = open_service(RunFolder.open(folder), config, Silent())
        images = torch.from_numpy(np.random.default_rng(1).random((_TIMED, *_SHAPE)))
        scores = _median(lambda at: served.oracle.scores(images[at : at + 1]))
        charge = _median(lambda at: served.ledger.charge([Request(OWNER, (sha256(b"%d" % at).hexdigest(),))]))
        whole = _median(lambda at: served.ask(images[at : at + 1]))
        served.close()
    return method, f"{scores:.2f}", f"{charge:.2f}", f"{whole - scores - charge:.2f}"


def _median(timed: Callable[[int], object]) -> float:
    return statistics.median(1e3 * seconds(partial(timed, at)) for at in range(_TIMED))


def wrong(folder: Path, users: list[User]) -> list[str]:
    """Everything that the query ledger does not agree with."""
    lines = [json.loads(line) for line in (folder / "service" / "charges.jsonl").read_text().splitlines()[1:]]
    charged = {line["number"]: line["user"] for line in lines}
    numbers = [(number, user.name) for user in users for number in user.numbers]
    faults = []
    if len(charged) != len(lines):
        faults.append("a number was charged twice")
    if len({number for number, _ in numbers}) != len(numbers):
        faults.append("a number was given twice")
    if any(charged.get(number) != name for number, name in numbers):
        faults.append("an answer was not charged to its user")
    spent = Counter(line["user"] for line in lines)
    faults += [
        f"{user.name} has {spent[user.name]} charges of {user.budget}"
        for user in users
        if spent[user.name] > user.budget
    ]
    return faults


def main() -> None:
    """Measure, check, and print a table."""
    parser = options("service", __doc__)
    parser.add_argument("--users", type=whole(1), default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=whole(0), default=10)
    parser.add_argument("--method", choices=_POLICIES, default="none")
    with parser.parsed() as asked:
        _measure(asked)


def _measure(arguments: argparse.Namespace) -> None:
    experiment = Experiment.model_validate(
        {"model": {"name": "mlp"}, "mechanism": {"name": "none"}, "adversary": {"attacks": []}}
    )
    costs = [cost(experiment, method) for method in _POLICIES]
    show(("one question, ms", "scores", "charge", "the rest"), costs)
    with tempfile.TemporaryDirectory(prefix="service-") as name:
        folder = RunFolder(Path(name) / "run")
        start_run(experiment, folder.path, "", Silent())
        settings = _POLICIES[arguments.method]
        config = ServiceConfig.model_validate({"method": arguments.method, "answers": _BUDGET, **settings})
        open_service(RunFolder.open(folder.path), config, Silent()).close()
        # Some users run out of budget while they ask.
        budgets = [40 if number % 10 == 0 else 100_000 for number in range(arguments.users)]
        users = [User(f"u{at}", add_user(folder, f"u{at}", budget), budget) for at, budget in enumerate(budgets)]
        server = Server(folder.path)
        server.start()
        try:
            killed = asyncio.run(load(server, users, arguments.seconds, arguments.kills, experiment.seed))
            calm = asyncio.run(load(server, users, arguments.seconds / 3, 0, experiment.seed))
        finally:
            server.kill()
        problems = wrong(folder.path, users)
        lines = len((folder.path / "service" / "charges.jsonl").read_text().splitlines()) - 1
    rows = [(words, f"{case.seconds:.1f}", case.answers, f"{case.answers / case.seconds:.0f}",
             f"{case.wait(0.5):.0f}", f"{case.wait(0.99):.0f}")
            for words, case in ((f"{arguments.kills} kills", killed), ("no kill", calm))]  # fmt: skip
    show(("", "seconds", "answers", "a second", "median ms", "99 % ms"), rows)
    given = sum(len(user.numbers) for user in users)
    print(f"{given} answers arrived, {lines} were charged; {sum(user.refused for user in users)} refusals (429).")
    print("The ledger holds." if not problems else f"The ledger does not hold: {'; '.join(problems)}")
    save(arguments.json, costs=costs, given=given, charged=lines, problems=problems, rows=[list(row) for row in rows])
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
