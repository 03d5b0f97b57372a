"""Run a copy of an app in Flower's simulation, in a process of its own, which observes mods, engines and strategies."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from fedpriv.core.config import read_toml
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.files import write_whole
from fedpriv.core.reading import Record, parse_json, read_file
from fedpriv.flower.app_settings import FILE, TapSettings, read_settings
from fedpriv.flower.audit.records import Answer, Round, StrategyLayer

RUN, SERVER, LOG = 1, "server.json", "simulation.log"
CLIENTS = 10  # as Flower's own projects simulate
_LEFT_OUT = (".git", ".venv", "venv", "__pycache__", "node_modules", "runs")


@dataclass(frozen=True)
class Simulated(Record):
    """What the server's process wrote down."""

    mods: tuple[str, ...] = ()  # outermost first
    layers: tuple[StrategyLayer, ...] = ()
    rounds: tuple[Round, ...] = ()
    problem: str = ""  # why there is no run; empty: there was one
    by_app: bool = False  # whether the app itself failed


def app_name(app: Path) -> str:
    """Return the name of an app."""
    if not app.is_dir():
        raise InputError(key="APP", given=str(app), allowed="no such folder")
    project = app / "pyproject.toml"
    told = read_toml(project) if project.is_file() else {}
    components = told.get("tool", {}).get("flwr", {}).get("app", {}).get("components", {})
    if not {"serverapp", "clientapp"} <= set(components):
        allowed = "no Flower app; allowed is a folder whose pyproject.toml has [tool.flwr.app.components]"
        raise InputError(key="APP", given=str(app), allowed=f"{allowed} with serverapp and clientapp")
    return str(told.get("project", {}).get("name", app.resolve().name))


def clients_of(app: Path) -> int:
    """Return how many clients the app's own simulation has, as its pyproject.toml says; 10 where it says nothing."""
    federations = read_toml(app / "pyproject.toml").get("tool", {}).get("flwr", {}).get("federations", {})
    usual = federations.get(federations.get("default", ""), {})
    return int(usual.get("options", {}).get("num-supernodes", CLIENTS))


@contextmanager
def copied(app: Path) -> Iterator[Path]:
    """Return a copy of an app's folder that is gone afterwards; links are followed, so that nothing leads back."""
    with TemporaryDirectory(prefix="fedpriv-audit-") as home:
        copy = Path(home) / "app"
        try:
            shutil.copytree(app, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT), ignore_dangling_symlinks=True)
        except (OSError, shutil.Error) as error:
            raise InputError(key="APP", given=str(app), allowed=f"it cannot be copied: {reason_of(error)}") from None
        try:
            yield copy
        except InputError as error:  # it is told of files that are gone by then
            raise InputError(str(error).replace(str(copy), str(app))) from None


def simulate(copy: Path, out: Path, clients: int, overrides: str) -> tuple[Simulated, tuple[Answer, ...]]:
    """Run a copy of an app in a process of its own; return what its server and its clients did."""
    if find_spec("ray") is None:
        raise InputError("Flower's simulation needs Ray: pip install 'fedpriv[ray]'")
    _overridden(overrides)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH", ""))))
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    own = {"PYTHONPATH": paths, "FLWR_HOME": str(copy.parent / "flwr"), "FEDPRIV_RUNS": str(out)}
    command = [sys.executable, "-m", "fedpriv.flower.audit.simulation", str(copy), str(out), str(clients), overrides]
    with (out / LOG).open("w") as log:
        code = _run_in_group(command, cwd=copy, env={**os.environ, **quiet, **own}, stdout=log, stderr=log)
    told = read_file(out / SERVER, Simulated)
    if told is None:
        raise InputError(f"the app ends its process with {code}; its output is in {out / LOG}")
    if told.problem:
        raise InputError(_failed(out, told.problem) if told.by_app else told.problem)
    return told, read_answers(out)


def _run_in_group(command: Sequence[str], **given: Any) -> int:
    """Run a program, and end all that it started, however it ends: Ray's processes outlive one that is stopped."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, **given) as process:
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _failed(out: Path, problem: str) -> str:
    """Why there is no run; the server's error often follows from a client's."""
    errors = (answer.error for answer in _written(out) if answer.error)
    client = next((f", after a client's {error}" for error in errors), "")
    return f"the app's copy fails: {problem}{client}; its output is in {out / LOG}"


def _written(out: Path) -> list[Answer]:
    """All answers, by client, each client's in order."""
    from fedpriv.flower.audit.observers import ANSWERS

    return [
        parse_json(line, Answer, f"{path}: line {number}")
        for path in sorted((out / ANSWERS).glob("*.jsonl"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


def read_answers(out: Path) -> tuple[Answer, ...]:
    """Return all answers, of which at least one is none of an error."""
    answers = _written(out)
    if not answers:
        raise InputError("the app's copy fails: its server asked no client")
    if all(answer.error for answer in answers):
        why = f"each client fails, the first with: {answers[0].error}"
        raise InputError(f"the app's copy fails: {why}; its output is in {out / LOG}")
    return tuple(answers)


def observe(copy: Path, out: Path, clients: int, overrides: str) -> Simulated:
    """Run a copy of an app in this process, with Ray's workers for its clients; whatever happens is told."""
    from fedpriv.flower.audit.observers import observing_mods, observing_strategies

    problem, by_app, mods, raised = "", False, list[str](), list[Exception]()
    with observing_strategies() as notes:
        try:
            near = next(iter(sorted(copy.rglob(FILE))), None)
            settings = read_settings(near).tap if near is not None else None
            with observing_mods(out, settings or TapSettings(), copy) as mods:
                _run(copy, out, clients, overrides, raised)
        except InputError as error:
            problem = str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (an app may raise anything)
            problem, by_app = reason_of(next(iter(raised), error.__cause__ or error)), True
    if notes.unread is not None:
        problem, by_app = str(notes.unread), False
    return Simulated(tuple(mods), notes.layers, tuple(notes.rounds), problem, by_app)


def _run(copy: Path, out: Path, clients: int, overrides: str, raised: list[Exception]) -> None:
    """Load both apps, and do what Flower does for ``flwr run`` on its simulation runtime."""
    from flwr.app import Context, RecordDict
    from flwr.common.config import get_fused_config_from_dir, get_project_config
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.telemetry import EventType

    from fedpriv.engines.inline import assume_server_identity
    from fedpriv.flower.audit.observers import ObservedApp

    assume_server_identity(RUN)
    run = Run.create_empty(RUN)
    run.primary_task_id, run.federation_id = RUN, NOOP_FEDERATION_ID
    run.override_config = _overridden(overrides)
    components = get_project_config(copy)["tool"]["flwr"]["app"]["components"]
    server = _loaded(components["serverapp"], copy)
    client = _loaded_apart(components["clientapp"], copy)
    config = get_fused_config_from_dir(copy, run.override_config)

    def observed(*given: Any, **named: Any) -> None:
        """Run the ServerApp and keep its error: Flower hides it where its own runtime fails as well."""
        try:
            server(*given, **named)
        except Exception as error:
            raised.append(error)
            raise

    _run_simulation(
        num_supernodes=clients,
        client_app=cast(Any, ObservedApp(client, out)),
        server_app=cast(Any, observed),
        server_app_context=Context(RUN, SUPERLINK_NODE_ID, {}, RecordDict(), config),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        app_dir=str(copy),
        is_app=True,
        run=run,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
    )


def _overridden(text: str) -> dict[str, Any]:
    """Keys of the run config, as Flower reads them from its command line."""
    from flwr.common.config import parse_config_args

    try:
        found = parse_config_args([text]) if text else {}
    except Exception as error:  # noqa: BLE001 (it is that of Flower's command line)
        raise InputError(key="--run-config", given=text, allowed=reason_of(error)) from None
    if text and not found:  # Flower leaves out what it does not read
        raise InputError(key="--run-config", given=text, allowed="allowed are keys and values, such as rounds=2 lr=0.1")
    return found


def _loaded(reference: str, copy: Path) -> Any:
    """An app of the copy; one that is installed elsewhere as well would run, and write, there."""
    from flwr.supercore.object_ref import load_app

    app = load_app(reference, ValueError, copy)
    found = getattr(sys.modules[reference.partition(":")[0]], "__file__", None)
    if found is not None and not Path(found).resolve().is_relative_to(copy.resolve()):
        raise InputError(f"{reference} is imported from {found}, which is not in the app's folder: uninstall it there")
    return app


def _loaded_apart(reference: str, copy: Path) -> Any:
    """The ClientApp: seeds that its module sets are not the server's, which has a process of its own elsewhere."""
    import numpy as np

    drawing: Any = np.random  # whose stubs leave its global generator out
    own = drawing.get_bit_generator()
    drawing.set_bit_generator(np.random.MT19937())
    try:
        return _loaded(reference, copy)
    finally:
        drawing.set_bit_generator(own)


def main(copy: str, out: str, clients: str, overrides: str) -> None:
    """Run an app, and write down what its server did."""
    told = observe(Path(copy), Path(out), int(clients), overrides)
    write_whole(Path(out) / SERVER, json.dumps(asdict(told), allow_nan=False).encode())
    sys.stdout.flush()
    os._exit(0)  # threads of a simulation that failed wait for what will not come


if __name__ == "__main__":
    main(*sys.argv[1:])
