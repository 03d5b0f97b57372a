"""One attack's uploads spread over Ray tasks: for jobs that one core, device or machine is too small for."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from attacks.campaign import Campaign, attack_each
from attacks.reconstruction import Heard, Progress
from fedpriv.config import EngineConfig
from fedpriv.engines.tasks import Ended, TaskResources, run_tasks
from fedpriv.threads import cpu_threads

__all__ = ["attack_spread"]

_POLL_SECONDS = 1.0
_KEYS = ("engine.cpus_per_client", "engine.gpus_per_client", "engine.address")


@dataclass(frozen=True, eq=False)
class _Part:
    """What one task attacks, and with what; the model lies on the CPU."""

    name: str
    observations: tuple[Heard, ...]
    model: nn.Module
    config: Any
    seed: int
    public_images: Tensor | None
    device: str
    threads: int


def attack_spread(
    engine: EngineConfig,
    name: str,
    observations: Sequence[Heard],
    model: nn.Module,
    config: Any,
    seed: int,
    progress: Progress,
    public_images: Tensor | None,
) -> Campaign:
    """Attack uploads in ``engine.attack_tasks`` Ray tasks, or here where that is one or there is only one upload.

    The other arguments and the result are those of :func:`attacks.campaign.attack_each`. Who is attacked together
    changes results by rounding only. A task that dies takes its own uploads with it and no others.

    Raises:
        InputError: no cluster answers at ``engine.address``, or it cannot host one task.
    """
    count = min(engine.attack_tasks, len(observations))
    if count < 2:
        return attack_each(name, observations, model, config, seed, progress, public_images=public_images)
    device, still = str(next(model.parameters()).device.type), deepcopy(model).cpu()
    # Every count-th: the uploads of one kind stand together, and some kinds take longer.
    numbers = [range(first, len(observations), count) for first in range(count)]
    parts = [
        _Part(
            name,
            tuple(observations[n] for n in mine),
            still,
            config,
            seed,
            public_images,
            device,
            torch.get_num_threads(),
        )
        for mine in numbers
    ]
    resources = TaskResources(engine.cpus_per_client, engine.gpus_per_client, engine.address, _KEYS)
    whole, done = Campaign({}, {}), 0
    for event in run_tasks(_attack_part, parts, resources, _POLL_SECONDS):
        if isinstance(event, Ended):
            whole, done = _joined(whole, event, numbers[event.index]), done + 1
            progress(done, count, _loss(whole))
    return Campaign(dict(sorted(whole.found.items())), dict(sorted(whole.failures.items())))


def _attack_part(part: _Part) -> Campaign:
    """Runs in a Ray task."""
    with cpu_threads(part.threads):
        model = part.model.to(part.device)
        return attack_each(
            part.name, part.observations, model, part.config, part.seed, public_images=part.public_images
        )


def _joined(whole: Campaign, ended: Ended, numbers: Sequence[int]) -> Campaign:
    """Add what became of one part, whose uploads have these numbers in the whole."""
    if ended.error is not None:
        return Campaign(
            whole.found, {**whole.failures, **dict.fromkeys(numbers, f"its Ray task failed: {ended.error}")}
        )
    found = {numbers[place]: result for place, result in ended.result.found.items()}
    failures = {numbers[place]: reason for place, reason in ended.result.failures.items()}
    return Campaign({**whole.found, **found}, {**whole.failures, **failures})


def _loss(campaign: Campaign) -> float:
    """The mean of the attack's own losses so far; NaN where there is none."""
    losses = [result.loss for result in campaign.found.values() if result.loss is not None]
    return fmean(losses) if losses else float("nan")
