"""The ledger of a run: a line for clients that are alike, and the run's figure: the worst client's, not a sum."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import not_
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field

from fedpriv.core.names import Adjacency
from fedpriv.core.reading import Record

_PART = re.compile(r"(0|[1-9]\d{0,17})(?:-([1-9]\d{0,17}))?|([1-9]\d{18,19})")  # the last: Flower's number of a node


def members_text(clients: Iterable[int]) -> str:
    """Return the names of clients, given in ascending order and each once."""
    return ", ".join(_named(part) for part in _runs(clients))


def member_ranges(text: str) -> tuple[range, ...]:
    """Return the clients that a text of :func:`members_text` names."""
    ranges: list[range] = []
    for part in text.split(", "):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:40]!r} names no clients; 0-3, 5 names five")
        first = int(match[1] or match[3])
        members = range(first, int(match[2] or first) + 1)
        if not members or (ranges and first < ranges[-1].stop):
            raise ValueError(f"{part!r}: names of clients ascend")
        ranges.append(members)
    return tuple(ranges)


def named_members(ranges: Sequence[range], most: int) -> str:
    """Return the names of clients, shortened after so many parts to the number of those that are left out."""
    text = ", ".join(map(_named, ranges[:most]))
    left = sum(map(len, ranges[most:]))
    return f"{text} and {left:,} more" if left else text


def _runs(clients: Iterable[int]) -> Iterator[range]:
    first = last = None
    for client in clients:
        if first is not None and last is not None and client != last + 1:
            yield range(first, last + 1)
            first = client
        first = client if first is None else first
        last = client
    if first is not None and last is not None:
        yield range(first, last + 1)


def _named(members: range) -> str:
    return str(members.start) if len(members) == 1 else f"{members.start}-{members.stop - 1}"


@dataclass(frozen=True)
class Guarantee(Record):
    """What is proven about one client's releases."""

    adjacency: str  # which two data sets must look alike, in words
    sampling: str  # how a step picks its examples, with the rate where it matters
    participations: int  # the most often one unit may have been used
    # the paper's figure for one participation, which proves nothing for the run. None where it has no figure
    # other than the proven one.
    nominal_epsilon: float | None
    pure_epsilon: float | None  # pure epsilon-DP of all releases together; None if none is finite
    epsilon: float | None  # of (epsilon, delta)-DP of all releases together; None if nothing is proven
    delta: float  # of that statement
    theorem: dict[str, str]  # for each of the three figures, by name: its theorem, or why it is None
    notes: tuple[str, ...]  # conditions and caveats of the figures. Heuristics are labelled as such.

    @property
    def relation(self) -> Adjacency | None:
        """The adjacency's name, without its description."""
        return Adjacency.of(self.adjacency)

    @property
    def replaces(self) -> bool:
        """Whether neighbours differ by a replaced record, as in measurements of membership."""
        return self.relation is not None and self.relation.replaces


@dataclass(frozen=True)
class Ceiling(Record):
    """The largest probability of success that any attack can have."""

    k0: float  # the baseline: the best probability of success without any observation, in (0, 1)
    gamma: float | None  # no attack succeeds with a larger probability; from k0 to 1. None: nothing is proven.
    theorem: str  # the theorem of gamma, or why there is none


@dataclass(frozen=True)
class _Client(Record):
    """What comes first in a line."""

    client: int = field(kw_only=True)
    count: int = field(default=1, kw_only=True)
    members: str = field(default="", kw_only=True)
    examples: int | None = field(default=None, kw_only=True)
    noise: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class LedgerLine(Guarantee, _Client):
    """The guarantee of one client, or of several that have the same guarantee, examples and noise.

    Attributes:
        client: the client's number; of several clients the lowest.
        count: the number of clients.
        members: their numbers, such as ``0-3, 5``; empty in runs of earlier versions, which had a line a client.
        examples: n_k, how many examples each client holds.
        noise: sigma, scale or kappa of its releases; calibrated noise may differ between clients. None without
            a mechanism.

    Raises:
        ValueError: ``members`` are not ``count`` numbers, or ``client`` is not the lowest of them.
    """

    # the largest success rate that any attack on its uploads can have: `told` is for picking an image out of 100,
    # `target` is for the guess of a target ceiling, where the settings have one. With sampled batches they are
    # about an example chosen independently of who took part. Empty for clients that were never selected, and in
    # runs of earlier versions; some of those also kept the ceiling for labels here (`LabelCeiling`).
    ceilings: dict[str, Ceiling] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if self.ranges[0].start != self.client or sum(map(len, self.ranges)) != self.count:
            raise ValueError(f"members are not {self.count} clients from number {self.client}")

    @property
    def ranges(self) -> tuple[range, ...]:
        """The numbers of the line's clients."""
        return member_ranges(self.members) if self.members else (range(self.client, self.client + 1),)

    def of_all(self, clients: Sequence[int]) -> Self:
        """Return the same line for several clients, given in ascending order."""
        return replace(self, client=clients[0], count=len(clients), members=members_text(clients))

    @classmethod
    def of(
        cls,
        client: int,
        examples: int,
        guarantee: Guarantee,
        noise: float | None = None,
        ceilings: Mapping[str, Ceiling] = MappingProxyType({}),
    ) -> Self:
        """Return the line of a client with this guarantee."""
        return cls(
            **vars(guarantee),
            client=client,
            members=str(client),
            examples=examples,
            noise=noise,
            ceilings=dict(ceilings),
        )

    @property
    def guarantee(self) -> Guarantee:
        """What is proven, without whom it is about."""
        return Guarantee(**{each.name: getattr(self, each.name) for each in fields(Guarantee)})

    @property
    def badness(self) -> tuple[float, float, int, int]:
        """Sort key: no finite epsilon first, then the largest epsilon, pure epsilon, participations, lowest number."""
        return -_size(self.epsilon), -_size(self.pure_epsilon), -self.participations, self.client


@dataclass(frozen=True)
class LabelCeiling(Record):
    """A line of referee/ceilings.json: how often any attack names a label; its baseline is private data."""

    client: int  # the lowest number
    count: int  # how many clients these are
    members: str  # their numbers, such as `0-3, 5`
    label: Ceiling  # the ceiling


@dataclass(frozen=True)
class MembershipBound(Record):
    """How well any test tells a record of a client from its neighbour at most, from all of the client's releases."""

    advantage: float  # the largest true minus false positive rate
    rates: tuple[tuple[float, float], ...]  # pairs of a false positive rate and the largest true positive rate at it
    theorem: str  # what both rest on
    adjacency: str  # which two data sets the test tells apart, in words


@dataclass(frozen=True)
class DataRelease(Record):
    """What was released of the data before the training: a line of its own, which the clients' lines include."""

    what: str  # was released
    mechanism: str  # in words
    adjacency: str  # which two data sets must look alike, in words
    epsilon: float  # pure
    theorem: str  # what it rests on
    notes: tuple[str, ...] = ()  # what a reader must know with it


@dataclass(frozen=True)
class LedgerView(Record):
    """What is proven about one part of a run's output, and against which parties, where noise is on sums."""

    sees: str  # the part, in words
    protects_against: str  # who may see it and no more
    not_against: str  # against whom nothing is proven by this line
    guarantee: Guarantee  # about every client


@dataclass(frozen=True)
class Person(Record):
    """What is proven about each of several persons with as many records at as many clients that are alike."""

    count: int  # how many persons
    records: tuple[int, ...]  # how many records of the person each client holds, the most first
    epsilon: float | None  # of (epsilon, delta)-DP of all releases of these clients together; None if nothing is proven
    pure_epsilon: float | None  # pure epsilon-DP of the same; None if none is finite
    delta: float  # of that statement
    adjacency: str  # which two data sets must look alike, in words
    theorem: str  # what epsilon rests on
    covers: bool = False  # whether nobody has as many records, and one figure for all persons bounds each

    @property
    def badness(self) -> tuple[float, float, int]:
        """Sorts persons, the worst first."""
        return -_size(self.epsilon), -_size(self.pure_epsilon), -sum(self.records)

    @property
    def held(self) -> str:
        """What clients hold of each of them, in words."""
        records = f"{sum(self.records):,} record{'s' if sum(self.records) > 1 else ''}"
        at_most = "at most " if self.covers else ""
        return f"{at_most}{records} at {len(self.records):,} client{'s' if len(self.records) > 1 else ''}"


@dataclass(frozen=True)
class Ledger(Record):
    """ledger.json: all lines of a run, worst clients first; build it with :meth:`of`."""

    unit: str  # what is protected: example or update
    mechanism: str  # its name
    parameters: dict[str, Any] = field(default_factory=dict)  # the mechanism's public parameters, plain values
    clients: tuple[LedgerLine, ...] = ()  # at least one line, worst first
    # what is proven about labels alone, where clients change them; a separate claim, never added to the clients'.
    # `None`: clients do not change labels.
    labels: Annotated[Guarantee | None, Field(exclude_if=not_)] = None
    # releases of the data before training
    releases: Annotated[tuple[DataRelease, ...], Field(exclude_if=not_)] = ()
    # where noise is added to the sum of a round's uploads: what is proven against each observer. Each is a
    # statement about the whole run; they are not added up.
    views: Annotated[tuple[LedgerView, ...], Field(exclude_if=not_)] = ()
    # what is proven about persons over all clients that hold their records, worst first; only where data.owner
    # names the person of each record
    people: Annotated[tuple[Person, ...], Field(exclude_if=not_)] = ()

    def __post_init__(self) -> None:
        if not self.clients:
            raise ValueError("a ledger needs at least one client")

    @classmethod
    def of(cls, unit: str, mechanism: str, parameters: Mapping[str, Any], lines: Iterable[LedgerLine]) -> Self:
        """Return the ledger with its lines sorted, worst first."""
        return cls(unit, mechanism, dict(parameters), tuple(sorted(lines, key=lambda line: line.badness)))

    @property
    def worst(self) -> LedgerLine:
        """The line whose figures are the run's."""
        return self.clients[0]

    @property
    def ceiling(self) -> Ceiling | None:
        """The highest of the clients' ceilings for the guess of a target ceiling; ``None``: there is no such target."""
        found = [line.ceilings["target"] for line in self.clients if "target" in line.ceilings]
        return max(found, key=lambda each: _size(each.gamma), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ledger.json: plain values, None where no figure is proven, floats unrounded."""
        return {**super().to_json(), "worst": self.worst.to_json()}


@dataclass(frozen=True)
class Stop(Record):
    """Clients that are no longer selected, because once more would take each of them above a target of federation."""

    client: int  # the partition's number; of several clients, which were never asked and are alike, the lowest
    round: int  # the last round in which it was asked; 0 if it never was
    epsilon: float  # proven for it by then
    next_epsilon: float | None  # what would be proven for it after the round in which it was not asked; `None`: nothing
    count: int = 1  # how many clients these are
    members: str = ""  # their numbers, such as `0-3, 5`; empty in runs of earlier versions, which had a stop a client
    # how often any attack picks its record out by then; `None`: federation.target_ceiling is not set
    ceiling: float | None = None
    next_ceiling: float | None = None  # the same after the round in which it was not asked
    target: str = "target_epsilon"  # the key of the target, in the section federation

    @property
    def ranges(self) -> tuple[range, ...]:
        """The clients that stopped."""
        return member_ranges(self.members) if self.members else (range(self.client, self.client + 1),)


def _size(figure: float | None) -> float:
    return math.inf if figure is None else figure


def shown_epsilon(epsilon: float) -> str:
    """Return an epsilon as people are shown it: four digits, and from 1000 on all of them."""
    return f"{epsilon:,.0f}" if epsilon >= 1000 else f"{epsilon:.4g}"
