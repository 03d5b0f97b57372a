"""The referee of sentences: compares those that an attack read with the true ones, token by token.

A sentence counts as recovered where all its tokens are read in their order, and no guess that never saw the upload is
the same sentence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedpriv.attacks.baselines import Guess
from fedpriv.attacks.reconstruction.results import Reconstruction
from fedpriv.attacks.scored import Scores, odds, subject
from fedpriv.attacks.texts.scores import bare, likeness, pairs, sentence_score
from fedpriv.attacks.truth import Truth
from fedpriv.core.records import Score

__all__ = ["missed_sentences", "score_guessed_sentences", "score_sentences"]

_NO_LPIPS = "it is for pictures, these are sentences"
_UNMADE = {"restart": 0, "chosen": True, "loss": None, "note": ""}  # of what no attack has made


def score_sentences(reconstruction: Reconstruction, upload: str, truth: Truth, guesses: Sequence[Guess]) -> Scores:
    """Score every restart of one reading; a true sentence for which nothing was offered counts as read as nothing.

    Args:
        reconstruction: what the attack offers; its "images" are tokens, int64 (N, 1, 1, T).
        upload: protected or unprotected.
        truth: of the same round and client.
        guesses: what has to be beaten.

    Raises:
        ValueError: reconstruction and truth are of different victims.
    """
    if (reconstruction.round, reconstruction.client) != (truth.round, truth.client):
        raise ValueError("the reading and the truth are of different uploads")
    true = [bare(tokens) for tokens in truth.images]
    guessed = [bare(guess.image) for guess in guesses]
    lines: list[Score] = []
    pictures: dict[int, Tensor] = {}
    for restart, attempt in enumerate(reconstruction.attempts):
        chosen = restart == reconstruction.chosen
        made = [bare(tokens) for tokens in attempt.images]
        matched = pairs(true, made)
        offered, given = len(made), len(true)
        count = f"{offered} sentences read for {given} true ones" if offered != given else ""
        about = {
            "attack": reconstruction.attack,
            "upload": upload,
            "restart": restart,
            "chosen": chosen,
            "note": "; ".join(text for text in (reconstruction.note, count) if text),
        }
        for number in range(given):
            place = matched.get(number)
            label = None if place is None else int(attempt.labels[place])
            line = _Line(truth, number, max(offered, given), true, guessed)
            read = [] if place is None else made[place]
            lines.append(line.score(read, None if label == -1 else label, {**about, "loss": attempt.loss}))
            if chosen and place is not None:
                pictures[number] = attempt.images[place]
    return Scores(tuple(lines), _NO_LPIPS, pictures)


def missed_sentences(truth: Truth, attack: str, upload: str, scores: Sequence[Score]) -> tuple[Score, ...]:
    """Return a line for each sentence of an upload that the attack refused; see :func:`fedpriv.attacks.referee.missed`.

    Args:
        truth: of the upload.
        attack: as lines name it.
        upload: protected or unprotected.
        scores: of this attack on this upload; none where it was refused.
    """
    if scores:
        return ()
    true = [bare(tokens) for tokens in truth.images]
    about = {**_UNMADE, "attack": attack, "upload": upload}
    return tuple(_Line(truth, number, len(true), true, []).score([], None, about) for number in range(len(true)))


def score_guessed_sentences(guesses: Sequence[Guess], truth: Truth) -> Scores:
    """Score the guesses as if they were readings; by definition none recovers anything."""
    true = [bare(tokens) for tokens in truth.images]
    lines = []
    pictures: dict[int, Tensor] = {}
    for guess in guesses:
        made = bare(guess.image)
        about = {**_UNMADE, "attack": guess.name, "upload": "none"}
        lines += [_Line(truth, number, 1, true, [made]).score(made, None, about) for number in range(len(true))]
    return Scores(tuple(lines), _NO_LPIPS, pictures)


class _Line:
    """What the lines about one true sentence have in common."""

    def __init__(
        self, truth: Truth, number: int, offered: int, true: Sequence[list[int]], guessed: Sequence[list[int]]
    ) -> None:
        self._truth, self._number, self._offered = truth, number, offered
        self._true, self._guessed = true[number], guessed

    def score(self, made: list[int], label: int | None, about: Mapping[str, Any]) -> Score:
        """Compare one sentence with the true one; ``about``: the fields that say of what it is."""
        truth, words = self._truth, sentence_score(self._true, made)
        rank, candidates = self._rank(made)
        return Score(
            mse=None,
            mse_normalised=None,
            psnr=None,
            ssim=None,
            lpips=None,
            recovered=words.exact and made not in self._guessed,
            rank=rank,
            candidates=candidates,
            words=words,
            **subject(truth, self._number, label),
            **odds(truth, self._number, self._offered, picked=False),
            **about,
        )

    def _rank(self, made: list[int]) -> tuple[int | None, int | None]:
        """The place of the original among others by likeness to what was read, and among how many; ties count against.

        Copies of the original are no others.
        """
        if self._truth.others is None:
            return None, None
        others = [tokens for other in self._truth.others if (tokens := bare(other)) != self._true]
        own = likeness(self._true, made)
        return 1 + sum(likeness(other, made) >= own for other in others), 1 + len(others)
