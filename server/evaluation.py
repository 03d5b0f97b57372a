"""Central evaluation of the global model on the test data."""

import torch
from torch.nn import functional

from fedpriv.world import State, World

__all__ = ["evaluate"]

_BATCH = 1000


def evaluate(world: World, state: State) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy (0 to 1) of ``state`` on the whole test set."""
    model, dataset = world.model, world.dataset
    state.load_into(model)
    model.eval()
    loss, right = 0.0, 0
    with torch.inference_mode():
        for images, labels in zip(dataset.x_test.split(_BATCH), dataset.y_test.split(_BATCH), strict=True):
            logits = model(world.network_input(images))
            target = labels.to(world.device)
            loss += functional.cross_entropy(logits, target, reduction="sum").item()
            right += int((logits.argmax(1) == target).sum())
    return loss / len(dataset.y_test), right / len(dataset.y_test)
