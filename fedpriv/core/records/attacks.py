"""The records of attacks on uploads: scores of images, rows and sentences, figures, and the threat model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, model_validator

from fedpriv.core.columns import is_signal
from fedpriv.core.figure import CONFIDENCE, Figure, Interval
from fedpriv.core.reading import Record
from fedpriv.core.settings import absent

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
    grants: tuple[str, ...] = ()  # what attacks may build on, by the names of `fedpriv.attacks.access.Access`
