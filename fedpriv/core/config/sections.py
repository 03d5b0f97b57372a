"""The sections of an experiment: every key with its default, its range and what it means."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS, ATTACKS, RULES
from fedpriv.core.sections import added_keys
from fedpriv.core.settings import (
    Count,
    Epsilon,
    Extensible,
    Integer,
    Momentum,
    NonNegative,
    Positive,
    Real,
    Registered,
    Settings,
    absent,
    named_once,
)

MOST_MASKED = 1000  # clients in a sum of masked uploads, which is computed modulo 2^32

# Listeners who can send the clients parameters of the adversary's own making.
ACTIVE_LISTENERS = ("malicious-server", "malicious-secure-aggregation")
# Listeners whom no single upload reaches, only the sum of a round's.
SUM_LISTENERS = ("secure-aggregation", "malicious-secure-aggregation", "outsider")


class FederationConfig(Extensible):
    """Who takes part, how often, and what the server does with the uploads."""

    clients: Count = Field(8, description="number of clients")
    rounds: Count = Field(20, description="number of rounds")
    algorithm: Annotated[str, Registered(ALGORITHMS)] = Field("fedsgd", description="what clients and server do")
    clients_per_round: Count | None = Field(None, description="clients drawn for each round; unset: all")
    client_sampling: Literal["fixed", "poisson", "turns"] = Field(
        "fixed",
        description="fixed: exactly clients_per_round clients; poisson: each client by itself, so many on average, for "
        "mechanism.name = 'central'; turns: clients_per_round clients, all in turn, in an order that is drawn once",
    )
    min_clients: Count = Field(1, description="usable uploads a round needs; below that the run fails")
    target_epsilon: Epsilon | None = Field(
        None, description="a client stops before its proven epsilon, at mechanism.delta, is above this; unset: no limit"
    )
    target_ceiling: Annotated[Real, Field(gt=0, lt=1)] | None = Field(
        None,
        exclude_if=absent,
        description="a client stops before any attack might pick its record out of candidates more often than this, "
        "a guess being right as mechanism.ceiling_guess says; unset: no limit",
    )
    weighting: Literal["examples", "uniform"] = Field("examples", description="weight of a client in the mean")
    aggregation: Annotated[str, Registered(RULES)] = Field(
        "mean", description="of the uploads; all but mean withstand some wrong ones, and count every client once"
    )
    secure_aggregation: bool = Field(
        False, description="uploads go out masked, and the server learns their sum only (SecAgg)"
    )
    secure_limit: Positive = Field(
        8.0,
        description="secure aggregation: uploads are clipped to this in each coordinate, and rounded to 1 / 2^21 of it",
    )
    server_optimizer: Literal["sgd", "adam"] = Field("sgd", description="applied to the mean upload")
    server_learning_rate: Positive | None = Field(
        None, description="unset: training.learning_rate for fedsgd, 1 for fedavg"
    )
    server_momentum: Momentum = Field(0.0, description="of the server's SGD")
    evaluate_every: Count = Field(
        1, description="rounds from one evaluation on the test data to the next; the last round is always evaluated"
    )
    evaluate: Literal["all", "clients"] = Field(
        "all",
        exclude_if=lambda value: value == "all",
        description="all: accuracy on all test data; clients: also each client's on its own test examples, as a "
        "distribution, with data.partition = 'key'",
    )
    evaluate_examples: Count | None = Field(
        None, description="test examples of an evaluation, drawn by the seed; the last round and unset: all"
    )
    round_timeout: Positive | None = Field(None, description="seconds to wait for uploads; unset: no limit")
    max_update_norm: Positive | None = Field(
        None,
        description="longer uploads (Euclidean norm) are refused; "
        "unset: only uploads longer than the mechanism can produce are refused",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        asked = self.clients_per_round or self.clients
        if asked > self.clients:
            raise InputError(key="clients_per_round", given=asked, allowed=f"more than clients = {self.clients}")
        if self.min_clients > asked:
            raise self.wrong("min_clients", f"more than the {asked} clients of a round")
        if self.client_sampling == "poisson" and (self.min_clients > 1 or self.secure_aggregation):
            raise InputError(
                "client_sampling = 'poisson' draws any number of clients: min_clients above 1 and "
                "secure_aggregation need client_sampling = 'fixed'"
            )
        self.rule.check(asked)
        return self

    @model_validator(mode="after")
    def _can_be_summed(self) -> Self:
        asked = self.clients_per_round or self.clients
        if not self.secure_aggregation:
            return self
        if not 2 <= asked <= MOST_MASKED:
            raise InputError(f"secure_aggregation is of 2 to {MOST_MASKED} clients a round, not of {asked}")
        if self.rule.needs_each:
            raise InputError(f"secure_aggregation hides each upload, and aggregation = {self.aggregation!r} needs it")
        if self.max_update_norm is not None:
            raise InputError("secure_aggregation hides each upload, and max_update_norm cannot be checked")
        return self

    @classmethod
    @override
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """With a line about each algorithm."""
        known = "; ".join(f"{name}: {kind.about}" for name, kind in ALGORITHMS.items())
        cls.model_fields["algorithm"].description = known
        return super().__get_pydantic_core_schema__(source, handler)

    @classmethod
    @override
    def entries(cls) -> Iterator[tuple[type[Any], str, FieldInfo]]:
        """What single rules read."""
        for kind in RULES.values():
            yield from ((kind, key, field) for key, field in kind.model_fields.items())

    @property
    def rule(self) -> Any:
        """The rule of aggregation, with its settings."""
        kind = RULES[self.aggregation]
        return kind(**{key: getattr(self, key) for key in kind.model_fields})

    @property
    def targets(self) -> dict[str, float]:
        """The figures at which clients stop, by their keys."""
        figures = {"target_epsilon": self.target_epsilon, "target_ceiling": self.target_ceiling}
        return {key: figure for key, figure in figures.items() if figure is not None}

    @property
    def asked(self) -> int:
        """How many clients a round asks; on average, where each is drawn by itself."""
        return self.clients_per_round or self.clients

    @property
    def separation(self) -> int:
        """The choice of clients takes a client in at most one of so many rounds in a row."""
        return self.clients // self.asked if self.client_sampling == "turns" else 1

    @property
    def most_rounds(self) -> int:
        """In how many rounds a client is at most."""
        return -(-self.rounds * self.asked // self.clients) if self.client_sampling == "turns" else self.rounds

    @property
    def needed(self) -> int:
        """Usable uploads without which a round fails."""
        return max(self.min_clients, int(self.rule.needed))


class TrainingConfig(Extensible):
    """Local training."""

    batch_size: Count = Field(32, description="examples in a batch (expected number, for poisson and balls-in-bins)")
    learning_rate: Positive = Field(0.1, description="of the local optimiser (fedavg) or of the server's step (fedsgd)")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="local optimiser, for fedavg")
    momentum: Momentum = Field(0.0, description="of the local SGD, for fedavg")
    local_epochs: Count = Field(1, description="passes over the client's data a round, for fedavg")
    sampling: Literal["shuffled", "fixed", "poisson", "balls-in-bins"] = Field(
        "shuffled",
        description="batches: disjoint ones of a shuffled pass, fixed-size draws without replacement, Poisson draws, "
        "or balls-in-bins: in each pass every example by itself in one of the steps",
    )
    loss: Literal["cross-entropy", "risk-averting"] = Field(
        "cross-entropy",
        description="of a batch: the mean cross entropy, or log(mean(exp(risk * cross entropy))) / risk, which weighs "
        "what is hard (Lu et al. 2022)",
    )
    risk: Annotated[Positive, Field(le=100)] = Field(1.0, description="alpha, for loss = 'risk-averting'")
    weight_decay: NonNegative = Field(
        0.0, description="lambda, of lambda/2 |W|^2 in the objective, over all parameters"
    )

    @classmethod
    @override
    def entries(cls) -> Iterator[tuple[type[Any], str, FieldInfo]]:
        """Keys of capabilities."""
        yield from added_keys("training")

    @property
    def tilt(self) -> float | None:
        """Alpha of the risk-averting loss; ``None``: the cross entropy."""
        return self.risk if self.loss == "risk-averting" else None

    @property
    def couples(self) -> bool:
        """Whether a batch's gradient is more than the mean of its examples' own."""
        return self.tilt is not None or self.weight_decay > 0


class AdversaryConfig(Extensible):
    """Who listens and what they try."""

    threat_model: Literal[
        "honest-but-curious-server",
        "malicious-server",
        "secure-aggregation",
        "malicious-secure-aggregation",
        "network-plaintext",
        "outsider",
        "network-tls",
    ] = Field(
        "honest-but-curious-server",
        description="who listens, and so what they see and whether they interfere; with federation.secure_aggregation "
        "it is secure-aggregation unless set",
    )
    knows_mechanism: bool = Field(True, description="whether they know the mechanism and its parameters (Kerckhoffs)")
    knows_batch_size: bool = Field(True, description="whether they know the batch size")
    knows_public_data: bool = Field(True, description="whether they hold public images of the same kind (test images)")
    knows_labels: bool = Field(False, description="whether they know the labels of the batches that they attack")
    knows_candidates: bool = Field(
        False, description="whether they hold, for each image, a list of 100 records that contains it"
    )
    attacks: Annotated[tuple[Annotated[str, Registered(ATTACKS)], ...], AfterValidator(named_once)] = Field(
        ("dlg", "iga"), description="reconstruction attacks; [] for none"
    )
    rounds: Annotated[tuple[Count, ...], AfterValidator(named_once)] = Field(
        (1,), description="rounds whose uploads are attacked, counted from 1"
    )
    victims: Count = Field(4, description="uploads attacked in each of these rounds, lowest client first")
    counterfactual: bool = Field(True, description="also attack what the client would have sent without the mechanism")
    best_decision: bool = Field(
        True,
        description="also compute how often the best decision among 100 candidates is right; takes 100 gradients for "
        "each attacked image with a mechanism",
    )
    join_uploads: bool = Field(
        False,
        description="attack a client's uploads of all attacked rounds together, where it uses all its data in each",
    )
    success_ssim: Annotated[Real, Field(gt=0, le=1)] = Field(
        0.6, description="an image counts as recovered from this SSIM on, if it also beats the guess"
    )

    @model_validator(mode="after")
    def _may_be_active(self) -> Self:
        active = [name for name in self.attacks if ATTACKS[name].active()]
        if not active:
            return self
        if self.threat_model not in ACTIVE_LISTENERS:
            raise InputError(
                f"attacks: {active[0]} sends clients parameters of the adversary's own making, and "
                f"threat_model = {self.threat_model!r} only listens; allowed: {', '.join(ACTIVE_LISTENERS)}"
            )
        if len(active) > 1:
            raise InputError(
                f"attacks: {' and '.join(active)} each send parameters of their own, and a client is sent only one of "
                "them; make them in runs of their own"
            )
        for key in ("knows_batch_size", "knows_public_data"):
            if not getattr(self, key):
                raise InputError(f"attacks: {active[0]} needs what {key} = false withholds")
        if self.threat_model == "malicious-secure-aggregation" and self.passive_attacks:
            raise InputError(
                f"attacks: under {self.threat_model} {active[0]} takes the one sum of each attacked "
                f"round, and leaves {self.passive_attacks[0]} none; make them in runs of their own"
            )
        return self

    @model_validator(mode="after")
    def _may_have_priors(self) -> Self:
        for name in () if self.knows_public_data else ATTACKS:
            if getattr(self.settings(name), "prior", ""):
                raise InputError(f"{name}.prior needs what knows_public_data = false withholds: public images")
        return self

    @property
    def crafts(self) -> bool:
        """Whether the server sends parameters of its own making in the attacked rounds."""
        return self.active_attack is not None

    @property
    def active_attack(self) -> str | None:
        """The attack for which the server makes the parameters that it sends."""
        return next((name for name in self.attacks if ATTACKS[name].active()), None)

    @property
    def passive_attacks(self) -> tuple[str, ...]:
        """The attacks on uploads of clients that were sent the model itself."""
        return tuple(name for name in self.attacks if not ATTACKS[name].active())

    def settings(self, attack: str) -> Any:
        """Return the settings of an attack."""
        return getattr(self, attack)

    @classmethod
    @override
    def entries(cls) -> Iterator[tuple[type[Any], str, FieldInfo]]:
        """A section for each attack that there is."""
        for name, kind in ATTACKS.items():
            yield kind, name, FieldInfo(annotation=kind, default_factory=kind)


class EngineConfig(Settings):
    """Where the clients run."""

    name: Literal["auto", "inline", "ray", "stacked"] = Field(
        "auto",
        description="auto: ray with a GPU or an address, else inline; stacked: as inline, but clients of a round that "
        "do the same work are trained as one stack of models, and numbers differ in their last digits",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: cuda, else cpu")
    threads: Annotated[Integer, Field(ge=1, le=1024)] = Field(
        1, description="CPU threads of client, server and attack; part of what makes runs repeat"
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="of model and gradients; bfloat16: forward and backward only, parameters and uploads stay float32",
    )
    gradient_memory: Annotated[Integer, Field(ge=1, le=1_000_000)] = Field(
        256, description="MiB that computing per-example gradients may take besides their result"
    )
    cpus_per_client: Positive = Field(1.0, description="Ray's share of CPUs for one client")
    gpus_per_client: NonNegative = Field(0.0, description="Ray's share of a GPU for one client")
    attack_tasks: Annotated[Integer, Field(ge=1, le=1024)] = Field(
        1, description="Ray tasks that an attack's uploads are spread over, with a client's shares each; 1: none, here"
    )
    address: str = Field("", description="a running Ray cluster, such as auto or ray://host:10001")

    @property
    def gradient_bytes(self) -> int:
        """What computing per-example gradients may take, in bytes."""
        return self.gradient_memory << 20


class ReportConfig(Settings):
    """What the report shows."""

    title: str = Field("", description="heading; empty: the experiment's name")
    pictures: Count = Field(16, description="victims shown at most")
    ssim: Literal["valid", "padded"] = Field(
        "valid",
        exclude_if=lambda value: value == "valid",
        description="valid: SSIM of the windows inside the picture, as scikit-image has it; padded: next to it a "
        "second one, of the padded picture, as torchmetrics has it",
    )

    trackers: tuple[Literal["csv", "mlflow", "tensorboard"], ...] = Field(
        (),
        exclude_if=lambda value: not value,
        description="where metrics, epsilon, leakage and the report are logged when a run is finished: csv: "
        "metrics.csv in its folder; tensorboard: tensorboard/ there; mlflow: where MLFLOW_TRACKING_URI says",
    )

    @property
    def pads(self) -> bool:
        """Whether each score also has the SSIM of the padded picture."""
        return self.ssim == "padded"
