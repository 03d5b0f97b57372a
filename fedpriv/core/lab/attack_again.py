"""More attacks on the observations of an earlier run, without training again; results are added to its folder."""

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from fedpriv.attacks.observation import list_observations
from fedpriv.attacks.settings import known_attack
from fedpriv.attacks.threat import threat_model
from fedpriv.core.config import Experiment, load_run
from fedpriv.core.config.rules import unsuited
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.files import is_empty, locked, target_error, writing
from fedpriv.core.finding import all_found
from fedpriv.core.finished import rebuilt_world
from fedpriv.core.lab.attack_stage import Leakage, PlannedAttack, attack_observations
from fedpriv.core.lab.preflight import attack_warnings
from fedpriv.core.lab.summary import Ending
from fedpriv.core.lab.victims import UploadTarget, chosen, read_target, targets
from fedpriv.core.progress import Progress
from fedpriv.core.records import Summary, kind_of
from fedpriv.core.registry import ATTACKS
from fedpriv.core.runs import RunFolder
from fedpriv.core.settings import named_once
from fedpriv.core.world import World

# What may be set: the attacks' own settings, where they run, whether the counterfactual is tried, and whether uploads
# of the same examples are attacked together.
_FREE = ("adversary.counterfactual", "adversary.join_uploads", "engine.device", "engine.threads")


def attack_run(
    path: Path,
    names: Sequence[str],
    victims: Sequence[str],
    overrides: Sequence[str],
    out: Path | None,
    command: str,
    progress: Progress,
) -> Summary:
    """Attack the observations of a run's folder, add the results, and return the new summary.

    An attack with the run's settings replaces its earlier results. With other settings, the results are added under a
    name that contains these, such as ``iga,tv=0.001``.

    Args:
        path: the run's folder.
        names: of attacks; empty: the attacks that the overrides name, else the run's.
        victims: names of the observations to attack, such as 1-3 for round 1, client 3; none: all.
        overrides: ``key=value``: settings of the attacks, the device, the threads, or adversary.counterfactual.
        out: copy the folder there and leave the run as it is; ``None``: add to the run's folder.
        command: the command that repeats the attack, for the report.
        progress: receives the events.

    Raises:
        InputError: the folder is no run's, has no observations, or is damaged; or an attack, victim or setting is
            unknown.
        RunFailedError: the results cannot be written.
    """
    source = RunFolder.open(path)
    before = source.experiment()
    experiment = load_run(path, _checked(overrides, names))
    attacks = plan_attacks(before, experiment, names or _meant(overrides))
    earlier = source.final_summary()
    if not attacks:
        raise InputError(f"{path}: its settings name no attack; name one with --attack: {_those(before)}")
    if not list_observations(source.observations):
        raise InputError(f"{path} holds no observations: {_why_none(before)}")
    world = rebuilt_world(source, experiment)
    wanted = chosen(targets(world, source), victims)
    _refuse_unsuited(attacks, wanted)
    _refuse_withheld(attacks, experiment)
    _refuse_unreadable(world, source, wanted)
    source.scores()  # what is wrong is told before anything is written and the attacks take their time
    folder = source if out is None else copy_run(source, out)
    warnings = attack_warnings(world, [attack.name for attack in attacks])
    for text in warnings:
        progress.warn(text)
    # In a copy everything is there that the attack needs: it goes on there.
    with locked(folder.path), writing(attack_command(folder.path, names, victims, overrides)):
        leakage = attack_observations(world, folder, attacks, progress, victims)
        return write_attacked(folder, before, earlier, command, leakage, warnings)


def _those(experiment: Experiment) -> str:
    """The attacks that read such data."""
    return ", ".join(name for name in ATTACKS if unsuited(experiment, name) is None)


def attack_command(
    path: Path, names: Sequence[str], victims: Sequence[str], overrides: Sequence[str], heard: Path | None = None
) -> str:
    """Return the command line that makes these attacks on the folder of a run, or on what a listener stored."""
    listened = [str(heard)] if heard else []
    options = (("--attack", names), ("--victim", victims), ("--set", overrides), ("--heard", listened))
    words = [word for option, values in options for value in values for word in (option, value)]
    return shlex.join(["fedpriv", "attack", str(path), *words])


def plan_attacks(before: Experiment, experiment: Experiment, names: Sequence[str]) -> tuple[PlannedAttack, ...]:
    """Name the attacks to make; one whose settings differ from the run's says in what."""
    named_once([f"attack {name}" for name in names])
    for name in names:
        known_attack(name)
        if reason := unsuited(before, name):
            raise InputError(f"attack {reason}")
    chosen = names or before.adversary.attacks
    joined = ["joined"] if experiment.adversary.join_uploads and not before.adversary.join_uploads else []
    plans = []
    for name in chosen:
        usual, config = before.adversary.settings(name), experiment.adversary.settings(name)
        plans.append(PlannedAttack(name, ",".join([name, *joined, *_differences(usual, config)]), config))
    return tuple(plans)


def _refuse_withheld(attacks: Sequence[PlannedAttack], experiment: Experiment) -> None:
    """Where the threat model withholds from every attack what it needs, nothing would change."""
    threat = threat_model(experiment.adversary)
    reasons = [threat.refusal(attack.name, ATTACKS[attack.name].needs) for attack in attacks]
    if all(reasons):
        raise InputError(
            f"attack {reasons[0]}; what the adversary knows belongs to a run: change it there, with fedpriv run"
        )


def _refuse_unsuited(attacks: Sequence[PlannedAttack], heard: Sequence[UploadTarget]) -> None:
    """What clients were sent cannot be changed afterwards: an active attack has to be part of the run."""
    crafted = {target.crafted for target in heard}
    for attack in attacks:
        active = ATTACKS[attack.name].active()
        if active and True not in crafted:
            raise InputError(
                f"attack {attack.name}: the clients of this run were sent the model, not parameters that were made for "
                f"{attack.name}; it has to be part of the run: adversary.attacks = ['{attack.name}']"
            )
        if not active and crafted == {True}:
            raise InputError(
                f"attack {attack.name}: the uploads are of parameters that an active server made, not of the "
                "model; make this attack on another run"
            )
        if active and attack.label != attack.name:
            raise InputError(
                f"--set adversary.{attack.name}: its settings decided what the clients were sent, and cannot be "
                "changed afterwards"
            )


def _differences(usual: BaseModel, config: BaseModel) -> list[str]:
    keys = [key for key in type(config).model_fields if getattr(config, key) != getattr(usual, key)]
    # The label is part of the pictures' names, too.
    return [re.sub(r"[^A-Za-z0-9.,=_+-]", "_", f"{key}={getattr(config, key)}") for key in keys]


def _meant(overrides: Sequence[str]) -> tuple[str, ...]:
    """The attacks whose settings are overridden."""
    keys = [text.partition("=")[0].strip().split(".") for text in overrides]
    return tuple(dict.fromkeys(key[1] for key in keys if len(key) == 3 and key[1] in ATTACKS))


def _checked(overrides: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """Refuse to change what the run is about: its results would no longer be those of one run."""
    for name in _meant(overrides):
        if names and name not in names:
            raise InputError(f"--set adversary.{name}: {name} is not among the attacks to make: {', '.join(names)}")
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not key.startswith("adversary.") and key.partition(".")[0] in ATTACKS:
            raise InputError(key="--set", given=key, allowed=f"write adversary.{key}")
        attack = key.removeprefix("adversary.").partition(".")[0]
        if key not in _FREE and not (key.startswith("adversary.") and attack in ATTACKS):
            raise InputError(
                key="--set",
                given=key,
                allowed="an existing run keeps its settings; what may be set here: adversary.NAME.KEY of an "
                f"attack ({', '.join(ATTACKS)}), {', '.join(_FREE)}",
            )
    return overrides


def _why_none(experiment: Experiment) -> str:
    adversary = experiment.adversary
    if not adversary.attacks:
        return "it was run with adversary.attacks = [], and then nobody listens"
    if not threat_model(adversary).grants_uploads:
        return f"the threat model {adversary.threat_model} withholds the uploads"
    return f"none of the rounds {list(adversary.rounds)} was finished"


def _refuse_unreadable(world: World, source: RunFolder, wanted: Sequence[UploadTarget]) -> None:
    """What is damaged is left out of an attack, with a warning; but something has to be left to attack."""
    reasons: list[InputError] = []
    for target in wanted:
        try:
            read_target(world, source, target)
            return
        except InputError as error:
            reasons.append(error)
    if reasons:
        raise InputError(f"no upload that is to be attacked can be read ({len(reasons)}): {reasons[0]}")


def copy_run(source: RunFolder, out: Path, leave_out: Sequence[str] = ()) -> RunFolder:
    """Copy the folder of a run, whole or not at all."""
    if out.exists() and not is_empty(out):
        raise InputError(f"{out} exists already; choose another --out")
    if out.resolve().is_relative_to(source.path.resolve()):
        raise InputError(f"{out} is inside {source.path}, which --out is to leave as it is; choose another --out")

    def ignored(folder: str, _: list[str]) -> Sequence[str]:
        return leave_out if Path(folder) == source.path else ()

    try:
        shutil.copytree(source.path, out, dirs_exist_ok=True, ignore=ignored)
    except shutil.Error as error:
        shutil.rmtree(out, ignore_errors=True)
        _, name, reason = error.args[0][0]  # of the first file; it goes on to the last
        raise RunFailedError(f"{name} cannot be written: {reason}; then give the same command again") from None
    except OSError as error:
        raise target_error(error, out) from None
    return RunFolder.open(out)


def _append_command(folder: RunFolder, command: str) -> None:
    """Commands are one a line in command.txt, the run's first; the same one is not repeated."""
    lines = folder.command().splitlines()
    if command not in lines:
        folder.write_text("command.txt", "".join(f"{line}\n" for line in [*lines, command]))


def write_attacked(
    folder: RunFolder,
    experiment: Experiment,
    earlier: Summary,
    command: str,
    leakage: Leakage,
    warnings: Sequence[str] = (),
) -> Summary:
    """Bring the attacks' part of a summary up to date, and write it; the rest stays as the run left it."""
    _append_command(folder, command)
    ending = Ending(
        experiment,
        earlier.status,
        folder.rounds(),
        earlier.ledger,
        leakage,
        kind_of(leakage.scores),
        earlier.stops,
        all_found(folder),
        is_next=earlier.data.task == "next",
        ledger=folder.ledger(),
        partition=folder.partition(),
    )
    changes = {
        **ending.of_attacks,
        "attack_seconds": {**earlier.attack_seconds, **leakage.seconds},
        "warnings": tuple(dict.fromkeys((*earlier.warnings, *warnings, *leakage.refused_words))),
        "refusals": tuple(dict.fromkeys((*earlier.refusals, *leakage.refused_words))),
        "command": folder.command(),
    }
    summary = earlier.model_copy(update=changes)
    folder.write_summary(summary)
    refuse_exceeded(rate.figure for rate in summary.rates)
    return summary
