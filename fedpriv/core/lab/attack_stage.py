"""The attack stage: observations go to the attacks, reconstructions to the referee, and scores into the run's folder.

The adversary gets observations and public settings. What knows the truth is in :mod:`fedpriv.core.lab.victims` and in
the referee, and nothing of it flows back.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedpriv.attacks.campaign import AttackOutcome, Campaign, attack_each, trouble
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
from fedpriv.attacks.referee import Scores, Truth, bare, guessed_by_chance, missed, public_guesses, score, score_guesses
from fedpriv.attacks.settings import Access
from fedpriv.attacks.simulation import Mismatch, simulated_images
from fedpriv.attacks.threat import threat_model
from fedpriv.core.asked_log import rounds_by_client
from fedpriv.core.columns import ColumnSpec, cell_texts, worded
from fedpriv.core.config import EngineConfig
from fedpriv.core.errors import InputError
from fedpriv.core.finding import png
from fedpriv.core.lab.preflight import simulation_check
from fedpriv.core.lab.results import is_above_guess, leakage_rates, recovery_rates
from fedpriv.core.lab.victims import (
    UploadTarget,
    approximation,
    candidates,
    chosen,
    read_target,
    surplus,
    targets,
    truth,
    without_mechanism,
)
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import torch_stream
from fedpriv.core.records import LeakageRate, Score
from fedpriv.core.registry import ATTACKS
from fedpriv.core.runs import RunFolder, picture_name
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.data.datasets import unit_scale
from fedpriv.data.tokenizers import Tokenizer
from fedpriv.engines.tasks import RayResources, TaskEnded, run_tasks
from fedpriv.gradients.calls import copied

PROTECTED, UNPROTECTED = "protected", "unprotected"


@dataclass(frozen=True)
class Refusal:
    """What was not attacked, and why."""

    reason: str  # in one line
    attack: str = ""  # as its scores name it; empty: this is about uploads, whatever attacks them
    upload: str = ""  # protected or unprotected; empty: both
    where: str = ""  # the single upload, in words; empty: all of that kind
    void: bool = False  # whether the attack simulates the client wrongly, so that its failure shows nothing

    def __str__(self) -> str:
        if not self.attack:
            return self.reason
        return f"{', '.join(filter(None, (f'attack {self.attack} refused', self.where, self.upload)))}: {self.reason}"


@dataclass(frozen=True)
class Leakage:
    """What the attack stage found."""

    # one for each victim image, attack, kind of upload and restart, and for each guess; those that were in the folder
    # before included
    scores: tuple[Score, ...] = ()
    lpips_reason: str | None = None  # why there is no LPIPS; `None` where it was computed
    refusals: tuple[Refusal, ...] = ()  # what could not be attacked, and why
    unattacked: int = 0  # how many of the uploads that were heard no attack could work on
    # how often attacks succeeded, between guess and ceiling; of all that is in the folder
    rates: tuple[LeakageRate, ...] = ()
    # attack, as its scores name it -> the wall time that it took now, for all uploads. It is not in the scores, which
    # are the same whenever the same attacks are made.
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def refused_words(self) -> tuple[str, ...]:
        """The refusals as the summary has them."""
        return tuple(map(str, self.refusals))


@dataclass(frozen=True)
class PlannedAttack:
    """One attack that will be made."""

    name: str  # in the table of attacks
    label: str  # how scores and pictures name it: the name, and the settings in which it differs from the run's
    config: Any  # its settings


@dataclass(frozen=True, eq=False)
class _KnownUpload:
    """One observation, and what only the referee may know of it; ``stacked``: uploads of the client's other batches."""

    target: UploadTarget
    kind: str
    observation: Observation
    truth: Truth
    more: tuple[Observation, ...] = ()
    stacked: tuple["_KnownUpload", ...] = ()

    @property
    def uploads(self) -> Heard:
        """What an attack is given: one upload, several of the same examples, or several of other batches."""
        if self.stacked:
            return OtherBatches(tuple(member.observation for member in self.stacked))
        return (self.observation, *self.more) if self.more else self.observation

    @property
    def targets(self) -> tuple[UploadTarget, ...]:
        """What is attacked with it."""
        return tuple(member.target for member in self.stacked) or (self.target,)


@dataclass(frozen=True, eq=False)
class _Attempt:
    """One attack on one upload, and what came of it."""

    upload: _KnownUpload
    doubt: Mismatch | None  # why a failure would show nothing; `None`: it counts
    outcome: AttackOutcome
    scores: Scores | None  # of the result; `None`: there is none
    void: bool = False  # whether there is none because the attack simulates the client wrongly

    def voided(self) -> "_Attempt":
        """Return this without its scores, if a failure would show nothing."""
        if self.doubt is None or self.scores is None:
            return self
        return replace(self, outcome=AttackOutcome(None, self.doubt.of_failure), scores=None, void=True)


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
    """Attack the observations, score the results, and add scores and pictures to those of the folder."""
    with cpu_threads(world.experiment.engine.threads):
        stage = _Stage(world, folder, progress)
        heard = stage.observed(attacks, victims)
        for attack in stage.allowed if heard else ():
            stage.attack(attack, heard)
        return stage.finish(heard)


class _Stage:
    """One pass of attacks over a run's observations; it collects what came of them."""

    def __init__(self, world: World, folder: RunFolder, progress: Progress) -> None:
        self.world, self.folder, self.progress = world, folder, progress
        self.threat = threat_model(world.experiment.adversary, world.dataset.kind)
        self.check = simulation_check(world)
        # The test images are public in this laboratory; no client has any of them.
        self.images = unit_scale(world.dataset.x_test)
        told = world.dataset.y_test if Access.LABELS in self.threat.grants else None
        # Made of public examples, without any upload.
        self.guesses = public_guesses(self.images, told, world.dataset.classes, world.dataset.columns)
        self.allowed: list[PlannedAttack] = []
        self.stacks: list[_KnownUpload] = []
        self.attacked: dict[UploadTarget, _KnownUpload] = {}
        self.scored: list[Scores] = []
        self.silent: list[Score] = []
        # Of these there is no result, whatever an earlier attack has written.
        self.void: set[tuple[str, str, int, int]] = set()
        self.refusals: list[Refusal] = []
        self.damaged = 0
        self.seconds: dict[str, float] = {}

    def refuse(self, refusal: Refusal) -> None:
        """Note what cannot be attacked, and say so."""
        self.progress.warn(str(refusal))
        self.refusals.append(refusal)

    def observed(self, attacks: Sequence[PlannedAttack], victims: Sequence[str]) -> list[_KnownUpload]:
        """Read what is to be attacked, and rebuild what was in it."""
        recorded = targets(self.world, self.folder)
        wanted = chosen(recorded, victims)
        self.progress.stage(self.threat.describe())
        reasons = {attack: self.threat.refusal(attack.name, ATTACKS[attack.name].needs) for attack in attacks}
        # Of these the user was warned before.
        self.refusals += [Refusal(reason, attack.name) for attack, reason in reasons.items() if reason]
        self.allowed = [attack for attack in attacks if reasons[attack] is None]
        wanted = tuple(target for target in wanted if any(_suits(attack, target) for attack in self.allowed))
        for name in surplus(self.folder, recorded):
            self.refuse(Refusal(f"observation {name} is left out: the settings do not account for it"))
        heard = self._with_best_decisions(self._read(wanted) if self.allowed else [])
        if not self.world.experiment.adversary.join_uploads:
            return heard
        self.stacks = _stacked(heard) if any(ATTACKS[attack.name].stacks for attack in self.allowed) else []
        return self._joined(heard)

    def attack(self, attack: PlannedAttack, heard: Sequence[_KnownUpload]) -> None:
        """Make one attack on all uploads that suit it, and have the referee score the results."""
        suited = [upload for upload in heard if _suits(attack, upload.target)]
        if ATTACKS[attack.name].stacks:
            suited = _with_stacks(suited, self.stacks)
        if not suited:
            made = "made for it" if ATTACKS[attack.name].active() else "those of the model"
            text = f"it needs uploads of parameters that are {made}, and none of those was observed"
            self.refuse(Refusal(text, attack.label))
        attempts = self._without_failures(self._attempts(attack, suited))
        scored = [(attempt.upload, attempt.scores) for attempt in attempts if attempt.scores is not None]
        for upload, scores in scored:
            self.attacked |= dict.fromkeys(upload.targets, upload)
            self.scored.append(scores)
            save_pictures(self.folder, f"{attack.label}-{upload.kind}", upload.truth, scores.pictures)
        if scored:
            results = [attempt.outcome.result for attempt in attempts if attempt.outcome.result is not None]
            self.silent += _misses(attack, attempts, picked=any(result.picked for result in results))
            self.seconds[attack.label] = sum(result.seconds for result in results)
        for attempt in attempts:
            if attempt.scores is None and attempt.doubt is not None:
                target = attempt.upload.target
                self.void |= {(attack.label, attempt.upload.kind, target.round, client) for client in target.clients}
        for refusal in _failures(attack, attempts, self.world.dataset.kind):
            self.refuse(refusal)
        tracebacks = dict.fromkeys(attempt.outcome.traceback for attempt in attempts if attempt.outcome.traceback)
        if tracebacks:
            self.folder.write_text(f"reconstructions/{attack.label}-traceback.txt", "\n".join(tracebacks))

    def _attempts(self, attack: PlannedAttack, suited: Sequence[_KnownUpload]) -> list[_Attempt]:
        """Make one attack on all uploads that it can simulate, as one batch or spread over Ray tasks."""
        world, kind = self.world, ATTACKS[attack.name]
        doubts = [self._doubt(attack, upload) for upload in suited]
        pairs = list(zip(suited, doubts, strict=True))
        observations = [upload.uploads for upload, doubt in pairs if doubt is None or not doubt.bars(kind)]
        seed = torch_stream(world.experiment.seed, "adversary").initial_seed()
        listener = partial(self.progress.attack_advanced, attack.label)
        known = self.images if Access.PUBLIC_DATA in self.threat.grants else None
        job = AttackJob(attack.name, observations, world.model, attack.config, seed, listener, public_images=known)
        outcomes = iter(attack_on_ray(world.experiment.engine, job).outcomes)
        attempts = []
        for upload, doubt in pairs:
            if doubt is not None and doubt.bars(kind):
                outcome = AttackOutcome(None, doubt.text, doubt.traceback)
                attempts.append(_Attempt(upload, doubt, outcome, None, void=True))
            else:
                outcome = next(outcomes)
                scores = None if outcome.result is None else self._scored(attack, upload, outcome.result)
                attempts.append(_Attempt(upload, doubt, outcome, scores))
        return attempts

    def _doubt(self, attack: PlannedAttack, upload: _KnownUpload) -> Mismatch | None:
        """Why a failure of the attack on this upload would show nothing; ``None``: it would count."""
        if trouble(upload.uploads, self.world.model) is not None:
            return None
        return self.check.mismatch(ATTACKS[attack.name].simulation(), upload.uploads)

    def _scored(self, attack: PlannedAttack, upload: _KnownUpload, result: Reconstruction) -> Scores:
        """Have the referee compare a result with the truth."""
        note = "; ".join(text for text in (result.note, approximation(self.world, upload.target)) if text)
        result = replace(result, attack=attack.label, note=worded(note, self.world.dataset.kind))
        threshold = self.world.experiment.adversary.success_ssim
        std, padded = self.world.dataset.std, self.world.experiment.report.pads
        return score(result, upload.kind, upload.truth, self.guesses, std, threshold, padded=padded)

    def _without_failures(self, attempts: Sequence[_Attempt]) -> list[_Attempt]:
        """Void results that are failures, where the attack could not simulate the client: they are no measurement."""
        failed = [kind for kind in (PROTECTED, UNPROTECTED) if self._is_failure(attempts, kind)]
        return [attempt.voided() if attempt.upload.kind in failed else attempt for attempt in attempts]

    def _is_failure(self, attempts: Sequence[_Attempt], kind: str) -> bool:
        """Whether what attacks that simulate the client wrongly found in uploads of one kind is nothing."""
        world = self.world
        doubted = [each for each in attempts if each.doubt is not None and each.upload.kind == kind]
        scored = [(each.upload, each.scores) for each in doubted if each.scores is not None]
        lines = [line for _, scores in scored for line in scores.scores if line.chosen]
        guessed = [
            line
            for upload, _ in scored
            for line in score_guesses(self.guesses, upload.truth, world.dataset.std, perceptual=False).scores
        ]
        return bool(scored) and not is_above_guess(leakage_rates(world, lines), lines, guessed)

    def finish(self, heard: Sequence[_KnownUpload]) -> Leakage:
        """Score the guesses, and write all scores and pictures."""
        world, folder = self.world, self.folder
        self.progress.stage("scoring and writing the report")
        for upload in {id(upload): upload for upload in self.attacked.values()}.values():
            guessed = score_guesses(self.guesses, upload.truth, world.dataset.std, padded=world.experiment.report.pads)
            self.scored.append(guessed)
            save_pictures(folder, "original", upload.truth, dict(enumerate(upload.truth.images)))
            save_pictures(folder, "guess-class", upload.truth, guessed.pictures)
        tokenizer = None if world.dataset.text is None else world.dataset.text.tokenizer
        for guess in (each for each in self.guesses if each.pool is None):
            save_shared(folder, guess.name, guess.image, world.dataset.columns, tokenizer)
        earlier = [line for line in folder.scores() if _source(line) not in self.void]
        scores = _merged(earlier, [line for each in self.scored for line in each.scores])
        folder.write_scores(scores)
        rates = leakage_rates(world, (*scores, *self.silent))
        if any(rate.ceiling is not None for rate in rates):
            success, columns = world.experiment.adversary.success_ssim, world.dataset.columns
            chance = guessed_by_chance(self.images, self.guesses, success, columns)
            rates += recovery_rates(world, (*scores, *self.silent), chance)
        unread = len({upload.target for upload in heard} - self.attacked.keys())
        reasons = [each.lpips_reason for each in self.scored if each.lpips_reason]
        return Leakage(
            scores,
            reasons[-1] if reasons else None,
            tuple(self.refusals),
            self.damaged + unread,
            rates,
            self.seconds,
        )

    def _read(self, wanted: Sequence[UploadTarget]) -> list[_KnownUpload]:
        """Read observations and rebuild their examples; what is damaged or missing is named and left out."""
        world = self.world
        heard: list[_KnownUpload] = []
        asked = rounds_by_client(self.folder.asked())
        empty = 0
        for target in wanted:
            known = truth(world, target, asked)
            if len(known.images) == 0:
                empty += 1
                continue
            try:
                observation = read_target(world, self.folder, target)
            except InputError as error:
                self.damaged += 1
                self.refuse(Refusal(f"{target.title} is left out: {error}"))
                continue
            if Access.CANDIDATES in self.threat.grants:
                known = replace(known, candidates=candidates(world, target, known))
                observation = replace(observation, candidates=known.candidates)
                if known.candidates is None:
                    kind = world.dataset.kind
                    text = (
                        f"two of its {kind}s are the same, or there are no others, so there are no lists to pick from"
                    )
                    self.refuse(Refusal(f"{target.title}: {text}"))
            heard += [
                _KnownUpload(target, kind, part, known) for kind, part in _uploads(world, observation, target).items()
            ]
        if empty:
            text = f"{empty} attacked upload(s) held no example (Poisson sampling): there is nothing to recover"
            self.refuse(Refusal(text))
        return heard

    def _joined(self, heard: Sequence[_KnownUpload]) -> list[_KnownUpload]:
        """Put together each client's uploads of the same examples; where they are of others, say so and leave them."""
        groups = _groups(heard)
        if all(len(members) == 1 for members in groups.values()):
            self.refuse(Refusal("adversary.join_uploads: no client was observed more than once"))
            return list(heard)
        reasons = {
            key: other_batches([upload.observation for upload in members]) if len(members) > 1 else None
            for key, members in groups.items()
        }
        for reason in dict.fromkeys(reason for reason in reasons.values() if reason is not None):
            self.refuse(Refusal(f"adversary.join_uploads: {reason}"))
        joined: list[_KnownUpload] = []
        for key, members in groups.items():
            if reasons[key] is None:
                # All that was heard of the images up to the last of these rounds.
                known = replace(members[0].truth, releases=members[-1].truth.releases, optima=None)
                members = [replace(members[0], truth=known, more=tuple(upload.observation for upload in members[1:]))]
            joined += members
        return joined

    def _with_best_decisions(self, heard: list[_KnownUpload]) -> list[_KnownUpload]:
        """Have the referee know how often the best decision among the candidates of each protected upload is right."""
        world = self.world
        protected = [upload for upload in heard if upload.kind == PROTECTED]
        wanted = world.experiment.adversary.best_decision and world.dataset.text is None
        mechanism = world.experiment.mechanism
        # Of what is released without noise the likelihood is no number.
        if not wanted or not mechanism.protects or mechanism.filters or not protected:
            return heard
        self.progress.stage("computing the best decision among the candidates")
        known = {}
        for upload in protected:
            truth = upload.truth
            # In a batch, what is best for one answer an image is no limit for attacks that show pictures in any order.
            listed = truth.candidates
            if listed is None and len(truth.images) == 1:
                listed = candidates(world, upload.target, truth)
            if listed is None:
                continue
            doubt = self.check.mismatch(simulated_images, upload.observation)
            if doubt is not None:
                # What is best follows from how clients compute, as attacks simulate it.
                self.refuse(Refusal(f"best decision: not computed: {doubt.reason}"))
                return heard
            about = world.model, upload.observation, listed, truth.images, truth.used, world.experiment.seed
            try:
                optima = best_decisions(*about, labels_known=truth.labels_known)
            except AttackRefused as error:
                self.refuse(Refusal(f"best decision: {error}"))
                return heard
            known[upload.target] = replace(truth, optima=tuple(optima))
        return [
            replace(upload, truth=known[upload.target])
            if upload.kind == PROTECTED and upload.target in known
            else upload
            for upload in heard
        ]


def _misses(attack: PlannedAttack, attempts: Sequence[_Attempt], *, picked: bool) -> list[Score]:
    """Lines for the images of which an attack that can simulate the client says nothing."""
    lines: list[Score] = []
    for attempt in attempts:
        if attempt.scores is not None or attempt.doubt is None:
            made = () if attempt.scores is None else attempt.scores.scores
            lines += missed(attempt.upload.truth, attack.label, attempt.upload.kind, made, picked=picked)
    return lines


def _suits(attack: PlannedAttack, target: UploadTarget) -> bool:
    """Whether the clients were sent what the attack builds on: the model itself, or parameters made for it."""
    return bool(ATTACKS[attack.name].active()) == target.crafted


def _groups(heard: Sequence[_KnownUpload]) -> dict[tuple[tuple[int, ...], str, bool], list[_KnownUpload]]:
    """Uploads of the same clients, observed in the same way."""
    groups: dict[tuple[tuple[int, ...], str, bool], list[_KnownUpload]] = {}
    for upload in heard:
        groups.setdefault((upload.target.clients, upload.kind, upload.target.crafted), []).append(upload)
    return groups


def _stacked(heard: Sequence[_KnownUpload]) -> list[_KnownUpload]:
    """Each client's uploads of other batches, as one."""
    groups = [members for members in _groups(heard).values() if stackable([member.observation for member in members])]
    return [replace(members[0], truth=_union(members), stacked=tuple(members)) for members in groups]


def _union(members: Sequence[_KnownUpload]) -> Truth:
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


def _with_stacks(heard: Sequence[_KnownUpload], stacks: Sequence[_KnownUpload]) -> list[_KnownUpload]:
    """Stacks in place of the uploads that are in them."""
    inside = {(target, stack.kind) for stack in stacks for target in stack.targets}
    return [*(upload for upload in heard if (upload.target, upload.kind) not in inside), *stacks]


def _uploads(world: World, observation: Observation, target: UploadTarget) -> dict[str, Observation]:
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


def _failures(attack: PlannedAttack, attempts: Sequence[_Attempt], kind: str) -> list[Refusal]:
    """One for each upload that the attack failed on; one for all, where all failed for the same reason."""
    failed = [(attempt, worded(attempt.outcome.failure, kind)) for attempt in attempts if attempt.scores is None]
    reasons = {reason for _, reason in failed}
    if len(failed) == len(attempts) and len(reasons) == 1:
        return [Refusal(reasons.pop(), attack.label, void=any(attempt.void for attempt in attempts))]
    refusals: list[Refusal] = []
    for attempt, reason in failed:
        upload = attempt.upload
        alike = [each for each in failed if each[0].upload.kind == upload.kind and each[1] == reason]
        of_kind = [each for each in attempts if each.upload.kind == upload.kind]
        # What holds for the network holds for all uploads, and is said once.
        where = "" if attempt.void and len(alike) == len(of_kind) else upload.target.title
        refusals.append(Refusal(reason, attack.label, upload.kind, where, attempt.void))
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


def save_pictures(folder: RunFolder, what: str, known: Truth, pictures: Mapping[int, Tensor]) -> None:
    """Write images (C, H, W) on [0, 1] as PNG, or rows and sentences as JSON, numbered where a client has several."""
    sizes = Counter(known.place(number)[0] for number in range(len(known.images)))
    for number, image in pictures.items():
        client, place = known.place(number)
        name = picture_name(known.round, client, what, place if sizes[client] > 1 else None, "")
        save_shared(folder, name, image, known.columns, known.tokenizer)


def save_shared(
    folder: RunFolder, name: str, image: Tensor, columns: Sequence[ColumnSpec], tokenizer: Tokenizer | None = None
) -> None:
    """Write one image, the cells of one row, or one sentence and its tokens, under a name without ending."""
    if tokenizer is not None:
        tokens = bare(image)
        pieces = [tokenizer.decode([token]) for token in tokens]
        folder.write_json(
            f"reconstructions/{name}.json", {"text": tokenizer.decode(tokens), "tokens": tokens, "pieces": pieces}
        )
        return
    if not columns:
        folder.write_bytes(f"reconstructions/{name}.png", png(image))
        return
    texts = cell_texts(columns, image.flatten().cpu().numpy())
    cells = {column.name: text for column, text in zip(columns, texts, strict=True)}
    folder.write_json(f"reconstructions/{name}.json", cells)


_POLL_SECONDS = 1.0


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
    quiet = replace(job, model=still, progress=None)
    parts = [_TaskShare(replace(quiet, observations=mine), device, torch.get_num_threads()) for mine in shares]
    outcomes: dict[int, AttackOutcome] = {}
    done = 0
    for event in run_tasks(_attack_part, parts, RayResources.of(engine), _POLL_SECONDS):
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
