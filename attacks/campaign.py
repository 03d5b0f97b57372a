"""One attack on many uploads: what cannot be attacked is named with the reason, and all the rest is attacked."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Heard, Reconstruction, refusal, run_attack
from fedpriv.attacks.reconstruction.errors import is_lack_of_memory
from fedpriv.attacks.reconstruction.upload_model.repeated import uploads_of
from fedpriv.errors import InputError
from fedpriv.gradients.operator import first_line

__all__ = ["Campaign", "attack_each", "fault"]


@dataclass(frozen=True, eq=False)
class Campaign:
    """What one attack made of a list of observations.

    Attributes:
        found: number of the observation -> its reconstruction.
        failures: number of the observation -> why there is none, in one line. Every observation is in one of the two.
    """

    found: Mapping[int, Reconstruction]
    failures: Mapping[int, str]


def attack_each(job: AttackJob) -> Campaign:
    """Attack uploads as one batch; where the batch as a whole cannot be attacked, one after the other.

    An upload that is broken (see :func:`fault`) or of a kind that cannot be modelled is left out before; one that the
    attack refuses, or for which memory does not suffice, does not stop the others.
    """
    checked = {number: _trouble(heard, job.model) for number, heard in enumerate(job.observations)}
    failures = {number: reason for number, reason in checked.items() if reason is not None}
    sound = [number for number in range(len(job.observations)) if number not in failures]

    def attempt(numbers: Sequence[int]) -> list[Reconstruction]:
        with _memory_in_words():
            return run_attack(replace(job, observations=[job.observations[number] for number in numbers]))

    try:
        return _without_nan(dict(zip(sound, attempt(sound), strict=True)), failures)
    except InputError as error:
        if len(sound) == 1:
            return Campaign({}, failures | {sound[0]: str(error)})
    reconstructions = {}
    for number in sound:
        try:
            (reconstructions[number],) = attempt([number])
        except InputError as error:
            failures[number] = str(error)
    return _without_nan(reconstructions, failures)


def _without_nan(reconstructions: Mapping[int, Reconstruction], failures: Mapping[int, str]) -> Campaign:
    """Count images that are not finite, which nobody can score, as failures."""
    broken = {number for number, result in reconstructions.items() if not bool(torch.isfinite(result.images).all())}
    reasons = dict.fromkeys(broken, "the attack diverged: its images are not finite")
    whole = {number: result for number, result in reconstructions.items() if number not in broken}
    return Campaign(whole, {**failures, **reasons})


def _trouble(heard: Heard, model: nn.Module) -> str | None:
    """Why an upload, or one of several of the same batch, cannot be attacked."""
    for upload in uploads_of(heard):
        reason = refusal(upload.settings) or fault(upload, model)
        if reason is not None:
            return reason
    return None


def fault(observation: Observation, model: nn.Module) -> str | None:
    """Say in one line why an upload cannot be one of this network's, or return ``None``.

    Args:
        observation: what was heard.
        model: the network.
    """
    trained = {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}
    for name, value in observation.upload.items():
        if name not in trained:
            return f"it has a tensor {name}, and the network no such parameter"
        if tuple(value.shape) != trained[name]:
            return f"{name} has the shape {tuple(value.shape)}, in the network {trained[name]}"
    if missing := sorted(trained.keys() - observation.upload.keys()):
        return f"it lacks the network's parameter {missing[0]}"
    for what, vector in (("upload", observation.upload), ("parameters", observation.parameters)):
        broken = [name for name, value in vector.items() if not bool(torch.isfinite(value).all())]
        if broken:
            return f"NaN or infinity among its {what}, in {broken[0]}"
    return None


@contextmanager
def _memory_in_words() -> Iterator[None]:
    """Turn a failed allocation, which torch reports in several ways, into one line of advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        raise AttackRefused(
            f"memory does not suffice ({first_line(error)}); attack smaller batches, take fewer restarts, or use a "
            "device with more"
        ) from None
