"""Membership inference through queries: the game of :mod:`fedpriv.attacks.membership.audit`, on answers.

The adversary knows all examples but the candidates, repeats the run's training on data of its own, and passes what its
reference models say through the endpoint's policy, which it knows. Noise of a policy is left out there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import softmax
from torch import Tensor
from typing_extensions import override

from fedpriv.accounting.ceiling import membership_advantage, membership_auc
from fedpriv.attacks.membership.attacks import ATTACKS, MOST_OTHERS, Signals
from fedpriv.attacks.membership.audit import draw_references
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import AnswerRule, Answers, Questions
from fedpriv.attacks.references import (
    MembershipGame,
    Pool,
    draw_game,
    mapped_network,
    pairs_within,
    train_references,
)
from fedpriv.attacks.scene import ProbeReferee, ProbeScene, Rehearsal, probabilities, rounding_unit
from fedpriv.attacks.scores import auc_interval, bootstrap_intervals, curve
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Guarantee
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, Positive
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
