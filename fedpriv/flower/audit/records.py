"""What an audit writes down: each answer of a client, each round of the server, and what follows from them."""

from dataclasses import dataclass, field
from typing import Any

from fedpriv.core.numbers import several
from fedpriv.core.reading import Record
from fedpriv.core.records import shown_epsilon
from fedpriv.flower.noise import Noise, Stated


@dataclass(frozen=True)
class ModAction(Record):
    """What a mod did to one reply."""

    mod: str  # its class, or its name if it is a function
    noised: tuple[str, ...] = ()  # arrays that it changed by more than a factor
    norm: float | None = None  # of the update that reached it; `None`: no update did
    left: float | None = None  # of the update that left it
    lets_out: tuple[str, ...] = ()  # keys, records and types that privatise was told to let out
    added: tuple[tuple[str, str], ...] = ()  # records and keys that it put into the reply, next to parameters


@dataclass(frozen=True)
class Answer(Record):
    """One message to a client, and its reply as it left."""

    client: int
    node: int  # Flower's number of it
    type: str  # of the message: train, evaluate, query, with its action
    stage: str | None = None  # of secure aggregation
    sent: dict[str, dict[str, Any]] = field(default_factory=dict)  # records of the message
    replied: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the reply
    echoed: tuple[str, ...] = ()  # records of the reply that are as they came
    actions: tuple[ModAction, ...] = ()  # innermost first
    noises: tuple[Noise, ...] = ()  # of LocalDpMod, innermost first, and of Opacus
    stated: tuple[Stated, ...] = ()  # by Opacus
    error: str = ""  # why there is no reply

    @property
    def trains(self) -> bool:
        """Whether the message asked to train."""
        return self.type.split(".")[0] == "train"


@dataclass(frozen=True)
class StrategyLayer(Record):
    """A strategy, or one that wraps another."""

    name: str
    module: str
    settings: dict[str, float] = field(default_factory=dict)
    weight: str = ""  # key of the metric that replies are weighted by; empty: it names none
    wraps: str = ""  # which of Flower's privacy wrappers it is; empty: none
    averages: bool = False  # whether it averages as FedAvg does
    overrides: tuple[str, ...] = ()  # methods of a wrapper that it replaces


@dataclass(frozen=True)
class Round(Record):
    """What the server aggregated in one round."""

    number: int
    weights: dict[int, float]  # by node
    norms: dict[int, float]  # of the updates, as they arrived
    clip_norm: float | None = None  # before the round
    next_clip_norm: float | None = None
    noise: float | None = None  # standard deviation of what was added to the mean, as measured
    doubt: str = ""  # why nothing is proven of that; empty: nothing is known against it
    stated: Stated | None = None  # by the wrapper's accountant after the round


@dataclass(frozen=True)
class Leaving(Record):
    """One record, or key of metrics and configs, that leaves clients."""

    type: str  # of the message, with the stage of secure aggregation
    name: str
    kind: str  # what it holds
    answers: int
    cover: str  # what covers it; empty: nothing
    verdict: str  # covered, uncovered, raw data, masked or constant
    why: str


@dataclass(frozen=True)
class Claim(Record):
    """What one piece of privacy software says, beside what is proven of it over the run."""

    what: str
    says: str
    against: str  # who reads what it protects
    adjacency: str
    once: float | None  # epsilon of one answer or release, the largest; `None`: nothing is proven
    epsilon: float | None  # of all releases of the run
    delta: float
    releases: int  # in which the worst client took part
    theorem: str
    notes: tuple[str, ...] = ()
    falls_short: bool = False  # whether what is said is more than what is proven

    @property
    def proves(self) -> str:
        """What is proven, with one release beside the run where both are known."""
        if self.epsilon is None:
            return "nothing"
        once = f"; of one {shown_epsilon(self.once)}" if self.once is not None and self.releases > 1 else ""
        return f"({shown_epsilon(self.epsilon)}, {self.delta:g})-DP after {several(self.releases, 'release')}{once}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Theorem and notes, without full stops."""
        return tuple(text.removesuffix(".") for text in (self.theorem, *self.notes))


@dataclass(frozen=True)
class Audit(Record):
    """audit.json."""

    app: str
    clients: int
    rounds: int
    messages: int
    strategies: tuple[str, ...]  # outermost first
    mods: tuple[str, ...]  # outermost first
    leaving: tuple[Leaving, ...]
    claims: tuple[Claim, ...]
    attacks: tuple[str, ...]  # what attacks found, in sentences
    pictures: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float
