"""Membership inference on the folder of an earlier run: who was in the training data, told from its models."""

from fedpriv.attacks.epsilon import is_gaussian
from fedpriv.attacks.membership.attacks import ATTACKS, write_scores, write_signals
from fedpriv.attacks.membership.game import (
    canaries_in_references,
    draw_references,
    make_attacks,
    membership_signals,
)
from fedpriv.attacks.membership.records import Membership
from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.attacks.pairs import draw_candidates
from fedpriv.attacks.references import build_pool
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.errors import InputError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, final_checkpoint, final_state, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.records import RoundRecord
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.gradients import Vector

_GAME = (
    "Candidates: as many members, drawn from all clients' data, as test images. References: the same training on the "
    "same data, but for each pair of candidates a coin decides which of the two is in. The adversary knows all other "
    "examples. The bound on epsilon is of the first reference, whose coins are independent; attacks are on the run."
)


def audit_run(folder: RunFolder, references: int, pairs: int, progress: Progress) -> Membership:
    """Attack the membership in a run's training data. It returns what is written to membership.json."""
    if references < 6 or references % 2:
        raise InputError(key="--references", given=references, allowed="expected an even number from 6")
    summary = completed_summary(folder)
    proven = summary.ledger
    experiment = folder.experiment()
    if reason := algorithm_of(experiment).not_audited:
        raise InputError(f"{folder.path}: {reason}")
    if experiment.data.overlaps:
        raise InputError(
            f"{folder.path}: audit asks whether an example was in the training data by leaving out the only client's "
            "that holds it, and under data.partition = 'overlapping' others hold copies"
        )
    world = finished_world(folder, experiment)
    records = [record for record in folder.rounds() if record.used]
    target = _models(folder, world, records)
    candidates = draw_candidates(world, pairs, experiment.seed)
    drawn, inside = draw_references(world, candidates, references, experiment.seed)
    schedule = {record.round: record.used for record in records if record.round <= max(target)}
    progress.stage(f"training {references} reference models")
    with cpu_threads(experiment.engine.threads):
        signals = membership_signals(world, build_pool(world), target, candidates, drawn, inside, schedule, progress)
    # Which attack the canaries are guessed by, and which bound, is settled before any score of theirs is seen.
    attack = "lira-rounds" if len(target) > 1 else "lira-online"
    bound = canaries_in_references(signals, attack, experiment.mechanism.delta, is_gaussian(experiment))
    scores = {name: attack(signals) for name, attack in ATTACKS.items()}
    comparable = proven is not None and proven.replaces
    membership = Membership(
        game=_GAME,
        references=references,
        rounds=tuple(sorted(target)),
        attacks=make_attacks(scores, candidates.truth, experiment.seed),
        epsilon_bound=bound,
        proven_epsilon=proven.epsilon if proven is not None and comparable else None,
        proven_adjacency=None if proven is None else proven.adjacency,
    )
    with writing():
        (folder.path / "membership").mkdir(exist_ok=True)
        write_signals(folder.path / "membership" / "signals.npz", signals)
        write_scores(folder.path / "membership" / "scores.npz", scores, candidates.truth)
        folder.write(membership)
        folder.write_summary(summary.with_found({"membership": membership}))
    refuse_exceeded([membership.figure])
    return membership


def _models(folder: RunFolder, world: World, records: list[RoundRecord]) -> dict[int, Vector]:
    """Round -> the global model after it: the final one, and those that were heard before later rounds."""
    checkpoint = final_checkpoint(folder, "audit")
    done = [record.round for record in records if record.round <= checkpoint.round]
    if not done:
        raise InputError(f"{folder.path} holds no model after a round: there is nothing to audit")
    return {**_heard(folder, records, done), done[-1]: final_state(folder, world, "audit").parameters}


def _heard(folder: RunFolder, records: list[RoundRecord], done: list[int]) -> dict[int, Vector]:
    """The models that the adversary saw clients start from; parameters of an active server's making are no model."""
    crafted = {(record.round, client) for record in records for client in record.crafted}
    models: dict[int, Vector] = {}
    for path in list_observations(folder.observations):
        observation = read_observation(path)
        before = [number for number in done if number < observation.round]
        if before and (observation.round, observation.client) not in crafted:
            models[before[-1]] = dict(observation.parameters)
    return models
