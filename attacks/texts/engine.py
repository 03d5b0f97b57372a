"""Run one attack on the texts of many observations."""

import math
import time
from typing import TYPE_CHECKING

import torch

from fedpriv.attacks.reconstruction.results import AttackRefused, Reconstruction, Restart
from fedpriv.attacks.reconstruction.scene import ENDED, time_is_up
from fedpriv.attacks.reconstruction.upload_model import OtherBatches, Victim, join, prepare_victims, uploads_of
from fedpriv.attacks.texts.scene import Reading, Sentences, TextScene
from fedpriv.attacks.texts.settings import TextAttackSettings
from fedpriv.core.errors import printable

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.engine import AttackJob


def read_texts(job: "AttackJob") -> list[Reconstruction]:
    """Attack the texts behind uploads, one after the other; a result's "images" are tokens, int64 (N, 1, 1, T)."""
    config: TextAttackSettings = job.config
    observations = [observation for heard in job.observations for observation in uploads_of(heard)]
    settings = observations[0].settings
    if settings.text is None:
        raise AttackRefused(f"{config.name} reads texts, and these uploads are of images or rows of tables")
    if any(isinstance(heard, OtherBatches) for heard in job.observations):
        raise AttackRefused(f"{config.name} reads one batch; uploads of other batches are read one by one")
    scene = TextScene.of(job.model, settings.shape, settings.classes, settings.text, job.public_images)
    prepared = iter(prepare_victims(observations, scene.names, scene.device))
    victims = [join([next(prepared) for _ in uploads_of(heard)]) for heard in job.observations]
    results = []
    for victim in victims:
        began = time.perf_counter()
        reading = config.read(scene, victim, job.seed, job.progress)
        _check(config.name, scene, reading)
        results.append(_result(config.name, victim, reading, time.perf_counter() - began))
    return results


def _check(name: str, scene: TextScene, reading: Reading) -> None:
    """Refuse a reading that cannot be one: what scores it expects what :class:`Reading` says."""
    if not reading.attempts:
        raise AttackRefused(f"{name} returned no attempt")
    for attempt in reading.attempts:
        tokens, labels = attempt.tokens, attempt.labels
        if tokens.ndim != 2 or tokens.shape[1] != scene.length or tokens.dtype != torch.int64:
            raise AttackRefused(f"{name} returned {tokens.dtype} {tuple(tokens.shape)}; expected (N, {scene.length})")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < scene.format.vocabulary:
            raise AttackRefused(f"{name} returned tokens that are not from 0 to {scene.format.vocabulary - 1}")
        if labels.shape != (len(tokens),) or labels.dtype != torch.int64:
            raise AttackRefused(
                f"{name} returned labels {labels.dtype} {tuple(labels.shape)}, expected ({len(tokens)},)"
            )


def _result(name: str, victim: Victim, reading: Reading, seconds: float) -> Reconstruction:
    attempts = tuple(map(_attempt, reading.attempts))
    losses = [math.inf if attempt.loss is None else attempt.loss for attempt in attempts]
    chosen = min(range(len(losses)), key=losses.__getitem__)
    ended = ENDED if time_is_up() else ""
    notes = "; ".join(text for text in (victim.note, printable(reading.note), ended) if text)
    return Reconstruction(victim.round, victim.client, name, attempts, chosen, notes, seconds)


def _attempt(sentences: Sentences) -> Restart:
    tokens = sentences.tokens.cpu()[:, None, None]
    loss = sentences.loss if math.isfinite(sentences.loss) else None
    return Restart(tokens, sentences.labels.cpu(), loss, sentences.steps)
