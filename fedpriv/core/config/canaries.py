"""The section [data.canaries]: secrets in a client's texts, to measure what a model remembers of them."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.settings import Integer, Settings

_Copies = Annotated[Integer, Field(ge=1, le=100_000)]
_MOST_BITS = 256  # of a secret: its exposure is a number of bits


class CanaryConfig(Settings):
    """Random sequences in the training data, after Carlini et al. 2019 (The Secret Sharer)."""

    count: Annotated[Integer, Field(ge=1, le=1000)] = Field(8, description="secrets that are put in, each its own draw")
    copies: Annotated[tuple[_Copies, ...], Field(min_length=1)] = Field(
        (1,), description="how often each is put in; several numbers are gone through again and again"
    )
    length: Annotated[Integer, Field(ge=1, le=256)] = Field(4, description="tokens of a secret")
    alphabet: Annotated[str, Field(min_length=2)] = Field(
        "0123456789", description="the characters that its tokens are drawn from"
    )
    prefix: str = Field("the secret number is ", description="what stands before each, and is public")
    client: Annotated[Integer, Field(ge=0)] = Field(0, description="whose training sequences are replaced")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        if len(set(self.alphabet)) != len(self.alphabet):
            raise InputError(f"alphabet = {self.alphabet!r} has a character twice")
        # As many again are drawn that are not put in.
        if 2 * self.count > self.space:
            raise InputError(
                key="count",
                given=self.count,
                allowed=f"alphabet and length make {self.space} secrets, and twice as many as count are drawn",
            )
        if self.space.bit_length() > _MOST_BITS:
            raise InputError(key="length", given=self.length, allowed=f"a secret of more than {_MOST_BITS} bits")
        return self

    @property
    def space(self) -> int:
        """How many secrets there are: |R|."""
        return int(len(self.alphabet) ** self.length)

    def copies_of(self, canary: int) -> int:
        """Return how often a secret is put in."""
        return self.copies[canary % len(self.copies)]

    @property
    def rows(self) -> int:
        """How many training sequences are replaced."""
        return sum(map(self.copies_of, range(self.count)))
