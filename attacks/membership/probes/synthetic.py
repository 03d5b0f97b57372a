"""The shadow attack by whoever has none of the target's data: shadows are trained on data made in three ways."""

from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks.membership.attacks import judged, predictions
from fedpriv.attacks.membership.probes.answers import (
    Told,
    ask_rows,
    membership_figures,
    need_network,
    reference_signals,
    told_words,
)
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import Questions
from fedpriv.attacks.references import (
    Pool,
    Reference,
    draw_game,
    pairs_within,
    train_references,
)
from fedpriv.attacks.scene import ProbeReferee, ProbeScene, Public, Rehearsal, probabilities
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, Real

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
