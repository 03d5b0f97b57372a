"""What the referee measures of changed labels when a run ends."""

import numpy as np
import torch

from fedpriv.accounting.response import Response
from fedpriv.algorithms.labels.client import response_of
from fedpriv.algorithms.labels.records import LabelsTold, read_survey, write_survey
from fedpriv.algorithms.labels.server import survey_of
from fedpriv.algorithms.labels.settings import LabelSettings
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World


def measure_labels(world: World, folder: RunFolder) -> None:
    """Write the run's survey with what the referee knows; nothing where clients use labels as they are.

    In a deployment only clients know what their labels became, unless that follows from the seed.
    """
    if LabelSettings.of(world.experiment).epsilon is None:
        return
    survey = read_survey(folder) or survey_of(response_of(world), {})
    if not (folder.is_deployed and world.experiment.keeps_secret):
        survey = survey.model_copy(update={"told": _told(world, response_of(world))})
    write_survey(folder, survey)


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
