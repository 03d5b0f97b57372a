"""Membership inference through queries: the game of :mod:`fedpriv.attacks.membership.audit`, on answers.

The adversary knows all examples but the candidates, repeats the run's training on data of its own, and passes what its
reference models say through the endpoint's policy, which it knows. Noise of a policy is left out there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.ceiling import membership_advantage, membership_auc
from fedpriv.attacks.membership.attacks import ATTACKS, MOST_OTHERS, Signals, judged, predictions
from fedpriv.attacks.membership.audit import draw_references
from fedpriv.attacks.membership.probes.synthetic import MembershipBySynthesis
from fedpriv.attacks.probing import ProbeOutcome
from fedpriv.attacks.questions import AnswerRule, Answers, Questions
from fedpriv.attacks.references import (
    MembershipGame,
    Pool,
    Reference,
    draw_game,
    mapped_network,
    pairs_within,
    train_references,
)
from fedpriv.attacks.scene import ProbeReferee, ProbeScene, Public, Rehearsal, probabilities, rounding_unit
from fedpriv.attacks.scores import auc_interval, bootstrap_intervals, curve
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Guarantee
from fedpriv.data.datasets import unit_scale
from fedpriv.gradients import Vector
from fedpriv.models.machinery.convex import softmax

Array = NDArray[np.float64]
_SMALLEST = 1e-30
_OF_ROUNDS = "lira-rounds"


@dataclass(frozen=True, eq=False)
class Told:
    """What answers say about rows of the pool."""

    logits: Array  # (n,), of the right label's probability
    others: Array  # (n, K), logarithms of the wrong labels' probabilities, the largest first


def ask_rows(endpoint: Questions, game: MembershipGame, rows: NDArray[np.int64]) -> Told:
    """Ask about rows of the pool, one question each."""
    chosen = torch.from_numpy(rows)
    return answer_signals(endpoint.ask(game.images[chosen]), game.pool.labels.cpu()[chosen].numpy(), endpoint.classes)


def answer_signals(answers: Answers, labels: NDArray[np.int64], classes: int) -> Told:
    """Return the signals of answers; a probability of 0 counts as half a unit of rounding, or as next to nothing."""
    shares = probabilities(answers, classes)
    unit = 0.0 if answers.probabilities is None else rounding_unit(np.nan_to_num(answers.probabilities))
    least = max(unit / 2, _SMALLEST)
    own = shares[np.arange(len(labels)), labels]
    wrong = shares.copy()
    wrong[np.arange(len(labels)), labels] = 0.0
    logits = np.log(own.clip(least)) - np.log(wrong.sum(axis=1).clip(least))
    ordered = -np.sort(-np.delete(shares.ravel(), np.arange(len(labels)) * classes + labels).reshape(len(labels), -1))
    return Told(logits, np.log(ordered[:, :MOST_OTHERS].clip(least)))


def reference_answers(rule: AnswerRule | None, outputs: Array) -> Answers:
    """Return what an endpoint would say of logits (n, classes), but for noise; no rule: exact probabilities."""
    if rule is None or rule.draws:
        return Answers(outputs.argmax(axis=1), softmax(outputs))
    return rule.noiseless(outputs)


def reference_signals(
    rehearsal: Rehearsal, rule: AnswerRule | None, stack: Vector, pool: Pool, rows: NDArray[np.int64]
) -> list[Told]:
    """Return what each of several models would say about rows of a pool."""
    network = mapped_network(rehearsal.world.model)
    chosen = torch.from_numpy(rows).to(pool.images.device)
    outputs = network.outputs(stack, pool.images[chosen]).double().cpu().numpy()
    labels = pool.labels[chosen].cpu().numpy()
    return [answer_signals(reference_answers(rule, answers), labels, outputs.shape[-1]) for answers in outputs]


def trained_references(
    rehearsal: Rehearsal, game: MembershipGame, count: int, seed: int
) -> tuple[Vector, NDArray[np.bool_]]:
    """Train reference models as an audit does; return name -> (R, *shape), and who had which candidate, (R, 2 C)."""
    drawn, inside = draw_references(rehearsal.world, game.candidates, count, seed)
    last = max(rehearsal.schedule)
    return train_references(rehearsal.world, game.pool, drawn, rehearsal.schedule, [last])[last], inside


def signals_by_answers(
    rehearsal: Rehearsal,
    game: MembershipGame,
    endpoint: Questions,
    rule: AnswerRule | None,
    references: tuple[Vector, NDArray[np.bool_]],
    people: NDArray[np.int64],
) -> Signals:
    """Ask about each candidate and each population example once, and return what attacks on membership work on."""
    (stack, inside), rows = references, game.candidates.rows
    target, crowd = ask_rows(endpoint, game, rows), ask_rows(endpoint, game, people)
    mine = reference_signals(rehearsal, rule, stack, game.pool, rows)
    theirs = reference_signals(rehearsal, rule, stack, game.pool, people)
    return Signals(
        target=target.logits[None],
        references=np.stack([told.logits for told in mine])[:, None],
        inside=inside,
        population=crowd.logits[None],
        reference_population=np.stack([told.logits for told in theirs])[:, None],
        rounds=np.array([max(rehearsal.schedule)], dtype=np.int64),
        others=target.others,
        reference_others=np.stack([told.others for told in mine]),
    )


def attack_scores(signals: Signals) -> dict[str, Array]:
    """Return the scores of every attack of an audit that works on one model."""
    return {name: attack(signals) for name, attack in ATTACKS.items() if name != _OF_ROUNDS}


class ExactQuestions:
    """The model itself, for a referee; see :class:`fedpriv.attacks.questions.Questions`."""

    def __init__(self, referee: ProbeReferee) -> None:
        """Take the referee's model."""
        self.classes, self.asked = referee.classes, 0
        self._referee = referee

    def ask(self, images: Tensor) -> Answers:
        """Answer exactly."""
        self.asked += len(images)
        scores = self._referee.scores(unit_scale(images, torch.float64)).double().numpy()
        return Answers(scores.argmax(axis=1), softmax(scores))


def membership_figures(
    scores: Mapping[str, Array],
    truth: NDArray[np.bool_],
    proven: Guarantee | None,
    seed: int,
    raw: Mapping[str, Array] | None = None,
) -> tuple[Figure, ...]:
    """Return the area under the curve of each attack, and the largest advantage of the one with the largest area."""
    auc, theorem = _ceiling(proven, membership_auc)
    figures = {
        name: Figure(
            f"AUC of {name}",
            Interval(curve(values, truth).auc, *auc_interval(values, truth)),
            0.5,
            reference=None if raw is None else curve(raw[name], truth).auc,
            ceiling=auc,
            theorem=theorem,
            unit="number",
        )
        for name, values in scores.items()
    }
    order = sorted(figures, key=lambda name: -figures[name].measured.value)
    best = scores[order[0]]
    advantage, theorem = _ceiling(proven, membership_advantage)
    rng = numpy_stream(seed, "probe-membership")
    ends = bootstrap_intervals(best, truth, {"advantage": lambda points: points.advantage}, rng)["advantage"]
    # Its threshold is chosen on the same scores, so that an interval around it does not refute a theorem.
    last = Figure(
        f"advantage of {order[0]}",
        Interval(curve(best, truth).advantage, 0.0, ends[1]),
        0.0,
        ceiling=advantage,
        theorem=f"{theorem}; the threshold is chosen on the scores that are counted, so that guesses are above 0, too",
    )
    return (*(figures[name] for name in order), last)


def told_words(members: int, best: Figure) -> str:
    """Say how well members are told from as many others; whoever may as well have guessed has not told them apart."""
    auc = best.measured
    ends = "" if auc.ends is None else f" (95 %: {auc.ends[0]:.3f} to {auc.ends[1]:.3f})"
    area = f"an area under the curve of {auc.value:.3f}{ends}; a guess has 0.5"
    if auc.ends is not None and auc.ends[0] <= 0.5:
        return f"{members} members and as many others are not told apart better than by guessing: {area}."
    return f"{members} members are told from as many others with {area}."


def _ceiling(proven: Guarantee | None, bound: Callable[[float, float], float]) -> tuple[float | None, str]:
    if proven is None or proven.epsilon is None:
        return None, "no epsilon under replace-one is proven"
    theorem = f"epsilon {proven.epsilon:.4g} at delta {proven.delta:g}, {proven.adjacency}"
    return bound(proven.epsilon, proven.delta), theorem


def need_network(rule: AnswerRule, name: str) -> str | None:
    """Say why references of the run's network are none of what answers, or return ``None``."""
    if rule.source == "network":
        return None
    return f"{name} trains references of the run's network, and this policy answers from its {rule.source}"


# Synthetic data for shadow models without access to the target's data (Shokri et al. 2017, Section V.C).
#
# Three ways: search for records that the target is sure of; draw every feature from its own distribution; or take real
# records of the same kind, with noise. Records are images here, every pixel a feature.


# How records are searched for (the paper's Algorithm 1).
SURE = 0.5  # confidence of the target in a record's class, from which on it may be taken
MOST_CHANGED, LEAST_CHANGED = 0.3, 0.03  # shares of the features that a proposal changes, first and last (k_max, k_min)
REJECTIONS = 5  # in a row after which the share is halved


def is_binary(images: Tensor) -> bool:
    """Return whether every feature is 0 or 1."""
    return bool(((images == 0) | (images == 1)).all())


def by_model(
    endpoint: Questions,
    shape: tuple[int, int, int],
    count: int,
    budget: int,
    binary: bool,
    generator: np.random.Generator,
) -> Public:
    """Climb the target's confidence from random records, all records of all classes at once.

    A proposal that the target is at least as sure of is kept. A record is taken with the probability that the target
    gives its class, once that class is ahead and surer than the threshold.

    It returns those that were found; there may be none.
    """
    features = int(np.prod(shape))
    wanted = np.arange(count) % endpoint.classes
    best = _random(generator, (count, features), binary)
    proposed = best.copy()
    height, waited = np.zeros(count), np.zeros(count, dtype=np.int64)
    share, open_, taken = np.full(count, MOST_CHANGED), np.ones(count, dtype=np.bool_), []
    spent = 0
    while open_.any() and spent + int(open_.sum()) <= budget:
        rows = np.flatnonzero(open_)
        spent += len(rows)
        answers = endpoint.ask(torch.from_numpy(proposed[rows]).view(-1, *shape))
        shares = probabilities(answers, endpoint.classes)
        own = shares[np.arange(len(rows)), wanted[rows]]
        better = own >= height[rows]
        gained, lost = rows[better], rows[~better]
        best[gained], height[gained], waited[gained] = proposed[gained], own[better], 0
        sure = better & (own > SURE) & (shares.argmax(axis=1) == wanted[rows])
        accepted = rows[sure & (generator.random(len(rows)) < own)]
        taken += accepted.tolist()
        open_[accepted] = False
        waited[lost] += 1
        weary = lost[waited[lost] > REJECTIONS]
        share[weary], waited[weary] = np.maximum(share[weary] / 2, LEAST_CHANGED), 0
        changed = generator.random(best.shape) < share[:, None]
        changed[np.arange(count), generator.integers(features, size=count)] = True
        proposed = np.where(changed, _random(generator, best.shape, binary), best)
    chosen = np.array(sorted(taken), dtype=np.int64)
    return Public(torch.from_numpy(best[chosen]).view(-1, *shape), torch.from_numpy(wanted[chosen]))


def by_statistics(images: Tensor, endpoint: Questions, count: int, generator: np.random.Generator) -> Public:
    """Draw every feature from its own distribution, independently, and ask the target for the labels."""
    flat = images.double().flatten(1).numpy()
    rows = generator.integers(len(flat), size=(count, flat.shape[1]))
    made = torch.from_numpy(flat[rows, np.arange(flat.shape[1])]).view(-1, *images.shape[1:])
    return Public(made, torch.from_numpy(endpoint.ask(made).labels))


def noisy_real(images: Tensor, labels: Tensor, share: float, generator: np.random.Generator) -> Public:
    """Return real records with noise: a share of binary features is flipped, others get normal noise so large."""
    flat = images.double().numpy()
    if is_binary(images):
        made: NDArray[np.float64] = np.where(generator.random(flat.shape) < share, 1 - flat, flat)
    else:
        made = (flat + generator.normal(scale=share, size=flat.shape)).clip(0, 1)
    return Public(torch.from_numpy(made), labels.clone())


def _random(generator: np.random.Generator, shape: tuple[int, ...], binary: bool) -> NDArray[np.float64]:
    drawn = generator.random(shape)
    return np.rint(drawn) if binary else drawn


_SEARCH, _STATISTICS = "records that the model is sure of", "features drawn one by one"
_NOISY = "public records with noise"
_FEWEST = 20


def by_shadows(settings: MembershipBySynthesis, scene: ProbeScene) -> tuple[ProbeOutcome, ...]:
    """Train shadows on data that are made in each of the ways."""
    ways = (_SEARCH,) if scene.public is None else (_SEARCH, _STATISTICS, _NOISY)
    return tuple(_by(settings, way, number, scene) for number, way in enumerate(ways))


def _by(settings: MembershipBySynthesis, way: str, number: int, scene: ProbeScene) -> ProbeOutcome:
    rehearsal, endpoint = scene.known_training(), scene.open()
    game = draw_game(rehearsal, pairs_within(scene.budget // 2, settings.pairs), scene.seed)
    left = scene.budget - len(game.candidates.rows)
    generator = numpy_stream(scene.seed, "probe-synthesis", number)
    made = _made(settings, way, scene, endpoint, left, generator)
    asked = endpoint.asked
    if len(made.labels) < _FEWEST:
        sentence = f"{asked} questions made {len(made.labels)} records: too few to train shadows on; ask more."
        return settings.outcome(asked, (), sentence, variant=way)
    told, inside = _shadows(rehearsal, made, settings.references, generator)
    target = ask_rows(endpoint, game, game.candidates.rows)
    records = np.stack([predictions(answer.logits, answer.others) for answer in told])
    scores = judged(records, inside, predictions(target.logits, target.others))
    figures = membership_figures({"shadow models": scores}, game.candidates.truth, scene.proven, scene.seed)
    sentence = (
        f"{asked} questions made data ({len(made.labels)} records), {endpoint.asked - asked} were about candidates"
        f": {told_words(len(game.candidates.members), figures[0])}"
    )
    return settings.outcome(endpoint.asked, figures, sentence, variant=way)


def _made(
    settings: MembershipBySynthesis,
    way: str,
    scene: ProbeScene,
    endpoint: Questions,
    left: int,
    generator: np.random.Generator,
) -> Public:
    count = min(settings.records, left)
    if way == _SEARCH:
        binary = scene.public is not None and is_binary(scene.public.images)
        return by_model(endpoint, scene.shape, count, left, binary, generator)
    public = scene.known_public()
    if way == _STATISTICS:
        return by_statistics(public.images, endpoint, count, generator)
    return noisy_real(public.images[: settings.records], public.labels[: settings.records], settings.noise, generator)


def _shadows(
    rehearsal: Rehearsal, made: Public, count: int, generator: np.random.Generator
) -> tuple[list[Told], NDArray[np.bool_]]:
    """Train shadows, each on a half of the records; what each would say about all, and which it was trained with."""
    world, total = rehearsal.world, len(made.labels)
    images = world.dataset.normalise(made.images, next(iter(world.initial.parameters.values())).dtype)
    pool = Pool(images.to(world.device), made.labels.to(world.device))
    sizes = [len(rows) for rows in world.partitions]
    inside = np.stack([generator.permutation(total) < total // 2 for _ in range(count)])
    shares = []
    for half in inside:
        rows = np.flatnonzero(half)
        # As many as the run has: each record once, or as often as it takes.
        drawn = np.resize(generator.permutation(rows), sum(sizes))
        shares.append(tuple(np.split(drawn, np.cumsum(sizes)[:-1])))
    # With fewer places than records, only those that got one were trained with.
    inside = np.stack([np.isin(np.arange(total), np.concatenate(share)) for share in shares])
    seeds = generator.integers(2**31, size=count).tolist()
    drawn_references = [Reference(*each) for each in zip(seeds, shares, strict=True)]
    last = max(rehearsal.schedule)
    stack = train_references(world, pool, drawn_references, rehearsal.schedule, [last])[last]
    return reference_signals(rehearsal, rehearsal.rule, stack, pool, np.arange(total)), inside
