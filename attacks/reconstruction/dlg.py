"""Deep Leakage from Gradients (Zhu et al. 2019): dummy images and soft labels, squared distance, L-BFGS.

Improved DLG (Zhao et al. 2020) reads the labels off the last layer first and optimises the images alone.

The images are not bounded while they are optimised, as in the paper; only the result is clamped. What is optimised are
not pixels but coordinates in which the pixels of photographs are independent, which needs a tenth of the steps (see
:mod:`~attacks.reconstruction.coordinates`). It is computed in float64 where the device has that: near a match the
distance is a small difference of large numbers.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attacks.reconstruction.coordinates import coordinates_of
from attacks.reconstruction.distances import squared_distance
from attacks.reconstruction.labels import read_labels
from attacks.reconstruction.lbfgs import minimise
from attacks.reconstruction.matching import Matcher
from attacks.reconstruction.results import Outcome
from attacks.reconstruction.scene import Report, Scene
from attacks.reconstruction.uploads import Victim
from fedpriv.config import DlgConfig

__all__ = ["run_dlg", "run_idlg"]

# A squared distance of so much of the upload's squared length is a match: float32 cannot tell much more apart.
SOLVED = 1e-12


def run_dlg(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: DlgConfig, report: Report
) -> Outcome:
    """Run the attack on rows of (victim, restart) together.

    Args:
        scene: what is public.
        rows: the victim of each row.
        images: starts (N, B, C, H, W), standard normal coordinates of images.
        logits: starts of the labels' logits (N, B, classes).
        config: how long.
        report: told how it goes.
    """
    problem = _Problem(scene, rows, images.shape[1])
    start = _widest(torch.cat([images.flatten(1), logits.flatten(1)], dim=1))
    found = minimise(problem, start, config.iterations, report, SOLVED * _squared_lengths(rows))
    images, _ = problem.split(found.points)
    labels = problem.probabilities(found.points, torch.arange(len(rows))).argmax(dim=2)
    return Outcome(images, labels, found.values, found.iterations, ("",) * len(rows))


def run_idlg(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: DlgConfig, report: Report
) -> Outcome:
    """Run the attack with labels that are read off first; arguments as for :func:`run_dlg`."""
    told: dict[int, Victim] = {}
    for victim, labels in zip(rows, read_labels(scene, rows), strict=True):
        told.setdefault(id(victim), replace(victim, labels=labels))
    return run_dlg(scene, [told[id(victim)] for victim in rows], images, logits, config, report)


def _squared_lengths(rows: Sequence[Victim]) -> Tensor:
    """The squared norm of each row's heard gradient: (N,)."""
    return torch.stack(
        [torch.stack([_widest(value).square().sum() for value in victim.gradient.values()]).sum() for victim in rows]
    )


def _widest(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()


class _Problem:
    """Value and gradient of the mismatch as a function of images' coordinates and label logits in one vector a row.

    The logits of a victim whose labels are known have no effect.
    """

    def __init__(self, scene: Scene, rows: Sequence[Victim], examples: int) -> None:
        self._scene = scene
        self._examples = examples
        self._coordinates = coordinates_of(scene.shape).to(_widest(scene.mean))
        precise = scene.network.device.type != "mps"
        self._all = Matcher(scene.network, rows, squared_distance, "float64" if precise else None)
        self._index = torch.arange(len(rows))
        self._matcher = self._all
        unknown = torch.zeros(examples, dtype=torch.long, device=scene.network.device)
        labels = torch.stack([unknown if victim.labels is None else victim.labels for victim in rows])
        self._known = torch.tensor([victim.labels is not None for victim in rows], device=labels.device)
        self._labels = F.one_hot(labels, scene.classes)

    def __call__(self, points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.equal(index.cpu(), self._index):
            self._index, self._matcher = index.cpu(), self._all.select(index)
        variables = points.detach().requires_grad_()
        values = self._matcher(self.split(variables)[0], self.probabilities(variables, index))
        (gradients,) = torch.autograd.grad(values.sum(), variables)
        return values.detach(), gradients

    def probabilities(self, points: Tensor, index: Tensor) -> Tensor:
        """Label probabilities (M, B, classes) of points of these rows (M,)."""
        soft = self.split(points)[1].softmax(dim=2)
        rows = index.to(soft.device)
        return torch.where(self._known[rows, None, None], self._labels[rows].to(soft), soft)

    def split(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Images (M, B, C, H, W), normalised, and label logits (M, B, classes) of points (M, D)."""
        pixels = self._scene.pixels * self._examples
        coordinates = points[:, :pixels].unflatten(1, (self._examples, *self._scene.shape))
        return self._coordinates.images(coordinates), points[:, pixels:].unflatten(
            1, (self._examples, self._scene.classes)
        )
