"""The search for the most probable images: Adam in coordinates in which the prior is standard normal.

What is minimised, and why in parts, is in ``posterior.map``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.reconstruction.matching.evaluation import Evaluator, Losses
from fedpriv.attacks.reconstruction.matching.matcher import Matcher
from fedpriv.attacks.reconstruction.posterior.averaging import BETAS, fit_cloud, rate_share
from fedpriv.attacks.reconstruction.posterior.likelihood import Whitening, misfit
from fedpriv.attacks.reconstruction.posterior.smoothing import SmoothKinks
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients.operator import wide_type

__all__ = ["SMOOTH", "TURNS", "Ended", "Search", "Start", "Tell"]

SMOOTH, SHARPER = 8.0, 32.0  # of kinks: their sharpness in the first and in the second part of the search
TURNS = (0.4, 0.65)  # shares of the steps at which these parts end; in the third part kinks are kinks
WARM = 0.7  # of the first part, in which the likelihood's share grows to 1
LATE = 0.4  # the learning rate of the other parts over that of the first
CHANCE = 0.5  # what a number that is fitted to noise gains on average in log-likelihood (Akaike 1974)
AVERAGED = 0.3  # of the steps: as many are made for the posterior's mean, where there are no kinks
VAGUE = 0.5  # the posterior's least deviation, in the prior's, above which its mean is taken rather than its mode

Tell = Callable[[float, Tensor], None]
"""(share of the steps done, losses (n,) so far)."""


@dataclass(frozen=True, eq=False)
class Start:
    """Where a search begins.

    Attributes:
        row: for which.
        victim: of the row.
        labels: int64 (B,) that are taken for granted; ``None``: they are optimised.
        coordinates: (B, C, H, W).
        logits: (B, classes), for labels that are optimised.
    """

    row: int
    victim: Victim
    labels: Tensor | None
    coordinates: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class Ended:
    """Where a search ended: images (B, C, H, W), labels (B,), minus the log-posterior (), and what is to be noted."""

    start: Start
    images: Tensor
    labels: Tensor
    loss: Tensor
    note: str


class Search:
    """Adam in the prior's coordinates, from several starts together, each on its own.

    Args:
        scene: what is public.
        config: how long and how fast.
        starts: where from.
        tell: told how it goes.
    """

    def __init__(self, scene: Scene, config: MapSettings, starts: Sequence[Start], tell: Tell) -> None:
        self._config = config
        self._starts = starts
        self._tell = tell
        self._note = ""
        self._whitening = Whitening(scene.prior, scene.shape)
        self._posterior = _Posterior(scene, self._whitening, starts)
        # The closed form of a broken upload is no image; the prior's mean, which is zero here, is one.
        self._coordinates = torch.stack([start.coordinates for start in starts]).nan_to_num(0.0, 0.0, 0.0)
        self._logits = torch.stack([start.logits for start in starts])
        self._adam = torch.optim.Adam([self._coordinates, self._logits], betas=BETAS)
        self._lowest = torch.full((len(starts),), math.inf, dtype=wide_type(self._logits), device=self._logits.device)

    def anneal(self) -> list[Start]:
        """Let the likelihood's share grow, with smooth kinks, then sharpen them; return where that leads to."""
        turn, end = (int(share * self._config.iterations) for share in TURNS)
        first = self._posterior.first_shares(self._coordinates, self._logits)
        evaluate = Evaluator(self._posterior.smoothed(SMOOTH), turn)
        for step in range(turn):
            self._step(evaluate, step / turn, first ** max(0.0, 1 - step / (WARM * turn)), 1.0)
            self._tell((step + 1) / end, self._lowest)
        self._climb(self._posterior.smoothed(SHARPER), end - turn, turn / max(end, 1))
        return [
            replace(start, coordinates=self._coordinates[number], logits=self._logits[number])
            for number, start in enumerate(self._starts)
        ]

    def stay(self) -> list[Ended]:
        """Stay at the starts."""
        whole = torch.ones_like(self._lowest)
        with torch.no_grad():
            return self._ended(self._posterior(self._coordinates, self._logits, whole))

    def finish(self) -> list[Ended]:
        """Search with the network as it is."""
        losses = self._climb(self._posterior, self._config.iterations - int(TURNS[1] * self._config.iterations), 0.0)
        return self._ended(self._average(losses))

    def _average(self, losses: Tensor) -> Tensor:
        """Go on to the posterior's mean where the upload pins down no direction; return the losses (n,) there."""
        smooth = self._posterior.chance(self._coordinates, self._logits) == 0
        if not bool(smooth.any()):
            return losses
        steps = int(AVERAGED * self._config.iterations)
        basis, rate = self._whitening.prior.basis, self._config.learning_rate
        cloud = fit_cloud(
            self._posterior, self._coordinates, (self._logits, torch.ones_like(losses)), basis, steps, rate
        )
        vague = smooth & (cloud.least > VAGUE)
        self._coordinates.copy_(torch.where(vague[:, None, None, None, None], cloud.middle, self._coordinates))
        with torch.no_grad():
            there = self._posterior(self._coordinates, self._logits, torch.ones_like(losses))
        return torch.where(vague, there, losses)

    def _ended(self, losses: Tensor) -> list[Ended]:
        images = self._whitening.images(self._coordinates)
        labels = self._posterior.labels(self._logits).argmax(dim=2)
        return [
            Ended(start, images[number], labels[number], losses[number], self._note)
            for number, start in enumerate(self._starts)
        ]

    def _climb(self, objective: Losses, steps: int, before: float) -> Tensor:
        """Go to the best point on the way, or stay where it gains too little; return the losses (n,) there."""
        evaluate = Evaluator(objective, steps + 1)
        whole = torch.ones_like(self._lowest)
        best = start = self._coordinates.clone(), self._logits.clone()
        at_start, _ = evaluate(*start, whole)
        lowest, bar = at_start, at_start - self._posterior.chance(*start)
        for step in range(steps + 1):
            here = self._coordinates.clone(), self._logits.clone()
            losses = self._step(evaluate, step / max(steps, 1), whole, LATE)
            # A comparison with NaN is false: it never is the lowest.
            lower = (losses < lowest) & (losses < bar)
            lowest = torch.where(lower, losses, lowest)
            best = (
                torch.where(lower[:, None, None, None, None], here[0], best[0]),
                torch.where(lower[:, None, None], here[1], best[1]),
            )
            self._lowest = torch.fmin(self._lowest, lowest)
            self._tell(before + (1 - before) * step / max(steps, 1), self._lowest)
        self._note = evaluate.note
        self._coordinates.copy_(best[0])
        self._logits.copy_(best[1])
        return lowest

    def _step(self, evaluate: Evaluator, done: float, shares: Tensor, rate: float) -> Tensor:
        """Make one step; return the losses (n,) before it."""
        losses, gradients = evaluate(self._coordinates, self._logits, shares)
        # Adam remembers: one NaN would end this row's search, which can go on from the next step.
        self._coordinates.grad, self._logits.grad = (each.nan_to_num(0.0, 0.0, 0.0) for each in gradients[:2])
        self._adam.param_groups[0]["lr"] = self._config.learning_rate * rate * rate_share(done)
        self._adam.step()
        return losses


class _Posterior:
    """Minus the logarithm of the posterior (n,), but for constants, of coordinates, with a share of the likelihood."""

    def __init__(self, scene: Scene, whitening: Whitening, starts: Sequence[Start]) -> None:
        self._whitening = whitening
        self._matcher = Matcher(scene.network, [start.victim for start in starts], misfit)
        unknown = torch.zeros(len(starts[0].coordinates), dtype=torch.long, device=scene.network.device)
        given = torch.stack([unknown if start.labels is None else start.labels for start in starts])
        self._free = torch.tensor([start.labels is None for start in starts], device=given.device)
        self._any_free = bool(self._free.any())
        self._given = F.one_hot(given, scene.classes).to(scene.mean)

    def __call__(self, coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
        misfits = self._matcher(self._whitening.images(coordinates), self.labels(logits))
        return shares * misfits + coordinates.square().flatten(1).sum(dim=1) / 2

    def labels(self, logits: Tensor) -> Tensor:
        """Label probabilities (n, B, classes)."""
        if not self._any_free:
            return self._given
        return torch.where(self._free[:, None, None], logits.softmax(dim=2), self._given)

    def smoothed(self, sharpness: float) -> Losses:
        """The same for the network without kinks."""

        def losses(coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
            with SmoothKinks(sharpness):
                return self(coordinates, logits, shares)

        return losses

    def chance(self, coordinates: Tensor, logits: Tensor) -> Tensor:
        """What noise makes a sharper search gain (n,): nothing where the network has no kinks."""
        whole = coordinates.new_ones(len(coordinates))
        with torch.no_grad():
            kinked = self(coordinates, logits, whole) != self.smoothed(SMOOTH)(coordinates, logits, whole)
        return kinked * CHANCE * coordinates[0].numel()

    def first_shares(self, coordinates: Tensor, logits: Tensor) -> Tensor:
        """The shares (n,) with which the likelihood's pull at the start is as long as a draw from the prior."""
        whole = coordinates.new_ones(len(coordinates), dtype=wide_type(coordinates))
        _, (pull, _, _) = Evaluator(self.smoothed(SMOOTH), 1, "never")(coordinates, logits, whole)
        length = (pull - coordinates).flatten(1).norm(dim=1).to(whole)
        shares = math.sqrt(coordinates[0].numel()) / length.clamp(min=1e-30)
        return torch.where(torch.isfinite(shares), shares.clamp(max=1), 1.0)
