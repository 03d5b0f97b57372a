"""The game's second entrance: one release of a plan's mechanism, without client, network or messages.

Cheap enough for many thousands of draws, and so for small errors in the noise. Plan, operator (float32) and mechanism
are the real ones. An example's gradient is g on the left and -g on the right, the worst case of every mechanism here;
the other examples are the same. The statistic is the projection that the log-likelihood ratio rises with (for several
VMF draws in more than one dimension it is not the best one; any statistic gives a valid limit).

``copies`` independent releases are drawn at once, as parts of one long gradient: blocks of a VMF mechanism are
independent anyway, and so is Gaussian or Laplace noise. There the bound of the norm is that of all copies together, and
the noise over the bound is as much smaller, so that each copy is clipped and gets noise as it does alone.

With balls in bins a run is a pass, whose batches are the plan's; releases of the same batch are drawn at once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import hyp0f1
from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.plan import Plan, plan_client
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import MECHANISMS
from fedpriv.gradients import DenseGradients, GradientOperator, Vector, per_example_gradients
from fedpriv.mechanisms.machinery.redistribution import Redistribution, layer_shares, public_shares, uniform_shares
from tests.privacy.bounds import Scores, Verdict, play
from tests.privacy.game import CLIP_NORM, claims

__all__ = ["MechanismGame", "play_mechanism", "play_passes"]

ROOT = {"gaussian": 2, "hgm": 2, "laplace": 1}
"""The order of the norm that each mechanism with additive noise clips."""


@dataclass(frozen=True)
class MechanismGame:
    """One mechanism and two batches."""

    mechanism: Mapping[str, object]  # its settings; clip_norm is 0.5
    victim: tuple[tuple[float, ...], ...]  # the gradient that is turned round, tensor by tensor
    others: tuple[tuple[float, ...], ...] = ()  # the gradients of the other examples, tensor after tensor
    runs: int = 40_000  # releases of each batch, after the pilot
    copies: int = 10_000  # so many independent releases are drawn at once
    unit: str = "example"  # example or update
    weaker: float = 0.8  # with this share of its noise the mechanism has to be found out
    allocated: bool = False  # balls in bins, in as many steps as there are examples; else all are in one batch

    @property
    def tensors(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.victim)

    @property
    def batch(self) -> int:
        return 1 + len(self.others)

    @property
    def additive(self) -> int | None:
        """The order of the norm that is clipped; ``None`` for draws on a sphere."""
        return ROOT.get(str(self.mechanism["name"]))

    def plan(self, copies: int, *, seed: int = 0, noise: float = 1.0) -> Plan:
        """The plan of a client that holds one batch of ``copies`` side by side, with ``noise`` times the noise."""
        name = str(self.mechanism["name"])
        key, longer = str(MECHANISMS[name].parameter), copies ** (1 / self.additive) if self.additive else 1.0
        value = float(str(self.mechanism[key])) * (1 / noise if key == "kappa" else noise / longer)
        mechanism = {**self.mechanism, key: value, "clip_norm": CLIP_NORM * longer, "unit": self.unit}
        training = {"batch_size": 1, "sampling": "balls-in-bins"} if self.allocated else {"batch_size": self.batch}
        tree = {"seed": seed, "mechanism": mechanism, "training": training}
        tensors = [copies * size for size in self.tensors]
        return plan_client(Experiment.model_validate(tree), 0, self.batch, tensors, _redistribution(self, copies))

    def gradients(self, sign: float) -> GradientOperator:
        """The gradients of the batch in which the victim's is ``sign`` times g, as many copies as are drawn at once."""
        rows = [[sign * value for part in self.victim for value in part], *self.others]
        parts = torch.tensor(rows, dtype=torch.float32).split(self.tensors, dim=1)
        x = torch.cat([part.repeat(1, self.copies) for part in parts], dim=1)
        sizes = tuple(self.copies * size for size in self.tensors)
        return per_example_gradients(_Heads(sizes), lambda output, _: output.flatten(), x, torch.zeros(len(x)))

    def flat(self, released: Vector) -> Tensor:
        """A release as the releases of the copies, (copies, K)."""
        parts = zip(released.values(), self.tensors, strict=True)
        return torch.cat([value.reshape(self.copies, size) for value, size in parts], dim=1).double()


class _Heads(nn.Module):
    """Linear layers side by side: the gradient of an example's output is the example itself, cut into the layers."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.layers, x.split(self.sizes, dim=1), strict=True)
        return torch.stack([layer(part) for layer, part in parts]).sum(dim=0)


def _redistribution(game: MechanismGame, copies: int) -> Redistribution | None:
    name = str(game.mechanism.get("redistribution", "uniform"))
    return _shares(name, game.tensors, copies) if game.mechanism["name"] == "hgm" else None


@cache
def _shares(name: str, tensors: tuple[int, ...], copies: int) -> Redistribution:
    """Shares of the noise; public ones from made-up public data, of which each copy has the same."""
    model = _Heads(tuple(copies * size for size in tensors))
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    if name == "uniform":
        return uniform_shares(parameters)
    if name == "layer":
        return layer_shares(parameters)
    scale = torch.linspace(0.2, 3.0, sum(tensors))
    images = scale * torch.rand(16, sum(tensors), generator=torch.Generator().manual_seed(1))
    repeated = [part.repeat(1, copies) for part in images.split(tensors, dim=1)]
    return public_shares(model, torch.cat(repeated, dim=1), 1.0)


def released(game: MechanismGame, plan: Plan, sign: float) -> Iterator[Tensor]:
    """Releases of one of the batches, (copies, K) each, without end.

    The one place that knows how a plan is asked for a release, and what its noise follows from: the seed and the step.
    """
    gradients = game.gradients(sign)
    update = gradients.combine(torch.ones(1)) if game.unit == "update" else {}
    secret = Secret.of_seed(plan.seed)
    for step in count(1):
        noise = secret.stream("game", step)
        vector = (
            plan.release_update(update, noise) if game.unit == "update" else plan.release_gradient(gradients, noise)
        )
        yield game.flat(vector)


def play_mechanism(game: MechanismGame, noise: float = 1.0) -> Verdict:
    """Play with ``noise`` times the noise, against what the ledger prints for the whole noise."""
    plans = {side: game.plan(game.copies, seed=seed, noise=noise) for seed, side in enumerate(("left", "right"))}
    streams = {side: released(game, plans[side], sign) for side, sign in (("left", 1.0), ("right", -1.0))}
    alone = game.plan(1)
    mechanism = alone.config.mechanism(alone.redistribution)
    parameters = dict(_Heads(game.tensors).named_parameters())
    gradient = {name: torch.tensor([part]) for name, part in zip(parameters, game.victim, strict=True)}
    centre = _laid_out(mechanism.standardise(mechanism.expected(gradient)))
    # A coordinate's noise is divided out on both sides.
    ones = {name: torch.ones_like(value) for name, value in gradient.items()}
    direction = centre / centre.norm() * _laid_out(mechanism.standardise(ones))

    def draw(side: str, runs: int) -> Scores:
        rows = torch.cat([next(streams[side]) for _ in range(math.ceil(runs / game.copies))])[:runs]
        return {"projection on the victim": (rows @ direction).numpy()}

    return play(draw, claims(alone, [1]), game.runs)


def play_passes(game: MechanismGame, noise: float = 1.0) -> Verdict:
    """Play passes of balls in bins, of a victim and another example: directional noise in one block, or Laplace."""
    plans = {side: game.plan(game.copies, seed=seed, noise=noise) for seed, side in enumerate(("left", "right"))}
    streams = {side: _passes(game, plans[side], sign) for side, sign in (("left", 1.0), ("right", -1.0))}
    victim = np.array([value for part in game.victim for value in part])
    u, key = victim / np.linalg.norm(victim), str(MECHANISMS[str(game.mechanism["name"])].parameter)
    amount, likelihood = float(str(game.mechanism[key])), _laplace if game.additive else _directional

    def draw(side: str, runs: int) -> Scores:
        sums = np.array([next(streams[side]) for _ in range(runs)])
        return {"likelihood": likelihood(sums, u, amount * noise if game.additive else amount / noise)}

    return play(draw, claims(game.plan(1), range(1, game.batch + 1)), game.runs)


def _passes(game: MechanismGame, plan: Plan, sign: float) -> Iterator[NDArray[np.float64]]:
    """What the steps of a pass release, (T, K)."""
    secret, rows = Secret.of_seed(plan.seed), torch.tensor([[sign * v for v in game.victim[0]], *game.others])
    pools: dict[tuple[int, ...], Iterator[NDArray[np.float64]]] = {}

    def pool(batch: tuple[int, ...]) -> Iterator[NDArray[np.float64]]:
        gradients = DenseGradients({"w": rows[list(batch)].repeat(1, game.copies)})
        for step in count(1):
            yield from game.flat(plan.release_gradient(gradients, secret.stream(f"pass {batch}", step))).numpy()

    for first in count(0, game.batch):
        batches = [tuple(plan.batch(step).tolist()) for step in range(first, first + game.batch)]
        yield np.stack([next(pools.setdefault(batch, pool(batch))) for batch in batches])


def _laplace(sums: NDArray[np.float64], u: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """The same of (n, T, K) sums with Laplace noise; the victim has one coordinate that is not zero."""
    along = sums @ u / CLIP_NORM
    left, right = (np.exp((np.abs(along) - np.abs(along - sign)) / scale).sum(axis=1) for sign in (1, -1))
    return np.log(left / right)


def _directional(sums: NDArray[np.float64], u: NDArray[np.float64], kappa: float) -> NDArray[np.float64]:
    """How much likelier passes are with the victim along u than opposite: logs; (n, T, K) sums of two directions.

    Of two directions with the sum s the first is s / 2 plus any vector of length sqrt(1 - |s|^2 / 4) across s. The mean
    of exp(kappa u . x) over those is the ratio of a step with the victim and one of two uniform directions.
    """
    along, quarter = sums @ u, (sums**2).sum(axis=2) / 4
    across = np.maximum(1 - quarter, 0) * np.maximum(1 - along**2 / (4 * quarter), 0)
    mean = hyp0f1((len(u) - 1) / 2, kappa**2 * across / 4)
    left, right = ((mean * np.exp(sign * kappa * along / 2)).sum(axis=1) for sign in (1, -1))
    return np.log(left / right)


def _laid_out(vector: Vector) -> Tensor:
    return torch.cat([value.flatten() for value in vector.values()]).double()
