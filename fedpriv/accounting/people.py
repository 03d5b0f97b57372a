"""What is proven about a person whose records several clients hold: group privacy at each, composed over clients.

Neighbours differ in all records of one person, at all clients; who holds how many of them is public. Clients are
independent given what they were sent, so that their releases compose adaptively, also in the same round. At a client
the group of the person's records has a dominating pair of its own (:meth:`Proof.group`), or else the claim about one
record is stretched over the group.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import numpy as np

from fedpriv.accounting.gaussian import gaussian_epsilon
from fedpriv.accounting.guarantees import guarantee, proven_epsilon, running_epsilon, sampling_of
from fedpriv.accounting.numerical import composed_epsilon
from fedpriv.accounting.pairs import GaussianPair, Pair
from fedpriv.accounting.proofs import Claim, Proof, Run, smallest, stated
from fedpriv.accounting.release import Release
from fedpriv.core.errors import InputError
from fedpriv.core.records import Guarantee, Person
from fedpriv.core.registry import MECHANISMS

_MOST_RECORDS = 10**6
_SMALLEST_LOG_DELTA = -300 * math.log(10)
_DELTAS = 60  # at which a claim about one record is stretched
_GROUP = "the person's records at a client are one group"
_COMPOSED = "clients composed, who are independent given what they were sent"
_ADDED = "pure epsilon of one record, added over the person's records and over clients"
_KINDS = "releases of several kinds"
NORMAL = (
    "Gaussian mechanism, {} as one of mu = {:.4g} (Dong, Roth and Su 2022, Cor. 3.3), converted exactly (Balle and "
    "Wang 2018, Thm 8); no amplification used"
)
_CHAIN = "Vadhan 2017, Lemma 2.2"


@dataclass(frozen=True)
class Share:
    """What one client released, and how many of the person's records it holds."""

    release: Release  # about one record, or about the client's whole update
    records: int  # at least 1
    examples: int | None = None  # that the client holds; None: any number

    def __post_init__(self) -> None:
        if not 1 <= self.records <= (self.examples or _MOST_RECORDS):
            allowed = f"whole numbers from 1 to {self.examples or _MOST_RECORDS:,}"
            raise InputError(key="records", given=self.records, allowed=allowed)

    @property
    def units(self) -> int:
        """How many of what the release protects are the person's."""
        return 1 if self.release.unit == "update" else self.records


def person(shares: Sequence[Share], count: int = 1) -> Person:
    """Return what is proven about ``count`` persons alike: the smaller of composed pairs and added claims."""
    used = tuple(share for share in shares if share.release.participations)
    claim, pure = (_epsilon(used), _pure(used)) if used else (_UNUSED, _UNUSED)
    return Person(
        count=count,
        records=tuple(sorted((share.records for share in shares), reverse=True)),
        epsilon=claim.epsilon if math.isfinite(claim.epsilon) else None,
        pure_epsilon=pure.epsilon if math.isfinite(pure.epsilon) else None,
        delta=float(shares[0].release.delta),
        adjacency=_adjacency(shares[0].release),
        theorem=claim.theorem,
    )


_UNUSED = Claim(0.0, "no client that holds a record of this person released anything")


def _adjacency(release: Release) -> str:
    becomes = "count as zero" if release.adjacency == "zero-out" else "are replaced by any others"
    records = "all training records of one person, at all clients that hold them,"
    return f"{release.adjacency} of a person: {records} {becomes}"


def _pure(shares: Sequence[Share]) -> Claim:
    return Claim(sum(units * proof.pure().epsilon for proof, units, _ in _groups(shares)), _ADDED)


def _groups(shares: Sequence[Share]) -> tuple[tuple[Proof, int, int | None], ...]:
    """The proof of each client's releases, how many units are the person's, and the client's examples."""
    mechanism = MECHANISMS[shares[0].release.mechanism]
    if mechanism.noise_at != "clients":  # one noise for a sum, which holds uploads of all of these clients
        most = max((share.release for share in shares), key=lambda release: release.participations)
        return ((mechanism.proof()(most), sum(share.units for share in shares), None),)
    return tuple((mechanism.proof()(share.release), share.units, share.examples) for share in shares)


def together(releases: Sequence[Release]) -> Guarantee:
    """Return what is proven about all releases of one client, which may differ in noise and sampling.

    Releases of one kind are one with all their participations. Of several kinds the smaller of two is proven: their
    dominating pairs composed adaptively, or epsilon and delta added. A figure under replace-one holds for zero-out,
    which is therefore the adjacency if any release has it. All have the same mechanism, unit and delta.
    """
    counts: Counter[Release] = Counter()
    for release in releases:
        counts[replace(release, participations=1)] += release.participations
    kinds = [replace(kind, participations=count) for kind, count in counts.items()]
    if len(kinds) == 1:
        return guarantee(kinds[0])
    proofs, delta = [MECHANISMS[kind.mechanism].proof()(kind) for kind in kinds], kinds[0].delta
    runs = [proof.whole_run() for proof in proofs]
    composed = _composed(runs, delta) if all(runs) else None
    mu = _normal_distance([part for run in runs for order in run[:1] for part in order])
    how = "; ".join(dict.fromkeys(proof.run_theorem for proof in proofs)) if mu is None else NORMAL.format("all", mu)
    pure = Claim(sum(proof.pure().epsilon for proof in proofs), proofs[0].pure().theorem)
    claims = [pure, *([] if composed is None else [Claim(composed, f"{_KINDS}: {how}")])]
    if mu is None:  # else the composition is exact
        claims.append(
            Claim(_added([(proof, 1, None) for proof in proofs], delta), f"{_KINDS}, epsilon and delta added")
        )
    return stated(
        next((proof for proof in proofs if proof.release.adjacency == "zero-out"), proofs[0]).adjacency,
        sum(kind.participations for kind in kinds),
        delta,
        pure,
        smallest(claims),
        Claim(math.inf, f"{_KINDS}, of which papers print no figure"),
        sampling="; ".join(dict.fromkeys(map(sampling_of, kinds))),
    )


@lru_cache(maxsize=1024)
def _epsilon(shares: tuple[Share, ...]) -> Claim:
    groups, delta = _groups(shares), float(shares[0].release.delta)
    plain = [proof.group(units, examples) for proof, units, examples in groups]
    split = [proof.split_group(units) or run for (proof, units, _), run in zip(groups, plain, strict=True)]
    # Each pass's draws may run out.
    spare = delta - sum(proof.delta_of_sampling for proof, _, _ in groups if proof.is_allocated)
    runs = [(plain, delta), *([(split, spare)] if split != plain else [])]
    composed = [_composed(each, left) for each, left in runs if all(each)]
    chain = f"{_GROUP}, a chain of neighbours ({_CHAIN}); epsilon and delta of clients added"
    added = Claim(_added(groups, delta), chain)
    how = f"{_GROUP} with a dominating pair of its own, and {_COMPOSED}"
    return smallest([added, *(Claim(epsilon, how) for epsilon in composed if epsilon is not None), _pure(shares)])


def _composed(runs: Sequence[Sequence[Run]], delta: float) -> float | None:
    """The pairs composed over groups, for both orders of the neighbours where they differ."""
    epsilons = [_in_order(runs, order, delta) for order in range(max(map(len, runs)))]
    return None if None in epsilons else max(epsilon for epsilon in epsilons if epsilon is not None)


def _in_order(runs: Sequence[Sequence[Run]], order: int, delta: float) -> float | None:
    parts: Run = reduce(tuple.__add__, (run[order % len(run)] for run in runs))
    mu = _normal_distance(parts)
    return composed_epsilon(parts, delta, known=1.0) if mu is None else gaussian_epsilon(delta, mu)


def _normal_distance(parts: Sequence[tuple[Pair, int]]) -> float | None:
    """The mu of normal releases, which are one at the root of the sum of their squares; ``None``: some are not."""
    squares = [count * pair.mu**2 for pair, count in parts if isinstance(pair, GaussianPair)]
    return math.sqrt(sum(squares)) if len(squares) == len(parts) > 0 else None


def _added(groups: Sequence[tuple[Proof, int, int | None]], delta: float) -> float:
    """The claims about one unit stretched over each group, and added; delta is shared out evenly."""
    return sum(_stretched(proof.release, units, delta / len(groups)) for proof, units, _ in groups)


@lru_cache(maxsize=1024)
def _stretched(release: Release, units: int, delta: float) -> float:
    """Return epsilon of a group from that of one: a chain of neighbours, each of which differs in one of the group.

    delta(k epsilon) of the group is at most delta(epsilon) (exp(k epsilon) - 1) / (exp(epsilon) - 1).
    """
    if units == 1:
        return proven_epsilon(replace(release, delta=delta))
    least = math.inf
    for log_delta in np.linspace(math.log(delta / units), _SMALLEST_LOG_DELTA, _DELTAS):
        once = running_epsilon(replace(release, delta=math.exp(log_delta)))
        if math.isfinite(once) and log_delta + _log_chain(once, units) <= math.log(delta):
            least = min(least, units * once)
    return least


def _log_chain(epsilon: float, units: int) -> float:
    """Return log of the sum of exp(i epsilon), i below ``units``."""
    if epsilon == 0:
        return math.log(units)
    return (units - 1) * epsilon + math.log(math.expm1(-units * epsilon) / math.expm1(-epsilon))
