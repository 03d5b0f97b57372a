"""Check whether a deployment's SuperLink answers, and whether its certificates are valid."""

import ssl
import urllib.request
from datetime import UTC, datetime
from http.client import HTTPException

from fedpriv.core.errors import RunFailedError
from fedpriv.deploy.certificates import end_of
from fedpriv.deploy.folder import DeploymentFolder, DeploymentRecord
from fedpriv.deploy.processes import is_alive

_SECONDS = 5.0


def answers(folder: DeploymentFolder, record: DeploymentRecord) -> bool:
    """Ask the SuperLink for its health; over TLS, its certificate is checked against the deployment's own authority."""
    scheme = "http" if record.insecure else "https"
    try:
        context = None if record.insecure else ssl.create_default_context(cafile=str(folder.tls / "ca.pem"))
    except OSError:
        return False
    # Not through a proxy: it is here, or on a machine that was named.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{record.server}/health", timeout=_SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, HTTPException):
        return False


def is_serving(folder: DeploymentFolder, record: DeploymentRecord) -> bool:
    """Whether there is a SuperLink to ask: by its process, or where that is in a container, by its answer."""
    return answers(folder, record) if record.is_contained else is_alive(record.process("superlink"))


def check_certificates(folder: DeploymentFolder, record: DeploymentRecord) -> None:
    """Say why nothing over TLS will work, before Flower says that the SuperLink is unavailable."""
    if record.insecure:
        return
    path = folder.tls / "ca.pem"
    again = "docker compose up --detach" if record.is_contained else "fedpriv deploy up"
    anew = f"they are made anew by: fedpriv deploy down, then {again}"
    try:
        end = end_of(path)
    except (OSError, ValueError):
        raise RunFailedError(f"the certificates are gone: {path} is missing or damaged; {anew}") from None
    if end < datetime.now(UTC):
        raise RunFailedError(f"the certificates in {folder.tls} were valid until {end:%Y-%m-%d}; {anew}")
