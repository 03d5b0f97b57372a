"""Private examples and public questions from data sets of texts, and the words around them in a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import DATASETS
from fedpriv.data.source import data_folder, home
from fedpriv.data.texts import SPLITS, Corpus, Row, TextColumns, check_splits, csv_wanted, read_texts
from fedpriv.prompts.settings import TextConfig

_TEST_SHARE = 0.2  # of files without a column "split"


@dataclass(frozen=True)
class Example:
    """A text and its label, from 0."""

    text: str
    label: int


@dataclass(frozen=True)
class PromptTexts:
    """Private examples, public questions, and what a prompt says around them."""

    source: str  # one line that says where they came from
    examples: tuple[Example, ...]  # whom prompts may be made of
    questions: tuple[Example, ...]  # test texts with their labels, for scoring
    labels: tuple[str, ...]  # what the model is to say, one a label
    text_word: str  # stands before a text in a prompt
    label_word: str  # stands before a label in a prompt


# What prompts call a text and a label of each data set.
_WORDS = {
    "sst2": ("Review", "Sentiment"),
    "rotten_tomatoes": ("Review", "Sentiment"),
    "agnews": ("Article", "Topic"),
    "sms_spam": ("Message", "Label"),
    "csv": ("Text", "Label"),
}


def load_texts(config: TextConfig, seed: int) -> PromptTexts:
    """Read the texts that the settings name.

    A column ``split`` says which rows are private (train) and which are questions (test); a file that is known by name
    may have others, which are left out. Without one a fifth of the rows, drawn by the seed, are questions. Which rows
    are private depends on no text, so neighbours have as many.
    """
    known: type[Corpus] | None = None if config.name == "csv" else DATASETS[config.name]
    path = home(config.path) if known is None else data_folder(config.root) / known.file
    columns = TextColumns(config.text, config.label) if known is None else known.columns
    labels = None if known is None else dict(known.labels)
    if known is not None and not path.is_file():
        raise InputError(
            key="data.name",
            given=config.name,
            allowed=f"{path} is not there, and is not downloaded: {known.title}, as "
            f"{csv_wanted(columns, dict(known.labels))}; a column split (train, test) may be missing",
        )
    rows = read_texts(path, columns)
    if any(row.chat for row in rows):
        raise InputError(key="data.text", given=config.text, allowed=f"{path} has chats there; expected texts")
    if known is None:
        check_splits(path, rows)
    spoken = _spoken(path, rows, labels, config.labels)
    numbers = {label: number for number, label in enumerate(spoken)}
    train, test = _parts([(Example(row.text, numbers[row.label or ""]), row.split) for row in rows], seed)
    if not train or not test:
        raise InputError(f"{path}: {len(train)} private examples and {len(test)} questions; expected both")
    if config.examples is not None:
        if config.examples > len(train):
            raise InputError(
                key="data.examples", given=config.examples, allowed=f"{path} has {len(train)} private examples"
            )
        kept = np.sort(numpy_stream(seed, "icl-examples").choice(len(train), config.examples, replace=False))
        train = [train[number] for number in kept]
    return PromptTexts(str(path), tuple(train), tuple(test), tuple(spoken.values()), *_WORDS[config.name])


def _spoken(path: Path, rows: Sequence[Row], known: Mapping[str, str] | None, given: Sequence[str]) -> dict[str, str]:
    """What the model is to say for each label of the file."""
    present = sorted({row.label or "" for row in rows})
    usual = {label: label for label in present} if known is None else dict(known)
    strange = [label for label in present if label not in usual]
    if strange:
        raise InputError(f"{path}: the label {strange[0]!r} is not known; allowed: {', '.join(usual)}")
    if given:
        if len(given) != len(usual):
            raise InputError(f"data.labels has {len(given)} entries, and {path} has {len(usual)} labels")
        usual = dict(zip(usual, given, strict=True))
    if len(set(usual.values())) != len(usual) or len(usual) < 2:
        said = ", ".join(map(repr, usual.values()))
        raise InputError(f"{path}: expected at least two labels, each with a word of its own; given: {said}")
    return usual


def _parts(rows: Sequence[tuple[Example, str | None]], seed: int) -> tuple[list[Example], list[Example]]:
    """Private examples and questions."""
    if any(split is not None for _, split in rows):
        private, asked = ([row for row, split in rows if split == part] for part in SPLITS)
        return private, asked
    order = numpy_stream(seed, "icl-split").permutation(len(rows))
    chosen = set(order[: round(_TEST_SHARE * len(rows))].tolist())
    private = [row for number, (row, _) in enumerate(rows) if number not in chosen]
    return private, [rows[number][0] for number in sorted(chosen)]


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
