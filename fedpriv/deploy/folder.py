"""The folder of a deployment: its record, keys, logs, and what its server writes."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedpriv.core.errors import InputError
from fedpriv.core.files import is_part, remove_parts, write_whole, writing_to
from fedpriv.deploy.processes import StartedProcess, is_alive

HOST = "127.0.0.1"

PRIVATE = 0o600
"""Permissions of a file that only its owner can read."""


@dataclass(frozen=True)
class DeploymentRecord:
    """What ``up`` started, for the commands that come after it."""

    nodes: int  # how many SuperNodes; node k holds partition k
    port: int  # of the SuperLink; SuperNode k listens for its executor on the (k + 1)-th port after it
    insecure: bool  # nothing is encrypted and nobody authenticated
    processes: tuple[StartedProcess, ...]  # what was started
    # Flower's number for each node, by partition; empty without authentication, where nodes get new ones
    node_ids: tuple[str, ...] = ()
    listens: bool = False  # an eavesdropper sits between the SuperNodes and the SuperLink
    # those that the apps see, by CUDA's names, shared out among the clients in turn; empty: all see all
    gpus: tuple[str, ...] = ()
    # the processes are not ours but containers', which whoever started them restarts and stops
    is_contained: bool = False

    @property
    def listener(self) -> str:
        """The listener's host and port: the port after those of the SuperNodes."""
        return f"{HOST}:{self.port + self.nodes + 1}"

    def gpu(self, name: str) -> str | None:
        """The GPU that the process of that name sees; ``None``: all that there are."""
        kind, _, partition = name.partition("-")
        return self.gpus[int(partition or 0) % len(self.gpus)] if self.gpus and kind.endswith("app") else None

    @property
    def ports(self) -> range:
        """All ports that the deployment listens on."""
        return range(self.port, self.port + self.nodes + 1 + self.listens)

    @property
    def server(self) -> str:
        """The SuperLink's host and port."""
        return f"{HOST}:{self.port}"

    def process(self, name: str) -> StartedProcess:
        """Return the process of that name."""
        return next(process for process in self.processes if process.name == name)

    def dead(self) -> tuple[StartedProcess, ...]:
        """The processes that no longer run."""
        return tuple(process for process in self.processes if not is_alive(process))


_RECORD = TypeAdapter(DeploymentRecord)


class DeploymentFolder:
    """The paths in a deployment's folder, which belongs to its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.tls = self.path / "tls"  # certificates
        self.keys = self.path / "keys"  # of the SuperNodes, and the executors' shared secret
        self.logs = self.path / "logs"  # what each process printed
        self.runs = self.path / "runs"  # where the server writes its runs
        self.seeds = self.path / "seeds"  # where clients and server find the seed of a run that is under way
        self.clients = self.path / "clients"  # what clients keep to themselves: their secrets, what they answered
        self.heard = self.path / "heard"  # what an eavesdropper has stored
        self.flower = self.path / "flower"  # Flower's own home: connections, and apps as they were sent
        self.programs = self.path / "programs"  # Flower's, run by the launcher, first on the search path
        self.database = self.path / "superlink.db"  # the SuperLink's state
        self._record = self.path / "deployment.json"

    def create(self) -> None:
        """Make the folder and its parts, for the owner's eyes only."""
        parts = (self.tls, self.keys, self.logs, self.runs, self.seeds, self.clients, self.flower, self.programs)
        known = {part.name for part in parts} | {self.database.name, self._record.name, self.heard.name, ".gitignore"}
        with writing_to(f"--dir {self.path}:"):
            entries = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
            strangers = {name for name in entries - known if not is_part(name)}
            if strangers:
                raise InputError(
                    key="--dir",
                    given=self.path,
                    allowed=f"is not the folder of a deployment, it holds {min(strangers)}",
                    hint="give another",
                )
            for part in (self.path, *parts):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)

    def is_up(self) -> bool:
        """Whether a deployment was started here and not taken down."""
        return self._record.is_file()

    def read(self) -> DeploymentRecord:
        """Return what ``up`` wrote down."""
        try:
            return _RECORD.validate_json(self._record.read_bytes())
        except FileNotFoundError:
            raise InputError(f"no deployment is up in {self.path}; start one with: fedpriv deploy up") from None
        except (OSError, ValidationError):
            raise InputError(
                f"{self._record} is damaged; end what still runs of the deployment by hand, then delete this file"
            ) from None

    def write(self, record: DeploymentRecord) -> None:
        """Write down what was started."""
        write_whole(self._record, _RECORD.dump_json(record, indent=2), mode=PRIVATE)

    def forget(self) -> None:
        """Remove the record, all keys, seeds, secrets and programs, and the SuperLink's state; logs and runs stay."""
        secrets = [
            entry
            for part in (self.tls, self.keys, self.seeds, self.clients, self.programs)
            for entry in part.glob("*")
            if entry.name != ".gitignore"  # which keeps the folder of seeds in a clone, for containers
        ]
        states = self.path.glob(f"{self.database.name}*")
        for path in (*secrets, *states, self._record):
            path.unlink(missing_ok=True)
        remove_parts(self.path)

    def last_words(self, name: str) -> str:
        """What a process said last in its log, in one line, for messages: why it ended, where it says so."""
        log = self.logs / f"{name}.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        lines = [line for raw in text.splitlines() if _SAYS.search(line := _COLOUR.sub("", raw).strip())]
        ends = [number for number, line in enumerate(lines) if "Exit Code:" in line]
        if ends:
            # Flower's way to give up: the code, and below it what happened.
            return " ".join(lines[ends[-1] + 1 : ends[-1] + 3])
        complaints = [line for line in lines if line.startswith("ERROR")]
        return (complaints or lines or ["it printed nothing"])[-1]


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Flower writes empty lines, too, with the level alone: "INFO :".
_SAYS = re.compile(r"^(?![A-Z]+\s*:$).")


def cannot_listen(address: str, error: OSError) -> InputError:
    """Say why nothing can listen on an address; asyncio and socket wrap the reason in sentences of their own."""
    why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return InputError(f"cannot listen on {address}: {why}")


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
