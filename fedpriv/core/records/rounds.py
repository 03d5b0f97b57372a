"""The records of training: rounds, queried clients, and how the data are shared."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from fedpriv.core.reading import Record
from fedpriv.core.settings import absent

_CLEARLY = 1.25  # classes that are as even as those of most image data count as even


@dataclass(frozen=True)
class Failure(Record):
    """One client left out of one round, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class ClientAccuracy(Record):
    """The accuracy on each client's own test examples, of those who have some, as a distribution over clients."""

    clients: int  # how many these are
    median: float
    low: float  # a tenth of the clients have this or less
    high: float  # a tenth of the clients have this or more
    worst: float


@dataclass(frozen=True)
class RoundRecord(Record):
    """One line of metrics.jsonl; round 0 is the model before training."""

    round: int  # the round's number, from 1
    loss: float | None  # mean cross entropy on the test data; `None` where the round was not evaluated
    accuracy: float | None  # share of the test data classified correctly, from 0 to 1; likewise
    clients: tuple[int, ...]  # the selected clients
    used: tuple[int, ...]  # the clients whose uploads were aggregated
    failures: tuple[Failure, ...]  # the clients left out
    seconds: float  # wall time of the round, evaluation included
    bytes_up: int  # bytes of the uploads
    bytes_down: int  # bytes of the parameters sent out
    # proven for the worst client after this round, by the fast accounting used during a run; `None` where nothing
    # is proven, and in folders of versions that did not write it
    epsilon: float | None = None
    # the clients that an active server sent crafted parameters and that replied; their uploads are attacked and
    # not aggregated
    crafted: tuple[int, ...] = ()
    # the accuracy with noise in the forward pass, one draw per image; `None`, and not written, without such noise
    # or evaluation
    noisy_accuracy: Annotated[float | None, Field(exclude_if=absent)] = None
    # the number of test examples of these figures, 0 where the round was not evaluated; `None` in folders of
    # versions that evaluated every round on all examples
    evaluated: int | None = None
    # accuracy on data of the federation's clients; `None`, and not written, if not requested
    client_accuracy: Annotated[ClientAccuracy | None, Field(exclude_if=absent)] = None
    # accuracy on data of clients that take no part; likewise, and where all take part
    other_accuracy: Annotated[ClientAccuracy | None, Field(exclude_if=absent)] = None


def last_evaluated(rounds: Sequence[RoundRecord]) -> RoundRecord | None:
    """Return the last round that was evaluated; ``None``: none was."""
    return next((record for record in reversed(rounds) if record.accuracy is not None), None)


@dataclass(frozen=True)
class ReleaseKind(Record):
    """What makes one release what it is, from :meth:`fedpriv.core.plan.Plan.released`: settings of two sections."""

    mechanism: dict[str, Any]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Origin(Record):
    """Digests, hexadecimal, of what all releases of a run rest on; empty in folders of versions that wrote none."""

    settings: str = ""  # of the settings that decide what a release is about
    secret: str = ""  # of the run's secret. This and what follows is empty without a mechanism.
    data: str = ""  # of all images and labels, keyed by the secret: whoever has a guess of the data cannot check it
    model: str = ""  # of the network's code, and of the numbers that it was built with


@dataclass(frozen=True)
class Asked(Record):
    """One line of asked.jsonl: clients that got the same query in a round, and what they release in their answer."""

    round: Annotated[int, Field(ge=1)]  # the round's number, from 1
    clients: tuple[Annotated[int, Field(ge=0)], ...]  # who was asked, ascending
    # the digest of what they were sent, hexadecimal; whoever is asked the same again answers the same. Empty
    # without a mechanism, and in folders of versions that did not write it.
    sent: str = ""
    origin: Origin = Origin()  # what the releases rest on
    releases: tuple[ReleaseKind, ...] = ()  # mechanism, noise and sampling of a release, each kind once
    kinds: tuple[int, ...] = ()  # for each of the clients its place in `releases`

    def __post_init__(self) -> None:
        if list(self.clients) != sorted(set(self.clients)):
            raise ValueError("clients has numbers that do not ascend")
        named = len(self.kinds) == len(self.clients) and set(self.kinds) <= set(range(len(self.releases)))
        if self.origin.settings and not named:
            raise ValueError("kinds does not name one of releases for each client")


@dataclass(frozen=True)
class Deployed(Record):
    """deployment.json: which of Flower's runs this is."""

    run_id: str


@dataclass(frozen=True)
class Holders(Record):
    """Clients that hold so many examples each: ``count`` of them, whose numbers are ``members``, such as ``0-3, 5``."""

    examples: int
    count: int
    members: str


@dataclass(frozen=True)
class Partition(Record):
    """referee/partition.json: ``clients[c][k]`` is the number of examples of class k that client c holds."""

    partition: str = field(default="", kw_only=True)  # how the data are shared, as in the settings
    class_names: tuple[str, ...]  # of all classes
    clients: tuple[tuple[int, ...], ...]  # of the first clients, at least one; of many clients the others have no row
    # how many examples each client holds; empty in runs of earlier versions, where all have a row
    groups: tuple[Holders, ...] = ()
    # how many examples of each class there are to be held, each counted once; empty likewise
    classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        classes = len(self.class_names)
        if not self.clients or any(len(counts) != classes for counts in self.clients):
            raise ValueError(f"every client needs one count for each of the {classes} classes")
        if self.groups and self.count < len(self.clients):
            raise ValueError(f"groups are of {self.count} clients, and {len(self.clients)} have a row")

    @property
    def count(self) -> int:
        """How many clients there are."""
        return sum(group.count for group in self.groups) if self.groups else len(self.clients)

    @property
    def commonest(self) -> float:
        """The share of the most frequent class among all examples."""
        held = [sum(counts) for counts in zip(*self.clients, strict=True)]
        totals = held if self.count == len(self.clients) else self.classes
        return max(totals, default=0) / max(sum(totals), 1)

    @property
    def majority(self) -> float:
        """The share of the most frequent class where it is clearly above that of even classes, else 0."""
        return self.commonest if self.commonest * len(self.class_names) > _CLEARLY else 0.0
