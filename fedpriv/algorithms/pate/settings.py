"""The section [pate]: clients as teachers who vote, and a student who learns from the answers; read without scipy."""

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.core.registry import SECTIONS
from fedpriv.core.sections import ExperimentSection
from fedpriv.core.settings import Count, Epsilon, Positive, Real

if TYPE_CHECKING:
    from fedpriv.accounting.aggregators import Aggregator
    from fedpriv.accounting.proofs import Claim
    from fedpriv.accounting.votes import Sanitiser

_FILTER = (
    "and asking stops before the budget, which is what is claimed (Gaussian filters: Smith and Thakurta 2022; Koskela, "
    "Tobaben and Honkela 2022)"
)


@SECTIONS.register
class PateConfig(ExperimentSection):
    """How teachers vote, what noise goes on their votes, and what the student is given."""

    name: ClassVar[str] = "pate"
    rank: ClassVar[int] = 2
    about: ClassVar[str] = "votes of clients on public images, for federation.algorithm = 'pate'; else unset"

    aggregator: Literal["confident", "gnmax", "lnmax"] = Field(
        "confident",
        description="confident: answer where the largest count with noise reaches a threshold, by the noisy maximum; "
        "gnmax: always, with normal noise; lnmax: always, with Laplace noise",
    )
    noise_at: Literal["server", "clients"] = Field(
        "server",
        description="who adds the noise. server: it sees all votes. clients: each adds a share and votes are summed "
        "under masks, so that nobody sees one (gnmax only)",
    )
    queries: Count = Field(640, description="public images that teachers vote on: test images drawn by the seed")
    teachers_per_client: Count = Field(1, description="models that a client trains, each on its own part of the data")
    threshold: Real = Field(0.8, ge=0, le=1, description="confident: of the largest count, as a share of the teachers")
    sigma1: Positive = Field(
        0.6, description="confident: deviation of the noise on the largest count, as a share of the teachers"
    )
    sigma2: Positive = Field(
        0.16, description="confident, gnmax: deviation of the noise on each count, as a share of the teachers"
    )
    scale: Positive = Field(0.08, description="lnmax: scale of the noise on each count, as a share of the teachers")
    target_epsilon: Epsilon | None = Field(
        3.0,
        description="the budget of all answers at pate.delta, which is the claim: asking stops before it; unset: none, "
        "and the claim is of as many answers as questions",
    )
    delta: Real = Field(1e-5, gt=0, lt=1, description="of the (epsilon, delta) that is claimed")
    local_epochs: Count = Field(50, description="passes of a teacher over its data")
    student_epochs: Count = Field(50, description="passes of the student over the answered images")
    sanitised: bool = Field(
        False,
        description="also show what these votes cost, with noise on the figure; this is another release, "
        "which the ledger adds (confident and gnmax with noise at the server and one teacher a client)",
    )
    sanitised_order: Real = Field(15.0, description="Renyi order of the sanitised figure, below 1 / (2 sanitised_beta)")
    sanitised_beta: Positive = Field(0.02, description="smoothness of the sanitised figure's sensitivity")
    sanitised_noise: Positive = Field(6.0, description="noise of the sanitised figure, in smooth sensitivities")

    @model_validator(mode="after")
    def _is_proven(self) -> Self:
        if self.noise_at == "clients" and self.aggregator != "gnmax":
            raise InputError(
                "pate.noise_at = 'clients' releases a noisy count of every class, which is proven for "
                f"aggregator = 'gnmax' only (given: {self.aggregator!r}); a threshold would save nothing"
            )
        if not self.sanitised:
            return self
        if self.aggregator == "lnmax":
            raise InputError("pate.sanitised: no smooth sensitivity is known for aggregator = 'lnmax'")
        if self.noise_at == "clients":
            raise InputError("pate.sanitised needs the votes, and with noise_at = 'clients' nobody has them")
        if self.teachers_per_client > 1:
            raise InputError("pate.sanitised is proven for one vote a client; use teachers_per_client = 1")
        self.sanitiser  # noqa: B018 - it says what is out of range
        return self

    @property
    def sanitiser(self) -> "Sanitiser":
        """How a data-dependent figure is made fit to be shown."""
        from fedpriv.accounting.votes import Sanitiser

        return Sanitiser(self.sanitised_order, self.sanitised_beta, self.sanitised_noise)

    def aggregator_of(self, teachers: int) -> "Aggregator":
        """Return the aggregator of so many teachers, its noise in votes."""
        from fedpriv.accounting.aggregators import ConfidentMax, LaplaceMax, NoisyMax

        match self.aggregator:
            case "confident":
                return ConfidentMax(self.threshold * teachers, self.sigma1 * teachers, self.sigma2 * teachers)
            case "gnmax":
                return NoisyMax(self.sigma2 * teachers)
            case "lnmax":
                return LaplaceMax(self.scale * teachers)

    def is_affordable(self, teachers: int, asked: int, answered: int) -> bool:
        """Whether the budget allows so many questions and answers."""
        if self.target_epsilon is None:
            return True
        spent = self.aggregator_of(teachers).claim(asked, answered, self.delta, self.teachers_per_client)
        return spent.epsilon <= self.target_epsilon

    def claim(self, teachers: int, asked: int) -> "Claim":
        """What is proven of so many questions, whichever of them were answered.

        Where questions may stay without an answer, how many are asked before a budget ends depends on the votes, so the
        claim does not: it is the budget or, where that is less, what answers to all planned questions cost. A sanitised
        figure beside the answers is added.
        """
        from fedpriv.accounting.proofs import Claim
        from fedpriv.accounting.votes import gaussian_mu

        aggregator, votes = self.aggregator_of(teachers), self.teachers_per_client
        is_adaptive = self.aggregator == "confident" and asked > 0
        most = self.queries if is_adaptive else asked
        claim, mu = aggregator.claim(most, most, self.delta, votes), votes * aggregator.spent(most, most)
        if is_adaptive and self.target_epsilon is not None and self.target_epsilon < claim.epsilon:
            claim = Claim(self.target_epsilon, f"{claim.theorem}, {_FILTER}")
            mu = gaussian_mu(self.target_epsilon, self.delta)
        return self.sanitiser.shown_with(mu, self.delta) if self.sanitised and asked else claim
