"""The command ``fedpriv audit DIR``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedpriv.core.cli.terminal import Json, Quiet, Run, out, print_json, print_line, print_sentences
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.names import Adjacency
from fedpriv.core.verb import Verb

if TYPE_CHECKING:
    from fedpriv.attacks.membership.records import Membership, MembershipAttack
    from fedpriv.attacks.memorisation.records import Memorisation
    from fedpriv.service.records import AnswersAudit


def audit(
    folder: Run,
    references: Annotated[
        int, typer.Option("--references", metavar="N", help="Reference models to train; an even number from 6.")
    ] = 32,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=2, help="Members, and as many non-members, to tell apart.")
    ] = 1000,
    answers: Annotated[
        int | None,
        typer.Option(
            "--answers", metavar="N", min=1, help="Audit DIR's endpoint instead, with N training examples replaced."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=10, help="Language models: texts that the model writes.")
    ] = 200,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", metavar="N", help="Language models: tokens in a row that count as memorised, not as chance."
        ),
    ] = 16,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Membership inference on DIR's models, or what a language model remembers."""
    if answers is not None:
        _audit_answers(folder, answers, quiet, as_json)
        return
    from fedpriv.attacks.membership.audit import audit_run
    from fedpriv.core.cli.display import shown
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder

    run = RunFolder.open(folder)
    if run.experiment().data.is_text:
        _audit_memorisation(folder, samples, tokens, quiet, as_json)
        return
    with shown(quiet or as_json) as progress, reported(folder):
        membership = audit_run(run, references, pairs, progress)
    if as_json:
        print_json({**membership.model_dump(mode="json"), "folder": str(folder)})
        return
    out.print(_table(membership.attacks))
    print_line(_sentence(membership))
    print_line(f"Report: {folder / 'report.html'}")


def _table(attacks: "Sequence[MembershipAttack]") -> Table:
    """One row for each attack, with the 95 % interval of the AUC, in 80 columns."""
    table = Table(box=None, pad_edge=False)
    for heading in ("attack", "AUC", "TPR at FPR 1 %", "at 0.1 %", "advantage"):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    for attack in attacks:
        low, high = attack.intervals["auc"]
        rates = (attack.tpr_at_1_percent, attack.tpr_at_01_percent, attack.advantage)
        table.add_row(attack.attack, f"{attack.auc:.3f} ({low:.3f}-{high:.3f})", *(f"{rate:.4f}" for rate in rates))
    return table


def _sentence(membership: "Membership") -> str:
    bound, proven = membership.epsilon_bound, membership.proven_epsilon
    text = (
        f"Epsilon is at least {bound.epsilon:.3g} at delta = {bound.delta:g} with confidence "
        f"{bound.confidence:g} (replace-one; {bound.trials} canaries in one run)"
    )
    if proven is not None:
        return f"{text}; proven: at most {proven:.4g}."
    proven_about = Adjacency.of(membership.proven_adjacency or "")
    if proven_about is None or not proven_about.replaces:
        return f"{text}; the ledger's figure is for another adjacency and not compared."
    return f"{text}; nothing is proven."


def _audit_memorisation(folder: Path, samples: int, tokens: int, quiet: bool, as_json: bool) -> None:
    from fedpriv.attacks.memorisation.audit import audit_memorisation
    from fedpriv.core.cli.display import shown
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder

    with shown(quiet or as_json) as progress, reported(folder):
        found = audit_memorisation(RunFolder.open(folder), samples, tokens, progress)
    if as_json:
        print_json({**found.model_dump(mode="json"), "folder": str(folder)})
    else:
        if found.groups:
            out.print(_exposures(found))
        print_sentences(_about_memorisation(found))
        print_line(f"Report: {folder / 'report.html'}")
    refuse_exceeded(found.measured)


def _exposures(found: "Memorisation") -> Table:
    """One row for each number of copies: guess, measured, proven; in 80 columns."""
    table = Table(box=None, pad_edge=False)
    for heading in ("copies", "canaries", "guess", "exposure, bits", "proven: at most", "first rank", "written"):
        table.add_column(heading, justify="right")
    for group in found.groups:
        ceiling = "nothing" if group.ceiling is None else f"{group.ceiling:.2f}"
        first = "unknown" if group.first is None else f"{group.first} of {group.canaries}"
        figures = (f"{found.guess:.2f}", f"{group.exposure:.2f}", ceiling, first, f"{group.written}")
        table.add_row(str(group.copies), str(group.canaries), *figures)
    return table


def _about_memorisation(found: "Memorisation") -> list[str]:
    got, lines = found.extraction, []
    if found.groups:
        ranks = "every secret was ranked"
        if found.fit is not None:
            ranks = f"extrapolated by a skew-normal distribution; Kolmogorov-Smirnov p = {found.fit:.2g}"
        lines.append(
            f"Exposure is log2 of the number of secrets over the rank, from 0 to {found.bits:.1f} bits ({ranks}); "
            f"{found.guess:.2f} is a guess. Secrets with 0 copies are in nobody's data."
        )
        lines.append(f"Proven: {found.theorem}.")
    lines.append(
        f"In {got.samples} texts the model wrote {got.found} of the {got.of_train:,} sequences of {got.tokens} tokens "
        f"that only the training data have ({got.rate:.2%}); by chance it wrote {got.control} of the {got.of_test:,} "
        f"that only the test data have ({got.control_rate:.2%}). Measured; nothing is proven of texts."
    )
    return lines


def _audit_answers(folder: Path, replaced: int, quiet: bool, as_json: bool) -> None:
    from fedpriv.core.cli.display import shown
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder
    from fedpriv.service.audit import audit_answers

    with shown(quiet or as_json) as progress, reported(folder):
        audit = audit_answers(RunFolder.open(folder), replaced, progress)
    if as_json:
        print_json({**audit.model_dump(mode="json"), "folder": str(folder)})
    else:
        print_sentences(_about_answers(audit))
        print_line(f"Report: {folder / 'report.html'}")
    refuse_exceeded(audit.figures if audit.proven else ())


def _about_answers(audit: "AnswersAudit") -> list[str]:
    word = "proven" if audit.proven else "claimed, and not proven"
    lines = [
        f"Of {audit.replaced} replaced examples one moved the model by {audit.moved:.3g} of the bound, and a logit by "
        f"{audit.shifted:.3g} of its bound; {audit.above:.0%} moved one further. Measured, no guarantee."
    ]
    if audit.bound is not None and audit.claimed is not None:
        lines.append(
            f"Epsilon of one answer is at least {audit.bound.epsilon:.3g} with confidence {audit.bound.confidence:g}; "
            f"{word}: {audit.claimed:.4g}{', which is refuted' if audit.refutes else ''}."
        )
    if audit.recovered is not None:
        lines.append(f"Two answers give away the exact probabilities of {audit.recovered:.1%} of the questions.")
    return lines


VERBS = (
    Verb(
        "audit", audit, place=40, epilog="Example:\n\n  fedpriv audit runs/quickstart-20260101-120000 --references 64"
    ),
)
