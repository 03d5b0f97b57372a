"""Membership inference through queries: the game of :mod:`fedpriv.attacks.membership.audit`, on answers.

The adversary knows all examples but the candidates, repeats the run's training on data of its own, and passes what its
reference models say through the endpoint's policy, which it knows. Noise of a policy is left out there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import softmax
from torch import Tensor
from typing_extensions import override

from fedpriv.accounting.ceiling import membership_advantage, membership_auc
from fedpriv.attacks.intervals import auc_interval, bootstrap_intervals, curve
from fedpriv.attacks.membership.attacks import ATTACKS, MOST_OTHERS, Signals, judged, predictions
from fedpriv.attacks.membership.audit import draw_references
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
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
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Guarantee
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, Positive, Real
from fedpriv.data.datasets import unit_scale
from fedpriv.gradients import Vector

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
        return Answers(outputs.argmax(axis=1), softmax(outputs, axis=1))
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
        return Answers(scores.argmax(axis=1), softmax(scores, axis=1))


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


@PROBES.register
class MembershipByAnswers(ModelAttack):
    """One question a candidate; reference models on the run's own data."""

    name: ClassVar[str] = "membership-answers"
    title: ClassVar[str] = "Membership by answers"
    reference: ClassVar[str] = (
        "Shokri, Stronati, Song and Shmatikov 2017; Ye et al. 2022; Carlini et al. 2022; Zarifzadeh, Liu and "
        "Shokri 2024"
    )

    references: Count = Field(16, description="reference models, even, from 6")
    pairs: Count = Field(500, description="of a member and a non-member, at most")
    population: Count = Field(1000, description="examples of no client that are queried, at most")

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if self.references < 6 or self.references % 2:
            return f"{self.name}.references = {self.references}: an even number from 6"
        return need_network(scene.known_training().rule, self.name)

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        rehearsal, endpoint = scene.known_training(), scene.open()
        game = draw_game(rehearsal, pairs_within(scene.budget - 1, self.pairs), scene.seed)
        most = min(self.population, scene.budget - len(game.candidates.rows))
        people, truth = game.candidates.population[:most], game.candidates.truth
        references = trained_references(rehearsal, game, self.references, scene.seed)
        signals = signals_by_answers(rehearsal, game, endpoint, rehearsal.rule, references, people)
        exact = signals_by_answers(rehearsal, game, ExactQuestions(referee), None, references, people)
        figures = membership_figures(attack_scores(signals), truth, scene.proven, scene.seed, raw=attack_scores(exact))
        sentence = f"{endpoint.asked} questions, best attack: {told_words(len(game.candidates.members), figures[0])}"
        return (self.outcome(endpoint.asked, figures, sentence),)


@PROBES.register
class MembershipByLabels(ModelAttack):
    """Members lie farther from the boundary; no reference model, no probability, no other example is used."""

    name: ClassVar[str] = "membership-labels"
    title: ClassVar[str] = "Membership by labels alone"
    reference: ClassVar[str] = (
        "Choquette-Choo, Tramer, Carlini and Papernot: Label-Only Membership Inference Attacks, ICML 2021 (random "
        "noise); Yeom et al. 2018 (the gap)"
    )

    pairs: Count = Field(500, description="of a member and a non-member, at most")
    noisy: Count = Field(20, description="noisy images that are queried for each candidate, besides itself")
    deviation: Positive = Field(0.3, description="of their noise, pixels from 0 to 1")

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        endpoint, each = scene.open(), 1 + self.noisy
        game = draw_game(scene.known_training(), pairs_within(scene.budget, self.pairs, each), scene.seed)
        images, labels = game.asked()
        draws = numpy_stream(scene.seed, "probe-noisy-images")
        gap = (endpoint.ask(images).labels == labels).astype(np.float64)
        right = gap.copy()
        for _ in range(self.noisy):
            noise = torch.from_numpy(draws.normal(scale=self.deviation, size=tuple(images.shape)))
            right += endpoint.ask((images + noise).clamp(0, 1)).labels == labels
        scores = {"tolerance to noise": right, "the gap (right label)": gap}
        figures = membership_figures(scores, game.candidates.truth, scene.proven, scene.seed)
        sentence = f"{endpoint.asked} labels: {told_words(len(game.candidates.members), figures[0])}"
        return (self.outcome(endpoint.asked, figures, sentence),)


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


@PROBES.register
class MembershipBySynthesis(ModelAttack):
    """Shadows of the run's own training; half of the questions make data, the others are about candidates."""

    name: ClassVar[str] = "membership-synthetic"
    title: ClassVar[str] = "Membership by shadows on made data"
    reference: ClassVar[str] = (
        "Shokri, Stronati, Song and Shmatikov: Membership Inference Attacks against Machine Learning Models, 2017"
    )

    references: Count = Field(8, description="shadow models")
    pairs: Count = Field(500, description="of a member and a non-member, at most")
    records: Count = Field(400, description="made records, at most")
    noise: Annotated[Real, Field(ge=0, le=1)] = Field(
        0.1, description="share of flipped binary features, or deviation, of public records"
    )

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        return need_network(scene.known_training().rule, self.name)

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        """Train shadows on data that are made in each of the ways."""
        ways = (_SEARCH,) if scene.public is None else (_SEARCH, _STATISTICS, _NOISY)
        return tuple(self._by(way, number, scene) for number, way in enumerate(ways))

    def _by(self, way: str, number: int, scene: ProbeScene) -> ProbeOutcome:
        rehearsal, endpoint = scene.known_training(), scene.open()
        game = draw_game(rehearsal, pairs_within(scene.budget // 2, self.pairs), scene.seed)
        left = scene.budget - len(game.candidates.rows)
        generator = numpy_stream(scene.seed, "probe-synthesis", number)
        made = self._made(way, scene, endpoint, left, generator)
        asked = endpoint.asked
        if len(made.labels) < _FEWEST:
            sentence = f"{asked} questions made {len(made.labels)} records: too few to train shadows on; ask more."
            return self.outcome(asked, (), sentence, variant=way)
        told, inside = _shadows(rehearsal, made, self.references, generator)
        target = ask_rows(endpoint, game, game.candidates.rows)
        records = np.stack([predictions(answer.logits, answer.others) for answer in told])
        scores = judged(records, inside, predictions(target.logits, target.others))
        figures = membership_figures({"shadow models": scores}, game.candidates.truth, scene.proven, scene.seed)
        sentence = (
            f"{asked} questions made data ({len(made.labels)} records), {endpoint.asked - asked} were about candidates"
            f": {told_words(len(game.candidates.members), figures[0])}"
        )
        return self.outcome(endpoint.asked, figures, sentence, variant=way)

    def _made(
        self,
        way: str,
        scene: ProbeScene,
        endpoint: Questions,
        left: int,
        generator: np.random.Generator,
    ) -> Public:
        count = min(self.records, left)
        if way == _SEARCH:
            binary = scene.public is not None and is_binary(scene.public.images)
            return by_model(endpoint, scene.shape, count, left, binary, generator)
        public = scene.known_public()
        if way == _STATISTICS:
            return by_statistics(public.images, endpoint, count, generator)
        return noisy_real(public.images[: self.records], public.labels[: self.records], self.noise, generator)
