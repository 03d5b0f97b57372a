"""How uploads are modelled: the sign of an update, the mechanism, and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, example_gradients, mlp, normalise, observe_digits, parameters_of, settings
from torch import nn

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackRefused, refusal
from fedpriv.attacks.reconstruction.upload_model import LocalTraining, UploadModel, prepare_victims
from fedpriv.core.config import Experiment
from fedpriv.core.plan import plan_client
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms import mechanism_settings
from tests.cases import in_one_test
from tests.noise import stream

CPU = torch.device("cpu")


def trained_upload(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], rate: float, momentum: float
) -> Vector:
    """Parameters after minus before, by torch's own optimiser."""
    before = parameters_of(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    for x, y in batches:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return {name: value.detach() - before[name] for name, value in model.named_parameters()}


@in_one_test("momentum", [0.0, 0.9])
@in_one_test("size", [1, 4])
def test_one_local_step_is_the_gradient_with_the_right_sign(momentum: float, size: int) -> None:
    """Peers do not model the -lr of an update, which turns label inference upside down."""
    images, labels = digits()
    x, y = normalise(images[:size]).double(), labels[:size]
    model = mlp().double()
    gradient = {name: value.mean(dim=0) for name, value in example_gradients(model, x, y).items()}
    before = parameters_of(model)
    upload = trained_upload(model, [(x, y)], 0.25, momentum)
    public = settings(algorithm="fedavg", learning_rate=0.25, momentum=momentum, batch_size=size, local_steps=1)
    (victim,) = prepare_victims([Observation(1, 0, before, upload, public)], list(before), CPU)
    for name, value in gradient.items():
        torch.testing.assert_close(victim.gradient[name], value, rtol=1e-9, atol=1e-12)
    assert victim.note == ""


def test_several_local_steps_are_unrolled_and_scaled_like_a_gradient() -> None:
    images, labels = digits()
    x, y = normalise(images[:6]).double(), labels[:6]
    model = mlp().double()
    gradient = {name: value.mean(dim=0) for name, value in example_gradients(model, x, y).items()}
    before = parameters_of(model)
    upload = trained_upload(model, [(x[:2], y[:2]), (x[2:4], y[2:4]), (x[4:], y[4:])], 1e-4, 0.0)
    public = settings(algorithm="fedavg", learning_rate=1e-4, batch_size=2, local_steps=3)
    (victim,) = prepare_victims([Observation(1, 0, before, upload, public)], list(before), CPU)
    assert victim.model.examples == 6
    assert victim.model.training == LocalTraining("sgd", 1e-4, 0.0, 3, 2)
    assert "3 local steps were unrolled" in victim.note
    for name, value in gradient.items():
        torch.testing.assert_close(victim.gradient[name], value, rtol=1e-2, atol=1e-4)


def test_refused_with_a_reason() -> None:
    model = mlp()
    heard, _, _ = observe_digits(model, 1, algorithm="fedavg", local_steps=4)
    withheld = replace(heard[0], settings=replace(heard[0].settings, batch_size=None))
    assert "batch size" in (refusal(withheld.settings) or "")
    with pytest.raises(AttackRefused, match="batch size"):
        prepare_victims([withheld], list(heard[0].parameters), CPU)


@in_one_test(
    "changes",
    [
        {},
        {"optimizer": "adam", "momentum": 0.9},  # FedSGD has no local optimiser
        {"algorithm": "fedavg", "momentum": 0.9},
        {"algorithm": "fedavg", "local_steps": 9},
        {"algorithm": "fedavg", "local_steps": 9, "momentum": 0.9},
        {"algorithm": "fedavg", "optimizer": "adam"},
    ],
)
def test_not_refused(changes: dict[str, object]) -> None:
    assert refusal(settings(**changes)) is None


def test_parameters_of_a_round_are_shared_in_memory_and_others_are_not() -> None:
    model = mlp()
    heard, _, _ = observe_digits(model, 3)
    later, _, _ = observe_digits(mlp(seed=2), 1, round_number=2)
    assert heard[0].parameters["output.bias"] is not heard[1].parameters["output.bias"]
    victims = prepare_victims([*heard, *later], list(heard[0].parameters), CPU)
    assert all(victim.parameters is victims[0].parameters for victim in victims[:3])
    assert victims[3].parameters is not victims[0].parameters


def test_parameters_of_another_network_are_refused() -> None:
    heard, _, _ = observe_digits(mlp(), 1)
    with pytest.raises(AttackRefused, match="hidden2"):
        prepare_victims(heard, list(parameters_of(mlp(hidden=(64, 8)))), CPU)


def test_zero_upload_is_noted() -> None:
    heard, _, _ = observe_digits(mlp(), 1)
    zero = {name: torch.zeros_like(value) for name, value in heard[0].upload.items()}
    observation = Observation(1, 0, heard[0].parameters, zero, heard[0].settings)
    (victim,) = prepare_victims([observation], list(zero), CPU)
    assert "zero" in victim.note


@in_one_test(
    "mechanism",
    [
        {"name": "none"},
        {"name": "gaussian", "sigma": 0.5, "clip_norm": 0.8},
        {"name": "gaussian", "sigma": 0.5, "clip_norm": 100.0},
        {"name": "vmf", "kappa": 40.0},
        {"name": "vmf", "kappa": 40.0, "blocks": "layer"},
        {"name": "vmf", "kappa": 40.0, "clip_norm": 0.3},
    ],
)
@in_one_test("unit", ["example", "update"])
@in_one_test("algorithm", ["fedsgd", "fedavg"])
@in_one_test("size", [1, 3])
def test_expected_uploads(mechanism: dict[str, object], unit: str, algorithm: str, size: int) -> None:
    """Against the mechanism's own expectation, one batch at a time, as the client would have applied it."""
    config = mechanism_settings({**mechanism, "unit": unit})
    built = config.mechanism()
    rate = 0.4
    public = settings(
        mechanism={**mechanism, "unit": unit}, algorithm=algorithm, batch_size=size, learning_rate=rate, local_steps=1
    )
    model = UploadModel.of(public)
    generator = torch.Generator().manual_seed(1)
    gradients = {
        name: torch.randn(5, size, *shape, generator=generator).double() for name, shape in (("a", (3, 2)), ("b", (4,)))
    }
    means = {name: value.mean(dim=1) for name, value in gradients.items()}
    expected = model.expected_of_examples(gradients)
    if not model.needs_examples:
        for name, value in model.expected(means).items():
            torch.testing.assert_close(value, expected[name])
    for row in range(5):
        examples = [{name: value[row, k] for name, value in gradients.items()} for k in range(size)]
        if unit == "example":
            released = [built.expected(example) for example in examples]
            sent = {name: torch.stack([one[name] for one in released]).mean(dim=0) for name in gradients}
            upload = sent if algorithm == "fedsgd" else {name: -rate * value for name, value in sent.items()}
        else:
            mean = {name: value[row] for name, value in means.items()}
            change = mean if algorithm == "fedsgd" else {name: -rate * value for name, value in mean.items()}
            upload = built.expected(change)
        for name, value in model.gradient(upload).items():
            torch.testing.assert_close(expected[name][row], value, rtol=1e-10, atol=1e-12)


def test_padding_is_part_of_the_noise() -> None:
    """Of balls in bins the model's variance is that of the plan's releases: 90,000 numbers, six deviations."""
    tree = {"training": {"batch_size": 2, "sampling": "balls-in-bins"}, "mechanism": {"name": "vmf", "kappa": 1.0}}
    plan = plan_client(Experiment.model_validate(tree), 0, 6, [300])
    batch, noise = DenseGradients({"w": torch.ones(2, 300)}), stream(7)
    released = torch.stack([plan.release_gradient(batch, noise)["w"] for _ in range(300)]).double()
    told = settings(batch_size=2, client_examples=6, mechanism=plan.config.model_dump(mode="json", exclude_none=True))
    modelled = UploadModel.of(replace(told, draws=plan.least_draws)).noise([300]).variances[0]
    assert plan.least_draws == 6
    assert float((released - released.mean(dim=0)).square().mean()) == pytest.approx(modelled, rel=6 * (2 / 9e4) ** 0.5)
