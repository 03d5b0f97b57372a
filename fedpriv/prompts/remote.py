"""A language model behind an HTTP endpoint in OpenAI's form: on the loopback unless allowed, and never by a proxy."""

import asyncio
import json
import math
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx
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
        self._trust = ssl.create_default_context() if config.url.startswith("https") else False
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
        """What the endpoint answers, all of it in time: the timeouts of a client are for each read."""
        answer = partial(asyncio.run, asyncio.wait_for(self._answer(body), self._config.timeout))
        try:
            with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own in this one
                return thread.submit(answer).result()
        except TimeoutError:
            late = f"not within {self._config.timeout:g} s (model.timeout)"
            raise InputError(f"{self._url} does not answer: {late}") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise InputError(f"{self._url} does not answer: {one_line(error)}") from None

    async def _answer(self, body: bytes) -> bytes:
        """What the endpoint answers: no proxy is used, and no redirection leads off the loopback."""
        answer, headers = b"", {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with (
            httpx.AsyncClient(verify=self._trust, trust_env=False, timeout=None) as client,
            client.stream("POST", self._url, content=body, headers=headers) as reply,
        ):
            if reply.status_code != 200:
                raise InputError(f"{self._url} refuses the question: HTTP {reply.status_code} {reply.reason_phrase}")
            async for part in reply.aiter_raw():
                answer = (answer + part)[:_LARGEST]
                if len(answer) == _LARGEST:
                    break
        return answer


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
