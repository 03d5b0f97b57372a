"""labels.json: the survey of changed labels. What only the referee knows lies in referee/."""

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fedpriv.core.reading import FileRecord, Record, read_file
from fedpriv.core.runs import RunFolder

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


# What only the referee may know: exact figures of clients' data.
_TOLD = "referee/labels.json"


def write_survey(folder: RunFolder, survey: LabelSurvey) -> None:
    """Write labels.json, and what the referee knows into a file of its own."""
    if survey.told is not None:
        folder.write_private(_TOLD, asdict(survey.told))
    folder.write_json(survey.path, survey.model_dump(mode="json", exclude={"told"}))


def read_survey(folder: RunFolder) -> LabelSurvey | None:
    """Return what changed labels tell; ``None`` where clients do not change them, and until one has answered."""
    survey, told = folder.read(LabelSurvey), read_file(folder.path / _TOLD, LabelsTold)
    return survey if survey is None or told is None else survey.model_copy(update={"told": told})
