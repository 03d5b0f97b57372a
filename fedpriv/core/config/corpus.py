"""The section [data.text]: how texts become sequences of tokens, and what is to be learnt from them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.settings import Count, Integer, Real, Settings


class CorpusConfig(Settings):
    """How texts are read, cut into tokens and laid into sequences."""

    task: Literal["classify", "next"] | None = Field(
        None,
        description="classify: the label of a text; next: each token from those before it; unset: classify where the "
        "texts have labels, else next",
    )
    tokenizer: Literal["byte", "word", "bpe", "llama"] = Field(
        "byte",
        description="byte: the bytes of UTF-8; word: the commonest words of a public list (word_freq_en.csv.gz in the "
        "folder of the data sets); bpe: pairs of bytes merged by the library tokenizers; llama: the 512 tokens of "
        "stories260k.npz",
    )
    vocabulary: Annotated[Integer, Field(ge=16, le=1_000_000)] = Field(
        4096, description="word, bpe: number of tokens, the four with a meaning and punctuation included"
    )
    vocabulary_file: str = Field(
        "", description="bpe: a tokenizer.json of the library tokenizers; empty: trained on the test texts"
    )
    length: Annotated[Integer, Field(ge=2, le=8192)] = Field(64, description="tokens of a sequence")
    pack: bool = Field(
        False,
        description="next: lay the texts of a key end to end and cut them into sequences; false: a sequence is one "
        "text, cut off or padded",
    )
    text: Annotated[str, Field(min_length=1)] = Field("text", description="own files: the column of the texts")
    label: str = Field("", description="own files: the column of the labels; empty: none")
    test_share: Annotated[Real, Field(gt=0, lt=1)] = Field(
        0.1, description="share of the texts that is the test set, the last ones of each key, where no column says so"
    )
    tests: Count | None = Field(None, description="use only so many test sequences, drawn once for all; unset: all")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.pack and self.task == "classify":
            raise InputError("pack = true lays texts end to end, and task = 'classify' needs each by itself")
        if self.vocabulary_file and self.tokenizer != "bpe":
            raise InputError(f"vocabulary_file goes with tokenizer = 'bpe'; given {self.tokenizer!r}")
        if self.tokenizer == "bpe" and not self.vocabulary_file and self.vocabulary < _BYTES:
            raise InputError(f"tokenizer = 'bpe' has {_BYTES} tokens before it merges; vocabulary = {self.vocabulary}")
        return self


_BYTES = 256 + 3
"""Every byte, and the tokens that pad, begin and end."""
