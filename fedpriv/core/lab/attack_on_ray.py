"""One attack's uploads spread over Ray tasks: for jobs that one core, device or machine is too small for."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from fedpriv.attacks.campaign import Campaign, attack_each
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.core.config import EngineConfig
from fedpriv.core.threads import cpu_threads
from fedpriv.engines.tasks import Ended, TaskResources, run_tasks

_POLL_SECONDS = 1.0
_KEYS = ("engine.cpus_per_client", "engine.gpus_per_client", "engine.address")


@dataclass(frozen=True, eq=False)
class _Part:
    """What one task attacks, with a model that lies on the CPU, and where and on how many threads."""

    job: AttackJob
    device: str
    threads: int


def attack_on_ray(engine: EngineConfig, job: AttackJob) -> Campaign:
    """Attack uploads in ``engine.attack_tasks`` Ray tasks, or here where that is one or there is only one upload.

    The result is that of :func:`fedpriv.attacks.campaign.attack_each`. Who is attacked together changes results by
    rounding only. A task that dies takes its own uploads with it and no others.
    """
    count = min(engine.attack_tasks, len(job.observations))
    if count < 2:
        return attack_each(job)
    device, still = str(next(job.model.parameters()).device.type), deepcopy(job.model).cpu()
    # Every count-th: the uploads of one kind follow each other, and some kinds take longer.
    numbers = [range(first, len(job.observations), count) for first in range(count)]
    shares = [tuple(job.observations[n] for n in mine) for mine in numbers]
    bare = replace(job, model=still, progress=None)
    parts = [_Part(replace(bare, observations=mine), device, torch.get_num_threads()) for mine in shares]
    resources = TaskResources(engine.cpus_per_client, engine.gpus_per_client, engine.address, _KEYS)
    whole, done = Campaign({}, {}), 0
    for event in run_tasks(_attack_part, parts, resources, _POLL_SECONDS):
        if isinstance(event, Ended):
            whole, done = _joined(whole, event, numbers[event.index]), done + 1
            if job.progress is not None:
                job.progress(done, count, _loss(whole))
    return Campaign(dict(sorted(whole.found.items())), dict(sorted(whole.failures.items())), whole.tracebacks)


def _attack_part(part: _Part) -> Campaign:
    """Runs in a Ray task."""
    with cpu_threads(part.threads):
        return attack_each(replace(part.job, model=part.job.model.to(part.device)))


def _joined(whole: Campaign, ended: Ended, numbers: Sequence[int]) -> Campaign:
    """Add what became of one part, whose uploads have these numbers in the whole."""
    if ended.error is not None:
        failed = dict.fromkeys(numbers, f"its Ray task failed: {ended.error}")
        return replace(whole, failures={**whole.failures, **failed})
    ours, theirs = ended.result, (whole.found, whole.failures, whole.tracebacks)
    parts = zip(theirs, (ours.found, ours.failures, ours.tracebacks), strict=True)
    found, failures, tracebacks = (
        {**known, **{numbers[place]: each for place, each in new.items()}} for known, new in parts
    )
    return Campaign(found, failures, tracebacks)


def _loss(campaign: Campaign) -> float:
    """The mean of the attack's own losses so far; NaN where there is none."""
    losses = [result.loss for result in campaign.found.values() if result.loss is not None]
    return fmean(losses) if losses else float("nan")
