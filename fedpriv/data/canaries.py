"""Canaries: random secrets in the place of some of one client's training sequences (Carlini et al. 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.core.config.data import CanaryConfig
from fedpriv.core.errors import InputError
from fedpriv.core.names import END, PAD, START
from fedpriv.core.randomness import numpy_stream
from fedpriv.data.datasets import Dataset
from fedpriv.data.tokenizers import Tokenizer, next_targets

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Canaries:
    """Secrets as tokens."""

    start: Numbers  # tokens before each secret, its beginning included, (m,)
    alphabet: Numbers  # tokens that secrets are made of, (A,)
    # numbers in the alphabet, (2 N, n), all different: N that are put in, then N that nobody trains on
    secrets: Numbers
    copies: Numbers  # how often each of the former is put in, (N,)

    @property
    def space(self) -> int:
        """|R|, how many secrets there are."""
        return int(len(self.alphabet) ** self.secrets.shape[1])

    @property
    def inserted(self) -> int:
        """N, how many are put in."""
        return len(self.copies)


def drawn_canaries(config: CanaryConfig, dataset: Dataset, seed: int) -> Canaries:
    """Draw the secrets of an experiment, each uniform among those that are left."""
    if dataset.text is None or not dataset.is_next:
        raise InputError("data.canaries: canaries are for models that learn the next token (data.text.task = 'next')")
    tokenizer, length = dataset.text.tokenizer, dataset.shape[-1]
    start = [START, *dataset.text.encode(config.prefix)]
    behind = config.prefix.rpartition(dataset.text.response)[2] if dataset.text.response else ""
    if dataset.text.response not in config.prefix or (dataset.text.until and dataset.text.until in behind):
        up_to = f" up to {dataset.text.until!r}" if dataset.text.until else ""
        raise InputError(
            key="data.canaries.prefix",
            given=config.prefix,
            allowed=f"data.text.response = {dataset.text.response!r} in it, behind which the loss counts{up_to}",
        )
    if len(start) + config.length > length:
        raise InputError(
            f"data.canaries: beginning, prefix and secret have {len(start)} + {config.length} tokens, and a sequence "
            f"has {length} (data.text.length)"
        )
    alphabet = [_token(tokenizer, character) for character in config.alphabet]
    rng = numpy_stream(seed, "canaries")
    secrets: dict[tuple[int, ...], None] = {}
    while len(secrets) < 2 * config.count:
        secrets[tuple(rng.integers(len(alphabet), size=config.length).tolist())] = None
    copies = [config.copies_of(number) for number in range(config.count)]
    return Canaries(*(np.array(each, dtype=np.int64) for each in (start, alphabet, list(secrets), copies)))


def _token(tokenizer: Tokenizer, character: str) -> int:
    tokens = tokenizer.encode(character)
    # Some tokenizers put a space before a word.
    if not tokens or tokenizer.decode(tokens[-1:]) not in (character, f" {character}"):
        raise InputError(f"data.canaries.alphabet: {character!r} is no token of the tokenizer {tokenizer.name}")
    return tokens[-1]


def canary_rows(shares: Sequence[Numbers], config: CanaryConfig, seed: int) -> Numbers:
    """Return which training sequences are replaced, secret by secret, as often as each is put in."""
    if config.client >= len(shares):
        raise InputError(
            key="data.canaries.client", given=config.client, allowed=f"there are clients 0 to {len(shares) - 1}"
        )
    own = shares[config.client]
    if config.rows > len(own):
        raise InputError(
            f"data.canaries: {config.rows} copies in all replace training sequences of client {config.client}, which "
            f"has {len(own)}"
        )
    return numpy_stream(seed, "canary-rows").choice(own, config.rows, replace=False)


def with_canaries(dataset: Dataset, shares: Sequence[Numbers], config: CanaryConfig | None, seed: int) -> Dataset:
    """Return the data set with the canaries in place of some of a client's sequences, which the seed draws."""
    if config is None:
        return dataset
    canaries = drawn_canaries(config, dataset, seed)
    rows = canary_rows(shares, config, seed)
    tokens = np.repeat(_sequences(canaries, dataset.shape[-1] + 1), canaries.copies, axis=0)
    x, y = dataset.x_train.clone(), dataset.y_train.clone()
    x[rows] = torch.from_numpy(tokens[:, :-1]).to(x.dtype).view(-1, *dataset.shape)
    marks = () if dataset.text is None else (dataset.text.mark, dataset.text.until_mark)
    y[rows] = next_targets(torch.from_numpy(tokens), *marks)
    return replace(dataset, x_train=x, y_train=y, source=f"{dataset.source}; {len(rows)} sequences are canaries")


def _sequences(canaries: Canaries, length: int) -> Numbers:
    """The secrets that are put in with what stands before and behind, padded, (N, length)."""
    secrets = canaries.alphabet[canaries.secrets[: canaries.inserted]]
    tokens = np.full((canaries.inserted, length), PAD, dtype=np.int64)
    begin, end = len(canaries.start), len(canaries.start) + secrets.shape[1]
    tokens[:, :begin], tokens[:, begin:end], tokens[:, end] = canaries.start, secrets, END
    return tokens
