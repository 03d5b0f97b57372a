"""The endpoint of a finished run: made once, then the same for good; everything about it lies in the folder service/.

- service.json: what it is and what is proven, for everybody; it is written last, and fixed from then on.
- model.safetensors: the convex head that answers; under the policy ``model`` with its noise, and never without.
- features.safetensors: the network that gives its features, where they are another run's.
- referee.json: accuracies and what else depends on private data, for whoever has the folder.
- secret.key: what noise is drawn from; users.json: hashes of the users' keys, and their budgets.
- charges.jsonl and answers.jsonl: the query ledger, and what was answered.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from fedpriv.accounting.estimated import with_bounds
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.figure import CurvePoint
from fedpriv.core.files import as_json, locked, remove_parts, write_once, write_whole, writing
from fedpriv.core.finished import completed_summary, final_state, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret
from fedpriv.core.records import Guarantee, Ledger, shown_epsilon
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.service.answer_sources import (
    STORED,
    AnswerSource,
    Voters,
    head_features,
    made_source,
    network_facts,
    service_facts,
    stored_network,
    vote_counts,
)
from fedpriv.service.endpoint import Endpoint, Oracle, Served, StoredAnswers, head_scores, network_scores
from fedpriv.service.ledger import OWNER
from fedpriv.service.policies import AnswerPolicy, Draws, Facts, HeadPolicy, NoisyPolicy, Scores, rivals
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.service.proof import REPRODUCIBLE, with_run
from fedpriv.service.records import (
    AnswersCurve,
    Referee,
    Service,
    UserFacts,
    made_service,
    query_ledger,
    users,
)
from fedpriv.service.settings import ServiceConfig

_KEY_BYTES = 24
_COMPARED = 1000  # test images on which policies are compared
_EXACT = (
    "service.randomness = 'opendp': OpenDP draws the noise from the operating system, and no seed repeats it; its "
    "normal and Laplace noise is discrete, on multiples of 2^-1074, and accounted for as continuous"
)
_UNASKED = (
    "no --set service.KEY=VALUE: answers are exact probabilities, nothing is proven about them, and this choice is "
    "fixed for this folder"
)


def open_service(folder: RunFolder, config: ServiceConfig | None, progress: Progress) -> Served:
    """Return the endpoint of a finished run; it is made first where there is none yet."""
    completed_summary(folder)
    experiment = folder.experiment()
    wanted = config or ServiceConfig.of(experiment) or ServiceConfig()
    place = folder.path / "service"
    world = finished_world(folder, experiment)
    with cpu_threads(experiment.engine.threads):
        final = final_state(folder, world, "serve")
        final.load_into(world.model)
        model = final.digest().hex()
        known = folder.read(Service)
        if known is None:
            if config is None and ServiceConfig.of(experiment) is None:
                progress.warn(_UNASKED)
            with writing(""):
                place.mkdir(exist_ok=True)
                # Its files are of one policy: one process makes them, and the others find them.
                with locked(place, wait=True):
                    known = folder.read(Service)
                    known = known or _make(place, world, wanted, folder.final_ledger(), model, progress)
        if config is not None and known.settings != config.told():
            raise InputError(
                f"{place} answers by {known.method} already, and its query ledger is for that alone: leave out "
                "--set, or serve a copy of the run without this folder"
            )
        if known.model != model:
            raise InputError(f"{place} is of another model than the run's: serve a copy of the run without this folder")
        return _opened(place, world, known, experiment)


def in_process(folder: RunFolder, world: World, config: ServiceConfig) -> Endpoint:
    """Return an endpoint in this process with its own noise, which charges no ledger; for the folder's owner."""
    policy: AnswerPolicy = config.policy
    ledger = folder.final_ledger()
    check_answers(policy, world, ledger)
    final_state(folder, world, "ask").load_into(world.model)
    made = made_source(folder.path / "service", world, policy, folder.read(Service))
    repeatable = world.experiment.noise == "reproducible"
    secret = Secret.of_seed(world.experiment.seed).derived("in-process") if repeatable else Secret.drawn()
    scale = policy.scale(made.facts, config.answers, _delta(world, policy))
    return Endpoint(_oracle(world, policy, made, scale, secret))


def add_user(folder: RunFolder, name: str, answers: int) -> str:
    """Give a user a key and a budget, and return the key; only its hash is kept."""
    made_service(folder.path)
    if not (name.isidentifier() and name != OWNER) or answers < 1:
        raise InputError(f"user {name!r} with {answers} answers: a name of letters, digits and _, and a number from 1")
    known = users(folder.path)
    if any(user.name == name for user in known):
        raise InputError(f"there is a user {name!r} already: keys and budgets are given once")
    key = secrets.token_urlsafe(_KEY_BYTES)
    user = UserFacts(name=name, key=sha256(key.encode()).hexdigest(), answers=answers)
    content = as_json([each.model_dump() for each in (*known, user)])
    with writing(""):
        write_whole(folder.path / "service" / "users.json", content, mode=0o600, durable=True)
    return key


def _make(place: Path, world: World, config: ServiceConfig, ledger: Ledger, model: str, progress: Progress) -> Service:
    policy: AnswerPolicy = config.policy
    check_answers(policy, world, ledger)
    progress.stage(f"making the endpoint: {policy.title}")
    remove_parts(place)  # of one who was killed: nobody else writes here before there is an endpoint
    delta = _delta(world, policy)
    made = made_source(place, world, policy, None)
    scale = policy.scale(made.facts, config.answers, delta)
    guarantee = policy.guarantee(made.facts, config.answers, delta, ledger)
    note = _about_noise(policy, scale, world.experiment)
    if note == REPRODUCIBLE:
        progress.warn(note)
    # Of the run's own network they are in its ledger.
    told = () if policy.source == "network" else tuple(each.removesuffix(".") for each in world.taken_as_public)
    guarantee = replace(guarantee, notes=(*guarantee.notes, *((note,) if note else ()), *told))
    whole = with_earlier(guarantee, policy, world, made.facts)
    learnt = None if made.head is None else made.head.learnt
    secret = _secret(place, world.experiment, config, "" if learnt is None else learnt.facts.digest)
    if made.voters is not None and scale > made.facts.models / 4:
        progress.warn(
            f"noise of {scale:.3g} votes on {made.facts.models} voters leaves little of their answers: use more of "
            "them, fewer answers, or a larger epsilon"
        )
    _write_source(place, policy, made, scale, secret)
    trial = _oracle(world, policy, made, scale, Secret.drawn())
    referee = _referee(world, trial, made, config.answers, guarantee)
    if whole.epsilon != guarantee.epsilon:
        referee = referee.model_copy(update={"epsilon": guarantee.epsilon})
    write_whole(place / "referee.json", as_json(referee.model_dump(mode="json")), mode=0o600)
    exact = f", {referee.accuracy.value:.1%} without the noise" if scale else ""
    progress.stage(f"right on {referee.answered.value:.1%} of {referee.tested} test images as answered{exact}")
    service = Service(
        method=config.method,
        title=policy.title,
        settings=config.told(),
        answers=config.answers,
        scale=scale,
        delta=delta,
        model=model,
        source=policy.source,
        classes=made.facts.classes,
        shape=world.dataset.shape,
        head=None if made.head is None else made.head.about,
        models=made.facts.models,
        guarantee=whole,
        learnt=None if learnt is None else learnt.facts,
    )
    write_once(place / "service.json", as_json(service.model_dump(mode="json")))
    return service


def _about_noise(policy: AnswerPolicy, scale: float, experiment: Experiment) -> str:
    """The note on noise that is not drawn anew for each answer, or can be computed again; empty: there is none."""
    if not policy.repeats_noise:
        return _EXACT
    return REPRODUCIBLE if scale and experiment.noise == "reproducible" else ""


def _write_source(place: Path, policy: AnswerPolicy, made: AnswerSource, scale: float, secret: Secret) -> None:
    """Write what answers come from: voters, whose votes are secret, or a head with its noise, and the network below."""
    if made.voters is not None:
        write_whole(place / "voters.safetensors", save(dict(made.voters.stack)), mode=0o600, durable=True)
    if made.head is None:
        return
    if made.head.learnt is not None:
        write_whole(place / STORED, made.head.learnt.content, durable=True)
    weights = _released(policy, made, scale, secret)
    write_whole(place / "model.safetensors", save({"weights": weights}), durable=True)


def _opened(place: Path, world: World, service: Service, experiment: Experiment) -> Served:
    config = ServiceConfig.model_validate(service.settings)
    ledger = query_ledger(place.parent, service)
    stored = StoredAnswers(place / "answers.jsonl", ledger) if config.repeats == "stored" else None
    policy: AnswerPolicy = config.policy
    facts = network_facts(world, policy) if service.source == "network" else service_facts(service)
    if policy.draws:
        policy.draws_of(service.scale, (), facts)  # says now whether there is something that draws
    oracle = Oracle(
        policy,
        facts,
        service.shape,
        _scores(place, world, policy, service, facts),
        service.scale,
        _secret(place, experiment, config, "" if service.learnt is None else service.learnt.digest),
    )
    return Served(oracle, ledger, stored)


def _checked_weights(weights: Scores, facts: Facts) -> Scores:
    expected = facts.classes, facts.features
    if weights.shape != expected or not np.isfinite(weights).all():
        raise ValueError(f"expected finite weights of {expected[0]} x {expected[1]}")
    return weights


def _scores(
    place: Path, world: World, policy: AnswerPolicy, service: Service, facts: Facts
) -> Callable[[Tensor], Scores]:
    if policy.source == "network":
        return network_scores(world.model.eval(), world.dataset)
    path = place / ("voters.safetensors" if policy.source == "votes" else "model.safetensors")
    try:
        if isinstance(policy, NoisyVotes):
            return vote_counts(world, policy, Voters(load(path.read_bytes())))
        if not isinstance(policy, HeadPolicy):
            raise TypeError(f"{policy.name} answers from {policy.source}")
        weights = _checked_weights(load(path.read_bytes())["weights"], facts)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    return head_scores(weights, head_features(world, policy, stored_network(place, world, policy, service)))


def _oracle(world: World, policy: AnswerPolicy, made: AnswerSource, scale: float, secret: Secret) -> Oracle:
    if made.voters is not None and isinstance(policy, NoisyVotes):
        scores = vote_counts(world, policy, made.voters)
    elif made.head is None or not isinstance(policy, HeadPolicy):
        scores = network_scores(world.model.eval(), world.dataset)
    else:
        scores = head_scores(_released(policy, made, scale, secret), made.head.features)
    return Oracle(policy, made.facts, world.dataset.shape, scores, scale, secret)


def _released(policy: AnswerPolicy, made: AnswerSource, scale: float, secret: Secret) -> Scores:
    if made.head is None or not isinstance(policy, HeadPolicy):
        raise TypeError(f"{policy.name} does not answer from the convex head")
    return policy.released(
        made.head.minimum.weights, policy.draws_of(scale, [secret.stream("model").numpy()], made.facts)
    )


def _referee(world: World, oracle: Oracle, made: AnswerSource, planned: int, guarantee: Guarantee) -> Referee:
    """Accuracies on the test images that the model has not learnt, by noise that no endpoint gives."""
    rows = world.measured_rows
    images, truth = world.dataset.x_test[rows], world.dataset.y_test[rows].numpy()
    policy = oracle.policy
    if made.head is not None:
        exact = head_scores(made.head.minimum.weights, made.head.features)(images)
    else:
        exact = oracle.scores(images)
    answered = oracle.answers(images, range(len(images)))

    def noisy(rival: NoisyPolicy, scale: float) -> Scores:
        return _oracle(world, rival, made, scale, Secret.drawn()).scores(images[:_COMPARED])

    trial = KnownImages(made.facts, guarantee.delta, exact[:_COMPARED], truth[:_COMPARED], noisy)
    return Referee(
        accuracy=rate_interval(int((exact.argmax(axis=1) == truth).sum()), len(truth)),
        answered=rate_interval(int((answered.labels == truth).sum()), len(truth)),
        tested=len(truth),
        gradient_norm=None if made.head is None else made.head.minimum.gradient_norm,
        curves=answer_curves(policy, planned, guarantee.epsilon, trial),
    )


def _delta(world: World, policy: AnswerPolicy) -> float:
    own = policy.delta if isinstance(policy, NoisyPolicy) else None
    return world.experiment.mechanism.delta if own is None else own


def _secret(place: Path, experiment: Experiment, config: ServiceConfig, learnt: str) -> Secret:
    """What noise is drawn from: the seed, or the folder's own key, apart for each policy, budget and features."""
    settings = sha256(as_json(config.told()) + learnt.encode()).digest()
    if experiment.noise == "reproducible":
        return Secret.of_seed(experiment.seed).derived("service", settings)
    path = place / "secret.key"
    write_once(path, f"{Secret.drawn().key.hex()}\n".encode(), mode=0o600)
    return Secret.read(path, "noise of this endpoint cannot be drawn").derived("service", settings)


def open_endpoint(folder: RunFolder, world: World, answers: str) -> Endpoint:
    """Return an endpoint in this process that charges no query ledger."""
    own = ServiceConfig.of(world.experiment)
    if own is not None and own.method == answers:
        return in_process(folder, world, own)
    return in_process(folder, world, validated(ServiceConfig, {"method": answers}, "answers"))


_BUDGETS = 1, 10, 100, 1000
_LEAST, _MOST = 1e-9, 1e9  # of an epsilon that noise can be calibrated to


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Images whose classes are known, and what answers to them are computed from."""

    facts: Facts  # public sizes
    delta: float  # of the statement
    scores: Scores  # (n, classes), without noise
    truth: NDArray[np.int64]  # (n,) classes
    # a policy and the scale of its noise -> scores (n, classes) of one release with that noise
    noisy: Callable[[NoisyPolicy, float], Scores]


def answer_curves(
    policy: AnswerPolicy, planned: int, epsilon: float | None, trial: KnownImages
) -> tuple[AnswersCurve, ...]:
    """Return the share of right answers by how many questions epsilon has to last for, under each rival policy."""
    if epsilon is None or not _LEAST <= epsilon <= _MOST or not isinstance(policy, NoisyPolicy):
        return ()
    budgets = sorted({*_BUDGETS, planned})
    generator = Secret.drawn().stream("curve").numpy()
    return tuple(
        AnswersCurve(
            policy=rival.name,
            points=tuple(CurvePoint(count, _right(rival, count, trial, generator)) for count in budgets),
        )
        for rival in rivals(policy, epsilon, trial.delta)
    )


def _right(policy: NoisyPolicy, count: int, trial: KnownImages, generator: np.random.Generator) -> float:
    scale = policy.scale(trial.facts, count, trial.delta)
    scores = trial.noisy(policy, scale) if policy.once else trial.scores
    answers = policy.answer(scores, Draws(scale, [generator] * len(scores), trial.facts))
    return float((answers.labels == trial.truth).mean())


# What is proven about an endpoint's answers together with what was released of the same data before them.


def check_answers(policy: AnswerPolicy, world: World, ledger: Ledger) -> None:
    """Refuse a run whose answers could not be what the policy says they are."""
    policy.check(ledger)
    if world.experiment.data.bounds_epsilon and isinstance(policy, NoisyVotes) and not policy.shards:
        raise InputError(
            "data.table.bounds_epsilon does not go with service.shards = 0, votes that protect whole clients: it is "
            "about single rows; set service.shards, or tell bounds that are public"
        )


def with_earlier(guarantee: Guarantee, policy: AnswerPolicy, world: World, facts: Facts) -> Guarantee:
    """Return what is proven of answers together with the features' network and an estimate of a table's bounds."""
    if facts.learnt is not None:
        guarantee = with_run(guarantee, facts.learnt)
    bounds = world.experiment.data.bounds_epsilon
    if not bounds or policy.source == "network" or guarantee.epsilon is None:
        return guarantee
    note = (
        f"epsilon {shown_epsilon(bounds)} of it is of the estimate of the table's bounds (data.table.bounds_epsilon); "
        "service.target_epsilon is of the answers alone"
    )
    return with_bounds(replace(guarantee, notes=(*guarantee.notes, note)), bounds)


def claim_of(endpoint: Endpoint, world: World, ledger: Ledger) -> Guarantee | None:
    """Return what is proven about an endpoint's answers as such; ``None``: nothing."""
    policy, service = endpoint.policy, ServiceConfig.of(world.experiment)
    answers = 1 if service is None else service.answers
    claim = policy.guarantee(endpoint.facts, answers, _delta(world, policy), ledger)
    return None if claim.epsilon is None else with_earlier(claim, policy, world, endpoint.facts)
