"""The commands ``fedpriv attack DIR | list | tune``, ``fedpriv audit DIR`` and ``fedpriv probe DIR | list``."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedpriv.attacks.commands import Audit, Probing, chosen_audit
from fedpriv.core.cli import importing
from fedpriv.core.cli.terminal import (
    FolderByDefault,
    Json,
    Quiet,
    Run,
    Set,
    out,
    plain,
    print_attack,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_sentences,
    print_summary,
    shown,
)
from fedpriv.core.errors import InputError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.registry import ATTACKS, OPTIONS, suggestion
from fedpriv.core.verb import Verb

if TYPE_CHECKING:  # what is heavy is imported when a command needs it
    from fedpriv.attacks.settings import AttackSettings
    from fedpriv.core.lab import Tuning
    from fedpriv.core.lab.tune import TuningTrial
    from fedpriv.core.records import AttackResult

_TUNED = "medians over images; identified: nearer to its original than to 99 others of the data set"
# What columns mean, and when an original counts as picked out.
_ATTACKED = (
    "medians over images",
    "of 100 images of the data set the original is the nearest to the picture, or the one that candidate picks",
)
_TAPPED = "the original is nearer to what was made of it than every example of other clients"
_OF_ROWS = ("right", "off by", "MSE")
# On two lines, so that names of attacks have room in 80 columns.
_OF_SENTENCES = ("ROUGE\n1", "ROUGE\n2", "ROUGE\nL", "tokens")
_OF_IMAGES = ("SSIM", "PSNR", "MSE")
_SENTENCES_ATTACKED = (
    "ROUGE: means over sentences, of tokens; tokens: those in their places; recovered: all tokens in their order",
    "of 100 sentences the original is the most alike",
)
_ROWS_ATTACKED = (
    "right: of the categories; off by: the numbers' error as a share of their range, median of rows; recovered: all "
    "categories right and each number within 1 %",
    "of 100 rows the original is the nearest, or the one that candidate picks",
)

AttackNames = Annotated[
    list[str] | None,
    typer.Option("--attack", "-a", metavar="NAME", help="An attack to run; may be given several times."),
]


attack_app = typer.Typer(
    cls=FolderByDefault,
    help="Run other attacks on the observations of a run, list the attacks, or tune one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n  fedpriv attack runs/quickstart-20260101-120000 --attack dlg\n\n"
    "  fedpriv attack list\n\n  fedpriv attack tune configs/quickstart.toml",
)


@attack_app.command(
    FolderByDefault.folder,
    epilog="Example:\n\n  fedpriv attack runs/quickstart-20260101-120000 --attack iga --set adversary.iga.tv=0.001",
)
def attack_folder(
    folder: Run,
    names: AttackNames = None,
    victims: Annotated[
        list[str] | None,
        typer.Option("--victim", metavar="ROUND-CLIENT", help="Attack only this upload; may be given several times."),
    ] = None,
    set_: Set = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write to a copy of the folder and leave the run as it is."),
    ] = None,
    heard: Annotated[
        Path | None,
        typer.Option("--heard", metavar="DIR", help="Attack what `fedpriv deploy listen` has stored in DIR instead."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1, help="Taps: seconds for all attacks together; default: 600.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack the observations of an existing run, or of a tap, without training again; results are added to DIR."""
    with importing():
        from fedpriv.core.lab import attack_command, attack_run
        from fedpriv.core.report import reported
        from fedpriv.flower.folder import ABOUT

    path = out_dir or folder
    chosen = names or (), victims or (), set_ or ()
    if (folder / ABOUT).is_file():
        _attack_tap(folder, chosen, (out_dir, heard), seconds, quiet or as_json, as_json)
        return
    if seconds is not None:
        raise InputError(f"--seconds: {folder} is the folder of a run, which gives the same figures each time")
    command = attack_command(folder, *chosen, heard)
    with shown(quiet or as_json) as progress, reported(path):
        if heard is None:
            summary = attack_run(folder, *chosen, out_dir, command, progress)
        else:
            from fedpriv.deploy.attack import attack_heard

            if out_dir is None:
                raise InputError(f"--heard: the observations in {folder} are the run's own; give --out DIR for a copy")
            summary = attack_heard(folder, heard, *chosen, out_dir, command, progress)
    if summary.attacks and not as_json:
        out.print(_results(summary.attacks))
        print_note(_said_of(summary.attacks))
    print_summary(summary, path, as_json)
    if heard is None:  # to hear nothing is a result
        _refuse_without_result(names or (), {each.attack.partition(",")[0] for each in summary.attacks})


def _refuse_without_result(names: Sequence[str], made: Collection[str]) -> None:
    """End with an error where none of the attacks that were named could be made."""
    if names and set(names).isdisjoint(made):
        raise InputError(f"--attack {', '.join(names)}: no result; the reason is above")


def _attack_tap(
    folder: Path,
    chosen: tuple[Sequence[str], Sequence[str], Sequence[str]],
    elsewhere: tuple[Path | None, Path | None],
    seconds: float | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Attack the uploads that a tap has written of a user's own Flower app."""
    from fedpriv.flower.attack import SECONDS, attack_tapped

    if any(elsewhere):
        raise InputError(f"{folder} is the folder of a tap: --out and --heard do not apply")
    with shown(quiet) as progress:
        summary = attack_tapped(folder, *chosen, progress, seconds or SECONDS)
    made = chosen[0] if summary.pictures else ()
    if as_json:
        print_json(asdict(summary))
        _refuse_without_result(chosen[0], made)
        return
    if summary.attacks:
        out.print(_results(summary.attacks))
        print_note(_said_of(summary.attacks, _TAPPED))
    print_sentences(summary.verdict)
    for picture in summary.pictures:
        print_line(f"{'Picture' if picture.endswith('.png') else 'Found'}: {folder / picture}")
    _refuse_without_result(chosen[0], made)


@attack_app.command("list")
def list_attacks(as_json: Json = False) -> None:
    """List the attacks with their needs of the threat model, their parts and their settings."""
    if as_json:
        print_json([*map(_about_uploads, ATTACKS.values()), *_about_probes()])
        return
    print_note("On uploads, by fedpriv attack:")
    for attack in ATTACKS.values():
        print_attack(attack.name, attack.title, _on_uploads(attack))
    _print_probes()


@attack_app.command("tune", epilog="Example:\n\n  fedpriv attack tune configs/quickstart.toml --attack iga")
def tune(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, help="An experiment file, or the folder of a run.")
    ],
    name: Annotated[str, typer.Option("--attack", "-a", metavar="NAME", help="The attack to tune.")] = "iga",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V,V,...", help="Values to try, such as tv=1e-5,1e-4; may be repeated."),
    ] = None,
    victims: Annotated[
        int, typer.Option("--victims", min=1, max=1000, help="Uploads of public images to attack.")
    ] = 16,
    set_: Set = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find an attack's best weights on public images only; no client's data are touched."""
    from fedpriv.core.lab import tune_attack

    with shown(quiet or as_json) as progress:
        tuning = tune_attack(source, name, grid or (), victims, set_ or (), progress)
    if as_json:
        print_json(tuning.to_json())
        return
    out.print(_trials(tuning))
    print_note(_TUNED)
    print_sentences(tuning.remarks)
    if tuning.overrides:
        print_line(" ".join(f"--set {text}" for text in tuning.overrides))


@attack_app.command(
    "train-prior",
    epilog="Example:\n\n  fedpriv attack train-prior configs/quickstart.toml --out prior.safetensors\n\n"
    "  fedpriv run configs/quickstart.toml --set adversary.iga.prior=prior.safetensors",
)
def train_prior_file(
    source: Annotated[Path, typer.Argument(metavar="FILE", exists=True, help="An experiment file, for its data.")],
    path: Annotated[Path, typer.Option("--out", metavar="PRIOR", help="The file to write.")],
    whole: Annotated[
        bool, typer.Option("--all", help="Training images, too: of a data set that no client has.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of training, each on 64 images.")] = 1500,
    set_: Set = None,
    quiet: Quiet = False,
) -> None:
    """Train an image prior on public images, the test images, for the attacks that have a setting prior."""
    import torch

    from fedpriv.attacks.reconstruction.priors import FEWEST_IMAGES, train_prior
    from fedpriv.core.config import load_experiment
    from fedpriv.core.threads import cpu_threads
    from fedpriv.data.datasets import load_dataset, unit_scale

    if path.is_dir() or not path.parent.is_dir():
        raise InputError(key="--out", given=path, allowed="allowed is a file in a folder that exists")
    experiment = load_experiment(source, set_ or ())
    dataset = load_dataset(experiment.data, experiment.seed)
    images = torch.cat([dataset.x_test, dataset.x_train]) if whole else dataset.x_test
    if dataset.kind != "image":
        raise InputError(key="data.name", given=dataset.name, allowed="allowed is a data set of images")
    if len(images) < FEWEST_IMAGES:
        allowed = f"it has {len(images)} images; a prior needs at least {FEWEST_IMAGES}"
        raise InputError(key="data.name", given=dataset.name, allowed=allowed)
    with shown(quiet) as progress, cpu_threads(experiment.engine.threads):
        prior = train_prior(
            unit_scale(images),
            dataset.name,
            steps,
            experiment.seed,
            lambda done, loss: progress.attack_advanced("prior", done, steps, loss),
        )
    prior.write(path)
    print_line(f"{path}: {prior.words}")


def _trials(tuning: "Tuning") -> Table:
    """One row for each combination of settings, in a table that fits into 80 columns for up to two keys."""
    table = Table(box=None, pad_edge=False)
    rows = any(trial.rows is not None for trial in tuning.trials)
    likeness = (_OF_ROWS if rows else _OF_IMAGES)[:2]
    for heading in (*tuning.keys, "MSE", "95 % interval", *likeness, "identified"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for trial in tuning.trials:
        ends = trial.mse.ends
        table.add_row(
            *(f"{value:g}" for value in trial.values),
            f"{trial.mse.value:.4f}",
            "n/a" if ends is None else f"{ends[0]:.4f} to {ends[1]:.4f}",
            *_likeness_words(trial),
            f"{trial.identified} of {trial.images}",
            "best" if trial is tuning.best else "",
        )
    return table


def _on_uploads(attack: "type[AttackSettings]") -> list[str | Text]:
    from fedpriv.core.config.rules import text_sets

    before = [f"reads texts (data.name = {', '.join(text_sets())})"] if attack.is_text else []
    if attack.active():
        before.append("active: the server sends clients parameters of its own making; a worst case")
    parts = "; ".join(f"{kind} {part}" for kind, part in attack.parts().items())
    return _lines(attack, "adversary.{} = {}", before, [f"parts: {parts}"] if parts else [])


def _lines(attack: type[Any], setting: str, before: Sequence[str], after: Sequence[str]) -> list[str | Text]:
    """Paper, needs with what stands around them, and settings."""
    needs = f"needs {'; '.join(need.words for need in attack.needs)}"
    settings = [
        Text(setting.format(f"{attack.name}.{key}", plain(field.default))).append(f"  {field.description}", style="dim")
        for key, field in getattr(attack, "model_fields", {}).items()
    ]
    return [attack.reference, *before, needs, *after, *settings]


def _about(attack: type[Any], surface: str, section: str = "") -> dict[str, Any]:
    return {
        "name": attack.name,
        "surface": surface,
        "title": attack.title,
        "reference": attack.reference,
        "needs": [{"name": str(need), "meaning": need.words} for need in attack.needs],
        "settings": [
            {"key": f"{section}{attack.name}.{key}", "default": field.default, "meaning": field.description}
            for key, field in getattr(attack, "model_fields", {}).items()
        ],
    }


def _about_uploads(attack: "type[AttackSettings]") -> dict[str, Any]:
    return {
        **_about(attack, "uploads", "adversary."),
        "active": attack.active(),
        "reads": "texts" if attack.is_text else "images and rows",
        "tunable": list(attack.tunable),
        "parts": dict(attack.parts()),
    }


def _likeness_words(result: "AttackResult | TuningTrial") -> tuple[str, str]:
    """Of pictures SSIM and PSNR; of rows the share of right categories and the numbers' error."""
    if result.rows is None:
        return _figure_text(result.ssim, ".3f"), _figure_text(result.psnr, ".1f")
    return _figure_text(result.rows.share_right, ".1%"), _figure_text(result.rows.median_error, ".2%")


def _headings(results: "Sequence[AttackResult]") -> tuple[str, ...]:
    """Of the columns that depend on what was attacked."""
    if any(result.sentences is not None for result in results):
        return _OF_SENTENCES
    return _OF_ROWS if any(result.rows is not None for result in results) else _OF_IMAGES


def _said_of(results: "Sequence[AttackResult]", picked: str = "") -> str:
    """What the columns mean, and what counts as picked out, where that is special."""
    meaning, usual = {_OF_SENTENCES: _SENTENCES_ATTACKED, _OF_ROWS: _ROWS_ATTACKED}.get(_headings(results), _ATTACKED)
    return f"{meaning}; picked out: {picked or usual}"


def _figures(result: "AttackResult") -> tuple[str, ...]:
    """What stands in these columns."""
    read = result.sentences
    if read is None:
        return *_likeness_words(result), _figure_text(result.mse, ".2g")
    return *(f"{value:.3f}" for value in (read.rouge1, read.rouge2, read.rouge_l)), f"{read.share_right:.0%}"


def _figure_text(value: float | None, form: str) -> str:
    """A figure, or n/a where there is none."""
    return "n/a" if value is None else format(value, form)


def _results(results: "Sequence[AttackResult]") -> Table:
    """The attacks' rows of the summary, as a table that fits into 80 columns."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("attack", overflow="fold")
    table.add_column("upload", overflow="fold")
    likeness = _headings(results)
    picked = "picked\nout" if likeness == _OF_SENTENCES else "picked out"
    for heading in ("recovered", picked, *likeness, "labels"):
        table.add_column(heading, justify="right")
    for result in results:
        name = result.attack.replace(",", ", ")  # lines break at spaces only
        table.add_row(
            f"{name} (active)" if result.active else name,
            result.upload,
            "n/a" if result.picked else f"{result.recovered} of {result.victims}",
            "n/a" if result.identified is None else f"{result.identified} of {result.victims}",
            *(("n/a",) * len(likeness) if result.picked else _figures(result)),
            "n/a" if result.label_accuracy is None or result.picked else f"{result.label_accuracy:.0%}",
        )
    return table


def audit(folder: Run, options: tuple[Audit[Any], ...] = (), quiet: Quiet = False, as_json: Json = False) -> None:
    """Audit DIR: membership inference on its models, or what its language model remembers."""
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder

    run = RunFolder.open(folder)
    chosen = chosen_audit(run, options)
    with shown(quiet or as_json) as progress, reported(folder):
        found = chosen.made(run, progress)
    if as_json:
        print_json({**found.model_dump(mode="json"), "folder": str(folder)})
    else:
        if (table := chosen.table(found)) is not None:
            out.print(table)
        print_facts(chosen.facts(found))
        print_line(f"Report: {folder / 'report.html'}")
    refuse_exceeded(chosen.figures(found))


probe_app = typer.Typer(
    cls=FolderByDefault,
    help="Attack the finished model of a run, its answers or its inputs; or list these attacks.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n  fedpriv probe runs/quickstart-20260101-120000\n\n"
    "  fedpriv probe runs/quickstart-20260101-120000 --answers rounded:2 --queries 1000\n\n  fedpriv probe list",
)


def probe(
    folder: Run,
    attacks: AttackNames = None,
    options: tuple[Probing[Any], ...] = (),
    adversary: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NAME",
            help="participant: with the model; user: with its answers only; curious-endpoint: reads questions, too; "
            "an algorithm may have its own.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack the finished model in DIR, its answers, or its inputs.

    Without --attack: evasion attacks; with --answers, --queries or --as, all attacks on the model and its answers.
    """
    wanted = _wanted(options, tuple(attacks or ()), adversary)
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder

    run = RunFolder.open(folder)
    ready = {kind: kind.ready(run, names, adversary) for kind, names in wanted.items()}
    with shown(quiet or as_json) as progress, reported(folder):
        found = {kind: each.run(progress) for kind, each in ready.items()}
    if as_json:
        trees = {kind.name: record.model_dump(mode="json") for kind, record in found.items()}
        print_json({**(trees if len(trees) > 1 else next(iter(trees.values()))), "folder": str(folder)})
    else:
        for kind, each in ready.items():
            each.show(found[kind])
        print_line(f"Report: {run.path / 'report.html'}")
    for kind, record in found.items():
        refuse_exceeded(kind.figures(record))


def _wanted(
    options: tuple[Probing[Any], ...], names: tuple[str, ...], adversary: str | None
) -> dict[Probing[Any], tuple[str, ...]]:
    """The kinds of attacks to make, each with the names of its own; all of its attacks where none is named."""
    if not options:
        raise InputError("there are no attacks on finished models")
    if not names:
        asked = [kind for kind in options if kind.misplaced(adversary)]
        return dict.fromkeys(asked or options[:1], ())
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise InputError(f"fedpriv probe: attacks: {twice[0]} is named twice; each is named once")
    unknown = [name for name in names if not any(kind.has(name) for kind in options)]
    if unknown:
        known = tuple(name for kind in reversed(options) for name in kind.attacks())
        raise InputError(f"there is no attack {unknown[0]!r}{suggestion(unknown[0], known)}")
    wanted = {kind: tuple(name for name in names if kind.has(name)) for kind in options}
    for kind, own in wanted.items():
        if not own and kind.misplaced(adversary):
            raise InputError(kind.misplaced(adversary))
    return {kind: own for kind, own in wanted.items() if own}


@probe_app.command("list")
def list_probes(as_json: Json = False) -> None:
    """List the attacks on a finished model: what each needs, and its settings."""
    if as_json:
        print_json(_about_probes())
    else:
        _print_probes()


def _probings() -> list[type[Probing[Any]]]:
    """Every kind of attacks on a finished model, in the order of lists."""
    return [kind for kind in OPTIONS.values() if issubclass(kind, Probing)][::-1]


def _about_probes() -> list[dict[str, Any]]:
    return [_about(attack, kind.surface) for kind in _probings() for attack in kind.attacks().values()]


def _print_probes() -> None:
    for kind in _probings():
        print_note(kind.heading)
        for attack in kind.attacks().values():
            print_attack(attack.name, attack.title, _lines(attack, "--set {}={}", (), kind.remarks(attack)))


VERBS = (
    Verb("attack", attack_app, place=20),
    Verb(
        "audit", audit, place=40, epilog="Example:\n\n  fedpriv audit runs/quickstart-20260101-120000 --references 64"
    ),
    Verb("probe", probe_app, place=50),
    Verb(FolderByDefault.folder, probe, place=50, group="probe"),
)
