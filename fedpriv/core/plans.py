"""The plans of all clients, each made when it is looked at; clients that are alike share all but the number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.core.config import Experiment
from fedpriv.core.plan import Plan, draft_plan, participants, with_noise
from fedpriv.core.randomness import Secret
from fedpriv.mechanisms.machinery.redistribution import Redistribution


@dataclass(frozen=True)
class Schedule:
    """In which rounds a client will be selected if nobody stops, as far as that is public.

    Attributes:
        rounds: of the whole run.
        drawn: client -> its rounds, where the seed draws some clients for each round; clients that are in none are
            missing. ``None``: all clients are in every round, or a secret draws them, so that any may be.
    """

    rounds: range
    drawn: Mapping[int, tuple[int, ...]] | None

    @staticmethod
    def of(experiment: Experiment) -> "Schedule":
        """Return the schedule of a run: a function of its settings and seed, never of its secret."""
        federation = experiment.federation
        rounds = range(1, federation.rounds + 1)
        everyone = federation.clients_per_round is None or federation.clients_per_round >= federation.clients
        if everyone or experiment.hides_participants:
            return Schedule(rounds, None)
        drawn: dict[int, list[int]] = {}
        for number in rounds:
            for client in participants(experiment, number):
                drawn.setdefault(client, []).append(number)
        return Schedule(rounds, {client: tuple(mine) for client, mine in drawn.items()})

    def of_client(self, client: int) -> Sequence[int]:
        """The rounds of one client."""
        return self.rounds if self.drawn is None else self.drawn.get(client, ())

    @property
    def longest(self) -> Sequence[int]:
        """The rounds of a client that is selected in most of them."""
        return self.rounds if self.drawn is None else max(self.drawn.values(), key=len, default=())


@dataclass(frozen=True, eq=False)
class Plans(Sequence[Plan]):
    """One plan for each client.

    Attributes:
        experiment: the settings.
        sizes: (C,), how many examples each client holds.
        tensors: the number of coordinates of each parameter tensor, in the model's order.
        redistribution: r, for hgm.
        secret: the run's, which batches are drawn by where they must be hidden; ``None``: all follows from the seed.
        seed: that batches are drawn by instead; ``None``: what follows from the settings.
    """

    experiment: Experiment
    sizes: NDArray[np.int64]
    tensors: tuple[int, ...]
    redistribution: Redistribution | None = None
    secret: Secret | None = None
    seed: int | None = None

    def check(self) -> None:
        """Make one plan of each kind, so that a run that could not go on does not begin."""
        for client in sorted(np.unique(self.kinds, return_index=True)[1].tolist()):
            self[client]

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """(C,): clients with the same number have the same plan, but for their own number."""
        _, first, kinds = np.unique(self.sizes, return_index=True, return_inverse=True)
        if not self._is_calibrated or self._is_shared or self._schedule.drawn is None:
            return kinds.astype(np.int64)
        # Noise that is calibrated depends on how often an example of the client will be used.
        drafts = [self._draft(client) for client in first.tolist()]
        planned = np.zeros(len(kinds), dtype=np.int64)
        for client, rounds in self._schedule.drawn.items():
            planned[client] = drafts[kinds[client]].participations(rounds)
        return np.unique(kinds * (planned.max() + 1) + planned, return_inverse=True)[1].astype(np.int64)

    @property
    def _is_calibrated(self) -> bool:
        return self.experiment.mechanism.calibrated_epsilon is not None

    @property
    def _is_shared(self) -> bool:
        """Whether one noise is for all clients of a sum."""
        return self.experiment.mechanism.noise_at != "clients"

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule.of(self.experiment)

    def _rounds(self, client: int) -> Sequence[int]:
        """What the client's noise is calibrated for, if it is: public rounds, because everybody knows the noise."""
        if not self._is_calibrated:
            return ()
        return self._schedule.longest if self._is_shared else self._schedule.of_client(client)

    @cached_property
    def _made(self) -> dict[int, Plan]:
        """Kind -> the plan of the first of these clients that was looked at."""
        return {}

    @override
    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Plan: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[Plan, ...]: ...

    @override
    def __getitem__(self, client: int | slice) -> Plan | tuple[Plan, ...]:
        if isinstance(client, slice):
            return tuple(self[each] for each in range(*client.indices(len(self))))
        client = range(len(self))[client]
        kind = int(self.kinds[client])
        if kind not in self._made:
            self._made[kind] = with_noise(self.experiment, self._draft(client), self._rounds(client))
        known = self._made[kind]
        return known if known.client == client else replace(known, client=client)

    def _draft(self, client: int) -> Plan:
        examples = int(self.sizes[client])
        draft = draft_plan(self.experiment, client, examples, self.tensors, self.redistribution, self.secret)
        return draft if self.seed is None else replace(draft, seed=self.seed)


def with_seed(plans: Sequence[Plan], seed: int) -> Sequence[Plan]:
    """Return the plans with another seed that batches are drawn by."""
    return replace(plans, seed=seed) if isinstance(plans, Plans) else tuple(replace(plan, seed=seed) for plan in plans)


def kinds_of(plans: Sequence[Plan]) -> NDArray[np.int64]:
    """Return (C,): clients with the same number have the same plan, but for their own number."""
    return plans.kinds if isinstance(plans, Plans) else np.arange(len(plans), dtype=np.int64)
