"""Run one attack on many uploads. An upload that cannot be attacked is reported with its reason; the others go on."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Heard, Reconstruction, refusal, run_attack
from fedpriv.attacks.reconstruction.results import is_lack_of_memory
from fedpriv.attacks.reconstruction.upload_model import uploads_of
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError, cut, reason_of
from fedpriv.gradients.operator import first_line

LONGEST = 300  # characters of an unexpected error in a line


@dataclass(frozen=True, eq=False)
class Campaign:
    """What one attack made of a list of observations."""

    found: Mapping[int, Reconstruction]  # number of the observation -> its reconstruction
    # number of the observation -> why there is none, in one line. Every observation is in one of the two.
    failures: Mapping[int, str]
    # number of the observation -> that of an unexpected error, which is a bug of the attack or of an own network
    tracebacks: Mapping[int, str] = field(default_factory=dict)
    # numbers of the observations whose client the attack simulates wrongly: its failure shows nothing
    void: frozenset[int] = frozenset()


def attack_each(job: AttackJob) -> Campaign:
    """Attack uploads as one batch; where the batch as a whole cannot be attacked, one after the other.

    An upload that is broken (see :func:`fault`) or of a kind that cannot be modelled is left out before; one that the
    attack refuses, on which it fails unexpectedly, or for which memory does not suffice, does not stop the others.
    """
    checked = {number: trouble(heard, job.model) for number, heard in enumerate(job.observations)}
    failures = {number: reason for number, reason in checked.items() if reason is not None}
    sound = [number for number in range(len(job.observations)) if number not in failures]

    def attempt(numbers: Sequence[int]) -> list[Reconstruction]:
        with _in_words(job.name):
            return run_attack(replace(job, observations=[job.observations[number] for number in numbers]))

    try:
        return _without_nan(dict(zip(sound, attempt(sound), strict=True)), failures)
    except InputError as error:
        if len(sound) == 1:
            return Campaign({}, failures | {sound[0]: str(error)}, _traceback(sound[0], error))
    reconstructions = {}
    tracebacks: dict[int, str] = {}
    for number in sound:
        try:
            (reconstructions[number],) = attempt([number])
        except InputError as error:
            failures[number] = str(error)
            tracebacks |= _traceback(number, error)
    return replace(_without_nan(reconstructions, failures), tracebacks=tracebacks)


def _traceback(number: int, error: InputError) -> dict[int, str]:
    """That of an unexpected error; of a refusal there is none."""
    if not isinstance(error, _AttackBrokenError):
        return {}
    return {number: "".join(traceback.format_exception(error.__cause__))}


def _without_nan(reconstructions: Mapping[int, Reconstruction], failures: Mapping[int, str]) -> Campaign:
    """Count images that are not finite, which nobody can score, as failures."""
    broken = {number for number, result in reconstructions.items() if not bool(torch.isfinite(result.images).all())}
    reasons = dict.fromkeys(broken, "the attack diverged: its images are not finite")
    whole = {number: result for number, result in reconstructions.items() if number not in broken}
    return Campaign(whole, {**failures, **reasons})


def trouble(heard: Heard, model: nn.Module) -> str | None:
    """Say why an upload, or one of several of the same batch, cannot be attacked, or return ``None``."""
    for upload in uploads_of(heard):
        reason = refusal(upload.settings) or fault(upload, model)
        if reason is not None:
            return reason
    return None


def fault(observation: Observation, model: nn.Module) -> str | None:
    """Say in one line why an upload cannot be one of this network's, or return ``None``."""
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


class _AttackBrokenError(AttackRefused):
    """An attack raised something that nobody expected; that is its cause."""


@contextmanager
def _in_words(attack: str) -> Iterator[None]:
    """Turn what an attack raises into one line: a failed allocation, which torch reports in several ways, into advice.

    Any other error ends this attack alone. Files that cannot be written are no attack's.
    """
    try:
        yield
    except (InputError, OSError, RunFailedError, RunInterruptedError):
        raise
    except Exception as error:
        if not is_lack_of_memory(error):
            raise _AttackBrokenError(f"{attack} failed unexpectedly: {cut(reason_of(error), LONGEST)}") from error
        raise AttackRefused(
            f"memory does not suffice ({first_line(error)}); attack smaller batches, take fewer restarts, or use a "
            "device with more"
        ) from None
