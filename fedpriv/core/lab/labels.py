"""Labels that clients changed: what the referee measures, and the result in words."""

import numpy as np
import torch

from fedpriv.accounting.response import Response, most_told
from fedpriv.algorithms.labels.client import response_of
from fedpriv.algorithms.labels.server import survey_of
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.preparation import preparation_of
from fedpriv.core.records import LabelsTold, LabelSurvey
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World


def with_referee(world: World, folder: RunFolder) -> LabelSurvey | None:
    """Return the run's survey with what the referee knows; ``None`` where clients use labels as they are.

    In a deployment only clients know what their labels became, unless that follows from the seed.
    """
    if preparation_of(world.experiment) is None:
        return None
    survey = folder.labels() or survey_of(response_of(world), {})
    if folder.is_deployed and world.experiment.keeps_secret:
        return survey
    return survey.model_copy(update={"told": _told(world, response_of(world))})


def _told(world: World, response: Response) -> LabelsTold:
    rows = torch.from_numpy(np.concatenate(world.partitions))
    true, changed = world.true_labels[rows], world.dataset.y_train[rows]
    counts = np.bincount(true.numpy(), minlength=response.answers)
    known = counts / counts.sum()
    named = torch.tensor(response.best_decisions(known.tolist()))[changed]
    right = int((named == true).sum())
    interval = rate_interval(right, len(rows))
    low, high = interval.ends or (0.0, 1.0)
    return LabelsTold(
        examples=len(rows),
        kept=int((true == changed).sum()),
        right=right,
        low=low,
        high=high,
        guess=float(known.max()),
        ceiling=response.success(known.tolist()),
        true_shares=tuple(known.tolist()),
    )


def label_sentences(survey: LabelSurvey) -> list[str]:
    """Say what changed labels prove, and how often they tell the true one."""
    proven = (
        f"Labels were changed once at the clients (each kept with probability {survey.keep:.1%}): pure epsilon "
        f"{survey.epsilon:.4g} of each label, for the whole run and against everybody"
    )
    told = survey.told
    if told is None:
        return [f"{proven}."]
    rate = told.right / told.examples
    measured = f"{rate:.1%} of {told.examples:,} (95 %: {told.low:.1%} to {told.high:.1%})"
    # Chance takes a measured rate above what is proven; then its interval reaches below.
    above = told.low <= told.ceiling < rate
    ceiling = "which agrees within its interval with the ceiling," if above else "the ceiling"
    return [
        f"{proven}. The true label, from the changed one: a guess {told.guess:.1%}, measured {measured}, {ceiling} "
        f"{told.ceiling:.1%} for whoever knows no more of an example than how frequent classes are; somebody "
        f"who already names 90% of labels from the features can reach {most_told(survey.epsilon, 0.9):.1%}."
    ]
