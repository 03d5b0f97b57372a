"""A Llama of 260,032 parameters that was trained on children's stories (llama2.c's stories260K), for fast tests.

RMS norms, rotary positions, grouped queries and a gated feed-forward layer (Touvron et al. 2023, arXiv 2302.13971;
Shazeer 2020; Su et al. 2021; Ainslie et al. 2023), in numpy, one prompt at a time.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from typing_extensions import override

from fedpriv.errors import InputError
from fedpriv.icl.language import Floats, Language
from fedpriv.npz import read_arrays, read_headers

__all__ = ["Stories"]

_LAYERS = ("attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3")
_ARRAYS = ("config", "tok_embeddings", *_LAYERS, "norm", "vocab", "vocab_scores")
_START, _END, _BYTES = 1, 2, 3  # tokens: start and end of text, and the first of the 256 bytes
_EPSILON, _BASE = 1e-5, 10_000.0  # of the RMS norms, and of the rotary positions


class Stories(Language):
    """The model and its tokenizer.

    Args:
        path: of stories260k.npz.

    Raises:
        InputError: it is not there, or not that file.
    """

    def __init__(self, path: Path) -> None:
        headers = read_headers(path, _ARRAYS)
        missing = [name for name in _ARRAYS if name not in headers]
        if missing:
            raise InputError(f"{path} holds no language model: it lacks {', '.join(missing)}")
        self._weights = read_arrays(path, headers)
        size = [int(number) for number in self._weights["config"]]
        self._width, _, self._depth, self._heads, self._shared, _, self._longest = size
        self._vocabulary = [bytes(token) for token in self._weights["vocab"].tolist()]
        # numpy drops zero bytes at the end of a text, and one of the tokens is a space alone.
        self._numbers = {token: number for number, token in reversed(list(enumerate(self._vocabulary)))}
        self.title = "stories260K, 260,032 parameters"

    def tokens(self, text: str) -> list[int]:
        """Return a text as tokens: single characters, of which the best pair is merged until there is none."""
        tokens: list[int] = []
        for character in f" {text}" if text else "":
            raw = character.encode()
            number = self._numbers.get(raw)
            tokens += [number] if number is not None and number >= _BYTES else [_BYTES + byte for byte in raw]
        while pairs := [
            (float(self._weights["vocab_scores"][number]), -place, number)
            for place in range(len(tokens) - 1)
            if (number := self._numbers.get(self._raw(tokens[place]) + self._raw(tokens[place + 1]))) is not None
        ]:
            _, place, number = max(pairs)
            tokens[-place : 2 - place] = [number]
        return tokens

    @override
    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        chosen = [self.token(candidate) for candidate in candidates]
        return np.array([self._scores([_START, *self.tokens(prompt)])[chosen] for prompt in prompts])

    @override
    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        order = self._scores([_START, *self.tokens(prompt)]).argsort(kind="stable")[::-1][:count].tolist()
        texts = ("" if token in (_START, _END) else self._raw(token).decode(errors="replace") for token in order)
        # The space in front of a text's first word is the tokenizer's own.
        return tuple(texts if prompt else (text.removeprefix(" ") for text in texts))

    @override
    def token(self, candidate: str) -> int:
        if candidate == "":
            return _END
        number = self._numbers.get(candidate.encode())
        # The tokenizer puts a space in front of a text, as candidates have it.
        return number if number is not None else self.tokens(candidate.removeprefix(" "))[0]

    def _raw(self, token: int) -> bytes:
        return bytes([token - _BYTES]) if _BYTES <= token < _BYTES + 256 else self._vocabulary[token]

    def _scores(self, tokens: list[int]) -> Floats:
        """Log-probabilities of the next token, (V,)."""
        weights = self._weights
        tokens = [_START, *tokens[-self._longest + 1 :]] if len(tokens) > self._longest else tokens
        x = weights["tok_embeddings"][tokens].astype(np.float64)
        angles = _angles(len(tokens), self._width // self._heads)
        for layer in range(self._depth):
            own = {name: weights[name][layer].astype(np.float64) for name in _LAYERS}
            inside = _rms(x, own["attention_norm"])
            q, k, v = (inside @ own[name].T for name in ("wq", "wk", "wv"))
            x = x + self._attended(q, k, v, angles) @ own["wo"].T
            inside = _rms(x, own["ffn_norm"])
            gate = inside @ own["w1"].T
            x = x + (gate / (1 + np.exp(-gate)) * (inside @ own["w3"].T)) @ own["w2"].T
        logits = weights["tok_embeddings"].astype(np.float64) @ _rms(x[-1:], weights["norm"])[0]
        scores: Floats = logits - np.logaddexp.reduce(logits)
        return scores

    def _attended(self, q: Floats, k: Floats, v: Floats, angles: Floats) -> Floats:
        """Causal attention; each head of keys and values serves neighbouring heads of queries. (T, width)."""
        length, size = len(q), self._width // self._heads
        q = _turned(q.reshape(length, self._heads, size), angles)
        served = self._heads // self._shared
        k = np.repeat(_turned(k.reshape(length, self._shared, size), angles), served, axis=1)
        v = np.repeat(v.reshape(length, self._shared, size), served, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size)
        scores[:, ~np.tri(length, dtype=bool)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended: Floats = np.einsum("hij,jhd->ihd", shares, v).reshape(length, self._width)
        return attended


def _rms(x: Floats, weight: Floats) -> Floats:
    normed: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPSILON) * weight
    return normed


def _angles(length: int, size: int) -> Floats:
    """(T, size / 2): by how much each pair is turned at each place."""
    angles: Floats = np.outer(np.arange(length), _BASE ** (-np.arange(0, size, 2) / size))
    return angles


def _turned(x: Floats, angles: Floats) -> Floats:
    """Turn pairs (2i, 2i + 1) of each head, (T, heads, size)."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * np.exp(1j * angles)[:, None]
    result: Floats = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return result
