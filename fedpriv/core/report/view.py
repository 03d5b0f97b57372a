"""What the report shows, read from a run's folder: missing files are ``None`` or empty, damaged ones are refused."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError
from fedpriv.core.finding import Found, Picture, RunView, all_found, read_picture
from fedpriv.core.reading import read_file
from fedpriv.core.records import Score, Sentence, kind_of
from fedpriv.core.runs import RunFolder, picture_name

Content = Picture | Sentence | Mapping[str, str]
"""What a file in reconstructions/ holds: a picture, a sentence, or the text of each cell of a row."""


@dataclass(frozen=True)
class ShownResult:
    """One attempt at a victim's image: by which attack, from which upload (protected, unprotected, none), how good."""

    attack: str
    upload: str
    score: Score | None
    content: Content | None


@dataclass(frozen=True)
class ShownVictim:
    """One attacked image: the original, what each attack made of the upload, and last the best guess without it."""

    round: int
    client: int
    image: int
    original: Content | None
    true_label: int | None
    candidates: tuple[ShownResult, ...]


@dataclass(frozen=True)
class View(RunView):
    """The whole run as the report shows it."""

    scores: tuple[Score, ...]  # every scored restart and guess
    victims: tuple[ShownVictim, ...]  # the first `report.pictures` attacked images
    attacked: int  # how many attacked images there are in all
    command: str  # what repeats the run; empty if unknown
    found: tuple[Found, ...] = ()  # everything that was found of the run

    def result(self, name: str) -> Any:
        """Return what was found under the name of a finding; ``None``: nothing."""
        return next((each.result for each in self.found if each.finding.name == name), None)

    @property
    def kind(self) -> str:
        """What was attacked: image, signal, row or sentence."""
        if self.experiment.data.is_text:
            return "sentence"
        shown = [
            content for each in self.victims for content in (each.original, *(one.content for one in each.candidates))
        ]
        return "row" if any(isinstance(content, Mapping) for content in shown) else kind_of(self.scores)


def load_view(folder: Path) -> View:
    """Read the folder of a run."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / "config.toml").is_file():
        made = "; the command that made it wrote its report.html" if (folder / "report.html").is_file() else ""
        raise InputError(f"{folder} is not the folder of a run: it has no config.toml{made}")
    run = RunFolder(folder)
    experiment = run.experiment()
    summary, scores = run.checked_summary(), run.scores()
    pictures = {path.name: path for ending in _ENDINGS for path in run.reconstructions.glob(f"*{ending}")}
    victims = _victim_keys(scores, pictures)
    shown = victims[: experiment.report.pictures]
    return View(
        folder=run,
        experiment=experiment,
        summary=summary,
        rounds=tuple(run.rounds()),
        ledger=run.ledger(),
        partition=run.partition(),
        scores=scores,
        victims=tuple(_victim(key, scores, pictures, experiment.adversary.attacks) for key in shown),
        attacked=len(victims),
        command=summary.command if summary and summary.command else run.given_command(),
        found=tuple(all_found(run)),
    )


_ENDINGS = (".png", ".json")  # of pictures, and of rows
_ORIGINAL = re.compile(r"(\d+)-(\d+)-original(?:-(\d+))?\.(?:png|json)")
_COMMON_GUESSES = ("guess-mean", "guess-grey", "guess-mode", "guess-frequent", "guess-model")
_TEXTS: Any = Sentence | dict[str, str]

_Key = tuple[int, int, int]  # round, client, image
_Pictures = Mapping[str, Path]  # name of a file -> where it is


def _find(pictures: _Pictures, key: _Key, what: str) -> Path | None:
    """The picture of one image, or the only one of its upload, or the one for all uploads."""
    number, client, image = key
    stems = (picture_name(number, client, what, image, ""), picture_name(number, client, what, None, ""), what)
    names = (f"{stem}{ending}" for stem in stems for ending in _ENDINGS)
    return next((pictures[name] for name in names if name in pictures), None)


def _victim_keys(scores: Iterable[Score], pictures: _Pictures) -> list[_Key]:
    scored = {score.victim for score in scores}
    known = {key[:2] for key in scored}
    # An upload whose attack was never scored still has its originals.
    originals = [match for name in pictures if (match := _ORIGINAL.fullmatch(name))]
    pictured = {(int(match[1]), int(match[2]), int(match[3] or 0)) for match in originals}
    return sorted(scored | {key for key in pictured if key[:2] not in known})


def _victim(key: _Key, scores: Iterable[Score], pictures: _Pictures, attacks: tuple[str, ...]) -> ShownVictim:
    mine = [score for score in scores if score.victim == key and score.chosen]
    scored = {(score.attack, score.upload): score for score in mine}
    possible = [(attack, upload) for attack in attacks for upload in ("unprotected", "protected")]
    possible += [(guess, "none") for guess in _COMMON_GUESSES]
    pictured = [pair for pair in possible if _find(pictures, key, _stem(*pair))]
    tried = sorted(dict.fromkeys([*scored, *pictured]), key=lambda pair: _rank(pair, attacks))
    candidates = [ShownResult(*pair, scored.get(pair), _load(_find(pictures, key, _stem(*pair)))) for pair in tried]
    guesses = [candidate for candidate in candidates if candidate.upload == "none" and candidate.content is not None]
    return ShownVictim(
        round=key[0],
        client=key[1],
        image=key[2],
        original=_load(_find(pictures, key, "original")),
        true_label=mine[0].true_label if mine else None,
        candidates=(*(each for each in candidates if each.upload != "none"), *sorted(guesses, key=_error)[:1]),
    )


def _rank(pair: tuple[str, str], attacks: tuple[str, ...]) -> tuple[int, int, str]:
    """Unprotected before protected before guesses; within these the order of the settings."""
    attack, upload = pair
    stage = {"unprotected": 0, "protected": 1}.get(upload, 2)
    order = (*attacks, *_COMMON_GUESSES)
    return stage, order.index(attack) if attack in order else len(order), attack


def _error(candidate: ShownResult) -> float:
    score = candidate.score
    if score is None:
        return math.inf
    return score.error if score.words is None else -score.words.rouge1


def _stem(attack: str, upload: str) -> str:
    """What the name of the picture says."""
    return attack if upload == "none" else f"{attack}-{upload}"


def _load(path: Path | None) -> Content | None:
    if path is None:
        return None
    return read_picture(path) if path.suffix == ".png" else read_file(path, _TEXTS)
