"""Pairs of a member of the training data and an example that is none, for attacks that tell the two apart."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.references import Pool, build_pool
from fedpriv.attacks.scene import Rehearsal
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import World
from fedpriv.data.datasets import unit_scale

# Enough for RMIA's shares of the population to be told apart to a thousandth.
MOST_POPULATION = 2000


@dataclass(frozen=True, eq=False)
class MemberPairs:
    """Pairs of a member and a non-member, and examples that are nobody's."""

    members: NDArray[np.int64]  # (C,), rows of the pool that the target was trained with
    non_members: NDArray[np.int64]  # (C,), rows that it was not
    clients: NDArray[np.int64]  # (C,), whose data the member of a pair is part of
    positions: NDArray[np.int64]  # (C,), where in that client's data it stands
    population: NDArray[np.int64]  # (Z,), rows that neither target nor references are trained with

    @property
    def rows(self) -> NDArray[np.int64]:
        """(2 C,), all candidates: the members, then the non-members."""
        return np.concatenate([self.members, self.non_members])

    @property
    def truth(self) -> NDArray[np.bool_]:
        """(2 C,), which of :attr:`rows` are members; for the referee."""
        return np.arange(2 * len(self.members)) < len(self.members)


def draw_candidates(world: World, pairs: int, seed: int) -> MemberPairs:
    """Draw pairs at random from all clients' data and the test data; half of the test data at most is used up."""
    rng = numpy_stream(seed, "membership-candidates")
    train, test = len(world.dataset.x_train), len(world.dataset.x_test)
    places = [(client, position) for client, rows in enumerate(world.partitions) for position in range(len(rows))]
    count = min(pairs, len(places), test // 2)
    if count < 2:
        raise InputError(
            f"membership: {len(places)} training and {test} test examples make {max(0, count)} pairs of candidates; "
            "at least 2 are needed"
        )
    chosen = rng.choice(len(places), count, replace=False)
    clients, positions = np.array(places, dtype=np.int64)[chosen].T
    members = np.array([world.partitions[c][p] for c, p in zip(clients, positions, strict=True)], dtype=np.int64)
    outside = train + rng.permutation(test)
    return MemberPairs(members, outside[:count], clients, positions, outside[count:][:MOST_POPULATION])


@dataclass(frozen=True, eq=False)
class MembershipGame:
    """Members and others, and who asks."""

    candidates: MemberPairs  # pairs, as in an audit
    pool: Pool  # training data, then test data, as the network is fed
    images: Tensor  # the same as they lie in the data set, uint8, (N, C, H, W)

    def asked(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Return all candidates' images, (2 C, C, H, W) on [0, 1], float64, and labels."""
        rows = torch.from_numpy(self.candidates.rows)
        return unit_scale(self.images[rows], torch.float64), self.pool.labels.cpu()[rows].numpy()


def draw_game(rehearsal: Rehearsal, pairs: int, seed: int) -> MembershipGame:
    """Draw members and as many others."""
    world = rehearsal.world
    candidates = draw_candidates(world, pairs, seed)
    return MembershipGame(candidates, build_pool(world), torch.cat([world.dataset.x_train, world.dataset.x_test]))


def pairs_within(budget: int, pairs: int, each: int = 1) -> int:
    """Return how many pairs are asked about where each candidate takes ``each`` questions."""
    count = min(pairs, budget // (2 * each))
    if count < 2:
        raise InputError(f"{budget} questions are too few: two pairs of candidates take {4 * each}")
    return count
