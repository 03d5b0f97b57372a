"""Command lines of a deployment's processes, for one machine and for containers alike."""

import sys
from dataclasses import dataclass
from pathlib import Path, PurePath

LAUNCHED = ("flwr", "flwr-clientapp", "flwr-serverapp")
"""Flower's programs that start for each message or question."""
SERVING = ("flower-superlink", "flower-supernode", "flower-superexec")
"""Flower's programs that run as long as the deployment."""


@dataclass(frozen=True)
class Command:
    """One process."""

    name: str  # how people call it, such as `supernode-0`
    program: str  # a program of Flower's, `fedpriv`, or a path
    arguments: tuple[str, ...]  # its arguments


@dataclass(frozen=True)
class KeyFiles:
    """Where the files of TLS and of authentication are, as the process sees them."""

    authority: PurePath  # the certificate that all others are checked against
    certificate: PurePath  # of the server
    key: PurePath  # of the server's certificate
    secret: PurePath  # shared by a SuperLink or SuperNode and its executor


def superlink(host: str, port: int, database: PurePath, keys: KeyFiles | None) -> Command:
    """Return the server of a deployment."""
    arguments = ["--host", host, "--port", str(port), "--database", str(database)]
    arguments += ["--isolation", "process", "--disable-runtime-dependency-installation"]
    authentication = () if keys is None else ("--enable-supernode-auth",)
    return Command("superlink", "flower-superlink", (*arguments, *_serving(keys), *authentication))


def supernode(
    partition: int,
    partitions: int,
    server: str,
    host: str,
    port: int,
    keys: KeyFiles | None,
    node_key: PurePath | None,
) -> Command:
    """Return one client's node, which holds partition ``partition`` of ``partitions``."""
    arguments = ["--superlink", server, "--host", host, "--port", str(port), "--isolation", "process"]
    arguments += ["--node-config", f"partition-id={partition} num-partitions={partitions}"]
    if keys is not None:
        arguments += ["--root-certificates", str(keys.authority)]
    if node_key is not None:
        arguments += ["--auth-supernode-private-key", str(node_key)]
    return Command(f"supernode-{partition}", "flower-supernode", (*arguments, *_serving(keys)))


def executor(name: str, served: str, keys: KeyFiles | None) -> Command:
    """Return the process that runs the apps of a SuperLink or SuperNode."""
    trust: tuple[str, ...] = ("--insecure",)
    if keys is not None:
        trust = ("--root-certificates", str(keys.authority), "--superexec-auth-secret-file", str(keys.secret))
    return Command(name, "flower-superexec", ("--runtime-api-address", served, *trust))


def launcher(programs: PurePath) -> Command:
    """Return the process that the others fork from, and what starts for each message or question."""
    # -P: the modules beside the file are none of Python's.
    code = Path(__file__).with_name("launcher.py")
    return Command("launcher", sys.executable, ("-P", str(code), "serve", str(programs), *LAUNCHED, *SERVING))


def listener(host: str, port: int, server: str, heard: PurePath) -> Command:
    """Return the eavesdropper between the SuperNodes, which take it for the SuperLink, and the SuperLink."""
    arguments = ("deploy", "listen", "--host", host, "--port", str(port), "--server", server, "--heard", str(heard))
    return Command("listener", "fedpriv", arguments)


def _serving(keys: KeyFiles | None) -> tuple[str, ...]:
    if keys is None:
        return ("--insecure",)
    files = {"certfile": keys.certificate, "keyfile": keys.key, "ca-certfile": keys.authority}
    named = [part for flag, path in files.items() for part in (f"--ssl-{flag}", str(path))]
    return (*named, "--superexec-auth-secret-file", str(keys.secret))
