"""Attack the uploads that a network listener has stored, in a copy of the run's folder, as the network would."""

import shlex
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.files import stopped
from fedpriv.core.lab.attack_again import attack_run, copy_run, plan_attacks, write_attacked
from fedpriv.core.lab.attack_stage import Leakage
from fedpriv.core.lab.victims import UploadTarget
from fedpriv.core.progress import Progress
from fedpriv.core.records import Summary
from fedpriv.core.runs import DEPLOYMENT, RunFolder
from fedpriv.deploy.report import LISTENED, Listened, read_listened

# What a copy does not take over: what the server heard, and what came of it.
_LEFT_OUT = ("observations", "reconstructions", "report.html")


def attack_heard(
    path: Path,
    heard: Path,
    names: Sequence[str],
    victims: Sequence[str],
    overrides: Sequence[str],
    out: Path,
    command: str,
    progress: Progress,
) -> Summary:
    """Attack what the listener in ``heard`` has of the run in ``path``, in the copy ``out``; by default all."""
    source = RunFolder.open(path)
    listened = read_listened(heard)
    before = source.experiment()
    plan_attacks(before, before, names)
    stored = _stored(heard, source, listened)
    experiment = _overheard(before, names, listened, stored)
    if not experiment.adversary.attacks:
        raise InputError(f"{path}: its settings name no attack; name one with --attack")
    earlier = source.final_summary()
    folder = copy_run(source, out, leave_out=_LEFT_OUT)
    try:
        _put_in(folder, experiment, heard, stored.values())
        folder.write_summary(earlier.model_copy(update={"settings": folder.settings_digest()}))
        if not stored:
            return write_attacked(folder, experiment, folder.final_summary(), command, Leakage())
        progress.stage(listened.verdict)
        return attack_run(out, names, victims or [target.name for target in stored], overrides, None, command, progress)
    except InputError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    except OSError as error:
        # The copy is neither the run nor what was heard of it yet.
        shutil.rmtree(out, ignore_errors=True)
        raise stopped(error, command and f"{command} --out {shlex.quote(str(out))}") from None


def _stored(heard: Path, source: RunFolder, listened: Listened) -> dict[UploadTarget, Path]:
    """The observations of this run among what the listener has stored: what each is, and its tensor file."""
    deployed = source.deployed()
    if deployed is None:
        raise InputError(f"{source.path} is not the run of a deployment: it has no {DEPLOYMENT}")
    stored: dict[UploadTarget, Path] = {}
    for path in list_observations(heard / f"run-{deployed.run_id}" / "observations"):
        observation = read_observation(path)
        stored[UploadTarget(observation.round, (observation.client,))] = path
    if not stored and listened.uploads:
        others = {each.parent.name for each in heard.glob("run-*/observations") if any(each.iterdir())}
        known = f"it has heard {', '.join(sorted(others))}" if others else "the uploads that it has heard are gone"
        raise InputError(f"{heard} holds nothing of run {deployed.run_id}; {known}")
    answered = {record.round: {*record.used, *record.crafted} for record in source.rounds()}
    # The answers of a round that was cut off are in no line of the metrics.
    return {target: path for target, path in stored.items() if target.client in answered.get(target.round, ())}


def _overheard(
    before: Experiment, names: Sequence[str], listened: Listened, stored: Iterable[UploadTarget]
) -> Experiment:
    """The settings with the adversary on the network: everything but labels is in the messages."""
    rounds = tuple(sorted({target.round for target in stored}))
    changes = {
        "threat_model": "network-tls" if listened.is_encrypted else "network-plaintext",
        "attacks": tuple(names) or before.adversary.passive_attacks,
        "rounds": rounds or before.adversary.rounds,
        "victims": before.federation.clients,
        "knows_mechanism": True,
        "knows_batch_size": True,
        "knows_labels": False,
    }
    tree = before.model_dump()
    return validated(Experiment, {**tree, "adversary": {**tree["adversary"], **changes}}, "a listener on the network")


def _put_in(folder: RunFolder, experiment: Experiment, heard: Path, stored: Iterable[Path]) -> None:
    """Put what was heard in the place of what the server heard."""
    folder.write_text("config.toml", experiment.to_toml())
    for path in (file for tensors in stored for file in (tensors, tensors.with_suffix(".json"))):
        folder.write_bytes(f"observations/{path.name}", path.read_bytes())
    folder.write_bytes(LISTENED, (heard / LISTENED).read_bytes())
