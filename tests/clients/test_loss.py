"""The risk-averting loss and weight decay in local training, against autograd of the formula, and in references."""

import math

import pytest
import torch
from pydantic import ValidationError
from sklearn.datasets import load_digits
from torch.nn import functional

from fedpriv.attacks.references import Reference, build_pool, train_references, usual_schedule
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.federated import batch_loss
from fedpriv.core.world import State, World, build_world, trained_parameters
from tests.cases import in_one_test

BASE: dict[str, dict[str, object]] = {
    "model": {"name": "mlp", "hidden": [6], "activation": "tanh"},
    "federation": {"clients": 2, "rounds": 2, "algorithm": "fedavg"},
    "training": {"batch_size": 7, "loss": "risk-averting", "risk": 3.0, "weight_decay": 0.02},
    "mechanism": {"name": "none"},
    "adversary": {"attacks": []},
    "engine": {"precision": "float64"},
    "data": {"train_examples": 60},
}


def built(**sections: dict[str, object]) -> World:
    tree = {key: {**BASE.get(key, {}), **sections.get(key, {})} for key in {*BASE, *sections}}
    return build_world(Experiment.model_validate(tree))


def test_it_is_the_formula_and_between_mean_and_largest() -> None:
    losses = torch.tensor([0.1, 2.0, 0.7], dtype=torch.float64)
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    expected = math.log(sum(math.exp(5 * float(loss)) for loss in losses) / 3) / 5
    assert float(batch_loss(losses, even, 5.0)) == pytest.approx(expected, rel=1e-12)
    found = [float(batch_loss(losses, even, tilt)) for tilt in (1e-6, 1.0, 5.0, 1000.0)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(float(losses.mean()), rel=1e-5) and found[-1] == pytest.approx(2.0, rel=1e-3)
    assert float(batch_loss(losses, even, None)) == pytest.approx(float(losses.mean()))


def test_the_objective_of_a_network_is_not_convex() -> None:
    """Lu et al. claim it is. The signs of hidden units change nothing, so a convex objective is least at hidden 0."""
    digits, stream = load_digits(), torch.Generator().manual_seed(0)
    x, y = torch.from_numpy(digits.data / 16)[:200], torch.from_numpy(digits.target)[:200]
    shapes = (64, 32), (32, 10)
    weights = [torch.randn(shape, dtype=torch.float64, generator=stream) / 8 for shape in shapes]

    def objective(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(torch.tanh(x @ first) @ second, y, reduction="none")
        even = torch.full_like(losses.detach(), 1 / len(y))
        return batch_loss(losses, even, 1.0) + 2 * 5e-4 * (first.square().sum() + second.square().sum())

    for _ in range(150):
        tracked = [value.detach().requires_grad_() for value in weights]
        slopes = torch.autograd.grad(objective(*tracked), tracked)
        weights = [value.detach() - 0.3 * slope for value, slope in zip(tracked, slopes, strict=True)]
    first, second = weights
    signs = torch.where(torch.rand(32, generator=stream) < 0.5, -1.0, 1.0).double()
    there = float(objective(first, second))
    assert float(objective(first * signs, signs[:, None] * second)) == pytest.approx(there, rel=1e-9)
    assert float(objective(0 * first, 0 * second)) > there + 1


def test_short_and_empty_batches_of_a_stack() -> None:
    losses = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.25] * 4, [0.25, 0.25, 0, 0], [0.0] * 4], dtype=torch.float64)
    found = batch_loss(losses, weights, 2.0)
    half = batch_loss(losses.detach()[1, :2], weights[1, :2] * 2, 2.0)
    assert found[1].item() == pytest.approx(0.5 * half.item())
    assert found[2].item() == 0
    found.sum().backward()
    assert losses.grad is not None and torch.isfinite(losses.grad).all() and not losses.grad[2].any()


def test_a_clients_upload_is_that_of_the_formula() -> None:
    world = built()
    upload = local_upload(world, 0, world.initial, 1).parameters
    world.initial.load_into(world.model)
    parameters = trained_parameters(world.model)
    plan = world.plans[0]
    for step in plan.steps(1):
        images, labels = world.examples(0, plan.batch(step))
        losses = functional.cross_entropy(world.model(images), labels, reduction="none")
        # The last batch of a pass is short: it counts for its share of a full one.
        share = len(losses) / 7
        squares = torch.stack([(value**2).sum() for value in parameters.values()]).sum()
        objective = share * torch.log(torch.exp(3 * losses).mean()) / 3 + 0.01 * squares
        gradients = torch.autograd.grad(objective, list(parameters.values()))
        with torch.no_grad():
            for value, gradient in zip(parameters.values(), gradients, strict=True):
                value.sub_(0.1 * gradient)
    for name, value in parameters.items():
        torch.testing.assert_close(upload[name], value.detach() - world.initial.parameters[name])


@in_one_test("hidden", [[6], []])
@in_one_test("training", [{}, {"weight_decay": 0.0}, {"loss": "cross-entropy"}, {"optimizer": "adam"}])
def test_a_reference_of_the_runs_own_data_is_the_run(training: dict[str, object], hidden: list[int]) -> None:
    world = built(training=training, model={"hidden": hidden or [3]})
    reference = Reference(world.experiment.seed, world.partitions)
    schedule = usual_schedule(world.experiment)
    trained = train_references(world, build_pool(world), [reference], schedule, [2])[2]
    now = world.initial
    for number in schedule:
        uploads = [local_upload(world, client, now, number).parameters for client in range(2)]
        sizes = [len(rows) for rows in world.partitions]
        mean = {
            name: sum(size * upload[name] for size, upload in zip(sizes, uploads, strict=True)) / sum(sizes)
            for name in uploads[0]
        }
        now = State({name: value + mean[name] for name, value in now.parameters.items()}, {})
    for name, value in now.parameters.items():
        torch.testing.assert_close(trained[name][0], value)


@in_one_test(
    ("sections", "said"),
    [
        ({"mechanism": {"name": "gaussian", "sigma": 1.0}}, "a batch's gradient is then not the mean of its examples"),
        ({"adversary": {"attacks": ["dlg"]}}, "attacks on gradients are for the mean cross entropy"),
        ({"training": {"risk": 0.0}}, "risk"),
        ({"training": {"weight_decay": -1.0}}, "weight_decay"),
    ],
)
def test_what_rests_on_single_gradients_is_refused(sections: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        built(**sections)


def test_whole_updates_can_be_protected() -> None:
    world = built(mechanism={"name": "gaussian", "sigma": 1.0, "unit": "update", "clip_norm": 0.1})
    assert local_upload(world, 0, world.initial, 1).parameters


def test_experiments_without_it_release_what_they_did() -> None:
    assert set(Experiment().decisive()["training"]) == set(Experiment().model_dump()["training"]) - {
        "loss",
        "risk",
        "weight_decay",
    }
