"""Candidates for the leakage table: lists for the attack that picks, and how often the best decision is right."""

from collections.abc import Sequence
from dataclasses import replace

from fedpriv.attacks.intervals import best_interval
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import best_decisions
from fedpriv.attacks.referee import Truth
from fedpriv.lab.victims import Target, candidates
from fedpriv.mechanisms import recorded_mechanism
from fedpriv.records import Interval
from fedpriv.world import World
from studies.uploads import FIRST

__all__ = ["best_decision", "with_candidates"]


def with_candidates(world: World, truths: Sequence[Truth], uploads: Sequence[Observation]) -> tuple[Observation, ...]:
    """Give the adversary for each image the list from which it is to be picked; client k sent upload k."""
    lists = [candidates(world, Target(FIRST, (client,)), known) for client, known in enumerate(truths)]
    return tuple(replace(upload, candidates=listed) for upload, listed in zip(uploads, lists, strict=True))


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
