"""memorisation.json: what a language model remembers of the texts that it was trained on."""

from dataclasses import dataclass
from typing import ClassVar

from fedpriv.core.figure import Figure, Interval
from fedpriv.core.reading import FileRecord, Record


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
