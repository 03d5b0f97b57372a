"""The command ``fedpriv certify DIR``."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedpriv.core.cli.terminal import Json, Quiet, Run, out, print_json, print_line, print_sentences, share_words
from fedpriv.core.config import validated
from fedpriv.core.errors import InputError
from fedpriv.core.verb import Verb
from fedpriv.robustness.settings import CertifyConfig, RobustnessConfig

if TYPE_CHECKING:
    from fedpriv.robustness.records import Robustness

_NORMS = {"l2": "Euclidean (l2)", "linf": "largest change of a value (linf)"}


def certify(
    folder: Run,
    examples: Annotated[
        int | None, typer.Option("--examples", metavar="N", help="Test examples to certify; default: the run's or 500.")
    ] = None,
    votes: Annotated[
        int | None, typer.Option("--votes", metavar="N", help="Fresh votes of an example; default: the run's or 1000.")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", metavar="A", help="Probability that a certificate is wrong; default 0.001."),
    ] = None,
    norm: Annotated[
        str | None, typer.Option("--norm", metavar="l2|linf", help="The table to print; default: the noise's own norm.")
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            "--noise",
            metavar="S",
            help="For a model trained without noise: add noise of this deviation, on inputs from 0 to 1.",
        ),
    ] = None,
    place: Annotated[
        str | None, typer.Option("--place", metavar="input", help="Where --noise goes: on the input.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Prove what small perturbations of an input cannot change about the final model in DIR."""
    if norm is not None and norm not in _NORMS:
        raise InputError(key="--norm", given=norm, allowed=f"allowed: {', '.join(_NORMS)}")
    from fedpriv.core.cli.display import shown
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder
    from fedpriv.robustness.certify import certify_run, check_noise

    check_noise(noise, place)
    run = RunFolder.open(folder)
    given = {"examples": examples, "votes": votes, "alpha": alpha}
    config = _config(
        RobustnessConfig.of(run.experiment()), {key: value for key, value in given.items() if value is not None}
    )
    with shown(quiet or as_json) as progress, reported(folder):
        robustness = certify_run(run, config, noise, progress)
    if as_json:
        print_json({**robustness.model_dump(mode="json"), "folder": str(folder)})
        return
    shown_norm = norm or robustness.noise.norm
    out.print(_table(robustness, shown_norm))
    print_sentences(_sentences(robustness, shown_norm))
    print_line(f"Certificates: {folder / 'robustness' / 'certificates.jsonl'}")
    print_line(f"Report: {folder / 'report.html'}")


def _config(robustness: RobustnessConfig | None, given: dict[str, float]) -> CertifyConfig:
    """The run's own settings, with the options in their place."""
    own = CertifyConfig() if robustness is None else robustness.certify
    return validated(CertifyConfig, {**own.model_dump(), **given}, "fedpriv certify")


def _table(robustness: "Robustness", norm: str) -> Table:
    """Certified accuracy by size, one row a theorem, in 80 columns."""
    from fedpriv.robustness.records import BOUNDS

    table = Table(box=None, pad_edge=False)
    sizes = robustness.curve(norm).sizes
    radii = {radius.bound: radius.l2 if norm == "l2" else radius.linf for radius in robustness.radii}
    for heading in ("certified at", *(f"{size:g}" for size in sizes), "mean radius"):
        table.add_column(heading, justify="left" if heading == "certified at" else "right")
    for bound, words in BOUNDS.items():
        shares = [f"{share.value:.1%}" for share in robustness.curve(norm, bound).shares]
        table.add_row(words, *shares, f"{radii[bound]:.3g}")
    return table


def _sentences(robustness: "Robustness", norm: str) -> list[str]:
    from fedpriv.robustness.records import middle

    noise, voted = robustness.noise, robustness.voted
    where = "on the input" if noise.place == "input" else "behind the first layer"
    how = ", added to a model that was not trained with it" if noise.afterwards else ""
    best = robustness.curve(norm)
    lines = [
        f"Voted accuracy {share_words(voted)} on {robustness.examples} test examples; without noise "
        f"{share_words(robustness.noiseless)}; no class is ahead on {robustness.abstained}.",
        f"Noise {where}{how}: sigma {noise.sigma:g} ({_NORMS[noise.norm]}, inputs from 0 to 1). With confidence 95 % "
        f"the number of wrong certificates is at most {robustness.wrong_at_most} (alpha = {robustness.alpha:g} each).",
    ]
    if best.shares:
        at = middle(best.sizes)
        lines.append(
            f"Proven: no perturbation up to {best.sizes[at]:g} ({norm}) changes the right vote on "
            f"{share_words(best.shares[at])} of the examples."
        )
    if noise.epsilon is not None:
        lines.append(f"robustness.epsilon = {noise.epsilon:g} names this noise; it is no privacy budget.")
    return lines


VERBS = (
    Verb(
        "certify",
        certify,
        place=50,
        epilog="Examples:\n\n  fedpriv certify runs/robust --examples 200\n\n"
        "  fedpriv certify runs/quickstart-20260101-120000 --noise 0.25 --place input",
    ),
)
