"""The endpoint over HTTP, on the loopback; questions that come in while others are computed share the next batch."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from torch import Tensor

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.npz import HEADER_BYTES, parse_header
from fedpriv.service.endpoint import Question, QuestionOutcome, Served, checked_images
from fedpriv.service.ledger import OWNER
from fedpriv.service.records import UserFacts

_LOG = logging.getLogger(__name__)

LARGEST_BODY = 16 << 20
"""Bytes that a question may have."""

MOST_IMAGES = 10_000
"""Images that a question may have: answers take longer to write than bodies to read."""

_AT_ONCE = 256  # images of a batch; a question that is larger goes alone
_SMALL = 1 << 16  # bytes
_WAITING = 1000  # questions that wait; more are told to come again
_NPY = "application/x-npy"
_HOSTS = ["127.0.0.1", "localhost", "testserver"]


class Refused(Exception):
    """A question that is not answered: an HTTP status from 400 on, and why."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A question, and where its answer goes."""

    question: Question
    outcome: "asyncio.Future[QuestionOutcome]"


class _Batches:
    """Answers questions in batches, in the order in which they came."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(_WAITING)

    async def answered(self, question: Question) -> QuestionOutcome:
        """Wait for the answer to a question."""
        waiting = _Waiting(question, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(waiting)
        except asyncio.QueueFull:
            raise Refused(503, f"{_WAITING} questions wait already: ask again later") from None
        return await waiting.outcome

    async def run(self) -> None:
        """Answer for ever."""
        while True:
            waiting = [await self._queue.get()]
            images = len(waiting[0].question.images)
            while not self._queue.empty() and images < _AT_ONCE:
                waiting.append(self._queue.get_nowait())
                images += len(waiting[-1].question.images)
            await self._answer(waiting)

    async def _answer(self, waiting: list[_Waiting]) -> None:
        try:
            outcomes = await asyncio.to_thread(self._served.answer, [each.question for each in waiting])
        except (InputError, RunFailedError) as error:
            for each in waiting:
                _settle(each, Refused(503, str(error)))
            return
        except Exception:  # noqa: BLE001 (one batch must not end the server; what it raised may tell of the data)
            _LOG.exception("questions were not answered")
            for each in waiting:
                _settle(each, Refused(500, "not answered; the server's own log says why"))
            return
        for each, outcome in zip(waiting, outcomes, strict=True):
            _settle(each, outcome)


def build_app(served: Served, users: tuple[UserFacts, ...], about: Mapping[str, Any]) -> FastAPI:
    """Return the application."""
    batches = _Batches(served)
    keys = {user.key: user.name for user in users}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batches.run())
        try:
            yield
        finally:
            worker.cancel()

    app = FastAPI(
        title="fedpriv", summary="A trained model that answers under a policy and a budget", lifespan=lifespan
    )
    # Pages of other sites must not reach the address under a name of theirs.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say what the endpoint is, and how many answers are left."""
        left = max(served.ledger.answers - served.ledger.used, 0)
        return JSONResponse({"status": "ready", "left": left, **about})

    @app.post("/answers", openapi_extra=_BODIES, responses=_RESPONSES)
    async def answers(request: Request) -> JSONResponse:
        """Answer questions about images (n, C, H, W): bytes from 0 to 255 (npy only), or numbers from 0 to 1."""
        user = _user(request, keys)
        body = await _body(request)
        kind, shape = request.headers.get("content-type", ""), served.oracle.shape
        # Reading many numbers must not hold up the others; for a few a thread would take longer than they do.
        large = len(body) > _SMALL
        images = await asyncio.to_thread(_images, kind, body, shape) if large else _images(kind, body, shape)
        outcome = await batches.answered(Question(user, images))
        if outcome.refusal:
            raise Refused(429, outcome.refusal)
        return JSONResponse({"answers": [vars(given) for given in outcome.given], "charged": outcome.charged})

    return app


def _user(request: Request, keys: Mapping[str, str]) -> str:
    if not keys:
        return OWNER
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    name = keys.get(sha256(key.strip().encode()).hexdigest()) if scheme.lower() == "bearer" else None
    if name is None:
        raise Refused(401, "the key is missing or unknown; send it as Authorization: Bearer KEY")
    return name


async def _body(request: Request) -> bytes:
    """The body, if it is not too large; what is too large is not read to its end."""
    said = request.headers.get("content-length", "")
    large = f"a body of at most {LARGEST_BODY:,} bytes is read"
    if said.isdecimal() and int(said) > LARGEST_BODY:
        raise Refused(413, large)
    content = bytearray()
    try:
        async for piece in request.stream():
            content += piece
            if len(content) > LARGEST_BODY:
                raise Refused(413, large)
    except ClientDisconnect:
        raise Refused(400, "the body was not sent to its end") from None
    return bytes(content)


def _images(kind: str, body: bytes, shape: tuple[int, int, int]) -> Tensor:
    kind = kind.partition(";")[0].strip().lower()
    if kind not in ("application/json", _NPY):
        raise Refused(415, f"a body of type application/json or {_NPY} is read, not {kind[:60]!r}")
    array = _from_json(body) if kind == "application/json" else _from_npy(body)
    if len(array.shape) and len(array) > MOST_IMAGES:
        raise Refused(413, f"{len(array):,} images are asked about; at most {MOST_IMAGES:,} are answered at a time")
    try:
        return checked_images(torch.from_numpy(array), shape)
    except (InputError, TypeError) as error:
        raise Refused(400, str(error)) from None


def _from_json(body: bytes) -> np.ndarray:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, 'the body is no JSON; {"images": [...]} is read') from None
    if not isinstance(value, dict) or set(value) != {"images"}:
        raise Refused(400, 'an object with the one key "images" is read')
    try:
        array = np.array(value["images"])
    except (ValueError, RecursionError):
        raise Refused(400, "images: lists of lists of lists of lists of numbers, n x C x H x W, are read") from None
    if array.dtype.kind not in "iuf":
        raise Refused(400, "images: lists of lists of lists of lists of numbers, n x C x H x W, are read")
    return array.astype(np.float64)


def _from_npy(body: bytes) -> np.ndarray:
    try:
        header = parse_header(body[:HEADER_BYTES])
        if header.length + header.nbytes != len(body):
            raise ValueError(f"its header is of {header.nbytes:,} bytes, and {len(body) - header.length:,} are there")
        if header.dtype.newbyteorder("=") not in (np.uint8, np.float32, np.float64):
            raise ValueError(f"numbers of type {header.dtype}; uint8, float32 and float64 are read")
        array: np.ndarray = np.lib.format.read_array(BytesIO(body), allow_pickle=False)
    except (ValueError, TypeError) as error:
        raise Refused(400, f"no npy array of images: {error}") from None
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _settle(waiting: _Waiting, result: QuestionOutcome | Refused) -> None:
    """Whoever asked may have gone."""
    if waiting.outcome.done():
        return
    if isinstance(result, Refused):
        waiting.outcome.set_exception(result)
    else:
        waiting.outcome.set_result(result)


_NUMBERS: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1}
for _ in range(4):
    _NUMBERS = {"type": "array", "items": _NUMBERS}
_BODIES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "object", "properties": {"images": _NUMBERS}, "required": ["images"]},
            },
            _NPY: {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "security": [{"HTTPBearer": []}],
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One answer an image; of a probability that is not shown, null. charged: paid for now.",
        "content": {
            "application/json": {
                "example": {
                    "answers": [{"number": 0, "question": "9f86...", "label": 3, "probabilities": [0.1, 0.2, 0.7]}],
                    "charged": 1,
                }
            }
        },
    },
    400: {"description": "No such images: the shape, a number or the body is wrong."},
    401: {"description": "The key is missing or unknown."},
    413: {"description": "The body is too large."},
    415: {"description": "Neither JSON nor npy."},
    429: {"description": "The budget of all, or of this user, is used up."},
    503: {"description": "The query ledger cannot be written, or too many wait."},
}
