"""Whom an inverted picture shows, by pictures that nobody trained with; and how near to a likeness it is.

A second model that was trained on the same pictures is fooled by whatever fools the first, so that it is no judge. The
floor is what a guess gets that offers the same for every class, the reference the mean of a class's training pictures.
An inversion may exceed the reference: it amplifies what sets a class apart.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedpriv import metrics
from fedpriv.attacks.endpoint.scene import Referee
from fedpriv.attacks.intervals import median_interval, rate_interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Inverted, ProbeFigure

__all__ = ["inversion_figures", "inverted_classes", "places", "two_sentences"]

HALF_THE_ERROR = 3.0  # dB above the one picture for all, from which on an attack is said to show how classes look

_NOTHING = "no theorem bounds what a model shows of a class"
_FLOOR = "a picture that does not depend on the class is nearest to its own test pictures for one class in all"


def places(pictures: Tensor, test_means: Tensor) -> Tensor:
    """Return at which place each class's own test pictures are, by likeness to the picture offered for it: (K,).

    Likeness is the cosine once the mean of all classes' test pictures is removed. Ties count against the attack.

    Args:
        pictures: (K, C, H, W), one a class.
        test_means: (K, C, H, W), without NaN.
    """
    middle = test_means.mean(dim=0)
    offered = torch.nn.functional.normalize((pictures - middle).flatten(1), dim=1)
    shown = torch.nn.functional.normalize((test_means - middle).flatten(1), dim=1)
    likeness = offered @ shown.mT
    return (likeness >= likeness.diagonal()[:, None]).sum(dim=1)


def inverted_classes(referee: Referee, pictures: Tensor, names: Sequence[str]) -> tuple[Inverted, ...]:
    """Return how each class came out; classes without test or training pictures are left out.

    Args:
        referee: has the model and the pictures.
        pictures: (classes, C, H, W) on [0, 1].
        names: of the files.
    """
    kept = _complete(referee)
    ranks = places(pictures[kept], referee.test_means[kept])
    confidence = referee.scores(pictures).softmax(dim=1).diagonal()[kept]
    likeness = metrics.psnr(referee.train_means[kept], pictures[kept]).clamp(max=200)
    return tuple(
        Inverted(int(label), names[int(label)], float(confidence[at]), int(ranks[at]), float(likeness[at]))
        for at, label in enumerate(kept)
    )


def inversion_figures(referee: Referee, inverted: Sequence[Inverted], guess: Tensor) -> tuple[ProbeFigure, ...]:
    """Return who is told, and how near the pictures are, with floor and reference.

    Args:
        referee: has the pictures.
        inverted: of :func:`inverted_classes`, at least one.
        guess: (C, H, W), what someone offers for every class who has no model: the mean of public pictures, or grey.
    """
    kept, count = _complete(referee), len(inverted)
    reference = places(referee.train_means[kept], referee.test_means[kept])
    floor = metrics.psnr(referee.train_means[kept], guess.expand(count, *guess.shape)).clamp(max=200)
    generator = numpy_stream(referee.seed, "probe-likeness")
    figures = [
        ProbeFigure(
            f"classes told, top {top}",
            rate_interval(sum(inversion.rank <= top for inversion in inverted), count),
            min(1.0, top / count),
            reference=float((reference <= top).double().mean()),
            theorem=f"{_NOTHING}; floor: {_FLOOR}",
        )
        for top in (1, 5)
    ]
    likeness = median_interval([inversion.psnr for inversion in inverted], generator)
    figures.append(
        ProbeFigure("PSNR to the class's mean, median", likeness, float(floor.median()), theorem=_NOTHING, unit="dB")
    )
    confidence = median_interval([inversion.confidence for inversion in inverted], generator)
    figures.append(ProbeFigure("the model's confidence, median", confidence, theorem="it says nothing about likeness"))
    return tuple(figures)


def two_sentences(figures: Sequence[ProbeFigure]) -> tuple[str, str]:
    """Return whether the pictures tell who, and whether they show how they look."""
    told, likeness = figures[0], figures[2]
    floor = told.guess or 0.0
    tells = told.measured.low is not None and told.measured.low > floor
    reference = (
        f" ({told.reference:.1%} for the mean of a class's training pictures)" if told.reference is not None else ""
    )
    who = (
        f"It {'tells' if tells else 'does not tell'} who: {told.measured.value:.1%} of the classes are told by their "
        f"test pictures, a guess {floor:.1%}{reference}."
    )
    ahead = (likeness.measured.low or 0.0) - (likeness.guess or 0.0)
    verdict = "shows" if ahead >= HALF_THE_ERROR else "hints at" if ahead > 0 else "does not show"
    look = (
        f"It {verdict} how they look: {likeness.measured.value:.1f} dB to the class's mean, "
        f"{likeness.guess or 0.0:.1f} dB for one picture offered for all."
    )
    return who, look


def _complete(referee: Referee) -> np.ndarray:
    """The classes that have training and test pictures."""
    there = ~(referee.train_means.isnan() | referee.test_means.isnan()).flatten(1).any(dim=1)
    return np.flatnonzero(there.numpy())
