"""Word prompts from examples, and draw which examples are in which prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.prompts.texts import Example, PromptTexts

CONTENT_FREE = "N/A"
"""A question without content (Zhao et al. 2021)."""


@dataclass(frozen=True)
class Wording:
    """How examples and questions look: blocks apart by an empty line, which ends in what the model is to say."""

    texts: PromptTexts  # whose labels and words these are
    words: int  # of a text that are kept

    def cut(self, text: str) -> str:
        """Return a text in one line, its first words only."""
        return " ".join(text.split()[: self.words])

    def example(self, example: Example) -> str:
        """Return an example as a block with its label."""
        return f"{self._asked(example.text)} {self.texts.labels[example.label]}"

    def prefix(self, examples: Sequence[Example]) -> str:
        """Return what stands before a question; empty without examples."""
        return "\n\n".join(self.example(example) for example in examples)

    def ending(self, text: str, has_prefix: bool) -> str:
        """Return a question, apart from what stands before it."""
        return ("\n\n" if has_prefix else "") + self._asked(text)

    @property
    def candidates(self) -> tuple[str, ...]:
        """What the model may say, one a label."""
        return tuple(f" {label}" for label in self.texts.labels)

    def _asked(self, text: str) -> str:
        return f"{self.texts.text_word}: {self.cut(text)}\n{self.texts.label_word}:"


def drawn(available: int, prompts: int, shots: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw who is in which prompt, (prompts, shots): numbers of examples, each in one prompt at most."""
    check_enough(available, prompts, shots)
    return generator.choice(available, prompts * shots, replace=False).reshape(prompts, shots)


def check_enough(available: int, prompts: int, shots: int, whose: str = "") -> None:
    """Refuse more examples in prompts than there are."""
    if prompts * shots > available:
        raise InputError(
            f"icl.prompts = {prompts} with icl.shots = {shots} take {prompts * shots} examples, and there are "
            f"{available}{whose}"
        )
