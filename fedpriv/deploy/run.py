"""Run an experiment on a deployment: send the app, follow its rounds, read its end from Flower, fetch what it wrote."""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import tomli_w

import fedpriv
from fedpriv.core.algorithm import algorithm_of, preparation_of
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.progress import Progress
from fedpriv.core.records import Deployed
from fedpriv.core.runs import DEPLOYMENT, RunFolder
from fedpriv.core.seeds import forget_seed, keep_seed, without_seed
from fedpriv.core.world import World
from fedpriv.deploy import flower
from fedpriv.deploy.flower import check_certificates, is_serving
from fedpriv.deploy.folder import DeploymentFolder, DeploymentRecord

ROUND_SECONDS = 600.0
"""How long a round waits for uploads where the experiment does not say: a machine that vanishes never answers."""

_LOOK_SECONDS, _STOP_SECONDS = 0.25, 60.0
# Each question to Flower is a process, and without a launcher to fork it one of two seconds of a CPU. Before the last
# round only a failure ends a run, most often in its beginning: then Flower is asked ever less often.
_SOONEST_SECONDS, _RAREST_SECONDS, _ENDING_SECONDS = 5.0, 30.0, 1.0
# A SuperLink that was killed is back within seconds where the container is started again.
_OUTAGE_SECONDS = 90.0
_GO_ON = (
    "docker compose ps shows what has ended, docker compose up --detach starts it again, and fedpriv run --resume DIR "
    "finishes the run"
)
_FILES = ("asked.jsonl", "metrics.jsonl", "labels.json", "observations/*", "checkpoint/*.safetensors")


def for_deployment(experiment: Experiment, path: Path) -> Experiment:
    """Return the experiment as the deployment in ``path`` can run it: rounds that wait for a limited time."""
    algorithm = algorithm_of(experiment)
    if algorithm.not_deployable:
        raise InputError(
            f"federation.algorithm = {algorithm.name!r} runs inline and on Ray; {algorithm.not_deployable}"
        )
    if experiment.mechanism.noise_at == "server":
        raise InputError(
            f"mechanism.name = {experiment.mechanism.name!r} runs inline and on Ray; deployments have no server's "
            "secret yet. 'distributed' needs none"
        )
    preparation = preparation_of(experiment)
    if experiment.adversary.attacks and preparation is not None and experiment.keeps_secret:
        raise InputError(
            f"{preparation.key} with adversary.attacks on a deployment: clients change labels by secrets of their own, "
            "and nobody could say what was trained with; set adversary.attacks = [] or noise = 'reproducible'"
        )
    folder = DeploymentFolder(path)
    record, clients = folder.read(), experiment.federation.clients
    if clients > record.nodes:
        start = f"fedpriv deploy up --nodes {clients}"
        more = "COMPOSE_PROFILES=eight FEDPRIV_NODES=8" if record.is_contained else start
        raise experiment.wrong(
            "federation.clients",
            f"the deployment in {folder.path} has {record.nodes} SuperNodes; --set federation.clients={record.nodes}, "
            f"or {more}",
        )
    _check_server(folder)
    check_certificates(folder, record)
    if record.is_contained:
        _connect(folder, record)
    if experiment.federation.round_timeout is not None:
        return experiment
    federation = experiment.federation.model_copy(update={"round_timeout": ROUND_SECONDS})
    return experiment.model_copy(update={"federation": federation})


def federate(path: Path, world: World, folder: RunFolder, progress: Progress) -> None:
    """Run the federation on the deployment in ``path``; however it ends, ``folder`` has what the server wrote."""
    deployment = DeploymentFolder(path)
    with _kept_seed(deployment, world) as seed, tempfile.TemporaryDirectory() as scratch:
        app = Path(scratch) / "app"
        make_app(app, world.experiment)
        run_id = flower.submit(deployment, app, {"experiment": EXPERIMENT, "overrides": "", "seed": seed})
        folder.write_json(DEPLOYMENT, asdict(Deployed(run_id)))
        served = RunFolder(deployment.runs / f"run-{run_id}")
        try:
            status = _follow(deployment, run_id, served, world.experiment, folder, progress)
        except BaseException:
            # Whatever ended the watch (Ctrl-C, a dead process): a run that nobody follows must not go on.
            _stop(deployment, run_id)
            raise
        finally:
            _fetch(served.path, folder)
    if not status.is_completed:
        raise RunFailedError(_why(status, deployment.read()))


def _why(status: flower.RunStatus, record: DeploymentRecord) -> str:
    """Say why a run did not end as it should."""
    said = " ".join(status.details.split()).removeprefix("ServerApp failed with exception: ")
    if "No heartbeat" in said:
        go_on = _GO_ON if record.is_contained else "fedpriv deploy restart starts what has ended; run --resume goes on"
        return f"the server's part of the run, or the SuperLink with it, was killed or hung; {go_on}"
    return said or f"Flower says that run {status.run_id} is {status.status}"


def _follow(
    deployment: DeploymentFolder,
    run_id: str,
    served: RunFolder,
    experiment: Experiment,
    folder: RunFolder,
    progress: Progress,
) -> flower.RunStatus:
    """Tell every round and every process that ends, until Flower says that the run is over."""
    last, missed, noticed, begun = -1, frozenset[str](), 0, time.monotonic()
    asked, outage = begun, _Outage(deployment, progress)
    while True:
        missed = _tell_missed(deployment, missed, progress)
        running = min(max(_SOONEST_SECONDS, asked - begun), _RAREST_SECONDS)
        between = _ENDING_SECONDS if last >= experiment.federation.rounds else running
        is_due = time.monotonic() - asked > between
        status = outage.status(run_id) if is_due else None
        asked = time.monotonic() if is_due else asked
        notices = served.notices()
        for text in notices[noticed:]:
            progress.warn(text)
        noticed = len(notices)
        for record in served.rounds():
            if record.round > max(last, 0):
                progress.round_finished(record, experiment.federation.rounds)
                # At once: the ledger must know who was asked, even where nothing else can be fetched.
                _fetch(served.path, folder, _FILES[:2])
            last = max(last, record.round)
        if status is not None and status.is_over:
            return status
        time.sleep(_LOOK_SECONDS)


@dataclass
class _Outage:
    """Asks Flower for a run's status; a SuperLink in a container that does not answer is asked again for a while."""

    deployment: DeploymentFolder
    progress: Progress
    since: float | None = None

    def status(self, run_id: str) -> flower.RunStatus | None:
        """Return the status; ``None`` where it is to be asked for later."""
        record = self.deployment.read()
        try:
            status = flower.run_status(self.deployment, run_id)
        except RunFailedError as error:
            # One that is only slow, on a busy machine, accepts connections all the while.
            is_away = isinstance(error, flower.NoAnswerError) or not is_serving(self.deployment, record)
            if not (record.is_contained and is_away):
                raise
            self._wait(record)
            return None
        if self.since is not None:
            self.progress.warn("the SuperLink answers again")
        self.since = None
        return status

    def _wait(self, record: DeploymentRecord) -> None:
        now = time.monotonic()
        if self.since is None:
            self.since = now
            self.progress.warn(f"the SuperLink, {record.server}, does not answer; retrying for {_OUTAGE_SECONDS:g} s")
        if now - self.since > _OUTAGE_SECONDS:
            raise RunFailedError(
                f"the SuperLink, {record.server}, has not answered for {_OUTAGE_SECONDS:g} s; {_GO_ON}"
            )


def _tell_missed(deployment: DeploymentFolder, known: frozenset[str], progress: Progress) -> frozenset[str]:
    """Name processes that have ended since the last look; without the server's the run cannot go on."""
    _check_server(deployment)
    dead = frozenset(process.name for process in deployment.read().dead())
    for name in sorted(dead - known):
        progress.warn(f"{name} has ended; start it again with: fedpriv deploy restart")
    return dead


def _check_server(deployment: DeploymentFolder) -> None:
    dead = [process.name for process in deployment.read().dead() if process.name in ("superlink", "serverapp")]
    for name in dead:
        raise RunFailedError(
            f"{name} of the deployment in {deployment.path} has died (last in its log: {deployment.last_words(name)}); "
            "start it again with: fedpriv deploy restart"
        )


def _connect(deployment: DeploymentFolder, record: DeploymentRecord) -> None:
    """Containers do not know under which paths their keys are here."""
    if not is_serving(deployment, record):
        raise RunFailedError(f"the SuperLink of the containers, {record.server}, does not answer; {_GO_ON}")
    flower.connect(deployment, record)


def _stop(deployment: DeploymentFolder, run_id: str) -> None:
    """Stop a run, if there is still a SuperLink to ask, and wait until its server no longer writes."""
    if not is_serving(deployment, deployment.read()):
        return
    deadline = time.monotonic() + _STOP_SECONDS
    # A refusal is no news: it says that the run is over, or that the SuperLink is going, too.
    with suppress(RunFailedError):
        flower.stop_run(deployment, run_id)
        while not flower.run_status(deployment, run_id).is_over and time.monotonic() < deadline:
            time.sleep(_ENDING_SECONDS)


def _fetch(served: Path, folder: RunFolder, patterns: tuple[str, ...] = _FILES) -> None:
    """Copy what the server has written so far; the checkpoint last, since a resumed run relies on all before it."""
    for pattern in patterns:
        for path in sorted(served.glob(pattern)):
            if not path.name.startswith("."):
                folder.write_bytes(str(path.relative_to(served)), path.read_bytes())


@contextmanager
def _kept_seed(deployment: DeploymentFolder, world: World) -> Iterator[str]:
    """Leave the seed for server and clients until the run ends, also where SIGTERM ends it."""
    is_main = threading.current_thread() is threading.main_thread()
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    name = keep_seed(deployment.seeds, world.experiment, world.secret)
    try:
        yield name
    finally:
        forget_seed(deployment.seeds, name)
        if is_main:
            signal.signal(signal.SIGTERM, usual)


EXPERIMENT = "experiment.toml"
"""The experiment's file inside the app."""


def make_app(folder: Path, experiment: Experiment) -> None:
    """Write the app into ``folder``, which must not exist yet, with the code, so that all machines run the same."""
    shutil.copytree(Path(fedpriv.__file__).parent, folder / "fedpriv", ignore=_only_python)
    (folder / EXPERIMENT).write_text(without_seed(experiment).to_toml(), encoding="utf-8")
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_project()), encoding="utf-8")


def _project() -> dict[str, object]:
    """What Flower wants to know; the apps and settings are those of the project's own pyproject.toml."""
    app = {
        "publisher": "fedpriv",
        "fab-include": ["fedpriv/**/*.py", EXPERIMENT],
        "components": {"serverapp": "fedpriv.server.app:app", "clientapp": "fedpriv.clients.app:app"},
        "config": {"experiment": EXPERIMENT, "overrides": "", "seed": ""},
    }
    project = {
        "name": "fedpriv",
        "version": version("fedpriv"),
        "description": "A crash-test lab for federated learning.",
        "license": "Apache-2.0",
        "dependencies": [],
    }
    return {"project": project, "tool": {"flwr": {"app": app}}}


def _only_python(folder: str, names: list[str]) -> list[str]:
    return [
        name for name in names if name == "__pycache__" or not (name.endswith(".py") or (Path(folder) / name).is_dir())
    ]
