"""icl.json: private in-context learning, what it is worth and what its prompts give away."""

from dataclasses import dataclass, replace

from fedpriv.core.figure import Figure, Interval
from fedpriv.core.records.reading import Model, Record
from fedpriv.core.records.rounds import Failure


@dataclass(frozen=True)
class PromptLevel(Record):
    """Answers with one amount of noise.

    Attributes:
        epsilon: what all answers are proven to keep to; ``None``: no noise, nothing proven.
        sigma: deviation of the noise on each count, in votes.
        accuracy: share of questions that are answered correctly.
        released: whether these are the answers that the run releases.
    """

    epsilon: float | None
    sigma: float
    accuracy: Interval
    released: bool = False


@dataclass(frozen=True)
class PromptLeak(Record):
    """One attack on prompts, without protection and with it.

    Attributes:
        title: of the attack.
        figures: between guess and ceiling.
        sentences: what they mean.
    """

    title: str
    figures: tuple[Figure, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Synthetic(Record):
    """A synthetic example: proven private, so it may be shown.

    Attributes:
        label: what it is an example of, in words.
        text: what was written.
    """

    label: str
    text: str


class Prompts(Model):
    """icl.json.

    Attributes:
        mode: classify or generate.
        model: which one, in words.
        is_language_model: whether it is one.
        source: where the texts are from.
        examples: private ones.
        labels: in words.
        queries: test texts that were asked about.
        majority: accuracy of whoever always names the commonest label of the questions asked.
        zero_shot: accuracy of the model without examples.
        one_prompt: mean accuracy of single prompts, no noise; its interval is over questions.
        levels: by falling noise, then without; where clients add the noise, with theirs alone.
        together: epsilon of all levels with noise, released together; ``None``: one level at most.
        leaks: attacks on the prompts.
        synthetic: examples that were generated; empty with classify.
        refusals: attacks that were not made, and why.
        noise_at: who adds the noise to votes: server or clients.
        clients: who share the examples; 1: nobody does.
        voted: of these, whose votes are in the sum under masks; ``None``: there are no masks.
        failures: who was left out of it, and why.
        seconds: wall time, of this process.
    """

    mode: str
    model: str
    is_language_model: bool
    source: str
    examples: int
    labels: tuple[str, ...]
    queries: int
    majority: float
    zero_shot: Interval
    one_prompt: Interval | None = None
    levels: tuple[PromptLevel, ...]
    together: float | None = None
    delta: float
    leaks: tuple[PromptLeak, ...] = ()
    synthetic: tuple[Synthetic, ...] = ()
    refusals: tuple[str, ...] = ()
    noise_at: str = "server"
    clients: int = 1
    voted: int | None = None
    failures: tuple[Failure, ...] = ()
    seconds: float

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
