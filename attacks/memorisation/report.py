"""What a language model remembers of its texts, in reports."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.memorisation.records import ExtractedTexts, Memorisation
from fedpriv.core.figure import Figure
from fedpriv.core.finding import RecordFinding, RunView, Section
from fedpriv.core.numbers import count, decimal, figure
from fedpriv.core.registry import FINDINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from fedpriv.core.report.drawing import Plot


@FINDINGS.register
class MemorisationFinding(RecordFinding[Memorisation]):
    """What a language model remembers of its texts."""

    name: ClassVar[str] = "memorisation"
    rank: ClassVar[int] = 20
    record: ClassVar[type[Memorisation]] = Memorisation

    @override
    def figures(self, found: Memorisation) -> tuple[Figure, ...]:
        return found.measured

    @override
    def facts(self, found: Memorisation) -> list[tuple[str, str]]:
        return _facts(found.extraction)

    @override
    def section(self, found: Memorisation, view: RunView) -> Section:
        values = {
            "found": found,
            "facts_of": self.facts(found),
            "secrets": count(round(2**found.bits)),
            "ranking": ranking(found),
            "exposures": _plot(found) if found.groups else None,
        }
        return Section("memorisation", "Memorisation", values)


def ranking(found: Memorisation) -> str:
    """Return how the ranks of secrets were found."""
    if found.fit is None:
        return "Every secret was ranked."
    return f"Ranks are extrapolated by a skew-normal distribution (Kolmogorov and Smirnov: p = {figure(found.fit)})."


def _facts(extraction: ExtractedTexts) -> list[tuple[str, str]]:
    return [
        ("Texts that the model wrote", count(extraction.samples)),
        (
            f"Sequences of {count(extraction.tokens)} tokens of the training data alone",
            f"{count(extraction.found)} of {count(extraction.of_train)} written ({_share(extraction.rate)})",
        ),
        (
            "By chance: of the public test data alone",
            f"{count(extraction.control)} of {count(extraction.of_test)} written ({_share(extraction.control_rate)})",
        ),
        ("Texts with such a sequence", f"{count(extraction.with_found)} of {count(extraction.samples)}"),
        (
            "Of the texts with the best membership rank",
            f"{count(extraction.ranked_found)} of {count(extraction.ranked)}",
        ),
        ("Proven", "nothing: texts are not drawn at random, as canaries are"),
    ]


def _share(share: float) -> str:
    return f"{figure(100 * share)} %"


def _plot(found: Memorisation) -> "Plot":
    """Every exposure by the number of copies, the guess, and what is proven of the mean."""

    from fedpriv.core.report.drawing import Theme, panel, plot

    groups = found.groups

    def build(theme: Theme) -> "Drawing":
        drawing, axes = panel(theme, (6.2, 3.4), "y")
        for place, group in enumerate(groups):
            bits = [each.exposure for each in found.canaries if each.copies == group.copies]
            axes.plot(
                _spread(place, len(bits)), bits, linestyle="", marker="o", markersize=5, color=theme.line, clip_on=False
            )
            axes.plot([place - 0.3, place + 0.3], [group.exposure] * 2, color=theme.line, linewidth=2.2)
            if group.ceiling is not None:
                axes.plot([place - 0.38, place + 0.38], [group.ceiling] * 2, color=theme.alarm, linewidth=2)
        axes.axhline(found.guess, color=theme.muted, linewidth=1, linestyle=(0, (1, 2)))
        axes.axhline(found.bits, color=theme.muted, linewidth=0.8)
        axes.set_xticks(range(len(groups)), [count(group.copies) for group in groups])
        axes.set_ylim(0, 1.08 * found.bits)
        axes.set_xlabel("copies in the training data", color=theme.muted)
        axes.set_ylabel("exposure, bits", color=theme.muted)
        return drawing

    said = "; ".join(f"{count(group.copies)} copies: {decimal(group.exposure, 2)}" for group in groups)
    return plot(
        build,
        f"Exposure of each canary and the mean by copies, in bits of {decimal(found.bits, 1)} at most. {said}. Dotted: "
        f"a guess, {decimal(found.guess, 2)}. Short orange lines: the proven bound on the mean.",
    )


def _spread(place: int, number: int) -> Sequence[float]:
    """Positions side by side, so that equal exposures are all seen."""
    return [place + 0.5 * ((index + 0.5) / number - 0.5) for index in range(number)]
