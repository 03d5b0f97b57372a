"""Central evaluation of the global model on the test data."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import ClientAccuracy
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
    client_accuracy: ClientAccuracy | None = None
    other_accuracy: ClientAccuracy | None = None


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
    scores = _scored(world, state, rows)
    by_client = _by_client(world, scores, rows) if world.experiment.federation.evaluate == "clients" else (None, None)
    return Evaluation(
        scores.mean_loss, scores.accuracy, _noisy_accuracy(world, state, number, rows), len(rows), *by_client
    )


def evaluate(world: World, state: State, rows: Tensor | None = None) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy (0 to 1) of ``state`` on the test data.

    Of sequences both are means over all tokens that are predicted: nats per token, and the share that is the likeliest.
    Without ``rows`` (R,) all test examples count that the model has not learnt.
    """
    scores = _scored(world, state, world.measured_rows if rows is None else rows)
    return scores.mean_loss, scores.accuracy


@dataclass(frozen=True, eq=False)
class _ExampleScores:
    """Of test examples."""

    loss: float  # summed over all targets
    right: np.ndarray  # (R,), how many targets of each example are the likeliest
    targets: np.ndarray  # (R,), how many each has

    @property
    def mean_loss(self) -> float:
        return self.loss / max(int(self.targets.sum()), 1)

    @property
    def accuracy(self) -> float:
        return int(self.right.sum()) / max(int(self.targets.sum()), 1)


def _scored(world: World, state: State, rows: Tensor) -> _ExampleScores:
    loss, right, targets = 0.0, [], []
    with torch.no_grad():
        for logits, target in _outputs(world, state, rows):
            loss += functional.cross_entropy(logits, target, reduction="sum").item()
            right.append((logits.argmax(1) == target).cpu())
            targets.append((target >= 0).cpu())
    by_example = [torch.cat(each).view(len(rows), -1).sum(1).numpy() for each in (right, targets)]
    return _ExampleScores(loss, by_example[0], by_example[1])


def _by_client(
    world: World, scores: _ExampleScores, rows: Tensor
) -> tuple[ClientAccuracy | None, ClientAccuracy | None]:
    """The accuracy of the clients that take part, and of other keys, on the test examples of each."""
    keys = world.dataset.tested_keys()
    owners = keys.test[rows.numpy()]
    right, targets = (np.bincount(owners, each, len(keys.names)) for each in (scores.right, scores.targets))
    takes_part = np.zeros(len(keys.names), dtype=bool)
    takes_part[[keys.train[world.partitions[client][0]] for client in range(len(world.partitions))]] = True
    known = targets > 0
    accuracy = right / np.maximum(targets, 1)
    return _distribution(accuracy[known & takes_part]), _distribution(accuracy[known & ~takes_part])


def _distribution(accuracy: np.ndarray) -> ClientAccuracy | None:
    if not len(accuracy):
        return None
    low, median, high = np.quantile(accuracy, (0.1, 0.5, 0.9)).tolist()
    return ClientAccuracy(len(accuracy), median, low, high, float(accuracy.min()))


def _noisy_accuracy(world: World, state: State, number: int, rows: Tensor) -> float | None:
    """The accuracy with one draw of the forward pass's noise an image, from a round's stream; ``None`` without."""
    if world.forward_noise is None:
        return None
    drawing = world.forward_noise.drawing(world.experiment.seed, number, evaluates=True)
    with drawing, torch.no_grad():
        right = sum(int((logits.argmax(1) == target).sum()) for logits, target in _outputs(world, state, rows))
    return right / len(rows)


def _outputs(world: World, state: State, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (n, K) of the model and labels (n,) of these test examples, a batch at a time."""
    model, dataset = world.model, world.dataset
    x, y = dataset.x_test, dataset.y_test
    if len(rows) < len(y):  # all of them are not copied
        x, y = x[rows], y[rows]
    state.load_into(model)
    model.eval()
    batch = _BATCH if dataset.text is None else max(1, _TOKENS // dataset.shape[-1])
    for images, labels in zip(x.split(batch), y.split(batch), strict=True):
        yield model(world.network_input(images)).flatten(0, -2), labels.to(world.device).flatten()
