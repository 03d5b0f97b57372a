"""The record of one trial: its settings, the model's accuracy, the proven guarantees, and the attacks' results.

It is read from the files of a run's folder only, so that runs outside of sweeps have one, too. ``None`` means that the
run has no such figure. Records make a flat table for Parquet and CSV, one row a trial, whose columns are the keys that
the sweep set, as ``set.KEY``; the fields of :class:`TrialRecord`; and for each attack
``reconstruction.ATTACK.UPLOAD.FIGURE``, ``membership.ATTACK.FIGURE`` or ``evasion.ATTACK.NORM.SIZE.FIGURE``, and
``certified.NORM.SIZE.FIGURE``. :func:`describe_columns` says what each means.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, get_args

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.config import Experiment
from fedpriv.core.finding import Columns, Finding, Part, all_found, findings
from fedpriv.core.reading import GrowingRecord
from fedpriv.core.records import COMPLETED, AttackResult, Ledger, Summary
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.runs import RunFolder
from fedpriv.sweep.settings import Trial

C = TypeVar("C", bound=Columns)

FAILED = "failed"


class ReconstructionPart(Part):
    """What one attack, or one guess, made of the uploads: medians over images, on the [0, 1] scale."""

    head: ClassVar[str] = "reconstruction"
    keys: ClassVar[tuple[str, ...]] = ("attack", "upload")

    attack: str = Field(description="name of the attack or guess")
    upload: str = Field(description="protected, unprotected, or none for a guess that never saw the upload")
    victims: int = Field(description="images attacked")
    recovered: int = Field(description="images that count as recovered")
    mse: float | None = Field(None, description="median MSE over the images, scale [0, 1]")
    mse_low: float | None = Field(None, description="low end of its 95 % interval, by bootstrap over uploads")
    mse_high: float | None = Field(None, description="high end of the same")
    mse_normalised: float | None = Field(None, description="median MSE on the scale of the network's input")
    psnr: float | None = Field(None, description="median PSNR in dB")
    ssim: float | None = Field(None, description="median SSIM")


class TrialRecord(GrowingRecord):
    """One trial of a sweep, or one run on its own. Audits add their results to these fields (:meth:`of`)."""

    trial: int = Field(description="number of the trial, from 1")
    folder: str = Field(description="folder of the run, within the sweep's")
    status: str = Field(description="completed, or failed: the run or its audit did not come to its end")
    reason: str | None = Field(None, description="why it failed, or ended before its last round")
    settings: Mapping[str, Any] = Field(default_factory=dict, description="keys that the sweep set, without the seed")
    seed: int = Field(description="of the experiment")

    data: str = Field("", description="data set")
    model: str = Field("", description="network")
    mechanism: str = Field("", description="none, or what protects the uploads")
    blocks: str | None = Field(None, description="vmf: whole, layer, or size:D")
    draws: int | None = Field(None, description="vmf: m, the draws that make up one example's noisy gradient")
    noise: float | None = Field(None, description="kappa, sigma or scale of the worst client, calibrated or as given")
    parameters: int | None = Field(None, description="numbers that are trained")
    rounds: int | None = Field(None, description="rounds finished")

    accuracy: float | None = Field(None, description="share of the test data classified correctly after the last round")
    accuracy_low: float | None = Field(None, description="low end of its 95 % interval over test examples (Wilson)")
    accuracy_high: float | None = Field(None, description="high end of the same")
    loss: float | None = Field(None, description="mean cross entropy on the test data")

    epsilon: float | None = Field(None, description="proven for the worst client and the whole run, at delta")
    delta: float | None = Field(None, description="of that statement")
    pure_epsilon: float | None = Field(None, description="proven at delta = 0")
    nominal_epsilon: float | None = Field(None, description="what the mechanism's paper prints; no guarantee")
    adjacency: str | None = Field(None, description="which data sets must look alike")
    sampling: str | None = Field(None, description="how batches are drawn")
    participations: int | None = Field(None, description="the most often one example was used")

    reconstructions: tuple[ReconstructionPart, ...] = Field((), description="one for each attack and kind of upload")
    refusals: tuple[str, ...] = Field((), description="what was not attacked, and why; in tables a JSON list")

    seconds: float | None = Field(None, description="wall time of the trial's last start, all that followed included")

    @model_validator(mode="after")
    def _has_columns(self) -> Self:
        known = self.model_extra
        if known is not None:
            for _, kind in columned():
                known.update(iter(kind.model_validate({key: known[key] for key in kind.model_fields if key in known})))
        return self

    def of(self, kind: type[C]) -> C:
        """Return the results that one audit adds."""
        return kind(**{key: getattr(self, key) for key in kind.model_fields})

    def lines(self) -> Iterator[Part]:
        """Yield the parts that have one line for each item, such as the figures of each attack."""
        for name in part_fields():
            yield from getattr(self, name)

    @property
    def alarms(self) -> tuple[tuple[str, str], ...]:
        """The refuted claim and the evidence, for each audit that refutes a proven guarantee."""
        added = [
            (f"{finding.refuted[0].lower()}{finding.refuted[1:]}", self.of(kind).alarm) for finding, kind in columned()
        ]
        return tuple((heading, alarm) for heading, alarm in added if alarm)

    @property
    def failed(self) -> bool:
        """Whether the trial ended early, with an error."""
        return self.status == FAILED

    @property
    def wrong(self) -> bool:
        """Whether an attack refutes a proven guarantee."""
        return bool(self.alarms)

    @property
    def reconstruction(self) -> tuple[ReconstructionPart, ...]:
        """Attacks on the uploads as they were sent: protected, or unprotected where there is no mechanism."""
        sent = "unprotected" if self.mechanism == "none" else "protected"
        return tuple(result for result in self.reconstructions if result.upload == sent)

    @property
    def guesses(self) -> tuple[ReconstructionPart, ...]:
        """Guesses without any upload."""
        return tuple(result for result in self.reconstructions if result.upload == "none")


def read_record(
    folder: RunFolder,
    label: str,
    trial: int = 1,
    settings: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> TrialRecord:
    """Return the record of a finished run.

    Args:
        folder: of the run.
        label: name of the trial in the record.
        trial: its number.
        settings: the sweep's settings for it.
        seconds: wall time of the whole trial in seconds; ``None``: the run's.

    Raises:
        InputError: the run has no summary, or a file is damaged.
    """
    experiment = folder.experiment()
    summary, ledger = folder.final_summary(), folder.final_ledger()
    tested = _tested(folder, summary) if summary.evaluated_examples is None else summary.evaluated_examples
    low, high = _accuracy_interval(summary.test_accuracy, tested)
    tensors, found = summary.model.tensors, _found(folder, summary)
    return TrialRecord(
        trial=trial,
        folder=label,
        status=COMPLETED if summary.status == COMPLETED else FAILED,
        reason=summary.reason,
        settings=dict(settings or {}),
        **_set_up(experiment),
        draws=None if tensors is None else experiment.mechanism.draws(tensors),
        noise=_noise(ledger),
        parameters=summary.model.parameters,
        rounds=summary.rounds,
        accuracy=summary.test_accuracy,
        accuracy_low=low,
        accuracy_high=high,
        loss=summary.test_loss,
        **_shared(summary.ledger, TrialRecord),
        reconstructions=tuple(_reconstruction(result) for result in summary.attacks),
        refusals=summary.refusals,
        **found,
        seconds=summary.seconds if seconds is None else seconds,
    )


def columned() -> list[tuple[Finding[Any], type[Columns]]]:
    """Return the findings that add columns, in their order, with these."""
    return [(finding, finding.columns) for finding in findings() if finding.columns is not None]


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Of a record: its own, then those that findings add."""
    fields = dict(TrialRecord.model_fields)
    for _, kind in columned():
        fields |= kind.model_fields
    return fields


@cache
def part_fields() -> dict[str, type[Part]]:
    """The fields that hold several lines, and of what kind these are."""
    held = {name: get_args(field.annotation)[:1] for name, field in all_fields().items()}
    return {
        name: kind
        for name, kinds in held.items()
        for kind in kinds
        if (isinstance(kind, type) and issubclass(kind, Part))
    }


def _tested(folder: RunFolder, summary: Summary) -> int | None:
    """How many test examples the accuracy is of."""
    known = (each.finding.tested(each.result) for each in all_found(folder))
    return next((count for count in known if count is not None), summary.data.test_examples)


def _found(folder: RunFolder, summary: Summary) -> dict[str, Any]:
    """What findings add; what the summary of a run does not repeat, though it would, is of an earlier model."""
    added: dict[str, Any] = {}
    for each in all_found(folder):
        if all(summary.repeats(key) for key in each.finding.records(each.result)):
            added |= each.finding.trial(each.result)
    return added


def failed_record(
    experiment: Experiment, label: str, trial: int, settings: Mapping[str, Any], reason: str
) -> TrialRecord:
    """The record of a trial that came to nothing: what was set, and why it failed."""
    return TrialRecord(
        trial=trial,
        folder=label,
        status=FAILED,
        reason=" ".join(reason.split()),
        settings=dict(settings),
        **_set_up(experiment),
    )


def _set_up(experiment: Experiment) -> dict[str, Any]:
    return {
        "seed": experiment.seed,
        "data": experiment.data.name,
        "model": experiment.model.name,
        "mechanism": experiment.mechanism.name,
        "blocks": experiment.mechanism.variant,
    }


def _noise(ledger: Ledger) -> float | None:
    parameters = [kind.parameter for kind in MECHANISMS.values() if kind.parameter]
    return next((float(ledger.parameters[key]) for key in parameters if key in ledger.parameters), None)


def _accuracy_interval(accuracy: float | None, examples: int | None) -> tuple[float | None, float | None]:
    if not examples or accuracy is None:
        return None, None
    return rate_interval(round(accuracy * examples), examples).ends or (None, None)


def _reconstruction(result: AttackResult) -> ReconstructionPart:
    low, high = result.intervals.get("mse", (None, None))
    return ReconstructionPart(**_shared(result, ReconstructionPart), mse_low=low, mse_high=high)


def _shared(record: object, kind: type[BaseModel]) -> dict[str, Any]:
    """The fields that both have."""
    return {key: getattr(record, key) for key in kind.model_fields if hasattr(record, key)}


class SweepProgress:
    """The listener of a sweep: overrides what it shows."""

    def found(self, records: Sequence[TrialRecord]) -> None:
        """These trials were over before."""

    def started(self, trial: Trial) -> None:
        """A trial runs."""

    def ended(self, record: TrialRecord) -> None:
        """A trial is over."""

    def tick(self) -> None:
        """Time has passed."""


# ---- a table of records ----------------------------------------------------------------------------------------------


def to_table(records: Sequence[TrialRecord]) -> pa.Table:
    """Return one row for each record; a figure that a trial has not is null, and so are unknown columns."""
    rows = [dict(_cells(record)) for record in records]
    meanings = describe_columns(records)
    columns = [_column([row.get(name) for row in rows]) for name in meanings]
    fields = [
        pa.field(name, column.type, metadata={"description": meaning})
        for (name, meaning), column in zip(meanings.items(), columns, strict=True)
    ]
    return pa.table(columns, schema=pa.schema(fields))


def describe_columns(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return the columns of :func:`to_table`, in their order, and what each means."""
    own = _described(TrialRecord)
    head = {name: own.pop(name) for name in ("trial", "status", "seed")}
    last = {"seconds": own.pop("seconds")}
    for _, kind in columned():
        own |= _described(kind)
    settings = {f"set.{key}": f"{key}, set by the sweep" for record in records for key in record.settings}
    attacks: dict[str, str] = {}
    for record in records:
        for part in record.lines():
            attacks |= {f"{part.place}.{key}": meaning for key, meaning in _described(type(part)).items()}
    return head | settings | own | last | attacks


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def to_csv(table: pa.Table) -> bytes:
    """Return a table as the bytes of a CSV file with a header; null is empty."""
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(table, buffer)
    return buffer.getvalue()


def from_csv(content: bytes) -> list[TrialRecord]:
    """Return the records of a CSV file that :func:`to_csv` wrote.

    Numbers are the same ones; a setting that is a whole number in a column of others is 1.0 instead of 1, and settings
    that are lists are lists again. The attacks of a record stand in the order of the columns.
    """
    options = pyarrow.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
    # A process that ends while one of Arrow's threads starts is aborted: seen in 1 of 40 on a busy machine.
    threads = pyarrow.csv.ReadOptions(use_threads=False)
    table = pyarrow.csv.read_csv(io.BytesIO(content), read_options=threads, convert_options=options)
    return [_of_row(row) for row in table.to_pylist()]


def _of_row(row: Mapping[str, Any]) -> TrialRecord:
    known = {name: value for name, value in row.items() if value is not None}
    fields = {name: value for name, value in known.items() if name in all_fields()}
    fields["settings"] = {name[4:]: _setting(value) for name, value in known.items() if name.startswith("set.")}
    if "refusals" in fields:
        fields["refusals"] = json.loads(fields["refusals"])
    for field, kind in part_fields().items():
        places: dict[str, dict[str, Any]] = {}
        for name, value in known.items():
            if name.startswith(f"{kind.head}."):
                place, _, figure = name.partition(".")[2].rpartition(".")
                places.setdefault(place, {})[figure] = value
        fields[field] = [
            kind(**dict(zip(kind.keys, place.split(".", len(kind.keys) - 1), strict=True)), **figures)
            for place, figures in places.items()
        ]
    return TrialRecord(**fields)


def _setting(value: Any) -> Any:
    """A setting as it was: lists and tables are JSON in a column of text."""
    return json.loads(value) if isinstance(value, str) and value.startswith(("[", "{")) else value


def _described(kind: type[BaseModel]) -> dict[str, str]:
    """The columns of a record, or of one line of several, and what each means."""
    named = kind.keys if issubclass(kind, Part) else ("settings", *part_fields())
    return {name: field.description or "" for name, field in kind.model_fields.items() if name not in named}


def _cells(record: TrialRecord) -> Iterator[tuple[str, Any]]:
    for name in all_fields():
        if name != "settings" and name not in part_fields():
            value = getattr(record, name)
            yield name, (list(value) or None) if name == "refusals" else value
    for key, value in record.settings.items():
        yield f"set.{key}", value
    for part in record.lines():
        for key in type(part).model_fields:
            yield f"{part.place}.{key}", getattr(part, key)


def _column(values: list[Any]) -> pa.Array:
    """One type for the whole column: the values' own where they agree, else text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or kinds == {bool}:
        return pa.array(values)
    return pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])
