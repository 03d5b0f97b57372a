"""The tap: writes observations of the attacked rounds, exactly what the threat model lets the adversary see."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from fedpriv.attacks.observation import Observation, PublicSettings, TextFormat, write_observation
from fedpriv.attacks.settings import Access
from fedpriv.attacks.threat import OUTSIDER, ThreatModel, threat_model
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.config import Experiment
from fedpriv.core.plan import Plan, noise_divisor
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, World
from fedpriv.data.datasets import Dataset
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.gaussian import as_normal
from fedpriv.server.rules.mean import mean_upload
from fedpriv.server.uploads import Upload

# An adversary who knows of no mechanism assumes none.
_UNKNOWN = mechanism_settings({}).model_dump(mode="json", exclude_none=True)


def record_heard(
    world: World,
    folder: RunFolder,
    round_number: int,
    before: State,
    uploads: Sequence[Upload],
    mean: State | None = None,
) -> None:
    """Write the observations of a round in ``adversary.rounds``, as :func:`observe` has them; others are not kept."""
    adversary = world.experiment.adversary
    if not adversary.attacks or round_number not in adversary.rounds:
        return
    for observation in observe(world, round_number, before, uploads, mean):
        write_observation(folder.observations, observation)


def observe(
    world: World, round_number: int, before: State, uploads: Sequence[Upload], mean: State | None = None
) -> tuple[Observation, ...]:
    """Return what the threat model lets the adversary see of a round: uploads of victims, one sum, or nothing."""
    if not uploads:
        return ()
    threat = threat_model(world.experiment.adversary)
    if Access.UPLOADS in threat.grants:
        heard = uploads[: world.experiment.adversary.victims]
        return tuple(_observation(world, threat, round_number, before, [upload], upload.state) for upload in heard)
    if Access.SUM in threat.grants:
        weighting = world.experiment.federation.weighting
        # What a trusted server adds its noise to, whoever sits at the server sees without it.
        unseen = mean is None or (world.experiment.mechanism.noise_at == "server" and threat.name != OUTSIDER)
        known = mean_upload(uploads, weighting) if mean is None or unseen else mean
        return (_observation(world, threat, round_number, before, uploads, known),)
    return ()


def _observation(
    world: World, threat: ThreatModel, round_number: int, before: State, uploads: Sequence[Upload], heard: State
) -> Observation:
    """One upload, or the sum of several as the server averages them."""
    plans = [world.plans[upload.client] for upload in uploads]
    settings = [public_settings(world.experiment, world.dataset, plan) for plan in plans]
    mechanism_known = Access.MECHANISM in threat.grants
    return Observation(
        round=round_number,
        client=uploads[0].client if len(uploads) == 1 else 0,
        parameters=before.parameters,
        upload=heard.parameters,
        settings=replace(
            settings[0],
            batch_size=settings[0].batch_size if Access.BATCH_SIZE in threat.grants else None,
            local_steps=round(fmean(known.local_steps for known in settings)),
            client_examples=round(fmean(known.client_examples for known in settings)),
            mechanism=_mechanism(world, threat, round_number, uploads, settings[0]) if mechanism_known else _UNKNOWN,
            clients=len(uploads),
            draws=settings[0].draws if mechanism_known else 0,
        ),
        redistribution=plans[0].redistribution if mechanism_known else None,
        labels=_labels(world, round_number, uploads) if Access.LABELS in threat.grants else None,
    )


def _mechanism(
    world: World, threat: ThreatModel, round_number: int, uploads: Sequence[Upload], known: PublicSettings
) -> dict[str, object]:
    """The mechanism as this adversary meets it: central noise on a mean is as if each upload had its share of it."""
    plan = world.plans[uploads[0].client]
    config = plan.config
    if config.noise_at != "server" or threat.name != OUTSIDER:
        return dict(known.mechanism)
    clients = len(uploads)
    deviation = config.noise_on_mean(clients, noise_divisor(world.experiment, world.plans)) * math.sqrt(clients)
    deviation *= math.hypot(*plan.noise_factors[:round_number])  # of one round by itself
    return as_normal(config, deviation * (1 if plan.is_whole else plan.sampling.batch_size))


def _labels(world: World, round_number: int, uploads: Sequence[Upload]) -> tuple[int, ...]:
    """The labels behind the uploads, in ascending order: the order of a batch is nobody's to know."""
    rows = [world.uploaded_rows(upload.client, round_number) for upload in uploads]
    dataset = world.dataset
    return tuple(sorted(int(label) for part in rows for label in dataset.kinds(dataset.y_train[part])))


def public_settings(experiment: Experiment, dataset: Dataset, plan: Plan) -> PublicSettings:
    """What everybody may know of a client's work (Kerckhoffs: the mechanism and its parameters included)."""
    algorithm = experiment.federation.algorithm
    if not algorithm_of(experiment).trains_in_steps:
        raise ValueError(f"under {algorithm} clients upload no gradients and no changes by steps of training")
    texts = dataset.text
    return PublicSettings(
        model=experiment.model.decisive(),
        shape=dataset.shape,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        algorithm=algorithm,
        batch_size=plan.sampling.batch_size,
        local_steps=plan.steps_per_round,
        learning_rate=experiment.training.learning_rate,
        optimizer=experiment.training.optimizer,
        momentum=experiment.training.momentum,
        client_examples=plan.sampling.examples,
        mechanism=plan.config.model_dump(mode="json", exclude_none=True),
        columns=dataset.columns,
        draws=plan.least_draws,
        text=None
        if texts is None
        else TextFormat(texts.tokenizer.size, texts.task, texts.packed, texts.mark, texts.until_mark),
    )
