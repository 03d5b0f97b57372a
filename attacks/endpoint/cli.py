"""The commands ``fedpriv probe DIR | list``: attacks on the finished model, on its answers and on its inputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedpriv.core.cli.terminal import (
    FolderByDefault,
    Json,
    Quiet,
    Run,
    out,
    plain,
    print_attack,
    print_json,
    print_line,
    print_sentences,
    share_words,
)
from fedpriv.core.config import parse_override, validated
from fedpriv.core.errors import InputError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.registry import EVASIONS, NOISELESS, PROBES, suggestion
from fedpriv.core.verb import Verb

if TYPE_CHECKING:
    from fedpriv.attacks.endpoint.records import Probe
    from fedpriv.attacks.evasion.table import EvasionAttack
    from fedpriv.attacks.probing import ModelAttack
    from fedpriv.core.progress import Progress
    from fedpriv.core.records import Guarantee
    from fedpriv.core.runs import RunFolder
    from fedpriv.robustness.records import Evasion, Robustness
    from fedpriv.robustness.settings import EvadeConfig

probe_app = typer.Typer(
    cls=FolderByDefault,
    help="Attack the finished model of a run, its answers or its inputs; or list these attacks.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n  fedpriv probe runs/quickstart-20260101-120000\n\n"
    "  fedpriv probe runs/quickstart-20260101-120000 --answers rounded:2 --queries 1000\n\n  fedpriv probe list",
)


@probe_app.command(FolderByDefault.folder)
def probe(
    folder: Run,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", "-a", metavar="NAME", help="An attack to make; may be given several times."),
    ] = None,
    sizes: Annotated[
        list[float] | None,
        typer.Option("--size", metavar="MU", help="Of perturbations, inputs from 0 to 1; may be given several times."),
    ] = None,
    norm: Annotated[
        str | None, typer.Option("--norm", metavar="l2|linf", help="What perturbations are measured by; default: linf.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option("--draws", metavar="M", help="Draws of noise for each gradient; 0: without noise, weaker."),
    ] = None,
    restarts: Annotated[
        int | None, typer.Option("--restarts", metavar="N", help="Random starts of attacks that have them.")
    ] = None,
    victims: Annotated[
        int | None, typer.Option("--victims", metavar="N", help="Test examples to attack; default: the run's, or 200.")
    ] = None,
    votes: Annotated[
        int | None, typer.Option("--votes", metavar="N", help="Votes that judge an attacked example.")
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option("--answers", metavar="POLICY", help="What the endpoint shows, such as none or rounded:2."),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option("--queries", metavar="N", min=1, help="Questions that the endpoint answers, for each attack."),
    ] = None,
    adversary: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NAME",
            help="participant or, of PATE, student-holder: with the model; user: with its answers only; "
            "curious-endpoint: reads questions, too.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="ATTACK.KEY=VALUE", help="A setting of an attack; see fedpriv probe list."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack the finished model in DIR, its answers, or its inputs.

    Without --attack: evasion attacks on test examples; or, with --answers, --queries or --as, all attacks on the model
    and its answers.
    """
    options: dict[str, object] = {
        "sizes": sizes and tuple(sorted(sizes)),
        "norm": norm,
        "draws": draws,
        "restarts": restarts,
        "victims": victims,
        "votes": votes,
    }
    on_inputs = {key: value for key, value in options.items() if value is not None}
    on_answers = any((answers, questions, adversary, set_))
    names, probes = _told_apart(attacks or (), on_answers)
    if attacks and on_inputs and not names:
        key = next(iter(on_inputs))
        raise InputError(f"--{_OPTIONS.get(key, key)} is for evasion attacks")
    if on_answers and not probes:
        raise InputError("--answers, --queries, --as and --set are for attacks on the model and its answers")
    made = _with_settings(probes, set_ or ())
    from fedpriv.attacks.endpoint.records import Probe
    from fedpriv.core.cli.display import shown
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder

    run = RunFolder.open(folder)
    earlier = run.read(Probe)
    evades = bool(names) or not (attacks or on_answers)
    config = _config(run, on_inputs | ({"attacks": names} if names else {}))
    if evades:
        _refuse_without_model(run, config.attacks[0], adversary)
    with shown(quiet or as_json) as progress, reported(folder):
        evaded = _evaded(run, config, progress) if evades else None
        probed = _probed(run, made, answers, questions, adversary, progress) if made else None
    if as_json:
        print_json({**_as_json(evaded, probed), "folder": str(folder)})
    else:
        _print(run, evaded, probed, earlier)
    if evaded is not None:
        refuse_exceeded(evaded.figures)


@probe_app.command("list")
def list_probes(as_json: Json = False) -> None:
    """List the attacks on a finished model: what each needs, and its settings."""
    if as_json:
        print_json(about_probes())
    else:
        print_probes()


def about_probes() -> list[dict[str, Any]]:
    """Every attack on a finished model, as JSON shows it."""
    return [*map(_about_probe, PROBES.values()), *map(_about_evasion, EVASIONS.values())]


def print_probes() -> None:
    """Print every attack on a finished model, by what it attacks."""
    from fedpriv.attacks.access import Access

    out.print("On the model and its answers, by fedpriv probe:", style="dim")
    for probe in PROBES.values():
        settings = [
            Text(f"--set {probe.name}.{key}={plain(field.default)}").append(f"  {field.description}", style="dim")
            for key, field in probe.model_fields.items()
        ]
        print_attack(probe.name, probe.title, [probe.reference, _needs(probe), *settings])
    out.print("On the model's inputs, by fedpriv probe, settings in robustness.evade:", style="dim")
    for evasion in EVASIONS.values():
        variant = f"variant {evasion.name}{NOISELESS}: the gradient is that of the network without its noise"
        print_attack(evasion.name, evasion.title, [evasion.reference, f"needs {Access.MODEL.words}", variant])


_OPTIONS = {"sizes": "size"}


def _needs(kind: "type[ModelAttack]") -> str:
    return f"needs {'; '.join(need.words for need in kind.needs)}"


def _about_evasion(kind: "type[EvasionAttack]") -> dict[str, Any]:
    from fedpriv.attacks.access import Access

    return {"name": kind.name, "surface": "inputs", "title": kind.title, "reference": kind.reference,
            "needs": [Access.MODEL.words], "settings": {}}  # fmt: skip


def _about_probe(kind: "type[ModelAttack]") -> dict[str, Any]:
    return {
        "name": kind.name,
        "surface": "answers",
        "title": kind.title,
        "reference": kind.reference,
        "needs": [need.words for need in kind.needs],
        "settings": {
            key: {"default": field.default, "description": field.description}
            for key, field in kind.model_fields.items()
        },
    }


def _told_apart(names: Sequence[str], on_answers: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Evasion attacks, and those on the model and its answers: all of these where none is named but they are meant."""
    if not names:
        return (), tuple(PROBES) if on_answers else ()
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise InputError(f"fedpriv probe: attacks: {twice[0]} is named twice; each is named once")
    evasions = tuple(name for name in names if name.removesuffix(NOISELESS) in EVASIONS)
    probes = tuple(name for name in names if name in PROBES)
    unknown = [name for name in names if name not in evasions and name not in probes]
    if unknown:
        raise InputError(f"there is no attack {unknown[0]!r}{suggestion(unknown[0], (*PROBES, *EVASIONS))}")
    return evasions, probes


def _with_settings(names: Sequence[str], set_: Sequence[str]) -> "list[ModelAttack]":
    """The attacks, each with its settings."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in set_:
        keys, value = parse_override(text)
        if len(keys) != 2 or keys[0] not in given:
            raise InputError(
                key="--set",
                given=text,
                allowed=f"ATTACK.KEY=VALUE is wanted, of an attack that is made: {', '.join(given)}",
            )
        given[keys[0]][keys[1]] = value
    return [validated(PROBES[name], settings, f"--set {name}") for name, settings in given.items()]


def _refuse_without_model(run: "RunFolder", attack: str, adversary: str | None) -> None:
    """An attack on inputs needs the model; certificates are about adversaries who have it."""
    from fedpriv.attacks.threat import Access, prober

    refusal = prober(adversary, run.experiment()).refusal(attack, (Access.MODEL,))
    if refusal is not None:
        raise InputError(refusal)


def _evaded(run: "RunFolder", config: "EvadeConfig", progress: "Progress") -> "Evasion":
    from fedpriv.robustness.evade import evade_run

    return evade_run(run, config, progress)


def _probed(
    run: "RunFolder",
    attacks: "Sequence[ModelAttack]",
    answers: str | None,
    questions: int | None,
    adversary: str | None,
    progress: "Progress",
) -> "Probe":
    from fedpriv.attacks.endpoint.probe import probe_run

    return probe_run(run, attacks, answers, questions, adversary, progress)


def _as_json(evaded: "Evasion | None", probed: "Probe | None") -> dict[str, Any]:
    """What a folder holds of it; under their names where there are both."""
    records = {"evasion": evaded, "probe": probed}
    trees = {name: record.model_dump(mode="json") for name, record in records.items() if record is not None}
    return trees if len(trees) > 1 else next(iter(trees.values()))


def _print(run: "RunFolder", evaded: "Evasion | None", probed: "Probe | None", earlier: "Probe | None") -> None:
    if evaded is not None:
        from fedpriv.robustness.records import Robustness

        out.print(_table(evaded))
        print_sentences(_sentences(evaded, run.read(Robustness)))
        print_line(f"Attempts: {run.path / 'robustness' / 'attacks.jsonl'}")
    if probed is not None:
        _print_probe(probed, run.final_ledger().worst)
        if earlier is not None:
            gone = ", ".join(dict.fromkeys(result.attack for result in earlier.results))
            print_line(f"This replaces the earlier results in probe.json: {gone}.")
    print_line(f"Report: {run.path / 'report.html'}")


def _answers_words(probe: "Probe", worst: "Guarantee") -> str:
    """The policy, and what is proven: about its answers, or about the model, which no answer tells more than."""
    from fedpriv.attacks.questions import endpoints

    shown = f"{endpoints().title(probe.answers)} (policy {probe.answers})"
    if not probe.heuristic:
        return shown
    if worst.epsilon is None or not (probe.bounded and worst.replaces):
        return f"{shown}; nothing is proven about answers"
    model = f"epsilon {worst.epsilon:.4g} at delta {worst.delta:g} ({worst.adjacency})"
    return f"{shown}; nothing is proven about answers, {model} about the model"


def _print_probe(probe: "Probe", worst: "Guarantee") -> None:
    """One row a figure, then what it means."""
    print_line(f"Answers: {_answers_words(probe, worst)}. Adversary: {probe.adversary}.")
    for result in probe.results:
        print_line(f"{result.attack}{f', {result.variant}' if result.variant else ''}: {result.queries} questions")
        table = Table(box=None, pad_edge=False)
        for heading in ("", "guess", "measured", "reference", "at most"):
            table.add_column(heading, justify="right" if heading else "left")
        for figure in result.figures:
            known = (figure.guess, figure.measured.value, figure.reference)
            shown = [figure.text(value, "-") for value in known]
            bound = figure.near_one or figure.text(figure.ceiling, "nothing proven")
            table.add_row(f"  {figure.what}", *shown, bound)
        out.print(table)
        print_sentences(result.sentences)


def _config(run: "RunFolder", given: dict[str, object]) -> "EvadeConfig":
    """The run's own settings, with the options in their place; sizes are of the norm that they were given for."""
    from fedpriv.robustness.settings import EvadeConfig, RobustnessConfig

    robustness = RobustnessConfig.of(run.experiment())
    own = EvadeConfig() if robustness is None else robustness.evade
    settings = own.model_dump()
    if given.get("norm", own.norm) != own.norm:
        del settings["sizes"]
    try:
        return validated(EvadeConfig, {**settings, **given}, "fedpriv probe")
    except InputError as error:
        # One of the sizes has a number as well, which the command line does not.
        raise (error.replaced(key="--size") if error.key.split(".")[0] == "sizes" else error) from None


def _table(evasion: "Evasion") -> Table:
    """What stands between the clean votes and what is proven, by size, in 80 columns for up to five sizes."""
    table = Table(box=None, pad_edge=False)
    for heading in (f"right at {evasion.norm}", *(f"{size:g}" for size in evasion.sizes)):
        table.add_column(heading, justify="left" if heading.startswith("right") else "right")
    rows = {"unattacked": (evasion.clean,) * len(evasion.sizes)}
    rows |= {curve.attack: curve.shares for curve in evasion.curves}
    rows["every attack up to it"] = evasion.least
    if evasion.certified is not None:
        rows["proven (certified)"] = evasion.certified
    for words, shares in rows.items():
        table.add_row(words, *(f"{share.value:.1%}" for share in shares))
    return table


def _sentences(evasion: "Evasion", robustness: "Robustness | None") -> list[str]:
    from fedpriv.robustness.records import middle

    at = middle(evasion.sizes)
    where = f"At {evasion.norm} {evasion.sizes[at]:g}"
    judge = "one vote" if evasion.votes == 1 else f"{evasion.votes} votes"
    first = (
        f"Test examples: {evasion.victims}, of them {evasion.attacked} right unattacked, which were attacked; {judge} "
        "for each attacked example."
    )
    at_most = f"at most {share_words(evasion.least[at])} are right under these attacks"
    if evasion.certified is None or robustness is None:
        return [first, f"{where}, {at_most}; nothing is proven (fedpriv certify)."]
    proven = f"{where}, {share_words(evasion.certified[at])} are"
    claim = f"{proven} claimed to be proven, and {at_most}."
    lines = [first, claim if evasion.broken else f"{proven} proven and {at_most}: the truth lies between."]
    if robustness.beyond(evasion.norm, evasion.sizes):
        lines.append(
            f"With this noise no certificate of {robustness.votes} votes reaches {evasion.norm} "
            f"{robustness.reach.of(evasion.norm):.3g}: at larger sizes nothing can be proven."
        )
    return lines


VERBS = (Verb("probe", probe_app, place=50),)
