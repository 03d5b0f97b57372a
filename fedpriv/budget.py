"""The privacy budget of a run: what each client has used up so far, and who may still take part.

Who is asked is a public function of the settings and of who was asked before. Every engine, and a run that is resumed,
asks the same clients, and an eavesdropper learns nothing from who is not asked any more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedpriv.accounting import Release, guarantee
from fedpriv.config import Experiment
from fedpriv.errors import InputError
from fedpriv.plan import Plan, participants

__all__ = ["Budget", "Stop", "last_round"]


def running_epsilon(release: Release) -> float:
    figure = guarantee(release).epsilon
    return math.inf if figure is None else figure


@dataclass(frozen=True)
class Stop:
    """A client that is not asked any more, because once more would take it above federation.target_epsilon.

    Attributes:
        client: the partition's number.
        round: the last round in which it was asked; 0 if it never was.
        epsilon: proven for it by then.
        next_epsilon: what would be proven for it after the round in which it was not asked; ``None``: nothing.
    """

    client: int
    round: int
    epsilon: float
    next_epsilon: float | None


@dataclass
class _Account:
    """The epsilon of releases of one kind, by how many there were; clients of a run mostly share one or two."""

    release: Release
    known: dict[int, float] = field(default_factory=dict)

    def epsilon(self, participations: int) -> float:
        if participations not in self.known:
            self.known[participations] = running_epsilon(replace(self.release, participations=participations))
        return self.known[participations]


class Budget:
    """What every client has used up, round by round: call :meth:`left` and then :meth:`spend` for each round in order.

    Figures are those of :func:`fedpriv.accounting.running_epsilon`, never below the final ledger's: cheap closed forms
    and Renyi accounting. Where the ledger has something finer, it ends below what was allowed.
    """

    def __init__(self, experiment: Experiment, plans: Sequence[Plan]) -> None:
        """Open the budget of a run in which nobody was asked yet.

        Raises:
            InputError: with federation.target_epsilon not even the first round is possible.
        """
        self._federation = experiment.federation
        self._plans = plans
        accounts: dict[Release, _Account] = {}
        self._accounts = [accounts.setdefault(release, _Account(release)) for release in map(_unused, plans)]
        self._participations = [0] * len(plans)
        self._last_round = [0] * len(plans)
        self._open = list(range(len(plans)))
        self._worst = 0.0
        self._stops: list[Stop] = []
        self._check_first_round()

    @property
    def stops(self) -> tuple[Stop, ...]:
        """The clients that stopped, in the order in which that was found out."""
        return tuple(self._stops)

    @property
    def worst_epsilon(self) -> float | None:
        """What is proven about the worst client so far; ``None`` where nothing is."""
        return _finite(self._worst)

    def left(self, round_number: int) -> tuple[int, ...]:
        """The clients that may take part in a round, ascending; whoever may not now, may not later: it stops here."""
        target = self._federation.target_epsilon
        if target is not None:
            over = [client for client in self._open if self._after(client, round_number) > target]
            self._stops += [self._stop(client, round_number) for client in over]
            self._open = [client for client in self._open if client not in set(over)] if over else self._open
        return tuple(self._open)

    def is_used_up(self, round_number: int) -> bool:
        """Whether too few clients are left for a round."""
        return len(self.left(round_number)) < self._federation.min_clients

    def spend(self, round_number: int, clients: Sequence[int]) -> None:
        """Note that clients are asked in a round, which is later than those noted before."""
        for client in clients:
            self._participations[client] += self._plans[client].further_participations(
                self._last_round[client], round_number
            )
            self._last_round[client] = round_number
            self._worst = max(self._worst, self._accounts[client].epsilon(self._participations[client]))

    def replay(self, asked: Mapping[int, Sequence[int]]) -> None:
        """Note rounds of the past.

        Args:
            asked: round -> the clients asked, as the run folder has it.
        """
        for number, clients in sorted(asked.items()):
            self.left(number)
            self.spend(number, clients)

    def _after(self, client: int, round_number: int) -> float:
        more = self._plans[client].further_participations(self._last_round[client], round_number)
        return self._accounts[client].epsilon(self._participations[client] + more)

    def _stop(self, client: int, round_number: int) -> Stop:
        epsilon = self._accounts[client].epsilon(self._participations[client])
        return Stop(client, self._last_round[client], epsilon, _finite(self._after(client, round_number)))

    def _check_first_round(self) -> None:
        if not self.is_used_up(1):
            return
        least = min(math.inf if stop.next_epsilon is None else stop.next_epsilon for stop in self._stops)
        raise InputError(
            f"federation.target_epsilon = {self._federation.target_epsilon:g} allows no round: the first would take "
            f"{len(self._stops)} of {len(self._plans)} clients above it, to epsilon {least:.4g} or more "
            f"(min_clients = {self._federation.min_clients})"
        )


def last_round(experiment: Experiment, plans: Sequence[Plan], latest: int) -> int:
    """Return the last round, ``latest`` at most, that federation.target_epsilon leaves enough clients for.

    Raises:
        InputError: not even the first round is possible.
    """
    budget = Budget(experiment, plans)
    for number in range(1, latest + 1):
        if budget.is_used_up(number):
            return number - 1
        budget.spend(number, participants(experiment, number, budget.left(number)))
    return latest


def _unused(plan: Plan) -> Release:
    return plan.accounted(())


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
