"""Language models through one interface; a prompt never causes an error, which would tell of private examples."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.names import END, START
from fedpriv.data.source import home
from fedpriv.data.tokenizers import LlamaTokens
from fedpriv.models.machinery.llama import Llama
from fedpriv.prompts.settings import LanguageConfig

Floats = NDArray[np.float64]


class LanguageModel(ABC):
    """A language model."""

    title: str  # what it is, for people
    is_language_model: ClassVar[bool] = True  # whether it is one

    @abstractmethod
    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        """Return each candidate's first token's log-probability, (prompts, candidates), over the vocabulary."""

    @abstractmethod
    def token(self, candidate: str) -> int | str:
        """Return the first token of a candidate, or what tells it from others."""

    def check(self, candidates: Sequence[str]) -> None:
        """Refuse candidates that begin with the same token."""
        by_token: dict[int | str, str] = {}
        for candidate in candidates:
            other = by_token.setdefault(self.token(candidate), candidate)
            if other != candidate:
                raise InputError(
                    f"data.labels: {other.strip()!r} and {candidate.strip()!r} begin with the same token of this "
                    "model, which cannot tell them apart; say them differently"
                )

    def after(self, prefixes: Sequence[str], endings: Sequence[str], candidates: Sequence[str]) -> Floats:
        """Return :meth:`next_token` of each prefix with each ending: (prefixes, endings, candidates)."""
        prompts = [prefix + ending for prefix in prefixes for ending in endings]
        return self.next_token(prompts, candidates).reshape(len(prefixes), len(endings), len(candidates))

    @abstractmethod
    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        """Return the texts of the ``count`` likeliest next tokens, or fewer, in order; the end's text is empty."""

    def write(self, prompt: str, tokens: int) -> str:
        """Return what the model writes behind a prompt: the likeliest token each time, until it ends or so many."""
        written = ""
        for _ in range(tokens):
            token = self.likeliest(prompt + written, 1)[0]
            if not token:
                break
            written += token
        return written


class Counting(LanguageModel):
    """Counts in which blocks of the prompt the words of its last block occur. It is not a language model.

    A prompt is made of blocks apart by an empty line, each a text and, in its last line behind the colon, a label. The
    score of a label is 1 + the number of words of the last block's text in the blocks with that label, each counted
    once a block; probabilities are scores over their sum. Blocks without text, and labels that are no candidate, count
    for nothing. For tests, and for demonstrations that say what it is.
    """

    title = "word counts"
    is_language_model = False

    @override
    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        return np.array([_counted(prompt, [candidate.strip() for candidate in candidates]) for prompt in prompts])

    @override
    def token(self, candidate: str) -> str:
        return candidate.strip()

    @override
    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        raise InputError("model.name = 'counting' counts words and writes nothing; use a language model")


def _counted(prompt: str, labels: Sequence[str]) -> Floats:
    *blocks, last = prompt.split("\n\n")
    asked = _words(last.rpartition("\n")[0])
    scores = np.ones(len(labels))
    for block in blocks:
        text, _, label = block.rpartition(":")
        if label.strip() in labels:
            scores[labels.index(label.strip())] += len(asked & _words(text.rpartition("\n")[0]))
    return np.log(scores / scores.sum())


def _words(text: str) -> set[str]:
    """Of a text, without the word that stands before it."""
    return set(re.findall(r"\w+", text.partition(":")[2].lower()))


class Transformer(LanguageModel):
    """A local folder as transformers writes it (config.json, model.safetensors, tokenizer.json); no downloads."""

    def __init__(self, folder: Path, batch: int) -> None:
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
        for name, there in (("config.json", (folder / "config.json").is_file()), ("*.safetensors (weights)", weights)):
            if not there:
                raise InputError(f"model.path = {str(folder)!r} holds no language model: there is no {name}")
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise InputError(
                f"model.name = 'folder' needs transformers ({one_line(error)}); pip install 'fedpriv[icl]'"
            ) from None
        try:
            self._tokens: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype="auto", use_safetensors=True
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise InputError(
                key="model.path", given=str(folder), allowed=f"no model can be read: {one_line(error)}"
            ) from None
        self._batch = batch
        self._longest = int(getattr(self._model.config, "max_position_embeddings", 0) or 2048)
        self.title = f"{folder.name or 'model'}, {sum(p.numel() for p in self._model.parameters()):,} parameters"

    @override
    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        return self.after(prompts, [""], candidates)[:, 0]

    @override
    def after(self, prefixes: Sequence[str], endings: Sequence[str], candidates: Sequence[str]) -> Floats:
        chosen = [self.token(candidate) for candidate in candidates]
        scores = np.empty((len(prefixes), len(endings), len(chosen)))
        # Together with others of about its length, so that little padding is read.
        order = np.argsort([len(prefix) for prefix in prefixes], kind="stable")
        for start in range(0, len(prefixes), self._batch):
            rows = order[start : start + self._batch]
            scores[rows] = self._read([prefixes[row] for row in rows], endings)[..., chosen]
        return scores

    @override
    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        order = self._read([prompt], [""])[0, 0].argsort()[::-1][:count]
        ends = self._tokens.eos_token_id
        return tuple("" if token == ends else self._tokens.decode([token]) for token in order.tolist())

    @override
    def token(self, candidate: str) -> int:
        return self._ids(candidate)[0] if candidate else int(self._tokens.eos_token_id or 0)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokens.encode(text, add_special_tokens=False))

    def _read(self, prefixes: Sequence[str], endings: Sequence[str]) -> Floats:
        """Log-probabilities over the vocabulary, (prefixes, endings, V). What prefixes share with all endings is read
        once: its keys and values are kept, and each ending is read behind them.
        """
        begin = [self._tokens.bos_token_id] if self._tokens.bos_token_id is not None else []
        last = [self._ids(ending) for ending in endings]
        room = self._longest - max(map(len, last))
        firsts = [[*begin, *self._ids(prefix)][-room:] or [self._tokens.eos_token_id or 0] for prefix in prefixes]
        if not all(last):
            # Nothing is left behind the prefix to be read: its last token is.
            if len(endings) > 1:
                raise ValueError("an empty ending goes alone")
            last = [[]]
        with torch.inference_mode():
            return self._scored(firsts, last)

    def _scored(self, firsts: list[list[int]], last: list[list[int]]) -> Floats:
        width = max(map(len, firsts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in firsts])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in firsts])
        places = (seen.cumsum(1) - 1).clamp(min=0)
        read = self._model(input_ids=ids, attention_mask=seen, position_ids=places, use_cache=True, logits_to_keep=1)
        if last == [[]]:
            return self._log_probabilities(read.logits)[:, None]
        cache, results = read.past_key_values, []
        for ending in last:
            more = torch.tensor([ending]).expand(len(firsts), -1)
            whole = torch.cat([seen, torch.ones_like(more)], 1)
            behind = places[:, -1:] + 1 + torch.arange(len(ending))
            read = self._model(
                input_ids=more, attention_mask=whole, position_ids=behind, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            results.append(self._log_probabilities(read.logits))
            cache.crop(-len(ending))
        return np.stack(results, axis=1)

    def _log_probabilities(self, logits: torch.Tensor) -> Floats:
        return logits[:, -1].double().log_softmax(-1).numpy()


def open_language(config: LanguageConfig, root: Path) -> LanguageModel:
    """Return the language model of the settings."""
    match config.name:
        case "counting":
            return Counting()
        case "stories":
            return Stories(root / "stories260k.npz")
        case "folder":
            return Transformer(home(config.path), config.batch)
        case "http":
            from fedpriv.prompts.remote import Http

            return Http(config)


class Stories(LanguageModel):
    """The model and its tokenizer."""

    def __init__(self, path: Path) -> None:
        self._network = Llama.read(path).double().eval()
        self._tokenizer = LlamaTokens.read(path)
        self.title = "stories260K, 260,032 parameters"

    def tokens(self, text: str) -> list[int]:
        """Return a text as tokens."""
        return self._tokenizer.encode(text)

    @override
    def next_token(self, prompts: Sequence[str], candidates: Sequence[str]) -> Floats:
        chosen = [self.token(candidate) for candidate in candidates]
        return np.array([self._scores([START, *self.tokens(prompt)])[chosen] for prompt in prompts])

    @override
    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        order = self._scores([START, *self.tokens(prompt)]).argsort(kind="stable")[::-1][:count].tolist()
        raw = (b"" if token in (START, END) else self._tokenizer.raw(token) for token in order)
        texts = (token.decode(errors="replace") for token in raw)
        # The space in front of a text's first word is the tokenizer's own.
        return tuple(texts if prompt else (text.removeprefix(" ") for text in texts))

    @override
    def token(self, candidate: str) -> int:
        if candidate == "":
            return END
        number = self._tokenizer.number(candidate.encode())
        # The tokenizer puts a space in front of a text, as candidates have it.
        return number if number is not None else self.tokens(candidate.removeprefix(" "))[0]

    def _scores(self, tokens: list[int]) -> Floats:
        """Log-probabilities of the next token, (V,)."""
        longest = self._network.context
        tokens = [START, *tokens[-longest + 1 :]] if len(tokens) > longest else tokens
        with torch.inference_mode():
            logits = self._network(torch.tensor([tokens]))[0, -1]
            scores: Floats = torch.log_softmax(logits, dim=0).numpy()
        return scores
