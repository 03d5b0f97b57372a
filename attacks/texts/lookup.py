"""Tokens read off the gradient of the embedding table: only rows of tokens that occur have a gradient.

A row's gradient is the sum over the places of its token of what the network's input there is to change by. A table of
positions, looked up beside it, has the same sum by places. So the rows of one are sums of rows of the other: which
token stood in which place is a system of linear equations, with as many known numbers as a vector has.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import TextScene, padded
from fedpriv.attacks.texts.scoring import Language
from fedpriv.attacks.texts.soft import table_factor, table_name, token_tables

ABOVE = 5.0  # standard deviations by which the energy of a row that was looked up is above that of others
LEAST = 1e-12  # of the largest energy, where there is no noise
ABOVE_EDGE = 1.5  # times the largest squared singular value of noise alone
ROUNDED = 1e-13  # of the largest squared singular value, where gradients are rounded to float32
SHARE = 0.25  # of a place's gradient that a token's row explains, if it stood there


@dataclass(frozen=True, eq=False)
class Lookup:
    """What the tables say."""

    tokens: Tensor  # int64 (n,), those that were looked up or predicted, by falling energy
    # of the longest sentence, its beginning included; `None`: there is no table of positions, or noise hides it
    length: int | None
    # (length, V), or (T, V) where noise hides it, the share of each place's gradient that is each token's; `None`:
    # there is no table of positions
    places: Tensor | None

    def sentences(self, scene: TextScene, count: int, language: Language) -> Tensor:
        """Return as many sentences (count, L) as there are, of the tokens where they stood.

        Which of several sentences a token is from is not in the tables: it goes where it is most usual. Without a table
        of positions the tokens are laid out by their energy.
        """
        room = scene.length + scene.is_next
        made = self._beginnings(scene.opening, count)
        if self.places is None:
            for number, token in enumerate(self.tokens[0 if scene.opening else count :].tolist()):
                made[number % count].append(token)
            return padded(made, room).to(scene.device)
        for shares in self.places[1:]:
            chosen = _stood(shares, count)
            chances = language.chances(torch.tensor(made, device=scene.device))[:, -1]
            rows, columns = linear_sum_assignment(-chances[:, chosen].cpu().numpy().astype(np.float64))
            taken = dict(zip(rows.tolist(), chosen[torch.from_numpy(columns).to(chosen.device)].tolist(), strict=True))
            for number, sentence in enumerate(made):
                sentence.append(taken.get(number, int(chosen[0])))
        return padded(made, room).to(scene.device)

    def _beginnings(self, opening: tuple[int, ...], count: int) -> list[list[int]]:
        """The first tokens of sentences: known ones, those of the first place, or those of the most energy."""
        likely = self.tokens if self.places is None else _stood(self.places[0], count)
        first = opening or tuple(likely.tolist())
        return [[first[number % len(first)]] for number in range(count)]


def _stood(shares: Tensor, count: int) -> Tensor:
    """The tokens, at least one and at most so many, that explain a place's gradient, by their shares (V,)."""
    best = shares.topk(count)
    chosen = best.indices[best.values > SHARE]
    return chosen if len(chosen) else best.indices[:1]


def read_lookup(scene: TextScene, victim: Victim) -> Lookup:
    """Read the tables in an upload."""
    name = table_name(scene.model, scene.format.vocabulary)
    if name not in victim.gradient:
        raise AttackRefused(f"the upload has no gradient of the table of tokens, {name}: it is frozen")
    table, positions = victim.gradient[name][: scene.format.vocabulary].double(), _positions(scene, victim)
    factor = table_factor(scene.with_parameters(victim.parameters), scene.format.vocabulary)
    # Rows of both tables add up only as what the network itself is given at a place.
    table, positions = (table, None) if factor is None else (table / factor, positions)
    noise, allowed = _variance(victim, name), scene.inner
    if scene.is_next:
        table, positions = _without_predictions(table, positions, noise, several=victim.model.examples > 1)
    energy = table.square().sum(dim=1) * allowed
    usual = energy[allowed].median()
    spread = 1.4826 * (energy[allowed] - usual).abs().median()
    chosen = energy > torch.maximum(usual + ABOVE * spread, LEAST * energy.max())
    tokens = energy.argsort(descending=True, stable=True)[: int(chosen.sum())]
    if positions is None:
        if not len(tokens):
            raise AttackRefused("no row of the table of tokens stands out: noise hides which were looked up")
        return Lookup(tokens, None, None)
    length = _length(positions, noise)
    placed = positions[:length]
    if victim.model.examples == 1:
        shares = _solved(placed, placed @ table.mT, noise)  # 1 where a place has a row as a part, else 0
    else:
        shares = _of_several(table, tokens, placed, noise)
    return Lookup(tokens, length, torch.where(allowed, shares, 0.0))


def _without_predictions(
    table: Tensor, positions: Tensor | None, noise: float, *, several: bool
) -> tuple[Tensor, Tensor | None]:
    """Both tables without the parts that rows of tokens have which were not looked up.

    A table that is the last layer, too, has in each row the states from which tokens are predicted, by how probable the
    token was. Those of the half of the rows that have the least energy span these states.
    """
    energy = table.square().sum(dim=1)
    others = table[energy.argsort(stable=True)[: len(table) // 2]]
    values, vectors = torch.linalg.eigh(others.mT @ others)
    rows, width = others.shape
    edge = noise * (rows**0.5 + width**0.5) ** 2
    states = vectors[:, values > max(edge * ABOVE_EDGE, ROUNDED * float(values[-1]))]
    if states.shape[1] <= width // 2:
        outside = torch.eye(width, dtype=table.dtype, device=table.device) - states @ states.mT
        return table @ outside, None if positions is None else positions @ outside
    if several:
        raise AttackRefused(
            f"the table of tokens predicts them, too, and the states from which it does fill {states.shape[1]} of its "
            f"{width} dimensions: which tokens were looked up does not stand out"
        )
    return table, positions


def _positions(scene: TextScene, victim: Victim) -> Tensor | None:
    """The gradient of the table of positions, (T, width), in float64."""
    tables = token_tables(scene.model, scene.format.vocabulary)
    found = [
        f"{name}.weight"
        for name, layer in scene.model.named_modules()
        if isinstance(layer, nn.Embedding) and name not in tables and layer.num_embeddings >= scene.length
    ]
    if len(found) != 1 or found[0] not in victim.gradient:
        return None
    return victim.gradient[found[0]][: scene.length].double()


def _variance(victim: Victim, name: str) -> float:
    """Of the noise in one number of a tensor, in gradient space."""
    deviation = float(victim.model.mechanism.deviations((name,))[name].max())
    return victim.noise_variance * deviation**2


def _length(positions: Tensor, noise: float) -> int | None:
    """The places up to the last whose gradient is no noise, at least two; ``None``: all may be noise."""
    energy = positions.square().sum(dim=1)
    width = positions.shape[1]
    bound = max(noise * (width + ABOVE * math.sqrt(2 * width)), LEAST * float(energy.max()))
    above = torch.nonzero(energy > bound).flatten()
    return max(2, int(above[-1]) + 1) if len(above) else None


def _of_several(table: Tensor, tokens: Tensor, positions: Tensor, noise: float) -> Tensor:
    """Of each place which rows add up to it, (length, V), of those that stand out and at most as many as numbers."""
    shares = torch.zeros(len(positions), len(table), dtype=table.dtype, device=table.device)
    kept = tokens[: table.shape[1] // 2]
    if len(kept):
        rows = table[kept]
        shares[:, kept] = _solved(rows, rows @ positions.mT, noise).mT
    return shares


def _solved(rows: Tensor, products: Tensor, noise: float) -> Tensor:
    """Solve for coefficients of rows (n, width) with this noise, by their products (n, m) with what they add up to."""
    gram = rows @ rows.mT
    ridge = (noise * rows.shape[1] + LEAST * gram.diagonal().max()) * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + ridge.to(gram.device), products)
