"""Attacks on gradients and updates of any PyTorch model: the forms an upload may have, and mistakes in one line."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attack_victims import MEAN, STD, digits, errors, mlp, normalise
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedpriv.attacks import AttackWarning, reconstruct
from fedpriv.attacks.reconstruction import Reconstruction
from fedpriv.core.errors import InputError
from tests.cases import in_one_test

SHAPE = (1, 8, 8)
QUICK: dict[str, Any] = {"mean": MEAN, "std": STD, "tv": 1e-5, "iterations": 120}


class Small(nn.Module):
    """A model with a buffer, a frozen layer, and a parameter that has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(64, 48)
            self.frozen = nn.Linear(48, 32).requires_grad_(False)
            self.last = nn.Linear(32, 10)
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x.flatten(1))))))


def batch(count: int = 1, first: int = 0) -> tuple[Tensor, Tensor]:
    images, labels = digits()
    return images[first : first + count], labels[first : first + count]


def gradient(
    model: nn.Module, images: Tensor, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
) -> None:
    """Leave the gradient where ``backward`` leaves it."""
    model.zero_grad()
    loss(model(normalise(images).to(next(model.parameters()))), labels).backward()


def forms(model: nn.Module) -> dict[str, Any]:
    """The same gradient in every form that is accepted."""
    named = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    dense = {name: torch.zeros_like(dict(model.named_parameters())[name]) if value is None else value
             for name, value in named.items()}  # fmt: skip
    full = {name: dense.get(name, torch.zeros_like(value)) for name, value in model.state_dict().items()}
    return {
        "names": named,
        "names and buffers": full,
        "names of DistributedDataParallel": {f"module.{name}": value for name, value in full.items()},
        "parameters' gradients": [value.grad for value in model.parameters()],
        "trained parameters' gradients": list(dense.values()),
        "a tuple": tuple(dense.values()),
        "a generator": (value for value in dense.values()),
        "numpy arrays": [value.numpy() for value in dense.values()],
        "numpy.savez": {f"arr_{number}": value.numpy() for number, value in enumerate(dense.values())},
        "numpy arrays of the state": [value.numpy() for value in full.values()],
        "Flower's record of names": ArrayRecord(torch_state_dict=full),
        "Flower's record of a list": ArrayRecord([value.numpy() for value in dense.values()]),
        "Flower's list": ArrayRecord(torch_state_dict=full).to_numpy_ndarrays(),
        "float64": {name: value.double() for name, value in dense.items()},
        "nested lists": [value.tolist() for value in dense.values()],
    }


def test_a_change_without_its_learning_rate_is_doubted() -> None:
    model = Small()
    gradient(model, *batch(2))
    named = forms(model)["names"]
    change = {name: None if value is None else -0.05 * value for name, value in named.items()}
    settings: dict[str, Any] = {**QUICK, "iterations": 1, "batch_size": 2}
    with pytest.warns(AttackWarning, match=r"last.bias is negative for 8 classes.* give learning_rate"):
        reconstruct(model, F.cross_entropy, change, SHAPE, **settings)
    turned = {name: None if value is None else -value for name, value in change.items()}
    with pytest.warns(AttackWarning, match=r"last.bias grows for 8 classes.* after training minus those before"):
        reconstruct(model, F.cross_entropy, turned, SHAPE, learning_rate=0.05, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttackWarning)
        reconstruct(model, F.cross_entropy, change, SHAPE, learning_rate=0.05, **settings)
        reconstruct(model, F.cross_entropy, named, SHAPE, **settings)


def test_every_form_of_an_upload_gives_the_same() -> None:
    model = Small()
    images, labels = batch()
    gradient(model, images, labels)
    whole = reconstruct(model, F.cross_entropy, forms(model)["names"], SHAPE, **QUICK)
    assert whole.labels.tolist() == labels.tolist()
    assert float(errors([whole.images[None]], images[None])) < 0.01
    few = {**QUICK, "iterations": 4}
    found = {name: reconstruct(model, F.cross_entropy, form, SHAPE, **few) for name, form in forms(model).items()}
    first = found["names"]
    for name, one in found.items():
        assert torch.equal(one.images, first.images), name
        assert one.losses == first.losses


def test_public_images_help_where_there_is_noise() -> None:
    """The same noisy gradient with and without them, over 6 victims; and arrays do as well as tensors."""
    model = mlp()
    public = digits()[0][800:]
    noise = {"name": "gaussian", "sigma": 0.02, "clip_norm": 1.0}
    generator = torch.Generator().manual_seed(1)
    better = 0
    for number in range(6):
        images, labels = batch(1, number)
        gradient(model, images, labels)
        named = {name: value.grad for name, value in model.named_parameters()}
        norm = torch.stack([value.square().sum() for value in named.values()]).sum().sqrt().clamp(min=1.0)
        sent = {
            name: value / norm + 0.02 * torch.randn(value.shape, generator=generator) for name, value in named.items()
        }
        given: dict[str, Any] = {"attack": "closed_form", "mechanism": noise, "mean": MEAN, "std": STD}
        told = reconstruct(model, F.cross_entropy, sent, SHAPE, public_images=public, **given)
        alone = reconstruct(model, F.cross_entropy, sent, SHAPE, **given)
        better += float(errors([told.images[None]], images[None])) < float(errors([alone.images[None]], images[None]))
    assert better == 6  # by chance in 2 % of such tests
    again = reconstruct(model, F.cross_entropy, sent, SHAPE, public_images=public.numpy(), **given)
    assert torch.equal(again.images, told.images)


def test_repeated_uploads_of_one_batch_help() -> None:
    """16 noisy gradients of one image: from the same parameters, and from others, given as what moved."""
    model = mlp()
    images, labels = batch(1, 4)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    pairs = []
    for number in range(16):
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(start[name] + (number % 2) * 0.02 * torch.randn(value.shape, generator=generator))
        gradient(model, images, labels)
        named = {name: value.grad for name, value in model.named_parameters()}
        norm = torch.stack([value.square().sum() for value in named.values()]).sum().sqrt().clamp(min=1.0)
        noisy = {
            name: value / norm + 0.02 * torch.randn(value.shape, generator=generator) for name, value in named.items()
        }
        pairs.append(({name: value.detach().clone() for name, value in model.named_parameters()}, noisy))
    given: dict[str, Any] = {
        "attack": "closed_form", "mechanism": {"name": "gaussian", "sigma": 0.02, "clip_norm": 1.0}, "mean": MEAN,
        "std": STD, "parameters": start,
    }  # fmt: skip
    alone = reconstruct(model, F.cross_entropy, pairs[0][1], SHAPE, **given)
    together = reconstruct(model, F.cross_entropy, pairs[0][1], SHAPE, repeats=pairs[1:], **given)
    one, other = (float(errors([found.images[None]], images[None])) for found in (alone, together))
    assert other < one / 2
    assert together.labels.tolist() == labels.tolist()
    assert "16 uploads of the same examples" in together.note
    with pytest.raises(InputError, match=r"repeats, 1: upload: a list of 1 arrays"):
        reconstruct(model, F.cross_entropy, pairs[0][1], SHAPE, repeats=[(start, [labels])], **given)


@pytest.mark.parametrize("attack", ["dlg", "iga"])
def test_a_batch(attack: str) -> None:
    model = mlp()
    images, labels = batch(2)
    gradient(model, images, labels)
    more = {"iterations": 150, "restarts": 3} if attack == "dlg" else {"iterations": 200, "tv": 0.0}
    found = reconstruct(
        model, F.cross_entropy, [value.grad for value in model.parameters()], SHAPE, attack=attack, batch_size=2,
        mean=MEAN, std=STD, **more,
    )  # fmt: skip
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())
    assert found.images.shape == (2, *SHAPE)
    assert 0 <= float(found.images.min()) <= float(found.images.max()) <= 1
    assert found.loss == min(loss for loss in found.losses if loss is not None)


class Attention(nn.Module):
    """Each row of a picture is a token."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return self.last((rows + self.body(rows, rows, rows, need_weights=False)[0]).flatten(1))


@pytest.mark.parametrize(("attack", "count"), [("dlg", 2), ("iga", 1), ("map", 2)])
def test_attention_can_be_attacked(attack: str, count: int) -> None:
    """Torch cannot differentiate its fast kernels for attention twice."""
    model = Attention()
    images, labels = batch(count)
    gradient(model, images, labels)
    begun, found = (
        reconstruct(model, F.cross_entropy, [value.grad for value in model.parameters()], SHAPE, attack=attack,
                    labels=labels.tolist(), batch_size=count, mean=MEAN, std=STD, iterations=steps, restarts=1)
        for steps in (1, 15)
    )  # fmt: skip
    assert begun.loss is not None and found.loss is not None
    # Where features of the last layer are exact, map begins at the end.
    assert found.loss <= begun.loss if attack == "map" else found.loss < begun.loss


@pytest.mark.essential
def test_without_normalisation_images_are_what_the_model_sees() -> None:
    model = mlp()
    images, labels = batch()
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    found = reconstruct(
        model, F.cross_entropy, [value.grad for value in model.parameters()], SHAPE, iterations=200, tv=0.0
    )
    assert float(errors([found.images[None]], images[None])) < 0.02


@pytest.mark.parametrize("steps", [1, 3])
def test_a_change_of_parameters(steps: int) -> None:
    """After minus before, with its sign: peers take it for a gradient, which turns labels and images inside out."""
    model, local = mlp(), mlp()
    images, labels = batch()
    optimiser = torch.optim.SGD(local.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(local(normalise(images)), labels).backward()
        optimiser.step()
    change = {name: value.detach() - dict(model.named_parameters())[name] for name, value in local.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttackWarning)  # several steps are an approximation
        found = reconstruct(
            model, F.cross_entropy, change, SHAPE, learning_rate=0.05, local_steps=steps, examples=1, **QUICK
        )
    assert found.labels.tolist() == labels.tolist()
    assert float(errors([found.images[None]], images[None])) < 0.02


@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_a_change_by_another_optimiser(kind: str) -> None:
    model, local = mlp(), mlp()
    images, labels = batch()
    settings: dict[str, Any] = {"optimizer": "adam"} if kind == "adam" else {"momentum": 0.9}
    rate = 0.001 if kind == "adam" else 0.05
    optimiser = (
        torch.optim.Adam(local.parameters(), lr=rate)
        if kind == "adam"
        else torch.optim.SGD(local.parameters(), lr=rate, momentum=0.9)
    )
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(local(normalise(images)), labels).backward()
        optimiser.step()
    change = {name: value.detach() - dict(model.named_parameters())[name] for name, value in local.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttackWarning)
        found = reconstruct(
            model, F.cross_entropy, change, SHAPE, learning_rate=rate, local_steps=2, examples=1, **settings, **QUICK
        )
    assert found.labels.tolist() == labels.tolist()
    if kind == "momentum":  # the first steps of Adam keep little more than signs
        assert float(errors([found.images[None]], images[None])) < 0.02


def test_parameters_before_the_upload_may_be_given() -> None:
    model, other = mlp(), mlp(seed=9)
    images, labels = batch()
    gradient(model, images, labels)
    grads = [value.grad for value in model.parameters()]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    one = reconstruct(model, F.cross_entropy, grads, SHAPE, **QUICK)
    same = reconstruct(other, F.cross_entropy, grads, SHAPE, parameters=before, **QUICK)
    wrong = reconstruct(other, F.cross_entropy, grads, SHAPE, **QUICK)
    assert torch.equal(one.images, same.images)
    assert not torch.equal(one.images, wrong.images)


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of probabilities only."""
    return (logits.softmax(dim=1) - labels).square().sum(dim=1).mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "module": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum")),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), nn.CrossEntropyLoss(label_smoothing=0.2)),
    "squared": (squared, lambda logits, labels: squared(logits, F.one_hot(labels, 10).to(logits))),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_own_losses(name: str) -> None:
    model = mlp()
    images, labels = batch(2)
    attacked, trained = LOSSES[name]
    gradient(model, images, labels, trained)
    found = reconstruct(
        model, attacked, [value.grad for value in model.parameters()], SHAPE, batch_size=2, mean=MEAN, std=STD,
        labels=labels.tolist(), attack="dlg", iterations=100, restarts=2,
    )  # fmt: skip
    order = found.labels.tolist().index(int(labels[0]))
    arranged = found.images[[order, 1 - order]]
    assert float(errors([arranged[None]], images[None])) < 1e-3


RISING, ONE = torch.linspace(0.2, 5, 10), torch.ones(10).index_fill(0, torch.tensor([7]), 5.0)


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("weight", [RISING, ONE, torch.full((10,), 2.0)])
def test_a_mean_with_class_weights_is_refused(dtype: torch.dtype, weight: Tensor) -> None:
    """Its divisor is the sum of the labels' weights, which no attack models."""
    model = mlp().to(dtype)
    loss = nn.CrossEntropyLoss(weight=weight.to(dtype))
    gradient(model, *batch(2), loss)
    with pytest.raises(InputError, match=r"class weights\?\); .* reduction = 'sum'"):
        reconstruct(model, loss, [value.grad for value in model.parameters()], SHAPE, batch_size=2)


OF_PROBABILITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
    "sum with weights": nn.CrossEntropyLoss(weight=RISING, reduction="sum"),
    "sum with one weight": nn.CrossEntropyLoss(weight=ONE, reduction="sum"),
    "nll": lambda logits, labels: -(labels * logits.log_softmax(dim=1) * RISING.to(logits)).sum(),
    "bce": nn.BCEWithLogitsLoss(),
    "bce, weights of positives": nn.BCEWithLogitsLoss(pos_weight=RISING),
    "squared": nn.MSELoss(),
}  # fmt: skip


def tiny(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).to(dtype)


def attacked(name: str, dtype: torch.dtype, count: int, iterations: int) -> tuple[Reconstruction, Tensor, Tensor]:
    """What is found of the gradient that a loss of class probabilities makes, and the truth."""
    model, loss = tiny(dtype), copy.deepcopy(OF_PROBABILITIES[name])
    loss = loss.to(dtype) if isinstance(loss, nn.Module) else loss
    images, labels = batch(count, first=3)
    gradient(model, images, F.one_hot(labels, 10).to(dtype), loss)
    upload = [value.grad for value in model.parameters()]
    settings = {**QUICK, "iterations": iterations, "restarts": 1}
    return reconstruct(model, loss, upload, SHAPE, batch_size=count, **settings), images, labels


@pytest.mark.filterwarnings("ignore:labels are inferred from the last layer")
@in_one_test(
    ("name", "dtype", "count"),
    [
        *((name, torch.float32, 2) for name in OF_PROBABILITIES if name != "squared"),
        ("squared", torch.float32, 1),
        ("sum with weights", torch.float32, 1),
        ("sum with weights", torch.float64, 2),
    ],
)
def test_labels_of_every_loss(name: str, dtype: torch.dtype, count: int) -> None:
    found, _, labels = attacked(name, dtype, count, iterations=1)
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


@in_one_test("name", ["sum with one weight", "nll", "bce, weights of positives"])
def test_images_behind_weights(name: str) -> None:
    """A guess, all grey, is off by 0.15; the tiny network's gradient of one image has no other that fits."""
    found, images, _ = attacked(name, torch.float32, 1, iterations=250)
    assert float(errors([found.images[None]], images[None])) < 5e-3


def test_labels_of_another_loss_are_told_to_be_rough() -> None:
    with pytest.warns(AttackWarning, match="labels are inferred from the last layer"):
        attacked("squared", torch.float32, 2, iterations=1)


def test_the_wrong_loss_is_another_attack() -> None:
    """So that the test above could fail: a smoothed gradient attacked as a plain one matches worse."""
    model = mlp()
    images, labels = batch()
    gradient(model, images, labels, LOSSES["smoothed"][1])
    grads = [value.grad for value in model.parameters()]
    found = [
        reconstruct(model, loss, grads, SHAPE, attack="dlg", labels=labels.tolist(), iterations=60, restarts=1)
        for loss in (LOSSES["smoothed"][0], F.cross_entropy)
    ]
    assert found[0].loss is not None and found[1].loss is not None
    assert found[0].loss < 1e-3 * found[1].loss


def test_noise_that_is_known() -> None:
    model = mlp()
    images, labels = batch()
    gradient(model, images, labels)
    grads = [value.grad for value in model.parameters()]
    length = float(torch.stack([value.square().sum() for value in grads]).sum().sqrt())  # type: ignore[union-attr]
    clipped = [value / length for value in grads]  # type: ignore[operator]
    found = reconstruct(
        model, F.cross_entropy, clipped, SHAPE, attack="dlg", mean=MEAN, std=STD, iterations=100, restarts=3,
        mechanism={"name": "gaussian", "sigma": 1e-6, "clip_norm": 1.0},
    )  # fmt: skip
    assert float(errors([found.images[None]], images[None])) < 0.01


def test_repeats_and_leaves_model_and_generator_alone() -> None:
    model = Small().train()
    gradient(model, *batch())
    grads = forms(model)["names"]
    state, generator = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    kept = [None if value.grad is None else value.grad.clone() for value in model.parameters()]
    one, again, other = (
        reconstruct(model, F.cross_entropy, grads, SHAPE, iterations=3, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(
        (value.grad is None and was is None) or torch.equal(value.grad, was)  # type: ignore[arg-type]
        for value, was in zip(model.parameters(), kept, strict=True)
    )
    assert model.training


def test_sparse_gradients_are_taken() -> None:
    model = mlp()
    gradient(model, *batch())
    grads = [value.grad for value in model.parameters() if value.grad is not None]
    sparse = [value.to_sparse() for value in grads]
    one, other = (
        reconstruct(model, F.cross_entropy, given, SHAPE, iterations=3, restarts=1).images for given in (grads, sparse)
    )
    assert torch.equal(one, other)


def test_progress_is_told() -> None:
    model = mlp()
    gradient(model, *batch())
    told: list[tuple[int, int, float]] = []
    reconstruct(
        model, F.cross_entropy, [value.grad for value in model.parameters()], SHAPE, iterations=5,
        progress=lambda *what: told.append(what),
    )  # fmt: skip
    assert told[-1][:2] == (5, 5)


@in_one_test(
    ("model", "attack", "words"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 10)),
            "iga",
            "draws random numbers",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)), "dlg", "second derivative"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.Linear(20, 10)), "iga", "BatchNorm"),
    ],
)
def test_what_makes_an_attack_meaningless_is_a_warning(model: nn.Module, attack: str, words: str) -> None:
    grads = [torch.ones_like(value) for value in model.parameters()]
    with pytest.warns(AttackWarning, match=words):
        reconstruct(
            model, F.cross_entropy, grads, SHAPE, attack=attack, batch_size=2, labels=[0, 1], iterations=2, restarts=1
        )


def test_a_model_that_the_attack_runs_in_another_way_is_refused() -> None:
    """In evaluation mode BatchNorm takes running statistics, and the attacks those of their dummy batch."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.Linear(20, 10)).eval()
    grads = [torch.ones_like(value) for value in model.parameters()]
    with pytest.raises(InputError, match="attack iga: not attacked: its simulation of a client computes another"):
        reconstruct(model, F.cross_entropy, grads, SHAPE, batch_size=2, iterations=2, restarts=1)


def test_dropout_that_is_switched_off_is_no_reason() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 10)).eval()
    gradient(model, *batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = [value.grad for value in model.parameters()]
        reconstruct(model, F.cross_entropy, grads, SHAPE, iterations=2, mean=MEAN, std=STD)


def test_no_warning_without_a_reason() -> None:
    model = mlp().eval()
    gradient(model, *batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in ({"mean": MEAN, "std": STD}, {"value_range": (0, 1)}):
            reconstruct(
                model, F.cross_entropy, [value.grad for value in model.parameters()], SHAPE, iterations=2, **known
            )


def ones(model: nn.Module, **changes: Any) -> dict[str, Any]:
    return {name: torch.ones_like(value) for name, value in model.named_parameters()} | changes


MODEL = mlp()
LIST = [torch.ones_like(value) for value in MODEL.parameters()]
BIAS = "output.bias"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "one end of a range": ({"value_range": 6}, "value_range = 6: expected two numbers, the lowest and the highest"),
    "an empty range": ({"value_range": (1, 1)}, "value_range = (1, 1): expected finite numbers, the lower one first"),
    "an endless range": ({"value_range": (0, float("inf"))}, "value_range = (0, inf): expected finite numbers"),
    "public images out of range": (
        {"public_images": torch.ones(3, *SHAPE), "value_range": (-1, 0.5)}, "numbers from -1 to 0.5"
    ),
    "wrong shape": (
        {"upload": ones(MODEL, **{BIAS: torch.ones(9)})}, "output.bias has the shape (9,), in the model (10,)"
    ),
    "wrong shape in a list": ({"upload": [*LIST[:-1], torch.ones(9)]}, "upload: output.bias has the shape (9,)"),
    "NaN": (
        {"upload": ones(MODEL, **{BIAS: torch.full((10,), torch.nan)})}, "upload: output.bias has a NaN or infinity"
    ),
    "unknown layer": (
        {"upload": ones(MODEL, **{"output.bia": torch.ones(10)})}, "no layer with 'output.bia'; did you mean output.bi"
    ),
    "missing layer": ({"upload": {BIAS: torch.ones(10)}}, "upload: 'hidden1.weight' is missing"),
    "too short a list": ({"upload": LIST[:-1]}, "upload: a list of 3 arrays; the model's"),
    "an empty list": ({"upload": []}, "upload: a list of 0 arrays"),
    "no gradient yet": ({"upload": [None] * 4}, "call loss.backward() first"),
    "whole numbers": ({"upload": ones(MODEL, **{BIAS: torch.ones(10, dtype=torch.int64)})}, "type torch.int64"),
    "words": ({"upload": ones(MODEL, **{BIAS: ["a"] * 10})}, "output.bias is not an array of numbers"),
    "parameters": ({"parameters": LIST[:2]}, "parameters: a list of 2 arrays"),
    "attack": ({"attack": "gan"}, "attack 'gan' is not known"),
    "setting": ({"itertions": 3}, "iga has no setting 'itertions'; did you mean iterations?"),
    "another attack's setting": ({"attack": "dlg", "tv": 3}, "dlg has no setting 'tv'"),
    "value of a setting": ({"tv": -1}, "tv = -1: allowed is from 0"),
    "shape": ({"shape": (8, 8)}, "shape = (8, 8): expected (C, H, W) of one image"),
    "shape that does not fit": ({"shape": (3, 8, 8)}, "the model does not take images of shape (1, 3, 8, 8)"),
    "classes": ({"classes": 7}, "classes = 7: the model has 10 logits"),
    "labels": ({"labels": [1, 2]}, "2 labels for 1 examples"),
    "a label": ({"labels": [10]}, "numbers from 0 to 9"),
    "half a label": ({"labels": [1.5]}, "labels = [1.5]: expected whole numbers, one for each example"),
    "a word for a label": ({"labels": ["x"]}, "labels = ['x']: expected whole numbers"),
    "a label that is no list": ({"labels": 7}, "labels = 7: expected whole numbers"),
    "batch size": ({"batch_size": 0}, "batch_size = 0: allowed is from 1"),
    "local steps without a rate": ({"local_steps": 2}, "give its learning_rate, too"),
    "rate": ({"learning_rate": -0.1}, "learning_rate = -0.1: allowed is above 0"),
    "optimizer": ({"optimizer": "lion", "learning_rate": 0.1}, "optimizer = 'lion': allowed: sgd, adam"),
    "momentum": ({"momentum": 1.0, "learning_rate": 0.1}, "momentum = 1: allowed is below 1"),
    "examples": ({"examples": 3, "batch_size": 2}, "hold from 2 to 2 distinct examples"),
    "public images' shape": (
        {"public_images": torch.zeros(30, 8, 8)}, "public_images has the shape (30, 8, 8); expected (M, 1, 8, 8)"
    ),
    "public images' scale": ({"public_images": torch.full((30, 1, 8, 8), 16.0)}, "numbers from 0 to 1"),
    "public images of another type": ({"public_images": torch.zeros(30, 1, 8, 8).int()}, "floating-point numbers"),
    "no public image": ({"public_images": torch.zeros(0, 1, 8, 8)}, "public_images has the shape (0, 1, 8, 8)"),
    "public words": ({"public_images": [["a"]]}, "public_images is not an array of numbers"),
    "mean": ({"mean": [0.1, 0.2, 0.3]}, "mean has 3 numbers; expected one, or one for each of the 1 channels"),
    "std": ({"std": 0.0}, "std = (0.0,): expected finite numbers, above zero"),
    "mechanism": ({"mechanism": {"name": "gausian"}}, "mechanism.name: "),
    "no noise": ({"mechanism": {"name": "vmf"}}, "vmf needs exactly one of"),
    "target": ({"mechanism": {"name": "vmf", "epsilon": 3.0}}, "give the noise itself"),
    "noise elsewhere": ({"mechanism": {"name": "central", "sigma": 1.0}}, "'central': would leave without noise here"),
    "shares": ({"mechanism": {"name": "hgm", "sigma": 1.0}}, "needs the redistribution"),
    **{
        f"{name} {value!r}": ({name: value}, f"{name} = {'true' if value is True else repr(value)}: ")
        for name, values in {
            "upload": [None, 3, "ab"],
            "parameters": [3],
            "shape": [None, 8, (1, 8, "8"), (1, 8, 8.5), (True, 8, 8)],
            "learning_rate": ["x", True, float("nan")],
            "momentum": ["x", True],
            "mean": ["a", [[0.0]]],
            "seed": [-1, 1.5, "a", True, None, 2**63],
            "mechanism": [3, "gaussian"],
            "progress": [3],
            "value_range": [(0, 1e39)],
        }.items()
        for value in values
    },
    "an upload by numbers": ({"upload": dict(enumerate(LIST))}, "upload: its keys are [0, 1, 2]; expected names of"),
    "a list of attacks": ({"attack": ["iga"]}, "attack ['iga'] is not known"),
    "a repeat that is no pair": ({"repeats": [LIST]}, "repeats: expected a list of pairs (parameters, upload)"),
    "a number of repeats": ({"repeats": 3}, "repeats: expected a list of pairs (parameters, upload)"),
    "a batch larger than memory": ({"batch_size": 10**9}, "one dummy batch of 1000000000 image(s) through this"),
    "a batch of loops": ({"batch_size": 10**8, "learning_rate": 0.1, "local_steps": 10}, "one dummy batch of"),
    "loss": ({"loss": lambda logits, labels: logits}, "the loss must be one finite number for a batch"),
    "loss of numbers only": ({"loss": F.nll_loss}, "the loss cannot be computed from logits and label probabilities"),
    "a loss that does not show labels": ({"loss": nn.L1Loss()}, "labels cannot be told from gradients of this loss"),
    "a loss that goes uphill": ({"loss": lambda a, b: -F.cross_entropy(a, b)}, "labels cannot be told from gradients"),
    "a class that is ignored": ({"loss": nn.CrossEntropyLoss(ignore_index=3)}, "ignore_index is not supported"),
    "no sum of losses": ({"loss": nn.CrossEntropyLoss(reduction="none")}, "the loss must be one finite number"),
    "loss of another mean": ({"loss": lambda a, b: 2 * F.cross_entropy(a, b) / len(a)}, "neither the mean nor the sum"),
}  # fmt: skip


@in_one_test("name", MISTAKES)
def test_mistakes_are_one_line(name: str) -> None:
    changes, words = MISTAKES[name]
    arguments = {"loss": F.cross_entropy, "upload": LIST, "shape": SHAPE, "iterations": 2, **changes}
    with pytest.raises(InputError) as caught:
        reconstruct(MODEL, arguments.pop("loss"), arguments.pop("upload"), arguments.pop("shape"), **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@in_one_test(
    ("model", "words"),
    [
        (nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(256, 10)), "takes whole numbers, such as tokens"),
        (nn.Flatten(), "no trained parameters"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), "at least two classes"),
        (nn.Conv2d(1, 2, 3), "expected logits (1, classes)"),
    ],
)
def test_models_that_cannot_be_attacked(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError) as caught:
        reconstruct(model, F.cross_entropy, [torch.ones_like(value) for value in model.parameters()], SHAPE)
    assert words in str(caught.value)


@in_one_test("model", [None, lambda images: images, Small, 3])
def test_what_is_no_model_is_one_line(model: Any) -> None:
    with pytest.raises(InputError, match=r"^model = .*: expected an instance of torch\.nn\.Module$"):
        reconstruct(model, F.cross_entropy, LIST, SHAPE)


def table_row() -> tuple[nn.Module, Tensor, list[Tensor]]:
    """A model of standardised rows of a table, one row, and its gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, row = nn.Sequential(nn.Flatten(), nn.Linear(12, 30), nn.Sigmoid(), nn.Linear(30, 3)), torch.randn(1, 12)
    loss = F.cross_entropy(model(row.view(1, 1, 1, 12)), torch.tensor([1]))
    return model, row, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.filterwarnings("ignore")
def test_a_network_in_opacus_wrapper_is_attacked_as_what_is_inside() -> None:
    """Under either's names; the wrapper goes on computing gradients of single examples."""
    wrapper = pytest.importorskip("opacus").GradSampleModule
    model, row, gradients = table_row()
    bare = reconstruct(model, F.cross_entropy, gradients, (1, 1, 12), iterations=3)
    wrapped = wrapper(model)
    for names in (dict(model.named_parameters()), dict(wrapped.named_parameters())):
        upload = dict(zip(names, gradients, strict=True))
        found = reconstruct(wrapped, F.cross_entropy, upload, (1, 1, 12), iterations=3)
        assert torch.equal(found.images, bare.images)
    wrapped(row.view(1, 1, 1, 12)).sum().backward()
    assert all(len(value.grad_sample) == 1 for value in model.parameters())


@pytest.mark.parametrize("attack", ["dlg", "closed_form"])
def test_a_row_of_a_table_needs_its_range(attack: str) -> None:
    model, row, gradients = table_row()
    found = reconstruct(model, F.cross_entropy, gradients, (1, 1, 12), attack=attack, value_range=(-6, 6))
    assert float((found.images.flatten(1) - row).square().mean()) < 1e-6
    assert "bound" not in found.note


@pytest.mark.parametrize("attack", ["dlg", "closed_form", "iga", "map"])
def test_clipping_to_a_range_that_was_assumed_is_a_warning(attack: str) -> None:
    model, row, gradients = table_row()
    with pytest.warns(AttackWarning, match=r"values lie on a bound of \[0, 1\], the assumed range"):
        few: dict[str, Any] = {} if attack == "closed_form" else {"iterations": 60}
        found = reconstruct(model, F.cross_entropy, gradients, (1, 1, 12), attack=attack, **few)
    assert float((found.images.flatten(1) - row).square().mean()) > 0.1
    assert "lie on a bound" in found.note


def test_a_range_is_a_unit() -> None:
    """The same pictures from 0 to 255 and from 0 to 1."""
    images, labels = batch()
    model = mlp()
    gradient(model, images, labels)
    grads = [value.grad for value in model.parameters()]
    public = digits()[0][10:20]
    one = reconstruct(model, F.cross_entropy, grads, SHAPE, **QUICK, public_images=public)
    scaled = {**QUICK, "mean": 255 * np.asarray(MEAN), "std": 255 * np.asarray(STD), "value_range": (0, 255)}
    other = reconstruct(model, F.cross_entropy, grads, SHAPE, **scaled, public_images=255 * public)
    assert torch.allclose(one.images, other.images / 255, atol=1e-4)


def test_a_model_that_cannot_be_differentiated_twice() -> None:
    class Margins(Small):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            margins = F.multi_margin_loss(logits, torch.zeros(len(x), dtype=torch.long), reduction="none")
            return logits * (1 + margins[:, None])

    model = Margins()
    gradient(model, *batch())
    with pytest.warns(AttackWarning, match="cannot be differentiated twice"), pytest.raises(InputError, match="iga"):
        reconstruct(model, F.cross_entropy, forms(model)["names"], SHAPE, attack="iga", iterations=2)


def test_arrays_are_copied() -> None:
    model = mlp()
    arrays = [value.detach().numpy().copy() for value in model.parameters()]
    before = [array.copy() for array in arrays]
    reconstruct(model, F.cross_entropy, arrays, SHAPE, iterations=2, parameters=arrays)
    assert all(np.array_equal(one, other) for one, other in zip(arrays, before, strict=True))
