"""Tune an attack's weights on public images only: the adversary rehearses on uploads and noise of its own making."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedpriv.attacks.baselines import Guess, guesses
from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.intervals import median_interval
from fedpriv.attacks.observation import Observation, list_observations, read_observation
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.attacks.referee import Truth, score, score_guesses
from fedpriv.attacks.settings import Access, AttackSettings, known_attack
from fedpriv.attacks.threat import threat_model
from fedpriv.core.config import load_experiment, load_run
from fedpriv.core.config.rules import refuse_texts
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Interval
from fedpriv.core.lab.preflight import attack_warnings, simulation_check
from fedpriv.core.lab.results import attack_results
from fedpriv.core.lab.victims import UploadTarget, truth, upload_of
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret, numpy_stream, torch_stream
from fedpriv.core.records import RowResult, Score
from fedpriv.core.runs import RunFolder
from fedpriv.core.settings import wrong_value
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World, build_world
from fedpriv.data.datasets import unit_scale
from fedpriv.server.tap import observe, public_settings

# Weights of priors act over orders of magnitude; zero is the attack without the prior.
DEFAULT_GRID = ("0", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "1e-1")
MOST_TRIALS = 200
ROUND = 1


@dataclass(frozen=True)
class TuningTrial:
    """What one choice of settings did to the rehearsal's victims."""

    values: tuple[float, ...]  # of the tuned keys
    images: int  # how many there were
    mse: Interval  # median on the [0, 1] scale, with its interval over uploads
    psnr: float | None  # median, in dB; `None` of rows
    ssim: float | None  # median; likewise
    rows: RowResult | None  # what was read of a table's rows; `None`: these are images
    identified: int  # how many originals were told from 99 others


@dataclass(frozen=True)
class Tuning:
    """The results of tuning an attack."""

    attack: str  # the attack's name
    keys: tuple[str, ...]  # the tuned settings
    trials: tuple[TuningTrial, ...]  # one for each combination of their values
    guess_mse: float  # the median MSE of the best guess without any upload, on the same images

    @property
    def best(self) -> TuningTrial:
        """The trial with the lowest median MSE; of equal ones the first."""
        return min(self.trials, key=lambda trial: trial.mse.value)

    @property
    def beats_guess(self) -> bool:
        """Whether the best trial is better than the guess without any upload."""
        return self.best.mse.value < self.guess_mse

    @property
    def overrides(self) -> tuple[str, ...]:
        """What to pass as ``--set``; nothing where no setting is better than a guess."""
        if not self.beats_guess:
            return ()
        return tuple(
            f"adversary.{self.attack}.{key}={value}" for key, value in zip(self.keys, self.best.values, strict=True)
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader must know with the figures."""
        lines = [f"The best guess without any upload has a median MSE of {self.guess_mse:.5f} on the same images."]
        if not self.beats_guess:
            return (
                f"{lines[0]} No setting does better: with this mechanism and number of iterations the attack recovers "
                "nothing, whatever its weights.",
            )
        tried = zip(*(trial.values for trial in self.trials), strict=True)
        for key, value, values in zip(self.keys, self.best.values, tried, strict=True):
            if value == max(values) and len(set(values)) > 1:
                lines.append(f"{key} = {value:g} is the largest value tried; a larger one may do better (--grid).")
            if value == min(values) > 0 and len(set(values)) > 1:
                lines.append(f"{key} = {value:g} is the smallest value tried; a smaller one may do better (--grid).")
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the object as JSON types."""
        return {**asdict(self), "remarks": self.remarks, "best": asdict(self.best), "overrides": list(self.overrides)}


@dataclass(frozen=True, eq=False)
class _Victim:
    """One rehearsed upload; ``rows`` are those of its images among the public ones."""

    observation: Observation
    truth: Truth
    rows: Tensor


def tune_attack(
    source: Path, name: str, grid: Sequence[str], victims: int, overrides: Sequence[str], progress: Progress
) -> Tuning:
    """Try settings of an attack on uploads computed from public images, and return the results of each.

    Args:
        source: an experiment file, or the folder of a run. From a folder, the first parameters that the adversary
            observed are used; otherwise the initial ones.
        name: of the attack.
        grid: such as ``tv=1e-5,1e-4``; empty: the attack's tunable settings over seven orders of magnitude.
        victims: the number of uploads to compute.
        overrides: ``key=value`` for the experiment.
        progress: receives the events.

    Raises:
        InputError: source, attack, key or value is unknown; the threat model withholds public images or other knowledge
            that the attack needs; or there are too few public images.
    """
    attack = known_attack(name)
    if attack.active():
        raise InputError(f"{name} is an active attack: its settings decide what clients receive, and cannot be tuned")
    experiment = load_run(source, overrides) if source.is_dir() else load_experiment(source, overrides)
    refuse_texts(experiment, f"tuning {name}")
    refusal = threat_model(experiment.adversary).refusal(f"tuning {name}", (*attack.needs, Access.PUBLIC_DATA))
    if refusal is not None:
        raise InputError(refusal)
    values = _parsed(attack, grid)
    configs = _configs(attack, experiment.adversary.settings(name), values)
    world = build_world(experiment)
    for text in attack_warnings(world, [name]):
        progress.warn(text)
    with cpu_threads(experiment.engine.threads):
        before = _parameters(world, source)
        about = attack.simulation(), before.parameters, public_settings(experiment, world.dataset, world.plans[0])
        mismatch = simulation_check(world).at(*about)
        if mismatch is not None and mismatch.bars(attack):
            raise InputError(f"attack {name}: {mismatch.text}")
        rehearsed = _rehearse(world, before, victims)
        public = guesses(unit_scale(world.dataset.x_test), columns=world.dataset.columns)
        progress.stage(f"tuning {name} on {len(rehearsed)} uploads of public images: {len(configs)} settings")
        trials = tuple(_trial(world, attack, config, list(values), rehearsed, public, progress) for config in configs)
        guess = _guess_mse(rehearsed, public, world)
    return Tuning(name, tuple(values), trials, guess)


def _parsed(attack: type[AttackSettings], grid: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values to try for each key."""
    if not grid and not attack.tunable:
        raise InputError(f"{attack.name} has no weights to tune; name settings with --grid KEY=VALUE,VALUE")
    values: dict[str, tuple[str, ...]] = {} if grid else dict.fromkeys(attack.tunable, DEFAULT_GRID)
    for text in grid:
        key, separator, listed = text.partition("=")
        key = key.strip().removeprefix("adversary.").removeprefix(f"{attack.name}.")
        if not separator or not all(part.strip() for part in listed.split(",")):
            raise InputError(key="--grid", given=text, allowed="expected KEY=VALUE,VALUE, such as tv=1e-5,1e-4")
        if key not in attack.model_fields:
            raise InputError(
                key="--grid",
                given=text,
                allowed=f"{attack.name} has no setting {key}: {', '.join(attack.model_fields)}",
            )
        values[key] = tuple(part.strip() for part in listed.split(","))
    return values


def _configs(attack: type[AttackSettings], usual: BaseModel, values: dict[str, tuple[str, ...]]) -> list[BaseModel]:
    """Every combination of the values as settings of the attack."""
    combinations = list(itertools.product(*values.values()))
    if len(combinations) > MOST_TRIALS:
        raise InputError(f"--grid: {len(combinations)} combinations; at most {MOST_TRIALS} are allowed")
    trees = [{**usual.model_dump(), **dict(zip(values, chosen, strict=True))} for chosen in combinations]
    try:
        return [attack.model_validate(tree) for tree in trees]
    except ValidationError as error:
        raise wrong_value(error.errors()[0], attack.name).replaced(where="--grid") from None


def _parameters(world: World, source: Path) -> State:
    """What the clients start from, as far as the adversary knows it."""
    if source.is_dir():
        for path in list_observations(RunFolder.open(source).observations):
            return State(read_observation(path).parameters, world.initial.buffers)
    return world.initial


def _rehearse(world: World, before: State, victims: int) -> list[_Victim]:
    """Make uploads of public images, as clients make theirs, and observe them."""
    threat, federation = threat_model(world.experiment.adversary), world.experiment.federation
    together = 1 if Access.UPLOADS in threat.grants else federation.clients_per_round or federation.clients
    stage = _public_world(world, victims * together)
    heard = []
    for number in range(victims):
        clients = tuple(range(number * together, (number + 1) * together))
        known = truth(stage, UploadTarget(ROUND, clients))
        if len(known.images) == 0:
            continue  # an empty Poisson batch
        uploads = [
            upload_of(stage, client, before, ROUND, stage.secret.derived("rehearsal", client)) for client in clients
        ]
        (observation,) = observe(stage, ROUND, before, uploads)
        # Rehearsals of sums would all bear the number of a sum: each is a victim of its own.
        observation = replace(observation, client=clients[0])
        rows = torch.cat([stage.uploaded_rows(client, ROUND) for client in clients])
        heard.append(_Victim(observation, replace(known, client=clients[0]), rows))
    if not heard:
        raise InputError("every upload of the rehearsal was empty (Poisson sampling); try more --victims")
    return heard


def _public_world(world: World, clients: int) -> World:
    """A world of so many clients that hold public images only, with the public settings of the real first one."""
    template, dataset = world.plans[0], world.dataset
    count = len(dataset.y_test)
    size = min(template.sampling.examples, count)
    if template.sampling.batch_size > size:
        raise InputError(f"a batch needs {template.sampling.batch_size} images, and there are {count} public ones")
    own_seed = torch_stream(world.experiment.seed, "rehearsal").initial_seed()
    draws = [numpy_stream(own_seed, "images", client).choice(count, size, replace=False) for client in range(clients)]
    plans = [
        replace(template, client=client, seed=own_seed, sampling=replace(template.sampling, examples=size))
        for client in range(clients)
    ]
    public = replace(
        dataset, x_train=dataset.x_test, y_train=dataset.y_test, x_test=dataset.x_test[:0], y_test=dataset.y_test[:0]
    )
    partitions = tuple(np.sort(draw) for draw in draws)
    secret = Secret.of_seed(own_seed)
    return replace(world, dataset=public, partitions=partitions, plans=tuple(plans), secret=secret, unchanged=None)


def _trial(
    world: World,
    attack: type[AttackSettings],
    config: BaseModel,
    keys: Sequence[str],
    rehearsed: Sequence[_Victim],
    public: Sequence[Guess],
    progress: Progress,
) -> TuningTrial:
    values = tuple(getattr(config, key) for key in keys)
    label = ",".join(f"{key}={value:g}" for key, value in zip(keys, values, strict=True))
    heard = [victim.observation for victim in rehearsed]
    seed = torch_stream(world.experiment.seed, "rehearsal-attack").initial_seed()
    listener, known = partial(progress.attack_advanced, label), _unrehearsed(world, rehearsed)
    campaign = attack_each(AttackJob(attack.name, heard, world.model, config, seed, listener, public_images=known))
    if campaign.failures:
        number, reason = next(iter(campaign.failures.items()))
        raise InputError(f"{attack.name} cannot attack the rehearsal's upload {number + 1}: {reason}")
    threshold = world.experiment.adversary.success_ssim
    lines: list[tuple[int, Score]] = []
    for number, victim in enumerate(rehearsed):
        scored = score(
            campaign.found[number], "rehearsal", victim.truth, public, world.dataset.std, threshold, perceptual=False
        )
        lines += [(number, line) for line in scored.scores if line.chosen]
    scores = [line for _, line in lines]
    stream = numpy_stream(world.experiment.seed, "bootstrap")
    (result,) = attack_results(scores, threshold, None)
    return TuningTrial(
        values=values,
        images=len(scores),
        mse=median_interval([line.error for line in scores], stream, groups=[number for number, _ in lines]),
        psnr=result.psnr,
        ssim=result.ssim,
        rows=result.rows,
        identified=sum(line.rank == 1 for line in scores),
    )


def _unrehearsed(world: World, rehearsed: Sequence[_Victim]) -> Tensor:
    """The public images in no rehearsed upload, (M, C, H, W) on [0, 1]: what the attack may know beforehand."""
    kept = torch.ones(len(world.dataset.x_test), dtype=torch.bool)
    kept[torch.cat([victim.rows for victim in rehearsed])] = False
    return unit_scale(world.dataset.x_test[kept])


def _guess_mse(rehearsed: Sequence[_Victim], public: Sequence[Guess], world: World) -> float:
    """The lower of the guesses' medians."""
    errors: dict[str, list[float]] = {}
    for victim in rehearsed:
        for line in score_guesses(public, victim.truth, world.dataset.std, perceptual=False).scores:
            errors.setdefault(line.attack, []).append(line.error)
    return min(statistics.median(values) for values in errors.values())
