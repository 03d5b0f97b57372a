"""A run of prompts: what it found, and its folder; a killed one goes on with its kept votes and settings."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.files import append_line, as_json, is_empty, write_whole, writing_to
from fedpriv.core.randomness import Secret
from fedpriv.core.reading import FileRecord, Record, read_file
from fedpriv.core.records import Failure, Ledger, Origin
from fedpriv.core.runs import Files
from fedpriv.prompts.settings import Prompting, load_prompting
from fedpriv.prompts.texts import PromptTexts


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


FILE = "icl.toml"
"""The resolved settings; they tell such a folder from that of a run."""

_SECRET, _ORIGIN, _VOTES = "private/secret.key", "private/origin.json", "private/votes.jsonl"
_COUNTS = "private/counts.json"


@dataclass(frozen=True)
class PromptVotes(Record):
    """One line of private/votes.jsonl."""

    question: int  # its number
    votes: tuple[int, ...]  # the label that each prompt votes for
    zero_shot: int  # the label that the model finds likeliest without examples


@dataclass(frozen=True)
class NoisyCounts(Record):
    """private/counts.json: what secure aggregation left the server, which is as private as what is proven."""

    counts: tuple[tuple[float, ...], ...]  # of each question, one a label: the sum of votes and shares of the noise
    clients: tuple[int, ...]  # who is in it, ascending
    failures: tuple[Failure, ...] = ()  # who is not, and why


# What has become of a run if this part of its origin is another.
_PARTS = {
    "settings": f"{FILE} was changed where it decides what is released (seed, noise, data or icl)",
    "model": f"{FILE} was changed where it names the model",
    "secret": f"{_SECRET} was replaced",
    "data": "the texts were changed",
}


class PromptFolder(Files):
    """The folder of one run; use :meth:`create` for a new one and :meth:`open` for one that exists."""

    verb: ClassVar[str] = "icl"

    def __init__(self, path: Path, settings: Prompting) -> None:
        super().__init__(path)
        self.settings = settings  # the resolved ones

    @staticmethod
    def create(path: Path, settings: Prompting, texts: PromptTexts) -> "PromptFolder":
        """Make the folder, with settings, secret and the digests of what the run rests on in it."""
        with writing_to(path):
            if path.exists() and not is_empty(path):
                raise InputError(f"{path} exists already; choose another --out, or finish it with --resume {path}")
            path.mkdir(parents=True, exist_ok=True)
            folder = PromptFolder(path, settings)
            (path / "private").mkdir(mode=0o700)
            if settings.noise == "secret":
                write_whole(path / _SECRET, f"{Secret.drawn().key.hex()}\n".encode(), mode=0o600, durable=True)
            write_whole(path / _ORIGIN, as_json(folder._origin(texts)), mode=0o600, durable=True)
            # Last: what holds this file can be resumed.
            write_whole(path / FILE, settings.to_toml().encode(), durable=True)
            return folder

    @staticmethod
    def open(path: Path) -> "PromptFolder":
        """Return the folder of an earlier run."""
        if not (path / FILE).is_file():
            raise InputError(f"{path} is not the folder of fedpriv icl: it has no {FILE}")
        return PromptFolder(path, load_prompting(path / FILE))

    def secret(self) -> Secret:
        """Return what draws noise and prompts."""
        if self.settings.noise == "reproducible":
            return Secret.of_seed(self.settings.seed)
        return Secret.read(self.path / _SECRET, "noise cannot be drawn again")

    def check_unchanged(self, texts: PromptTexts) -> None:
        """Refuse to go on with a run in which something was changed that decides what is released."""
        was = read_file(self.path / _ORIGIN, Origin)
        if was is None:
            raise InputError(
                f"{self.path} has no {_ORIGIN}: nobody wrote down what this run was begun with, so nothing can be "
                "proven about what follows; start a new run"
            )
        self._compare(was, self._origin(texts), tuple(_PARTS))

    def check_settings(self) -> None:
        """Refuse to show results beside settings that they are not of; who was not given private/ cannot tell."""
        was = read_file(self.path / _ORIGIN, Origin)
        if was is not None:
            self._compare(was, replace(was, **self._digests()), ("settings", "model"))

    def _compare(self, was: Origin, now: Origin, parts: Sequence[str]) -> None:
        for part in parts:
            if getattr(was, part) != getattr(now, part):
                raise InputError(f"{self.path}: {_PARTS[part]}; undo that, or start a new run")

    def _digests(self) -> dict[str, str]:
        """Of the settings."""
        own, model = self.settings.decisive(), self.settings.model.decisive()
        return {"settings": _digest(own).hex(), "model": _digest(model).hex()}

    def _origin(self, texts: PromptTexts) -> Origin:
        own = (texts.examples, texts.questions, texts.labels, texts.text_word, texts.label_word)
        secret = self.secret()
        return Origin(
            secret=secret.derived("commitment").key.hex(),
            data=secret.derived("data", _digest(own)).key.hex(),
            **self._digests(),
        )

    def votes(self, questions: int, voters: int, labels: int) -> list[PromptVotes]:
        """Return the votes so far, a cut-off last line left out."""
        kept, where = self.appended_lines(_VOTES, PromptVotes), str(self.path / _VOTES)
        if [line.question for line in kept] != list(range(len(kept))):
            raise InputError(f"{where} is damaged: questions are missing")
        if len(kept) > questions:
            raise InputError(f"{where} is damaged: it has {len(kept)} lines, and {questions} questions are asked")
        for number, line in enumerate(kept, start=1):
            if len(line.votes) != voters or not all(0 <= label < labels for label in (*line.votes, line.zero_shot)):
                raise InputError(
                    f"{where}, line {number} is damaged: expected {voters} votes, each from 0 to {labels - 1}"
                )
        return kept

    def counts(self, questions: int, labels: int) -> NoisyCounts | None:
        """Return the sum of noisy counts; ``None``: clients were not asked yet."""
        known = read_file(self.path / _COUNTS, NoisyCounts)
        if known is not None and [len(row) for row in known.counts] != [labels] * questions:
            raise InputError(f"{self.path / _COUNTS} is damaged: expected {questions} questions of {labels} counts")
        return known

    def keep_counts(self, known: NoisyCounts) -> None:
        """Keep the sum: clients are asked once."""
        write_whole(self.path / _COUNTS, f"{json.dumps(asdict(known))}\n".encode(), mode=0o600, durable=True)

    def keep_votes(self, known: Sequence[PromptVotes]) -> None:
        """Write these votes, and no cut-off line."""
        text = "".join(f"{json.dumps(vars(line))}\n" for line in known)
        write_whole(self.path / _VOTES, text.encode(), mode=0o600)

    def add_votes(self, line: PromptVotes) -> None:
        """Add the votes on one question."""
        append_line(self.path / _VOTES, json.dumps(vars(line)))

    def ledger(self) -> Ledger:
        """What is proven."""
        return self._needed("ledger.json", read_file(self.path / "ledger.json", Ledger))

    def prompts(self) -> Prompts:
        """What the run found."""
        return self._needed(Prompts.path, self.read(Prompts))


def _digest(value: object) -> bytes:
    return sha256(json.dumps(value, sort_keys=True, default=vars).encode()).digest()
