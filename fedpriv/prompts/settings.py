"""Settings of ``fedpriv icl``: private examples in prompts of a language model; read without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import Field, model_validator
from typing_extensions import override as overriding

from fedpriv.core.config.error_text import validated
from fedpriv.core.config.experiment import Experiment
from fedpriv.core.config.file import FileKind, override, parse_override, read_toml
from fedpriv.core.config.sections import MOST_MASKED
from fedpriv.core.errors import InputError
from fedpriv.core.registry import FILES
from fedpriv.core.settings import Count, Epsilon, Integer, Real, Settings

_MOST_LEVELS = 20


class TextConfig(Settings):
    """Which texts, where they lie, and how they look in a prompt."""

    name: Literal["sst2", "agnews", "rotten_tomatoes", "sms_spam", "csv"] = Field(
        "sms_spam", description="data set, as fedpriv data lists them; csv: your own file"
    )
    root: str = Field("", description="folder of the data sets; empty: $FEDPRIV_DATA, else ./data")
    path: str = Field("", description="csv: your own file, with a header; its name may end in .gz")
    text: Annotated[str, Field(min_length=1)] = Field("text", description="csv: the column of the texts")
    label: Annotated[str, Field(min_length=1)] = Field("label", description="csv: the column of the labels")
    examples: Count | None = Field(None, description="use only this many private examples, drawn by the seed")
    labels: tuple[str, ...] = Field(
        (), description="what the model is to say for each label, in the order of the sorted labels; unset: the usual"
    )
    words: Count = Field(40, description="of a text that go into a prompt; the rest is cut off")

    @model_validator(mode="after")
    def _has_its_file(self) -> Self:
        if (self.name == "csv") != bool(self.path):
            raise InputError("path names the file of name = 'csv', and of no other data set; set both or none")
        return self


class LanguageConfig(Settings):
    """Which language model is prompted."""

    name: Literal["counting", "stories", "folder", "http"] = Field(
        "counting",
        description="counting: counts words, no language model; stories: stories260k.npz in data.root; folder: a local "
        "folder as transformers writes them (pip install 'fedpriv[icl]'); http: an endpoint with /v1/completions",
    )
    path: str = Field("", description="folder: where it lies")
    url: str = Field("", description="http: the endpoint up to /v1, such as http://127.0.0.1:8080/v1")
    served: str = Field("", description="http: the model's name at the endpoint")
    remote: bool = Field(
        False, description="http: allow an address that is not the loopback: prompts hold private examples"
    )
    top: Annotated[Integer, Field(ge=1, le=1000)] = Field(
        20, description="http: how many of the likeliest tokens the endpoint is asked for"
    )
    timeout: Annotated[Real, Field(gt=0, le=86_400)] = Field(
        60.0, description="http: seconds for a whole request, until the last byte of its answer"
    )
    batch: Count = Field(16, description="folder: prompts that are read at a time")
    threads: Annotated[Integer, Field(ge=1, le=256)] = Field(1, description="CPU threads")

    def decisive(self) -> dict[str, Any]:
        """The settings that decide who answers, without those of the machine."""
        return self.model_dump(mode="json", exclude={"remote", "timeout", "batch", "threads"})

    @model_validator(mode="after")
    def _has_its_place(self) -> Self:
        for key, owner in (("path", "folder"), ("url", "http")):
            if (self.name == owner) != bool(getattr(self, key)):
                raise InputError(f"{key} goes with name = {owner!r}, and with no other; set both or none")
        return self


class IclConfig(Settings):
    """How prompts are made of private examples, and what is released."""

    mode: Literal["classify", "generate"] = Field(
        "classify",
        description="classify: each answer is a vote of prompts (Wu et al. 2024); generate: synthetic examples, token "
        "by token, that then serve any number of questions (Tang et al. 2024)",
    )
    unit: Literal["example", "client"] = Field(
        "example",
        description="what is protected. example: prompts are drawn afresh from all examples; client: each client makes "
        "prompts of its own examples, and all it has is protected (classify only)",
    )
    clients: Count = Field(1, description="unit = 'client': how many share the examples")
    noise_at: Literal["server", "clients"] = Field(
        "server",
        description="unit = 'client'. server: it sees votes and adds the noise. clients: each adds its share of the "
        "noise to its counts, and secure aggregation leaves the server their sum",
    )
    shots: Annotated[Integer, Field(ge=1, le=100)] = Field(4, description="examples in a prompt (N)")
    prompts: Count = Field(10, description="prompts for a question or token (M); with unit = 'client', of each client")
    queries: Count = Field(200, description="test texts that are asked about, drawn by the seed")
    target_epsilon: Epsilon = Field(3.0, description="proven for all that is released; the noise is calibrated")
    compare: tuple[Epsilon, ...] = Field(
        (1.0, 3.0, 8.0),
        max_length=_MOST_LEVELS,
        description="classify: further epsilons to measure on the same votes; [] with noise_at = 'clients'",
    )
    delta: Real = Field(1e-4, gt=0, lt=1, description="of the (epsilon, delta) that is claimed")
    calibrated: bool = Field(
        True,
        description="scores of labels are corrected by those of a question without content (Zhao et al. 2021), which "
        "the model reads, too",
    )
    synthetic: Count = Field(2, description="generate: synthetic examples of each label")
    tokens: Annotated[Integer, Field(ge=1, le=1000)] = Field(30, description="generate: of each synthetic example (T)")
    likeliest: Annotated[Integer, Field(ge=2, le=10_000)] = Field(
        100, description="generate: only so many tokens, the likeliest without private examples, can be chosen (K)"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.unit == "client" and self.mode == "generate":
            raise InputError(key="unit", given="client", allowed="proven for mode = 'classify' only")
        if (self.unit == "client") != (self.clients > 1):
            raise InputError(f"clients = {self.clients} with unit = {self.unit!r}: two or more with 'client', else one")
        if self.noise_at == "clients":
            self._check_masked()
        return self

    def _check_masked(self) -> None:
        if not 2 <= self.clients <= MOST_MASKED:
            raise InputError(f"noise_at = 'clients' with clients = {self.clients}: allowed are 2 to {MOST_MASKED}")
        if self.compare:
            raise InputError(
                "noise_at = 'clients' leaves the server no votes, so nothing is measured on them at "
                "another epsilon: set compare = []"
            )

    @property
    def levels(self) -> tuple[float, ...]:
        """Every epsilon that is measured, ascending: the target and those it is compared with."""
        return tuple(sorted({self.target_epsilon, *self.compare}))


class LeaksConfig(Settings):
    """Attacks on the prompts."""

    pairs: Annotated[Integer, Field(ge=0, le=1_000_000)] = Field(
        200, description="of a private example and another one, to tell apart by answers of 1-shot prompts; 0: none"
    )
    repeats: Annotated[Integer, Field(ge=0, le=1_000_000)] = Field(
        0, description="prompts that are asked to repeat their examples; 0: none. Needs a language model"
    )
    tokens: Annotated[Integer, Field(ge=1, le=1000)] = Field(40, description="of an answer that repeats")


class Prompting(Settings):
    """One file of ``fedpriv icl``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field("icl", description="names the run")
    seed: Annotated[Integer, Field(ge=0, le=2**63 - 1)] = Field(
        0, description="draws questions and attacks; what protects people only with noise = 'reproducible'"
    )
    noise: Literal["secret", "reproducible"] = Field(
        "secret",
        description="Where noise and the draws of examples come from. secret: the operating system (the key is kept in "
        "the run's folder). reproducible: the seed; anyone who knows it can subtract the noise.",
    )
    data: TextConfig = Field(default_factory=lambda: TextConfig())
    model: LanguageConfig = Field(default_factory=lambda: LanguageConfig())
    icl: IclConfig = Field(default_factory=lambda: IclConfig())
    leaks: LeaksConfig = Field(default_factory=lambda: LeaksConfig())

    @model_validator(mode="after")
    def _model_can(self) -> Self:
        writes = [key for key, asked in (("icl.mode = 'generate'", self.icl.mode == "generate"),
                                         ("leaks.repeats", self.leaks.repeats > 0)) if asked]  # fmt: skip
        if self.model.name == "counting" and writes:
            raise InputError(f"{writes[0]} needs a language model, and model.name = 'counting' writes nothing")
        return self

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is released, without the model's and the texts' places."""
        left_out: dict[str, Any] = {"name": True, "model": True, "leaks": True, "data": {"root", "path"}}
        if self.icl.noise_at == "server":
            left_out["icl"] = {"noise_at"}
        return self.model_dump(mode="json", exclude=left_out)

    def to_toml(self) -> str:
        """Return the settings as TOML; keys without a value are left out, which means unset."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_prompting(path: Path, overrides: Sequence[str] = ()) -> Prompting:
    """Read a TOML file of ``fedpriv icl`` and apply ``key=value`` overrides."""
    tree = read_toml(path)
    if PromptFiles.name not in tree and tree.keys() & (Experiment.model_fields.keys() - Prompting.model_fields.keys()):
        raise InputError(f"{path} is an experiment, and has no section [icl]; run fedpriv run {path}")
    override(tree, [parse_override(text) for text in overrides], "--set ")
    return validated(Prompting, tree, str(path))


@FILES.register
class PromptFiles(FileKind):
    """Files of ``fedpriv icl``."""

    name: ClassVar[str] = "icl"
    command: ClassVar[str] = "fedpriv icl"
    settings: ClassVar[type[Settings]] = Prompting
    kept_as: ClassVar[str] = "icl.toml"
    report: ClassVar[str] = "fedpriv.prompts.report:write_icl_report"

    @staticmethod
    @overriding
    def load(path: Path, overrides: Sequence[str] = ()) -> Prompting:
        return load_prompting(path, overrides)
