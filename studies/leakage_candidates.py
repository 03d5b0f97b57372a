"""Candidates for the leakage table: lists for the attack that picks, and how often the best decision is right."""

from collections.abc import Sequence
from dataclasses import replace

from fedpriv.attacks.intervals import best_interval
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import best_decisions
from fedpriv.attacks.truth import Truth
from fedpriv.core.lab.victims import Target, candidates, truth
from fedpriv.core.records import Interval
from fedpriv.core.world import World
from fedpriv.mechanisms import recorded_mechanism
from studies.uploads import FIRST


def with_candidates(truths: Sequence[Truth], uploads: Sequence[Observation]) -> tuple[Observation, ...]:
    """Give the adversary for each image the list from which it is to be picked; client k sent upload k."""
    return tuple(replace(upload, candidates=known.candidates) for upload, known in zip(uploads, truths, strict=True))


def listed_truth(world: World, client: int) -> Truth:
    """Return what the client sent in the first round, and the list among which it is."""
    target = Target(FIRST, (client,))
    known = truth(world, target)
    return replace(known, candidates=candidates(world, target, known))


def best_decision(world: World, truths: Sequence[Truth], uploads: Sequence[Observation], seed: int) -> Interval | None:
    """Return how often the best decision is right, over all uploads; ``None`` without a mechanism."""
    if recorded_mechanism(uploads[0].settings.mechanism).name == "none":
        return None
    optima = [
        optimum
        for upload, known in zip(uploads, truths, strict=True)
        if upload.candidates is not None
        for optimum in best_decisions(world.model, upload, upload.candidates, known.images, known.labels, seed)
    ]
    return best_interval(sum(each.right for each in optima), sum(each.draws for each in optima))
