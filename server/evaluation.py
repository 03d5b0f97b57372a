"""Central evaluation of the global model on the test data."""

import torch
from torch.nn import functional

from fedpriv.randomness import torch_stream
from fedpriv.smoothing import drawing
from fedpriv.world import State, World

__all__ = ["evaluate", "evaluate_noisy"]

_BATCH = 1000
_TOKENS = 8192  # of a batch of texts


def evaluate(world: World, state: State) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy (0 to 1) of ``state`` on the test set.

    Of sequences both are means over all tokens that are predicted: nats per token, and the share that is the likeliest.
    Without the images that teachers were asked about: the student has learnt them.
    """
    model, dataset = world.model, world.dataset
    x, y = dataset.x_test, dataset.y_test
    if len(world.measured_rows) < len(y):
        x, y = x[world.measured_rows], y[world.measured_rows]
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
