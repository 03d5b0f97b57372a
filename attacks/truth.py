"""The examples of an upload, given to the referee and never to an attack, and the scores that the referee returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedpriv.attacks.observation import CandidateLists
from fedpriv.attacks.reconstruction import Optimum
from fedpriv.core.columns import ColumnSpec
from fedpriv.core.names import END, PAD, START
from fedpriv.core.records import Score
from fedpriv.data.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class Truth:
    """What one upload, or one sum of uploads, was made of."""

    round: int
    client: int  # the client; for a sum the one that its observation names
    images: Tensor  # (B, C, H, W) on the [0, 1] scale
    labels: Tensor  # int64 (B,), by which those that an attack names are scored
    # for each image its client and its number in that client's batch; `None`: `client`, and their order
    owners: tuple[tuple[int, int], ...] | None = None
    clients: int = 1  # how many clients' uploads are in the sum; 1 for a single upload
    # (N, C, H, W) on the [0, 1] scale: images of the same data set among which the original is to be picked out, no two
    # of them alike, and none of them like an original; `None`: nothing is to be picked
    others: Tensor | None = None
    other_labels: Tensor | None = None  # int64 (N,)
    labels_known: bool = False  # whether the adversary knows the originals' labels, and so which of the others are out
    # what an attack picks from that is given a list for each image; `None`: no attack is
    candidates: CandidateLists | None = None
    # for each image, in how many releases it was used by the time of this upload; `None`: not known
    releases: tuple[int, ...] | None = None
    # for each image, how often the best decision among it and the others is right; `None`: not known
    optima: tuple[Optimum, ...] | None = None
    # int64 (B,), those that went into the upload, where clients change labels; `None`: `labels`
    used_labels: Tensor | None = None
    columns: tuple[ColumnSpec, ...] = ()  # of the table whose rows the "images" are; empty: they are images
    # of texts, whose tokens the "images" are, int64 (B, 1, 1, T); `None`: they are images or rows
    tokenizer: Tokenizer | None = None

    @property
    def used(self) -> Tensor:
        """The labels (B,) that went into the upload, true or changed."""
        return self.labels if self.used_labels is None else self.used_labels

    def place(self, number: int) -> tuple[int, int]:
        """The client of an image, and the image's number in that client's batch."""
        return (self.client, number) if self.owners is None else self.owners[number]


@dataclass(frozen=True)
class Scores:
    """Lines of scores.jsonl, why they have no LPIPS, and the pictures that they are about."""

    scores: tuple[Score, ...]  # by restart, then image
    lpips_reason: str | None  # `None` where LPIPS was computed
    # number of the true image in the truth -> what the chosen restart made of it, (C, H, W) on [0, 1]
    pictures: Mapping[int, Tensor]


# fields of what no attack has made
UNMADE: Mapping[str, Any] = {"restart": 0, "chosen": True, "loss": None, "note": ""}


def scored(truth: Truth, number: int, label: int | None, *, offered: int, picked: bool = False, **fields: Any) -> Score:
    """Return the line about a true image; ``fields``: of :class:`Score`, all that the truth does not decide.

    ``label``: the inferred one. ``offered``: the images from which the one that goes with it was chosen by its error.
    """
    client, place = truth.place(number)
    true_label = int(truth.labels[number])
    # In a batch the best decision is that of somebody who gives one answer for each image.
    optimum = truth.optima[number] if truth.optima is not None and (picked or offered == 1) else None
    return Score(
        round=truth.round,
        client=client,
        image=place,
        label=label,
        true_label=true_label,
        label_correct=None if label is None else label == true_label,
        clients=truth.clients,
        picked=picked,
        offered=offered,
        chance=_chance(truth, number, offered, picked=picked),
        releases=None if truth.releases is None else truth.releases[number],
        best=None if optimum is None else optimum.share,
        draws=0 if optimum is None else optimum.draws,
        **fields,
    )


def _chance(truth: Truth, image: int, offered: int, *, picked: bool) -> float | None:
    """How often a guess, of several images the nearest, picks an image out of candidates as likely as it is."""
    label = truth.used[image]
    if picked:
        return None if truth.candidates is None else 1 / len(truth.candidates.alike(image, label, truth.labels_known))
    if truth.others is None:
        return None
    alike = len(truth.others)
    if truth.labels_known and truth.other_labels is not None:
        alike = int((truth.other_labels == label).sum())
    return min(1.0, offered / (1 + alike))


def bare(tokens: Tensor) -> list[int]:
    """Return the tokens of one sequence that are part of a text: without beginnings, ends and padding."""
    numbers: list[int] = tokens.flatten().tolist()
    return [number for number in numbers if number not in (PAD, START, END)]
