"""The command ``fedpriv icl FILE``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table

from fedpriv.core.cli.terminal import (
    Json,
    Out,
    Quiet,
    Resume,
    Set,
    begun_or_resumed,
    out,
    print_json,
    print_line,
    print_sentences,
    shown,
    table_of,
)
from fedpriv.core.registry import OPTIONS
from fedpriv.core.verb import Options, Verb
from fedpriv.prompts.settings import load_prompting

if TYPE_CHECKING:
    from fedpriv.prompts.folder import PromptLeak, Prompts


def icl(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A file of prompts, such as configs/icl.toml.")
    ] = None,
    set_: Set = None,
    out_dir: Out = None,
    resume: Resume = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Answer from private examples in prompts of a language model, with noise, and attack the prompts."""
    needed = "icl needs either a FILE or --resume DIR"
    settings, path = begun_or_resumed(needed, load_prompting, file, resume, set_, out_dir)
    # Imported here: torch takes seconds that --help and a mistyped key need not wait for.
    from fedpriv.prompts.report import write_icl_report
    from fedpriv.prompts.run import resume_icl, start_icl

    with shown(quiet or as_json) as progress:
        prompts = resume_icl(path, progress) if settings is None else start_icl(settings, path, progress)
    write_icl_report(path)
    if as_json:
        print_json({**prompts.model_dump(mode="json"), "folder": str(path)})
        return
    out.print(_table(prompts))
    print_sentences(_sentences(prompts))
    for leak in prompts.leaks:
        out.print(_leak_table(leak))
    print_sentences([f"Not run: {text}." for text in prompts.refusals])
    print_line(f"Report: {path / 'report.html'}")


def _table(prompts: "Prompts") -> Table:
    """Accuracies, from a guess to answers without noise."""
    rows = [("most common label", "", f"{prompts.majority:.1%}"), ("no examples", "", prompts.zero_shot.in_percent)]
    for level in prompts.levels:
        name = "no noise" if level.epsilon is None else f"epsilon {level.epsilon:g}{' *' if level.released else ''}"
        rows.append((name, f"{level.sigma:.3f}" if level.sigma else "", level.accuracy.in_percent))
    if prompts.one_prompt is not None:
        rows.append(("one prompt", "", prompts.one_prompt.in_percent))
    apart = ((name, noise, words.partition(" ")) for name, noise, words in rows)
    cells = ((name, noise, value, ends.strip("()")) for name, noise, (value, _, ends) in apart)
    return table_of(("answers", "noise", "right", "95 %"), cells)


def _sentences(prompts: "Prompts") -> list[str]:
    what = "" if prompts.is_language_model else " This is not a language model: the figures say nothing about one."
    lines = [f"{prompts.model}; {prompts.examples:,} private examples, {prompts.queries:,} questions.{what}"]
    lines += prompts.masked
    if prompts.together is not None:
        lines.append(
            f"* marks what the run releases, at delta = {prompts.delta:g}. All rows with noise together have epsilon "
            f"{prompts.together:.4g}, proven; nothing is proven of the row without noise."
        )
    return lines


def _leak_table(leak: "PromptLeak") -> Table:
    """What one attack found, between a guess and what no attack exceeds."""
    rows = []
    for figure in leak.figures:
        words = f"{{:{'.1%' if figure.unit == 'share' else '.3f'}}}".format
        guess = "" if figure.guess is None else words(figure.guess)
        ends = "" if figure.measured.ends is None else " to ".join(map(words, figure.measured.ends))
        ceiling = "unproven" if figure.ceiling is None else words(figure.ceiling)
        rows.append((figure.what, guess, words(figure.measured.value), ends, ceiling))
    return table_of((leak.title, "guess", "measured", "95 %", "at most"), rows)


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class IclSchema(Options):
    """The schema of files of prompts."""

    name: ClassVar[str] = "icl-schema"
    verb: ClassVar[str] = "config schema"

    icl: Annotated[bool, typer.Option("--icl", help="The schema of files of fedpriv icl instead.")] = False


VERBS = (
    Verb(
        "icl",
        icl,
        place=70,
        epilog="Examples:\n\n  fedpriv icl configs/icl.toml\n\n"
        "  fedpriv icl configs/icl.toml --set data.name=agnews --set icl.target_epsilon=1\n\n"
        "  fedpriv icl --resume runs/icl-20260101-120000",
    ),
)
