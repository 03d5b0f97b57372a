"""What a language model remembers of its texts, in reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.figure import Figure, Interval
from fedpriv.core.finding import RecordFinding, RunView, Section
from fedpriv.core.numbers import count, decimal, figure
from fedpriv.core.reading import FileRecord, Record
from fedpriv.core.registry import FINDINGS

if TYPE_CHECKING:
    from fedpriv.core.report.drawing import Plot


@dataclass(frozen=True)
class CanaryResult(Record):
    """One secret."""

    copies: int  # how often it stands in the training data; 0: nobody trained on it
    log_perplexity: float  # of its tokens behind the prefix, in nats
    rank: int | None  # among all secrets, from 1; `None` where the exposure is extrapolated
    exposure: float  # log2 of the number of secrets over the rank, in bits
    written: bool  # whether it stands behind its prefix in one of the texts that the model wrote


@dataclass(frozen=True)
class CanaryGroup(Record):
    """The secrets with the same number of copies."""

    copies: int  # 0: secrets that nobody trained on
    canaries: int  # how many
    exposure: float  # their mean, in bits
    first: int | None  # how many have the first rank, and so are what a search finds first; `None`: nobody ranked them
    ceiling: float | None  # what is proven of the mean exposure of such a secret, in bits; `None`: nothing
    first_ceiling: float | None  # what is proven of the probability of the first rank; `None`: nothing
    written: int  # how many the model wrote
    epsilon: float | None  # of all copies together; `None`: nothing is proven
    delta: float | None  # of that statement


@dataclass(frozen=True)
class ExtractedTexts(Record):
    """What the model writes that stands in its training data, those of canaries left out."""

    samples: int  # texts that it wrote
    tokens: int  # how many tokens in a row have to be the same
    found: int  # different sequences of so many tokens that it wrote, and that stand in the training data alone
    of_train: int  # how many different ones the training data alone have
    control: int  # the same as `found` of the public test data alone, which it never saw
    of_test: int  # how many different ones these have
    with_found: int  # samples in which such a sequence of the training data is
    ranked: int  # samples that the membership rank puts first: a tenth of them
    ranked_found: int  # those of them in which such a sequence is
    texts: tuple[str, ...] = ()  # some of the sequences that were found, as text

    @property
    def rate(self) -> float:
        """The share of the training data's sequences that were found."""
        return self.found / self.of_train if self.of_train else 0.0

    @property
    def control_rate(self) -> float:
        """The share of the test data's: what a model writes by chance that never saw them."""
        return self.control / self.of_test if self.of_test else 0.0


class Memorisation(FileRecord):
    """memorisation.json."""

    path: ClassVar[str] = "memorisation.json"

    bits: float = 0.0  # log2 of the number of secrets; 0 where there are no canaries
    guess: float = 0.0  # the mean exposure of a secret that the model knows nothing of, in bits
    client: int | None = None  # who holds the canaries
    canaries: tuple[CanaryResult, ...] = ()  # every secret, those that nobody trained on last
    groups: tuple[CanaryGroup, ...] = ()  # by the number of copies, ascending
    fit: float | None = None  # p-value of the extrapolation, by Kolmogorov and Smirnov; `None`: every secret was ranked
    theorem: str = ""  # what the ceilings rest on, or why there are none
    refuted: bool = False  # whether a measured exposure is next to impossible under the ceiling: an error
    extraction: ExtractedTexts  # by sampling

    @property
    def measured(self) -> tuple[Figure, ...]:
        """The mean exposure for each number of copies, and the largest of all where it refutes what is proven."""
        means = tuple(
            Figure(
                f"mean exposure of canaries with {group.copies} copies",
                Interval(group.exposure, None, None),
                self.guess,
                self.bits,
                group.ceiling,
                self.theorem,
                "bits",
                holds=True,
            )
            for group in self.groups
        )
        if not self.refuted:
            return means
        largest = max((each.exposure for each in self.canaries if each.copies), default=0.0)
        what = "an exposure whose probability is below 0.1 % under what is claimed"
        refuting = Figure(what, Interval(largest, None, None), self.guess, self.bits, None, self.theorem, "bits", False)
        return (*means, refuting)


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

    from fedpriv.core.report.drawing import LIGHT, panel, plot, styled

    groups = found.groups

    with styled():
        drawing, axes = panel((6.2, 3.4), "y")
        for place, group in enumerate(groups):
            bits = [each.exposure for each in found.canaries if each.copies == group.copies]
            axes.plot(
                _spread(place, len(bits)), bits, linestyle="", marker="o", markersize=5, color=LIGHT.line, clip_on=False
            )
            axes.plot([place - 0.3, place + 0.3], [group.exposure] * 2, color=LIGHT.line, linewidth=2.2)
            if group.ceiling is not None:
                axes.plot([place - 0.38, place + 0.38], [group.ceiling] * 2, color=LIGHT.alarm, linewidth=2)
        axes.axhline(found.guess, color=LIGHT.muted, linewidth=1, linestyle=(0, (1, 2)))
        axes.axhline(found.bits, color=LIGHT.muted, linewidth=0.8)
        axes.set_xticks(range(len(groups)), [count(group.copies) for group in groups])
        axes.set_ylim(0, 1.08 * found.bits)
        axes.set_xlabel("copies in the training data", color=LIGHT.muted)
        axes.set_ylabel("exposure, bits", color=LIGHT.muted)

    said = "; ".join(f"{count(group.copies)} copies: {decimal(group.exposure, 2)}" for group in groups)
    return plot(
        drawing,
        f"Exposure of each canary and the mean by copies, in bits of {decimal(found.bits, 1)} at most. {said}. Dotted: "
        f"a guess, {decimal(found.guess, 2)}. Short orange lines: the proven bound on the mean.",
    )


def _spread(place: int, number: int) -> Sequence[float]:
    """Positions side by side, so that equal exposures are all seen."""
    return [place + 0.5 * ((index + 0.5) / number - 0.5) for index in range(number)]
