"""Labels that clients changed, in summaries and reports, each figure between a guess and what is proven."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.accounting.response import most_told
from fedpriv.algorithms.labels.survey import LabelSurvey, measure_labels, read_survey
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.finding import Finding, RunView, Section, Tile
from fedpriv.core.numbers import figure
from fedpriv.core.reading import GrowingRecord
from fedpriv.core.records import Guarantee
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder

if TYPE_CHECKING:
    from fedpriv.core.world import World

_FROM_FEATURES = (0.5, 0.9, 0.99)  # how often somebody is right who has the features


@FINDINGS.register
class LabelsFinding(Finding[LabelSurvey]):
    """What changed labels tell."""

    name: ClassVar[str] = "labels"
    rank: ClassVar[int] = 50

    @override
    def conclude(self, world: "World", folder: RunFolder) -> None:
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
            "survey": found,
            "names": view.partition.class_names if view.partition else (),
            "limits": [(k0, most_told(found.epsilon, k0)) for k0 in _FROM_FEATURES],
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
