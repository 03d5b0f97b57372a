"""Labels of local training by a search on the logits: what each step does to them, and so to the steps after it.

A step on an example of class c moves the logits by ``-rate k (softmax - label)``, where k, the gain, is what examples'
gradients have in common (for the last layer alone 1 + the squared length of its input, some 200 in a LeNet of
sigmoids). Already at a rate of 0.01 the logits move by more than 1 in a step: the next example meets another softmax,
and the last bias, whose update adds these vectors up, shows the labels of early steps less than those of late ones. But
the images hardly matter before a network is trained. So the training of logits alone, which costs next to nothing, is
tried out for thousands of label sequences.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels.trial_training import neighbours
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.attacks.reconstruction.upload_model.unroll import LocalTraining, local_optimizer, unrolled_update

__all__ = ["LogitSearch"]

GAINS = (0.5, 0.63, 0.79, 1.0, 1.26, 1.59, 2.0)  # images differ; times the gain at random images
NUDGE = 1e-3  # of a step, along which the gain is measured
WIDTH = 64  # sequences of labels that are improved side by side
MOST = 8192  # sequences that are tried in one round, at most


class LogitSearch:
    """Training of the logits alone, against what was heard of the last layer.

    Args:
        network: the network.
        victim: an upload that was trained for.
        name: the last layer's bias, or its weight where it has none.
        images: random ones (R, B, C, H, W), at which softmax and gain are measured.
        classes: number of classes.
    """

    def __init__(self, network: Network, victim: Victim, name: str, images: Tensor, classes: int) -> None:
        training = victim.model.training
        if training is None:
            raise ValueError("this upload is one gradient; there is no local training to search with")
        self._training = training
        self._classes = classes
        with torch.no_grad():
            self._logits = network.logits(victim.parameters, images.flatten(0, 1)).mean(dim=0)
            self._measure(network, victim, name, images)

    def _measure(self, network: Network, victim: Victim, name: str, images: Tensor) -> None:
        """Measure the gain on one step of single examples, and read the sum of all steps off what was heard."""
        first = replace(self._training, steps=1, batch_size=1, clients=1)
        count = len(images)
        labels = torch.arange(count, device=images.device) % self._classes
        one_hot = F.one_hot(labels, self._classes).to(images)
        update = unrolled_update(network, victim.parameters, images[:, :1], one_hot[:, None], first)
        steps = self._steps(first, labels[:, None, None], self._logits.new_zeros(1))[0]
        gains, inputs = [], []
        for row in range(count):
            moved = {key: value + NUDGE * update[key][row] for key, value in victim.parameters.items()}
            others = images[(row + 1) % count]
            change = (network.logits(moved, others) - network.logits(victim.parameters, others)).mean(dim=0) / NUDGE
            length = steps[row].square().sum()
            gains.append((change * steps[row]).sum() / length)
            inputs.append(steps[row] @ update[name][row].reshape(self._classes, -1) / length)
        gain, layer_input = torch.stack(gains).mean(), torch.stack(inputs).mean(dim=0)
        self._gains = gain * torch.tensor(GAINS).to(gain)
        # In gradient space; the bias has an input of 1.
        heard = victim.gradient[name].reshape(self._classes, -1)
        scale = victim.model.signed * victim.model.step
        self._heard = scale * (heard @ layer_input) / layer_input.square().sum()

    def _steps(self, training: LocalTraining, labels: Tensor, gains: Tensor) -> Tensor:
        """The bias' update (G, M, classes) with labels (M, clients, b) and gains (G,), averaged over the clients."""
        counts = F.one_hot(labels, self._classes).to(self._logits)
        optimizer = local_optimizer(training)
        change = self._logits.new_zeros(len(gains), *labels.shape[:2], self._classes)
        for batch in training.batches(labels.shape[2]):
            softmax = (self._logits + gains[:, None, None, None] * change).softmax(dim=3)
            step = optimizer({"bias": softmax - counts[:, :, batch].mean(dim=2)})
            change = change + step["bias"]
        return change.mean(dim=2)

    def distances(self, candidates: Tensor) -> Tensor:
        """Squared distance (M,) of what was heard and the update of candidates (M, B), at the gain that fits best."""
        labels = candidates.unflatten(1, (self._training.clients, -1))
        updates = self._steps(self._training, labels, self._gains)
        closest: Tensor = (updates - self._heard).square().sum(dim=2).amin(dim=0)
        return closest

    def search(self, start: Tensor) -> Tensor:
        """Improve several sequences of labels side by side, by exchanging single labels and the places of two.

        Args:
            start: (B,).

        Returns:
            (M, B), the best first.
        """
        same = torch.arange(self._classes, device=start.device)[:, None].expand(-1, len(start))
        kept = torch.cat([start[None], same])
        width = min(WIDTH, max(1, MOST // len(neighbours(kept[:1], self._classes, self._training.batch_size))))
        for _ in range(2 * len(start)):
            # Of very many, evenly spread ones: the search then takes its steps among these.
            tried = neighbours(kept[:width], self._classes, self._training.batch_size)
            tried = torch.cat([kept, tried[:: -(-len(tried) // MOST)]]).unique(dim=0)
            best = tried[self.distances(tried).argsort(stable=True)[:WIDTH]]
            if torch.equal(best, kept):
                break
            kept = best
        return kept
