"""The experiment made concrete: data, shares, network and plans; each process builds its own, none of it travels."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.accounting.response import Response
from fedpriv.core.algorithm import algorithm_of, preparation_of
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.plan import Plan, Plans, kinds_of
from fedpriv.core.randomness import Secret, numpy_stream, seeded_generators, torch_stream
from fedpriv.core.registry import DATASETS
from fedpriv.core.sections import NoiseInPass, forward_noise
from fedpriv.core.threads import cpu_threads
from fedpriv.data.canaries import with_canaries
from fedpriv.data.datasets import Dataset, files_digest, load_dataset, place_of
from fedpriv.data.partition import Shares, partition_indices
from fedpriv.gradients import Route, Vector, find_route, refuse_mixed_examples
from fedpriv.gradients.calls import coupled_layers
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.mechanisms.machinery.block_sum import makes_programs
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.models.machinery.build import build_model, model_digest

T = TypeVar("T")

# Random examples on which it is found out how gradients are computed.
_TRIED = 8
# Random images with which own models are tried: most often the first few are enough.
_OWN_TRIED = 13


@dataclass(frozen=True)
class State:
    """A model's numbers: what is trained, and what is only tracked (the running statistics of BatchNorm)."""

    parameters: Vector
    buffers: Vector

    def load_into(self, model: nn.Module) -> None:
        """Copy the numbers into ``model``, onto the device it is on."""
        with torch.no_grad():
            for name, target in trained_parameters(model).items():
                target.copy_(self.parameters[name])
            for name, target in tracked_buffers(model).items():
                target.copy_(self.buffers[name])

    @staticmethod
    def of(model: nn.Module) -> "State":
        """Return a copy, on the CPU, of the numbers in ``model``."""
        return State(
            {name: value.detach().cpu().clone() for name, value in trained_parameters(model).items()},
            {name: value.detach().cpu().clone() for name, value in tracked_buffers(model).items()},
        )

    @property
    def nbytes(self) -> int:
        """The size of all numbers, in bytes."""
        return sum(value.nbytes for vector in (self.parameters, self.buffers) for value in vector.values())

    def digest(self) -> bytes:
        """Return SHA-256 of the names, types, shapes and bits of all numbers; they are on the CPU."""
        digest = sha256()
        for name, value in (*self.parameters.items(), *self.buffers.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.contiguous().numpy().data)
        return digest.digest()


def trained_parameters(model: nn.Module) -> Vector:
    """The parameters of a model that are trained; frozen ones never change, so they are not shared."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def tracked_buffers(model: nn.Module) -> Vector:
    """The floating-point buffers of a model; integer ones count batches and are not shared."""
    return {name: value for name, value in model.named_buffers() if value.is_floating_point()}


_TESTS = (
    "All test examples are taken as public, also where a share of the clients' own data was set apart for them: no "
    "figure covers these."
)
_WEIGHTS = (
    "The weights that the network starts from were read from files, and are taken as public: no figure covers the data "
    "that they were learnt from, such as these clients' in an earlier run."
)


@dataclass(frozen=True)
class World:
    """One experiment, built."""

    experiment: Experiment  # the settings that it was built from
    dataset: Dataset  # training and test data
    partitions: Sequence[np.ndarray]  # for each client the indices of its training examples, ascending
    # a working copy of the network on the device, in the numbers of `engine.precision` (float32 for bfloat16); whoever
    # uses it loads a State first
    model: nn.Module
    model_digest: bytes  # SHA-256 of the network's code and of the numbers that it was built with
    initial: State  # the numbers that training starts from
    device: torch.device  # where models and data are computed
    plans: Sequence[Plan]  # one for each client
    secret: Secret  # what the noise is keyed by in a simulation, and batches where they are hidden
    forward_noise: NoiseInPass | None = None  # inside the model's forward pass; `None`: there is none
    # (N,), training labels before clients changed theirs, for the referee alone; `None`: nobody did
    unchanged: Tensor | None = None

    @cached_property
    def sizes(self) -> np.ndarray:
        """(C,), int64: how many examples each client holds."""
        shares = self.partitions
        return shares.sizes if isinstance(shares, Shares) else np.array([len(rows) for rows in shares], dtype=np.int64)

    @property
    def alike(self) -> np.ndarray:
        """(C,), int64: of each client which plan it has, as ``fedpriv.core.plan.kinds_of`` numbers them."""
        return kinds_of(self.plans)

    @cached_property
    def taken_as_public(self) -> tuple[str, ...]:
        """What a reader of anything proven must know: what of data and network is public though nobody has told it."""
        files = self.experiment.model.files(place_of(self.experiment.data).root)
        weights = (_WEIGHTS,) if any(path.suffix != ".json" for path in files) else ()
        tests = (_TESTS,) if DATASETS[self.dataset.name].needs_path else ()
        return (*self.dataset.notes, *tests, *weights)

    @property
    def true_labels(self) -> Tensor:
        """The training labels (N,) as they were before clients changed any; for the referee."""
        return self.dataset.y_train if self.unchanged is None else self.unchanged

    @property
    def corrected(self) -> Response | None:
        """What the training loss corrects for; ``None``: it takes labels as they are."""
        preparation = preparation_of(self.experiment)
        return None if preparation is None else preparation.correction(self)

    def prepared(self, clients: Iterable[int], secret: Secret) -> "World":
        """Return the world in which these clients' labels are changed, each by its own stream of the secret."""
        preparation = preparation_of(self.experiment)
        if preparation is None:
            return self
        labels = self.dataset.y_train.clone()
        for client in clients:
            rows, noise = torch.from_numpy(self.partitions[client]), secret.stream(preparation.name, client)
            labels[rows] = preparation.changed(self, self.true_labels[rows], noise)
        return replace(self, dataset=replace(self.dataset, y_train=labels), unchanged=self.true_labels)

    def received(self, client: int, before: State) -> bytes:
        """Return the digest of all that a client's answer depends on, apart from the round: data and code included."""
        return sha256(self.sent(before) + self.built_from + _written(self.plans[client].config)).digest()

    @cached_property
    def built_from(self) -> bytes:
        """What this was built from, as far as it decides what clients release: data, code and settings."""
        decisive = json.dumps(self.experiment.decisive(), sort_keys=True)
        return self.dataset.digest + self.model_digest + decisive.encode()

    @cached_property
    def origin(self) -> bytes:
        """The digest of what a run reads from files that may be replaced meanwhile: its data and its network."""
        return sha256(self.dataset.digest + self.model_digest).digest()

    @cached_property
    def unprotected(self) -> "World":
        """The same without a mechanism; data and network are these, and not read again."""
        experiment = self.experiment.model_copy(update={"mechanism": mechanism_settings({})})
        return replace(self, experiment=experiment, plans=Plans(experiment, self.sizes, _numbers(self.initial)))

    def signs(self, round_number: int) -> np.random.Generator:
        """The public signs by which all clients of a round flatten their updates, where noise is in shares."""
        return numpy_stream(self.experiment.seed, "flattening", round_number)

    def kept(self, compute: Callable[["World"], T]) -> T:
        """Return what follows from this world alone, computed once."""
        if compute not in self._results:
            self._results[compute] = compute(self)
        return self._results[compute]

    @cached_property
    def _results(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def measured_rows(self) -> Tensor:
        """The test images that the model is measured on: all that it has not learnt, ascending."""
        spent = torch.zeros(len(self.dataset.x_test), dtype=torch.bool)
        spent[algorithm_of(self.experiment).spent_rows(self)] = True
        return torch.nonzero(~spent).flatten()

    def sent(self, before: State) -> bytes:
        """Return the digest of parameters that are sent out, and of what they are computed with."""
        engine = self.experiment.engine.model_dump(mode="json", include=_COMPUTED_WITH) | {"device": str(self.device)}
        if self.device.type == "cuda" and not makes_programs(self.device):
            engine["noise"] = "made by the processor"  # other numbers, which must not answer the same question again
        return sha256(before.digest() + json.dumps(engine, sort_keys=True).encode()).digest()

    def examples(self, client: int, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return normalised images (B, C, H, W) and labels (B,) of a client, on the device."""
        rows = torch.from_numpy(self.partitions[client][positions])
        images = self.dataset.x_train.index_select(0, rows)
        return self.network_input(images), self.dataset.y_train[rows].to(self.device)

    def autocast(self) -> torch.autocast:
        """Compute forward and backward passes inside the block in bfloat16 where the settings ask for that."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.engine.precision == "bfloat16")

    @cached_property
    def route(self) -> Route:
        """How gradients are computed, whatever the batch; found out on random images and the initial parameters."""
        images, labels = random_examples(self.experiment, self.dataset, _TRIED)
        # A model of its own, because one that was trained may hold what cannot be copied.
        model = network_of(self.experiment, self.dataset)
        model.to(self.device, precision_of(self.experiment)).train()
        self.initial.load_into(model)
        memory, targets = self.experiment.engine.gradient_bytes, labels.to(self.device)
        with seeded_generators(0, self.device), self.autocast():
            return find_route(model, example_losses, self.network_input(images), targets, chunk_bytes=memory)

    def uploaded_rows(self, client: int, round_number: int) -> Tensor:
        """The training examples in a client's upload of a round (counted from 1), as rows of the data set."""
        plan = self.plans[client]
        positions = np.unique(np.concatenate([plan.batch(step) for step in plan.steps(round_number)]))
        return torch.from_numpy(self.partitions[client][positions])

    def network_input(self, images: Tensor) -> Tensor:
        """Normalise images (B, C, H, W), uint8, in the network's numbers and on its device."""
        return self.dataset.normalise(images, precision_of(self.experiment)).to(self.device)

    def class_counts_of(self, labels: Tensor, client: int) -> list[int]:
        """The number of a client's examples of each class among these labels (N,) of the training data."""
        own = self.dataset.kinds(labels).numpy()[self.partitions[client]]
        return np.bincount(own, minlength=len(self.dataset.counted)).tolist()


def choose_device(name: str) -> torch.device:
    """Return the device that ``engine.device`` names; auto is CUDA where there is one, else the CPU."""
    present: Mapping[str, bool] = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        return torch.device("cuda" if present["cuda"] else "cpu")
    if not present[name]:
        allowed = ", ".join(device for device, there in present.items() if there)
        raise InputError(
            key="engine.device", given=name, allowed=f"this machine has no {name} device; present: {allowed}"
        )
    return torch.device(name)


# The settings of the engine that numbers depend on, if only their last digits.
_COMPUTED_WITH = {"threads", "precision", "gradient_memory"}


@lru_cache(maxsize=64)
def _written(mechanism: MechanismSettings) -> bytes:
    """A client's mechanism written out, which takes longer than a step of a small network."""
    return mechanism.model_dump_json().encode()


def build_world(experiment: Experiment, secret: Secret | None = None) -> World:
    """Load the data, share them out, build network and plans; once a process, as long as the files stay the same."""
    dataset = load_dataset(experiment.data, experiment.seed)
    weights = files_digest(experiment.model.files(place_of(experiment.data).root))
    world = _built(experiment, secret, dataset, weights)
    if experiment.model.is_own:
        # What its code reads nobody knows: built anew, it says whether it is the same.
        now = model_digest(network_of(experiment, dataset), experiment.model.module)
        if now != world.model_digest:
            _built.cache_clear()
            return _built(experiment, secret, dataset, weights)
    return world


def build_world_around(experiment: Experiment, dataset: Dataset) -> World:
    """Do the same with a data set that is at hand, whatever the settings say of data."""
    return _built(experiment, None, dataset, b"")


@lru_cache(maxsize=2)
def _built(experiment: Experiment, secret: Secret | None, dataset: Dataset, _: bytes) -> World:
    """``_``: the digest of pretrained weights, so that replaced ones are noticed."""
    device = choose_device(experiment.engine.device)
    if device.type == "mps" and experiment.engine.precision == "float64":
        raise experiment.wrong("engine.precision", "mps devices have no float64", "use engine.device = 'cpu'")
    kinds, clients = dataset.kinds(dataset.y_train).numpy(), experiment.federation.clients
    keys = None if dataset.keys is None else dataset.keys.train
    partitions = partition_indices(kinds, experiment.data, clients, experiment.seed, keys)
    dataset = with_canaries(dataset, partitions, experiment.data.canaries, experiment.seed)
    model = network_of(experiment, dataset)
    check_fitness(experiment, dataset, model)
    digest = model_digest(model, experiment.model.module)
    model.to(device, precision_of(experiment))
    initial = State.of(model)
    redistribution = redistribution_of(experiment, dataset, model, trained_parameters(model))
    plans = Plans(experiment, partitions.sizes, _numbers(initial), redistribution, secret)
    plans.check()
    algorithm_of(experiment).check_shares(experiment, dataset, partitions.sizes)
    secret = secret or Secret.of_seed(experiment.seed)
    asked = forward_noise(experiment)
    noise = None if asked is None else asked.scaled(experiment, dataset, model)
    world = World(experiment, dataset, partitions, model, digest, initial, device, plans, secret, noise)
    return world.prepared(range(clients), secret)


def _numbers(state: State) -> tuple[int, ...]:
    """How many numbers each parameter has."""
    return tuple(value.numel() for value in state.parameters.values())


# ---- the network -----------------------------------------------------------------------------------------------------


def network_of(experiment: Experiment, dataset: Dataset) -> nn.Module:
    """The network that the settings name, with a place for noise where they ask for some; on the CPU, in float32."""
    sequences = dataset.sequences(place_of(experiment.data).root)
    model = build_model(experiment.model, dataset.shape, dataset.classes, experiment.seed, dataset.columns, sequences)
    noise = forward_noise(experiment)
    if noise is None:
        return model
    try:
        return noise.put_into(model, dataset.shape, experiment.seed)
    except InputError as error:
        raise experiment.model.refusal(str(error)) from error


def precision_of(experiment: Experiment) -> torch.dtype:
    """The numbers of the network: float32 also where passes are computed in bfloat16."""
    return torch.float64 if experiment.engine.precision == "float64" else torch.float32


def redistribution_of(
    experiment: Experiment, dataset: Dataset, model: nn.Module, parameters: Vector
) -> Redistribution | None:
    """How the noise is shared out, the same for all clients and the whole run; from the initial parameters."""

    def public(wanted: int) -> tuple[nn.Module, Tensor]:
        if wanted > (there := len(dataset.x_test)):
            allowed = f"{dataset.name} has {there} test images"
            raise InputError(key="mechanism.public_examples", given=wanted, allowed=allowed)
        images = public_images(dataset, wanted, experiment.seed, "public-images")
        normalised = dataset.normalise(images, precision_of(experiment))
        return model.eval(), normalised.to(next(model.parameters()).device)

    with cpu_threads(experiment.engine.threads):
        return experiment.mechanism.redistributed(parameters, public)


def public_images(dataset: Dataset, count: int, seed: int, purpose: str) -> Tensor:
    """Return so many test images, which are public in this laboratory and no client's."""
    chosen = numpy_stream(seed, purpose).choice(len(dataset.x_test), size=count, replace=False)
    return dataset.x_test[torch.from_numpy(np.sort(chosen))]


# ---- checks that need the data and the network, before training ------------------------------------------------------


def check_fitness(experiment: Experiment, dataset: Dataset, model: nn.Module) -> None:
    """Refuse data and networks of which nothing could be learnt or, with a mechanism, nothing could be proven."""
    if dataset.classes < 2:
        raise experiment.wrong("data.name", "the labels name one class; expected at least two")
    _refuse_few_test_examples(experiment, dataset)
    if experiment.federation.evaluate == "clients":
        dataset.tested_keys()
    if dataset.is_next:
        _refuse_labels(experiment)
    if (preparation := preparation_of(experiment)) is not None:
        preparation.check_data(experiment, dataset)
    algorithm_of(experiment).check_network(experiment, dataset, model)
    if experiment.mechanism.protects:
        _refuse_coupled(experiment, model)
        _refuse_leaks(experiment, model, dataset)


def _refuse_few_test_examples(experiment: Experiment, dataset: Dataset) -> None:
    """Refuse to evaluate on more test examples than there are."""
    there, wanted = len(dataset.x_test), experiment.federation.evaluate_examples
    if wanted is not None and wanted > there:
        raise experiment.wrong("federation.evaluate_examples", f"{dataset.name} has {there} test examples")


def _refuse_labels(experiment: Experiment) -> None:
    """Refuse what is about labels, where each token has the next one as its own."""
    if experiment.data.groups is not None:
        raise InputError("data.groups is about labels of whole examples, and the next token is predicted")
    if experiment.data.partition in ("dirichlet", "shards"):
        raise InputError(
            f"data.partition = {experiment.data.partition!r} sorts by labels, and the next token is predicted; use iid "
            "or key"
        )


def _refuse_coupled(experiment: Experiment, model: nn.Module) -> None:
    layers = coupled_layers(model)
    if layers:
        raise experiment.model.refusal(
            f"layer {layers[0]} mixes the examples of a batch, so that no noise can protect one of them; write "
            f"model.norm = 'group', or mechanism.name = 'none' (given: {experiment.mechanism.name!r})"
        )


def _refuse_leaks(experiment: Experiment, model: nn.Module, dataset: Dataset) -> None:
    """Refuse own models that let examples past the mechanism, in the usual ways; tested on random and blank images."""
    if not experiment.model.is_own:
        return
    images, labels = random_examples(experiment, dataset, _OWN_TRIED)
    blank = dataset.normalise(torch.zeros_like(images[:1]))[0]
    try:
        refuse_mixed_examples(model, example_losses, dataset.normalise(images), labels, [blank])
    except InputError as error:
        raise experiment.model.refusal(str(error)) from error


def random_examples(experiment: Experiment, dataset: Dataset, examples: int) -> tuple[Tensor, Tensor]:
    """Random images (B, C, H, W), uint8, and labels (B,), or sequences, with which own models are tried."""
    return dataset.random(examples, torch_stream(experiment.seed, "trial"))
