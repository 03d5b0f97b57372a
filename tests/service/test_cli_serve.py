"""``fedpriv serve`` and ``fedpriv query`` as a user meets them: answers, status, one clear line for mistakes."""

import json
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.attacks.test_cli_attack import fedpriv, here
from tests.command_line import Started
from tests.deploy.deployments import free_ports, wait_for

__all__ = ["here"]

LABEL = ("--set", "service.method=label", "--set", "service.target_epsilon=4", "--set", "service.answers=12")


def test_query_answers_and_status_says_what_is_used(here: Path) -> None:
    none = fedpriv("serve", "run", "--status", cwd=here)
    make = "make it with fedpriv serve run --status --set service.method=METHOD"
    assert (none.returncode, none.stderr) == (2, f"fedpriv: run has no endpoint yet: {make}\n")
    done = fedpriv("query", "run", "--test", "0:5", "--json", *LABEL, cwd=here)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["labels"]) == 5 and found["probabilities"] is None
    assert (found["charged"], found["left"]) == (5, 7)
    agreed = sum(one == other for one, other in zip(found["labels"], found["truth"], strict=True))
    assert found["right"] == agreed and len(found["truth"]) == 5
    referee = json.loads((here / "run" / "service" / "referee.json").read_text())
    service = (here / "run" / "service" / "service.json").read_text()
    assert "truth" not in service and referee["answered"]["value"] < referee["accuracy"]["value"]
    assert "Share of right answers by the number of answers" in (here / "run" / "report.html").read_text()
    np.savez(here / "mine.npz", images=np.random.default_rng(0).random((3, 8, 8)))
    done = fedpriv("query", "run", "--npz", "mine.npz", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["image", "answer"] and "right" not in done.stdout
    assert "3 answered, 3 charged; 4 of 12 answers are left." in done.stdout
    key = fedpriv("serve", "run", "--user", "ann=2", cwd=here)
    assert key.returncode == 0 and len(key.stdout.strip()) == 32
    said = "key of ann, 2 answers, shown once; start the server with fedpriv serve run"
    assert key.stderr.splitlines()[-1] == said
    again = fedpriv("query", "run", "--test", "0:5", cwd=here)  # the stored answers, free
    assert again.stdout.splitlines()[0].split() == ["image", "answer", "truth"]
    assert f"{agreed} of 5 right." in again.stdout and "0 charged" in again.stdout
    status = fedpriv("serve", "run", "--status", cwd=here)
    assert "Method label (labels drawn by the exponential mechanism): 8 of 12 answers are used." in status.stdout
    assert "Proven of all 12 together: epsilon 4 at delta 1e-05; replace-one" in status.stdout
    assert "ann: 0 of 2." in status.stdout
    shown = json.loads(fedpriv("serve", "run", "--status", "--json", cwd=here).stdout)
    assert (shown["used"], shown["users"]) == (8, [{"name": "ann", "used": 0, "answers": 2}])
    audited = fedpriv("audit", "run", "--answers", "1", cwd=here)
    assert audited.returncode == 0 and "Report: run/report.html" in audited.stdout
    page = (here / "run" / "report.html").read_text()
    assert "8 of 12" in page and "Models moved, measured over bound" in page
    over = fedpriv("query", "run", "--test", "10:15", cwd=here)
    assert (over.returncode, over.stdout) == (2, "")
    assert over.stderr.splitlines() == ["fedpriv: answers asked for: 5; left: 4 of 12"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["query", "run", "--test", "0:1", "--npz", "a.npz"], "--test A:B and --npz FILE are two sets of images"),
        (["query", "run", "--test", "5:2"], "--test 5:2: expected A:B with 0 <= A < B <= 360"),
        (["query", "run", "--test", "0:1000"], "A:B with 0 <= A < B <= 360"),
        (["query", "run", "--npz", "nothing.npz"], "nothing.npz: no such file"),
        (["query", ".", "--test", "0:1"], "not the folder of a run"),
        (["serve", "run", "--status", "--set", "seed=3"], "--set seed=3: an endpoint is made by keys of [service]"),
        (["serve", "run", "--status", "--set", "service.method=lable"], "there is no answer policy 'lable'; did you m"),
        (["serve", "run", "--status", "--set", "service.answers=0"], "service.answers = 0:"),
        (["serve", "run", "--status", "--set", "service.method=label"], "needs either target_epsilon or noise"),
        (["serve", "run", "--user", "bob"], "--user bob: expected NAME=N, such as ann=100"),
        (["serve", "run", "--user", "bob=²"], "--user bob=²: expected NAME=N, such as ann=100"),
        (["query", "run", "--test", "²:³"], "--test ²:³: expected A:B with 0 <= A < B <= 360"),
    ],
)
def test_mistakes_are_one_line(here: Path, arguments: list[str], said: str) -> None:
    done = fedpriv(*arguments, cwd=here)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


def _unserved(here: Path, to: Path) -> Path:
    """Return a copy of the run, without its endpoint."""
    return shutil.copytree(here / "run", to / "run", ignore=shutil.ignore_patterns("service"))


def _is_up(port: int, server: Started) -> bool:
    assert not server.is_over(), server.ended()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _post(port: int, count: int, seed: int, key: str) -> int:
    body = {"images": np.random.default_rng(seed).random((count, 1, 8, 8)).tolist()}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"http://127.0.0.1:{port}/answers", json=body, headers=headers, timeout=20).status_code


def test_an_endpoint_that_nobody_described_is_made_with_a_warning(here: Path, tmp_path: Path) -> None:
    done = fedpriv("query", str(_unserved(here, tmp_path)), "--test", "0:2", cwd=here)
    assert done.returncode == 0, done.stderr
    said = (
        "no --set service.KEY=VALUE: answers are exact probabilities, nothing is proven about them, and this choice is"
    )
    assert f"warning: {said} fixed for this folder" in " ".join(done.stderr.split())
    assert "of 360 test images as answered" in done.stderr and "without the noise" not in done.stderr
    assert done.stdout.splitlines()[0].split() == ["image", "answer", "probability", "truth"]


@pytest.mark.slow
def test_a_killed_server_gives_nothing_back(here: Path, tmp_path: Path) -> None:
    """A real server, killed between answers; what it answered stays charged."""
    folder = _unserved(here, tmp_path)
    made = fedpriv("serve", str(folder), "--status", "--set", "service.answers=10", cwd=here)
    assert made.returncode == 0, made.stderr
    key = fedpriv("serve", str(folder), "--user", "ann=7", cwd=here).stdout.strip()
    for kill, (count, statuses) in enumerate([(4, [200, 429]), (3, [200, 429])]):
        port = free_ports(1)
        server = Started("serve", str(folder), "--port", str(port), cwd=tmp_path)
        try:
            wait_for(partial(_is_up, port, server))
            assert [_post(port, count, kill * 10 + at, key) for at in range(2)] == statuses
        finally:
            server.send_signal(signal.SIGKILL)
            server.ended()
    assert "ann: 7 of 7." in fedpriv("serve", str(folder), "--status", cwd=here).stdout
