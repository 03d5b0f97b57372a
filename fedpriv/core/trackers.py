"""Experiment trackers (MLflow, TensorBoard, CSV): log a finished run from its folder, once its report is written."""

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.core.config import Experiment, describe
from fedpriv.core.errors import InputError, RunFailedError, one_line, optional
from fedpriv.core.files import write_whole
from fedpriv.core.records import COMPLETED, Summary
from fedpriv.core.runs import RunFolder

_OF_ROUNDS = ("accuracy", "loss", "noisy_accuracy", "epsilon", "bytes_up", "bytes_down")
_LONGEST = 500  # characters of a setting


@dataclass(frozen=True)
class Metric:
    """One number: of a round, or of the whole run, which has the last round's number."""

    name: str
    step: int
    value: float


@dataclass(frozen=True)
class Tracked:
    """What is logged of a run."""

    path: Path  # its folder, which may hold report.html
    name: str
    settings: Mapping[str, str]  # names, and what differs from the defaults
    metrics: tuple[Metric, ...]
    summary: Summary


def check_trackers(experiment: Experiment) -> None:
    """Refuse trackers whose library is not installed, before a run starts."""
    for name in experiment.report.trackers:
        if name in _LIBRARIES:
            _library(name)


def _library(name: str) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # what it would tell about a run to its makers
    return optional(name, name, f"report.trackers = {name!r}")


def track(folder: RunFolder, name: str | None = None) -> None:
    """Log a finished run to the trackers that its settings name; ``None``: under the experiment's and folder's name."""
    experiment, summary = folder.experiment(), folder.summary()
    if not experiment.report.trackers or summary is None or summary.status != COMPLETED:
        return
    every = describe(experiment)
    shown = {key: value for key, value, default, _ in every if value != default or key.endswith(".name")}
    settings = {key: str(value)[:_LONGEST] for key, value in shown.items()}
    called = name or _run_name(folder, summary)
    tracked = Tracked(folder.path, called, settings, tuple(_metrics(folder, summary)), summary)
    for tracker in experiment.report.trackers:
        try:
            _TRACKERS[tracker](tracked)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 (the libraries' errors are of many kinds)
            raise RunFailedError(f"report.trackers: {tracker}: {one_line(error)}; the run is complete") from None


def _run_name(folder: RunFolder, summary: Summary) -> str:
    """The folder's name, behind the experiment's where that does not say it."""
    name = folder.path.resolve().name
    return name if name.startswith(summary.name) else f"{summary.name}-{name}"


def _metrics(folder: RunFolder, summary: Summary) -> Iterator[Metric]:
    for record in folder.rounds():
        known = {name: getattr(record, name) for name in _OF_ROUNDS}
        yield from (Metric(f"round/{name}", record.round, value) for name, value in known.items() if value is not None)
    proven = summary.ledger
    whole: dict[str, float | None] = {"test_accuracy": summary.test_accuracy, "test_loss": summary.test_loss}
    if proven is not None:
        whole |= {"epsilon": proven.epsilon, "pure_epsilon": proven.pure_epsilon, "delta": proven.delta}
    for result in summary.attacks:
        place = f"leakage/{_plain(result.attack)}/{result.upload}"
        if not result.picked:
            whole[f"{place}/recovered"] = result.recovered / result.victims
        whole |= {f"{place}/{score}": getattr(result, score) for score in ("mse", "ssim", "psnr", "label_accuracy")}
    for rate in summary.rates:
        place = f"leakage/{_plain(rate.attack)}/{rate.upload}/{rate.event}"
        whole |= {
            f"{place}/rate": rate.hits / rate.images,
            f"{place}/guess": rate.chance,
            f"{place}/ceiling": rate.ceiling,
        }
    yield from (Metric(name, summary.rounds, value) for name, value in whole.items() if value is not None)


def _plain(name: str) -> str:
    """An attack with its settings, such as ``iga,tv=0.1``, as names of metrics may be."""
    return name.replace(",", " ").replace("=", " ")


def _to_csv(tracked: Tracked) -> None:
    """Write metrics.csv into the folder: name, step, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "step", "value"))
    writer.writerows((metric.name, metric.step, metric.value) for metric in tracked.metrics)
    write_whole(tracked.path / "metrics.csv", text.getvalue().encode())


def _to_tensorboard(tracked: Tracked) -> None:
    """Write events into tensorboard/ in the folder; an earlier log of the run is replaced."""
    from torch.utils.tensorboard import SummaryWriter

    place = tracked.path / "tensorboard"
    for earlier in place.glob("events.out.*"):
        earlier.unlink()
    with SummaryWriter(str(place)) as writer:
        for metric in tracked.metrics:
            writer.add_scalar(metric.name, metric.value, metric.step)
        writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in tracked.settings.items()))
        writer.add_text("verdict", "\n\n".join((*tracked.summary.verdict, f"Report: {tracked.path / 'report.html'}")))


def _to_mlflow(tracked: Tracked) -> None:
    """Log to where MLFLOW_TRACKING_URI says, under MLFLOW_EXPERIMENT_NAME; to the same run again (mlflow.txt)."""
    mlflow = _library("mlflow")
    from mlflow.entities import Metric as Logged
    from mlflow.entities import Param, RunTag

    known = tracked.path / "mlflow.txt"
    earlier = known.read_text(encoding="utf-8").strip() if known.is_file() else None
    tags = {"fedpriv.version": tracked.summary.versions.get("fedpriv", ""), "fedpriv.folder": str(tracked.path)}
    with mlflow.start_run(earlier, run_name=tracked.name) as run:
        write_whole(known, run.info.run_id.encode())
        client, now = mlflow.MlflowClient(), run.info.start_time
        client.log_batch(
            run.info.run_id,
            [Logged(metric.name, metric.value, now, metric.step) for metric in tracked.metrics[:_BATCH]],
            [Param(key, value) for key, value in tracked.settings.items()][:_PARAMS],
            [RunTag(key, value) for key, value in tags.items()],
        )
        for start in range(_BATCH, len(tracked.metrics), _BATCH):
            some = tracked.metrics[start : start + _BATCH]
            client.log_batch(run.info.run_id, [Logged(each.name, each.value, now, each.step) for each in some])
        for name in ("report.html", "summary.json", "ledger.json"):
            if (tracked.path / name).is_file():
                mlflow.log_artifact(str(tracked.path / name))


_BATCH, _PARAMS = 800, 90  # a batch has at most 1000 entries, 100 of them settings
_LIBRARIES = ("mlflow", "tensorboard")
_TRACKERS: Mapping[str, Callable[[Tracked], None]] = {
    "csv": _to_csv,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
