"""Central evaluation of the global model on the test data."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import State, World

_BATCH = 1000
_TOKENS = 8192  # of a batch of texts


@dataclass(frozen=True)
class Evaluation:
    """What the line of a round says of the model: the keys of :class:`~fedpriv.core.records.RoundRecord` about it."""

    loss: float | None = None
    accuracy: float | None = None
    noisy_accuracy: float | None = None
    evaluated: int = 0


def evaluate_round(world: World, state: State, number: int) -> Evaluation:
    """Evaluate the model after a round as often, and on as much, as the settings say; the last round on all."""
    federation = world.experiment.federation
    if number == federation.rounds:
        return evaluate_all(world, state, number)
    if number % federation.evaluate_every:
        return Evaluation()
    return _evaluation(world, state, number, _chosen_rows(world))


def evaluate_all(world: World, state: State, number: int) -> Evaluation:
    """Evaluate the model after a round on all test data that it has not learnt."""
    return _evaluation(world, state, number, world.measured_rows)


def _chosen_rows(world: World) -> Tensor:
    """The test examples (R,) that evaluations are of which are not on all: the same in each, ascending."""
    rows, wanted = world.measured_rows, world.experiment.federation.evaluate_examples
    if wanted is None:
        return rows
    order = numpy_stream(world.experiment.seed, "evaluation").permutation(len(rows))
    return rows[torch.from_numpy(order[:wanted]).sort().values]


def _evaluation(world: World, state: State, number: int, rows: Tensor) -> Evaluation:
    loss, accuracy = evaluate(world, state, rows)
    return Evaluation(loss, accuracy, _noisy_accuracy(world, state, number, rows), len(rows))


def evaluate(world: World, state: State, rows: Tensor | None = None) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy (0 to 1) of ``state`` on the test data.

    Of sequences both are means over all tokens that are predicted: nats per token, and the share that is the likeliest.
    Without ``rows`` (R,) all test examples count that the model has not learnt.
    """
    model, dataset = world.model, world.dataset
    x, y = _test_data(world, world.measured_rows if rows is None else rows)
    state.load_into(model)
    model.eval()
    loss, right, targets = 0.0, 0, 0
    batch = _BATCH if dataset.text is None else max(1, _TOKENS // dataset.shape[-1])
    with torch.inference_mode():
        for images, labels in zip(x.split(batch), y.split(batch), strict=True):
            logits = model(world.network_input(images)).flatten(0, -2)
            target = labels.to(world.device).flatten()
            loss += functional.cross_entropy(logits, target, reduction="sum").item()
            right += int((logits.argmax(1) == target).sum())
            targets += int((target >= 0).sum())
    return loss / max(targets, 1), right / max(targets, 1)


def _noisy_accuracy(world: World, state: State, number: int, rows: Tensor) -> float | None:
    """The accuracy with one draw of the forward pass's noise an image; ``None`` where it has none.

    Each round has a stream of its own, in which images have fixed places.
    """
    if world.forward_noise is None:
        return None
    model = world.model
    x, y = _test_data(world, rows)
    state.load_into(model)
    model.eval()
    drawing = world.forward_noise.drawing(model, world.experiment.seed, number, evaluates=True)
    right = 0
    with drawing, torch.inference_mode():
        for images, labels in zip(x.split(_BATCH), y.split(_BATCH), strict=True):
            right += int((model(world.network_input(images)).argmax(1).cpu() == labels).sum())
    return right / len(y)


def _test_data(world: World, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Test images and labels; all of them are not copied."""
    x, y = world.dataset.x_test, world.dataset.y_test
    return (x, y) if len(rows) == len(y) else (x[rows], y[rows])
