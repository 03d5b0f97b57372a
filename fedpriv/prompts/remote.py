"""A language model behind an HTTP endpoint in OpenAI's form: on the loopback unless allowed, and never by a proxy."""

import json
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from threading import Event, Timer
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.prompts.language import Floats, LanguageModel
from fedpriv.prompts.settings import LanguageConfig

_LARGEST = 16 << 20  # bytes of an answer


class Http(LanguageModel):
    """An endpoint, one request a prompt; candidates not among its ``top`` tokens count as the least likely of these."""

    def __init__(self, config: LanguageConfig) -> None:
        host = _host(config.url)
        if not host:
            raise InputError(
                key="model.url", given=config.url, allowed="allowed are addresses such as http://127.0.0.1:8080/v1"
            )
        if not config.remote and not _is_loopback(host):
            raise InputError(
                key="model.url",
                given=config.url,
                allowed="not on the loopback, and prompts hold private examples",
                hint="use an address such as http://127.0.0.1:8080/v1, or set model.remote = true",
            )
        self._config, self._url = config, f"{config.url.rstrip('/')}/completions"
        self.title = f"{config.served or 'the model'} at {config.url}"

    @override
    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        return np.array([_likely(self._top(prompt, self._config.top), candidates) for prompt in prompts])

    @override
    def token(self, candidate: str) -> str:
        return candidate.strip()

    @override
    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        top = self._top(prompt, count)
        return tuple(sorted(top, key=lambda token: -top[token])[:count])

    def _top(self, prompt: str, count: int) -> dict[str, float]:
        """The likeliest next tokens and their log-probabilities."""
        asked = {"model": self._config.served, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": count}
        answer = self._ask(json.dumps(asked).encode())
        try:
            top = _tops(json.loads(answer)["choices"][0]["logprobs"])
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            top = {}
        if not top or not all(math.isfinite(value) and value <= 1e-6 for value in top.values()):
            raise InputError(
                f"{self._url} gives no log-probabilities of its likeliest tokens: choices[0].logprobs.top_logprobs is "
                "wanted"
            )
        return top

    def _ask(self, body: bytes) -> bytes:
        """What the endpoint answers: no proxy is used, and no redirection leads off the loopback."""
        address, late = urlsplit(self._url), Event()
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=self._config.timeout)
        with closing(connection), _ended(connection, self._config.timeout, late):
            try:
                connection.connect()
                if late.is_set():  # while there was no connection to end
                    raise TimeoutError
                connection.request("POST", address.path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                answer = reply.read(_LARGEST)
            except (OSError, HTTPException, UnicodeError) as error:
                if late.is_set() or isinstance(error, TimeoutError):
                    raise self._too_late() from None
                raise InputError(f"{self._url} does not answer: {one_line(error)}") from None
            if late.is_set():
                raise self._too_late()
        if reply.status != 200:
            raise InputError(f"{self._url} refuses the question: HTTP {reply.status} {reply.reason}")
        return answer

    def _too_late(self) -> InputError:
        return InputError(f"{self._url} does not answer: not within {self._config.timeout:g} s (model.timeout)")


@contextmanager
def _ended(connection: HTTPConnection, seconds: float, late: Event) -> Iterator[None]:
    """End a connection after so many seconds: a socket's own timeout is for each read, and a slow sender resets it."""

    def end() -> None:
        late.set()
        if connection.sock is not None:
            with suppress(OSError):  # it ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _host(url: str) -> str:
    """The host of an address of HTTP; empty: it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # reading it says whether it is one
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.scheme in ("http", "https") and url.isascii() else ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tops(logprobs: Any) -> dict[str, float]:
    """Of the first token: OpenAI's own form, or llama.cpp's, which is that of its chat completions."""
    if "content" in logprobs:
        return {str(each["token"]): float(each["logprob"]) for each in logprobs["content"][0]["top_logprobs"]}
    return {str(token): float(value) for token, value in logprobs["top_logprobs"][0].items()}


def _likely(top: dict[str, float], candidates: Sequence[str]) -> list[float]:
    """Of each candidate: a token that is it, or else a beginning of it and of no other candidate."""
    texts = [candidate.strip() for candidate in candidates]
    floor = min(top.values())
    own: list[list[float]] = [[] for _ in texts]
    for token, value in top.items():
        bare = token.strip()
        meant = [number for number, text in enumerate(texts) if bare and text.startswith(bare)]
        if len(meant) == 1:
            own[meant[0]].append(value)
    return [float(np.logaddexp.reduce(values)) if values else floor for values in own]
