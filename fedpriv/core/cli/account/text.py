"""Ledger lines and comparisons for people and for programs, and the plot of a comparison."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedpriv.accounting import Comparison
from fedpriv.accounting.libraries import NEIGHBOURS, PER_RECORD, Opinion, Question, ledger, truth
from fedpriv.core.cli.account.answer import Answer
from fedpriv.core.cli.terminal import out
from fedpriv.core.files import write_whole, writing_to
from fedpriv.core.registry import MECHANISMS

_ADJACENCY = "replace-one"
_ASSUMPTIONS = (
    "Signal: B gradients that point the same way, each as long as clipping allows, or longer.",
    "Noise: root mean square of its length in the mean.",
    "Not counted: what clipping distorts, that directional noise in blocks gives all of them the same length, and that "
    "the size of a Poisson batch varies around B.",
)


# ---- one line of the ledger -----------------------------------------------------------------------------------------


def account_json(answer: Answer) -> dict[str, Any]:
    """Return plain values, None where no figure is proven."""
    targets = ("target_epsilon", "target_ceiling", "target_advantage", "target_tpr")
    return {
        "mechanism": answer.options.mechanism,
        answer.parameter.name: answer.release.noise,
        **{key: getattr(answer.options, key) for key in (*targets, "unit", "dimension", "blocks")},
        **asdict(answer.guarantee),
        "ceilings": [asdict(ceiling) for ceiling in answer.ceilings],
        "membership_bound": None if answer.membership_bound is None else asdict(answer.membership_bound),
        "person": None if answer.person is None else asdict(answer.person),
    }


def print_account(answer: Answer) -> None:
    """Print the figures first, then what each rests on."""
    options, proven = answer.options, answer.guarantee
    means = answer.parameter.meaning
    extreme = "largest" if answer.parameter.least > answer.parameter.most else "smallest"
    if options.target_epsilon is not None:
        means = f"{means}; the {extreme} that still proves epsilon {number(options.target_epsilon)}"
    for target, text in (
        (options.target_ceiling, "no attack succeeds in more than"),
        (options.target_advantage, "no test of membership has a larger advantage than"),
        (options.target_tpr, "no test of membership has a larger true positive rate than"),
    ):
        means = means if target is None else f"{means}; the {extreme} with which {text} {number(target)}"
    rows = [
        (answer.parameter.name, answer.release.noise, means),
        ("epsilon", proven.epsilon, f"proven for the whole run at delta = {proven.delta:g}"),
        ("pure epsilon", proven.pure_epsilon, "proven for the whole run at delta = 0"),
        ("nominal epsilon", proven.nominal_epsilon, "as papers print it, not proven for the run"),
    ]
    often = "no attack succeeds more often than this if a guess without any upload succeeds with probability"
    rows += [("ceiling", ceiling.gamma, f"{often} {number(ceiling.k0)}") for ceiling in answer.ceilings]
    if answer.membership_bound is not None:
        meaning = "no test of membership has a larger true minus false positive rate"
        rows.append(("advantage", answer.membership_bound.advantage, meaning))
        larger = "no test of membership has a larger true positive rate at a false one of"
        rows += [("TPR", tpr, f"{larger} {number(fpr)}") for fpr, tpr in answer.membership_bound.rates]
    if answer.person is not None:
        meaning = f"proven about one person with {answer.person.held}, at delta = {answer.person.delta:g}"
        rows.append(("of a person", answer.person.epsilon, meaning))
        rows.append(("pure, of a person", answer.person.pure_epsilon, "the same at delta = 0"))
    setting = {
        "mechanism": _mechanism(answer),
        "adjacency": proven.adjacency,
        "sampling": proven.sampling,
        "participations": f"{proven.participations:,}",
    }
    names = ("epsilon", "pure_epsilon", "nominal_epsilon")
    theorems = [f"{name.replace('_', ' ')}: {proven.theorem[name]}" for name in names]
    # Ceilings of one release mostly rest on the same.
    theorems += dict.fromkeys(f"ceiling: {ceiling.theorem}" for ceiling in answer.ceilings)
    theorems += [] if answer.membership_bound is None else [f"membership: {answer.membership_bound.theorem}"]
    if answer.person is not None:
        setting["a person"] = answer.person.adjacency
        theorems.append(f"a person: {answer.person.theorem}")
    sampled = answer.ceilings and answer.release.sampling not in ("full", "shuffled")
    about = ("A ceiling is about any example, whether or not a batch has it.",) if sampled else ()
    print_figures(rows, setting, theorems, (*proven.notes, *about))


def _mechanism(answer: Answer) -> str:
    options = answer.options
    if options.dimension is None:
        return options.mechanism
    on = f"{options.mechanism} on {options.dimension:,} numbers"
    if "blocks" not in MECHANISMS[options.mechanism].model_fields:
        return on
    if options.blocks == 1:
        return f"{on} in one block"
    sizes = " or ".join(f"{size:,}" for size in sorted(set(answer.release.dimensions)))
    return f"{on} in {options.blocks:,} blocks of {sizes}"


# ---- comparisons ----------------------------------------------------------------------------------------------------


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return plain values, one row a mechanism and epsilon."""
    rows = [
        {
            "mechanism": contender.mechanism,
            "label": contender.label,
            "blocks": len(contender.dimensions),
            "sampling": contender.sampling,
            MECHANISMS[contender.mechanism].proof().parameter.name: point.noise,
            "epsilon": point.epsilon,
            "noise_to_signal": point.ratio,
            "refusal": point.refusal or None,
        }
        for contender, points in comparison.curves
        for point in points
    ]
    return {
        "delta": comparison.delta,
        "adjacency": _ADJACENCY,
        "sampling": _sampling(comparison),
        "participations": comparison.participations,
        "batch_size": comparison.batch_size,
        "dimension": comparison.dimension,
        "assumptions": _assumptions(comparison),
        "rows": rows,
    }


def print_comparison(comparison: Comparison) -> None:
    """Print a table, one column a mechanism, and what it assumes."""
    out.print("Noise over signal in the mean gradient, at the same proven epsilon", style="bold")
    sizes = f"{comparison.batch_size:,} gradients (B) of {comparison.dimension:,} numbers (K)"
    out.print(
        f"{sizes}, {comparison.participations:,} participations, sampling: {_sampling(comparison)}, "
        f"delta = {comparison.delta:g}, {_ADJACENCY}. Below 1 the signal is longer than the noise."
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("epsilon", justify="right")
    for contender, _ in comparison.curves:
        table.add_column(contender.label, justify="right")
    for row in zip(*(points for _, points in comparison.curves), strict=True):
        table.add_row(number(row[0].epsilon), *(number(point.ratio) for point in row))
    out.print()
    out.print(table)
    refusals = [
        f"{each.label}: {point.refusal}" for each, points in comparison.curves for point in points if point.refusal
    ]
    _print_list("What it assumes", [*_assumptions(comparison), *refusals])


def _assumptions(comparison: Comparison) -> list[str]:
    compared = dict.fromkeys(contender.mechanism for contender, _ in comparison.curves)
    ratios = "; ".join(f"{name} {MECHANISMS[name].proof().ratio}" for name in compared)
    return [*_ASSUMPTIONS, f"Noise over signal: {ratios}."]


def _sampling(comparison: Comparison) -> str:
    return "full" if comparison.rate is None else f"fixed, Poisson where a label says so, rate {comparison.rate:.6g}"


# In Okabe and Ito's colours (2008); lines differ in dashes and marks, too.
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o", "markersize": 5},
    {"color": "#D55E00", "linestyle": "--", "marker": "s", "markersize": 4},
    {"color": "#009E73", "linestyle": ":", "marker": "o", "markersize": 10},
    {"color": "#CC79A7", "linestyle": "-.", "marker": "D", "markersize": 5},
    {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "^", "markersize": 6},
)
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedpriv",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw noise-to-signal ratios over proven epsilons, both logarithmic, to a .png or .svg file."""
    # Imported here: tables need none of it.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with matplotlib.rc_context(_STYLE):
        drawing = Figure(figsize=(7.0, 4.6), layout="constrained")
        axes = drawing.subplots()
        axes.axhline(1, color="#5a6169", linewidth=1)
        for (contender, points), line in zip(comparison.curves, _LINES, strict=False):
            known = [(point.epsilon, point.ratio) for point in points if point.ratio is not None]
            epsilons, ratios = [epsilon for epsilon, _ in known], [ratio for _, ratio in known]
            axes.plot(epsilons, ratios, label=contender.label, linewidth=1.8, markerfacecolor="none", **line)
        for scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
            scale("log")
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"proven ε of the whole run at δ = {comparison.delta:g}, replace-one")
        axes.set_ylabel("noise over signal in the mean gradient")
        axes.set_title(_title(comparison), fontsize=10, loc="left")
        axes.grid(color="#e3e5e7", linewidth=0.8)
        axes.legend(frameon=False)
        kind, content = path.suffix.lower()[1:], io.BytesIO()
        drawing.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    with writing_to(f"--plot {path}:"):
        write_whole(path, content.getvalue())


def _title(comparison: Comparison) -> str:
    sampling = "no sampling" if comparison.rate is None else f"sampled, rate {comparison.rate:g}"
    return (
        f"{comparison.batch_size:,} gradients of {comparison.dimension:,} numbers, {comparison.participations:,} "
        f"participations, {sampling}"
    )


# ---- other libraries ------------------------------------------------------------------------------------------------


def opinions_json(question: Question, opinions: Sequence[Opinion]) -> dict[str, Any]:
    """Return plain values: the question, the truth and the ledger's figure for both neighbours, a row a library."""
    ours = [
        {"neighbours": neighbours, "truth": truth(question, neighbours), "ledger": ledger(question, neighbours)}
        for neighbours in NEIGHBOURS
    ]
    rows = [asdict(opinion) | {"verdict": opinion.verdict} for opinion in opinions]
    return {**asdict(question), "fedpriv": ours, "libraries": rows}


def print_opinions(question: Question, opinions: Sequence[Opinion]) -> None:
    """Print the truth for both neighbours, then what each library says."""
    sampling = "every example in every step" if question.rate == 1 else f"Poisson batches of {question.rate:g}"
    out.print(f"Epsilon of {question.mechanism} noise, {question.noise:g} times the norm of an example", style="bold")
    out.print(f"Steps: {question.steps:,}, {sampling}, delta = {question.delta:g}.\n")
    table = columns("left", "left", "left", "right", "left")
    for neighbours in NEIGHBOURS:
        table.add_row("truth", "", neighbours, bold(truth(question, neighbours)), "")
        table.add_row("fedpriv", "ledger", neighbours, number(ledger(question, neighbours)), "bound")
    for opinion in opinions:
        wrong = "bold red" if opinion.verdict == "below the truth" else ""
        words = Text(_opinion_words(opinion), wrong)
        table.add_row(opinion.library, opinion.method, opinion.neighbours, number(opinion.epsilon), words)
    out.print(table)
    _print_list("What the words mean", _WORDS)


_WORDS = (
    "add or remove: one example more or less. The ledger calls it zero-out, and has the same figures for it.",
    "replace: one example becomes any other, so that the sum moves by up to twice the norm of one. What fedpriv prints "
    "unless asked otherwise.",
    "the truth: to 0.1 %. BELOW: the statement is false for these neighbours and this noise.",
    "per change: the library takes the noise as a multiple of how far a replaced example moves the sum, not of "
    "the norm of one. Its figure is what holds here for twice the noise.",
    "other question: batches of a fixed size, and noise per change.",
)


def _opinion_words(opinion: Opinion) -> str:
    if opinion.epsilon is None:
        return "refuses (--json: why)"
    if opinion.truth is None:
        return "other question"
    far = f"{abs(opinion.epsilon / opinion.truth - 1):.1%} " if opinion.truth else ""
    where = {"below the truth": f"{far}BELOW", "above the truth": f"{far}above"}
    unit = "" if opinion.unit == PER_RECORD else ", per change"
    return f"{opinion.promise}, {where.get(opinion.verdict, 'the truth')}{unit}"


# ---- one line a figure ----------------------------------------------------------------------------------------------


def print_figures(
    figures: Sequence[tuple[str, float | None, str]],
    setting: Mapping[str, str],
    theorems: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Print figures, each with its name and its meaning, then what they rest on."""
    table = columns("left", "right", "left")
    for name, value, meaning in figures:
        table.add_row(name, bold(value), meaning)
    out.print(table)
    print_grounds(setting, theorems, notes)


def print_grounds(setting: Mapping[str, str], theorems: Sequence[str], notes: Sequence[str]) -> None:
    """Print what figures are about, and what they rest on."""
    out.print()
    table = columns("left", "left")
    for name, text in setting.items():
        table.add_row(name, text)
    out.print(table)
    _print_list("What they rest on", theorems)
    _print_list("Notes", notes)


# ---- words ----------------------------------------------------------------------------------------------------------


def columns(*alignments: Any) -> Table:
    """A table without lines whose last column wraps."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for alignment in alignments[:-1]:
        table.add_column(justify=alignment, no_wrap=True)
    table.add_column(justify=alignments[-1])
    return table


def _print_list(title: str, items: Any) -> None:
    out.print(f"\n{title}", style="bold")
    table = Table.grid(padding=(0, 1, 0, 0))
    for item in items:
        table.add_row("-", Text(item))
    out.print(table)


def bold(value: float | None) -> Text:
    """Return a figure that stands out."""
    return Text(number(value), style="bold")


def number(value: float | None) -> str:
    """Return a figure in a few digits."""
    if value is None:
        return "none"
    return f"{value:,.0f}" if 10_000 <= value < 10_000_000 else f"{value:.4g}"
