"""Labels that clients changed, in summaries and reports, each figure between a guess and what is proven."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.accounting.response import most_told
from fedpriv.algorithms.labels.records import LabelSurvey, read_survey
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.finding import Finding, RunView, Section, Tile
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import GrowingRecord, Guarantee, Partition
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder

if TYPE_CHECKING:
    from fedpriv.core.world import World

_FROM_FEATURES = (0.5, 0.9, 0.99)  # how often somebody is right who has the features


@dataclass(frozen=True)
class LabelRow:
    """One class."""

    name: str  # of the class
    given: str  # how many examples have it after labels were changed, as counted by clients; empty without a survey
    share: str  # estimated, with its standard error; empty likewise
    true: str  # the share among all examples, which the referee knows; empty where nobody does


def _facts(survey: LabelSurvey) -> list[tuple[str, str]]:
    """Return the law, and the figures between a guess and a theorem, as (name, text)."""
    facts = [
        ("Epsilon of each label", figure(survey.epsilon)),
        ("A label is kept", f"{percent(survey.keep)}, and becomes each other one {percent(survey.other, 2)}"),
    ]
    if survey.examples:
        facts.append(("Counted", f"{count(survey.examples)} changed labels of {count(len(survey.clients))} clients"))
    told = survey.told
    if told is not None:
        facts += [
            ("Labels that were kept", f"{count(told.kept)} of {count(told.examples)}"),
            ("Guess of a label", percent(told.guess)),
            ("Measured", f"{percent(told.right / told.examples)} ({percent(told.low)} to {percent(told.high)})"),
            ("Proven: at most", percent(told.ceiling)),
        ]
    return facts


def _rows(survey: LabelSurvey, partition: Partition | None) -> list[LabelRow]:
    """Return a row for each class; nothing where no share is estimated and none is known."""
    true = () if survey.told is None else survey.told.true_shares
    number = len(survey.shares) or len(true)
    names = partition.class_names if partition is not None else tuple(map(str, range(number)))
    given = [sum(column) for column in zip(*survey.counts, strict=True)]
    rows = []
    for label in range(number):
        estimate = ""
        if survey.shares:
            estimate = f"{percent(survey.shares[label], 2)} ± {percent(survey.standard_errors[label], 2)}"
        known = percent(true[label], 2) if true else ""
        rows.append(LabelRow(names[label], count(given[label]) if given else "", estimate, known))
    return rows


def _notes(survey: LabelSurvey) -> list[str]:
    """Return what a reader has to know beside the figures."""
    notes = []
    if survey.shares:
        notes.append(
            "± is a standard error. Estimates are unbiased and may be below 0: this much noise hides rare classes."
        )
    else:
        notes.append(
            "No shares were estimated: with a mechanism, or where clients vote, counts would be a second release of "
            "each example, which the first claim does not cover."
        )
    limits = ", ".join(f"{percent(most_told(survey.epsilon, k0))} from {percent(k0)}" for k0 in _FROM_FEATURES)
    notes.append(
        "Measured is the best rule: it knows the class frequencies and guesses the likeliest true label for each "
        "changed one. By chance it may be a little above its limit, within the interval. The limit holds for anyone "
        "who knows only the class frequencies. A party that also has the features starts from a better guess, and the "
        "changed label raises its success rate to "
        f"at most {limits}."
    )
    return notes


@FINDINGS.register
class LabelsFinding(Finding[LabelSurvey]):
    """What changed labels tell."""

    name: ClassVar[str] = "labels"
    rank: ClassVar[int] = 50

    @override
    def conclude(self, world: "World", folder: RunFolder) -> None:
        from fedpriv.algorithms.labels.server import measure_labels

        measure_labels(world, folder)

    @override
    def read(self, folder: RunFolder) -> LabelSurvey | None:
        return read_survey(folder)

    @override
    def records(self, found: LabelSurvey) -> dict[str, GrowingRecord]:
        return {self.name: found}

    @override
    def figures(self, found: LabelSurvey) -> tuple[Figure, ...]:
        told = found.told
        if told is None:
            return ()
        measured = Interval(told.right / told.examples, told.low, told.high)
        # The ceiling is an expectation, and the best rule reaches it.
        what = "true label named, from the changed one"
        return (Figure(what, measured, told.guess, ceiling=told.ceiling, holds=True),)

    @override
    def sentences(self, found: LabelSurvey) -> tuple[str, ...]:
        proven = (
            f"Labels were changed once at the clients (each kept with probability {found.keep:.1%}): pure epsilon "
            f"{found.epsilon:.4g} of each label, for the whole run and against everybody"
        )
        told = found.told
        if told is None:
            return (f"{proven}.",)
        rate = told.right / told.examples
        measured = f"{rate:.1%} of {told.examples:,} (95 %: {told.low:.1%} to {told.high:.1%})"
        # Chance takes a measured rate above what is proven; then its interval reaches below.
        above = told.low <= told.ceiling < rate
        ceiling = "which agrees within its interval with the ceiling," if above else "the ceiling"
        return (
            f"{proven}. The true label, from the changed one: a guess {told.guess:.1%}, measured {measured}, {ceiling} "
            f"{told.ceiling:.1%} for anyone who knows only the class frequencies; a party that already guesses 90% of "
            f"labels from the features can reach {most_told(found.epsilon, 0.9):.1%}.",
        )

    @override
    def section(self, found: LabelSurvey, view: RunView) -> Section:
        values = {
            "facts_of": _facts(found),
            "rows": _rows(found, view.partition),
            "notes": _notes(found),
            "claim": view.ledger.labels if view.ledger else None,
        }
        return Section("labels", "Labels", values)

    @override
    def tiles(self, found: LabelSurvey | None, view: RunView) -> tuple[Tile, ...]:
        claim = view.ledger.labels if view.ledger else None
        return () if claim is None else (_of_labels(claim),)


def _of_labels(claim: Guarantee) -> Tile:
    """What is proven about labels alone."""
    conditions = (("δ", "0: pure"), ("adjacency", claim.adjacency), ("theorem", claim.theorem["epsilon"]))
    remark = "About labels alone, however many rounds; features have no part in it."
    return Tile("Proven ε of each label", figure(claim.epsilon or 0.0), conditions=conditions, remark=remark, place=60)
