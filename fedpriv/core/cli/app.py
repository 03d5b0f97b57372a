"""The command line: ``fedpriv init``, ``run``, ``deploy``, ``attack``, ``audit``, ``sweep``, ``compare`` and so on."""

import re
import shlex
import sys
import webbrowser
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.padding import Padding
from rich.text import Text

from fedpriv.core.cli import importing
from fedpriv.core.cli.account import account_app, votes
from fedpriv.core.cli.data import data
from fedpriv.core.cli.doctor import doctor
from fedpriv.core.cli.init import init
from fedpriv.core.cli.terminal import (
    File,
    Json,
    Out,
    Quiet,
    Resume,
    Set,
    begun_or_resumed,
    command_of,
    err,
    folders_here,
    out,
    plain,
    print_json,
    print_line,
    print_summary,
    print_warning,
    shown,
)
from fedpriv.core.config import Experiment, describe, json_schema, load_experiment, read_toml
from fedpriv.core.config.file import kind_of_file, load_run
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError, drop_output, printable
from fedpriv.core.files import is_disk, stopped, writing
from fedpriv.core.registry import FILES
from fedpriv.core.settings import Settings
from fedpriv.core.verb import Options, Verb, verbs, with_options

_EXIT_FAILED, _EXIT_INPUT, _EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="A crash-test lab for federated learning: train with a privacy mechanism, eavesdrop, attack, and report.",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check an experiment file, or show all its settings.", no_args_is_help=True)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"fedpriv {version('fedpriv')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options that come before a command."""


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="An experiment file, such as configs/quickstart.toml.")
    ] = None,
    set_: Set = None,
    out_dir: Out = None,
    resume: Resume = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train, eavesdrop, attack, and write the report. FILE is an experiment, such as configs/quickstart.toml."""
    needed = "run needs an experiment FILE, such as the one that fedpriv init writes, or --resume DIR"
    experiment, path = begun_or_resumed(needed, load_experiment, file, resume, set_, out_dir)
    # Imported here: torch and Flower take seconds that --help, `config` and a mistyped key need not wait for.
    with importing():
        from fedpriv.core.lab import resume_run, start_run
        from fedpriv.core.report import reported

    with shown(quiet or as_json) as progress, reported(path):
        if experiment is None:
            summary = resume_run(path, progress)
        else:
            summary = start_run(experiment, path, command_of("run", file, set_), progress)
    print_summary(summary, path, as_json)


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Default: the newest in runs/ and sweeps/."),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the report in the browser, too.")] = False,
) -> None:
    """Write report.html into DIR, the folder of a run, a trial, a sweep, or of fedpriv icl."""
    own = {kind.kept_as: kind.write_report for kind in FILES.values()}
    here = folder or next(reversed(folders_here("config.toml", *own)), None)
    if here is None:
        raise InputError("there is no run in runs/ and no sweep in sweeps/: name the folder")
    from fedpriv.core.report import write_report

    write = next((write for name, write in own.items() if (here / name).is_file()), write_report)
    with writing(shlex.join(["fedpriv", "report", str(here)])):
        path = write(here)
    print_line(f"Report: {path}")
    if opened and not webbrowser.open(path.resolve().as_uri()):
        raise InputError(f"no browser was found; open {path}")


@config_app.command("check", epilog="Example:\n\n  fedpriv config check configs/quickstart.toml --set seed=3")
def config_check(
    file: File,
    set_: Set = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also build data, network, mechanism and attacks, as a run does first.")
    ] = False,
) -> None:
    """Check the settings in FILE; --deep also builds the data, the network, the mechanism and the attacks."""
    settings = _settings(file, set_)
    if deep and not isinstance(settings, Experiment):
        raise InputError(f"--deep tries experiments, and {file} is none")
    if deep and isinstance(settings, Experiment):
        # Imported here: torch and Flower take seconds that reading the settings need not wait for.
        from fedpriv.core.lab import check_experiment
        from fedpriv.data.datasets import load_dataset

        for text in check_experiment(settings):
            print_warning(text)
        if left_out := load_dataset(settings.data, settings.seed).left_out:
            print_line(left_out)
    said = "a run can start" if deep else "the settings are valid. To also load the data and the network, add --deep"
    print_line(f"{file}: {said}.")


@config_app.command("show", epilog="Example:\n\n  fedpriv config show configs/quickstart.toml --json")
def config_show(file: File, set_: Set = None, as_json: Json = False) -> None:
    """Show every setting in FILE with its value, default and meaning."""
    settings = _settings(file, set_)
    if as_json:
        print_json(settings.model_dump(mode="json"))
        return
    for key, value, default, meaning in describe(settings):
        changed = value != default
        out.print(f"{key} = {plain(value)}", style="bold" if changed else "", markup=False)
        usual = f" (default: {plain(default)})" if changed else ""
        out.print(Padding(Text(f"{meaning}{usual}", style="dim"), (0, 0, 0, 4)))


def _settings(file: Path, overrides: list[str] | None) -> Settings:
    """An experiment, that of a run's folder, or what another kind of files says."""
    if file.is_dir():
        return load_run(file, overrides or ())
    kind = kind_of_file(read_toml(file))
    return load_experiment(file, overrides or ()) if kind is None else kind.load(file, overrides or ())


def config_schema(options: tuple[Options, ...] = ()) -> None:
    """Print the JSON Schema of experiment files, for editors that complete keys and check values."""
    wanted = [name for each in options for name, given in vars(each).items() if given]
    print_json(json_schema(FILES[wanted[0]].settings if wanted else Experiment))


_FRAME = (
    Verb(
        "run",
        run,
        place=10,
        epilog="Examples:\n\n  fedpriv run configs/quickstart.toml\n\n"
        "  fedpriv run configs/quickstart.toml --set mechanism.epsilon=50 --out runs/eps50\n\n"
        "  fedpriv run --resume runs/eps50",
    ),
    Verb(
        "init",
        init,
        place=20,
        epilog="Examples:\n\n  fedpriv init\n\n  fedpriv init --list\n\n  fedpriv init wiretap --out demo",
    ),
    Verb(
        "data", data, place=30, epilog="Examples:\n\n  FEDPRIV_DATA=~/data fedpriv data\n\n  fedpriv data --unicity 5"
    ),
    Verb(
        "report",
        report,
        place=110,
        epilog="Examples:\n\n  fedpriv report --open\n\n  fedpriv report runs/quickstart-20260101-120000",
    ),
    Verb("doctor", doctor, place=120, epilog="Example:\n\n  fedpriv doctor"),
    Verb("config", config_app, place=10),
    Verb(
        "schema",
        config_schema,
        place=10,
        epilog="Examples:\n\n  fedpriv config schema > experiment.schema.json\n\n"
        "  fedpriv config schema --icl > icl.schema.json",
        group="config",
    ),
    Verb("account", account_app, place=30),
    votes.VERB,
)


_VERBS = sorted((*_FRAME, *verbs()), key=lambda verb: verb.place)
_GROUPS = {verb.name: verb.command for verb in _VERBS if isinstance(verb.command, typer.Typer)}
for _verb in _VERBS:
    if _verb.name in _GROUPS:
        app.add_typer(_GROUPS[_verb.name], name=_verb.name)
    else:
        _GROUPS.get(_verb.group, app).command(_verb.name, epilog=_verb.epilog)(with_options(_verb))


def main() -> None:
    """Run the command line; errors are one line on standard error and an exit code: 2 bad input, 1 failed."""
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
        if code == _EXIT_INTERRUPTED:
            _complain("interrupted", code)
    except InputError as error:
        line, _, paste = str(error).partition("\n")
        code = _complain(line, _EXIT_INPUT)
        err.print(paste, end="\n" if paste else "", markup=False, highlight=False, soft_wrap=True)
    except click.UsageError as error:
        code = _complain(_usage(error), _EXIT_INPUT)
    except RunFailedError as error:
        code = _complain(str(error), _EXIT_FAILED)
    except RunInterruptedError as error:
        code = _complain(str(error), _EXIT_INTERRUPTED)
    except PermissionError as error:
        code = _complain(f"{error.filename or 'a file'}: permission denied", _EXIT_INPUT)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("interrupted", _EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (| head): leave without a word, as other tools do.
        drop_output()
        code = _EXIT_FAILED
    except OSError as error:
        code = _complain(_not_written(error), _EXIT_FAILED)
    sys.exit(code)


def _not_written(error: OSError) -> str:
    """What could not be written where no command has said it; files have names, and what is printed has none."""
    if error.filename is None and is_disk(error):
        drop_output()
        return f"the output cannot be written: {error.strerror}"
    return str(stopped(error, ""))


def _usage(error: click.UsageError) -> str:
    """What is wrong with a command line; of an unknown command that resembles none, with those that there are."""
    text = _once(error.format_message())
    unknown = re.fullmatch(r"No such command .*[.]", text, re.DOTALL)
    if unknown and error.ctx and isinstance(error.ctx.command, click.Group):
        return f"{text} Allowed: {', '.join(error.ctx.command.list_commands(error.ctx))}"
    return text


def _once(text: str) -> str:
    """Typer and click both say what may have been meant; of several, click says it in brackets."""
    said, meant, close = text.partition(" Did you mean ")
    return f"{said}{meant}{re.split(r' [(]?Did you mean ', close)[0]}" if meant else text


def _complain(text: str, code: int) -> int:
    if not text:
        # A command without arguments: its help was printed, which is all that was asked for.
        return 0
    err.print(f"fedpriv: {' '.join(printable(text).split())}", style="red", markup=False, soft_wrap=True)
    return code
