"""What leaves a client, against the same thing computed one example at a time with plain autograd."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import fedpriv.clients.training
from fedpriv.clients.training import answer_secret, local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.randomness import NoiseStream, Secret, generator_states
from fedpriv.core.world import State, World, build_world
from fedpriv.gradients import DenseGradients, per_example_gradients
from tests.cases import in_one_test

SECRET = Secret(bytes(32))
MODELS = {"mlp": {"name": "mlp", "hidden": [9], "activation": "tanh"}, "lenet": {"name": "lenet"}}


def world(**sections: dict[str, object]) -> World:
    tree = {
        "seed": 5,
        "model": MODELS["mlp"],
        "federation": {"clients": 6},
        "training": {"batch_size": 7, "learning_rate": 0.2},
        "engine": {"device": "cpu"},
    }
    for name, keys in sections.items():
        tree[name] = keys if "name" in keys else {**tree.get(name, {}), **keys}  # type: ignore[dict-item]
    return build_world(Experiment.model_validate(tree))


def noise_of(built: World, client: int, round_number: int, step: int) -> NoiseStream:
    """The noise of a step in a client's answer to the initial parameters."""
    received = built.received(client, built.initial)
    return answer_secret(built.secret, client, round_number, received).stream("noise", step)


def per_example(model: nn.Module, images: Tensor, labels: Tensor) -> Iterator[dict[str, Tensor]]:
    for image, label in zip(images, labels, strict=True):
        model.zero_grad()
        cross_entropy(model(image[None]), label[None]).backward()
        yield {name: value.grad.clone() for name, value in model.named_parameters()}  # type: ignore[union-attr]


def total(vectors: list[dict[str, Tensor]], like: State) -> dict[str, Tensor]:
    zero = {name: torch.zeros_like(value) for name, value in like.parameters.items()}
    return {name: sum((vector[name] for vector in vectors), zero[name]) for name in zero}


def assert_near(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(given) == list(expected)
    for name in expected:
        torch.testing.assert_close(given[name], expected[name], rtol=1e-4, atol=2e-6)


@in_one_test("model", MODELS)
@in_one_test("sampling", ["shuffled", "fixed", "poisson"])
@in_one_test("client", [0, 5])
def test_fedsgd_uploads_the_sum_of_gradients_over_the_public_batch_size(model: str, sampling: str, client: int) -> None:
    built = world(model=MODELS[model], training={"sampling": sampling})
    for number in (1, 3):
        upload = local_upload(built, client, built.initial, number)
        images, labels = built.examples(client, built.plans[client].batch(number - 1))
        built.initial.load_into(built.model)
        expected = total(list(per_example(built.model, images, labels)), built.initial)
        assert_near(upload.parameters, {name: value / 7 for name, value in expected.items()})


def checkpointed(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Checkpointed(shape[0] * shape[1] * shape[2], classes)


class Checkpointed(nn.Module):
    """All that trains lies in a reentrant checkpoint, as adapters do where transformers saves memory."""

    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(numbers, 8), nn.Linear(8, classes)
        self.block = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        for layer in (self.stem, self.head):
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.stem(x.flatten(1)).requires_grad_(), use_reentrant=True))


@in_one_test("mechanism", [{"name": "none"}, {"name": "gaussian", "sigma": 1e-9, "clip_norm": 1e3}])
def test_what_trains_in_a_reentrant_checkpoint_is_uploaded(mechanism: dict[str, object]) -> None:
    """With noise that is smaller than what rounds, and a bound that clips nothing."""
    built = world(model={"name": f"{__name__}:checkpointed"}, mechanism=mechanism)
    upload = local_upload(built, 1, built.initial, 1).parameters
    images, labels = built.examples(1, built.plans[1].batch(0))
    built.initial.load_into(built.model)
    cross_entropy(built.model(images), labels).backward()
    expected = {name: value.grad for name, value in built.model.named_parameters() if value.requires_grad}
    assert min(float(value.norm()) for value in expected.values()) > 1e-3
    assert_near(upload, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_fedavg_uploads_after_minus_before(momentum: float) -> None:
    built = world(
        federation={"algorithm": "fedavg"}, training={"local_epochs": 2, "momentum": momentum, "learning_rate": 0.02}
    )
    upload = local_upload(built, 2, built.initial, 2)
    model = copy.deepcopy(built.model)
    built.initial.load_into(model)
    velocity = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    plan = built.plans[2]
    assert len(plan.steps(2)) == 2 * (plan.sampling.examples // 7)
    for step in plan.steps(2):
        images, labels = built.examples(2, plan.batch(step))
        gradient = total(list(per_example(model, images, labels)), built.initial)
        with torch.no_grad():
            for name, value in model.named_parameters():
                velocity[name] = momentum * velocity[name] + gradient[name] / 7
                value -= 0.02 * velocity[name]
    after = State.of(model).parameters
    assert_near(upload.parameters, {name: after[name] - built.initial.parameters[name] for name in after})


@in_one_test(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.7},
        {"name": "vmf", "kappa": 60.0},
        {"name": "vmf", "kappa": 60.0, "blocks": "layer"},
        {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.7, "clipping": "layer"},
        {"name": "laplace", "scale": 0.3, "clip_norm": 0.7},
        {"name": "hgm", "sigma": 0.3, "clip_norm": 0.7, "redistribution": "layer"},
        {"name": "hgm", "sigma": 0.3, "clip_norm": 0.7, "redistribution": "public"},
    ],
)
def test_the_mechanism_gets_the_gradients_of_the_examples(mechanism: dict[str, object]) -> None:
    """The release from gradients computed one by one, with the same noise stream, is the upload."""
    built = world(mechanism=mechanism)
    upload = local_upload(built, 1, built.initial, 4)
    plan = built.plans[1]
    built.initial.load_into(built.model)
    single = list(per_example(built.model, *built.examples(1, plan.batch(3))))
    columns = DenseGradients({name: torch.stack([one[name] for one in single]) for name in single[0]})
    assert_near(upload.parameters, plan.release_gradient(columns, noise_of(built, 1, 4, step=3)))


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_unit_update_bounds_the_whole_update_once(algorithm: str) -> None:
    """With noise too small to matter, the upload is the plain one clipped as a whole."""
    federation = {"algorithm": algorithm}
    plain = world(federation=federation)
    bare = local_upload(plain, 0, plain.initial, 1).parameters
    built = world(
        federation=federation,
        mechanism={"name": "gaussian", "sigma": 1e-7, "clip_norm": 0.05, "unit": "update"},
    )
    upload = local_upload(built, 0, built.initial, 1).parameters
    norm = torch.sqrt(sum(value.square().sum() for value in bare.values()))  # type: ignore[arg-type]
    assert norm > 0.05
    assert_near(upload, {name: value * 0.05 / norm for name, value in bare.items()})


def test_unit_update_vmf_has_the_public_length() -> None:
    built = world(mechanism={"name": "vmf", "kappa": 1e6, "clip_norm": 0.5, "unit": "update"})
    upload = local_upload(built, 0, built.initial, 1).parameters
    length = torch.sqrt(sum(value.square().sum() for value in upload.values()))  # type: ignore[arg-type]
    assert length.item() == pytest.approx(0.5, rel=1e-5)


def test_dropout_draws_from_its_own_stream() -> None:
    built = world()
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    dropping = replace(built, model=network, initial=State.of(network))
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = local_upload(dropping, 0, dropping.initial, 1).parameters
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = local_upload(dropping, 0, dropping.initial, 1).parameters
    other = local_upload(dropping, 1, dropping.initial, 1).parameters
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["2.weight"], other["2.weight"])


@in_one_test(
    "draw",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: x * torch.from_numpy(np.random.rand(*x.shape)).float(),  # noqa: NPY002 - the global one is meant
        lambda x: x * random.random(),
    ],
)
@in_one_test("mechanism", [{"name": "none"}, {"name": "gaussian", "sigma": 1e-9, "clip_norm": 1e9}])
def test_a_model_draws_from_its_own_stream(draw: Callable[[Tensor], Tensor], mechanism: dict[str, object]) -> None:
    """From whichever global generator: each step starts afresh, whatever was drawn before, and puts it back."""

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(draw(x.flatten(1)))

    built = world(mechanism=mechanism)
    network = Drawing(64, 10)
    plans = tuple(replace(plan, tensors=(640, 10)) for plan in built.plans)
    drawing = replace(built, model=network, initial=State.of(network), plans=plans)
    uploads = []
    for client, seed in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        states = generator_states()
        uploads.append(local_upload(drawing, client, drawing.initial, 1).parameters["weight"])
        assert generator_states() == states
    assert torch.equal(uploads[0], uploads[1])
    assert not torch.equal(uploads[0], uploads[2])


def test_running_statistics_travel_beside_the_upload() -> None:
    built = world()
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    tracking = replace(built, model=network, initial=State.of(network))
    upload = local_upload(tracking, 0, tracking.initial, 1)
    images, _ = built.examples(0, built.plans[0].batch(0))
    assert list(upload.buffers) == ["1.running_mean", "1.running_var"]
    torch.testing.assert_close(upload.buffers["1.running_mean"], 0.1 * images.flatten(1).mean(0))


def test_frozen_parameters_stay_at_home() -> None:
    built = world()
    network = copy.deepcopy(built.model)
    next(network.parameters()).requires_grad_(False)
    frozen = replace(built, model=network, initial=State.of(network))
    upload = local_upload(frozen, 0, frozen.initial, 1)
    assert list(upload.parameters) == [name for name, _ in network.named_parameters()][1:]


# ---- precision ------------------------------------------------------------------------------------------------------

MECHANISMS = [
    {"name": "none"},
    {"name": "gaussian", "sigma": 1e-3, "clip_norm": 1e3},
    {"name": "gaussian", "sigma": 1e-3, "clip_norm": 1e3, "unit": "update"},
    {"name": "laplace", "scale": 1e-3, "clip_norm": 1e3},
    {"name": "hgm", "sigma": 1e-3, "clip_norm": 1e3, "redistribution": "public"},
    {"name": "vmf", "kappa": 1e6},
]


def relative_error(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    difference = torch.cat([(given[name].double() - expected[name].double()).flatten() for name in expected])
    return float(difference.norm() / torch.cat([value.double().flatten() for value in expected.values()]).norm())


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: "-".join(map(str, mechanism.values())))
@in_one_test("precision", ["float32", "bfloat16", "float64"])
def test_uploads_have_the_type_of_the_parameters(precision: str, mechanism: dict[str, object], algorithm: str) -> None:
    built = world(mechanism=mechanism, federation={"algorithm": algorithm}, engine={"precision": precision})
    dtype = torch.float64 if precision == "float64" else torch.float32
    upload = local_upload(built, 0, built.initial, 1)
    assert all(value.dtype == dtype for value in (*built.initial.parameters.values(), *upload.parameters.values()))
    assert built.examples(0, built.plans[0].batch(0))[0].dtype == dtype


@pytest.mark.parametrize("model", MODELS)
def test_float64_is_computed_in_float64(model: str) -> None:
    """Model, images and gradients: against float64 autograd on images that are normalised in float64."""
    built = world(model=MODELS[model], engine={"precision": "float64"})
    upload = local_upload(built, 2, built.initial, 1).parameters
    rows = built.partitions[2][built.plans[2].batch(0)]
    images = (built.dataset.x_train[torch.from_numpy(rows)].double() / 255 - 0.5) / 0.5
    single = per_example(built.model, images, built.dataset.y_train[torch.from_numpy(rows)])
    expected = {name: value / 7 for name, value in total(list(single), built.initial).items()}
    assert relative_error(upload, expected) < 1e-13
    rounded = world(model=MODELS[model])
    assert relative_error(local_upload(rounded, 2, rounded.initial, 1).parameters, expected) > 1e-9


@in_one_test("model", MODELS)
@pytest.mark.parametrize("mechanism", MECHANISMS[:2] + MECHANISMS[3:], ids=lambda mechanism: str(mechanism["name"]))
def test_bfloat16_is_used_for_the_passes_and_for_nothing_else(model: str, mechanism: dict[str, object]) -> None:
    """The gradient is off by what bfloat16 rounds (8 bits), the noise not at all."""
    exact = world(model=MODELS[model], mechanism=mechanism)
    rounded = world(model=MODELS[model], mechanism=mechanism, engine={"precision": "bfloat16"})
    # Of themselves two precisions have two noises.
    one, other = (local_upload(built, 1, built.initial, 1, SECRET).parameters for built in (rounded, exact))
    if mechanism["name"] in ("gaussian", "laplace", "hgm"):
        bare = world(model=MODELS[model])
        gradient = local_upload(bare, 1, bare.initial, 1).parameters
        assert relative_error(other, gradient) > 0.5
        noise = {name: value - gradient[name] for name, value in other.items()}
        one = {name: value - noise[name] for name, value in one.items()}
        other = gradient
    assert 1e-4 < relative_error(one, other) < 5e-2


def test_gradient_memory_reaches_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []

    def spy(*args: object, **options: object) -> object:
        seen.append(options)
        return per_example_gradients(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fedpriv.clients.training, "per_example_gradients", spy)
    uploads = []
    for memory in (1, 4096):
        built = world(mechanism=MECHANISMS[3], engine={"gradient_memory": memory}, model=MODELS["lenet"])
        uploads.append(local_upload(built, 0, built.initial, 1, SECRET).parameters)
    assert [options["chunk_bytes"] for options in seen] == [1 << 20, 1 << 32]
    assert_near(*uploads)
