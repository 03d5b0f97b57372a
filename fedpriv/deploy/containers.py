"""Keys and admission for a deployment of containers.

Each party has a folder (a volume) of its own, and no party sees another's keys: ``superlink``, ``supernode-0`` and so
on, and ``admission``, with the public halves of the SuperNodes' keys.
"""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import target_error, write_whole
from fedpriv.deploy import flower
from fedpriv.deploy.certificates import Authority, alternative_name, is_valid, make_node_key
from fedpriv.deploy.folder import PRIVATE, DeploymentFolder, DeploymentRecord

NODE_KEY = "supernode"
_SERVER, _ADMISSION, _NODE = "superlink", "admission", "supernode-"
_LOCAL = ("localhost", "127.0.0.1")
# Certificates with less than this left are made anew.
_MARGIN = timedelta(days=1)


def prepare(path: Path, volumes: Path, nodes: int, port: int, insecure: bool, names: Sequence[str] = ()) -> bool:
    """Make certificates and keys for all parties, and write down the deployment.

    What is there and valid is kept, so that this may run before every start; where anything of it is missing, ends soon
    or lacks one of ``names``, all is made anew. Returns whether it was.
    """
    for name in names:
        alternative_name(name)  # says what no certificate can be made for
    folder = DeploymentFolder(path)
    if folder.is_up() and not folder.read().is_contained:
        raise InputError(f"a deployment of processes is up in {folder.path}; first: fedpriv deploy down")
    folder.create()
    try:
        made = not insecure and _make_keys(folder, volumes, nodes, names)
        folder.heard.mkdir(exist_ok=True, mode=0o700)
        folder.write(DeploymentRecord(nodes, port, insecure, (), is_contained=True))
    except OSError as error:
        raise target_error(error, error.filename) from None
    return made


def _make_keys(folder: DeploymentFolder, volumes: Path, nodes: int, names: Sequence[str]) -> bool:
    for party in (_SERVER, _ADMISSION, *(f"{_NODE}{number}" for number in range(nodes))):
        (volumes / party).mkdir(parents=True, exist_ok=True, mode=0o700)
    parties = {_SERVER: (_SERVER, *_LOCAL, *names)}
    parties |= {each.name: (each.name, *_LOCAL) for each in sorted(volumes.glob(f"{_NODE}*"))}
    public = folder.tls / "ca.pem"
    if all(_is_ready(volumes, party, hosts, public) for party, hosts in parties.items()):
        return False
    authority = Authority()
    for party, hosts in parties.items():
        authority.certify(volumes / party, hosts)
        write_whole(volumes / party / "executors.secret", secrets.token_bytes(32), mode=PRIVATE)
    for party in list(parties)[1:]:
        make_node_key(volumes / party / NODE_KEY)
        shown = (volumes / party / NODE_KEY).with_suffix(".pub").read_bytes()
        write_whole(volumes / _ADMISSION / f"{party}.pub", shown)
    for place in (volumes / _ADMISSION / "ca.pem", public):
        write_whole(place, authority.pem)
    return True


def _is_ready(volumes: Path, party: str, hosts: Sequence[str], public: Path) -> bool:
    """Whether a party's files are there, of the present authority, and valid for a while under all its names."""
    files = [volumes / party / name for name in ("ca.pem", "server.pem", "server.key", "executors.secret")]
    if party != _SERVER:
        files += [volumes / party / NODE_KEY, volumes / _ADMISSION / f"{party}.pub"]
    if not all(path.is_file() and path.stat().st_size for path in (*files, public)):
        return False
    if files[0].read_bytes() != public.read_bytes():
        return False
    return is_valid(volumes / party / "server.pem", datetime.now(UTC) + _MARGIN, hosts)


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
