"""Gradient matching over vectors of tokens, and from vectors to tokens.

The first vector, that of every text's beginning, is known and stays.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.matching import Matcher, Objective
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.texts.search.ground import Ground
from fedpriv.attacks.texts.search.scoring import Texts
from fedpriv.core.names import PAD, START

__all__ = ["Penalty", "Vectors"]

TOGETHER = 4  # batches whose gradients are written out at once
Penalty = Callable[[Tensor], Tensor]
"""Vectors (N, B, T, width) to a number a row (N,), to be added to the mismatch."""


class Vectors:
    """Vectors in the places of one upload's tokens, moved so that their gradient comes closer to what was heard.

    Args:
        ground: the upload.
        objective: compares gradients.
        penalty: of the vectors themselves; ``None``: there is none.
        stream: of the start, normal with the deviation of all tokens' vectors.

    Raises:
        AttackRefused: the next token is predicted: what is predicted is then unknown, too. Or labels are not told.
    """

    def __init__(self, ground: Ground, objective: Objective, penalty: Penalty | None, stream: torch.Generator) -> None:
        if ground.scene.is_next:
            raise AttackRefused("gradients are matched for labels of sentences, and here the next token is predicted")
        if bool((ground.labels < 0).any()):
            raise AttackRefused("gradients are matched for known labels, and this upload does not tell them")
        self._ground = ground
        self._matcher = Matcher(ground.vectors, [ground.bare] * TOGETHER, objective, often=False)
        self._penalty = penalty
        self._labels = F.one_hot(ground.labels, ground.scene.classes)[None].to(ground.table)
        self.spread = float(ground.table.std())
        length = ground.scene.length
        places = torch.arange(length, device=ground.table.device)
        self._filled = places < torch.tensor(ground.lengths, device=places.device)[:, None]
        start = torch.randn(len(ground.labels), length, ground.table.shape[1], generator=stream)
        self.now = self._fixed(self.spread * start.to(ground.table))

    def losses(self, vectors: Tensor) -> Tensor:
        """Return mismatch and penalty (N,) of vectors (N, B, T, width), float64."""
        losses = torch.cat([self._mismatch(some) for some in vectors.split(TOGETHER)])
        return losses if self._penalty is None else losses + self._penalty(vectors)

    def _mismatch(self, vectors: Tensor) -> Tensor:
        rows = torch.arange(len(vectors), device=vectors.device)
        labels = self._labels.expand(len(vectors), -1, -1)
        return self._matcher.select(rows)(vectors[:, :, None], labels)

    def descend(self, steps: int, rate: Callable[[int], float], each: Callable[[int, float], None]) -> float:
        """Make steps of Adam, keep the best point of them, and return the loss there.

        Args:
            steps: how many.
            rate: of a step's number, in standard deviations of tokens' vectors.
            each: is told (step, loss).
        """
        moved = self.now.clone().requires_grad_()
        adam = torch.optim.Adam([moved])
        lowest = float("inf")
        for step in range(steps):
            losses = self.losses(self._fixed(moved)[None]).sum()
            (slope,) = torch.autograd.grad(losses, moved)
            loss = float(losses.detach())
            if loss < lowest:
                lowest, self.now = loss, self._fixed(moved).detach().clone()
            moved.grad = slope.nan_to_num(0.0, 0.0, 0.0)
            adam.param_groups[0]["lr"] = rate(step) * self.spread
            adam.step()
            each(step, loss)
        return lowest

    def texts(self, vectors: Tensor) -> Texts:
        """Return the tokens whose vectors have the smallest angle to vectors (B, T, width)."""
        table = F.normalize(self._ground.table, dim=1)
        alike = F.normalize(vectors, dim=2) @ table.mT
        tokens = alike.masked_fill(~self._ground.scene.inner, -2.0).argmax(dim=2)
        tokens[:, 0] = START
        return Texts(torch.where(self._filled, tokens, PAD), self._ground.labels)

    def _fixed(self, vectors: Tensor) -> Tensor:
        """Vectors (B, T, width) with that of the beginning where it stands, and nothing behind the end."""
        first = self._ground.table[START].expand(len(vectors), 1, -1)
        return torch.cat([first, vectors[:, 1:]], dim=1) * self._filled[:, :, None]
