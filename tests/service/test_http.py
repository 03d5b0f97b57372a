"""The endpoint over HTTP: answers, budgets, and one clear answer to every mistake, after which it goes on."""

import asyncio
import io
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from fedpriv.core.randomness import Secret
from fedpriv.service.endpoint import Oracle, Served, StoredAnswers
from fedpriv.service.http import LARGEST_BODY, build_app
from fedpriv.service.ledger import Opening, QueryLedger
from fedpriv.service.policies import Facts, Scores
from fedpriv.service.records import UserFacts
from tests.service.named import first_numbers, named_policy

SHAPE = (1, 2, 3)
USERS = (
    UserFacts(name="ann", key=sha256(b"anns").hexdigest(), answers=5),
    UserFacts(name="bob", key=sha256(b"bobs").hexdigest(), answers=90),
)
ANN, BOB = ({"Authorization": f"Bearer {key}"} for key in ("anns", "bobs"))


def served(folder: Path, method: str = "top:2", answers: int = 100, repeats: bool = True) -> Served:
    policy = named_policy(method, {"noise": 1.0} if method == "label" else {})
    oracle = Oracle(policy, Facts(3, 0.1, 1.0, 6), SHAPE, first_numbers, 1.0, Secret.of_seed(0))
    limits = {user.name: user.answers for user in USERS}
    ledger = QueryLedger(folder / "charges.jsonl", Opening("cd" * 32, answers), limits)
    return Served(oracle, ledger, StoredAnswers(folder / "answers.jsonl", ledger) if repeats else None)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(build_app(served(tmp_path), USERS, {"method": "top:2"})) as client:
        yield client


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, *SHAPE))


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


NPY = {"content-type": "application/x-npy"}


def test_json_and_npy_have_the_same_answers(client: TestClient) -> None:
    asked = images(2)
    first = client.post("/answers", json={"images": asked.tolist()}, headers=BOB)
    assert first.status_code == 200 and first.json()["charged"] == 2
    again = client.post("/answers", content=npy(asked), headers=BOB | NPY)
    assert again.json() == first.json() | {"charged": 0}
    given = first.json()["answers"][0]
    shown = torch.tensor(asked[0, 0, 0]).softmax(0)
    assert given["number"] == 0 and given["label"] == int(shown.argmax())
    assert given["probabilities"][given["label"]] == pytest.approx(float(shown.max()))
    assert given["probabilities"].count(None) == 1
    whole = client.post("/answers", content=npy(np.full((1, *SHAPE), 255, np.uint8)), headers=BOB | NPY)
    assert whole.status_code == 200
    assert client.get("/health").json() == {"status": "ready", "left": 97, "method": "top:2"}


def test_budgets_end_with_429_and_the_reason(client: TestClient) -> None:
    def ask(count: int, seed: int, headers: dict[str, str]) -> tuple[int, str]:
        found = client.post("/answers", content=npy(images(count, seed)), headers=headers | NPY)
        return found.status_code, found.json().get("detail", "")

    assert ask(4, 1, ANN)[0] == 200
    assert ask(2, 2, ANN) == (429, "answers asked for: 2; left: 1 of the 5 of ann")
    assert ask(4, 1, ANN)[0] == 200  # the stored answers
    assert ask(90, 3, BOB)[0] == 200
    assert ask(1, 4, BOB) == (429, "answers asked for: 1; left: 0 of the 90 of bob")


MISTAKES: list[tuple[bytes, dict[str, str], int, str]] = [
    (b'{"images": [', {"content-type": "application/json"}, 400, "the body is no JSON"),
    (b"[" * 100_000, {"content-type": "application/json"}, 400, "the body is no JSON"),
    (b"[1]", {"content-type": "application/json"}, 400, 'the one key "images"'),
    (b'{"images": [[1], [1, 2]]}', {"content-type": "application/json"}, 400, "lists of lists"),
    (b'{"images": "no"}', {"content-type": "application/json"}, 400, "lists of lists"),
    (b'{"images": [[[[NaN, 0, 0], [0, 0, 0]]]]}', {"content-type": "application/json"}, 400, "not a number on [0, 1]"),
    (b'{"images": [[[[1e999, 0, 0], [0, 0, 0]]]]}', {"content-type": "application/json"}, 400, "not a number on"),
    (b'{"images": [[[[0, 0], [0, 0]]]]}', {"content-type": "application/json"}, 400, "images of 1 x 1 x 2 x 2"),
    (b'{"images": 1}', {"content-type": "application/json"}, 400, "images of one number: expected n x 1 x 2 x 3"),
    (b'{"images": []}', {"content-type": "application/json"}, 400, "expected n x 1 x 2 x 3"),
    (npy(images(1))[:-1], NPY, 400, "no npy array of images: its header is of 48 bytes, and 47 are there"),
    (npy(np.array([{}])), NPY, 400, "holds Python objects"),
    (npy(np.ones((1, *SHAPE), np.int64)), NPY, 400, "numbers of type int64"),
    (npy(np.full((1, *SHAPE), np.nan)), NPY, 400, "not a number on [0, 1]"),
    (b"", NPY, 400, "no npy array of images"),
    (b"picture", {"content-type": "image/png"}, 415, "application/json or application/x-npy is read, not 'image/png'"),
    (npy(images(1)).replace(b"(1, 1, 2, 3)", b"(True, 1, 6)"), NPY, 400, "no npy array of images"),
    (npy(np.zeros((10_001, *SHAPE), np.uint8)), NPY, 413, "10,001 images are asked about; at most 10,000 are answered"),
    (bytes(LARGEST_BODY + 1), NPY, 413, "a body of at most 16,777,216 bytes is read"),
]


def test_every_mistake_has_one_clear_answer_and_costs_nothing(client: TestClient) -> None:
    for body, headers, status, said in MISTAKES:
        found = client.post("/answers", content=body, headers=BOB | headers)
        assert (found.status_code, list(found.json())) == (status, ["detail"]), found.text
        assert said in found.json()["detail"]
    for headers in ({}, {"Authorization": "Bearer nobodys"}, {"Authorization": "Basic anns"}):
        found = client.post("/answers", content=npy(images(1)), headers=headers | NPY)
        assert (found.status_code, found.json()["detail"][:27]) == (401, "the key is missing or unkno")
    assert client.get("/health", headers={"host": "elsewhere.example"}).status_code == 400
    assert client.get("/nothing").status_code == 404
    assert client.get("/health").json()["left"] == 100
    assert client.post("/answers", content=npy(images(1)), headers=BOB | NPY).status_code == 200


def test_a_picture_that_is_sent_in_pieces_is_cut_off_when_it_is_too_large(client: TestClient) -> None:
    pieces = (bytes(1 << 20) for _ in range(100))
    found = client.post("/answers", content=pieces, headers=BOB | NPY)
    assert found.status_code == 413
    assert next(pieces, None) is None or client.get("/health").status_code == 200


def test_the_page_describes_bodies_and_refusals(client: TestClient) -> None:
    described = client.get("/openapi.json").json()["paths"]["/answers"]["post"]
    assert set(described["requestBody"]["content"]) == {"application/json", "application/x-npy"}
    assert set(described["responses"]) >= {"200", "400", "401", "413", "415", "429", "503"}
    assert "swagger" in client.get("/docs").text


def test_many_at_a_time_pay_for_what_they_get(tmp_path: Path) -> None:
    """Twelve ask at once for 20 answers each of a budget of 100, with fresh noise for every number."""
    with TestClient(build_app(served(tmp_path, "label", repeats=False), (), {})) as client:

        def ask(seed: int) -> list[int]:
            found = client.post("/answers", content=npy(images(20, seed % 3)), headers=NPY)
            return [given["number"] for given in found.json().get("answers", ())]

        with ThreadPoolExecutor(12) as pool:
            numbers = [number for given in pool.map(ask, range(12)) for number in given]
        assert sorted(numbers) == list(range(100))
        assert client.post("/answers", content=npy(images(1)), headers=NPY).status_code == 429
    lines = (tmp_path / "charges.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines[1:]] == list(range(100))


def test_a_ledger_that_was_taken_away_answers_nothing(tmp_path: Path) -> None:
    with TestClient(build_app(served(tmp_path), (), {})) as client:
        (tmp_path / "charges.jsonl").unlink()
        found = client.post("/answers", content=npy(images(1)), headers=NPY)
        assert found.status_code == 503 and "was replaced" in found.json()["detail"]
        assert client.get("/health").status_code == 200


def test_what_goes_wrong_inside_is_in_the_servers_own_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The text of an error, or its class, may tell of what the answers are computed from."""

    class OddWeights(RuntimeError): ...

    def raising(images: torch.Tensor) -> Scores:
        raise OddWeights("weight 7 is odd")

    own = served(tmp_path)
    own.oracle = replace(own.oracle, scores=raising)
    with TestClient(build_app(own, (), {})) as client:
        response = client.post("/answers", json={"images": images(1).tolist()})
        assert (response.status_code, response.json()) == (
            500,
            {"detail": "not answered; the server's own log says why"},
        )
        assert client.get("/health").status_code == 200
    assert "weight 7 is odd" in caplog.text


def test_a_body_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """Whoever sent it is gone; the server's log must not fill up with tracebacks."""
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Mapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/answers", "headers": headers, "query_string": b""}
    asyncio.run(build_app(served(tmp_path), (), {})(scope, receive, send))
    assert sent[0]["status"] == 400 and b"not sent to its end" in sent[1]["body"]
