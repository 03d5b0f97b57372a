"""The attack stage: what the tap heard goes to the attacks, what they return to the referee, and all of it is written.

The adversary gets observations and public settings. What knows the truth is in :mod:`fedpriv.lab.victims` and in the
referee, and nothing of it flows back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpriv.attacks.access import Access
from fedpriv.attacks.baselines import Guess, guesses, recovery_chance
from fedpriv.attacks.campaign import Campaign, trouble
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import (
    AttackJob,
    AttackRefused,
    Heard,
    OtherBatches,
    Reconstruction,
    best_decisions,
    other_batches,
    stackable,
)
from fedpriv.attacks.referee import missed, score, score_guesses
from fedpriv.attacks.simulation import Mismatch, SimulationCheck, simulated_images
from fedpriv.attacks.texts.referee import exact_chance, sentence_guesses
from fedpriv.attacks.threat import ThreatModel, threat_model
from fedpriv.attacks.truth import Scores, Truth
from fedpriv.core.columns import worded
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import torch_stream
from fedpriv.core.records import Score
from fedpriv.core.registry import ATTACKS
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.data.datasets import unit_scale
from fedpriv.lab.attack_on_ray import attack_on_ray
from fedpriv.lab.attack_pictures import save_pictures, save_shared
from fedpriv.lab.leakage import Leakage, Refusal
from fedpriv.lab.random_uploads import simulation_check
from fedpriv.lab.rates import is_above_guess, leakage_rates, recovery_rates
from fedpriv.lab.victims import (
    Target,
    approximation,
    candidates,
    chosen,
    read_target,
    surplus,
    targets,
    truth,
    without_mechanism,
)
from fedpriv.server.released import rounds_by_client

PROTECTED, UNPROTECTED = "protected", "unprotected"


@dataclass(frozen=True)
class PlannedAttack:
    """One attack that will be made.

    Attributes:
        name: in the table of attacks.
        label: how scores and pictures name it: the name, and the settings in which it differs from the run's.
        config: its settings.
    """

    name: str
    label: str
    config: Any


@dataclass(frozen=True, eq=False)
class _Heard:
    """One observation, and what only the referee may know of it.

    ``more``: other uploads of the same examples. ``stacked``: uploads of other batches of the client's, this one first;
    the truth is then all images that are in any of them.
    """

    target: Target
    kind: str
    observation: Observation
    truth: Truth
    more: tuple[Observation, ...] = ()
    stacked: tuple["_Heard", ...] = ()

    @property
    def uploads(self) -> Heard:
        """What an attack is given: one upload, several of the same examples, or several of other batches."""
        if self.stacked:
            return OtherBatches(tuple(member.observation for member in self.stacked))
        return (self.observation, *self.more) if self.more else self.observation

    @property
    def targets(self) -> tuple[Target, ...]:
        """What is attacked with it."""
        return tuple(member.target for member in self.stacked) or (self.target,)


def planned_attacks(world: World) -> tuple[PlannedAttack, ...]:
    """Return the attacks that the settings name."""
    adversary = world.experiment.adversary
    return tuple(PlannedAttack(name, name, adversary.settings(name)) for name in adversary.attacks)


def attack_observations(
    world: World,
    folder: RunFolder,
    attacks: Sequence[PlannedAttack],
    progress: Progress,
    victims: Sequence[str] = (),
) -> Leakage:
    """Attack what was heard, score the results, and add scores and pictures to those of the folder."""
    with cpu_threads(world.experiment.engine.threads):
        return _attack_observations(world, folder, attacks, progress, victims)


def _attack_observations(
    world: World, folder: RunFolder, attacks: Sequence[PlannedAttack], progress: Progress, victims: Sequence[str]
) -> Leakage:
    recorded = targets(world, folder)
    wanted = chosen(recorded, victims)
    threat = threat_model(world.experiment.adversary, world.dataset.kind)
    progress.stage(threat.describe())
    allowed, leakage = _allowed(attacks, threat)
    wanted = tuple(target for target in wanted if any(_suits(attack, target) for attack in allowed))
    for name in surplus(folder, recorded):
        leakage = leakage.refused(
            Refusal(f"observation {name} is left out: the settings do not account for it"), progress
        )
    heard, leakage = _heard(world, folder, wanted, threat, leakage, progress) if allowed else ([], leakage)
    check = simulation_check(world)
    heard, leakage = _with_best_decisions(world, check, heard, leakage, progress)
    stacks: list[_Heard] = []
    if world.experiment.adversary.join_uploads:
        stacks = _stacked(heard) if any(ATTACKS[attack.name].stacks for attack in allowed) else []
        heard, leakage = _joined(heard, leakage, progress)
    # The test images are public in this laboratory; no client has any of them.
    images = unit_scale(world.dataset.x_test)
    columns, kind = world.dataset.columns, world.dataset.kind
    tokenizer = None if world.dataset.text is None else world.dataset.text.tokenizer
    public = _guesses(world, images, threat)
    known = images if Access.PUBLIC_DATA in threat.grants else None
    attacked: dict[Target, _Heard] = {}
    silent: list[Score] = []
    void: set[tuple[str, str, int, int]] = set()  # of which there is no result, whatever an earlier attack has written
    for attack in allowed if heard else ():
        suited = [upload for upload in heard if _suits(attack, upload.target)]
        if ATTACKS[attack.name].stacks:
            suited = _with_stacks(suited, stacks)
        if not suited:
            made = "made for it" if ATTACKS[attack.name].active() else "those of the model"
            text = f"it needs uploads of parameters that are {made}, and none of those was heard"
            leakage = leakage.refused(Refusal(text, attack.label), progress)
        doubts = _doubts(world, check, attack, suited)
        campaign = _campaign(world, attack, suited, doubts, known, progress)
        scored = {
            number: _scored(world, attack, suited[number], result, public) for number, result in campaign.found.items()
        }
        campaign = _without_failures(world, suited, doubts, campaign, scored, public)
        for number in doubts.keys() - campaign.found.keys():
            target = suited[number].target
            void |= {(attack.label, suited[number].kind, target.round, client) for client in target.clients}
        for number in campaign.found:
            upload = suited[number]
            attacked |= dict.fromkeys(upload.targets, upload)
            leakage = leakage.plus(scored[number])
            save_pictures(folder, f"{attack.label}-{upload.kind}", upload.truth, scored[number].pictures)
        if campaign.found:
            picked = any(result.picked for result in campaign.found.values())
            for number, upload in enumerate(suited):
                if number in campaign.found or number not in doubts:
                    lines = scored[number].scores if number in campaign.found else ()
                    silent += missed(upload.truth, attack.label, upload.kind, lines, picked=picked)
            spent = sum(result.seconds for result in campaign.found.values())
            leakage = replace(leakage, seconds={**leakage.seconds, attack.label: spent})
        for refusal in _failures(attack, suited, campaign, kind):
            leakage = leakage.refused(refusal, progress)
        if campaign.tracebacks:
            texts = dict.fromkeys(campaign.tracebacks.values())
            folder.write_text(f"reconstructions/{attack.label}-traceback.txt", "\n".join(texts))
    progress.stage("scoring and writing the report")
    for upload in {id(upload): upload for upload in attacked.values()}.values():
        guessed = score_guesses(public, upload.truth, world.dataset.std)
        leakage = leakage.plus(guessed)
        save_pictures(folder, "original", upload.truth, dict(enumerate(upload.truth.images)))
        save_pictures(folder, "guess-class", upload.truth, guessed.pictures)
    for guess in public:
        save_shared(folder, guess.name, guess.image, columns, tokenizer)
    unread = len({upload.target for upload in heard} - attacked.keys())
    scores = _merged([line for line in folder.scores() if _source(line) not in void], leakage.scores)
    folder.write_scores(scores)
    rates = leakage_rates(world, (*scores, *silent))
    if any(rate.ceiling is not None for rate in rates):
        rates += recovery_rates(world, (*scores, *silent), _recovery_chance(world, images, public))
    return replace(leakage, scores=scores, unattacked=leakage.unattacked + unread, rates=rates)


def _guesses(world: World, images: Tensor, threat: ThreatModel) -> tuple[Guess, ...]:
    """What is offered by whoever never saw an upload, made of public examples."""
    if world.dataset.text is not None:
        return sentence_guesses(images)
    told = world.dataset.y_test if Access.LABELS in threat.grants else None
    return guesses(images, told, world.dataset.classes, world.dataset.columns)


def _recovery_chance(world: World, images: Tensor, public: Sequence[Guess]) -> float:
    """How often such a guess counts as a recovered example, estimated on public ones."""
    if world.dataset.text is not None:
        return exact_chance(images, public)
    return recovery_chance(images, public, world.experiment.adversary.success_ssim, world.dataset.columns)


def _allowed(attacks: Sequence[PlannedAttack], threat: ThreatModel) -> tuple[list[PlannedAttack], Leakage]:
    """The attacks that the threat model gives what they need; of the others the user was told before."""
    reasons = {attack: threat.refusal(attack.name, ATTACKS[attack.name].needs) for attack in attacks}
    refusals = tuple(Refusal(reason, attack.name) for attack, reason in reasons.items() if reason)
    return [attack for attack in attacks if reasons[attack] is None], Leakage(refusals=refusals)


def _suits(attack: PlannedAttack, target: Target) -> bool:
    """Whether the clients were sent what the attack builds on: the model itself, or parameters made for it."""
    return bool(ATTACKS[attack.name].active()) == target.crafted


def _heard(
    world: World,
    folder: RunFolder,
    wanted: Sequence[Target],
    threat: ThreatModel,
    leakage: Leakage,
    progress: Progress,
) -> tuple[list[_Heard], Leakage]:
    """Read what was heard and rebuild what was in it; what is damaged or missing is named and left out."""
    heard: list[_Heard] = []
    asked = rounds_by_client(folder.asked())
    empty = damaged = 0
    for target in wanted:
        known = truth(world, target, asked)
        if len(known.images) == 0:
            empty += 1
            continue
        try:
            observation = read_target(world, folder, target)
        except InputError as error:
            damaged += 1
            leakage = leakage.refused(Refusal(f"{target.title} is left out: {error}"), progress)
            continue
        if Access.CANDIDATES in threat.grants:
            known = replace(known, candidates=candidates(world, target, known))
            observation = replace(observation, candidates=known.candidates)
            if known.candidates is None:
                kind = world.dataset.kind
                text = f"two of its {kind}s are the same, or there are no others, so there are no lists to pick from"
                leakage = leakage.refused(Refusal(f"{target.title}: {text}"), progress)
        heard += [_Heard(target, kind, part, known) for kind, part in _uploads(world, observation, target).items()]
    if empty:
        text = f"{empty} attacked upload(s) held no example (Poisson sampling): there is nothing to recover"
        leakage = leakage.refused(Refusal(text), progress)
    return heard, replace(leakage, unattacked=damaged)


def _joined(heard: Sequence[_Heard], leakage: Leakage, progress: Progress) -> tuple[list[_Heard], Leakage]:
    """Put together each client's uploads of the same examples; where they are of others, say so and leave them."""
    groups = _groups(heard)
    if all(len(members) == 1 for members in groups.values()):
        return list(heard), leakage.refused(
            Refusal("adversary.join_uploads: no client was heard more than once"), progress
        )
    reasons = {
        key: other_batches([upload.observation for upload in members]) if len(members) > 1 else None
        for key, members in groups.items()
    }
    for reason in dict.fromkeys(reason for reason in reasons.values() if reason is not None):
        leakage = leakage.refused(Refusal(f"adversary.join_uploads: {reason}"), progress)
    joined: list[_Heard] = []
    for key, members in groups.items():
        if reasons[key] is None:
            # All that was heard of the images up to the last of these rounds.
            known = replace(members[0].truth, releases=members[-1].truth.releases, optima=None)
            members = [replace(members[0], truth=known, more=tuple(upload.observation for upload in members[1:]))]
        joined += members
    return joined, leakage


def _groups(heard: Sequence[_Heard]) -> dict[tuple[tuple[int, ...], str, bool], list[_Heard]]:
    """What was heard of the same clients, in the same way."""
    groups: dict[tuple[tuple[int, ...], str, bool], list[_Heard]] = {}
    for upload in heard:
        groups.setdefault((upload.target.clients, upload.kind, upload.target.crafted), []).append(upload)
    return groups


def _stacked(heard: Sequence[_Heard]) -> list[_Heard]:
    """Each client's uploads of other batches, as one."""
    groups = [members for members in _groups(heard).values() if stackable([member.observation for member in members])]
    return [replace(members[0], truth=_union(members), stacked=tuple(members)) for members in groups]


def _union(members: Sequence[_Heard]) -> Truth:
    """All images that are in any of the uploads, each once, as of the last upload that it is in; numbered anew."""
    truths = [member.truth for member in members]
    images, labels, used_labels = (
        torch.cat([getattr(each, name) for each in truths]) for name in ("images", "labels", "used")
    )
    used = [count for each in truths for count in each.releases or ()]
    rows = list({image.cpu().numpy().tobytes(): number for number, image in enumerate(images)}.values())
    releases = tuple(used[row] for row in rows) if len(used) == len(images) else None
    joined = replace(truths[0], images=images[rows], labels=labels[rows], used_labels=used_labels[rows])
    return replace(joined, owners=None, releases=releases, optima=None)


def _with_stacks(heard: Sequence[_Heard], stacks: Sequence[_Heard]) -> list[_Heard]:
    """Stacks in place of the uploads that are in them."""
    inside = {(target, stack.kind) for stack in stacks for target in stack.targets}
    return [*(upload for upload in heard if (upload.target, upload.kind) not in inside), *stacks]


def _uploads(world: World, observation: Observation, target: Target) -> dict[str, Observation]:
    """What was sent, and what would have been sent without the mechanism, which only the laboratory can compute."""
    if world.experiment.hears_masked:
        # What would be heard without the mechanism is masked as well, and says as little.
        return {PROTECTED: observation}
    if not world.experiment.mechanism.protects:
        return {UNPROTECTED: observation}
    kinds = {PROTECTED: observation}
    if world.experiment.adversary.counterfactual:
        kinds[UNPROTECTED] = without_mechanism(world, observation, target)
    return kinds


def _with_best_decisions(
    world: World, check: SimulationCheck, heard: Sequence[_Heard], leakage: Leakage, progress: Progress
) -> tuple[list[_Heard], Leakage]:
    """Have the referee know how often the best decision among the candidates of each protected upload is right."""
    protected = [upload for upload in heard if upload.kind == PROTECTED]
    wanted = world.experiment.adversary.best_decision and world.dataset.text is None
    if not wanted or not world.experiment.mechanism.protects or not protected:
        return list(heard), leakage
    progress.stage("computing the best decision among the candidates")
    known = {}
    for upload in protected:
        truth = upload.truth
        # In a batch, what is best for one answer an image is no limit for attacks that show pictures in any order.
        listed = truth.candidates
        if listed is None and len(truth.images) == 1:
            listed = candidates(world, upload.target, truth)
        if listed is None:
            continue
        doubt = check.mismatch(simulated_images, upload.observation)
        if doubt is not None:
            # What is best follows from how clients compute, as attacks simulate it.
            return list(heard), leakage.refused(Refusal(f"best decision: not computed: {doubt.reason}"), progress)
        about = world.model, upload.observation, listed, truth.images, truth.used, world.experiment.seed
        try:
            optima = best_decisions(*about, labels_known=truth.labels_known)
        except AttackRefused as error:
            return list(heard), leakage.refused(Refusal(f"best decision: {error}"), progress)
        known[upload.target] = replace(truth, optima=tuple(optima))
    told = [
        replace(upload, truth=known[upload.target]) if upload.kind == PROTECTED and upload.target in known else upload
        for upload in heard
    ]
    return told, leakage


def _doubts(
    world: World, check: SimulationCheck, attack: PlannedAttack, heard: Sequence[_Heard]
) -> dict[int, Mismatch]:
    """Uploads, by their number, on which a failure of the attack would show nothing, and why."""
    found = {
        number: check.mismatch(ATTACKS[attack.name].simulation(), upload.uploads)
        for number, upload in enumerate(heard)
        if trouble(upload.uploads, world.model) is None
    }
    return {number: mismatch for number, mismatch in found.items() if mismatch is not None}


def _campaign(
    world: World,
    attack: PlannedAttack,
    heard: Sequence[_Heard],
    doubts: Mapping[int, Mismatch],
    public_images: Tensor | None,
    progress: Progress,
) -> Campaign:
    """Run one attack on all uploads that it can simulate, as one batch or spread over Ray tasks."""
    barred = {number: doubt for number, doubt in doubts.items() if doubt.bars(ATTACKS[attack.name])}
    numbers = [number for number in range(len(heard)) if number not in barred]
    observations = [heard[number].uploads for number in numbers]
    seed = torch_stream(world.experiment.seed, "adversary").initial_seed()
    listener = partial(progress.attack_advanced, attack.label)
    job = AttackJob(attack.name, observations, world.model, attack.config, seed, listener, public_images=public_images)
    made = attack_on_ray(world.experiment.engine, job)
    return Campaign(
        {numbers[place]: result for place, result in made.found.items()},
        {numbers[place]: reason for place, reason in made.failures.items()}
        | {number: doubt.text for number, doubt in barred.items()},
        {numbers[place]: text for place, text in made.tracebacks.items()}
        | {number: doubt.traceback for number, doubt in barred.items() if doubt.traceback},
        frozenset(barred),
    )


def _scored(
    world: World, attack: PlannedAttack, upload: _Heard, result: Reconstruction, public: Sequence[Guess]
) -> Scores:
    """Have the referee compare a result with the truth."""
    note = "; ".join(text for text in (result.note, approximation(world, upload.target)) if text)
    result = replace(result, attack=attack.label, note=worded(note, world.dataset.kind))
    threshold = world.experiment.adversary.success_ssim
    return score(result, upload.kind, upload.truth, public, world.dataset.std, threshold)


def _without_failures(
    world: World,
    heard: Sequence[_Heard],
    doubts: Mapping[int, Mismatch],
    campaign: Campaign,
    scored: Mapping[int, Scores],
    public: Sequence[Guess],
) -> Campaign:
    """Leave out results that are failures, where the attack could not simulate the client: they are no measurement."""
    void: set[int] = set()
    for kind in (PROTECTED, UNPROTECTED):
        doubted = [number for number in campaign.found if number in doubts and heard[number].kind == kind]
        lines = [line for number in doubted for line in scored[number].scores if line.chosen]
        guessed = [
            line
            for number in doubted
            for line in score_guesses(public, heard[number].truth, world.dataset.std, perceptual=False).scores
        ]
        if doubted and not is_above_guess(leakage_rates(world, lines), lines, guessed):
            void |= set(doubted)
    found = {number: result for number, result in campaign.found.items() if number not in void}
    return replace(
        campaign,
        found=found,
        failures={**campaign.failures, **{number: doubts[number].of_failure for number in sorted(void)}},
        void=campaign.void | void,
    )


def _failures(attack: PlannedAttack, heard: Sequence[_Heard], campaign: Campaign, kind: str) -> list[Refusal]:
    """One for each upload that the attack failed on; one for all, where all failed for the same reason.

    ``kind``: of the examples.
    """
    reasons = {number: worded(reason, kind) for number, reason in campaign.failures.items()}
    if not campaign.found and len(set(reasons.values())) == 1:
        return [Refusal(next(iter(reasons.values())), attack.label, void=bool(campaign.void))]
    refusals: list[Refusal] = []
    for number, reason in reasons.items():
        upload, void = heard[number].kind, number in campaign.void
        alike = {reasons.get(other) for other, each in enumerate(heard) if each.kind == upload}
        # What holds for the network holds for all uploads, and is said once.
        where = "" if void and alike == {reason} else heard[number].target.title
        refusals.append(Refusal(reason, attack.label, upload, where, void))
    return list(dict.fromkeys(refusals))


def _merged(before: Sequence[Score], new: Sequence[Score]) -> tuple[Score, ...]:
    """Earlier scores, with those of images that the same attack was made on again replaced; guesses come last."""
    again = {_about(score) for score in new}
    scores = [*(score for score in before if _about(score) not in again), *new]
    groups = list(dict.fromkeys((score.attack, score.upload) for score in (*before, *new)))
    return tuple(sorted(scores, key=lambda score: (score.upload == "none", groups.index((score.attack, score.upload)))))


def _source(score: Score) -> tuple[str, str, int, int]:
    return score.attack, score.upload, score.round, score.client


def _about(score: Score) -> tuple[str, str, int, int, int]:
    return score.attack, score.upload, score.round, score.client, score.image
