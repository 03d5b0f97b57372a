"""icl.json: accuracy, guarantee and leaks of private in-context learning."""

from dataclasses import dataclass, replace
from typing import ClassVar

from fedpriv.core.figure import Figure, Interval
from fedpriv.core.reading import FileRecord, Record
from fedpriv.core.records import Failure


@dataclass(frozen=True)
class PromptLevel(Record):
    """Answers with one amount of noise."""

    epsilon: float | None  # what all answers are proven to keep to; `None`: no noise, nothing proven
    sigma: float  # deviation of the noise on each count, in votes
    accuracy: Interval  # share of questions that are answered correctly
    released: bool = False  # whether these are the answers that the run releases


@dataclass(frozen=True)
class PromptLeak(Record):
    """One attack on prompts, without protection and with it."""

    title: str  # of the attack
    figures: tuple[Figure, ...]  # between guess and ceiling
    sentences: tuple[str, ...]  # what they mean


@dataclass(frozen=True)
class Synthetic(Record):
    """A synthetic example: proven private, so it may be shown."""

    label: str  # what it is an example of, in words
    text: str  # what was written


class Prompts(FileRecord):
    """icl.json."""

    path: ClassVar[str] = "icl.json"

    mode: str  # classify or generate
    model: str  # which one, in words
    is_language_model: bool  # whether it is one
    source: str  # where the texts are from
    examples: int  # private ones
    labels: tuple[str, ...]  # in words
    queries: int  # test texts that were asked about
    majority: float  # accuracy of whoever always names the commonest label of the questions asked
    zero_shot: Interval  # accuracy of the model without examples
    one_prompt: Interval | None = None  # mean accuracy of single prompts, no noise; its interval is over questions
    levels: tuple[PromptLevel, ...]  # by falling noise, then without; where clients add the noise, with theirs alone
    together: float | None = None  # epsilon of all levels with noise, released together; `None`: one level at most
    delta: float
    leaks: tuple[PromptLeak, ...] = ()  # attacks on the prompts
    synthetic: tuple[Synthetic, ...] = ()  # examples that were generated; empty with classify
    refusals: tuple[str, ...] = ()  # attacks that were not made, and why
    noise_at: str = "server"  # who adds the noise to votes: server or clients
    clients: int = 1  # who share the examples; 1: nobody does
    voted: int | None = None  # of these, whose votes are in the sum under masks; `None`: there are no masks
    failures: tuple[Failure, ...] = ()  # who was left out of it, and why
    seconds: float  # wall time, of this process

    @property
    def masked(self) -> tuple[str, ...]:
        """Sentences about votes under masks; none without masks."""
        if self.voted is None:
            return ()
        return (
            f"{self.voted} of {self.clients} clients voted under masks: the server had the sum of their noisy counts "
            "and nothing else.",
            *(f"Left out: client {failure.client} {failure.reason}." for failure in self.failures),
        )

    @property
    def alarms(self) -> tuple[str, ...]:
        """What exceeds what is claimed to be proven."""
        figures = (
            replace(figure, what=f"{leak.title}: {figure.what}") for leak in self.leaks for figure in leak.figures
        )
        return tuple(figure.refutation for figure in figures if figure.exceeded)
