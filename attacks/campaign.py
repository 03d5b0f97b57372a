"""Run one attack on many uploads. An upload that cannot be attacked is reported with its reason; the others go on."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Heard, Reconstruction, refusal, run_attack
from fedpriv.attacks.reconstruction.results import is_lack_of_memory, lacks_second_derivative
from fedpriv.attacks.reconstruction.scene import limited_to, one_of
from fedpriv.attacks.reconstruction.upload_model import uploads_of
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError, cut, reason_of
from fedpriv.gradients.operator import first_line

LONGEST = 300  # characters of an unexpected error in a line


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """What one attack made of one observation: a reconstruction, or the reason why there is none."""

    result: Reconstruction | None
    failure: str = ""  # in one line
    traceback: str = ""  # of an unexpected error, which is a bug of the attack or of an own network


@dataclass(frozen=True, eq=False)
class Campaign:
    """What one attack made of a list of observations."""

    outcomes: tuple[AttackOutcome, ...]  # one for each

    @property
    def found(self) -> dict[int, Reconstruction]:
        """Number of an observation -> its reconstruction."""
        return {number: each.result for number, each in enumerate(self.outcomes) if each.result is not None}

    @property
    def failures(self) -> dict[int, str]:
        """Number of an observation -> why there is none."""
        return {number: each.failure for number, each in enumerate(self.outcomes) if each.result is None}


def attack_each(job: AttackJob) -> Campaign:
    """Attack uploads as one batch; where the batch as a whole cannot be attacked, one after the other.

    An upload that is broken (see :func:`fault`) or of a kind that cannot be modelled is left out before; one that the
    attack refuses, on which it fails unexpectedly, or for which memory does not suffice, does not stop the others.
    """
    reasons = [trouble(heard, job.model) for heard in job.observations]
    sound = [heard for heard, reason in zip(job.observations, reasons, strict=True) if reason is None]
    with limited_to(job.seconds):
        outcomes = iter(_attempted(replace(job, observations=sound)))
    return Campaign(tuple(next(outcomes) if reason is None else AttackOutcome(None, reason) for reason in reasons))


def _attempted(job: AttackJob) -> list[AttackOutcome]:
    """Attack sound uploads; texts are read one by one in any case, and a refusal repeats none of the others."""
    count = len(job.observations)
    if count == 1 or not job.config.is_text:
        try:
            with _in_words(job.name):
                return list(map(_finite, run_attack(job)))
        except InputError as error:
            if count == 1:
                broken = isinstance(error, _AttackBrokenError)
                text = "".join(traceback.format_exception(error.__cause__)) if broken else ""
                return [AttackOutcome(None, str(error), text)]
    parts = [job.progress and one_of(job.progress, number, count) for number in range(count)]
    alone = [
        replace(job, observations=[heard], progress=part) for heard, part in zip(job.observations, parts, strict=True)
    ]
    return [outcome for each in alone for outcome in _attempted(each)]


def _finite(result: Reconstruction) -> AttackOutcome:
    """Count images that are not finite, which cannot be scored, as a failure."""
    if bool(torch.isfinite(result.images).all()):
        return AttackOutcome(result)
    return AttackOutcome(None, "the attack diverged: its images are not finite")


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
    """An attack raised an unexpected error, which is the cause of this one."""


@contextmanager
def _in_words(attack: str) -> Iterator[None]:
    """Turn what an attack raises into one line, a failed allocation into advice; files cannot be an attack's fault."""
    try:
        yield
    except (InputError, OSError, RunFailedError, RunInterruptedError):
        raise
    except Exception as error:
        if lacks_second_derivative(error):
            raise AttackRefused(
                f"torch cannot differentiate this network twice, as {attack} has to ({first_line(error)})"
            ) from None
        if not is_lack_of_memory(error):
            raise _AttackBrokenError(f"{attack} failed unexpectedly: {cut(reason_of(error), LONGEST)}") from error
        raise AttackRefused(
            f"memory does not suffice ({first_line(error)}); attack smaller batches, take fewer restarts, or use a "
            "device with more"
        ) from None
