"""Keys and admission for containers; each party has a folder (a volume) of its own and sees no other's keys."""

import os
import secrets
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import which

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import target_error, write_whole
from fedpriv.deploy import flower
from fedpriv.deploy.certificates import LIFETIME, Authority, alternative_name, end_of, is_valid, make_node_key
from fedpriv.deploy.folder import PRIVATE, DeploymentFolder, DeploymentRecord

NODE_KEY = "supernode"
_SERVER, _GATEWAY, _ADMISSION, _NODE = "superlink", "gateway", "admission", "supernode-"
_LOCAL = ("localhost", "127.0.0.1")
# Certificates with less than this left are made anew.
_MARGIN = timedelta(days=1)
_KNOCK_SECONDS = 3.0

DOWN = "docker compose --profile '*' down --volumes"
"""Stops the containers of all profiles; without the profiles, those of others than .env names stay."""

UP = "docker compose up --detach"

Address = tuple[str, int]


def prepare(
    path: Path,
    volumes: Path,
    nodes: int,
    port: int,
    insecure: bool,
    names: Sequence[str] = (),
    running: Address | None = None,
) -> bool:
    """Make certificates and keys for all parties, unless valid ones are there; return whether keys were made."""
    for name in names:
        alternative_name(name)  # says what no certificate can be made for
    _check_owner(path)
    folder = DeploymentFolder(path)
    if folder.is_up() and not folder.read().is_contained:
        raise InputError(f"a deployment of processes is up in {folder.path}; first: fedpriv deploy down")
    folder.create()
    try:
        made = not insecure and _make_keys(folder, volumes, nodes, names, running)
        folder.heard.mkdir(exist_ok=True, mode=0o700)
        folder.write(DeploymentRecord(nodes, port, insecure, (), is_contained=True))
    except OSError as error:
        raise target_error(error, error.filename) from None
    return made


def check_nodes(profiles: Sequence[str], nodes: int) -> None:
    """Refuse a number of SuperNodes that is not the one of the compose file's profiles."""
    wanted = 8 if "eight" in profiles else 3
    if any(profiles) and nodes != wanted:
        raise InputError(
            f"COMPOSE_PROFILES={','.join(profiles)} has {wanted} SuperNodes, and FEDPRIV_NODES={nodes}; "
            f"set FEDPRIV_NODES={wanted}"
        )


def take_down_containers(folder: DeploymentFolder) -> None:
    """Stop and remove the containers of all profiles, with their networks and volumes."""
    project = folder.path.parent
    if which("docker") is None or not (project / "docker-compose.yml").is_file():
        raise InputError(f"the deployment in {folder.path} runs in containers; where its compose file is: {DOWN}")
    done = subprocess.run(shlex.split(DOWN), cwd=project, check=False)
    if done.returncode:
        raise RunFailedError(f"{DOWN}: exit code {done.returncode}")
    folder.forget()


def _check_owner(path: Path) -> None:
    """Say whose folder this is, where it is not ours to write into."""
    for folder in (path, path / "seeds"):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            owner = folder.stat()
            raise InputError(
                f"{folder} belongs to user {owner.st_uid}, and this is user {os.geteuid()}; set "
                f"FEDPRIV_UID={owner.st_uid} and FEDPRIV_GID={owner.st_gid}, or change the owner of ./deployment"
            )


def _make_keys(
    folder: DeploymentFolder, volumes: Path, nodes: int, names: Sequence[str], running: Address | None
) -> bool:
    for party in (_SERVER, _GATEWAY, _ADMISSION, *(f"{_NODE}{number}" for number in range(nodes))):
        (volumes / party).mkdir(parents=True, exist_ok=True, mode=0o700)
    parties = {_SERVER: (_SERVER, *_LOCAL, *names), _GATEWAY: (_GATEWAY, *_LOCAL, *names)}
    parties |= {each.name: (each.name, *_LOCAL) for each in sorted(volumes.glob(f"{_NODE}*"))}
    public = folder.tls / "ca.pem"
    if all(_is_ready(volumes, party, hosts, public, _MARGIN) for party, hosts in parties.items()):
        return False
    if (
        running
        and _answers(running)
        and all(_is_ready(volumes, party, hosts, public, -LIFETIME) for party, hosts in parties.items())
    ):
        raise InputError(
            f"the certificates end on {end_of(public):%Y-%m-%d}, and services run with them; new ones are made by: "
            f"{DOWN}, then {UP}"
        )
    authority = Authority()
    for party, hosts in parties.items():
        authority.certify(volumes / party, hosts)
        write_whole(volumes / party / "executors.secret", secrets.token_bytes(32), mode=PRIVATE)
    for party in list(parties)[2:]:
        make_node_key(volumes / party / NODE_KEY)
        shown = (volumes / party / NODE_KEY).with_suffix(".pub").read_bytes()
        write_whole(volumes / _ADMISSION / f"{party}.pub", shown)
    for place in (volumes / _ADMISSION / "ca.pem", public):
        write_whole(place, authority.pem)
    return True


def _answers(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=_KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def _is_ready(volumes: Path, party: str, hosts: Sequence[str], public: Path, left: timedelta) -> bool:
    """Whether a party's files are there, of the present authority, and valid for a while under all its names."""
    files = [volumes / party / name for name in ("ca.pem", "server.pem", "server.key", "executors.secret")]
    if party.startswith(_NODE):
        files += [volumes / party / NODE_KEY, volumes / _ADMISSION / f"{party}.pub"]
    if not all(path.is_file() and path.stat().st_size for path in (*files, public)):
        return False
    if files[0].read_bytes() != public.read_bytes():
        return False
    return is_valid(volumes / party / "server.pem", datetime.now(UTC) + left, hosts)


@dataclass(frozen=True)
class Admission:
    """Whom the SuperLink lets in: SuperNodes that it knew already, and new ones, by name."""

    known: tuple[str, ...]
    new: tuple[str, ...]


def admit(server: str, keys: Path) -> Admission:
    """Let all SuperNodes take part whose public keys are in ``keys``."""
    # Flower's programs do not run in this folder.
    public = sorted(keys.absolute().glob(f"{_NODE}*.pub"), key=lambda each: (len(each.name), each.name))
    if not public:
        raise InputError(f"{keys} holds no public key of a SuperNode; first: fedpriv deploy prepare")
    with tempfile.TemporaryDirectory() as scratch:
        home = DeploymentFolder(Path(scratch))
        home.create()
        flower.write_connection(home, server, keys.absolute() / "ca.pem")
        new = tuple(each.stem for each in public if _register(home, each))
    return Admission(tuple(each.stem for each in public if each.stem not in new), new)


def _register(home: DeploymentFolder, key: Path) -> bool:
    """Whether the SuperLink did not know this key yet."""
    try:
        flower.register(home, key)
    except RunFailedError as error:
        if "already in use" in str(error):
            return False
        raise
    return True
