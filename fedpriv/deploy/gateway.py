"""The gateway between SuperNodes and the SuperLink: it passes on the interface for SuperNodes, and nothing else.

Flower answers users (submit a run, register a SuperNode) and SuperNodes on one port, and whoever trusts its certificate
is a user. SuperNodes that reach the gateway alone, and not the SuperLink, cannot act as one.
"""

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from fedpriv.core.errors import InputError
from fedpriv.deploy.folder import cannot_listen

_ALLOWED = "/v1/fleet/"
_HEALTH = "/health"
# What is about one connection, not about the message on it.
_OF_THE_CONNECTION = {"host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


def serve_gateway(host: str, port: int, server: str, keys: Path) -> None:
    """Pass on requests until SIGTERM or Ctrl-C; ``keys`` holds ca.pem, server.pem and server.key."""
    certificate, key = str(keys / "server.pem"), str(keys / "server.key")
    try:
        trust = ssl.create_default_context(cafile=str(keys / "ca.pem"))
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:
        allowed = f"expected ca.pem, server.pem and server.key of fedpriv deploy prepare ({error.strerror or error})"
        raise InputError(key="--keys", given=keys, allowed=allowed) from None
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error) from None
    app = gateway_app(f"https://{server}", trust)
    config = uvicorn.Config(app, log_level="warning", ssl_certfile=certificate, ssl_keyfile=key)
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def gateway_app(server: str, trust: ssl.SSLContext) -> FastAPI:
    """Return the app that passes on requests to the SuperLink at ``server``."""
    client = httpx.AsyncClient(base_url=server, verify=trust, timeout=None, trust_env=False)

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=living, openapi_url=None)

    async def pass_on(request: Request) -> Response:
        path = bytes(request.scope["raw_path"]).decode("latin-1")
        if not is_allowed(path):
            return Response(f"{path}: SuperNodes may use {_ALLOWED} only\n", status_code=403)
        query = request.url.query
        asked = client.build_request(
            request.method,
            path + (f"?{query}" if query else ""),
            headers=_passed(request.headers.raw),
            content=await request.body(),
        )
        try:
            answer = await client.send(asked, stream=True)
        except httpx.TransportError as error:
            return Response(f"the SuperLink does not answer: {error}\n", status_code=502)
        passed = StreamingResponse(answer.aiter_raw(), answer.status_code)
        passed.raw_headers = _passed(answer.headers.raw)
        return passed

    app.add_api_route("/{path:path}", pass_on, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    return app


def is_allowed(path: str) -> bool:
    """Whether SuperNodes may ask for a path; one that could be read as another is refused."""
    return path == _HEALTH or (path.startswith(_ALLOWED) and not any(part in path for part in ("..", "%", "//", "\\")))


def _passed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.decode("latin-1").lower() not in _OF_THE_CONNECTION]
