"""Tokenizers and token sequences; none learns from training texts, which a vocabulary would tell of."""

from __future__ import annotations

import csv
import gzip
import re
import string
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.core.config.data import CorpusConfig
from fedpriv.core.errors import InputError, one_line, optional
from fedpriv.core.names import END, PAD, START
from fedpriv.core.npz import read_arrays, require_headers
from fedpriv.data.chats import template_files

if TYPE_CHECKING:
    from torch import Tensor

_OWN = ("<pad>", "<start>", "<end>")
_STORIES, _WORDS = "stories260k.npz", "word_freq_en.csv.gz"


class Tokenizer(ABC):
    """A tokenizer."""

    name: str  # as in `data.text.tokenizer`
    size: int  # of the vocabulary
    unknown: int | None = None  # the token of all that is not in the vocabulary

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without its beginning and end."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; those without a text of their own are left out."""


class Bytes(Tokenizer):
    """The bytes of UTF-8."""

    name = "byte"
    size = len(_OWN) + 256

    @override
    def encode(self, text: str) -> list[int]:
        return [len(_OWN) + byte for byte in text.encode()]

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        raw = bytes(token - len(_OWN) for token in tokens if token >= len(_OWN))
        return raw.decode(errors="replace")


class Words(Tokenizer):
    """Lower-case words, digits and marks; what is not among them is one token more."""

    name = "word"
    unknown = END + 1
    _PIECES = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d|\S")

    def __init__(self, words: Sequence[str], size: int) -> None:
        marks = [*string.digits, *string.punctuation]
        known = [*_OWN, "<unknown>", *marks, *(word for word in words if word not in marks)][:size]
        self.size = len(known)
        self._words = known
        self._numbers = {word: number for number, word in enumerate(known) if number > END}

    @override
    def encode(self, text: str) -> list[int]:
        return [self._numbers.get(piece, self.unknown) for piece in self._PIECES.findall(text.lower())]

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self._words[token] for token in tokens if token > END)


class Pairs(Tokenizer):
    """Pairs of bytes merged by frequency (Gage 1994; Sennrich et al. 2016), by the library ``tokenizers``."""

    name = "bpe"

    def __init__(self, texts: Sequence[str], size: int, path: str = "") -> None:
        tokenizers = optional("tokenizers", "text", "data.text.tokenizer = 'bpe'")
        self._library = self._read(tokenizers, path) if path else self._trained(tokenizers, texts, size)
        self.size = len(_OWN) + int(self._library.get_vocab_size())

    @override
    def encode(self, text: str) -> list[int]:
        try:
            found = self._library.encode(text, add_special_tokens=False).ids
        except Exception as error:  # noqa: BLE001 - the library raises no other kind
            raise InputError(
                key="data.text.tokenizer", given="bpe", allowed=f"a text cannot be encoded: {one_line(error)}"
            ) from None
        return [len(_OWN) + int(number) for number in found]

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._library.decode([token - len(_OWN) for token in tokens if token >= len(_OWN)]))

    @staticmethod
    def _read(tokenizers: Any, path: str) -> Any:
        try:
            library = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # noqa: BLE001 - the library raises no other kind
            hint = "expected is a tokenizer.json of the library tokenizers"
            raise InputError(f"data.text.vocabulary_file: {path}: {one_line(error)}", hint=hint) from None
        numbers = sorted(library.get_vocab().values())
        if not numbers or numbers != list(range(len(numbers))):
            raise InputError(
                f"data.text.vocabulary_file: {path}: expected a vocabulary with the numbers 0, 1, 2 and so on; it has "
                + (f"{len(numbers)} from {numbers[0]} to {numbers[-1]}" if numbers else "no tokens")
            )
        # Files may ask for both. Sequences are cut and padded here, with a token that no text has.
        library.no_truncation()
        library.no_padding()
        return library

    @staticmethod
    def _trained(tokenizers: Any, texts: Sequence[str], size: int) -> Any:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        wanted = max(size - len(_OWN), len(alphabet))
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=wanted, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator(texts, trainer)
        return made


class LlamaTokens(Tokenizer):
    """The tokens of stories260k.npz: single characters, of which the best pair is merged until there is none."""

    name = "llama"
    _BYTES = 3  # the first of the 256 bytes

    def __init__(self, vocabulary: Sequence[bytes], scores: Sequence[float]) -> None:
        self.vocabulary = tuple(vocabulary)
        self.size = len(self.vocabulary)
        self._scores = tuple(scores)
        self._numbers: Mapping[bytes, int] = {token: at for at, token in reversed(list(enumerate(self.vocabulary)))}
        # No token has a space but at its beginning, so that what a space begins is merged by itself.
        self._merged = lru_cache(maxsize=1 << 16)(self._merge)

    @staticmethod
    def read(path: Path) -> LlamaTokens:
        """Return the tokenizer that the file of the model holds."""
        arrays = read_arrays(path, require_headers(path, ("vocab", "vocab_scores")))
        # numpy drops zero bytes at the end of a text, and one of the tokens is a space alone.
        vocabulary = [bytes(token) for token in arrays["vocab"].tolist()]
        return LlamaTokens(vocabulary, arrays["vocab_scores"].tolist())

    def number(self, token: bytes) -> int | None:
        """Return which token has these bytes; ``None``: none has."""
        return self._numbers.get(token)

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return bytes([token - self._BYTES]) if 0 <= token - self._BYTES < 256 else self.vocabulary[token]

    @override
    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r" ?[^ ]+| ", f" {text}") if text else []
        return [number for piece in pieces for number in self._merged(piece)]

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        raw = b"".join(self.raw(token) for token in tokens if token > END)
        return raw.decode(errors="replace").removeprefix(" ")

    def _merge(self, piece: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for character in piece:
            raw = character.encode()
            number = self.number(raw)
            tokens += [number] if number is not None and number >= self._BYTES else [self._BYTES + byte for byte in raw]
        while pairs := [
            (self._scores[number], -place, number)
            for place in range(len(tokens) - 1)
            if (number := self.number(self.raw(tokens[place]) + self.raw(tokens[place + 1]))) is not None
        ]:
            _, place, number = max(pairs)
            tokens[-place : 2 - place] = [number]
        return tuple(tokens)


def tokenizer_files(config: CorpusConfig, root: Path) -> tuple[Path, ...]:
    """Return the files that :func:`open_tokenizer` reads."""
    if config.tokenizer == "bpe" and config.vocabulary_file:
        beside = (path for path in template_files(config.vocabulary_file) if path.is_file())
        return (Path(config.vocabulary_file), *beside)
    return {"byte": (), "bpe": (), "word": (root / _WORDS,), "llama": (root / _STORIES,)}[config.tokenizer]


def open_tokenizer(config: CorpusConfig, root: Path, public: Sequence[str]) -> Tokenizer:
    """Return the tokenizer that the settings name."""
    if config.tokenizer == "byte":
        return Bytes()
    if config.tokenizer == "word":
        return Words(_public_words(root / _WORDS), config.vocabulary)
    if config.tokenizer == "bpe":
        return Pairs(public, config.vocabulary, config.vocabulary_file)
    return LlamaTokens.read(root / _STORIES)


def _public_words(path: Path) -> list[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [row["word"] for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; data.text.tokenizer = 'word' takes its words from it") from None
    except (OSError, EOFError, zlib.error, csv.Error, KeyError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from None


# From texts to sequences of tokens: padded or packed, for labels or for the next token.


NO_TARGET = -100
"""What stands where nothing is predicted; torch's cross entropy leaves it out."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What is to be known of a data set of texts, beside its tokens."""

    task: Literal["classify", "next"]  # classify: the label of a sequence; next: each token from those before it
    tokenizer: Tokenizer  # that made the tokens
    packed: bool = False  # whether sequences are cut from texts laid end to end
    response: str = ""  # next: what stands before what is learnt; empty: everything is
    until: str = ""  # next: the last of what is learnt, up to the next response; empty: the rest is

    @property
    def mark(self) -> tuple[int, ...]:
        """The tokens behind which the loss counts; empty: everywhere."""
        return tuple(self.tokenizer.encode(self.response)) if self.response else ()

    @property
    def until_mark(self) -> tuple[int, ...]:
        """The tokens behind which the loss counts no more, up to the next :attr:`mark`; empty: it counts on."""
        return tuple(self.tokenizer.encode(self.until)) if self.until else ()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; no token reaches over the beginning or the end of a mark."""
        marks = "|".join(re.escape(mark) for mark in (self.response, self.until) if mark)
        parts = re.split(f"({marks})", text, maxsplit=0 if self.until else 1) if marks else [text]
        return [token for part in parts if part for token in self.tokenizer.encode(part)]


def next_targets(tokens: Tensor, mark: Sequence[int] = (), until: Sequence[int] = ()) -> Tensor:
    """Return the token after each, (..., T), of (..., T + 1); none where padding is, or outside of responses.

    Responses begin behind ``mark``, and end with ``until``, if there is one.
    """
    import torch

    following = tokens[..., 1:]
    wanted = following != PAD
    if mark:
        wanted = wanted & (_last(tokens, mark) > (_last(tokens, until) if until else -1))
    return torch.where(wanted, following, NO_TARGET)


def _last(tokens: Tensor, mark: Sequence[int]) -> Tensor:
    """Where the last mark up to each token ends, (..., T) of (..., T + 1); -1: there is none."""
    import torch

    if tokens.shape[-1] < len(mark):
        return torch.full_like(tokens[..., 1:], -1)
    ends = (tokens.unfold(-1, len(mark), 1) == tokens.new_tensor(mark)).all(dim=-1)
    places = torch.arange(len(mark) - 1, tokens.shape[-1], device=tokens.device)
    last = torch.where(ends, places, -1).cummax(dim=-1).values[..., :-1]
    return torch.nn.functional.pad(last, (len(mark) - 1, 0), value=-1)


def labelled(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Numbers:
    """Return sequences (N, length), each a text with its beginning, cut off or padded at the end."""
    return _padded([[START, *tokenizer.encode(text)][:length] for text in texts], length)


def next_tokens(
    facts: TextFacts, texts: Sequence[str], owners: Sequence[int], length: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Return inputs (N, length), the token after each, (N, length), and whose a sequence is, (N,)."""
    import torch

    mark, until = facts.mark, facts.until_mark
    marks = [mark for text, mark in ((facts.response, mark), (facts.until, until)) if text]
    if not all(marks) or any(facts.tokenizer.unknown in mark for mark in marks):
        allowed = f"the tokenizer {facts.tokenizer.name} does not know it; a larger vocabulary may"
        raise InputError(key="data.text.response", given=facts.response, allowed=allowed)
    if len(mark) > length:
        raise InputError(f"data.text.response has {len(mark)} tokens, and a sequence {length} (data.text.length)")
    streams = _together(facts, texts, owners) if facts.packed else _apart(facts, texts, owners)
    pieces, whose = [], []
    for owner, stream in streams:
        starts = range(0, len(stream) - 1, length) if facts.packed else (0,)
        pieces += [stream[start : start + length + 1] for start in starts]
        whose += [owner] * len(starts)
    tokens = _padded(pieces, length + 1)
    targets = next_targets(torch.from_numpy(tokens), mark, until).numpy()
    return tokens[:, :-1], targets, np.array(whose, dtype=np.int64)


def _apart(facts: TextFacts, texts: Sequence[str], owners: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    for text, owner in zip(texts, owners, strict=True):
        yield owner, [START, *facts.encode(text), END]


def _together(facts: TextFacts, texts: Sequence[str], owners: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    streams: dict[int, list[int]] = {}
    for owner, tokens in _apart(facts, texts, owners):
        streams.setdefault(owner, []).extend(tokens)
    yield from streams.items()


def _padded(rows: Sequence[Sequence[int]], length: int) -> Numbers:
    tokens = np.full((len(rows), length), PAD, dtype=np.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return tokens
