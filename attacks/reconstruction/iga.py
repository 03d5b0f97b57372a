"""Inverting Gradients (Geiping et al. 2020): angle and total variation, Adam on the sign of the gradient, in a box.

Labels are read off the last layer first; where that is not possible they are optimised with the images.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attacks.reconstruction.distances import angle, total_variation
from attacks.reconstruction.evaluation import Evaluator
from attacks.reconstruction.labels import read_labels
from attacks.reconstruction.matching import Matcher
from attacks.reconstruction.results import Outcome
from attacks.reconstruction.scene import Report, Scene
from attacks.reconstruction.uploads import Victim
from fedpriv.config import IgaConfig

__all__ = ["run_iga"]

MILESTONES = (3 / 8, 5 / 8, 7 / 8)  # of the steps; at each the learning rate falls to a tenth
JOINT = "labels could not be read off the last layer and were optimised with the images"


def run_iga(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: IgaConfig, report: Report
) -> Outcome:
    """Run the attack on rows of (victim, restart) together.

    Args:
        scene: what is public.
        rows: the victim of each row.
        images: starts (N, B, C, H, W), normalised.
        logits: starts of the labels' logits (N, B, classes), for rows whose labels cannot be read off.
        config: steps, learning rate, weight of the total variation.
        report: told how it goes.
    """
    matcher = Matcher(scene.network, rows, angle)
    labels = _Labels(scene, rows)
    images, logits = scene.box(images), logits.clone()
    adam = torch.optim.Adam([images, logits], lr=config.learning_rate)
    steps = [int(share * config.iterations) for share in MILESTONES]
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, milestones=steps, gamma=0.1)
    best = _Best(images, logits)

    def objective(images: Tensor, logits: Tensor) -> Tensor:
        return matcher(images, labels.probabilities(logits)) + config.tv * total_variation(images)

    evaluate = Evaluator(objective, config.iterations)
    for step in range(config.iterations):
        losses, gradients = evaluate(images, logits)
        best.keep(losses, images, logits)
        _step(adam, (images, logits), gradients)
        schedule.step()
        images.copy_(scene.box(images))
        report(step + 1, best.losses)
    best.keep(objective(images, logits).detach(), images, logits)
    iterations = torch.full((len(rows),), config.iterations)
    return Outcome(best.images, labels.final(best.logits), best.losses, iterations, labels.notes)


def _step(adam: torch.optim.Adam, variables: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """One step of Adam that sees the signs of the gradients only: elementwise, so rows stay apart."""
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.grad = gradient.sign()
    adam.step()


class _Best:
    """The iterate of each row whose own loss was the lowest so far, with that loss; a NaN never is the lowest."""

    def __init__(self, images: Tensor, logits: Tensor) -> None:
        self.images = images.detach().clone()
        self.logits = logits.detach().clone()
        self.losses = images.new_full((len(images),), torch.inf, requires_grad=False)

    def keep(self, losses: Tensor, images: Tensor, logits: Tensor) -> None:
        """Compare the losses (N,) at these very images with the lowest ones so far."""
        lower = losses < self.losses
        self.losses = torch.where(lower, losses, self.losses)
        self.images = torch.where(lower[:, None, None, None, None], images.detach(), self.images)
        self.logits = torch.where(lower[:, None, None], logits.detach(), self.logits)


class _Labels:
    """Label probabilities of each row: of labels that are known or read off, else a softmax that is optimised."""

    def __init__(self, scene: Scene, rows: Sequence[Victim]) -> None:
        read = read_labels(scene, rows)
        unknown = torch.zeros(rows[0].model.examples, dtype=torch.long, device=scene.network.device)
        known = torch.stack([unknown if labels is None else labels for labels in read])
        self._read = torch.tensor([labels is not None for labels in read], device=known.device)
        self._known = F.one_hot(known, scene.classes).to(scene.mean)
        self.notes = tuple(JOINT if labels is None else "" for labels in read)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(N, B, classes)."""
        if bool(self._read.all()):
            return self._known
        return torch.where(self._read[:, None, None], self._known, logits.softmax(dim=2))

    def final(self, logits: Tensor) -> Tensor:
        """The labels (N, B) that belong to these logits."""
        return self.probabilities(logits).argmax(dim=2)
