"""Labels of local training by trials: the training itself, on random images with candidates for the labels.

After several steps an update is no sum over examples: what a label adds depends on the labels of the steps before, with
momentum also on its step, and Adam divides by the gradients' size. So candidates are tried out.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["TrialTraining", "neighbours"]

NEIGHBOURS = 512  # candidates that are tried at once, at most


class TrialTraining:
    """Local training on random images with candidate labels, against what was heard of the last layer.

    Args:
        network: the network.
        victim: an upload that was trained for.
        name: the last layer's bias, or its weight where it has none.
        images: random ones (R, B, C, H, W).
        classes: number of classes.
    """

    def __init__(self, network: Network, victim: Victim, name: str, images: Tensor, classes: int) -> None:
        self._network = network
        self._victim = victim
        self._name = name
        self._classes = classes
        self._images = images
        self._batch = victim.model.batch

    def improve(self, candidates: Tensor) -> Tensor:
        """Exchange single labels, or the places of two, of the best candidate while that brings the update closer.

        Args:
            candidates: (M, B).

        Returns:
            The labels (B,), in the order in which the local steps take them.
        """
        distances = self.distances(candidates)
        labels, best = candidates[distances.argmin()], float(distances.min())
        for _ in range(2 * len(labels)):
            nearby = neighbours(labels[None], self._classes, self._batch)
            # Of very many, evenly spread ones: the search then takes its steps among these.
            nearby = nearby[:: -(-len(nearby) // NEIGHBOURS)]
            distances = self.distances(nearby)
            nearest = int(distances.argmin())
            if not float(distances[nearest]) < best * (1 - 1e-6):
                break
            best, labels = float(distances[nearest]), nearby[nearest]
        return labels

    def distances(self, candidates: Tensor) -> Tensor:
        """Squared distance (M,) of what was heard and the mean update of candidates (M, B) over the random images."""
        heard = self._victim.gradient[self._name]
        repeats = len(self._images)
        rows = candidates.repeat_interleave(repeats, dim=0)
        images = self._images.repeat(len(candidates), 1, 1, 1, 1)
        updates = []
        channels, height, width = images.shape[2:]
        with torch.no_grad():
            for part in chunks(self._network, [self._victim] * len(rows), (channels, height, width), self._classes):
                labels = F.one_hot(rows[part.start : part.stop], self._classes).to(images)
                sent = self._victim.model.trained(
                    self._network, self._victim.parameters, images[part.start : part.stop], labels
                )
                updates.append(sent[self._name])
        means = torch.cat(updates).unflatten(0, (len(candidates), repeats)).mean(dim=1)
        distances: Tensor = (means - heard).flatten(1).square().sum(dim=1)
        return distances


def neighbours(labels: Tensor, classes: int, batch: int) -> Tensor:
    """Return all labels (M, B) that differ from one of some (N, B) in one place, or have two places exchanged.

    Each ``batch`` labels in a row belong to one step, where their order does not matter: they come in ascending order.
    """
    examples = labels.shape[1]
    places = torch.arange(examples, device=labels.device)
    changed = labels[:, None, None].repeat(1, examples, classes, 1)
    changed[:, places, :, places] = torch.arange(classes, device=labels.device)
    pairs = list(itertools.combinations(range(examples), 2))
    orders = places.repeat(len(pairs), 1)
    for order, (first, second) in zip(orders, pairs, strict=True):
        order[first], order[second] = second, first
    candidates = torch.cat([changed.flatten(0, 2), labels[:, orders].flatten(0, 1)])
    batch = min(batch, examples)
    if examples % batch == 0:
        candidates = candidates.unflatten(1, (-1, batch)).sort(dim=2).values.flatten(1)
    distinct: Tensor = candidates.unique(dim=0)
    return distinct
