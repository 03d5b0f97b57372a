"""What privacy software in a Flower app says, beside what is proven of it over the whole run.

Noise on a client's whole update is normal, so releases that differ compose exactly: of several with distances mu they
are one with the root of the sum of their squares. Opacus' steps are those of DP-SGD, as in a run's ledger.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedpriv.accounting import guarantee
from fedpriv.accounting.gaussian import gaussian_delta, gaussian_epsilon
from fedpriv.accounting.numerical import composed_epsilon
from fedpriv.accounting.pairs import zero_out_pair
from fedpriv.accounting.release import Release, release_with
from fedpriv.core.numbers import several
from fedpriv.core.reading import read_file
from fedpriv.core.records import LedgerLine, shown_epsilon
from fedpriv.flower.audit.observers import CLIPPING_NORM, LEDGERS
from fedpriv.flower.audit.records import Answer, Claim, EngineSteps, ModAction, Round, StrategyLayer

DELTA = 1e-5
"""Of a statement about software that names none."""

SERVER, READERS = "the server and all who read uploads", "who reads the models that the server sends"
_UPDATE = "replace-one: this client's whole update becomes any other"
_ZERO_OUT = "zero-out: this client's update becomes zero, and its weight stays"
_EXAMPLE = "zero-out: one example becomes one that adds zero"
_OTHER_EXAMPLE = "replace-one: one example becomes any other"
_COMPOSED = (
    "Gaussian mechanism, {} as one of mu = {:.4g} (Dong, Roth and Su 2022, Cor. 3.3), converted exactly "
    "(Balle and Wang 2018, Thm 8); no amplification used"
)
_SUMMED = "collect_masked_vectors"  # the stage of secure aggregation in which a client trains
_SLACK = 1 + 1e-3  # by which figures of accountants differ that prove the same

ByClient = Mapping[int, Sequence[Answer]]


def claims(
    answers: Sequence[Answer], layers: Sequence[StrategyLayer], rounds: Sequence[Round], out: Path
) -> tuple[Claim, ...]:
    """Return what each piece of privacy software says and proves, the clients' first, outermost first."""
    by_client: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        if (answer.trains or answer.engines) and not answer.error:
            by_client[answer.client].append(answer)
    mods = dict.fromkeys(action.mod for answer in answers for action in reversed(answer.actions))
    found: list[Claim] = []
    for mod in mods:
        if mod in _OF_MODS:
            found += _OF_MODS[mod](by_client, out)
    found += _opacus(by_client)
    found += [_wrapper(layer, layers, rounds, by_client) for layer in layers if layer.wraps]
    found += [
        _nothing(layer.name, "noise", len(rounds), "Flower's wrappers DifferentialPrivacy... have replaced it")
        for layer in layers
        if layer.name.startswith("DPFedAvg")
    ]
    return tuple(found)


def composed(distances: Sequence[float], delta: float) -> tuple[float, float]:
    """Return epsilon and mu of normal releases, each of which tells neighbours apart by so many deviations."""
    mu = math.hypot(*distances)
    return (gaussian_epsilon(delta, mu), mu) if math.isfinite(mu) else (math.inf, mu)


def _actions(answers: Sequence[Answer], mod: str) -> list[ModAction]:
    """What a mod did to each update of a client."""
    return [action for answer in answers for action in answer.actions if action.mod == mod and action.norm is not None]


# ---- at the client --------------------------------------------------------------------------------------------------


def _local_dp(by_client: ByClient, _: Path) -> Iterator[Claim]:
    """Flower's LocalDpMod: noise for a sensitivity that its user names, on an update that it clips."""
    per_client = {client: _actions(answers, "LocalDpMod") for client, answers in by_client.items()}
    per_client = {client: actions for client, actions in per_client.items() if actions}
    if not per_client:
        return
    own = max(per_client.values(), key=len)[0].settings
    delta, said = own["delta"], own["epsilon"]
    distances = {client: [_local_distance(each.settings) for each in actions] for client, actions in per_client.items()}
    worst = max(distances, key=lambda client: math.hypot(*distances[client]))
    once, first = composed(distances[worst][:1], delta)
    epsilon, mu = composed(distances[worst], delta)
    acted = [each for actions in per_client.values() for each in actions]
    kept, doubt = dict.fromkeys(name for each in acted for name in each.kept), _doubt(acted)
    count = len(distances[worst])
    notes = []
    if kept:
        notes.append(
            f"{', '.join(kept)} left as training made them, neither clipped nor noised: LocalDpMod leaves arrays "
            f"without dimensions out. Without them epsilon would be {shown_epsilon(epsilon)}"
        )
    if first and own["sensitivity"] < 2 * own[CLIPPING_NORM]:
        notes.append(
            f"sensitivity = {own['sensitivity']:g}, but two updates of norm {own[CLIPPING_NORM]:g} differ by up to "
            f"{2 * own[CLIPPING_NORM]:g}; at epsilon {said:g} delta is {gaussian_delta(said, first):.3g} an answer"
        )
    if said > 1:
        notes.append("its formula for the noise is proven only for epsilon below 1")
    proven = not kept and not doubt and math.isfinite(epsilon)
    yield Claim(
        what="LocalDpMod",
        says=f"epsilon {said:g}, delta {delta:g} of each answer; nothing of several",
        against=SERVER,
        adjacency=_UPDATE,
        once=once if proven else None,
        epsilon=epsilon if proven else None,
        delta=delta,
        releases=count,
        theorem=_COMPOSED.format(several(count, "release"), mu)
        if proven
        else f"none: {doubt or 'what it leaves out is not bounded'}",
        notes=tuple(notes),
        falls_short=not proven or once > said * _SLACK,  # it says nothing of several answers
    )


def _doubt(parts: Iterable[ModAction | EngineSteps | Round]) -> str:
    """The first reason why nothing is proven."""
    return next((each.doubt for each in parts if each.doubt), "")


def _local_distance(own: Mapping[str, float]) -> float:
    """Twice the clipping norm over the standard deviation, as LocalDpMod computes it."""
    if not own["delta"] or not own["sensitivity"]:
        return math.inf if own["delta"] else 0.0
    deviation = own["sensitivity"] * math.sqrt(2 * math.log(1.25 / own["delta"])) / max(own["epsilon"], 1e-300)
    return 2 * own[CLIPPING_NORM] / deviation


def _nothing(what: str, says: str, releases: int, why: str, *notes: str) -> Claim:
    """Nothing is proven of a mod against the server, and why."""
    return Claim(what, says, SERVER, _UPDATE, None, None, DELTA, releases, f"none: {why}", notes)


def _clipping(mod: str, by_client: ByClient, _: Path) -> Iterator[Claim]:
    """Flower's mods that clip, for wrappers that add noise at the server."""
    clipped = max((len(_actions(answers, mod)) for answers in by_client.values()), default=0)
    if clipped:
        bit = "; its norm_bit leaves as it is" if mod == "adaptiveclipping_mod" else ""
        why = f"no noise is added at the client, and the server sees each clipped update{bit}"
        yield _nothing(mod, "clips for a wrapper at the server", clipped, why)


def _privatise(_: ByClient, out: Path) -> Iterator[Claim]:
    """Our own mod: what its ledgers of this run say of the worst client."""
    parts: dict[str, list[LedgerLine]] = defaultdict(list)
    for path in sorted((out / LEDGERS).glob("client-*.json")):
        line = read_file(path, LedgerLine)
        if line is not None:
            parts[path.stem.removeprefix(f"client-{line.client}").removeprefix("-")].append(line)
    for part, lines in sorted(parts.items()):
        line = min(lines, key=lambda each: each.badness)
        yield Claim(
            what=f"privatise, {part}" if part else "privatise",
            says="what its ledger says",
            against=SERVER,
            adjacency=line.adjacency,
            once=None,
            epsilon=line.epsilon,
            delta=line.delta,
            releases=line.participations,
            theorem=line.theorem["epsilon"],
            notes=(*line.notes, "this counts one run; the client's own ledger counts all runs"),
        )


def _secaggplus(by_client: ByClient, _: Path) -> Iterator[Claim]:
    """Secure aggregation hides single updates and adds no noise."""
    if not by_client:
        return
    summed = max(sum(bool(answer.replied) and answer.stage == _SUMMED for answer in own) for own in by_client.values())
    yield _nothing(
        "secaggplus_mod",
        "the server learns only a sum",
        summed,
        "masks cancel in the sum, and add no noise to it",
        f"sums of up to {len(by_client)} clients; metrics and configs leave in clear",
    )


_OF_MODS: Mapping[str, Callable[[ByClient, Path], Iterator[Claim]]] = {
    "LocalDpMod": _local_dp,
    "fixedclipping_mod": partial(_clipping, "fixedclipping_mod"),
    "adaptiveclipping_mod": partial(_clipping, "adaptiveclipping_mod"),
    "privatise": _privatise,
    "secaggplus_mod": _secaggplus,
}


def _opacus(by_client: ByClient) -> Iterator[Claim]:
    """Opacus: all steps of a client's engines together, whatever engine counted them."""
    steps: dict[int, list[EngineSteps]] = {
        client: [each for answer in answers for each in answer.engines] for client, answers in by_client.items()
    }
    steps = {client: own for client, own in steps.items() if own}
    if not steps:
        return
    stated = [each for answers in by_client.values() for answer in answers for each in answer.stated]
    delta = stated[-1].delta if stated else DELTA
    figures = {client: engine_epsilon(own, delta) for client, own in steps.items()}
    worst = max(figures, key=lambda client: math.inf if figures[client] is None else figures[client] or 0.0)
    epsilon, own = figures[worst], steps[worst]
    largest = max((each.epsilon for each in stated), default=None)
    engines = sum(1 for answer in by_client[worst] if answer.engines)
    notes = [f"{sum(each.steps for each in own)} steps of client {worst} in {engines} answers"]
    if largest is not None and epsilon is not None and engines > 1 and epsilon > largest * _SLACK:
        notes.append("each answer creates a new engine, which counts only its own steps")
    if any(not each.poisson for each in own):
        uses = sum(each.uses for each in own)
        notes.append(
            "batches are not drawn by Poisson sampling in secret, which its accountant assumes; an example may be in "
            f"{uses} of them"
        )
    notes.append("only the parameters that its optimiser changed are covered, not metrics and other arrays")
    yield Claim(
        what="Opacus",
        says="nothing: the app asks no engine"
        if largest is None
        else f"epsilon {shown_epsilon(largest)}, delta {delta:g}",
        against=SERVER,
        # Under replace-one a figure holds for zero-out, too.
        adjacency=_EXAMPLE if any(each.poisson for each in own) else _OTHER_EXAMPLE,
        once=engine_epsilon(next(answer.engines for answer in by_client[worst] if answer.engines), delta),
        epsilon=epsilon,
        delta=delta,
        releases=sum(each.steps for each in own),
        theorem=_theorem(own, delta) if epsilon is not None else f"none: {_doubt(own) or 'there is no noise'}",
        notes=tuple(notes),
        falls_short=largest is not None and (epsilon is None or epsilon > largest * _SLACK),
    )


def engine_epsilon(steps: Sequence[EngineSteps], delta: float) -> float | None:
    """Return epsilon of all these steps together; ``None``: nothing is proven."""
    if any(each.noise <= 0 or each.doubt for each in steps):
        return None
    counts: Counter[tuple[float, float, bool]] = Counter()
    for each in steps:
        counts[each.noise, min(each.rate, 1.0) if each.poisson else 1.0, each.poisson] += each.uses
    if len(counts) == 1:
        return guarantee(_release(*next(iter(counts.items())), delta)).epsilon
    each_alone = [guarantee(_release(key, count, delta / len(counts))).epsilon for key, count in counts.items()]
    if any(epsilon is None for epsilon in each_alone):
        return None
    known = sum(epsilon or 0.0 for epsilon in each_alone)
    if not all(poisson and rate < 1 for _, rate, poisson in counts):
        return known
    pairs = tuple((zero_out_pair(noise, rate), count) for (noise, rate, _), count in counts.items())
    both = (pairs, tuple((pair.exchanged, count) for pair, count in pairs))
    figures = [composed_epsilon(parts, delta, known) for parts in both]
    return max(known if figure is None else figure for figure in figures)


def _release(key: tuple[float, float, bool], count: int, delta: float) -> Release:
    noise, rate, poisson = key
    if poisson:
        return release_with(
            noise,
            delta,
            mechanism="gaussian",
            sampling="poisson",
            rate=rate,
            participations=count,
            adjacency="zero-out",
        )
    return release_with(noise, delta, mechanism="gaussian", sampling="full", rate=rate, participations=count)


def _theorem(steps: Sequence[EngineSteps], delta: float) -> str:
    first = steps[0]
    return guarantee(_release((first.noise, min(first.rate, 1.0), first.poisson), 1, delta)).theorem["epsilon"]


# ---- at the server --------------------------------------------------------------------------------------------------


def _wrapper(
    layer: StrategyLayer, layers: Sequence[StrategyLayer], rounds: Sequence[Round], by_client: ByClient
) -> Claim:
    """A wrapper of Flower's: its noise against what the client that weighs most moves the mean by."""
    stated = next((each.stated for each in reversed(rounds) if each.stated is not None), None)
    delta = stated.delta if stated is not None else DELTA
    nodes = {answer.node: client for client, answers in by_client.items() for answer in answers}
    distances: dict[int, list[float]] = defaultdict(list)
    shares: dict[int, float] = {}
    for each in rounds:
        for node, share in _shares(each).items():
            client = nodes.get(node, node)
            distances[client].append(_distance(layer, each, share))
            shares[client] = max(shares.get(client, 0.0), share)
    worst = max(distances, key=lambda client: math.hypot(*distances[client]), default=None)
    unproven = _unproven(layer, layers[-1], rounds)
    outside = layers[: layers.index(layer)]
    own = distances[worst] if worst is not None and not unproven else [math.inf]
    (epsilon, mu), (once, _) = composed(own, delta), composed([max(own)], delta)
    claimed = stated.epsilon if stated is not None else _equal_weights(_multiplier(layer), len(rounds), delta)
    said = f"epsilon {_epsilon(claimed)}"
    if stated is None:
        said = f"noise multiplier {_multiplier(layer):.4g}, for equal weights; as such {said} at delta {delta:g}"
    else:
        said = f"{said}, delta {delta:g} after {several(stated.releases, 'release')} ({stated.relation})"
    proven = math.isfinite(epsilon)
    return Claim(
        what=layer.name,
        says=said,
        against=READERS,
        adjacency=_ZERO_OUT,
        once=once if proven else None,
        epsilon=epsilon if proven else None,
        delta=delta,
        releases=len(own) if proven else len(rounds),
        theorem=_COMPOSED.format(several(len(own), "release"), mu)
        if proven
        else f"none: {unproven or 'there is no noise'}",
        notes=(
            *(_weight_notes(layer, rounds, shares, worst) if layers[-1].averages else ()),
            *_norm_notes(layer, rounds),
            *_replaced(own, delta),
            *_uncovered(layer),
            *(f"{each.name} is around it; what it does to replies is not known here" for each in outside),
        ),
        falls_short=math.isfinite(claimed) and epsilon > claimed * _SLACK,
    )


def _multiplier(layer: StrategyLayer) -> float:
    """The noise multiplier that a user names: an adaptive wrapper keeps that of updates alone, without its counts'."""
    own, deviation = layer.settings["noise_multiplier"], _deviation(layer)
    return (own**-2 + (2 * deviation) ** -2) ** -0.5 if own and deviation else own


def _deviation(layer: StrategyLayer) -> float:
    """Of the noise on how many updates were clipped; 0: none is counted, or without noise."""
    return layer.settings.get("clipped_count_stddev", 0.0) if "Adaptive" in layer.wraps else 0.0


def _distance(layer: StrategyLayer, each: Round, share: float) -> float:
    """How many deviations of the noise a round's mean, and its count, move by if an update becomes zero."""
    noise = layer.settings["noise_multiplier"] * (each.next_clip_norm or 0.0) / layer.settings["num_sampled_clients"]
    counted = 1 / _deviation(layer) if _deviation(layer) else 0.0
    return math.hypot(share * (each.clip_norm or 0.0) / noise, counted) if noise else math.inf


def _shares(each: Round) -> dict[int, float]:
    """How much of the mean each node's update is."""
    whole = sum(each.weights.values())
    return {node: weight / whole for node, weight in each.weights.items()} if whole else {}


def _equal_weights(multiplier: float, rounds: int, delta: float) -> float:
    return composed([1 / multiplier] * rounds, delta)[0] if multiplier and rounds else math.inf


def _unproven(layer: StrategyLayer, inner: StrategyLayer, rounds: Sequence[Round]) -> str:
    """Why no theorem holds of a wrapper; empty: one does."""
    if layer.overrides:
        return f"{layer.name} has {', '.join(layer.overrides)} of its own, for which no theorem is known here"
    if not inner.averages:
        return f"{inner.name} does more than average, and how far one client moves its result is not known here"
    if not rounds:
        return "nothing was aggregated"
    if "Adaptive" in layer.wraps and layer.settings["noise_multiplier"] and not _deviation(layer):
        return "the clipping norm follows a count that has no noise"
    if layer.settings["noise_multiplier"] and (doubt := _doubt(rounds)):
        return doubt
    longest = max(
        (norm / each.clip_norm for each in rounds for norm in each.norms.values() if each.clip_norm), default=0
    )
    if "ClientSide" in layer.wraps and longest > 1.01:
        return f"updates arrive {longest:.3g} times as long as the clipping norm: no mod clips them"
    return ""


def _weight_notes(
    layer: StrategyLayer, rounds: Sequence[Round], shares: Mapping[int, float], worst: int | None
) -> Iterator[str]:
    """How weights and missing replies make the noise on a mean less than its multiplier says."""
    clients = layer.settings["num_sampled_clients"]
    fewest = min((len(each.weights) for each in rounds), default=0)
    if worst is not None and shares[worst] * clients > _SLACK:
        noise = layer.settings["noise_multiplier"] / clients
        yield (
            f"client {worst} is {shares[worst]:.1%} of a round's mean, and moves it by {shares[worst]:.2g} C against "
            f"noise of {noise:.2g} C; C is the clipping norm"
        )
    if any(len(set(each.weights.values())) > 1 for each in rounds):
        yield (
            "clients state their weights, which nothing bounds: a client with nearly all examples moves the mean by C; "
            "an accountant refuses unequal weights, and a metric that is 1 for all as weighted_by_key makes them equal"
        )
    if fewest and fewest != clients:
        yield f"num_sampled_clients = {clients:g}, and a mean is made of {fewest} replies"


def _norm_notes(layer: StrategyLayer, rounds: Sequence[Round]) -> Iterator[str]:
    """How a clipping norm that adapts makes the noise less than its multiplier says."""
    shrunk = [each.next_clip_norm / each.clip_norm for each in rounds if each.clip_norm and each.next_clip_norm]
    if any(factor != 1 for factor in shrunk):
        yield (
            f"updates are clipped to a round's norm, and noise is for the next one's, {min(shrunk):.3g} to "
            f"{max(shrunk):.3g} times as large; the figure has both"
        )
    quantile = layer.settings.get("target_clipped_quantile", 1.0)
    if any(_clipped(each) > quantile and (each.next_clip_norm or 0.0) < (each.clip_norm or 0.0) for each in rounds):
        yield (
            f"the clipping norm shrinks although more than {quantile:.0%} of the updates reach it: it moves "
            "away from its target"
        )


def _replaced(distances: Sequence[float], delta: float) -> Iterator[str]:
    """The figure where a client leaves or is replaced, and not its update alone becomes zero."""
    twice, _ = composed([2 * each for each in distances], delta)
    if math.isfinite(twice):
        yield (
            "where a client leaves, or another takes its place, the mean moves by up to twice that: epsilon is then at "
            f"most {shown_epsilon(twice)}"
        )


def _uncovered(layer: StrategyLayer) -> Iterator[str]:
    yield "aggregated metrics are not covered"
    if "ServerSide" in layer.wraps:
        yield "against the server nothing is proven: it sees each update as it was sent"


def _clipped(each: Round) -> float:
    """The share of a round's updates that reach its clipping norm: those that clients clipped are it, to rounding."""
    reached = (1 - 1e-6) * (each.clip_norm or 0.0)
    return sum(norm >= reached for norm in each.norms.values()) / max(len(each.norms), 1)


def _epsilon(epsilon: float) -> str:
    return shown_epsilon(epsilon) if math.isfinite(epsilon) else "infinite"
