"""The survey of changed labels: how frequent classes are, from what clients count after randomised response.

A client changes its labels once, so that it counts the same in every round: it is counted once.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedpriv.accounting.response import Response
from fedpriv.algorithms.labels.client import response_of
from fedpriv.algorithms.labels.records import LabelSurvey, read_survey, write_survey
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
