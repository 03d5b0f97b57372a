"""What a recipe minimises: one number a row, as a function of the images' variables and the labels' logits."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.labels.last_layer import JOINT, read_labels
from fedpriv.attacks.reconstruction.matching.coordinates import Coordinates, coordinates_of
from fedpriv.attacks.reconstruction.matching.matcher import Matcher
from fedpriv.attacks.reconstruction.matching.relaxation import Relaxation, relaxation_of
from fedpriv.attacks.reconstruction.recipes.parts import (
    AROUND,
    FOUND,
    OBJECTIVES,
    PRIORS,
    STARTS,
    Recipe,
    annealed,
)
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.starts import Start
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["Labels", "Problem"]

NO_LABELS = "labels are not known and cannot be read off the last layer, and this attack does not optimise them"


class Labels:
    """Label probabilities of each row: of labels that are known or read off, else a softmax that is optimised.

    Args:
        scene: what is public.
        rows: the victims.
        sources: see :attr:`Recipe.labels`.
        found: each row's labels that belong to the images at which it starts; ``None``: there are none.

    Raises:
        AttackRefused: none of the sources gives a victim's labels.
    """

    def __init__(
        self, scene: Scene, rows: Sequence[Victim], sources: Sequence[str], found: Sequence[Tensor | None]
    ) -> None:
        read = read_labels(scene, rows) if "read" in sources else [victim.labels for victim in rows]
        given = [other if own is None else own for own, other in zip(found, read, strict=True)]
        fixed = [labels is not None for labels in given]
        if "optimised" not in sources and not all(fixed):
            raise AttackRefused(NO_LABELS)
        unknown = torch.zeros(rows[0].model.examples, dtype=torch.long, device=scene.network.device)
        known = torch.stack([unknown if labels is None else labels for labels in given])
        self._fixed = torch.tensor(fixed, device=known.device)
        self._all = all(fixed)
        self._known = F.one_hot(known, scene.classes).to(scene.mean)
        self.notes = tuple("" if labels is not None or "read" not in sources else JOINT for labels in given)

    def select(self, rows: Tensor) -> "Labels":
        """Return the labels of some of the rows (n,)."""
        chosen = object.__new__(Labels)
        rows = rows.to(self._fixed.device)
        chosen._fixed, chosen._known = self._fixed[rows], self._known[rows]
        chosen._all = self._all
        chosen.notes = self.notes
        return chosen

    def probabilities(self, logits: Tensor) -> Tensor:
        """(N, B, classes)."""
        if self._all:
            return self._known
        return torch.where(self._fixed[:, None, None], self._known.to(logits), logits.softmax(dim=2))

    def final(self, logits: Tensor) -> Tensor:
        """The labels (N, B) that belong to these logits."""
        return self.probabilities(logits).argmax(dim=2)


class Problem:
    """Objective plus weighted priors.

    Args:
        recipe: the parts.
        scene: what is public.
        rows: the victim of each row.
        config: the attack's settings, with the weight of each prior: NAME, at the end, and where there is one
            NAME_start.
    """

    def __init__(self, recipe: Recipe, scene: Scene, rows: Sequence[Victim], config: Any) -> None:
        precise = recipe.optimiser == "lbfgs" and scene.network.device.type != "mps"
        self._scene = scene
        self._dtype = torch.float64 if precise else scene.mean.dtype
        self._matcher = Matcher(scene.network, rows, OBJECTIVES[recipe.objective], "float64" if precise else None)
        self._coordinates: Coordinates | Relaxation | None = None
        if recipe.variables == "relaxed":
            self._coordinates = relaxation_of(scene)
        if recipe.variables == "decorrelated":
            self._coordinates = coordinates_of(scene.shape).to(scene.mean.double() if precise else scene.mean)
        weights = {
            name: (float(getattr(config, f"{name}_start", 0.0)), getattr(config, name)) for name in recipe.priors
        }
        used = {name: pair for name, pair in weights.items() if any(pair)}
        self._penalties = [PRIORS[name] for name in used]
        self._weights = tuple(used.values())
        self._rows = len(rows)
        # Steps of Adam in pixels are followed by a projection; elsewhere the objective sees the projected images.
        self._projects = recipe.box and recipe.variables == "pixels" and recipe.optimiser != "lbfgs"
        self._inside = recipe.box and not self._projects
        self._starts = _found(recipe.start, scene, rows)
        read = [None if start is None or "read" not in recipe.labels else start.labels for start in self._starts]
        self.labels = Labels(scene, rows, recipe.labels, read)

    @property
    def regular(self) -> bool:
        """Whether there is more to minimise than the mismatch."""
        return bool(self._penalties)

    def weights(self, done: int, steps: int) -> Tensor:
        """Return the priors' weights (N, k), the same in each row, after so many of all steps."""
        values = [annealed(start, end, done, steps) for start, end in self._weights]
        return torch.tensor(values, dtype=self._dtype, device=self._scene.mean.device).expand(self._rows, -1)

    def select(self, rows: Tensor) -> "Problem":
        """Return the problem of some of the rows, by their numbers (n,)."""
        chosen = object.__new__(Problem)
        chosen.__dict__.update(self.__dict__)
        chosen._matcher, chosen.labels = self._matcher.select(rows), self.labels.select(rows)
        chosen._rows = len(rows)
        return chosen

    def losses(self, variables: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
        """Return what is minimised, (N,).

        Args:
            variables: (N, B, C, H, W).
            logits: (N, B, classes).
            weights: (N, k), see :meth:`weights`. The derivatives by these are the priors' values.
        """
        images = self.images(variables)
        total = self._matcher(images, self.labels.probabilities(logits))
        for number, penalty in enumerate(self._penalties):
            total = total + weights[:, number] * penalty(self._scene, images)
        return total

    def images(self, variables: Tensor) -> Tensor:
        """Map variables to normalised images, both (N, B, C, H, W)."""
        images = variables if self._coordinates is None else self._coordinates.images(variables)
        return self._scene.box(images) if self._inside else images

    def project(self, variables: Tensor) -> Tensor:
        """Return the nearest variables that are allowed."""
        return self._scene.box(variables) if self._projects else variables

    def start(self, name: str, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
        """Return the variables (N, B, C, H, W) to start from, given standard normal numbers."""
        make = STARTS.get(name)
        started = [start.images for start in self._starts if start is not None]
        if not started and make is None:
            return self.project(numbers)
        images = make(self._scene, rows, numbers) if make is not None else _around(started, rows, numbers)
        images = self._scene.box(images)
        return images if self._coordinates is None else self._coordinates.of(images.to(self._dtype))


def _found(name: str, scene: Scene, rows: Sequence[Victim]) -> list[Start | None]:
    """Each row's start at images that were found, where the recipe asks for such."""
    if name not in FOUND:
        return [None] * len(rows)
    distinct = list({id(victim): victim for victim in rows}.values())
    starts = dict(zip(map(id, distinct), FOUND[name](scene, distinct), strict=True))
    return [starts[id(victim)] for victim in rows]


def _around(images: Sequence[Tensor], rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    """Images (N, B, C, H, W) around those found; each victim's first row starts at the very images."""
    first = [number == 0 or rows[number - 1] is not victim for number, victim in enumerate(rows)]
    spread = torch.where(torch.tensor(first, device=numbers.device), 0.0, AROUND)
    return torch.stack(list(images)) + spread[:, None, None, None, None] * numbers
