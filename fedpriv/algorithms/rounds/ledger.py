"""The ledger of rounds of uploads, where clients that were asked alike are accounted for once, and warnings."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting import Ceiling, Ledger, Release, ceilings, guarantee
from fedpriv.accounting.estimated import bounds_release, person_with_bounds, surer, told_from, with_bounds
from fedpriv.accounting.people import Share, person
from fedpriv.attacks.observation import OTHERS
from fedpriv.attacks.settings import Access
from fedpriv.attacks.threat import threat_model
from fedpriv.core.asked_log import released_rounds, replay, rounds_by_client
from fedpriv.core.budget import Budget, last_round
from fedpriv.core.config import Experiment, FederationConfig
from fedpriv.core.plan import Plan
from fedpriv.core.records import (
    Asked,
    DataRelease,
    Guarantee,
    LabelCeiling,
    LedgerLine,
    LedgerView,
    Person,
    members_text,
)
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.runs import RunFolder
from fedpriv.core.settings import enumerated
from fedpriv.core.world import World
from fedpriv.server.rounds import check_crafting

_COPIES = (
    "Clients drew their examples from the same data (data.partition = 'overlapping'), so that several may hold copies "
    "of one. The figures are about one client's copy: of an example that several clients hold, the figures of all of "
    "them that were asked add up, epsilon and delta (sequential composition)."
)


_MOST_PROFILES = 256  # ways in which persons' records may lie at clients; of more one bound is computed for all

_EVERY_ROUND = (
    "A secret draws the clients of a round, so no figure may depend on the draw: every round counts for every client. "
    "If you know that a client was in fewer rounds, more is proven about it."
)


@dataclass(frozen=True)
class _ClientKind:
    """What the figures of a line follow from: nothing that clients' data decide but how many examples there are."""

    release: Release  # of the clients' releases
    examples: int  # that each of them holds
    noise: float | None  # in their releases
    asked: bool  # whether they ever were; else there is nothing to attack


def run_ledger(
    world: World,
    folder: RunFolder,
    noise_of: Callable[[Plan], float | None] = lambda plan: plan.config.noise,
    more: Mapping[str, Any] | None = None,
) -> Ledger:
    """Account for every round in which a client was asked; where a secret draws the clients, for all rounds."""
    bounds = world.experiment.data.bounds_epsilon
    # Kinds differ in more than what they release, and some clients take a second.
    proven = cache(partial(_proven, world))
    kinds = _kinds(world, folder.asked(), noise_of)
    guesses = {"told": 1 / (OTHERS + 1), **_target_guess(world.experiment)}
    lines = [
        LedgerLine.of(
            client=clients[0],
            examples=kind.examples,
            guarantee=proven(kind.release),
            noise=kind.noise,
            ceilings={name: _ceiling(kind.release, k0, bounds) for name, k0 in guesses.items() if kind.asked},
        ).of_all(sorted(clients))
        for kind, clients in kinds.items()
    ]
    mechanism = world.experiment.mechanism
    if (pattern := world.plans[0].correlation) is not None:
        replay(Budget(world.experiment, world.plans), folder.asked())  # refuses participations that break the pattern
    ledger = Ledger.of(mechanism.unit, mechanism.name, {}, lines)
    # Clients with more data may need another noise for the same target; the run's figure is the worst client's.
    config = world.plans[ledger.worst.client].config
    parameters = config.model_dump(mode="json", include=set(config.effective), exclude_none=True)
    noise = {"noise": world.experiment.noise} if mechanism.protects else {}
    parameters = {**parameters, **(asdict(pattern) if pattern else {}), **noise, **(more or {})}
    shown, people = views(world, ledger.worst), _people(world, kinds)
    return replace(ledger, parameters=parameters, releases=_releases(world), views=shown, people=people)


def _target_guess(experiment: Experiment) -> dict[str, float]:
    """The guess of the target ceiling that the noise or the end of the run follows from, if there is one."""
    target, guess = experiment.mechanism.target, experiment.mechanism.guess
    calibrated = target is not None and target.guess is not None
    stops = experiment.federation.target_ceiling is not None
    return {"target": guess} if guess is not None and (calibrated or stops) else {}


def _people(world: World, kinds: Mapping[_ClientKind, Sequence[int]]) -> tuple[Person, ...]:
    """What is proven about persons over all clients that were asked, the worst first, as of the most asked alike."""
    owners, mechanism = world.dataset.owners, world.experiment.mechanism
    if owners is None or not mechanism.protects or mechanism.filters:
        return ()
    most: dict[tuple[Release, int], Release] = {}
    held: dict[int, list[tuple[int, int]]] = {}  # person -> of each client its kind and how many records it holds
    numbers: dict[tuple[Release, int], int] = {}
    for kind, clients in kinds.items():
        alike = replace(kind.release, participations=0), kind.examples
        most[alike] = max(most.get(alike, kind.release), kind.release, key=lambda release: release.participations)
        number = numbers.setdefault(alike, len(numbers))
        for client in clients if kind.asked else ():
            for owner, records in zip(*np.unique(owners[world.partitions[client]], return_counts=True), strict=True):
                held.setdefault(int(owner), []).append((number, int(records)))
    shares = [(most[alike], alike[1]) for alike in numbers]
    profiles = Counter(tuple(sorted(each)) for each in held.values())
    covers = len(profiles) > _MOST_PROFILES
    if covers:
        profiles = Counter({_covering(profiles): profiles.total()})
    people = [
        replace(person([Share(shares[kind][0], n, shares[kind][1]) for kind, n in profile], count), covers=covers)
        for profile, count in profiles.items()
    ]
    bounds = world.experiment.data.bounds_epsilon
    return tuple(sorted((person_with_bounds(each, bounds) for each in people), key=lambda each: each.badness))


def _covering(profiles: Iterable[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    """What nobody's records exceed: of clients of each kind the i-th most records, over all persons."""
    most: dict[int, list[int]] = {}
    for profile in profiles:
        for kind in {kind for kind, _ in profile}:
            records = sorted((count for each, count in profile if each == kind), reverse=True)
            known = most.get(kind, [])
            most[kind] = [max(pair) for pair in zip_longest(known, records, fillvalue=0)]
    return tuple((kind, count) for kind, counts in sorted(most.items()) for count in counts)


def _proven(world: World, release: Release) -> Guarantee:
    proven, data = guarantee(release), world.experiment.data
    if data.bounds_epsilon:
        proven = with_bounds(proven, data.bounds_epsilon)
    federation = world.experiment.federation
    drawn = world.experiment.hides_participants and federation.asked < federation.clients
    if drawn and release.correlation is None:
        proven = replace(proven, notes=(*proven.notes, _EVERY_ROUND))
    if world.experiment.mechanism.protects:
        copies = (_COPIES,) if data.overlaps else ()
        proven = replace(proven, notes=(*proven.notes, *copies, *world.taken_as_public))
    return proven


def _kinds(
    world: World, lines: Sequence[Asked], noise_of: Callable[[Plan], float | None]
) -> dict[_ClientKind, list[int]]:
    """The clients of each kind."""
    kinds: dict[_ClientKind, list[int]] = {}
    for clients, rounds in _asked_alike(world, lines):
        plan = world.plans[clients[0]]
        kind = _ClientKind(plan.accounted(rounds), plan.sampling.examples, noise_of(plan), bool(rounds))
        kinds.setdefault(kind, []).extend(clients)
    return kinds


def _asked_alike(world: World, lines: Sequence[Asked]) -> Iterator[tuple[list[int], Sequence[int]]]:
    """Clients with the same plan and the rounds in which they were asked: all, where nobody may know who was."""
    if world.experiment.hides_participants:
        rounds = released_rounds(lines)
        yield from ((clients, rounds) for clients in _alike(world.alike))
        return
    asked = rounds_by_client(lines)
    yield from (([client], asked[client]) for client in sorted(asked))
    never = world.alike.copy()
    never[list(asked)] = -1
    yield from ((clients, ()) for clients in _alike(never) if never[clients[0]] >= 0)


def _alike(numbers: NDArray[np.int64]) -> Iterator[list[int]]:
    """The clients with the same number together, ascending."""
    order = np.argsort(numbers, kind="stable")
    for clients in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        yield clients.tolist()


def _releases(world: World) -> tuple[DataRelease, ...]:
    """What was released of the data before the training: bounds of columns, where they are no public constants."""
    table, bounds = world.experiment.data.table, world.experiment.data.bounds_epsilon
    if table is None or not bounds:
        return ()
    return (bounds_release(bounds, [column.name for column in table.columns if column.low is not None]),)


def label_ceilings(world: World, folder: RunFolder) -> tuple[LabelCeiling, ...]:
    """How often any attack names the label of a client's example at most, for the referee alone.

    A guess has the largest share of a class among the client's examples. Where all are of one class there is nothing to
    tell, and of clients that were never asked nothing to tell it from.
    """
    bounds = world.experiment.data.bounds_epsilon
    alike: dict[tuple[Release, float], list[int]] = {}
    for client, rounds in sorted(rounds_by_client(folder.asked()).items()):
        largest = max(counts := world.class_counts_of(world.true_labels, client)) / sum(counts)
        if largest < 1:
            alike.setdefault((world.plans[client].accounted(rounds), largest), []).append(client)
    return tuple(
        LabelCeiling(clients[0], len(clients), members_text(clients), _ceiling(release, largest, bounds))
        for (release, largest), clients in alike.items()
    )


def _ceiling(release: Release, k0: float, bounds: float) -> Ceiling:
    """What no attack can exceed where a guess has ``k0``; ``bounds``: what an estimate of a table's bounds cost."""
    (limit,) = ceilings(release, [surer(k0, bounds)])
    return told_from(limit, k0, bounds)


LISTS_PARTICIPANTS = (
    "asked.jsonl",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "observations",
    "reconstructions",
    "referee",
)
"""What a run writes that lists who was asked, or follows from it: these files and folders of its folder."""

_SERVER = "the server, and anyone who reads what it reads: uploads there have no noise"


def views(world: World, worst: LedgerLine) -> tuple[LedgerView, ...]:
    """Return the lines of a run; none where every upload is private by itself."""
    where = world.experiment.mechanism.noise_at
    if where == "clients":
        return ()
    plain = worst.guarantee
    if where == "sum":
        return (_of_sums(plain),)
    model = LedgerView(
        sees="the models of all rounds, and which clients were queried in each",
        protects_against="clients, anyone who gets a model, and anyone who sees, on the network or in the run's "
        "folder, which clients were queried, but no upload",
        not_against=_SERVER,
        guarantee=plain,
    )
    return (model, *_amplified(world, plain))


def _of_sums(plain: Guarantee) -> LedgerView:
    return LedgerView(
        sees="the sum of each round's uploads, and so the models",
        protects_against="a server that passes on the clients' own keys, clients, and anyone who gets a model, as long "
        "as the clients that a sum needs add their shares",
        not_against="a server that makes up clients or their keys, which nothing here prevents: it reads single "
        "uploads, and each has only a share of the noise; clients who work together with the server, because their "
        "shares are then missing in the noise; and anyone who breaks the masks (key agreement and AES are assumed to "
        "hold)",
        guarantee=plain,
    )


def _amplified(world: World, plain: Guarantee) -> tuple[LedgerView, ...]:
    """The line with amplification, where not all clients are asked in every round; never above the plain one."""
    federation, plan = world.experiment.federation, world.plans[0]
    rate = federation.asked / federation.clients
    if rate == 1 or not plain.participations:
        return ()
    sampling = federation.client_sampling
    if sampling == "turns" or sampling not in MECHANISMS[plan.config.name].proof().amplifying:
        return ()
    release = replace(
        plan.accounted(()),
        sampling=sampling,
        rate=rate,
        participations=plain.participations,
        adjacency=plan.config.adjacent if sampling == "poisson" else "replace-one",
    )
    known = "the run's secret" if world.experiment.keeps_secret else "the seed (noise = 'reproducible')"
    return (
        LedgerView(
            sees="the models of all rounds, but not which clients were queried",
            protects_against="anyone who gets models and never learns who took part",
            not_against=f"anyone who sees which clients were queried: the network, clients about themselves and others "
            f"they know of, holders of {known}, and readers of the files in the run's folder that list them or follow "
            f"from them: {', '.join(LISTS_PARTICIPANTS)}, and what audits and probes add there (ledger.json counts "
            f"every round for every client, queried or not); and {_SERVER}",
            guarantee=min(
                guarantee(release), plain, key=lambda each: math.inf if each.epsilon is None else each.epsilon
            ),
        ),
    )


def upload_warnings(world: World) -> tuple[str, ...]:
    """Return one line for each setting that has no effect or makes a result mean less than it seems to."""
    experiment = world.experiment
    check_crafting(world)
    return (
        *_unused(world),
        *_mixed_keys(experiment),
        *_unread_settings(experiment),
        *_unread_by_rule(experiment.federation),
        *_ignored_settings(experiment),
        *_masked(experiment),
        *experiment.federation.rule.warnings(experiment.federation.asked),
        *_few_clients(experiment),
        *_unreached_rounds(world),
    )


def _unused(world: World) -> list[str]:
    """What of the data belongs to nobody who takes part."""
    used, examples = int(world.sizes.sum()), len(world.dataset.y_train)
    if world.experiment.data.partition != "key" or used == examples:
        return []
    return [
        f"data.partition = 'key': {len(world.sizes)} clients hold {used} of {examples} training examples; those of "
        "other keys are not used (federation.clients)"
    ]


def _mixed_keys(experiment: Experiment) -> list[str]:
    """A key that was named, and clients that are not its values."""
    data = experiment.data
    if not data.key or data.partition == "key":
        return []
    return [
        f"data.key = {data.key!r} does not decide who holds an example with data.partition = {data.partition!r}; with "
        "'key' it does"
    ]


def _few_clients(experiment: Experiment) -> list[str]:
    adversary, asked = experiment.adversary, experiment.federation.asked
    if not adversary.attacks or Access.UPLOADS not in threat_model(adversary).grants or adversary.victims <= asked:
        return []
    return [f"adversary.victims = {adversary.victims}, but a round has {asked} uploads: those are attacked"]


def _masked(experiment: Experiment) -> list[str]:
    """Single uploads that the adversary cannot read."""
    adversary = experiment.adversary
    if not adversary.attacks or not experiment.hears_masked or Access.UPLOADS not in threat_model(adversary).grants:
        return []
    return [
        f"federation.secure_aggregation: under adversary.threat_model = {adversary.threat_model!r} each upload is "
        "observed masked; their sum is attacked under 'secure-aggregation'"
    ]


def _unreached_rounds(world: World) -> list[str]:
    """Attacked rounds that never happen, because the privacy budget is used up before."""
    experiment = world.experiment
    if not experiment.federation.targets:
        return []
    attacked = sorted(set(experiment.adversary.rounds)) if experiment.adversary.attacks else []
    end = last_round(experiment, world.plans, max(attacked, default=1))
    never = [str(number) for number in attacked if number > end]
    if not never:
        return []
    which = f"round {never[0]}" if len(never) == 1 else f"rounds {', '.join(never)}"
    targets = [f"federation.{key} = {target:g}" for key, target in experiment.federation.targets.items()]
    return [f"{enumerated(targets, 'or')} ends the run after round {end}: {which} of adversary.rounds will not happen"]


# What clients and server read with one choice only: section, keys, the choice's section and key, its value.
_READ_WITH = (
    ("training", ("optimizer", "momentum", "local_epochs"), ("federation", "algorithm"), "fedavg"),
    ("training", ("risk",), ("training", "loss"), "risk-averting"),
    ("federation", ("server_momentum",), ("federation", "server_optimizer"), "sgd"),
    ("data", ("alpha",), ("data", "partition"), "dirichlet"),
    ("data", ("shards_per_client",), ("data", "partition"), "shards"),
)


def _unread_settings(experiment: Experiment) -> Iterator[str]:
    """Settings of training, server and data that another choice would read."""
    for name, keys, (where, choice), value in _READ_WITH:
        section, given = getattr(experiment, name), getattr(getattr(experiment, where), choice)
        for key in keys if given != value else ():
            if getattr(section, key) != type(section).model_fields[key].default:
                yield (
                    f"{name}.{key} = {getattr(section, key)!r} has no effect with {where}.{choice} = {given!r}; "
                    f"{value!r} reads it"
                )


def _unread_by_rule(federation: FederationConfig) -> Iterator[str]:
    """Settings of other rules of aggregation."""
    for kind, key, field in federation.entries():
        if key not in type(federation.rule).model_fields and getattr(federation, key) != field.default:
            yield (
                f"federation.{key} = {getattr(federation, key)!r} has no effect with federation.aggregation = "
                f"{federation.aggregation!r}; {kind.name!r} reads it"
            )


def _ignored_settings(experiment: Experiment) -> list[str]:
    """Settings that somebody made and that have no effect with the others."""
    config = experiment.mechanism
    if not config.protects:
        return []
    stops = ("ceiling_guess", "candidates") if experiment.federation.target_ceiling is not None else ()
    unread = [key for key in type(config).model_fields if key not in ("name", "unit", *config.effective, *stops)]
    made = [key for key in unread if getattr(config, key) != type(config).model_fields[key].default]
    return [f"mechanism.{key} is set, but {config.name} with these settings does not read it" for key in made]
