"""The gateway passes on what SuperNodes may ask, as it is, and refuses all else."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedpriv.core.errors import InputError
from fedpriv.deploy import gateway
from fedpriv.deploy.certificates import Authority
from fedpriv.deploy.gateway import gateway_app, is_allowed, serve_gateway

REFUSED = (
    "/v1/control/register-node",
    "/v1/runtime/pull-messages",
    "/v1/fleet",
    "/v1/fleet/../control/register-node",
    "/v1/fleet/%2e%2e/control/register-node",
    "/v1/fleet//control/register-node",
    "/",
    "/healthy",
)


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_no_business_of_supernodes_is_refused(path: str) -> None:
    assert not is_allowed(path)


def test_questions_and_answers_pass_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []
    real = httpx.AsyncClient

    def superlink(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(418, stream=httpx.ByteStream(b"\x00answer"), headers={"x-of-superlink": "1"})

    def client(**settings: Any) -> httpx.AsyncClient:
        return real(base_url=settings["base_url"], transport=httpx.MockTransport(superlink))

    monkeypatch.setattr(gateway.httpx, "AsyncClient", client)
    app = gateway_app("https://superlink:8000", ssl.create_default_context())
    monkeypatch.undo()

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://gateway") as asking:
            signed = {"x-signature": "s"}
            return [
                await asking.post("/v1/fleet/push?a=1&b=%2F", content=b"\xffquestion", headers=signed),
                *[await asking.post(path) for path in REFUSED],
            ]

    first, *others = asyncio.run(ask())
    assert (first.status_code, first.content, first.headers["x-of-superlink"]) == (418, b"\x00answer", "1")
    assert {answer.status_code for answer in others} == {403}
    (asked,) = seen
    assert (str(asked.url), asked.method) == ("https://superlink:8000/v1/fleet/push?a=1&b=%2F", "POST")
    assert (asked.content, asked.headers["x-signature"]) == (b"\xffquestion", "s")
    assert asked.headers["host"] == "superlink:8000"


def test_a_port_that_is_in_use_is_one_plain_line(tmp_path: Path) -> None:
    Authority().certify(tmp_path, ("localhost",))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            serve_gateway("127.0.0.1", port, "127.0.0.1:1", tmp_path)
