"""The distinguishing game on one release: can somebody who sees it tell two neighbouring batches apart too well?

An example's gradient is g in one batch and -g in its neighbour, which is the worst case of every mechanism here; the
other examples are the same. Plan, operator (float32) and mechanism are the real ones: the gradients are those of a
network, and what is compared with the draws is the ledger of the same plan.

The statistic is the projection on g that the log-likelihood ratio rises with (for several VMF draws in more than one
dimension it is not the best one; any statistic gives a valid bound). Its threshold is fixed beforehand. An
(epsilon, delta)-private release has P(S) <= exp(epsilon) Q(S) + delta for every set S, so that limits of Clopper and
Pearson (1934) on P(S) and Q(S) give a lower limit on epsilon at any delta, and with delta = 0 on the pure epsilon.

Each limit fails with probability 1e-8 at most, and the unhalved games have fewer than 100: with random seeds a sound
ledger would raise an alarm in this file less than once in a million times. Seeds are fixed. The same game with half the
noise must find the ledger out. Thresholds and numbers of draws were chosen for that: with the rates of hits and false
hits of three to six repetitions, no game misses halved noise more than twice in a million times.
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from fedpriv.accounting import Guarantee
from fedpriv.config import Experiment
from fedpriv.gradients import GradientOperator, per_example_gradients
from fedpriv.mechanisms import Redistribution, layer_shares, public_shares, uniform_shares
from fedpriv.plan import Plan, plan_client

Floats = NDArray[np.float64]

ALARM = 1e-8
DELTAS = (1e-5, 1e-2, 1e-1)
CLIP_NORM = 0.5
SHARES = {"uniform": uniform_shares, "layer": layer_shares}


@dataclass(frozen=True)
class Game:
    """One mechanism, two neighbouring batches, and the set of releases that tells them apart.

    Attributes:
        mechanism: its settings.
        victim: the gradient that is turned round, tensor by tensor; it is clipped or scaled.
        threshold: S is where the statistic, scaled as a unit of clip_norm (or 1), is above it.
        others: the gradients of the other examples, tensor after tensor.
        draws: releases from each of the two batches.
        copies: so many independent releases are drawn at once, as blocks of one gradient.
        unit: example or update.
        slow: whether the draws take more than a few seconds.
    """

    mechanism: dict[str, object]
    victim: tuple[tuple[float, ...], ...]
    threshold: float
    others: tuple[tuple[float, ...], ...] = ()
    draws: int = 1600
    copies: int = 1
    unit: str = "example"
    slow: bool = False

    @property
    def tensors(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.victim)

    @property
    def batch(self) -> int:
        return 1 + len(self.others)


# Others lie where the victim is zero, so that they add nothing to the statistic of Gaussian and Laplace noise; one of
# them is below the bound and one above it. Those of VMF games point where the victim does, or beside it.
ASIDE = ((0.0, 0.1, -0.1, 0.0, 0.0), (0.0, 3.0, 0.0, 0.0, -7.0))
SPREAD = ((2.0, 0.0), (0.0, 3.0, 0.0))
SPIKE = ((0.0, 0.0), (0.0, 4.0, 0.0))

GAMES = {
    "gaussian": Game({"name": "gaussian", "sigma": 2.0}, SPREAD, 0.8),
    "gaussian, batch of 3": Game({"name": "gaussian", "sigma": 2.0}, SPREAD, 0.8, ASIDE),
    "gaussian by layer": Game({"name": "gaussian", "sigma": 2.0, "clipping": "layer"}, SPREAD, 0.8),
    "gaussian by layer, batch of 3": Game({"name": "gaussian", "sigma": 2.0, "clipping": "layer"}, SPREAD, 0.8, ASIDE),
    "gaussian on updates": Game({"name": "gaussian", "sigma": 2.0}, SPREAD, 0.8, unit="update"),
    "laplace": Game({"name": "laplace", "scale": 1.0}, SPIKE, 0.5, draws=1300),
    "laplace, batch of 3": Game(
        {"name": "laplace", "scale": 1.0}, SPIKE, 0.5, ((1.0, 0.0, 5.0, 0.0, -1.0),) * 2, draws=1300
    ),
    "hgm, uniform": Game({"name": "hgm", "sigma": 2.0}, SPREAD, 0.8),
    "hgm, by layer": Game({"name": "hgm", "sigma": 2.0, "redistribution": "layer"}, SPREAD, 0.8),
    "hgm, public, batch of 3": Game({"name": "hgm", "sigma": 2.0, "redistribution": "public"}, SPREAD, 0.8, ASIDE),
    "vmf, one dimension": Game({"name": "vmf", "kappa": 0.7}, ((3.0,),), 0.0, draws=700),
    "vmf, one dimension, batch of 3": Game({"name": "vmf", "kappa": 1.0}, ((3.0,),), 2.0, ((1.0,), (2.0,)), draws=750),
    "vmf": Game({"name": "vmf", "kappa": 1.0}, ((1.0,), (1.0,)), 0.4, draws=1200, slow=True),
    "vmf, batch of 2": Game({"name": "vmf", "kappa": 1.0}, ((1.0,), (1.0,)), 1.2, ((2.0, 2.0),), draws=1800, slow=True),
    "vmf by layer": Game(
        {"name": "vmf", "kappa": 0.4, "blocks": "layer"}, ((1.0,), (3.0, 4.0), (-2.0,)), 0.9, draws=1600, slow=True
    ),
    "vmf by layer, batch of 2": Game(
        {"name": "vmf", "kappa": 0.6, "blocks": "layer"}, ((1.0,), (-2.0,)), 2.0, ((2.0, -1.0),), draws=1450, slow=True
    ),
    "vmf on updates": Game({"name": "vmf", "kappa": 0.7}, ((3.0,),), 0.0, draws=700, unit="update"),
    "vmf in blocks across tensors": Game(
        {"name": "vmf", "kappa": 0.4, "blocks": "size:2"}, ((1.0, 2.0, 2.0), (-1.0, 1.0)), 0.75, draws=1600, slow=True
    ),
    "vmf in blocks of 5": Game(
        {"name": "vmf", "kappa": 1.0, "blocks": "size:5"},
        ((1.0, 2.0, 2.0, 0.0, 1.0),),
        0.65,
        draws=40_000,
        copies=40_000,
    ),
    "vmf in blocks of 20": Game(
        {"name": "vmf", "kappa": 2.0, "blocks": "size:20"}, ((1.0, 2.0) * 10,), 0.35, draws=40_000, copies=40_000
    ),
    "vmf in blocks of 3, batch of 2": Game(
        {"name": "vmf", "kappa": 1.0, "blocks": "size:3"},
        ((1.0, 2.0, 2.0),),
        1.2,
        ((1.0, 2.0, 2.5),),
        draws=40_000,
        copies=40_000,
    ),
}


class Heads(nn.Module):
    """Linear layers side by side: the gradient of an example's output is the example itself, cut into the layers."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.layers, x.split(self.sizes, dim=1), strict=True)
        return torch.stack([layer(part) for layer, part in parts]).sum(dim=0)


def sizes(game: Game) -> tuple[int, ...]:
    return tuple(size * game.copies for size in game.tensors)


def operator(game: Game, sign: float) -> GradientOperator:
    """The gradients of the batch in which the victim's is ``sign`` times g."""
    rows = [[sign * value for part in game.victim for value in part], *game.others]
    x = torch.tensor(rows, dtype=torch.float32).repeat(1, game.copies)
    return per_example_gradients(Heads(sizes(game)), lambda output, _: output.flatten(), x, torch.zeros(len(x)))


@cache
def shares(name: str) -> Redistribution:
    """Shares of the noise for the tensors of SPREAD; public ones from made-up public data."""
    model = Heads((2, 3))
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    if name in SHARES:
        return SHARES[name](parameters)
    images = torch.rand(16, 5, generator=torch.Generator().manual_seed(1)) * torch.tensor([3.0, 1.0, 0.2, 1.0, 0.5])
    return public_shares(model, images, 1.0)


def redistribution(game: Game) -> Redistribution | None:
    return shares(str(game.mechanism.get("redistribution", "uniform"))) if game.mechanism["name"] == "hgm" else None


def plan(game: Game, tensors: tuple[int, ...], *, seed: int = 0, noise: float = 1.0, delta: float = 1e-5) -> Plan:
    """The plan of a client that holds one batch, with ``noise`` times the noise of the game."""
    louder = {"sigma": noise, "scale": noise, "kappa": 1 / noise}
    mechanism = {key: value * louder[key] if key in louder else value for key, value in game.mechanism.items()}  # type: ignore[operator]
    settings = Experiment.model_validate(
        {
            "seed": seed,
            "mechanism": {**mechanism, "clip_norm": CLIP_NORM, "unit": game.unit, "delta": delta},
            "training": {"batch_size": game.batch},
        }
    )
    return plan_client(settings, 0, game.batch, tensors, redistribution(game))


def released(game: Game, sign: float, seed: int, noise: float) -> Floats:
    """Releases of one of the two batches, (draws, K), times the batch size."""
    gradients, mine = operator(game, sign), plan(game, sizes(game), seed=seed, noise=noise)
    if game.unit == "update":
        update = gradients.combine(torch.ones(1))
        once = partial(mine.release_update, update)
    else:
        once = partial(mine.release_gradient, gradients)
    rows = [torch.cat([value.flatten() for value in once(step).values()]) for step in range(game.draws // game.copies)]
    found: Floats = game.batch * torch.cat(rows).double().reshape(game.draws, -1).numpy()
    return found


def direction(game: Game) -> tuple[Floats, Floats]:
    """The unit vector that the statistic projects on, and by what coordinates are divided before."""
    g = np.concatenate([np.array(part) for part in game.victim])
    shares_of = redistribution(game)
    spread = np.ones_like(g)
    if shares_of is not None:
        spread = np.concatenate([value.double().numpy().flatten() for value in shares_of.deviations.values()])
    ends = {"layer": np.cumsum(game.tensors), "whole": [len(g)]}
    kind = str(game.mechanism.get("blocks", game.mechanism.get("clipping", "whole")))
    size = int(kind.removeprefix("size:")) if kind.startswith("size:") else len(g)
    cuts = ends["layer"] if kind == "layer" else np.arange(size, len(g) + size, size)
    parts = [part / np.linalg.norm(part) for part in np.split(g / spread, cuts[:-1])]
    return np.concatenate(parts) / math.sqrt(len(parts)), spread


def statistics(game: Game, sign: float, seed: int, noise: float) -> Floats:
    unit, spread = direction(game)
    length = 1.0 if game.mechanism["name"] == "vmf" and game.unit == "example" else CLIP_NORM
    values: Floats = (released(game, sign, seed, noise) / spread) @ unit / length
    return values


def lower_limit(hits: int, false_hits: int, draws: int, delta: float) -> float:
    """What epsilon is at least, by Clopper and Pearson's limits on P(S) and Q(S)."""
    least = stats.beta.ppf(ALARM, hits, draws - hits + 1) if hits else 0.0
    most = stats.beta.ppf(1 - ALARM, false_hits + 1, draws - false_hits) if false_hits < draws else 1.0
    return math.log((least - delta) / most) if least > delta else 0.0


def play(game: Game, noise: float, seed: int = 0) -> tuple[tuple[int, int], tuple[int, int]]:
    """Hits and false hits of the set above the threshold, and of its mirror image with the two batches exchanged."""
    plus, minus = statistics(game, 1.0, 2 * seed + 1, noise), statistics(game, -1.0, 2 * seed + 2, noise)
    c = game.threshold
    return (int((plus > c).sum()), int((minus > c).sum())), (int((minus < -c).sum()), int((plus < -c).sum()))


def claims(game: Game) -> dict[float, float]:
    """delta -> what the ledger says of one participation with the unhalved noise; 0 stands for the pure figure."""
    ledger: dict[float, Guarantee] = {delta: plan(game, game.tensors, delta=delta).guarantee([1]) for delta in DELTAS}
    found = {delta: line.epsilon for delta, line in ledger.items()}
    pure = ledger[DELTAS[0]].pure_epsilon
    return {delta: value for delta, value in {0.0: pure, **found}.items() if value is not None}


def excess(game: Game, noise: float, seed: int = 0) -> float:
    """By how much the largest lower limit is above the ledger's figure; negative where none is."""
    outcomes = play(game, noise, seed)
    return max(
        lower_limit(*outcome, game.draws, delta) - epsilon
        for delta, epsilon in claims(game).items()
        for outcome in outcomes
    )


NAMES = [pytest.param(name, marks=[pytest.mark.slow] if game.slow else []) for name, game in GAMES.items()]


@pytest.mark.parametrize("name", NAMES)
def test_no_release_tells_more_than_the_ledger_says(name: str) -> None:
    assert excess(GAMES[name], noise=1.0) <= 0


@pytest.mark.parametrize("name", NAMES)
def test_half_the_noise_is_found_out(name: str) -> None:
    assert excess(GAMES[name], noise=0.5) > 0


@pytest.mark.parametrize("name", GAMES)
def test_the_ledger_makes_a_claim(name: str) -> None:
    """A game against a ledger that claims nothing would prove nothing."""
    game = GAMES[name]
    assert set(DELTAS) <= claims(game).keys()
    assert (0.0 in claims(game)) == (game.mechanism["name"] in ("vmf", "laplace"))
