"""A measured leak between a guess and a theorem: one record, one comparison, one wording."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.numbers import decibel, decimal, figure, percent
from fedpriv.core.reading import Record
from fedpriv.core.settings import absent

CONFIDENCE = 0.95
"""Nominal coverage of all intervals."""

_ROUNDS_TO_ONE = 0.9995


@dataclass(frozen=True)
class Interval(Record):
    """A figure and its interval."""

    value: float  # the figure
    low: float | None  # lower end; `None` where it is not known: of fewer than two values (or groups of values), say
    high: float | None  # upper end; `None` likewise
    confidence: float = CONFIDENCE  # the nominal coverage

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends, or ``None`` where one is not known."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def in_percent(self) -> str:
        """A share and its interval, where there is one."""
        return percent(self.value) + (
            "" if self.ends is None else f" ({percent(self.ends[0])} to {percent(self.ends[1])})"
        )


@dataclass(frozen=True)
class Figure(Record):
    """What an attack achieved in one respect, between what a guess achieves and what no attack can exceed."""

    what: str  # is measured, in words
    measured: Interval  # on the scale of `unit`, with its interval where there is one
    guess: float | None = None  # what somebody achieves who never saw anything; `None`: there is no such figure
    reference: float | None = None  # what the best decision, or a perfect answer, achieves; `None`: not known
    ceiling: float | None = None  # no attack exceeds it; `None`: nothing is proven
    theorem: str = ""  # what the ceiling rests on, or why there is none
    unit: str = "share"  # share, dB, bits or number
    # whether the ceiling holds, by a test of the finding's own; `None`: the interval's low end decides
    holds: Annotated[bool | None, Field(exclude_if=absent)] = None

    @property
    def exceeded(self) -> bool:
        """Whether what was measured refutes what is claimed to be proven."""
        if self.holds is not None:
            return not self.holds
        low = self.measured.low
        return self.ceiling is not None and low is not None and low > self.ceiling + 1e-9

    @property
    def near_one(self) -> str:
        """A ceiling below 1 that would be printed as 1, in words; empty for all others."""
        # A large epsilon's ceiling is below 1 by less than a float can say; a share of exactly 1 is a perfect copy's.
        known = self.ceiling is None or (self.unit == "share" and self.ceiling == 1)
        if known or self.unit == "dB" or not _ROUNDS_TO_ONE <= (self.ceiling or 0.0) <= 1:
            return ""
        return "> 99.9%" if self.unit == "share" else "> 0.999"

    def text(self, value: float | None, absent: str = "n/a", digits: int = 3) -> str:
        """Return a number of this figure in its unit."""
        if value is None:
            return absent
        match self.unit:
            case "share":
                return percent(value)
            case "dB":
                return decibel(value)
            case "bits":
                return f"{decimal(value, 2)} bits"
            case _:
                return figure(value, digits)

    @property
    def words(self) -> str:
        """What was measured, next to a guess and what is proven."""
        guess = "" if self.guess is None else f"; a guess {self.text(self.guess)}"
        bound = self.near_one or self.text(self.ceiling)
        proven = "nothing is proven" if self.ceiling is None else f"proven: at most {bound}"
        return f"{self.text(self.measured.value)}{self._ends}{guess}; {proven} ({self.theorem})"

    @property
    def _ends(self) -> str:
        low, high = self.measured.low, self.measured.high
        return "" if low is None or high is None else f" ({self.text(low)} to {self.text(high)})"

    @property
    def refutation(self) -> str:
        """What was measured against what is claimed, in one clause."""
        low, high = self.measured.low, self.measured.high
        at_least = low is not None and high is None
        measured = self.text(low if at_least else self.measured.value, digits=4)
        shown = f"{self.what} of at least {measured}" if at_least else f"{self.what}: {measured}{self._ends}"
        return f"{shown}, claimed: at most {self.text(self.ceiling, 'less', digits=4)}"


@dataclass(frozen=True)
class CurvePoint(Record):
    """What an attack has after so many questions: a share, from 0 to 1."""

    queries: int
    share: float


@dataclass(frozen=True)
class EpsilonBound(Record):
    """A lower bound on epsilon from an experiment."""

    epsilon: float  # at least 0; 0: the experiment shows nothing
    delta: float  # at which it is a bound
    confidence: float  # the probability with which such an experiment's bound is below the true figure, at least
    trials: int  # outcomes or canaries that it rests on
    method: str  # the theorem

    def against(self, claimed: float | None, delta: float) -> Figure:
        """Return the bound as a figure between 0 and what is claimed to be proven at this delta."""
        if claimed is not None and self.delta < delta:
            raise InputError(f"a bound at delta = {self.delta:g} does not speak about a claim at delta = {delta:g}")
        measured = Interval(self.epsilon, self.epsilon, None, self.confidence)
        return Figure("ε", measured, 0.0, ceiling=claimed, theorem=self.method, unit="number")


def in_words(figures: Iterable[Figure]) -> list[tuple[str, str]]:
    """Return what was measured, and each between a guess and what is proven."""
    return [(f"{figure.what[0].upper()}{figure.what[1:]}", figure.words) for figure in figures]


def refuse_exceeded(figures: Iterable[Figure]) -> None:
    """Raise where what was measured refutes what is claimed to be proven; everything is written before that is said."""
    refuted = [figure for figure in figures if figure.exceeded]
    if refuted:
        raise RunFailedError(
            f"{'; '.join(f'{figure.refutation} ({figure.theorem})' for figure in refuted)}: the implementation or the "
            "proof is wrong"
        )
