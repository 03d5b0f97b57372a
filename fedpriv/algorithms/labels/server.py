"""The survey of changed labels: class frequencies from what clients count, once each, after randomised response."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedpriv.accounting.response import Response
from fedpriv.algorithms.labels.preparation import response_of
from fedpriv.algorithms.labels.records import LabelsTold, LabelSurvey, read_survey, write_survey
from fedpriv.algorithms.labels.settings import LabelSettings
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World
from fedpriv.server.uploads import Upload


def record_survey(world: World, folder: RunFolder, uploads: Sequence[Upload]) -> None:
    """Add clients that answered for the first time to labels.json."""
    known = read_survey(folder)
    counts = {} if known is None else dict(zip(known.clients, known.counts, strict=True))
    told = counts | {upload.client: upload.labels for upload in uploads if upload.labels is not None}
    if known is None or told.keys() != counts.keys():
        write_survey(folder, survey_of(response_of(world), told))


def survey_of(response: Response, counts: Mapping[int, Sequence[int]]) -> LabelSurvey:
    """Estimate the shares of classes."""
    law = {"epsilon": response.epsilon, "keep": response.keep, "other": response.other}
    if not counts:
        return LabelSurvey.model_validate(law)
    total = np.sum([np.asarray(row, dtype=np.int64) for row in counts.values()], axis=0)
    shares, errors = response.shares(total.tolist())
    return LabelSurvey(
        **law,
        clients=tuple(sorted(counts)),
        counts=tuple(tuple(counts[client]) for client in sorted(counts)),
        examples=int(total.sum()),
        shares=tuple(shares.tolist()),
        standard_errors=tuple(errors.tolist()),
    )


def measure_labels(world: World, folder: RunFolder) -> None:
    """Write the run's survey with what the referee knows; in a deployment only clients know more than counts."""
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
