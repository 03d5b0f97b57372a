"""Throw-away certificates, judged by OpenSSL as Python's ssl module drives it."""

import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedpriv.deploy.certificates import Authority, make_node_key


def shake_hands(server: Path, authority: Path, host: str) -> None:
    """A TLS handshake in memory; raises what the client raises."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server / "server.pem", server / "server.key")
    asking = ssl.create_default_context(cafile=str(authority))
    asking.verify_flags |= ssl.VERIFY_X509_STRICT  # what newer Pythons do by default
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server, server_hostname=host)
    answering = serving.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() is not None
    assert client.getpeercert()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "superlink"])
def test_the_server_is_trusted_under_each_of_its_names(tmp_path: Path, host: str) -> None:
    Authority().certify(tmp_path, ("localhost", "127.0.0.1", "superlink"))
    shake_hands(tmp_path, tmp_path / "ca.pem", host)


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2"])
def test_no_other_name_is_trusted(tmp_path: Path, host: str) -> None:
    Authority().certify(tmp_path, ("localhost", "127.0.0.1"))
    with pytest.raises(ssl.SSLCertVerificationError, match=r"ismatch|not valid for"):
        shake_hands(tmp_path, tmp_path / "ca.pem", host)


def test_another_authority_does_not_vouch_for_it(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        Authority().certify(tmp_path / name, ("localhost",))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path / "ours", tmp_path / "theirs" / "ca.pem", "localhost")


@pytest.mark.parametrize("days", [-3, 2])
def test_outside_its_time_it_is_refused(tmp_path: Path, days: int) -> None:
    begin = datetime.now(UTC) + timedelta(days=days)
    Authority(begin, timedelta(days=1)).certify(tmp_path, ("localhost",))
    with pytest.raises(ssl.SSLCertVerificationError, match=r"expired|not yet valid"):
        shake_hands(tmp_path, tmp_path / "ca.pem", "localhost")


def test_secrets_are_the_owners_alone_and_the_authority_leaves_no_key(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        Authority().certify(tmp_path, ("localhost",))
        make_node_key(tmp_path / "node")
    finally:
        os.umask(previous)
    private = [path for path in tmp_path.iterdir() if b"PRIVATE KEY" in path.read_bytes()]
    assert {path.name for path in private} == {"server.key", "node"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)


def test_a_nodes_keys_are_halves_of_one_key_in_the_form_that_flower_reads(tmp_path: Path) -> None:
    make_node_key(tmp_path / "node")
    private = load_ssh_private_key((tmp_path / "node").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "node.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
