"""The privacy budget of a run: what each client has used up so far, and who may still take part.

Who is asked is a public function of the settings and of who was asked before. Every engine, and a run that is resumed,
asks the same clients, and an eavesdropper learns nothing from who is not asked any more.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedpriv.accounting import Release, proven_epsilon, running_epsilon
from fedpriv.config import Experiment
from fedpriv.errors import InputError
from fedpriv.plan import Plan, participants
from fedpriv.records import Stop

__all__ = ["Budget", "last_round"]


@dataclass(eq=False)
class _Account:
    """The epsilon of releases of one kind, by how many there were; the clients of a run mostly share one or two.

    Attributes:
        release: without participations.
        kind: the same number for accounts that differ in the rate only.
        known: participations -> epsilon.
    """

    release: Release
    kind: int
    known: dict[int, float] = field(default_factory=dict)

    def epsilon(self, participations: int) -> float:
        """What is proven after so many participations; it grows with them."""
        if participations not in self.known:
            self.known[participations] = running_epsilon(replace(self.release, participations=participations))
        return self.known[participations]

    def is_proven(self, participations: int, target: float) -> bool:
        """Whether the final ledger's epsilon after so many participations is at most ``target``."""
        figure = proven_epsilon(replace(self.release, participations=participations))
        if figure > target:
            return False
        self.known[participations] = min(figure, self.epsilon(participations))
        return True

    def most(self, target: float, planned: int) -> int:
        """The most participations, ``planned`` at most, whose epsilon is at most ``target``."""
        within, above = 0, planned + 1
        if self.epsilon(planned) <= target:
            return planned
        while above - within > 1:
            middle = (within + above) // 2
            if self.epsilon(middle) <= target:
                within = middle
            else:
                above = middle
        return within


class Budget:
    """What every client has used up, round by round: call :meth:`left` and then :meth:`spend` for each round in order.

    Figures are those of :func:`fedpriv.accounting.running_epsilon`, never below the final ledger's: cheap closed forms
    and Renyi accounting. Where the ledger has something finer, it ends below what was allowed; only whether a client
    may do all that is planned for it is asked of the ledger itself.
    """

    def __init__(self, experiment: Experiment, plans: Sequence[Plan]) -> None:
        """Open the budget of a run in which nobody was asked yet.

        Raises:
            InputError: with federation.target_epsilon not even the first round is possible.
        """
        self._federation = experiment.federation
        self._plans = plans
        self._accounts = _accounts(plans)
        self._most = [_most(experiment, plan, account) for plan, account in zip(plans, self._accounts, strict=True)]
        self._participations = [0] * len(plans)
        self._last_round = [0] * len(plans)
        self._open = list(range(len(plans)))
        self._looked_at = 0
        self._bounds = experiment.data.bounds_epsilon
        self._worst = 0.0
        self._stops: list[Stop] = []
        self._check_first_round()

    @property
    def stops(self) -> tuple[Stop, ...]:
        """The clients that stopped, in the order in which that was found out."""
        return tuple(self._stops)

    @property
    def worst_epsilon(self) -> float | None:
        """What is proven about the worst client so far, estimated bounds included; ``None`` where nothing is."""
        return _finite(self._worst + self._bounds)

    def left(self, round_number: int) -> tuple[int, ...]:
        """The clients that may take part in a round, ascending; whoever may not now, may not later: it stops here."""
        if self._federation.target_epsilon is None or round_number == self._looked_at:
            return tuple(self._open)
        self._looked_at = round_number
        over = [client for client in self._open if self._after(client, round_number) > self._most[client]]
        if over:
            self._stops += [self._stop(client, round_number) for client in over]
            self._open = [client for client in self._open if client not in set(over)]
        return tuple(self._open)

    def is_used_up(self, round_number: int) -> bool:
        """Whether too few clients are left for a round."""
        return len(self.left(round_number)) < self._federation.min_clients

    def spend(self, round_number: int, clients: Sequence[int]) -> None:
        """Note that clients are asked in a round, which is later than those noted before."""
        for client in clients:
            self._participations[client] = self._after(client, round_number)
            self._last_round[client] = round_number
        changed = {(self._accounts[client], self._participations[client]) for client in clients}
        epsilons = [account.epsilon(participations) for account, participations in _candidates(changed)]
        self._worst = max(self._worst, *epsilons, 0.0)

    def spend_again(self, round_number: int, clients: Sequence[int]) -> None:
        """Note that clients were asked for a second, other answer in a round."""
        for client in clients:
            # As if nobody had been in a batch of these passes before: never too little.
            self._participations[client] += self._plans[client].further_participations(0, round_number)

    def replay(self, asked: Mapping[int, Sequence[int]]) -> None:
        """Note rounds of the past.

        Args:
            asked: round -> the clients asked, as the run folder has it.
        """
        for number, clients in sorted(asked.items()):
            self.left(number)
            self.spend(number, clients)

    def _after(self, client: int, round_number: int) -> int:
        """A client's participations after one more round."""
        further = self._plans[client].further_participations(self._last_round[client], round_number)
        return self._participations[client] + further

    def _stop(self, client: int, round_number: int) -> Stop:
        account = self._accounts[client]
        next_epsilon = _finite(account.epsilon(self._after(client, round_number)))
        return Stop(client, self._last_round[client], account.epsilon(self._participations[client]), next_epsilon)

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


def _accounts(plans: Sequence[Plan]) -> list[_Account]:
    """One account for each plan; plans whose releases are alike share one."""
    releases = [plan.accounted(()) for plan in plans]
    kinds: dict[Release, int] = {}
    accounts: dict[Release, _Account] = {}
    for release in releases:
        if release not in accounts:
            accounts[release] = _Account(release, kinds.setdefault(replace(release, rate=1.0), len(kinds)))
    return [accounts[release] for release in releases]


def _most(experiment: Experiment, plan: Plan, account: _Account) -> float:
    """How many participations federation.target_epsilon allows.

    The planned ones where the final ledger proves them, as it does for noise that is calibrated for the same target;
    else those that the running figure allows.
    """
    target = experiment.federation.target_epsilon
    if target is None:
        return math.inf
    rounds = range(1, experiment.federation.rounds + 1)
    most = account.most(target, experiment.federation.rounds * plan.steps_per_round)
    drawn = [number for number in rounds if plan.client in participants(experiment, number)]
    for planned in (plan.participations(rounds), plan.participations(drawn)):
        if planned > most and account.is_proven(planned, target):
            return planned
    return most


def _candidates(pairs: Iterable[tuple[_Account, int]]) -> list[tuple[_Account, int]]:
    """Of accounts and their participations those that can be the worst.

    Epsilon grows with the rate and with the participations: what another of its kind has more of both of is left out.
    """
    chosen: list[tuple[_Account, int]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0].kind, -pair[0].release.rate, -pair[1])):
        if not chosen or chosen[-1][0].kind != pair[0].kind or chosen[-1][1] < pair[1]:
            chosen.append(pair)
    return chosen


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
