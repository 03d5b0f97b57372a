"""Whether the SuperLink of a deployment answers."""

import ssl
import urllib.request
from http.client import HTTPException

from fedpriv.deploy.folder import DeploymentFolder, Record
from fedpriv.deploy.processes import is_alive

__all__ = ["answers", "is_serving"]

_SECONDS = 5.0


def answers(folder: DeploymentFolder, record: Record) -> bool:
    """Ask the SuperLink for its health; over TLS, its certificate is checked against the deployment's own authority."""
    if not record.insecure and not (folder.tls / "ca.pem").is_file():
        return False
    scheme = "http" if record.insecure else "https"
    context = None if record.insecure else ssl.create_default_context(cafile=str(folder.tls / "ca.pem"))
    # Not through a proxy: it is here, or on a machine that was named.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{record.server}/health", timeout=_SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, HTTPException):
        return False


def is_serving(folder: DeploymentFolder, record: Record) -> bool:
    """Whether there is a SuperLink to ask: by its process, or where that is in a container, by its answer."""
    return answers(folder, record) if record.is_contained else is_alive(record.process("superlink"))
