"""fedpriv.toml of a Flower app: settings of the tap, the mechanism, and how often clients answer."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from fedpriv.core.config import read_toml, validated
from fedpriv.core.errors import InputError
from fedpriv.core.settings import Count, Epsilon, Integer, Momentum, Positive, Real, Settings
from fedpriv.flower.arrays import Form
from fedpriv.mechanisms import MECHANISM, MechanismSettings, mechanism_settings
from fedpriv.mechanisms.machinery.base import NoiseAt

FILE = "fedpriv.toml"

_ABSOLUTE = (
    "allowed is an absolute path, such as /var/lib/{}/privacy; any other is another folder for another process, "
    "user or version of the app, and a new ledger there gives the budget back"
)


def _on_updates(given: Any) -> Any:
    """A mod sees whole updates only."""
    return {"unit": "update", **given} if isinstance(given, dict) else given


OnUpdates = Annotated[MechanismSettings, MECHANISM, BeforeValidator(_on_updates)]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Side = Annotated[Integer, Field(ge=1)]


class TapSettings(Settings):
    """The section ``[tap]``; what is not set is what the tap saw PyTorch do."""

    model: ImportPath | None = Field(
        None, description="what returns the network, 'package.module:Name'; needed by attacks"
    )
    folder: Path = Field(Path("runs"), description="where tap-RUN is made; FEDPRIV_RUNS goes before")
    record: str | None = Field(None, description="ArrayRecord with the parameters; none: arrays, or the only one")
    reply_record: str | None = Field(None, description="that of the reply; none: of the same name")
    reply: Form | None = Field(None, description="what a reply holds: weights, update, ...; none: as it was seen")
    rounds: Count = Field(1, description="the first so many messages of each type are written down of each client")
    keep_images: bool = Field(True, description="keep what the client trained on, to score attacks; they never read it")
    loss: ImportPath = Field("torch.nn.functional:cross_entropy", description="what is minimised, of logits and labels")
    records: ImportPath | None = Field(
        None,
        description="what returns of a client's number its records and others, two arrays of rows; for membership",
    )
    mean: tuple[Real, ...] = Field((0.0,), description="subtracted from images on [0, 1], one number or one a channel")
    std: tuple[Positive, ...] = Field((1.0,), description="what they are divided by then")
    shape: tuple[Side, Side, Side] | None = Field(None, description="(C, H, W) of one image")
    classes: Count | None = Field(None, description="number of classes")
    batch_size: Count | None = Field(None, description="images in one batch")
    local_steps: Count | None = Field(None, description="optimiser steps in a round")
    examples: Count | None = Field(None, description="distinct images behind an upload")
    learning_rate: Positive | None = Field(None, description="of the local optimiser")
    optimizer: Annotated[str, Field(pattern="^(sgd|adam)$")] | None = Field(None, description="sgd or adam")
    momentum: Momentum | None = Field(None, description="of the local SGD")
    noise: OnUpdates | None = Field(
        None, description="noise that the app or another library adds to what leaves, where the tap does not know it"
    )

    @field_validator("noise")
    @classmethod
    def _is_known(cls, noise: MechanismSettings | None) -> MechanismSettings | None:
        unknown = noise is not None and (not noise.on_gradients or noise.needs_redistribution)
        if noise is not None and (unknown or noise.noise is None or noise.noise_at != "clients"):
            raise InputError("allowed is a mechanism on gradients with the noise itself, such as sigma of gaussian")
        return noise


class NumbersSettings(Settings):
    """One of ``[[privatise.metrics]]``: numbers of a reply that leave with noise, and have a ledger, of their own."""

    name: str = Field(description="key of a metric, or RECORD/ARRAY", pattern=r"^[^/]+(/[^/]+)?$")
    type: str = Field(
        "train", description="of the message whose reply has them: train, evaluate, query, with an action"
    )
    size: Count = Field(1, description="how many numbers; an answer with others counts as zeros")
    whole: bool = Field(False, description="round what leaves to whole numbers, as counts are")
    mechanism: OnUpdates = Field(description="what bounds all of them, and adds noise")


class PrivatiseSettings(Settings):
    """The section ``[privatise]``."""

    folder: Path | None = Field(
        None, description="absolute path of each client's ledger: it must be kept across restarts and new versions"
    )
    record: str | None = Field(None, description="ArrayRecord with the parameters; none: arrays, or the only one")
    reply_record: str | None = Field(None, description="that of the reply; none: of the same name")
    reply: Form = Field("weights", description="what the app replies: weights, update, negated update, gradient")
    trained: tuple[str, ...] | None = Field(
        None, description="patterns of the arrays that training moves; all others leave as they came, without noise"
    )
    statistics: OnUpdates | None = Field(
        None, description="mechanism of running statistics, with a ledger of its own; none: they leave as they came"
    )
    metrics: tuple[NumbersSettings, ...] = Field((), description="numbers that leave with noise of their own")
    rounds: Count | None = Field(None, description="a client answers so often and then refuses; none: for ever")
    target_epsilon: Epsilon | None = Field(None, description="a client refuses once an answer would take it above")
    send: tuple[str, ...] = Field(
        (), description="keys of metrics and configs that leave as they are: no mechanism covers them"
    )
    passed: tuple[str, ...] = Field(
        (), alias="pass", description="message types and records that leave as they are: no mechanism covers them"
    )
    weight: str | None = Field(None, description="key of the metric that is 1 for all clients; none: num-examples")
    seed: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="noise that repeats, for experiments: anyone who knows the seed subtracts it"
    )

    @field_validator("passed")
    @classmethod
    def _covers_training(cls, passed: tuple[str, ...]) -> tuple[str, ...]:
        if "train" in passed:
            raise InputError("train is what privatise covers; allowed are other types, train.ACTION, records")
        return passed

    @field_validator("folder")
    @classmethod
    def _is_one_place(cls, folder: Path | None) -> Path | None:
        """Where a process starts, who starts it, and where Flower unpacks the app must not begin a new ledger."""
        if folder is not None and not folder.is_absolute():
            raise InputError(_ABSOLUTE.format("my-app"))
        return folder


def _no_mechanism() -> MechanismSettings:
    return mechanism_settings({"unit": "update"})


class FlowerSettings(Settings):
    """The whole file."""

    tap: TapSettings | None = None
    privatise: PrivatiseSettings = PrivatiseSettings()
    mechanism: OnUpdates = Field(default_factory=_no_mechanism)

    @model_validator(mode="after")
    def _fits(self) -> "FlowerSettings":
        config, own = self.mechanism, self.privatise
        others = [*([own.statistics] if own.statistics else []), *(each.mechanism for each in own.metrics)]
        _check(config, "clients", "sum")
        for each in others:
            _check(each, "clients")
        if any(not each.protects or each.noise is None for each in others) or (others and own.target_epsilon):
            raise InputError(
                "privatise.statistics and privatise.metrics have ledgers of their own: give each a mechanism with the "
                "noise itself, and privatise.rounds in place of privatise.target_epsilon"
            )
        weighted = own.weight is not None or {"num_examples", "fitres.num_examples"} & {*own.send, *own.passed}
        if config.noise_at == "sum" and weighted:
            raise InputError(
                f"mechanism.name = {config.name!r} needs equal weights: allowed are privatise.send, pass and weight "
                "without num_examples"
            )
        if len({each.name for each in own.metrics}) < len(own.metrics):
            raise InputError("privatise.metrics: each name is allowed once")
        if config.target is not None and self.privatise.rounds is None:
            raise InputError(
                f"mechanism.{config.target.key} needs privatise.rounds: how often a client answers at most"
            )
        return self


def _check(config: MechanismSettings, *places: NoiseAt) -> None:
    if config.unit != "update" or not config.on_gradients:
        raise InputError(
            f"mechanism {config.name} with unit = {config.unit!r}: a mod sees a client's whole "
            'update and no example; allowed is a mechanism on gradients with unit = "update"'
        )
    config.require_noise_at(*places)
    if config.noise_at == "sum" and not config.least_in_sum:
        raise InputError(
            "mechanism.survivors is not set: allowed is how many clients every sum has at least; no sum of fewer may "
            "be unmasked (reconstruction_threshold of SecAggPlusWorkflow)"
        )
    if config.needs_redistribution:
        raise InputError(
            f"mechanism.name = {config.name!r} shares its noise out by a public model, which a mod does not know"
        )


def read_settings(near: str | Path) -> FlowerSettings:
    """Read a file of settings (.toml), or the fedpriv.toml in a module's folder, or in one above it."""
    path = found_settings(near)
    if path is None:
        raise InputError(f"{FILE} is neither in {Path(near).absolute().parent} nor in a folder above it")
    settings = validated(FlowerSettings, read_toml(path), str(path))
    if settings.mechanism.protects and settings.privatise.folder is None:
        raise InputError(f"{path}: privatise.folder is not set: {_ABSOLUTE.format(_app_name(path))}")
    return settings


def _app_name(path: Path) -> str:
    """The name of the app in the pyproject.toml beside its settings, so that each app has a folder of its own."""
    project = path.parent / "pyproject.toml"
    return str(read_toml(project).get("project", {}).get("name", "my-app")) if project.is_file() else "my-app"


def found_settings(near: str | Path) -> Path | None:
    """Where the settings are; ``None``: nowhere."""
    path = Path(near).absolute()
    if path.suffix == ".toml":
        return path
    return next((folder / FILE for folder in path.parents if (folder / FILE).is_file()), None)
