"""An audit of an endpoint's answers: how far one example moves the model, and what answers show beside what is claimed.

Some training examples are replaced, one at a time, by test images, and the model is trained anew each time, with the
same random choices. A network that gives features stays as it is: what is proven of it is its own run's. What moved
most is then played against the original: neighbours that both answer one question with fresh noise, a game whose
outcome is a lower bound of epsilon. Nothing is charged: the noise is the auditor's own, and seeded noise also where
OpenDP draws the endpoint's. Where an endpoint claims nothing there is nothing to audit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.attacks.epsilon import gaussian_epsilon, trials_epsilon
from fedpriv.attacks.references import Reference, build_pool, train_references, usual_schedule
from fedpriv.attacks.scene import exact_logits
from fedpriv.core.errors import InputError
from fedpriv.core.figure import EpsilonBound
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World
from fedpriv.service.answer_sources import (
    Features,
    head_features,
    network_facts,
    service_facts,
    stored_network,
    trained_head,
)
from fedpriv.service.endpoint import network_scores
from fedpriv.service.policies import AnswerPolicy, Draws, Facts, HeadPolicy, Scores
from fedpriv.service.proof import answer_guarantee
from fedpriv.service.records import AnswersAudit, Service, made_service
from fedpriv.service.settings import ServiceConfig

_CONFIDENCE = 0.999
_TRIALS = 2000  # answers of each neighbour
_RECOVERED = 500  # questions that are asked twice
_EXACT = 1e-6  # of logits that rounding alone keeps apart


@dataclass(frozen=True, eq=False)
class _Neighbours:
    """A model, and what each became that was trained with one example replaced."""

    facts: Facts  # public sizes
    # logits of M questions (M, classes): of the original, then of the others. The questions are the test images, and
    # the training images that were replaced: they are where two models differ the most.
    scores: tuple[Scores, ...]
    moved: tuple[float, ...]  # for each of the others its distance from the original over the bound
    logit: float  # the bound of one logit
    weights: tuple[Scores, ...] = ()  # of the convex heads, in the same order; empty for networks
    features: Scores | None = None  # of the questions (M, d); `None` for networks

    @property
    def shifts(self) -> list[float]:
        """The largest change of a logit over the bound, for each of the others."""
        return [float(np.abs(other - self.scores[0]).max()) / self.logit for other in self.scores[1:]]

    def worst(self) -> tuple[int, int]:
        """The model, and the question, of which two logits moved apart the most."""
        apart = [np.ptp(other - self.scores[0], axis=1) for other in self.scores[1:]]
        which = int(np.argmax([each.max() for each in apart]))
        return which + 1, int(apart[which].argmax())


def audit_answers(folder: RunFolder, replaced: int, progress: Progress) -> AnswersAudit:
    """Audit the endpoint of a run, and write service/audit.json."""
    completed_summary(folder)
    service = made_service(folder.path)
    policy: AnswerPolicy = ServiceConfig.model_validate(service.settings).policy
    if policy.source == "votes":
        raise InputError(f"{service.method}: one example moves one vote, by construction; there is nothing to measure")
    if service.guarantee.nominal_epsilon is None and not isinstance(policy, HeadPolicy):
        raise InputError(f"{service.method} claims nothing of its own that answers could refute; try fedpriv audit")
    experiment = folder.experiment()
    world = finished_world(folder, experiment)
    progress.stage(f"training again, with {replaced} examples replaced")
    with cpu_threads(experiment.engine.threads):
        if isinstance(policy, HeadPolicy):
            learnt = stored_network(folder.path / "service", world, policy, service)
            neighbours = _heads(world, policy, service, head_features(world, policy, learnt), replaced)
        else:
            neighbours = _networks(world, policy, replaced, progress)
        progress.stage("distinguishing the two most different neighbours")
        audit = _judged(policy, service, neighbours)
    with writing(""):
        folder.write(audit)
    return audit


def _replacements(world: World, examples: int, count: int) -> list[tuple[int, int]]:
    """Places among so many training examples, and the test images that stand there instead."""
    stream = numpy_stream(world.experiment.seed, "answers-audit")
    count = min(count, examples, len(world.dataset.x_test))
    chosen = stream.choice(examples, size=count, replace=False)
    images = stream.choice(len(world.dataset.x_test), size=count, replace=False)
    return list(zip(chosen.tolist(), images.tolist(), strict=True))


def _heads(world: World, policy: HeadPolicy, service: Service, shown: Features, replaced: int) -> _Neighbours:
    head = service.head
    if head is None:
        raise InputError("service.json is damaged: it has no certificate")
    dataset, rows = world.dataset, np.sort(np.concatenate(world.partitions))
    features, tested = shown(dataset.x_train[torch.from_numpy(rows)]), shown(dataset.x_test)
    labels = dataset.y_train.numpy()[rows]
    every = [trained_head(policy, features, labels, dataset.classes).weights]
    replacements = _replacements(world, len(rows), replaced)
    questions = np.concatenate([tested, features[[at for at, _ in replacements]]])
    for at, image in replacements:
        changed, named = features.copy(), labels.copy()
        # With a wrong label it pulls the most.
        changed[at], named[at] = tested[image], (int(dataset.y_test[image]) + 1) % dataset.classes
        every.append(trained_head(policy, changed, named, dataset.classes).weights)
    return _Neighbours(
        service_facts(service),
        tuple(questions @ weights.T for weights in every),
        tuple(float(np.linalg.norm(weights - every[0])) / head.sensitivity for weights in every[1:]),
        head.sensitivity * head.norm,
        tuple(every),
        questions,
    )


def _networks(world: World, policy: AnswerPolicy, replaced: int, progress: Progress) -> _Neighbours:
    """Networks trained like the run's, on its data with one example replaced, all from the same seed."""
    facts = network_facts(world, policy)
    if facts.claimed is None:
        raise InputError(f"{policy.name} claims nothing of this network")
    train = len(world.dataset.x_train)
    references = [Reference(world.experiment.seed, world.partitions)]
    rows = np.concatenate(world.partitions)
    replacements = _replacements(world, len(rows), replaced)
    gone = torch.from_numpy(rows[[at for at, _ in replacements]])
    questions = torch.cat([world.dataset.x_test, world.dataset.x_train[gone]])
    for at, image in replacements:
        references.append(Reference(world.experiment.seed, _with(world.partitions, at, train + image)))
    schedule = usual_schedule(world.experiment)
    last = max(schedule)
    stacked = train_references(world, build_pool(world), references, schedule, [last], progress=progress)[last]
    scores, numbers = [], []
    for index in range(len(references)):
        vector = {name: value[index].cpu() for name, value in stacked.items()}
        State(vector, {}).load_into(world.model)
        scores.append(network_scores(world.model.eval(), world.dataset)(questions))
        numbers.append(torch.cat([value.flatten() for value in vector.values()]).double())
    moved = tuple(float((other - numbers[0]).norm()) / facts.claimed.model for other in numbers[1:])
    return _Neighbours(facts, tuple(scores), moved, facts.claimed.logit)


def _with(partitions: Sequence[NDArray[np.int64]], at: int, row: int) -> tuple[NDArray[np.int64], ...]:
    """The clients' rows with another one in one place of all of them in a row."""
    ends = np.cumsum([len(rows) for rows in partitions])
    client = int(np.searchsorted(ends, at, side="right"))
    shares = [rows.copy() for rows in partitions]
    shares[client][at - (int(ends[client]) - len(shares[client]))] = row
    return tuple(shares)


def _judged(policy: AnswerPolicy, service: Service, neighbours: _Neighbours) -> AnswersAudit:
    audit = AnswersAudit(
        method=service.method,
        moved=max(neighbours.moved),
        shifted=max(neighbours.shifts),
        replaced=len(neighbours.moved),
        above=float(np.mean(np.array(neighbours.shifts) > 1)),
        claimed=service.guarantee.nominal_epsilon,
        proven=isinstance(policy, HeadPolicy),
        bound=None,
    )
    if not isinstance(policy, HeadPolicy):
        bound = _exact_game(policy, service, neighbours)
        return audit.model_copy(update={"bound": bound, "recovered": _recovered(policy, service, neighbours)})
    # What stands in the settings may be the epsilon of all answers together; here it is about one.
    noisy = type(policy).model_validate({**policy.model_dump(), "noise": service.scale, "target_epsilon": None})
    delta = service.delta if noisy.law == "gaussian" else 0.0
    level = noisy.unit(neighbours.facts) / service.scale
    claimed = answer_guarantee(noisy.release(neighbours.facts, 1, delta, level)).epsilon
    return audit.model_copy(update={"claimed": claimed, "bound": _head_game(noisy, service, delta, neighbours)})


def _head_game(policy: HeadPolicy, service: Service, delta: float, neighbours: _Neighbours) -> EpsilonBound:
    """Two heads answer the question in which they differ the most; its two logits that moved apart are compared."""
    which, question = neighbours.worst()
    shift = neighbours.scores[which][question] - neighbours.scores[0][question]
    high, low = int(shift.argmax()), int(shift.argmin())
    scores = []
    for model in (0, which):
        generators = _streams(_TRIALS)
        rows = np.repeat(neighbours.scores[model][question][None], _TRIALS, axis=0)
        if policy.once and neighbours.features is not None:
            asked = neighbours.features[question]
            released = (policy.released(neighbours.weights[model], Draws(service.scale, [each])) for each in generators)
            rows = np.stack([weights @ asked for weights in released])
        answers = policy.answer(rows, Draws(service.scale, generators, neighbours.facts))
        named = (answers.labels == high).astype(float) - (answers.labels == low)
        shown = answers.probabilities
        whole = shown is not None and bool(np.isfinite(shown).all())
        scores.append(np.log(shown[:, high]) - np.log(shown[:, low]) if whole and shown is not None else named)
    bound = gaussian_epsilon if policy.law == "gaussian" else trials_epsilon
    return bound(np.concatenate(scores), np.repeat([False, True], _TRIALS), delta, _CONFIDENCE)


def _exact_game(policy: AnswerPolicy, service: Service, neighbours: _Neighbours) -> EpsilonBound:
    """Scores that leave without noise agree exactly with those of one of the two networks."""
    which, question = neighbours.worst()
    one, other = neighbours.scores[0][question], neighbours.scores[which][question]
    scores = []
    for logits in (one, other):
        shown = _shown(policy, service, np.repeat(logits[None], _TRIALS, axis=0), neighbours.facts)
        scores.append(_agreeing(shown, other) - _agreeing(shown, one))
    return trials_epsilon(np.concatenate(scores), np.repeat([False, True], _TRIALS), 0.0, _CONFIDENCE)


def _shown(policy: AnswerPolicy, service: Service, scores: Scores, facts: Facts) -> Scores:
    """The logarithms of what is answered."""
    shown = policy.answer(scores, Draws(service.scale, _streams(len(scores)), facts)).log_probabilities
    if shown is None:
        raise InputError(f"{service.method} names labels only")
    return shown


def _agreeing(shown: Scores, logits: Scores) -> Scores:
    """How many logarithms of each answer (n, classes) agree with these logits (classes,), up to one shift."""
    with np.errstate(invalid="ignore"):
        off = shown - logits
        off = off - np.median(off, axis=1, keepdims=True)
        agreeing: Scores = (np.abs(off) < _EXACT).sum(axis=1).astype(np.float64)
    return agreeing


def _recovered(policy: AnswerPolicy, service: Service, neighbours: _Neighbours) -> float:
    """The share of questions whose exact scores two answers give away."""
    logits = neighbours.scores[0][:_RECOVERED]
    answers = [_shown(policy, service, logits, neighbours.facts) for _ in range(2)]
    errors = np.stack([exact_logits(one, two) for one, two in zip(*answers, strict=True)]) - logits
    with np.errstate(invalid="ignore"):
        errors = np.abs(errors - np.median(errors, axis=1, keepdims=True)).max(axis=1)
    return float(np.mean(errors < _EXACT))


def _streams(count: int) -> list[np.random.Generator]:
    """Noise of the auditor's own, which no answer of the endpoint ever has."""
    secret = Secret.drawn()
    return [secret.stream("answers-audit", number).numpy() for number in range(count)]
