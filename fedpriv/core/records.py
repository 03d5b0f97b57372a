"""The records in the files of a run, each declared once for writing and reading.

:class:`fedpriv.core.runs.RunFolder` writes and reads the files; the records of sweeps are in
:mod:`fedpriv.sweep.record`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import not_
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from fedpriv.core.columns import is_signal
from fedpriv.core.figure import CONFIDENCE, Figure, Interval
from fedpriv.core.names import Adjacency
from fedpriv.core.numbers import figure
from fedpriv.core.reading import GrowingRecord, Record
from fedpriv.core.settings import absent

# ---- training: rounds, queried clients, and how the data are shared --------------------------------------------------

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


# ---- the ledger: a line for clients that are alike, and the run's figure: the worst client's, not a sum --------------

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


def _size(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


def shown_epsilon(epsilon: float) -> str:
    """Return an epsilon as people are shown it: four digits, from 1000 on all of them, from 10^15 on a power."""
    if epsilon < 1000:
        return f"{epsilon:.4g}"
    return f"{epsilon:,.0f}" if epsilon < 1e15 else figure(epsilon)


# ---- attacks on uploads: scores of images, rows and sentences, figures, and the threat model -------------------------

SSIM_WINDOW = 11  # pixels a side, where they fit
NUMBER_TOLERANCE = 0.01
"""By how much of its column's range a number may be off in a row that counts as recovered."""


@dataclass(frozen=True)
class RowScore(Record):
    """How well the cells of one row of a table were read."""

    categories: dict[str, bool]  # name of a column of categories -> whether its value is right
    # name of a column of numbers -> the error as a share of the column's range, from 0 to 1; 1 where a number is
    # told and there is none, or the other way round
    numbers: dict[str, float]

    @property
    def share_right(self) -> float | None:
        """Of the categories."""
        return sum(self.categories.values()) / len(self.categories) if self.categories else None

    @property
    def mean_error(self) -> float | None:
        """Of the numbers."""
        return sum(self.numbers.values()) / len(self.numbers) if self.numbers else None

    @property
    def is_recovered(self) -> bool:
        """Whether every category is right, and every number within :data:`NUMBER_TOLERANCE` of its column's range."""
        return all(self.categories.values()) and all(error <= NUMBER_TOLERANCE for error in self.numbers.values())


@dataclass(frozen=True)
class RowResult(Record):
    """What an attack read of all rows, column by column."""

    categories: dict[str, float]  # name of a column of categories -> the share of rows in which its value is right
    numbers: dict[str, float]  # name of a column of numbers -> the median error as a share of the column's range
    share_right: float | None  # of all categories of all rows; `None` where there are none
    median_error: float | None  # of the rows' mean errors; `None` where there are no numbers


@dataclass(frozen=True)
class Sentence(Record):
    """A sentence as a file in reconstructions/ has it."""

    text: str  # as the tokenizer writes it
    tokens: list[int]  # without those that begin, end or pad it
    pieces: list[str]  # the text of each token by itself

    def joined(self, pieces: Sequence[str]) -> str:
        """Put pieces of it together, with spaces between them where its tokens are words."""
        return (" " if " ".join(self.pieces) == self.text else "").join(pieces)


@dataclass(frozen=True)
class SentenceScore(Record):
    """How well one sentence was read; tokens that begin, end or pad a text do not count."""

    rouge1: float  # F-measure of the tokens that both have (ROUGE-1, Lin 2004), from 0 to 1
    rouge2: float  # the same of pairs of neighbouring tokens; of sentences of one token 0
    rouge_l: float  # the same of the longest common subsequence
    right: int  # tokens of the true sentence that stand at their own place
    tokens: int  # of the true sentence
    exact: bool  # whether both are the same, token by token


@dataclass(frozen=True)
class SentenceResult(Record):
    """What an attack read of all sentences."""

    rouge1: float  # mean over the sentences; those for which nothing was offered count with 0
    rouge2: float  # likewise
    rouge_l: float  # likewise
    exact: int  # sentences that were read whole
    right: int  # tokens at their own place, of all sentences
    tokens: int  # of all sentences

    @property
    def share_right(self) -> float:
        """Of the tokens."""
        return self.right / self.tokens if self.tokens else 0.0


def sentence_result(scores: Iterable[SentenceScore | None]) -> SentenceResult | None:
    """Return what was read of all sentences; ``None``: none were attacked."""
    read = [score for score in scores if score is not None]
    if not read:
        return None
    return SentenceResult(
        rouge1=sum(score.rouge1 for score in read) / len(read),
        rouge2=sum(score.rouge2 for score in read) / len(read),
        rouge_l=sum(score.rouge_l for score in read) / len(read),
        exact=sum(score.exact for score in read),
        right=sum(score.right for score in read),
        tokens=sum(score.tokens for score in read),
    )


_OF_IMAGES = ("psnr", "ssim", "lpips")
_OF_NUMBERS = ("mse", "mse_normalised")


@dataclass(frozen=True)
class Score(Record):
    """One line of scores.jsonl: one true image, and its reconstruction by one restart of one attack (or by a guess).

    Of a true signal the key ``image`` is written as ``signal``. Of a row of a table it is ``row``, there is no PSNR,
    SSIM and LPIPS, and ``cells`` scores the reconstruction. Of a sentence it is ``sentence``, there is no MSE either,
    and ``words`` scores the reconstruction.
    """

    round: int  # the round
    client: int  # the client whose image it is
    image: int  # the number of the true image in its batch
    attack: str  # the attack's name, with the settings that differ from the run's; or a guess's name
    upload: str  # protected or unprotected; none for a guess
    restart: int  # the restart's number
    chosen: bool  # whether the attack chose this restart, by its own loss
    loss: float | None  # the attack's loss; `None` where not finite, and for guesses
    label: int | None  # the label inferred in this restart; `None` for guesses, and where none is inferred
    true_label: int  # the true label
    label_correct: bool | None  # whether the two agree; `None` without an inferred label
    mse: float | None  # on the [0, 1] scale; `None` of a sentence
    mse_normalised: float | None  # on the scale of the network's input; likewise
    psnr: float | None  # in dB, at most 200; `None` of a row or a sentence
    ssim: float | None  # at most 1; likewise
    lpips: float | None  # `None` where not computed; only chosen restarts and guesses have one
    # SSIM of at least the threshold and an MSE below every guess's; of a row `RowScore.is_recovered` instead of
    # the SSIM; of a sentence `SentenceScore.exact`, where no guess is exact
    recovered: bool
    note: str  # the attack's note on its result; may be empty
    clients: int = 1  # how many clients' uploads the attacked one is the sum of; 1: it is one client's
    # rank of the original among the candidates, by MSE to this picture: 1 means identified; ties count against
    # the attack. `None` where there are no candidates, and in files of versions without them.
    rank: int | None = None
    candidates: int | None = None  # the number of candidates, with the original
    chance: float | None = None  # the largest probability that a guess picks the original; `None` likewise
    picked: bool = False  # whether the image was picked from a list that the adversary held, and not reconstructed
    # the number of reconstructions from which the best match for this image may be chosen, by its error
    offered: int = 1
    releases: int | None = None  # the number of releases that used the image up to this upload; `None`: unknown
    best: float | None = None  # estimated success rate of the best decision among the candidates; `None`: not computed
    draws: int = 0  # the number of uploads of that estimate
    # scores of a table's row; `None`: it is something else
    cells: Annotated[RowScore | None, Field(exclude_if=absent)] = None
    # scores of a sentence; `None`: it is something else
    words: Annotated[SentenceScore | None, Field(exclude_if=absent)] = None
    # as torchmetrics computes it; `None`, and not in the file, without `report.ssim = "padded"`
    ssim_padded: Annotated[float | None, Field(exclude_if=absent)] = None
    is_signal: Annotated[bool, Field(exclude=True)] = False  # told by the key of its number

    @model_validator(mode="before")
    @classmethod
    def _read_other_kinds(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "image" in given:
            return given
        if "signal" in given:
            return {**given, "image": given["signal"], "is_signal": True}
        named = given.get("row", given.get("sentence"))
        absent = (*_OF_IMAGES, *_OF_NUMBERS) if "sentence" in given else _OF_IMAGES
        return {**dict.fromkeys(absent), **given, "image": named}

    def to_json(self) -> dict[str, Any]:
        """The line, plain values."""
        foreign = {"row": _OF_IMAGES, "sentence": (*_OF_IMAGES, *_OF_NUMBERS)}.get(self.kind, ())
        tree = super().to_json()
        return {self.kind if key == "image" else key: tree[key] for key in tree if key not in foreign}

    @property
    def kind(self) -> str:
        """The kind of example: image, signal, row or sentence."""
        if self.words is not None:
            return "sentence"
        return "row" if self.cells is not None else "signal" if self.is_signal else "image"

    @property
    def error(self) -> float:
        """The MSE of an image or a row."""
        if self.mse is None:
            raise ValueError("a sentence has no mean squared error")
        return self.mse

    @property
    def victim(self) -> tuple[int, int, int]:
        """The true image: round, client, and its number in the batch."""
        return self.round, self.client, self.image

    @property
    def source(self) -> tuple[int, int | None]:
        """The upload, or the sum of several, that contains the image."""
        return self.round, self.client if self.clients == 1 else None


def ssim_window(height: int, width: int) -> tuple[int, int]:
    """Height and width of SSIM's window: of signals it lies along one, since channels are no neighbours.

    It does not cross a side of one pixel or two either, where it would compare no structure.
    """
    short, long = sorted((height, width))
    is_long = is_signal(height, width) or short <= 2
    fitting = min(SSIM_WINDOW, long if is_long else short)
    side = fitting - 1 + fitting % 2
    down, across = (1 if is_long and each == short else side for each in (height, width))
    return down, across


@dataclass(frozen=True)
class Recovered:
    """How many images, or rows, some attack recovered, out of how many it was tried on."""

    images: int
    attacked: int
    kind: str = "image"

    def __str__(self) -> str:
        return f"{self.images} of {self.attacked} {self.kind}s"


def recovered(scores: Sequence[Score], upload: str) -> Recovered | None:
    """Count the images that at least one attack recovered from uploads of one kind; ``None`` if none was attacked."""
    chosen = [score for score in scores if score.chosen and score.upload == upload and not score.picked]
    sources = {score.source for score in chosen}
    victims = {score.victim for score in scores if score.source in sources}
    if not victims:
        return None
    return Recovered(len({score.victim for score in chosen if score.recovered}), len(victims), kind_of(scores))


def kind_of(scores: Iterable[Score]) -> str:
    """Return what the scores are about: image, signal, row or sentence."""
    return next((score.kind for score in scores if score.kind != "image"), "image")


@dataclass(frozen=True)
class AttackResult(Record):
    """One attack (or guess) on one kind of upload, over all its victims: medians, counts and their intervals."""

    attack: str  # the attack's name, with the settings that differ from the run's; or a guess's name
    upload: str  # protected, unprotected, or none for a guess
    victims: int  # the number of attacked images
    recovered: int  # the number of images that count as recovered
    success_ssim: float  # the SSIM from which an image counts as recovered
    mse: float | None  # and the other scores: medians over the images
    mse_normalised: float | None
    psnr: float | None
    ssim: float | None
    lpips: float | None
    lpips_reason: str | None
    label_accuracy: float | None
    missing: int = 0  # images for which other attacks have a result and this one has none; counted in no other figure
    identified: int | None = None  # the number of originals picked out of the candidates; `None`: not tried
    candidates: int | None = None  # the smallest number of candidates
    # name of a figure -> low and high end: medians by bootstrap over uploads, `recovered` and `identified` as
    # shares, after Wilson. Figures without an interval (of a single upload) are left out.
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confidence: float = CONFIDENCE  # nominal coverage of the intervals
    # whether the clients had been sent parameters made for this attack: a worst case, not comparable with passive
    # attacks
    active: bool = False
    # whether the images were picked from lists that the adversary held: then the errors say nothing, and
    # `identified` is the result
    picked: bool = False
    # scores of reconstructed table rows, which have no PSNR, SSIM and LPIPS; `None`: these are no rows
    rows: RowResult | None = None
    # scores of reconstructed sentences, which have no MSE either; `None`: these are no sentences
    sentences: SentenceResult | None = None
    # likewise; `None`, and not in the file, without `report.ssim = "padded"`
    ssim_padded: Annotated[float | None, Field(exclude_if=absent)] = None

    @property
    def error(self) -> float:
        """The MSE of images or rows."""
        if self.mse is None:
            raise ValueError("sentences have no mean squared error")
        return self.mse


def best_rows(results: Sequence[AttackResult], upload: str) -> tuple[str, RowResult, RowResult] | None:
    """Return the attack that read the most of a table's rows in uploads of one kind, its result, and the best guess."""
    read = [(result, result.rows) for result in results if result.rows is not None and not result.picked]
    attacks = [(rows, result.attack) for result, rows in read if result.upload == upload]
    guesses = [rows for result, rows in read if result.upload == "none"]
    if not attacks or not guesses:
        return None
    best, attack = max(attacks, key=lambda pair: (pair[0].share_right or 0.0, -(pair[0].median_error or 0.0)))
    return attack, best, max(guesses, key=lambda rows: rows.share_right or 0.0)


def parts_read(results: Sequence[AttackResult]) -> str:
    """Return what attacks on unprotected uploads read more of than a guess: cells, tokens; empty: neither."""
    read = best_rows(results, "unprotected")
    if read is not None and (read[1].share_right or 0.0) > (read[2].share_right or 0.0):
        return "cells"
    rouge = {
        upload: max((each.sentences.rouge1 for each in results if each.sentences and each.upload == upload), default=0)
        for upload in ("unprotected", "none")
    }
    return "tokens" if rouge["unprotected"] > rouge["none"] else ""


@dataclass(frozen=True)
class LeakageRate(Record):
    """How often one attack succeeded, between what a guess does and what no attack can exceed."""

    # what counts as success. told: the original is picked out of the candidates, as the nearest to a picture or
    # directly; label: its label is named; recovered: the picture is similar; row or sentence: it is recovered.
    event: str
    attack: str  # the attack's name, with the settings by which it differs from the run's
    upload: str  # protected or unprotected
    hits: int  # successes
    images: int  # out of so many
    interval: tuple[float, float]  # low and high end for the share, after Wilson
    chance: float  # k0: how often the best guess succeeds that saw no upload, on average over the images
    estimated: bool = False  # whether that is an estimate from public images: then nothing is proven
    # how often the best decision among these candidates is right, with the ends of its interval (Clopper and
    # Pearson); `None` where it was not computed
    best: Interval | None = None
    ceiling: float | None = None  # no attack succeeds more often; `None` where nothing is proven
    theorem: str = ""  # what the ceiling rests on, or why there is none
    exceeded: bool = False  # whether the rate is above a proven ceiling, with 99.9 % confidence: an error in fedpriv
    # out of how many images, at the least, an original was to be picked; `None` for other events
    candidates: int | None = None

    @property
    def share(self) -> float:
        """Of the images."""
        return self.hits / self.images

    @property
    def figure(self) -> Figure:
        """The rate between what a guess does and what no attack can exceed."""
        return Figure(
            f"{self.success}, by {self.attack}",
            Interval(self.share, *self.interval),
            self.chance,
            None if self.best is None else self.best.value,
            self.ceiling,
            self.theorem,
            holds=not self.exceeded,
        )

    @property
    def success(self) -> str:
        """The event in words."""
        if self.event == "told":
            return f"picked out of {self.candidates or 'other images'}"
        words = {
            "label": "label named",
            "recovered": "image recovered",
            "signal": "signal recovered",
            "row": "row recovered",
            "sentence": "sentence recovered",
        }
        return words.get(self.event, self.event)


def best_rates(rates: Iterable[LeakageRate]) -> tuple[LeakageRate, ...]:
    """Return the rates of the attacks that succeed most often: several where they tie against the same guess."""
    ordered = sorted(rates, key=lambda rate: -rate.share)
    ties = [rate for rate in ordered if (rate.share, rate.chance) == (ordered[0].share, ordered[0].chance)]
    return tuple(ties)


@dataclass(frozen=True)
class ThreatRecord(Record):
    """What one adversary has to work with."""

    name: str  # who listens: the name in the experiment file
    listener: str = ""  # who they are, and where
    sees: tuple[str, ...] = ()  # what reaches them in each round
    knows: tuple[str, ...] = ()  # what else they know (Kerckhoffs: by default everything but the secrets)
    withheld: tuple[str, ...] = ()  # what they never get
    conduct: str = ""  # whether they only listen or also interfere
    grants: tuple[str, ...] = ()  # what attacks may build on, by the names of `fedpriv.attacks.settings.Access`


# ---- summary.json: the result of a run in one object -----------------------------------------------------------------

COMPLETED = "completed"
"""The status of a run that came to its end; others: failed, interrupted."""


class DataFacts(GrowingRecord):
    """The data set, where it is from, its size, of texts what is predicted (``classify`` or ``next``), and notes."""

    name: str | None = None
    source: str | None = None
    train_examples: int | None = None
    test_examples: int | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()


class ModelFacts(GrowingRecord):
    """The network, the numbers that are trained, in all and of each tensor, and what the settings changed of it."""

    name: str | None = None
    parameters: int | None = None
    tensors: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


class Summary(GrowingRecord):
    """summary.json.

    ``test_accuracy`` and ``test_loss`` are of ``evaluated_round``, the last evaluated round, on ``evaluated_examples``
    test examples; versions without these keys evaluated every round on all examples. ``settings`` is the digest of the
    settings behind the figures (``RunFolder.settings_digest``); empty in summaries of versions up to 0.2. ``seconds``
    is the wall time from the last start to the end, and ``attack_seconds`` that of each attack on all uploads (summed
    over Ray tasks). ``rates`` are success rates of attacks, with guess and ceiling. ``refusals`` are the warnings that
    say what was not attacked, and why. Audits add their results under their own keys (:mod:`fedpriv.core.finding`):
    keys that this class does not declare are kept.
    """

    name: str = ""
    settings: str = ""
    status: str
    reason: str | None = None
    rounds: int = 0
    test_accuracy: float | None = None
    test_loss: float | None = None
    evaluated_round: int | None = None
    evaluated_examples: int | None = None
    ledger: Guarantee | None = None
    stops: tuple[Stop, ...] = ()
    attacks: tuple[AttackResult, ...] = ()
    rates: tuple[LeakageRate, ...] = ()
    seconds: float | None = None
    attack_seconds: Mapping[str, float] = Field(default_factory=dict)
    verdict: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    versions: Mapping[str, str] = Field(default_factory=dict)
    data: DataFacts = DataFacts()
    model: ModelFacts = ModelFacts()
    threat_model: ThreatRecord | None = None
    device: str = ""
    engine: str = ""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what was read or set, as JSON types."""
        return self.model_dump(mode="json", exclude_unset=True)

    def with_found(self, records: Mapping[str, GrowingRecord | None]) -> "Summary":
        """Return a copy with the results of audits, by key."""
        return self.model_copy(update=dict(records))

    def repeats(self, key: str) -> bool:
        """Whether it contains results under this key."""
        return getattr(self, key, None) is not None
