"""A Llama of 260,032 parameters that was trained on children's stories (llama2.c's stories260K), for fast tests.

The network and the tokenizer are those that experiments train (``model.name = "llama"``); here it is asked one prompt
at a time, in float64.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from fedpriv.core.names import END, START
from fedpriv.data.tokenizers import LlamaTokens
from fedpriv.models.machinery.llama import Llama
from fedpriv.prompts.language import Floats, LanguageModel


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
