"""Batch sampling: the examples of a client in each step, and how often an example can take part.

A batch is a function of (seed, partition, step), so that whoever knows the seed, such as the referee, can rebuild it;
nothing about it is sent. Steps are counted from 0 over the whole run, not within a round.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fedpriv.core.randomness import numpy_stream


@dataclass(frozen=True)
class Sampling:
    """How one client draws its batches."""

    # `shuffled`: the disjoint batches of a shuffled pass, and the rest that fills no batch waits for the next pass;
    # `fixed`: `batch_size` examples without replacement, independent of other steps; `poisson`: each example on its own
    # with probability `rate`, so that a batch may have any size, zero included; `balls-in-bins`: each example on its
    # own in one of the steps of a pass, so that batches of a pass are disjoint and vary in size
    kind: Literal["shuffled", "fixed", "poisson", "balls-in-bins"]
    batch_size: int  # examples in a batch (poisson, balls-in-bins: on average), from 1 to `examples`
    examples: int  # the client's number of examples n_k

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"a batch of {self.batch_size} examples; expected at least 1")
        if self.batch_size > self.examples:
            raise ValueError(f"a batch of {self.batch_size} is more than the {self.examples} examples there are")

    @property
    def rate(self) -> float:
        """The share of the client's examples in a batch, B / n_k; for balls-in-bins one step's share of a pass."""
        if self.kind == "balls-in-bins":
            return 1 / self.steps_per_epoch
        return self.batch_size / self.examples

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the client's examples, at least 1."""
        return self.examples // self.batch_size

    def most(self, tail: float) -> int:
        """Return the number of examples that a batch exceeds with probability ``tail`` at most."""
        if self.kind not in ("poisson", "balls-in-bins"):
            return self.batch_size
        # Imported here: it takes a second, which listing data sets need not wait for.
        from scipy.stats import binom

        return int(binom.isf(tail, self.examples, self.rate))

    def batch(self, seed: int, partition: int, step: int) -> np.ndarray:
        """Return the batch of a step: distinct local indices, int64; of poisson and balls-in-bins possibly none."""
        if self.kind == "balls-in-bins":
            epoch, position = divmod(step, self.steps_per_epoch)
            order, ends = _bins(seed, partition, epoch, self.examples, self.steps_per_epoch)
            return order[ends[position] : ends[position + 1]].copy()
        if self.kind == "shuffled":
            epoch, position = divmod(step, self.steps_per_epoch)
            order = _order(seed, partition, epoch, self.examples)
            return order[position * self.batch_size : (position + 1) * self.batch_size].copy()
        stream = numpy_stream(seed, "batches", partition, step)
        if self.kind == "fixed":
            return stream.choice(self.examples, self.batch_size, replace=False)
        return np.flatnonzero(stream.random(self.examples) < self.rate)

    @property
    def in_passes(self) -> bool:
        """Whether an example is in one batch of a pass at most."""
        return self.kind in ("shuffled", "balls-in-bins")

    def participations(self, steps: Sequence[int]) -> int:
        """Return the most often that one example can have been used over these steps: passes touched, or steps."""
        if not self.in_passes:
            return len(steps)
        most: dict[int, int] = {}
        for step, times in Counter(steps).items():
            epoch = step // self.steps_per_epoch
            most[epoch] = max(most.get(epoch, 0), times)
        return sum(most.values())


@lru_cache(maxsize=128)
def _order(seed: int, partition: int, epoch: int, examples: int) -> np.ndarray:
    """The shuffled pass; drawing it anew for each of its batches would take longer than a small network's gradient."""
    return numpy_stream(seed, "batches", partition, epoch).permutation(examples)


@lru_cache(maxsize=128)
def _bins(seed: int, partition: int, epoch: int, examples: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of a pass by their steps, and where the examples of each step begin and end."""
    chosen = numpy_stream(seed, "batches", partition, epoch).integers(steps, size=examples)
    ends = np.concatenate([[0], np.cumsum(np.bincount(chosen, minlength=steps))])
    return np.argsort(chosen, kind="stable"), ends
