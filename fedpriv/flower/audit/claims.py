"""What privacy software in a Flower app says, beside what is proven of it over the whole run."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedpriv.accounting.people import NORMAL
from fedpriv.core.numbers import several
from fedpriv.core.reading import read_file
from fedpriv.core.records import Guarantee, LedgerLine, shown_epsilon
from fedpriv.flower.audit.observers import LEDGERS
from fedpriv.flower.audit.records import Answer, Claim, Round, StrategyLayer
from fedpriv.flower.noise import DELTA, NO_NOISE, Noise, Stated, observed_noise, proven

SERVER, READERS = "the server and all who read uploads", "who reads the models that the server sends"
_UPDATE = "replace-one-update: this client's whole update is replaced by any other"
_WEIGHED = "zero-out: this client's update becomes zero, and its weight stays"
_TWICE = (
    "where a client leaves, or another takes its place, the mean moves by up to twice that: epsilon is then at most {}"
)
_ASKS_NONE = "nothing: the app asks no engine"
_SEES_ALL = "against the server nothing is proven: it sees each update as it was sent"
_ROUNDED = "SecAgg+ rounds each upload to a grid, which moves the mean further than the clipping norm"
_SUMMED = "collect_masked_vectors"  # the stage of secure aggregation in which a client trains
_SLACK = 1 + 1e-3  # by which figures of accountants differ that prove the same

ByClient = Mapping[int, Sequence[Answer]]


def claims(
    answers: Sequence[Answer], layers: Sequence[StrategyLayer], rounds: Sequence[Round], out: Path
) -> tuple[Claim, ...]:
    """Return what each piece of privacy software says and proves, the clients' first, outermost first."""
    by_client: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        if (answer.trains or answer.noises) and not answer.error:
            by_client[answer.client].append(answer)
    acted = [action.mod for answer in answers for action in reversed(answer.actions)]
    mods = dict.fromkeys((*acted, "LocalDpMod"))  # which an app's own mod may call
    found: list[Claim] = []
    for mod in mods:
        if mod in _OF_MODS:
            found += _OF_MODS[mod](by_client, out)
    found += _of_noise("Opacus", by_client, out)
    found += [_wrapper(layer, layers, rounds, by_client) for layer in layers if layer.wraps]
    found += [
        _nothing(layer.name, "noise", len(rounds), "Flower's wrappers DifferentialPrivacy... have replaced it")
        for layer in layers
        if layer.name.startswith("DPFedAvg")
    ]
    return tuple(found)


# ---- at the client --------------------------------------------------------------------------------------------------


def _of_noise(by: str, by_client: ByClient, _: Path) -> Iterator[Claim]:
    """LocalDpMod, whose user names a sensitivity, or all engines of Opacus together, whatever engine counted a step."""
    per_client: dict[int, list[list[Noise]]] = defaultdict(list)  # of each answer
    stated: list[Stated] = []
    for client, answers in by_client.items():
        for answer in answers:
            if own := [noise for noise in answer.noises if noise.by == by]:
                per_client[client].append(own)
            stated += answer.stated if by == "Opacus" else [noise.stated for noise in own if noise.stated]
    if not per_client:
        return
    delta = min((each.delta for each in stated), default=DELTA)
    at = delta if 0 < delta < 1 else None
    figures = {
        client: proven([noise for own in answers for noise in own], at) for client, answers in per_client.items()
    }
    worst = max(figures, key=lambda client: _size(figures[client]))
    found, answered = figures[worst], per_client[worst]
    once = max((proven(own, found.delta) for own in dict.fromkeys(map(tuple, answered))), key=_size)
    said = max(map(_epsilon, stated), default=None)
    of_each, judged = ("", found) if by == "Opacus" else (" of each answer; nothing of several", once)
    says = _ASKS_NONE if said is None else f"epsilon {_shown(said)}, delta {delta:g}"
    yield Claim(
        what=by,
        says=f"{says}{of_each}",
        against=SERVER,
        adjacency=found.adjacency,
        once=once.epsilon if found.epsilon is not None else None,
        epsilon=found.epsilon,
        delta=found.delta,
        releases=found.participations,
        theorem=found.theorem["epsilon"],
        notes=(
            *dict.fromkeys(note for own in answered for noise in own for note in noise.notes),
            *(_engine_notes(worst, answered, found, said) if by == "Opacus" else ()),
        ),
        falls_short=said is not None
        and math.isfinite(said)
        and (found.epsilon is None or _size(judged) > said * _SLACK),
    )


def _size(found: Guarantee) -> float:
    return math.inf if found.epsilon is None else found.epsilon


def _epsilon(stated: Stated) -> float:
    return math.inf if stated.epsilon is None else stated.epsilon


def _engine_notes(
    client: int, answers: Sequence[Sequence[Noise]], found: Guarantee, said: float | None
) -> Iterator[str]:
    """What the figure of engines covers, and how batches are drawn."""
    own = [each for noises in answers for each in noises]
    yield f"{sum(each.steps for each in own)} steps of client {client} in {len(answers)} answers"
    if said is not None and found.epsilon is not None and len(answers) > 1 and found.epsilon > said * _SLACK:
        yield "each answer creates a new engine, which counts only its own steps"
    if any(each.release.sampling != "poisson" for each in own):
        yield (
            "batches are not drawn by Poisson sampling in secret, which its accountant assumes; an example may be in "
            f"{found.participations} of them"
        )
    yield "only the parameters that its optimiser changed are covered, not metrics and other arrays"


def _nothing(what: str, says: str, releases: int, why: str, *notes: str) -> Claim:
    """Nothing is proven of a mod against the server, and why."""
    return Claim(what, says, SERVER, _UPDATE, None, None, DELTA, releases, f"none: {why}", notes)


def _clipping(mod: str, by_client: ByClient, _: Path) -> Iterator[Claim]:
    """Flower's mods that clip, for wrappers that add noise at the server."""
    acted = [
        client
        for client, answers in by_client.items()
        for answer in answers
        for action in answer.actions
        if action.mod == mod and action.norm is not None
    ]
    clipped = max(Counter(acted).values(), default=0)
    if clipped:
        bit = "; its norm_bit leaves as it is" if mod == "adaptiveclipping_mod" else ""
        sees = "the sum has clipped updates" if _is_masked(by_client) else "the server sees each clipped update"
        why = f"no noise is added at the client, and {sees}{bit}"
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
    inside = {
        client: sum(bool(answer.replied) and answer.stage == _SUMMED for answer in answers)
        for client, answers in by_client.items()
    }
    yield _nothing(
        "secaggplus_mod",
        "the server learns only a sum",
        max(inside.values()),
        "masks cancel in the sum, and add no noise to it",
        f"{several(sum(inside.values()), 'upload')} of {several(len(inside), 'client')} are in sums; metrics and "
        "configs leave in clear",
    )


def _is_masked(by_client: ByClient) -> bool:
    """Whether uploads were masked."""
    return any(answer.stage == _SUMMED for answers in by_client.values() for answer in answers)


_OF_MODS: Mapping[str, Callable[[ByClient, Path], Iterator[Claim]]] = {
    "LocalDpMod": partial(_of_noise, "LocalDpMod"),
    "fixedclipping_mod": partial(_clipping, "fixedclipping_mod"),
    "adaptiveclipping_mod": partial(_clipping, "adaptiveclipping_mod"),
    "privatise": _privatise,
    "secaggplus_mod": _secaggplus,
}


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
    unproven = _unproven(layer, layers[-1], rounds) or ("" if distances else "nothing was aggregated")
    unproven = unproven or (_ROUNDED if _is_masked(by_client) else "")
    own, outside = distances[worst] if worst is not None else [1.0], layers[: layers.index(layer)]
    found, twice = (_of_means(layer, own, delta, unproven, kind) for kind in ("zero-out", "replace-one"))
    claimed, says = _claimed(layer, stated, rounds, delta)
    proves, count = found.epsilon is not None, several(len(own), "release")
    return Claim(
        what=layer.name,
        says=says,
        against=READERS,
        adjacency=_WEIGHED,
        once=_of_means(layer, [max(own)], delta).epsilon if proves else None,
        epsilon=found.epsilon,
        delta=delta,
        releases=len(own) if proves else len(rounds),
        theorem=NORMAL.format(count, math.hypot(*own)) if proves else f"none: {unproven or NO_NOISE}",
        notes=(
            *(_weight_notes(layer, rounds, shares, worst) if layers[-1].averages else ()),
            *_norm_notes(layer, rounds),
            *([_TWICE.format(shown_epsilon(_size(twice)))] if proves else ()),
            "aggregated metrics are not covered",
            *([_SEES_ALL] if "ServerSide" in layer.wraps else ()),
            *(f"{each.name} is around it; what it does to replies is not known here" for each in outside),
        ),
        falls_short=math.isfinite(claimed) and _size(found) > claimed * _SLACK,
    )


def _claimed(layer: StrategyLayer, stated: Stated | None, rounds: Sequence[Round], delta: float) -> tuple[float, str]:
    """The epsilon that a wrapper's accountant states, or that its multiplier is for equal weights; and in words."""
    if stated is not None:
        after = f"after {several(stated.releases, 'release')} ({stated.relation})"
        return _epsilon(stated), f"epsilon {_shown(_epsilon(stated))}, delta {delta:g} {after}"
    multiplier = _multiplier(layer)
    equal = [1 / multiplier if multiplier else math.inf] * len(rounds)
    claimed = _size(_of_means(layer, equal, delta)) if rounds else math.inf
    as_such = f"for equal weights; as such epsilon {_shown(claimed)} at delta {delta:g}"
    return claimed, f"noise multiplier {multiplier:.4g}, {as_such}"


def _shown(epsilon: float) -> str:
    return shown_epsilon(epsilon) if math.isfinite(epsilon) else "infinite"


def _of_means(
    layer: StrategyLayer, distances: Sequence[float], delta: float, doubt: str = "", adjacency: str = "zero-out"
) -> Guarantee:
    """What is proven of means whose noise has a client's update move them by so many deviations."""
    kind = {"mechanism": "central", "unit": "update", "adjacency": adjacency}
    sigmas = [1 / each if each else math.inf for each in distances]
    return proven([observed_noise(layer.name, sigma, delta, 1.0, doubt, **kind) for sigma in sigmas])


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
    doubt = next((each.doubt for each in rounds if each.doubt), "")
    if layer.settings["noise_multiplier"] and doubt:
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


def _clipped(each: Round) -> float:
    """The share of a round's updates that reach its clipping norm: those that clients clipped are it, to rounding."""
    reached = (1 - 1e-6) * (each.clip_norm or 0.0)
    return sum(norm >= reached for norm in each.norms.values()) / max(len(each.norms), 1)
