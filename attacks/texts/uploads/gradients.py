"""Settings of the attacks on texts: those that read tokens off gradients, then those that match gradients."""

from typing import ClassVar, Literal

from pydantic import Field

from fedpriv.attacks.settings import Restarts
from fedpriv.attacks.texts.uploads import PriorSettings, TextAttackSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, NonNegative, Positive, Steps


@ATTACKS.register
class LookupSettings(PriorSettings):
    """Rows of the table of tokens that have a gradient, and the places that they belong to."""

    name: ClassVar[str] = "lookup"
    title: ClassVar[str] = "Rows of the table of tokens"
    label: ClassVar[str] = "Lookup"
    reference: ClassVar[str] = (
        "after Melis, Song, De Cristofaro and Shmatikov: Exploiting Unintended Feature Leakage in Collaborative "
        "Learning, S&P 2019 (section 4.1); places by the table of positions"
    )
    made_of: ClassVar[tuple[str]] = ("fedpriv.attacks.texts.search:looked_up",)
    simulates: ClassVar[bool] = False


@ATTACKS.register
class DagerSettings(TextAttackSettings):
    """Tokens whose input lies in the row space of a gradient, put together by that of the next block; exact."""

    name: ClassVar[str] = "dager"
    title: ClassVar[str] = "Row spaces of gradients (DAGER)"
    label: ClassVar[str] = "DAGER"
    reference: ClassVar[str] = (
        "after Petrov, Dimitrov, Baader, Müller and Vechev: DAGER: Exact Gradient Inversion for Large Language Models, "
        "NeurIPS 2024"
    )
    made_of: ClassVar[tuple[str]] = ("fedpriv.attacks.texts.dager:row_spaces",)
    simulates: ClassVar[bool] = False

    most_tokens: Count = Field(1024, description="tokens that may be kept at one position; more are refused")
    most_sentences: Count = Field(1024, description="beginnings that may be kept at one position; more are refused")
    starts: Count = Field(64, description="random sentences that the search in encoders begins with, for each length")
    rounds: Count = Field(
        40, description="rounds of the search that orders tokens where noise or a low rank hides the row spaces"
    )


@ATTACKS.register
class TagSettings(TextAttackSettings):
    """Adam on the squared and the absolute distance of gradients, over vectors; then the nearest tokens."""

    name: ClassVar[str] = "tag"
    title: ClassVar[str] = "Transformer attack on gradients (TAG)"
    label: ClassVar[str] = "TAG"
    reference: ClassVar[str] = (
        "Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran and Ding: TAG: Gradient Attack on Transformer-based Language "
        "Models, Findings of EMNLP 2021"
    )
    made_of: ClassVar[tuple[str]] = ("fedpriv.attacks.texts.search:nearest_vectors",)
    simulated_by: ClassVar[str] = "fedpriv.attacks.texts.search:simulated_vectors"

    iterations: Count = Field(300, description="steps of Adam")
    restarts: Restarts = 1
    learning_rate: Positive = Field(
        0.1, description="of Adam, in deviations of tokens' vectors, falling to 0 in a line"
    )
    alpha: NonNegative = Field(
        0.01, description="weight of the absolute distance in the first tensor; it falls in a line towards the last"
    )


@ATTACKS.register
class LampSettings(PriorSettings):
    """Adam over vectors of usual length, in turn with tokens exchanged and moved."""

    name: ClassVar[str] = "lamp"
    title: ClassVar[str] = "Vectors and orders of tokens in turn (LAMP)"
    label: ClassVar[str] = "LAMP"
    reference: ClassVar[str] = (
        "after Balunović, Dimitrov, Jovanović and Vechev: LAMP: Extracting Text from Gradients with Language Model "
        "Priors, NeurIPS 2022"
    )
    made_of: ClassVar[tuple[str]] = ("fedpriv.attacks.texts.search:vectors_and_orders",)
    simulated_by: ClassVar[str] = "fedpriv.attacks.texts.search:simulated_vectors"

    objective: Literal["cosine", "whole", "distance"] = Field(
        "cosine",
        description="how gradients are compared: by the mean angle of their tensors, by one angle of all (better "
        "with noise), or by the squared and the absolute distance",
    )
    alpha: NonNegative = Field(0.01, description="weight of the absolute distance, where that is the objective")
    iterations: Count = Field(300, description="steps of Adam")
    restarts: Restarts = 1
    learning_rate: Positive = Field(
        0.1, description="of Adam, in deviations of tokens' vectors; times 0.89 each 50 steps"
    )
    length: NonNegative = Field(1.0, description="weight of how far the mean length of vectors is from that of tokens'")
    language: NonNegative = Field(0.1, description="weight of the nats a token of a language model, between orders")
    orders: Count = Field(16, description="changes of order that are tried at once")
    every: Count = Field(30, description="steps of Adam from one such trial to the next")


@ATTACKS.register
class TextMapSettings(PriorSettings):
    """Maximum a posteriori over tokens, under the mechanism's own noise and a language model."""

    name: ClassVar[str] = "text_map"
    title: ClassVar[str] = "Noise-adaptive maximum a posteriori for texts"
    label: ClassVar[str] = "MAP (texts)"
    reference: ClassVar[str] = (
        "after Balunović, Dimitrov, Staab and Vechev: Bayesian Framework for Gradient Leakage, ICLR 2022, and "
        "Ebrahimi, Rao, Lowd and Dou: HotFlip, ACL 2018; with the mechanism's own noise"
    )
    made_of: ClassVar[tuple[str]] = ("fedpriv.attacks.texts.search:most_probable",)
    simulated_by: ClassVar[str] = "fedpriv.attacks.texts.search:simulated_probabilities"

    iterations: Count = Field(
        40,
        description="rounds of changes, at most; where no table tells the length, a quarter as many try several first",
    )
    kicks: Steps = Field(
        3, description="how often some tokens are drawn again where no change helps, while rounds are left"
    )
    restarts: Count = Field(1, description="starts; the first at what the tables of tokens and positions show")
