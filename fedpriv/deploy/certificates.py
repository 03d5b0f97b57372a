"""Throw-away certificates and keys: an authority that exists for one deployment, whose key is never written down."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.deploy.folder import PRIVATE

LIFETIME = timedelta(days=30)
# Clocks of several machines differ a little.
_EARLIER = timedelta(minutes=5)
# A name as certificates hold it: labels of letters, digits and hyphens.
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE | re.ASCII)
_LONGEST_NAME = 253


class Authority:
    """Signs server certificates for as long as this object lives; its key is never written down."""

    def __init__(self, begin: datetime | None = None, lifetime: timedelta = LIFETIME) -> None:
        """Make the authority."""
        self._begin, self._lifetime = begin or datetime.now(UTC) - _EARLIER, lifetime
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedpriv throw-away authority")])
        self._certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The authority's own certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def certify(self, folder: Path, hosts: Sequence[str]) -> None:
        """Write ``ca.pem``, ``server.pem`` and ``server.key`` (readable by the owner only) into ``folder``."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        server = (
            self._builder(subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([alternative_name(host) for host in hosts]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_whole(folder / "ca.pem", self.pem)
        write_whole(folder / "server.pem", server.public_bytes(Encoding.PEM))
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_whole(folder / "server.key", secret, mode=PRIVATE)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        """What all certificates have; newer Pythons refuse certificates without the two key identifiers."""
        issuer = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._begin + self._lifetime)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )


def is_valid(certificate: Path, until: datetime, hosts: Sequence[str]) -> bool:
    """Whether a certificate is there, valid now and until then, and made for all these names and addresses."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
        return False
    in_time = loaded.not_valid_before_utc <= datetime.now(UTC) and until <= loaded.not_valid_after_utc
    return in_time and all(alternative_name(host) in names for host in hosts)


def end_of(certificate: Path) -> datetime:
    """Until when a certificate is valid."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key to ``path`` (owner only) and its public half next to it, with the suffix .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), mode=PRIVATE)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_whole(path.with_suffix(".pub"), public + b"\n")


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def alternative_name(host: str) -> x509.GeneralName:
    """Return a host as certificates name it; what no certificate can be made for is refused."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if len(host) > _LONGEST_NAME or not _NAME.fullmatch(host):
            raise InputError(
                f"{host!r} is no host: expected a name in ASCII or an address, without a port, such as fl.example.org"
            ) from None
        return x509.DNSName(host)
