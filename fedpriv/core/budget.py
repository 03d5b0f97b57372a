"""The privacy budget of a run: what each client has used up so far, and which clients may still take part.

The selection is a public function of the settings and of earlier selections. Every engine, and a run that is resumed,
selects the same clients, and an eavesdropper learns nothing from clients that are no longer selected.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting import Release, ceilings, proven_epsilon, running_epsilon
from fedpriv.accounting.proofs import finite
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.plan import Plan, Schedule, kinds_of, participants
from fedpriv.core.records import Stop, members_text
from fedpriv.core.settings import enumerated


@dataclass(eq=False)
class _Account:
    """The epsilon of releases of one kind, by how many there were; the clients of a run mostly share one or two."""

    release: Release  # without participations
    kind: int  # the same number for accounts that differ in the rate only
    known: dict[int, float] = field(default_factory=dict)  # participations -> epsilon
    known_ceilings: dict[int, float] = field(default_factory=dict)  # participations -> ceiling of the run's guess

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

    def most(self, target: float, planned: int, whole: Iterable[int]) -> int:
        """How many are allowed of ``planned``: one of ``whole`` where the final ledger proves the target for it."""
        most = _most_within(self.epsilon, target, planned)
        return next((count for count in whole if count > most and self.is_proven(count, target)), most)

    def ceiling(self, participations: int, guess: float) -> float:
        """How often any attack picks a record out after so many participations, as the final ledger has it."""
        if participations not in self.known_ceilings:
            (limit,) = ceilings(replace(self.release, participations=participations), [guess])
            self.known_ceilings[participations] = 1.0 if limit.gamma is None else limit.gamma
        return self.known_ceilings[participations]


def _most_within(figure: Callable[[int], float], target: float, planned: int) -> int:
    """The most participations, ``planned`` at most, whose figure, which grows with them, is at most ``target``."""
    if figure(planned) <= target:
        return planned
    return bisect_right(range(1, planned), target, key=figure)


class Budget:
    """What every client has used up, round by round: call :meth:`left` and then :meth:`spend` for each round in order.

    Figures are those of :func:`fedpriv.accounting.running_epsilon`, never below the final ledger's: cheap closed forms
    and Renyi accounting. Where the ledger has something finer, it ends below what was allowed; only whether a client
    may do all that is planned for it is asked of the ledger itself.
    """

    def __init__(self, experiment: Experiment, plans: Sequence[Plan]) -> None:
        """Open the budget of a run in which no client was selected yet."""
        self._federation = experiment.federation
        self._plans = plans
        self._kinds = kinds_of(plans)
        self._each_kind: list[int] = np.unique(self._kinds, return_index=True)[1].tolist()  # its first client
        self._hides_participants = experiment.hides_participants
        self._accounts = _Accounts(plans, self._kinds)
        self._participations: dict[int, int] = {}
        self._last_round: dict[int, int] = {}
        self._taken_part: dict[int, tuple[float, int]] = {}  # the last round and the count, with correlated noise
        # Without targets nobody stops.
        self._schedule = Schedule.of(experiment) if experiment.federation.targets else None
        self._allowed: dict[tuple[int, Sequence[int]], int] = {}
        self._guess = experiment.mechanism.guess if experiment.federation.target_ceiling is not None else None
        self._left: Sequence[int] = range(len(plans))
        self._gone: set[int] = set()
        self._looked_at = 0
        self._bounds = experiment.data.bounds_epsilon
        self._worst = 0.0
        self._stops: list[Stop] = []
        self._check_first_round()

    @property
    def stops(self) -> tuple[Stop, ...]:
        """The clients that stopped, in the order in which they did."""
        return tuple(self._stops)

    @property
    def worst_epsilon(self) -> float | None:
        """What is proven about the worst client so far, estimated bounds included; ``None`` where nothing is."""
        return finite(self._worst + self._bounds)

    def left(self, round_number: int) -> Sequence[int]:
        """The clients that may take part in a round, ascending; one that may not stops here for good."""
        schedule = self._schedule
        if schedule is None or round_number == self._looked_at:
            return self._left
        self._looked_at = round_number
        over = sorted([*self._over(schedule, round_number), *self._never_asked_over(schedule, round_number)])
        if over:
            self._stops += [self._stop(clients, round_number) for clients in over]
            self._gone |= {client for clients in over for client in clients}
            self._left = tuple(client for client in self._left if client not in self._gone)
        return self._left

    def _over(self, schedule: Schedule, round_number: int) -> Iterator[tuple[int, ...]]:
        """The clients that were or will be selected, each by itself, that a round would take above the target."""
        for client in self._left if schedule.drawn is None else sorted(self._known(schedule) - self._gone):
            if self._after(client, round_number) > self._most(client, schedule.of_client(client)):
                yield (client,)

    def _never_asked_over(self, schedule: Schedule, round_number: int) -> Iterator[tuple[int, ...]]:
        """The others, which no round will ask unless others stop; those with the same plan share one answer."""
        if schedule.drawn is None:
            return
        for client in self._each_kind:
            if self._plans[client].further_participations(0, round_number) <= self._most(client, ()):
                continue
            known, kind = self._known(schedule), self._kinds[client]
            alike = tuple(each for each in self._left if self._kinds[each] == kind and each not in known)
            if alike:
                yield alike

    def _known(self, schedule: Schedule) -> set[int]:
        return {*(schedule.drawn or ()), *self._participations}

    def _most(self, client: int, planned: Sequence[int]) -> int:
        """How many participations the targets allow to clients with this one's plan whom these rounds will ask."""
        key = int(self._kinds[client]), planned
        if key not in self._allowed:
            federation, plan, account = self._federation, self._plans[client], self._accounts.of_client(client)
            most, guess = federation.rounds * plan.steps_per_round, self._guess
            if federation.target_ceiling is not None and guess is not None:
                most = _most_within(lambda count: account.ceiling(count, guess), federation.target_ceiling, most)
            if federation.target_epsilon is not None:
                rounds = range(1, federation.rounds + 1)
                whole = plan.participations(rounds), plan.participations(planned)
                most = min(most, account.most(federation.target_epsilon, len(rounds) * plan.steps_per_round, whole))
            self._allowed[key] = most
        return self._allowed[key]

    def is_used_up(self, round_number: int) -> bool:
        """Whether too few clients are left for a round."""
        return len(self.left(round_number)) < self._federation.min_clients

    def spend(self, round_number: int, clients: Sequence[int]) -> None:
        """Note that clients are selected in a round, which is later than those noted before."""
        self._keep_pattern(round_number, clients)
        for client in (clients := self._counted(clients)):
            self._participations[client] = self._after(client, round_number)
            self._last_round[client] = round_number
        changed = {(self._accounts.of_client(client), self._participations[client]) for client in clients}
        epsilons = [account.epsilon(participations) for account, participations in _candidates(changed)]
        self._worst = max(self._worst, *epsilons, 0.0)

    def spend_again(self, round_number: int, clients: Sequence[int]) -> None:
        """Note that clients were sent a second, different query in a round; correlated noise does not allow that."""
        self._keep_pattern(round_number, clients)
        for client in self._counted(clients):
            # As if nobody had been in a batch of these passes before: never too little.
            further = self._plans[client].further_participations(0, round_number)
            self._participations[client] = self._participations.get(client, 0) + further

    def replay(self, asked: Mapping[int, Sequence[int]]) -> None:
        """Note rounds of the past."""
        for number, clients in sorted(asked.items()):
            self.left(number)
            self.spend(number, clients)

    def _keep_pattern(self, round_number: int, clients: Sequence[int]) -> None:
        """Refuse a participation that correlated noise is not accounted for."""
        if (pattern := self._plans[0].correlation) is None:
            return
        for client in clients:
            last, count = self._taken_part.get(client, (-math.inf, 0))
            if round_number - last < pattern.separation or count == pattern.participations:
                times, rounds = f"{pattern.participations} of {pattern.rounds}", f"every {pattern.separation} rounds"
                raise InputError(
                    f"round {round_number} would take client {client} beyond the participation pattern that its noise "
                    f"is accounted for: in {times} rounds at most, at most {rounds} (before: {count} rounds, the last "
                    f"one {last}); nothing was asked"
                )
            self._taken_part[client] = (round_number, count + 1)

    def _counted(self, clients: Sequence[int]) -> Sequence[int]:
        """Whose participations a round counts for: of a secret draw everybody's, one client for all that are alike."""
        if not self._hides_participants:
            return clients
        return self._each_kind

    def _after(self, client: int, round_number: int) -> int:
        """A client's participations after one more round."""
        further = self._plans[client].further_participations(self._last_round.get(client, 0), round_number)
        return self._participations.get(client, 0) + further

    def _stop(self, clients: Sequence[int], round_number: int) -> Stop:
        client = clients[0]
        account = self._accounts.of_client(client)
        spent, after = self._participations.get(client, 0), self._after(client, round_number)
        guess, most = self._guess, self._federation.target_ceiling
        next_ceiling = None if guess is None else account.ceiling(after, guess)
        return Stop(
            client=client,
            round=self._last_round.get(client, 0),
            epsilon=account.epsilon(spent),
            next_epsilon=finite(account.epsilon(after)),
            count=len(clients),
            members=members_text(clients),
            ceiling=None if guess is None else account.ceiling(spent, guess),
            next_ceiling=next_ceiling,
            target="target_ceiling" if most is not None and (next_ceiling or 0.0) > most else "target_epsilon",
        )

    def _check_first_round(self) -> None:
        if not self.is_used_up(1):
            return
        least = {
            "epsilon": min(math.inf if stop.next_epsilon is None else stop.next_epsilon for stop in self._stops),
            "ceiling": min(stop.next_ceiling or 0.0 for stop in self._stops),
        }
        targets = [f"federation.{key} = {target:g}" for key, target in self._federation.targets.items()]
        figures = [f"{key.removeprefix('target_')} {least[key[7:]]:.4g}" for key in self._federation.targets]
        raise InputError(
            f"{enumerated(targets, 'and')} {'allows' if len(targets) == 1 else 'allow'} no round: the first would take "
            f"{sum(stop.count for stop in self._stops)} of {len(self._plans)} clients above it, to "
            f"{enumerated(figures, 'and')} or more (min_clients = {self._federation.min_clients})"
        )


def last_round(experiment: Experiment, plans: Sequence[Plan], latest: int) -> int:
    """Return the last round, ``latest`` at most, that the targets of federation leave enough clients for."""
    budget = Budget(experiment, plans)
    for number in range(1, latest + 1):
        if budget.is_used_up(number):
            return number - 1
        budget.spend(number, participants(experiment, number, budget.left(number)))
    return latest


class _Accounts:
    """An account for every kind of plan; plans whose releases are alike share one."""

    def __init__(self, plans: Sequence[Plan], kinds: NDArray[np.int64]) -> None:
        self.plans, self.kinds = plans, kinds
        self._of_kind: dict[int, _Account] = {}
        self._of_release: dict[Release, _Account] = {}
        self._numbers: dict[Release, int] = {}

    def of_client(self, client: int) -> _Account:
        """The account that a client shares."""
        kind = int(self.kinds[client])
        if kind not in self._of_kind:
            self._of_kind[kind] = self._of(self.plans[client].accounted(()))
        return self._of_kind[kind]

    def _of(self, release: Release) -> _Account:
        if release not in self._of_release:
            number = self._numbers.setdefault(replace(release, rate=1.0), len(self._numbers))
            self._of_release[release] = _Account(release, number)
        return self._of_release[release]


def _candidates(pairs: Iterable[tuple[_Account, int]]) -> list[tuple[_Account, int]]:
    """Of accounts and their participations those that can be the worst: epsilon grows with rate and participations."""
    chosen: list[tuple[_Account, int]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0].kind, -pair[0].release.rate, -pair[1])):
        if not chosen or chosen[-1][0].kind != pair[0].kind or chosen[-1][1] < pair[1]:
            chosen.append(pair)
    return chosen
