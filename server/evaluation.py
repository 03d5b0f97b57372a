"""Central evaluation of the global model on the test data."""

import torch
from torch.nn import functional

from fedpriv.randomness import torch_stream
from fedpriv.smoothing import drawing
from fedpriv.world import State, World

__all__ = ["evaluate", "evaluate_noisy"]

_BATCH = 1000


def evaluate(world: World, state: State) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy (0 to 1) of ``state`` on the test set.

    Without the images that teachers were asked about: the student has learnt them.
    """
    model, dataset = world.model, world.dataset
    x, y = dataset.x_test, dataset.y_test
    if len(world.measured_rows) < len(y):
        x, y = x[world.measured_rows], y[world.measured_rows]
    state.load_into(model)
    model.eval()
    loss, right = 0.0, 0
    with torch.inference_mode():
        for images, labels in zip(x.split(_BATCH), y.split(_BATCH), strict=True):
            logits = model(world.network_input(images))
            target = labels.to(world.device)
            loss += functional.cross_entropy(logits, target, reduction="sum").item()
            right += int((logits.argmax(1) == target).sum())
    return loss / len(y), right / len(y)


def evaluate_noisy(world: World, state: State, round_number: int) -> float | None:
    """Return the accuracy (0 to 1) of ``state`` on the test set with one draw of its noise an image.

    Args:
        world: the experiment, built.
        state: the global model.
        round_number: the round, 0 before training; each has a stream of its own, in which images have fixed places.

    Returns:
        ``None`` where the forward pass has no noise.
    """
    if world.smoothing is None:
        return None
    model, dataset = world.model, world.dataset
    state.load_into(model)
    model.eval()
    stream = torch_stream(world.experiment.seed, "robustness-evaluation", round_number, device=world.device)
    right = 0
    with drawing(world.smoothing, model, stream), torch.inference_mode():
        for images, labels in zip(dataset.x_test.split(_BATCH), dataset.y_test.split(_BATCH), strict=True):
            right += int((model(world.network_input(images)).argmax(1).cpu() == labels).sum())
    return right / len(dataset.y_test)
