"""What the referee hands on, of images, rows and sentences: scores, and what may be expected of attacks on each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedpriv.attacks.truth import Truth
from fedpriv.core.records import Score

__all__ = ["Scores", "odds", "subject"]


@dataclass(frozen=True)
class Scores:
    """Lines of scores.jsonl, why they have no LPIPS, and the pictures that they are about.

    Attributes:
        scores: by restart, then image.
        lpips_reason: ``None`` where LPIPS was computed.
        pictures: number of the true image in the truth -> what the chosen restart made of it, (C, H, W) on [0, 1].
    """

    scores: tuple[Score, ...]
    lpips_reason: str | None
    pictures: Mapping[int, Tensor]


def subject(truth: Truth, number: int, label: int | None) -> dict[str, Any]:
    """What a line is about, and whether its label was told: the fields of :class:`Score` that name the true one."""
    client, place = truth.place(number)
    true_label = int(truth.labels[number])
    return {
        "round": truth.round,
        "client": client,
        "image": place,
        "label": label,
        "true_label": true_label,
        "label_correct": None if label is None else label == true_label,
        "clients": truth.clients,
    }


def odds(truth: Truth, image: int, offered: int, *, picked: bool) -> dict[str, Any]:
    """What may be expected of attacks on one image: the fields of :class:`Score` that no attack decides."""
    # In a batch the best decision is that of somebody who gives one answer for each image.
    optimum = truth.optima[image] if truth.optima is not None and (picked or offered == 1) else None
    return {
        "offered": offered,
        "chance": _chance(truth, image, offered, picked=picked),
        "releases": None if truth.releases is None else truth.releases[image],
        "best": None if optimum is None else optimum.share,
        "draws": 0 if optimum is None else optimum.draws,
    }


def _chance(truth: Truth, image: int, offered: int, *, picked: bool) -> float | None:
    """How often an image is picked out by a guess, if the candidates are as likely as it is.

    A guess that may offer several images, of which the referee takes the nearest, is right as many times more often.
    """
    label = truth.used[image]
    if picked:
        return None if truth.candidates is None else 1 / len(truth.candidates.alike(image, label, truth.labels_known))
    if truth.others is None:
        return None
    alike = len(truth.others)
    if truth.labels_known and truth.other_labels is not None:
        alike = int((truth.other_labels == label).sum())
    return min(1.0, offered / (1 + alike))
