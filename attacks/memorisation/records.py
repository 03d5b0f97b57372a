"""memorisation.json: what a language model remembers of the texts that it was trained on."""

from dataclasses import dataclass
from typing import ClassVar

from fedpriv.core.figure import Figure, Interval
from fedpriv.core.records.reading import FileRecord, Record


@dataclass(frozen=True)
class CanaryResult(Record):
    """One secret.

    Attributes:
        copies: how often it stands in the training data; 0: nobody trained on it.
        log_perplexity: of its tokens behind the prefix, in nats.
        rank: among all secrets, from 1; ``None`` where the exposure is extrapolated.
        exposure: log2 of the number of secrets over the rank, in bits.
        written: whether it stands behind its prefix in one of the texts that the model wrote.
    """

    copies: int
    log_perplexity: float
    rank: int | None
    exposure: float
    written: bool


@dataclass(frozen=True)
class CanaryGroup(Record):
    """The secrets with the same number of copies.

    Attributes:
        copies: 0: secrets that nobody trained on.
        canaries: how many.
        exposure: their mean, in bits.
        first: how many have the first rank, and so are what a search finds first; ``None``: nobody ranked them.
        ceiling: what is proven of the mean exposure of such a secret, in bits; ``None``: nothing.
        first_ceiling: what is proven of the probability of the first rank; ``None``: nothing.
        written: how many the model wrote.
        epsilon: of all copies together; ``None``: nothing is proven.
        delta: of that statement.
    """

    copies: int
    canaries: int
    exposure: float
    first: int | None
    ceiling: float | None
    first_ceiling: float | None
    written: int
    epsilon: float | None
    delta: float | None


@dataclass(frozen=True)
class Extraction(Record):
    """What the model writes that stands in its training data, those of canaries left out.

    Attributes:
        samples: texts that it wrote.
        tokens: how many tokens in a row have to be the same.
        found: different sequences of so many tokens that it wrote, and that stand in the training data alone.
        of_train: how many different ones the training data alone have.
        control: the same as ``found`` of the public test data alone, which it never saw.
        of_test: how many different ones these have.
        with_found: samples in which such a sequence of the training data is.
        ranked: samples that the membership rank puts first: a tenth of them.
        ranked_found: those of them in which such a sequence is.
        texts: some of the sequences that were found, as text.
    """

    samples: int
    tokens: int
    found: int
    of_train: int
    control: int
    of_test: int
    with_found: int
    ranked: int
    ranked_found: int
    texts: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """The share of the training data's sequences that were found."""
        return self.found / self.of_train if self.of_train else 0.0

    @property
    def control_rate(self) -> float:
        """The share of the test data's: what a model writes by chance that never saw them."""
        return self.control / self.of_test if self.of_test else 0.0


class Memorisation(FileRecord):
    """memorisation.json.

    Attributes:
        bits: log2 of the number of secrets; 0 where there are no canaries.
        guess: the mean exposure of a secret that the model knows nothing of, in bits.
        client: who holds the canaries.
        canaries: every secret, those that nobody trained on last.
        groups: by the number of copies, ascending.
        fit: p-value of the extrapolation, by Kolmogorov and Smirnov; ``None``: every secret was ranked.
        theorem: what the ceilings rest on, or why there are none.
        refuted: whether a measured exposure is next to impossible under the ceiling: an error.
        extraction: by sampling.
    """

    path: ClassVar[str] = "memorisation.json"

    bits: float = 0.0
    guess: float = 0.0
    client: int | None = None
    canaries: tuple[CanaryResult, ...] = ()
    groups: tuple[CanaryGroup, ...] = ()
    fit: float | None = None
    theorem: str = ""
    refuted: bool = False
    extraction: Extraction

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
