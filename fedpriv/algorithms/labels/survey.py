"""The survey of changed labels, labels.json: class frequencies from what clients count, once each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from fedpriv.algorithms.labels.preparation import response_of
from fedpriv.algorithms.labels.settings import LabelSettings
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.reading import FileRecord, Record, read_file
from fedpriv.core.runs import RunFolder

if TYPE_CHECKING:
    from fedpriv.accounting.response import Response
    from fedpriv.core.world import World
    from fedpriv.server.uploads import Upload

_TOLD = "referee/labels.json"  # what only the referee may know: exact figures of clients' data
_Count = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class LabelsTold(Record):
    """referee/labels.json: how often the label behind a changed one is named; only the referee knows."""

    examples: _Count  # all clients' examples
    kept: _Count  # how many labels were not changed
    right: _Count  # how many are named by the likeliest label behind the changed one, given the true shares of classes
    low: _Share  # of the 95 % interval of the share that is right
    high: _Share  # likewise
    guess: _Share  # the largest share of a class: what naming it everywhere gets right
    ceiling: _Share  # what nobody exceeds who sees one example's changed label and knows the shares of classes
    true_shares: tuple[_Share, ...]  # of the classes


class LabelSurvey(FileRecord):
    """labels.json.

    A label is kept with probability ``keep``, and becomes each other one with ``other``. ``counts`` has a row for each
    of the ``clients`` that answered, ascending: how often it holds each class after labels were changed. ``shares`` and
    ``standard_errors`` are estimates from the ``examples`` of all of them; empty where nobody was asked, as with a
    mechanism, whose claim counts would not be covered by. ``told`` is the referee's: it is in no message, and in a file
    of its own (runs of earlier versions have it here).
    """

    path: ClassVar[str] = "labels.json"

    epsilon: float
    keep: _Share
    other: _Share
    clients: tuple[_Count, ...] = ()
    counts: tuple[tuple[_Count, ...], ...] = ()
    examples: _Count = 0
    shares: tuple[float, ...] = ()
    standard_errors: tuple[float, ...] = ()
    told: LabelsTold | None = None


def write_survey(folder: RunFolder, survey: LabelSurvey) -> None:
    """Write labels.json, and what the referee knows into a file of its own."""
    if survey.told is not None:
        folder.write_private(_TOLD, asdict(survey.told))
    folder.write_json(survey.path, survey.model_dump(mode="json", exclude={"told"}))


def read_survey(folder: RunFolder) -> LabelSurvey | None:
    """Return what changed labels tell; ``None`` where clients do not change them, and until one has answered."""
    survey, told = folder.read(LabelSurvey), read_file(folder.path / _TOLD, LabelsTold)
    return survey if survey is None or told is None else survey.model_copy(update={"told": told})


def record_survey(world: "World", folder: RunFolder, uploads: "Sequence[Upload]") -> None:
    """Add clients that answered for the first time to labels.json."""
    known = read_survey(folder)
    counts = {} if known is None else dict(zip(known.clients, known.counts, strict=True))
    told = counts | {upload.client: upload.labels for upload in uploads if upload.labels is not None}
    if known is None or told.keys() != counts.keys():
        write_survey(folder, survey_of(response_of(world), told))


def survey_of(response: "Response", counts: Mapping[int, Sequence[int]]) -> LabelSurvey:
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


def measure_labels(world: "World", folder: RunFolder) -> None:
    """Write the run's survey with what the referee knows; in a deployment only clients know more than counts."""
    if LabelSettings.of(world.experiment).epsilon is None:
        return
    survey = read_survey(folder) or survey_of(response_of(world), {})
    if not (folder.is_deployed and world.experiment.keeps_secret):
        survey = survey.model_copy(update={"told": _told(world, response_of(world))})
    write_survey(folder, survey)


def _told(world: "World", response: "Response") -> LabelsTold:
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
