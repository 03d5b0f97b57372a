"""The experiment: all sections together, and the rules that bind one to another; ``Kind.of(experiment)`` reads one."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_json
from typing_extensions import override

from fedpriv.core.algorithm import algorithm_of, preparation_of
from fedpriv.core.config.data import DataConfig
from fedpriv.core.config.rules import check_rules, with_usual_values
from fedpriv.core.config.sections import (
    SUM_LISTENERS,
    AdversaryConfig,
    EngineConfig,
    FederationConfig,
    ReportConfig,
    TrainingConfig,
)
from fedpriv.core.registry import SECTIONS
from fedpriv.core.sections import ExperimentSection, added_keys, given_sections, section_fields
from fedpriv.core.settings import Extensible, Integer, Table
from fedpriv.mechanisms import MECHANISM, MechanismSettings, mechanism_settings
from fedpriv.models import MODEL, ModelSettings, model_settings


class Experiment(Extensible):
    """The complete settings of one experiment; equal settings on the same machine give the same bytes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "experiment", description="names the run"
    )
    seed: Annotated[Integer, Field(ge=0, le=2**63 - 1)] = Field(
        0, description="Seeds every random choice. The noise uses it only with noise = 'reproducible'."
    )
    noise: Literal["secret", "reproducible"] = Field(
        "secret",
        description="Where the noise's random key comes from. secret: the operating system (the key is kept in the "
        "run's folder). reproducible: the seed; anyone who knows it can subtract the noise.",
    )
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    model: Annotated[ModelSettings, MODEL] = Field(
        default_factory=lambda: model_settings({}), description="the network that is trained"
    )
    federation: FederationConfig = Field(default_factory=lambda: FederationConfig())
    training: TrainingConfig = Field(default_factory=lambda: TrainingConfig())
    mechanism: Annotated[MechanismSettings, MECHANISM] = Field(
        default_factory=lambda: mechanism_settings({}), description="what protects the uploads"
    )
    adversary: AdversaryConfig = Field(default_factory=lambda: AdversaryConfig())
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    report: ReportConfig = Field(default_factory=lambda: ReportConfig())

    @classmethod
    @override
    def entries(cls) -> Iterator[tuple[type[ExperimentSection], str, FieldInfo]]:
        """The sections of capabilities."""
        yield from section_fields()

    @model_validator(mode="before")
    @classmethod
    def _has_usual_values(cls, tree: Any) -> Any:
        return with_usual_values(tree)

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        check_rules(self)
        return self

    @property
    def hears_masked(self) -> bool:
        """Whether single uploads reach the adversary, but masked."""
        return self.federation.secure_aggregation and self.adversary.threat_model not in SUM_LISTENERS

    @property
    def prepares_data(self) -> bool:
        """Whether clients change their labels before anything else."""
        return preparation_of(self) is not None

    @property
    def counts_classes(self) -> bool:
        """Whether clients count their changed labels; with a mechanism that would be a second release."""
        return self.prepares_data and not self.protects

    @property
    def protects(self) -> bool:
        """Whether noise is added to what leaves the run: to uploads, or to votes."""
        return self.mechanism.protects or algorithm_of(self).protects != ""

    @property
    def keeps_secret(self) -> bool:
        """Whether the run's noise is secret: nobody can draw it again."""
        return self.noise == "secret" and self.draws_noise

    @property
    def draws_noise(self) -> bool:
        """Whether a client's output contains noise: an upload, a vote, or a label used in training."""
        return self.protects or self.prepares_data

    @property
    def rests_on_secret(self) -> bool:
        """Whether a secret determines the clients' training data: the examples of a batch, or their labels."""
        return self.hides_batches or (self.keeps_secret and self.prepares_data)

    @property
    def hides_batches(self) -> bool:
        """Whether the proof requires that the choice of a batch's examples is secret."""
        return self.keeps_secret and self.mechanism.protects and self.training.sampling != "shuffled"

    @property
    def hides_participants(self) -> bool:
        """Whether a secret selects the clients: then nothing that is printed may follow from the draw."""
        return self.mechanism.noise_at == "server"

    @property
    def server_learning_rate(self) -> float:
        """The step size of the server, with its default resolved."""
        if self.federation.server_learning_rate is not None:
            return self.federation.server_learning_rate
        return self.training.learning_rate if self.federation.algorithm == "fedsgd" else 1.0

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what clients release, without those of machine, rounds, adversary and evaluation."""
        tree = self.model_dump(mode="json", exclude={"name", "adversary", "report", "engine", *SECTIONS})
        for section, keys in _INDECISIVE.items():
            for key in keys:
                tree[section].pop(key, None)
        for key in FederationConfig.further():
            del tree["federation"][key]
        # Experiments from before there was such a key release the same as they did.
        if self.data.groups is None:
            del tree["data"]["groups"]
        tree["training"] = {key: value for key, value in tree["training"].items() if not _is_usual_loss(key, value)}
        for _, key, field in added_keys("data"):
            if tree["data"][key] == field.default:
                del tree["data"][key]
        sections = {name: section.decisive() for name, section in given_sections(self).items()}
        decisive = {name: keys for name, keys in sections.items() if keys}
        return {**tree, "model": self.model.decisive(), **decisive}

    def to_json(self) -> str:
        """Return the experiment as JSON, as clients and its digest have it; unlike pydantic's, Ctrl-C gets through."""
        return to_json(self.model_dump(mode="json")).decode()

    def to_toml(self) -> str:
        """Return the resolved experiment as TOML; keys without a value are left out, which means unset."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def _is_usual_loss(key: str, value: Any) -> bool:
    return key in ("loss", "risk", "weight_decay") and value == TrainingConfig.model_fields[key].default


# Where data lie, how long a run goes on, and what the server makes of uploads.
_INDECISIVE = {
    "data": ("root", "download"),
    "federation": (
        "rounds",
        "clients_per_round",
        "client_sampling",
        "min_clients",
        "target_epsilon",
        "target_ceiling",
        "aggregation",
        "server_optimizer",
        "server_learning_rate",
        "server_momentum",
        "evaluate",
        "evaluate_every",
        "evaluate_examples",
        "round_timeout",
        "max_update_norm",
    ),
}


def json_schema(kind: type[BaseModel] = Experiment) -> dict[str, Any]:
    """Return the JSON Schema of a kind of files, what installed packages add to experiments included."""
    return _in_terms_of_json(kind.model_json_schema())


def _in_terms_of_json(node: Any) -> Any:
    """Rename bounds of numbers, which pydantic leaves under its own names where a field has a validator of ours."""
    if isinstance(node, list):
        return [_in_terms_of_json(each) for each in node]
    if not isinstance(node, dict):
        return node
    bounded = "type" in node and not isinstance(node["type"], dict)
    return {_BOUNDS.get(key, key) if bounded else key: _in_terms_of_json(value) for key, value in node.items()}


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def describe(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (key, value, default, description) for every key, in the order of the sections."""
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        if isinstance(value, Table):
            yield from (
                (f"{prefix}{key}.{name}", each, None, field.description or "") for name, each in value.plain().items()
            )
        elif isinstance(value, BaseModel):
            yield from describe(value, f"{prefix}{key}.")
        else:
            usual = field.get_default(call_default_factory=True)
            yield f"{prefix}{key}", value, usual, field.description or ""
