"""The experiment: what one TOML file says, validated.

Every key has a default, a description and a range. A wrong key or value raises :class:`fedpriv.errors.InputError` with
one line that names the file, the key, what was given and what is allowed.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from fedpriv.errors import InputError

__all__ = [
    "AdversaryConfig",
    "ClosedFormConfig",
    "CustomConfig",
    "DataConfig",
    "DlgConfig",
    "EngineConfig",
    "Experiment",
    "FederationConfig",
    "IdlgConfig",
    "IgaConfig",
    "ImprintConfig",
    "MapConfig",
    "MechanismConfig",
    "ModelConfig",
    "ReportConfig",
    "TrainingConfig",
    "describe",
    "load_experiment",
    "load_run",
    "override",
    "read_toml",
    "validated",
]

Section = TypeVar("Section", bound=BaseModel)


def _not_bool(value: Any) -> Any:
    """Python takes true for 1; a person who writes true where a number belongs does not mean that."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a list that names something twice."""
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise ValueError(f"{twice[0]} is named twice")
    return values


Integer = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
# The bounds are far beyond use; they keep numbers inside float32 and loops finite.
Positive = Annotated[Real, Field(gt=0, le=1e9)]
NonNegative = Annotated[Real, Field(ge=0)]
Momentum = Annotated[Real, Field(ge=0, lt=1)]
Count = Annotated[Integer, Field(ge=1, le=10_000_000)]
Epsilon = Annotated[Real, Field(ge=1e-9, le=1e9)]

MOST_KAPPA = 1e7

MOST_MASKED = 1000  # clients in a sum of masked uploads, which is computed modulo 2^32

_LONGEST_VALUE = 200  # characters of a wrong value that an error quotes

# The noise of each mechanism, in its own term.
NOISE_PARAMETER = {"none": None, "gaussian": "sigma", "laplace": "scale", "vmf": "kappa", "hgm": "sigma"}

# These exclude each other: one of them says how much noise a mechanism makes.
NOISE_KEYS = {
    name: () if parameter is None else ("epsilon", parameter, "target_epsilon")
    for name, parameter in NOISE_PARAMETER.items()
}


# Attacks for which the clients are sent parameters of the adversary's own making, and the listeners who can do that.
ACTIVE_ATTACKS = ("imprint",)
ACTIVE_LISTENERS = ("malicious-server", "malicious-secure-aggregation")
# Listeners whom no single upload reaches, only the sum of a round's.
SUM_LISTENERS = ("secure-aggregation", "malicious-secure-aggregation")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Section):
    """Which data, where they lie, and how clients share them."""

    name: Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "lfw", "npz"] = Field(
        "digits", description="data set; digits needs no download, npz reads your own file"
    )
    path: str = Field("", description="the .npz file (x_train, y_train, x_test, y_test), for name = 'npz' only")
    root: str = Field("", description="folder of the data sets; empty: $FEDPRIV_DATA, else ./data")
    download: bool = Field(True, description="fetch a data set that is not in the folder")
    memory: Annotated[Integer, Field(ge=1, le=1_000_000)] = Field(
        4096, description="MiB that reading a data file may take: its arrays, unpacked, and the tensors made of them"
    )
    train_examples: Count | None = Field(None, description="use only this many training examples, drawn by the seed")
    partition: Literal["iid", "dirichlet", "shards"] = Field("iid", description="how clients share the training data")
    alpha: Positive = Field(0.5, description="Dirichlet concentration; small: clients hold few classes")
    shards_per_client: Count = Field(2, description="label-sorted shards a client gets, for partition = 'shards'")

    @model_validator(mode="after")
    def _has_its_file(self) -> Self:
        if self.name == "npz" and not self.path:
            raise ValueError("name = 'npz' needs data.path, the .npz file")
        return self


class ModelConfig(_Section):
    """The network that is trained."""

    name: str = Field("lenet", description="lenet, mlp, convnet, resnet, or your own as 'package.module:function'")
    init: Literal["default", "uniform"] = Field(
        "default", description="uniform: every weight from U(-0.5, 0.5), as in DLG"
    )
    hidden: tuple[Count, ...] = Field((1024, 1024), description="widths of the hidden layers, for mlp")
    activation: Literal["relu", "sigmoid", "tanh"] = Field("relu", description="between the hidden layers, for mlp")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        builtin = ("lenet", "mlp", "convnet", "resnet")
        if name not in builtin and ":" not in name:
            raise ValueError(
                f"allowed: {', '.join(builtin)}, or package.module:function{_suggest(name, builtin, else_known=False)}"
            )
        return name

    @property
    def is_own(self) -> bool:
        """Whether the network is not one of this project's."""
        return ":" in self.name


class FederationConfig(_Section):
    """Who takes part, how often, and what the server does with the uploads."""

    clients: Count = Field(8, description="number of clients")
    rounds: Count = Field(20, description="number of rounds")
    algorithm: Literal["fedsgd", "fedavg"] = Field(
        "fedsgd", description="fedsgd: upload one batch's gradient; fedavg: upload the change after local training"
    )
    clients_per_round: Count | None = Field(None, description="clients drawn for each round; unset: all")
    min_clients: Count = Field(1, description="usable uploads a round needs; below that the run fails")
    target_epsilon: Epsilon | None = Field(
        None, description="a client stops before its proven epsilon, at mechanism.delta, is above this; unset: no limit"
    )
    weighting: Literal["examples", "uniform"] = Field("examples", description="weight of a client in the mean")
    aggregation: Literal["mean", "median", "trimmed-mean", "krum"] = Field(
        "mean", description="of the uploads; all but mean withstand some wrong ones, and count every client once"
    )
    secure_aggregation: bool = Field(
        False, description="uploads go out masked, and the server learns their sum only (SecAgg)"
    )
    secure_limit: Positive = Field(
        8.0,
        description="secure aggregation: uploads are clipped to this in each coordinate, and rounded to 1 / 2^21 of it",
    )
    trim: Annotated[Real, Field(ge=0, lt=0.5)] = Field(
        0.2, description="trimmed-mean: share of the uploads left out at each end, in each coordinate"
    )
    malicious: Annotated[Integer, Field(ge=0, le=10_000_000)] = Field(
        1, description="krum: uploads of a round that may be wrong; a round needs two times as many and three more"
    )
    server_optimizer: Literal["sgd", "adam"] = Field("sgd", description="applied to the mean upload")
    server_learning_rate: Positive | None = Field(
        None, description="unset: training.learning_rate for fedsgd, 1 for fedavg"
    )
    server_momentum: Momentum = Field(0.0, description="of the server's SGD")
    round_timeout: Positive | None = Field(None, description="seconds to wait for uploads; unset: no limit")
    max_update_norm: Positive | None = Field(
        None, description="longer uploads (Euclidean norm) are refused; unset: only those that no mechanism lets out"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        asked = self.clients_per_round or self.clients
        if asked > self.clients:
            raise ValueError(f"clients_per_round = {asked} is more than clients = {self.clients}")
        if self.min_clients > asked:
            raise ValueError(f"min_clients = {self.min_clients} is more than the {asked} clients of a round")
        if self.needed > asked:
            raise ValueError(
                f"aggregation = 'krum' with malicious = {self.malicious} needs {self.needed} uploads a round, and "
                f"a round has {asked} clients"
            )
        return self

    @model_validator(mode="after")
    def _can_be_summed(self) -> Self:
        asked = self.clients_per_round or self.clients
        if not self.secure_aggregation:
            return self
        if not 2 <= asked <= MOST_MASKED:
            raise ValueError(f"secure_aggregation is of 2 to {MOST_MASKED} clients a round, not of {asked}")
        if self.aggregation != "mean":
            raise ValueError(f"secure_aggregation hides each upload, and aggregation = {self.aggregation!r} needs it")
        if self.max_update_norm is not None:
            raise ValueError("secure_aggregation hides each upload, and max_update_norm cannot be checked")
        return self

    @property
    def needed(self) -> int:
        """Usable uploads without which a round fails: ``min_clients``, and for Krum 2 f + 3 (Blanchard et al. 2017)."""
        return max(self.min_clients, 2 * self.malicious + 3 if self.aggregation == "krum" else 1)


class TrainingConfig(_Section):
    """Local training."""

    batch_size: Count = Field(32, description="examples in a batch (expected number, for poisson)")
    learning_rate: Positive = Field(0.1, description="of the local optimiser (fedavg) or of the server's step (fedsgd)")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="local optimiser, for fedavg")
    momentum: Momentum = Field(0.0, description="of the local SGD, for fedavg")
    local_epochs: Count = Field(1, description="passes over the client's data a round, for fedavg")
    sampling: Literal["shuffled", "fixed", "poisson"] = Field(
        "shuffled",
        description="batches: disjoint ones of a shuffled pass, fixed-size draws without replacement, or Poisson draws",
    )


class MechanismConfig(_Section):
    """What protects the uploads. Keys that the named mechanism does not read are ignored."""

    name: Literal["none", "gaussian", "laplace", "vmf", "hgm"] = Field("none", description="privacy mechanism")
    unit: Literal["example", "update"] = Field(
        "example", description="example: noise per example's gradient; update: once on the client's whole update"
    )
    epsilon: Epsilon | None = Field(
        None,
        description="nominal: vmf: the paper's, 2 kappa; laplace: of one participation, 1 / scale; gaussian, hgm: the "
        "whole run's at delta, on updates each upload's own, by calibration",
    )
    target_epsilon: Epsilon | None = Field(
        None, description="proven for each client's whole run at delta; the noise is calibrated"
    )
    kappa: Annotated[NonNegative, Field(le=MOST_KAPPA)] | None = Field(
        None, description="vmf: concentration; small: more noise"
    )
    sigma: Annotated[Real, Field(ge=1e-9, le=1e12)] | None = Field(
        None, description="gaussian, hgm: noise standard deviation over clip_norm"
    )
    scale: Annotated[Real, Field(ge=1e-9, le=1e12)] | None = Field(
        None, description="laplace: noise scale over clip_norm"
    )
    calibration: Literal["analytic", "extended", "classic"] = Field(
        "analytic", description="gaussian, hgm on updates: from epsilon to sigma; classic: epsilon <= 1 only"
    )
    clip_norm: Annotated[Real, Field(ge=1e-9, le=1e9)] = Field(
        1.0,
        description="bound of a gradient's norm: gaussian L2, laplace L1, hgm |x / sqrt(K r)|; vmf on updates: their "
        "public length",
    )
    clipping: Literal["flat", "layer"] = Field(
        "flat", description="gaussian: the whole gradient, or each of m tensors to clip_norm / sqrt(m)"
    )
    delta: Annotated[Real, Field(gt=0, lt=1)] = Field(1e-5, description="delta of every (epsilon, delta) statement")
    adjacency: Literal["replace-one", "zero-out"] = Field(
        "replace-one",
        description="which data sets must look alike: one example becomes any other; or (gaussian, hgm on Poisson "
        "batches) one that adds zero",
    )
    blocks: str = Field(
        "whole", description="vmf: one draw for the gradient, one a tensor (layer), or one each D numbers (size:D)"
    )
    redistribution: Literal["uniform", "layer", "public"] = Field(
        "uniform", description="hgm: r, the shares of the noise power: even, even over tensors, or from public images"
    )
    inflation: Annotated[Real, Field(gt=0, le=100)] = Field(
        1.0, description="hgm, public: power of the sensitivities that the shares follow; large: more uneven"
    )
    public_examples: Count = Field(64, description="hgm, public: test images that the shares are computed from")

    @field_validator("blocks")
    @classmethod
    def _block_size(cls, blocks: str) -> str:
        if blocks not in ("whole", "layer") and not re.fullmatch(r"size:[1-9][0-9]{0,11}", blocks):
            raise ValueError("allowed: whole, layer, or size:D with a whole number D of 1 or more, such as size:256")
        return blocks

    @model_validator(mode="after")
    def _one_noise_parameter(self) -> Self:
        keys = NOISE_KEYS[self.name]
        given = [key for key in keys if getattr(self, key) is not None]
        if not keys or len(given) == 1:
            return self
        others = sorted({key for each in NOISE_KEYS.values() for key in each if getattr(self, key) is not None})
        what = f"{' and '.join(others)} set, which {self.name} does not read" if others else "none is set"
        if given:
            what = f"{'both ' if len(given) == 2 else ''}{_enumerated(given, 'and')} are set"
        if len(given) > 1 and "target_epsilon" in given:
            what += "; to stop clients when they reach a target, set federation.target_epsilon"
        raise ValueError(f"{self.name} needs exactly one of {_enumerated(keys, 'or')}; {what}")

    @model_validator(mode="after")
    def _epsilon_fits(self) -> Self:
        if self.epsilon is None:
            return self
        if self.name == "vmf" and self.epsilon > 2 * MOST_KAPPA:
            raise ValueError(
                f"epsilon = {self.epsilon:g}: vmf allows up to {2 * MOST_KAPPA:g}, twice the largest kappa"
            )
        if self._calibrates_each_upload and self.calibration == "classic" and self.epsilon > 1:
            raise ValueError(
                f"calibration = 'classic' is proven for epsilon <= 1, not for epsilon = {self.epsilon:g}; "
                "use analytic or extended"
            )
        return self

    @property
    def read_keys(self) -> tuple[str, ...]:
        """The keys that have an effect with these settings, beside name and unit."""
        own: dict[str, tuple[str, ...]] = {
            "none": (),
            "gaussian": ("clip_norm", "clipping"),
            "laplace": ("clip_norm",),
            "vmf": ("blocks", "clip_norm") if self.unit == "update" else ("blocks",),
            "hgm": ("clip_norm", "redistribution"),
        }
        keys = (*NOISE_KEYS[self.name], *own[self.name])
        if self.name != "none":
            keys = (*keys, "delta")
        if self.name in ("gaussian", "hgm") and self.unit == "example":
            keys = (*keys, "adjacency")
        if self.name == "hgm" and self.redistribution == "public":
            keys = (*keys, "inflation", "public_examples")
        if self._calibrates_each_upload:
            keys = (*keys, "calibration")
        return keys

    @property
    def _calibrates_each_upload(self) -> bool:
        return self.name in ("gaussian", "hgm") and self.unit == "update" and self.epsilon is not None

    @property
    def noise(self) -> float | None:
        """The noise in the mechanism's own term (sigma, scale or kappa); ``None``: unset, or no mechanism."""
        parameter = NOISE_PARAMETER[self.name]
        noise: float | None = None if parameter is None else getattr(self, parameter)
        return noise

    @property
    def calibrated_epsilon(self) -> float | None:
        """What the noise of a client's whole run is calibrated to prove; ``None`` where it is not."""
        if self.target_epsilon is None and self.name in ("gaussian", "hgm") and self.unit == "example":
            return self.epsilon
        return self.target_epsilon

    def with_noise(self, noise: float) -> "MechanismConfig":
        """Return these settings with the noise itself (sigma, scale or kappa) in place of any target.

        Raises:
            ValueError: the mechanism makes no noise, or the number is out of range.
        """
        parameter = NOISE_PARAMETER[self.name]
        if parameter is None:
            raise ValueError(f"mechanism.name = {self.name!r} makes no noise")
        every = {key: None for keys in NOISE_KEYS.values() for key in keys}
        return MechanismConfig.model_validate({**self.model_dump(), **every, parameter: noise})


class DlgConfig(_Section):
    """Deep Leakage from Gradients (Zhu et al. 2019)."""

    iterations: Count = Field(300, description="L-BFGS iterations")
    restarts: Count = Field(8, description="random starts; the one with the lowest loss of its own is kept")


class IdlgConfig(DlgConfig):
    """Improved Deep Leakage from Gradients (Zhao et al. 2020): labels first."""


class ClosedFormConfig(_Section):
    """The first Linear layer's gradient read without optimisation: no settings."""

    iterations: ClassVar[int] = 1
    restarts: ClassVar[int] = 1


class MapConfig(_Section):
    """The most probable images given upload, noise and prior."""

    iterations: Count = Field(400, description="steps of Adam")
    restarts: Count = Field(1, description="random starts; the most probable result is kept")
    learning_rate: Positive = Field(0.05, description="of Adam, in standard deviations of the prior")


class IgaConfig(_Section):
    """Inverting Gradients (Geiping et al. 2020)."""

    iterations: Count = Field(2400, description="signed Adam steps")
    restarts: Count = Field(1, description="random starts; the one with the lowest loss of its own is kept")
    learning_rate: Positive = Field(0.1, description="of signed Adam, times 0.1 at 3/8, 5/8 and 7/8 of the steps")
    tv: NonNegative = Field(1e-4, description="weight of the total variation")


class CustomConfig(_Section):
    """Gradient matching of parts of your own choice."""

    objective: Literal["squared-distance", "cosine", "likelihood"] = Field(
        "cosine", description="how gradients are compared; likelihood: of the mechanism's noise"
    )
    optimiser: Literal["lbfgs", "adam", "signed-adam"] = Field(
        "signed-adam", description="lbfgs: own line searches, in float64; signed-adam: Adam that sees the signs only"
    )
    schedule: Literal["constant", "steps", "cosine"] = Field(
        "cosine", description="of Adam's learning rate; steps: times 0.1 at 3/8, 5/8 and 7/8"
    )
    variables: Literal["pixels", "decorrelated"] = Field(
        "pixels", description="decorrelated: coordinates in which pixels of photographs are independent"
    )
    start: Literal["normal", "uniform", "public-mean", "closed-form"] = Field(
        "normal", description="normal: of the variables; uniform: over the valid pixels; the others: around an image"
    )
    box: bool = Field(True, description="keep images within the valid range of pixels")
    read_labels: bool = Field(True, description="read labels off the last layer; where not, optimise them")
    iterations: Count = Field(1000, description="steps")
    restarts: Count = Field(1, description="random starts; the one with the lowest loss of its own is kept")
    learning_rate: Positive = Field(0.1, description="of Adam, at the start")
    tv: NonNegative = Field(1e-4, description="weight of the total variation")
    public_mean: NonNegative = Field(0.0, description="weight of the squared distance from the mean public image")
    gaussian: NonNegative = Field(0.0, description="weight of the normal distribution fitted to public images")


class ImprintConfig(_Section):
    """Robbing the Fed (Fowl et al. 2022): parameters that the server has made; only for an active adversary."""

    iterations: ClassVar[int] = 1
    restarts: ClassVar[int] = 1

    bins: Annotated[Integer, Field(ge=2, le=10_000_000)] | None = Field(
        None, description="rows of the first layer used as bins for the images' brightness; unset: all"
    )
    public_examples: Annotated[Integer, Field(ge=2, le=10_000_000)] = Field(
        10_000, description="public images (test images), at most, whose brightness sets the cut points between bins"
    )


class AdversaryConfig(_Section):
    """Who listens and what they try."""

    threat_model: Literal[
        "honest-but-curious-server",
        "malicious-server",
        "secure-aggregation",
        "malicious-secure-aggregation",
        "network-plaintext",
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
    attacks: Annotated[
        tuple[Literal["dlg", "idlg", "iga", "closed_form", "imprint", "map", "custom"], ...], AfterValidator(_distinct)
    ] = Field(("dlg", "iga"), description="reconstruction attacks; [] for none")
    rounds: Annotated[tuple[Count, ...], AfterValidator(_distinct)] = Field(
        (1,), description="rounds whose uploads are attacked, counted from 1"
    )
    victims: Count = Field(4, description="uploads attacked in each of these rounds, lowest client first")
    counterfactual: bool = Field(True, description="also attack what the client would have sent without the mechanism")
    join_uploads: bool = Field(
        False,
        description="attack a client's uploads of all attacked rounds together, where it uses all its data in each",
    )
    success_ssim: Annotated[Real, Field(gt=0, le=1)] = Field(
        0.6, description="an image counts as recovered from this SSIM on, if it also beats the guess"
    )
    dlg: DlgConfig = Field(default_factory=lambda: DlgConfig())
    idlg: IdlgConfig = Field(default_factory=lambda: IdlgConfig())
    iga: IgaConfig = Field(default_factory=lambda: IgaConfig())
    closed_form: ClosedFormConfig = Field(default_factory=lambda: ClosedFormConfig())
    imprint: ImprintConfig = Field(default_factory=lambda: ImprintConfig())
    custom: CustomConfig = Field(default_factory=lambda: CustomConfig())
    map: MapConfig = Field(default_factory=lambda: MapConfig())

    @model_validator(mode="after")
    def _may_be_active(self) -> Self:
        active = [name for name in self.attacks if name in ACTIVE_ATTACKS]
        if not active:
            return self
        if self.threat_model not in ACTIVE_LISTENERS:
            raise ValueError(
                f"attacks: {active[0]} sends clients parameters of the adversary's own making, and threat_model = "
                f"{self.threat_model!r} only listens; allowed: {', '.join(ACTIVE_LISTENERS)}"
            )
        for key in ("knows_batch_size", "knows_public_data"):
            if not getattr(self, key):
                raise ValueError(f"attacks: {active[0]} needs what {key} = false withholds")
        if self.threat_model == "malicious-secure-aggregation" and self.passive_attacks:
            raise ValueError(
                f"attacks: under {self.threat_model} {active[0]} takes the one sum of each attacked round, and leaves "
                f"{self.passive_attacks[0]} none; make them in runs of their own"
            )
        return self

    @property
    def crafts(self) -> bool:
        """Whether the server sends parameters of its own making in the attacked rounds."""
        return any(name in ACTIVE_ATTACKS for name in self.attacks)

    @property
    def passive_attacks(self) -> tuple[str, ...]:
        """The attacks on uploads of clients that were sent the model itself."""
        return tuple(name for name in self.attacks if name not in ACTIVE_ATTACKS)


class EngineConfig(_Section):
    """Where the clients run."""

    name: Literal["auto", "inline", "ray"] = Field(
        "auto", description="auto: ray with a GPU or an address, else inline"
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
        256, description="MiB that computing per-example gradients may take beside their result"
    )
    cpus_per_client: Positive = Field(1.0, description="Ray's share of CPUs for one client")
    gpus_per_client: NonNegative = Field(0.0, description="Ray's share of a GPU for one client")
    attack_tasks: Annotated[Integer, Field(ge=1, le=1024)] = Field(
        1, description="Ray tasks that an attack's uploads are spread over, with a client's shares each; 1: none, here"
    )
    address: str = Field("", description="a running Ray cluster, such as auto or ray://host:10001")


class ReportConfig(_Section):
    """What the report shows."""

    title: str = Field("", description="heading; empty: the experiment's name")
    pictures: Count = Field(16, description="victims shown at most")


class Experiment(_Section):
    """One experiment, complete: the same object and machine give the same bytes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "experiment", description="names the run"
    )
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = Field(
        0, description="every random choice derives from it but the noise, unless noise = 'reproducible'"
    )
    noise: Literal["secret", "reproducible"] = Field(
        "secret",
        description="of a mechanism: keyed by the operating system, and kept in the run's folder; or by the seed, for "
        "experiments that must repeat: whoever guesses the seed can subtract it",
    )
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    federation: FederationConfig = Field(default_factory=lambda: FederationConfig())
    training: TrainingConfig = Field(default_factory=lambda: TrainingConfig())
    mechanism: MechanismConfig = Field(default_factory=lambda: MechanismConfig())
    adversary: AdversaryConfig = Field(default_factory=lambda: AdversaryConfig())
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    report: ReportConfig = Field(default_factory=lambda: ReportConfig())

    @model_validator(mode="before")
    @classmethod
    def _masked_uploads_leave_the_sum(cls, tree: Any) -> Any:
        """Where uploads are masked and the experiment does not say who listens, the sum is attacked."""
        if not isinstance(tree, Mapping):
            return tree
        federation, adversary = tree.get("federation"), tree.get("adversary", {})
        masked = isinstance(federation, Mapping) and federation.get("secure_aggregation") is True
        if not masked or not isinstance(adversary, Mapping):
            return tree
        return {**tree, "adversary": {"threat_model": "secure-aggregation", **adversary}}

    @model_validator(mode="after")
    def _rooms_agree(self) -> Self:
        late = [number for number in self.adversary.rounds if number > self.federation.rounds]
        if self.adversary.attacks and late:
            raise ValueError(
                f"adversary.rounds names round {late[0]}, but federation.rounds = {self.federation.rounds}"
            )
        return self

    @model_validator(mode="after")
    def _server_sees_what_it_aggregates(self) -> Self:
        rule, listener = self.federation.aggregation, self.adversary.threat_model
        if rule == "mean":
            return self
        if listener in SUM_LISTENERS:
            raise ValueError(
                f"federation.aggregation = {rule!r} needs each upload, and under adversary.threat_model = {listener!r} "
                "the server has their sum only; use mean"
            )
        if self.adversary.crafts:
            raise ValueError(
                f"federation.aggregation = {rule!r} with imprint: uploads of deceived clients are left out, and too "
                "few may be left to compare; use mean"
            )
        return self

    @model_validator(mode="after")
    def _sums_hold_what_they_should(self) -> Self:
        listener = self.adversary.threat_model
        if self.federation.secure_aggregation and self.adversary.crafts and listener not in SUM_LISTENERS:
            raise ValueError(
                f"federation.secure_aggregation with imprint under adversary.threat_model = {listener!r}: the "
                "server reads the sum only; use malicious-secure-aggregation"
            )
        return self

    @property
    def hears_masked(self) -> bool:
        """Whether single uploads reach the adversary, but masked."""
        return self.federation.secure_aggregation and self.adversary.threat_model not in SUM_LISTENERS

    @model_validator(mode="after")
    def _uploads_for_every_attack(self) -> Self:
        asked, adversary = self.federation.clients_per_round or self.federation.clients, self.adversary
        if adversary.crafts and adversary.passive_attacks and adversary.victims >= asked:
            raise ValueError(
                f"adversary.victims = {adversary.victims}: imprint takes the uploads of the first {adversary.victims} "
                f"clients, and of {asked} that leaves {adversary.passive_attacks[0]} none"
            )
        return self

    @model_validator(mode="after")
    def _adjacency_is_proven(self) -> Self:
        mechanism, sampling = self.mechanism, self.training.sampling
        if mechanism.adjacency == "replace-one" or mechanism.name == "none":
            return self
        if "adjacency" not in mechanism.read_keys or sampling != "poisson":
            raise ValueError(
                "mechanism.adjacency = 'zero-out' is for gaussian and hgm on examples in Poisson batches; with "
                f"mechanism.name = {mechanism.name!r}, mechanism.unit = {mechanism.unit!r} and training.sampling = "
                f"{sampling!r} allowed is replace-one"
            )
        return self

    @model_validator(mode="after")
    def _target_can_be_kept(self) -> Self:
        stop, calibrated = self.federation.target_epsilon, self.mechanism.calibrated_epsilon
        if stop is None:
            return self
        if self.mechanism.name == "none":
            raise ValueError(f"federation.target_epsilon = {stop:g}, but mechanism.name = 'none' proves no epsilon")
        if calibrated is not None and calibrated < stop:
            key = "epsilon" if self.mechanism.target_epsilon is None else "target_epsilon"
            raise ValueError(
                f"federation.target_epsilon = {stop:g} is above mechanism.{key} = {calibrated:g}, for which the noise "
                "of the whole run is calibrated: no client would reach it"
            )
        return self

    @property
    def keeps_secret(self) -> bool:
        """Whether the run has a secret: a mechanism whose noise nobody may draw again."""
        return self.noise == "secret" and self.mechanism.name != "none"

    @property
    def hides_batches(self) -> bool:
        """Whether what is proven rests on nobody knowing who is in a batch."""
        return self.keeps_secret and self.training.sampling != "shuffled"

    @property
    def server_learning_rate(self) -> float:
        """The step size of the server, with its default resolved."""
        if self.federation.server_learning_rate is not None:
            return self.federation.server_learning_rate
        return self.training.learning_rate if self.federation.algorithm == "fedsgd" else 1.0

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what clients release, without those of the machine that they are computed on.

        Left out is how long a run goes on, who listens, and what is made of it afterwards.
        """
        tree = self.model_dump(mode="json", exclude={"name", "noise", "adversary", "report", "engine"})
        for section, keys in _INDECISIVE.items():
            for key in keys:
                del tree[section][key]
        return tree

    def to_toml(self) -> str:
        """Return the resolved experiment as TOML; keys without a value are left out, which means unset."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


# Where data lie, how long a run goes on, and what the server makes of uploads.
_INDECISIVE = {
    "data": ("root", "download"),
    "federation": (
        "rounds",
        "clients_per_round",
        "min_clients",
        "target_epsilon",
        "aggregation",
        "trim",
        "malicious",
        "server_optimizer",
        "server_learning_rate",
        "server_momentum",
        "round_timeout",
        "max_update_norm",
    ),
}


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a TOML file and apply ``key=value`` overrides.

    An override of one noise parameter (say mechanism.kappa) replaces the file's choice among those that exclude each
    other (say mechanism.epsilon).

    Args:
        path: the TOML file.
        overrides: such as ``"mechanism.epsilon=50"``; values are TOML, and a bare word is a string.

    Raises:
        InputError: the file cannot be read or parsed, or a key or value is not allowed.
    """
    return _loaded(read_toml(path), path, overrides)


def load_run(folder: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read the resolved experiment in the folder of a run, as :func:`load_experiment` reads a file.

    Versions that knew no mechanism.adjacency accounted for gaussian and hgm on Poisson batches under zero-out. Their
    runs keep it: calibrated noise must not change in the middle of a run, nor for those who attack it.

    Args:
        folder: of the run; config.toml is read.
        overrides: as of :func:`load_experiment`.

    Raises:
        InputError: as of :func:`load_experiment`.
    """
    path = folder / "config.toml"
    tree = read_toml(path)
    mechanism, training = tree.get("mechanism"), tree.get("training")
    if isinstance(mechanism, dict) and isinstance(training, dict) and "adjacency" not in mechanism:
        sampled = training.get("sampling") == "poisson" and mechanism.get("unit") == "example"
        if sampled and mechanism.get("name") in ("gaussian", "hgm"):
            mechanism["adjacency"] = "zero-out"
    return _loaded(tree, path, overrides)


def _loaded(tree: dict[str, Any], path: Path, overrides: Sequence[str]) -> Experiment:
    override(tree, [_parse_override(text) for text in overrides], "--set ")
    return validated(Experiment, tree, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested tables.

    Raises:
        InputError: the file cannot be read or parsed.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {reason}") from None


def describe(experiment: Experiment) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (key, value, default, description) for every key, in the order of the sections."""
    yield from _describe(experiment, type(experiment)(), "")


def _describe(model: BaseModel, default: BaseModel, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    for key, field in type(model).model_fields.items():
        value, usual = getattr(model, key), getattr(default, key)
        if isinstance(value, BaseModel):
            yield from _describe(value, usual, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, usual, field.description or ""


def override(tree: dict[str, Any], values: Sequence[tuple[Sequence[str], Any]], source: str) -> None:
    """Put values into the nested tables of an experiment file, in place.

    One of the noise parameters that exclude each other replaces whichever the tables have.

    Args:
        tree: the tables.
        values: pairs of a key's parts, such as ``("mechanism", "epsilon")``, and its value.
        source: what gave the keys, put before them in an error.

    Raises:
        InputError: a part of a key is a value in the tables, not a section.
    """
    noise = {key for keys in NOISE_KEYS.values() for key in keys}
    if any(list(keys) == ["mechanism", leaf] for keys, _ in values for leaf in noise):
        section = tree.get("mechanism")
        if isinstance(section, dict):
            for leaf in noise:
                section.pop(leaf, None)
    for keys, value in values:
        node = tree
        for key in keys[:-1]:
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise InputError(f"{source}{'.'.join(keys)}: {key} is a value, not a section")
            node = child
        node[keys[-1]] = value


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, separator, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not separator or not all(keys):
        raise InputError(f"--set {text}: expected key=value, such as mechanism.epsilon=50")
    try:
        tree = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return keys, value.strip()
    except (ValueError, RecursionError):
        raise InputError(f"--set {key}: the value is too long or too deep") from None
    if len(tree) > 1:
        raise InputError(f"--set {key}: one value is wanted; set {list(tree)[1]} on its own")
    return keys, tree["value"]


def validated(kind: type[Section], tree: Mapping[str, Any], source: str) -> Section:
    """Make settings of one kind from nested tables.

    Args:
        kind: what is to be made, such as :class:`Experiment`.
        tree: the tables.
        source: the file, for people.

    Raises:
        InputError: a key or value is not allowed.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{source}: {_explain(error.errors()[0], kind)}") from None


def _explain(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    given = detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggest(location[-1], _keys_at(location[:-1], kind))}"
    message = _plain_words(detail, kind)
    if detail["type"] == "value_error" and isinstance(given, dict):
        return f"{key}: {message}" if key else message
    shown = repr(given)
    shown = shown if len(shown) <= _LONGEST_VALUE else f"{shown[: _LONGEST_VALUE - 4]} ..."
    return f"{key} = {shown} is not allowed: {message[0].lower()}{message[1:]}"


def _plain_words(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    """What is allowed, without the validator's own terms."""
    message = detail["msg"].removeprefix("Value error, ")
    match detail["type"]:
        case "model_type":
            location = [str(part) for part in detail["loc"]]
            section, known = ".".join(location), ", ".join(_keys_at(location, kind))
            return f"{section} is a section, such as [{section}] with keys of its own; known: {known}"
        case "tuple_type":
            return "a list is wanted, such as [1]"
        case "string_pattern_mismatch":
            return "letters, digits, dots, hyphens and underscores are allowed, a letter or digit first"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", message)
            return f"allowed: {', '.join(choices)}{_suggest(str(detail['input']), choices, else_known=False)}"
        case _:
            return message


def _keys_at(location: list[str], kind: type[BaseModel]) -> list[str]:
    """All keys of the section at ``location``, and the section names at the top."""
    model = kind
    for part in location:
        annotation = model.model_fields[part].annotation
        model = next(one for one in (annotation, *get_args(annotation)) if isinstance(one, type))
    return list(model.model_fields)


def _enumerated(words: Sequence[str], last: str) -> str:
    """Words as a person lists them: a, b or c."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def _suggest(word: str, known: Sequence[str], *, else_known: bool = True) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if else_known else ""
