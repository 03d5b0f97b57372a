"""The commands ``fedpriv sweep FILE`` and ``fedpriv compare DIR...``."""

import os
import shlex
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.core.cli.terminal import (
    Json,
    Quiet,
    err,
    folders_here,
    out,
    print_json,
    print_line,
    print_sentences,
    print_warning,
)
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import writing, writing_to
from fedpriv.core.verb import Options, Verb

# In the heading of a comparison.
_MOST_NAMES = 4

Attack = Annotated[
    str,
    typer.Option("--attack", metavar="NAME", help="Reconstruction attack to plot; default: the strongest."),
]


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file, such as configs/paper/table2.toml.")],
    scale: Annotated[
        str, typer.Option(metavar="NAME", help=r"One of the file's \[scales]; default: the one it names.")
    ] = "",
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the sweep; default: sweeps/NAME-SCALE.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Check and list the trials; run nothing.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Time the first round of each kind of trial, and estimate the time of the whole sweep."
        ),
    ] = False,
    inline: Annotated[
        bool, typer.Option("--inline", help="Run the trials here, one after the other, without Ray.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed trials again.")] = False,
    reports: Annotated[
        bool, typer.Option("--reports", help="Write a report.html for each trial, too; `fedpriv report` writes one.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run every trial of FILE. The same command again keeps finished trials and runs the rest."""
    from fedpriv.sweep.settings import load_sweep

    asked = load_sweep(file, scale)
    if inline:
        asked = replace(asked, resources=asked.resources.model_copy(update={"engine": "inline"}))
    # Imported here: torch and Ray take seconds that a mistyped key need not wait for.
    from fedpriv.sweep.display import SweepDisplay
    from fedpriv.sweep.folder import SweepFolder
    from fedpriv.sweep.page import write_sweep_report
    from fedpriv.sweep.record import SweepProgress
    from fedpriv.sweep.run import check_resources, check_trials, run_sweep

    silent = quiet or as_json
    warnings = check_trials(asked)
    for text in () if silent else warnings:
        print_warning(text)
    if list_:
        _list(asked.trials, as_json)
        return
    if dry_run:
        _estimate(asked, as_json)
        return
    check_resources(asked)
    folder = SweepFolder.prepare(out_dir or Path("sweeps") / asked.name, asked)
    folder.write_command(_command(file, scale, out_dir, inline, reports))
    with nullcontext(SweepProgress()) if silent else SweepDisplay(err, folder, len(asked.trials)) as progress:
        records = run_sweep(asked, folder, progress, retry)
    with writing(shlex.join(["fedpriv", "report", str(folder.path)])):
        report = write_sweep_report(folder.path)
    if reports:
        _write_trial_reports(folder.path, records)
    _track(folder.path, records)
    _print(records, as_json, folder=str(folder.path))
    if not as_json:
        print_line(f"Results: {folder.path / 'results.parquet'}, {folder.path / 'results.csv'}")
        print_line(f"Report: {report}")
    _refuse_faults(records)


def compare(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...", help="Folders of sweeps or runs; default: all finished ones in runs/ and sweeps/."
        ),
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE", help="The report to write.")] = Path(
        "comparison.html"
    ),
    attack: Attack = "",
    private_selection: Annotated[
        bool,
        typer.Option(
            "--private-selection", help="Also print what is proven about the most accurate trial, counting the choice."
        ),
    ] = False,
    options: tuple[Options, ...] = (),
    as_json: Json = False,
) -> None:
    """Compare the trials of sweeps and single runs: a table, and a report with trade-offs."""
    from fedpriv.sweep.comparison import read_folders, sources_of
    from fedpriv.sweep.page import write_comparison
    from fedpriv.sweep.selection import chosen_trial

    compared = folders or [path for path in folders_here("summary.json", "sweep.json") if _is_over(path)]
    if not compared:
        raise InputError("there is no finished run in runs/ and no sweep in sweeps/: name the folders")
    records = read_folders(compared)
    best = chosen_trial(records) if private_selection else None
    chosen = {name: asked for each in options for name, asked in vars(each).items()}
    with writing_to(out_file):
        report = write_comparison(records, out_file, attack, chosen, title=_title(compared))
    _print(records, as_json, **({} if best is None else {"private_selection": asdict(best)}))
    if not as_json:
        for text in (*sources_of(records), *(() if best is None else best.sentences())):
            print_line(text)
        print_line(f"Report: {report}")
    _refuse_faults(records)


def _is_over(folder: Path) -> bool:
    """Whether a run came to its end; a sweep holds those trials that did."""
    from fedpriv.core.records import COMPLETED
    from fedpriv.core.runs import RunFolder

    summary = RunFolder(folder).summary()
    return summary is None or summary.status == COMPLETED


def _write_trial_reports(folder: Path, records: Any) -> None:
    """Write the report of every trial, of failed ones too; one that cannot be written does not stop the others."""
    from fedpriv.core.report import write_report

    for record in records:
        try:
            write_report(folder / record.folder)
        except (InputError, OSError) as error:
            print_warning(f"trial {record.trial}: {error}")


def _track(folder: Path, records: Any) -> None:
    """Log every finished trial, one after the other: a tracker's database may take one writer only."""
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.trackers import track

    for record in records:
        run = RunFolder(folder / record.folder)
        if not record.failed and (run.path / "config.toml").is_file():
            track(run, f"{folder.resolve().name}-{run.path.name}")


def _list(trials: Any, as_json: bool) -> None:
    from fedpriv.sweep.settings import plain_settings

    if as_json:
        rows = [{"trial": trial.number, "settings": dict(trial.settings), "seed": trial.seed} for trial in trials]
        print_json({"trials": rows})
        return
    for trial in trials:
        print_line(f"{trial.number}: {plain_settings(trial.settings)}, seed={trial.seed}")


def _estimate(sweep: Any, as_json: bool) -> None:
    from fedpriv.sweep.display import cost_sentences, cost_table
    from fedpriv.sweep.run import estimate, untimed

    kinds = list(estimate(sweep))
    if as_json:
        rows = [
            {
                "trials": [trial.number for trial in kind.trials],
                "cpu_seconds_each": kind.each.seconds,
                "bytes_each": kind.each.size,
            }
            for kind in kinds
        ]
        print_json({"kinds": rows, "untimed": untimed(sweep)})
        return
    out.print(cost_table(kinds))
    print_sentences(cost_sentences(kinds, untimed(sweep), os.cpu_count() or 1))


def _command(file: Path, scale: str, out_dir: Path | None, inline: bool, reports: bool) -> str:
    """What repeats the sweep, or goes on with it."""
    scales, places = ["--scale", scale] if scale else [], ["--out", str(out_dir)] if out_dir else []
    flags = compress(("--inline", "--reports"), (inline, reports))
    return shlex.join(["fedpriv", "sweep", str(file), *scales, *places, *flags])


def _title(folders: list[Path]) -> str:
    names = [path.resolve().name for path in folders]
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} sweeps and runs"


def _print(records: Any, as_json: bool, **more: Any) -> None:
    from fedpriv.sweep.display import print_results

    if as_json:
        print_json({**more, "trials": [record.model_dump(mode="json") for record in records]})
    else:
        print_results(records, out)
        for record in records:
            for text in record.refusals:
                print_line(f"trial {record.trial}: {text}")


def _refuse_faults(records: Any) -> None:
    """End with 1 where a trial failed or what is proven was refuted: the table is not what was asked for."""
    failed = [record for record in records if record.failed]
    refuted = [(record.trial, *alarm) for record in records for alarm in record.alarms]
    if refuted:
        trial, what, alarm = refuted[0]
        raise RunFailedError(
            f"trial {trial}: {what}: {alarm} ({len(refuted)} of {len(records)} trials): the implementation or the "
            "proof is wrong"
        )
    if failed:
        numbers = ", ".join(str(record.trial) for record in failed[:12]) + ("..." if len(failed) > 12 else "")
        raise RunFailedError(
            f"{len(failed)} of {len(records)} trials failed ({numbers}), which --retry makes again; the first: "
            f"{failed[0].reason}"
        )


VERBS = (
    Verb(
        "sweep",
        sweep,
        place=90,
        epilog="Examples:\n\n  fedpriv sweep configs/paper/table2.toml --list\n\n"
        "  fedpriv sweep configs/paper/table2.toml --scale small",
    ),
    Verb(
        "compare",
        compare,
        place=100,
        epilog="Examples:\n\n  fedpriv compare\n\n"
        "  fedpriv compare sweeps/table2-small runs/quickstart-20260101-120000",
    ),
)
