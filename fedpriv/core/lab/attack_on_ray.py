"""One attack's uploads spread over Ray tasks: for jobs that one core, device or machine is too small for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from fedpriv.attacks.campaign import AttackOutcome, Campaign, attack_each
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.core.config import EngineConfig
from fedpriv.core.threads import cpu_threads
from fedpriv.engines.tasks import TaskEnded, TaskResources, run_tasks
from fedpriv.gradients.calls import copied

_POLL_SECONDS = 1.0
_KEYS = ("engine.cpus_per_client", "engine.gpus_per_client", "engine.address")


@dataclass(frozen=True, eq=False)
class _TaskShare:
    """What one task attacks, with a model that lies on the CPU, and where and on how many threads."""

    job: AttackJob
    device: str
    threads: int


def attack_on_ray(engine: EngineConfig, job: AttackJob) -> Campaign:
    """Attack uploads in ``engine.attack_tasks`` Ray tasks, or here where that is one; a dying task loses its own."""
    count = min(engine.attack_tasks, len(job.observations))
    if count < 2:
        return attack_each(job)
    device, still = str(next(job.model.parameters()).device.type), copied(job.model).cpu()
    # Every count-th: the uploads of one kind follow each other, and some kinds take longer.
    numbers = [range(first, len(job.observations), count) for first in range(count)]
    shares = [tuple(job.observations[n] for n in mine) for mine in numbers]
    bare = replace(job, model=still, progress=None)
    parts = [_TaskShare(replace(bare, observations=mine), device, torch.get_num_threads()) for mine in shares]
    resources = TaskResources(engine.cpus_per_client, engine.gpus_per_client, engine.address, _KEYS)
    outcomes: dict[int, AttackOutcome] = {}
    done = 0
    for event in run_tasks(_attack_part, parts, resources, _POLL_SECONDS):
        if isinstance(event, TaskEnded):
            mine = numbers[event.index]
            outcomes |= dict(zip(mine, _outcomes(event, len(mine)), strict=True))
            done += 1
            if job.progress is not None:
                job.progress(done, count, _loss(outcomes.values()))
    return Campaign(tuple(outcomes[number] for number in sorted(outcomes)))


def _attack_part(part: _TaskShare) -> Campaign:
    """Runs in a Ray task."""
    with cpu_threads(part.threads):
        return attack_each(replace(part.job, model=part.job.model.to(part.device)))


def _outcomes(ended: TaskEnded, count: int) -> Sequence[AttackOutcome]:
    """What became of the uploads of one task."""
    if ended.error is not None:
        return [AttackOutcome(None, f"its Ray task failed: {ended.error}")] * count
    campaign: Campaign = ended.result
    return campaign.outcomes


def _loss(outcomes: Iterable[AttackOutcome]) -> float:
    """The mean of the attack's own losses so far; NaN where there is none."""
    results = (outcome.result for outcome in outcomes)
    losses = [result.loss for result in results if result is not None and result.loss is not None]
    return fmean(losses) if losses else float("nan")
